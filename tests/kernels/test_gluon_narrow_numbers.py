"""The Hopper forward of e4m3 tensors on such a chip: its numbers, what it must not see, and how exact it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import gluon_forward_cases as wide
import msgspec
import pytest
import torch
from kernel_cases import NAN_BYTE, with_lengths
from quantised_calls import check_calls
from support import CPU, Device, random_call
from test_quantised_accuracy import INPUTS, rms
from variantchip import assert_variant_right, device_for

import portattn
from portattn import Problem
from portattn.backends.cuda.hopper_forward.narrow_variant import NarrowLauncher, NarrowVariant
from portattn.launch.variant import launch_tensors, run_variant
from portattn.schema.call import Call
from portattn.schema.tensors import KV_STORED
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import judge, nan_filled_memory, on_cpu

VARIANT = NarrowVariant()
NARROW: dict[str, Any] = {"kv_format": "e4m3", "kv_scales": "head"}
BASE = msgspec.structs.replace(wide.BASE, **NARROW)
PACKED = msgspec.structs.replace(wide.PACKED, **NARROW)


def problem(base: Problem = BASE, **fields: Any) -> Problem:
    return msgspec.structs.replace(base, **fields)


@pytest.fixture
def chip(device: Device) -> Device:
    """A device that the kernel is for."""
    return device_for(VARIANT, BASE, device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", wide.CAUSAL)
@pytest.mark.parametrize("name", wide.SIZES)
def test_numbers(chip: Device, name: str, causal: str, head_dim: int) -> None:
    for scales in ("head", "none"):
        p = problem(causal=causal, head_dim=head_dim, head_dim_v=head_dim, kv_scales=scales, **wide.SIZES[name])
        assert_variant_right(VARIANT, random_call(p, 1, device=chip.name))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", wide.WINDOWS, ids=str)
def test_windows(chip: Device, window: tuple[int, int], head_dim: int) -> None:
    left, right = window
    for sizes in ({}, {"seq_q": 500, "seq_k": 260}, {"seqlens_q": True, "seqlens_k": True}):
        p = problem(head_dim=head_dim, head_dim_v=head_dim, window_left=left, window_right=right, **sizes)
        assert_variant_right(VARIANT, random_call(p, 3, device=chip.name))


@pytest.mark.parametrize("head_dim", [16, 48, 80, 96, 144, 160, 192, 240])
def test_heads_between_the_kernel_s_widths(chip: Device, head_dim: int) -> None:
    for causal in wide.CAUSAL:
        p = problem(head_dim=head_dim, head_dim_v=head_dim, causal=causal)
        assert_variant_right(VARIANT, random_call(p, 5, device=chip.name))


@pytest.mark.parametrize("widths", [(80, 112), (144, 208), (192, 144)], ids=str)
def test_keys_and_values_of_two_widths(chip: Device, widths: tuple[int, int]) -> None:
    p = problem(head_dim=widths[0], head_dim_v=widths[1], causal="bottom_right")
    assert_variant_right(VARIANT, random_call(p, 5, device=chip.name))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", wide.CAUSAL)
@pytest.mark.parametrize("name", wide.ROWS)
def test_packed(chip: Device, name: str, causal: str, head_dim: int) -> None:
    queries, keys = zip(*wide.ROWS[name], strict=True)
    for fields in ({}, {"sinks": True, "softcap": True}, {"window_left": 30}):
        p = problem(
            PACKED, batch=len(queries), seq_q=max(1, *queries), seq_k=max(1, *keys), total_q=sum(queries) + 3,
            total_k=sum(keys) + 3, causal=causal, head_dim=head_dim, head_dim_v=head_dim, **fields,
        )  # fmt: skip
        assert_variant_right(VARIANT, with_lengths(random_call(p, 7, device=chip.name), keys, queries))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", wide.FEW_TILES)
def test_keys_of_few_tiles_are_split(chip: Device, name: str, head_dim: int) -> None:
    fields = {"batch": 1, "heads_q": 2, "heads_k": 1} | wide.FEW_TILES[name]
    p = problem(causal="bottom_right", head_dim=head_dim, head_dim_v=head_dim, **fields)
    assert_variant_right(VARIANT, random_call(p, 1, device=chip.name))


def test_a_scale_of_nothing(chip: Device) -> None:
    assert_variant_right(VARIANT, random_call(problem(causal="bottom_right"), 2, device=chip.name, scale=0.0))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", wide.UNSEEN)
def test_what_no_row_sees_may_be_anything(chip: Device, name: str, head_dim: int) -> None:
    fields, keys = wide.UNSEEN[name]
    call = random_call(problem(head_dim=head_dim, head_dim_v=head_dim, **fields), 3, device=chip.name)
    expected = run_variant(VARIANT, call)[1]
    for spoilt in ("k", "v"):
        getattr(call, spoilt)[:, :, keys] = NAN_BYTE
        assert torch.equal(run_variant(VARIANT, call)[1], expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_neighbours_may_hold_anything(chip: Device, head_dim: int) -> None:
    queries, keys = (100, 1, 130, 69), (70, 33, 200, 97)
    p = problem(PACKED, head_dim=head_dim, head_dim_v=head_dim, total_q=303, total_k=403, seq_q=130, seq_k=200)
    call = with_lengths(random_call(p, 7, device=chip.name), keys, queries)
    expected = run_variant(VARIANT, call)[1]
    spoilt = dataclasses.replace(call, q=call.q.clone(), k=call.k.clone(), v=call.v.clone())
    for tensor, lengths in ((spoilt.q, queries), (spoilt.k, keys), (spoilt.v, keys)):
        tensor[:, :, lengths[0] : lengths[0] + lengths[1]] = NAN_BYTE
    out = run_variant(VARIANT, spoilt)[1]
    others = torch.ones(p.query_rows[1], dtype=torch.bool, device=out.device)
    others[100:101] = False
    assert torch.equal(out[:, :, others], expected[:, :, others])


@pytest.mark.parametrize("wild", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_sequence_without_keys_may_have_any_scale(chip: Device, wild: float) -> None:
    padded = random_call(problem(causal="bottom_right", seqlens_k=True), 3, device=chip.name)
    assert padded.seqlens_k is not None
    padded.seqlens_k[0] = 0
    p = problem(PACKED, batch=3, total_q=233, total_k=303, seq_q=100, seq_k=200)
    ragged = with_lengths(random_call(p, 7, device=chip.name), (0, 200, 103), (100, 33, 100))
    for call in (padded, ragged):
        for name in ("q_scale", "k_scale", "v_scale"):
            getattr(call, name)[0] = wild
        _, out, lse = run_variant(VARIANT, call)
        rows = (0, slice(None), slice(100)) if call is ragged else 0
        assert lse is not None
        assert not out[rows].any()
        assert lse[rows].isneginf().all()


def assert_schedule_right(call: Call, **changes: Any) -> None:
    """The call by its own schedule, changed so, against float64."""
    launcher = VARIANT.described(call)
    assert isinstance(launcher, NarrowLauncher)
    with nan_filled_memory():
        tensors = launch_tensors(call)
    NarrowLauncher(call, msgspec.structs.replace(launcher.schedule, **changes))(tensors)
    facts = judge(call, tensors["out"], tensors["lse"], probabilities=VARIANT.probabilities)
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]
    assert facts["lse_error"] <= facts["lse_budget"]


@pytest.mark.parametrize(("kept", "halved"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("turns", [False, True])
def test_schedules(chip: Device, turns: bool, keys: int, kept: bool, halved: bool) -> None:
    call = random_call(problem(**wide.SIZES["many tiles"]), 3, device=chip.name)
    assert_schedule_right(call, kept=kept, halved=halved, keys=keys, turns=turns)


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("groups", [2, 3])
def test_schedules_of_narrow_heads(chip: Device, groups: int, halved: bool) -> None:
    for fields in (wide.SIZES["many tiles"], {"causal": "bottom_right", "seq_q": 700, "seq_k": 1900}):
        call = random_call(problem(head_dim=64, head_dim_v=64, **fields), 3, device=chip.name)
        assert_schedule_right(call, groups=groups, halved=halved)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("turns", [False, True])
def test_schedules_of_wide_heads(chip: Device, turns: bool, keys: int, queries: int) -> None:
    for fields in (wide.SIZES["many tiles"], {"causal": "bottom_right", "seq_q": 700, "seq_k": 1900}):
        call = random_call(problem(head_dim=256, head_dim_v=256, **fields), 3, device=chip.name)
        assert_schedule_right(call, keys=keys, stages=256 // keys, turns=turns, queries=queries, parts=queries)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_sums_of_values_that_have_a_mean_are_kept_in_float32(chip: Device, head_dim: int) -> None:
    """In the chip's own sums 16,384 keys of mean 2 lose 7 per cent."""
    q, k, v = INPUTS["normal"](head_dim, 16384)
    call = narrow_call((q, k, v + 2.0), chip.name)
    out = run_variant(VARIANT, call)[1].cpu().double()
    exact, _ = oracle(on_cpu(call))
    assert rms(out - exact) < 4e-3 * rms(exact)


def narrow_call(inputs: tuple[torch.Tensor, ...], device: str) -> Call:
    q, k, v = inputs
    p = problem(
        batch=1, heads_q=q.shape[1], heads_k=k.shape[1], seq_q=q.shape[2], seq_k=k.shape[2], head_dim=q.shape[3],
        head_dim_v=v.shape[3],
    )  # fmt: skip
    call = random_call(p, device=device)
    made = portattn.quantize(*(t.to(device) for t in inputs), "e4m3")
    call.q, call.k, call.v = (t.view(KV_STORED) for t in (made.q, made.k, made.v))
    call.q_scale, call.k_scale, call.v_scale = made.q_scale, made.k_scale, made.v_scale
    return call


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("what", INPUTS)
def test_rounding_probabilities_is_all_that_is_lost(chip: Device, what: str, head_dim: int) -> None:
    """The error is at most 1.2 times that of exact attention whose probabilities are rounded so."""
    call = narrow_call(INPUTS[what](head_dim, 4096), chip.name)
    out = run_variant(VARIANT, call)[1].cpu().double()
    exact, _ = oracle(on_cpu(call))
    modelled = modelled_output(on_cpu(call))
    assert rms(out - exact) <= 1.2 * rms(modelled - exact)


def modelled_output(call: Call) -> torch.Tensor:
    """Attention in float64 but for its probabilities, and its result."""
    assert call.q_scale is not None
    assert call.k_scale is not None
    assert call.v_scale is not None
    q, k, v = (t.view(torch.float8_e4m3fn).double() for t in (call.q, call.k, call.v))
    scores = q @ k.mT * (call.q_scale * call.k_scale)[..., None, None] * call.scale
    numbers = torch.exp(scores - scores.amax(-1, keepdim=True))
    narrow = (numbers * 256).float().to(torch.float8_e4m3fn).double() / 256
    return (narrow @ v / numbers.sum(-1, keepdim=True) * call.v_scale[..., None, None]).bfloat16().double()


# How far quantising alone moves the LSE, by 0.07, 0.55 and 0.55 with an H200's random numbers, and a third more.
E4M3_LSE = (0.1, 0.75, 0.75)


@pytest.mark.parametrize("causal", [False, True])
def test_calls_by_the_public_functions(chip: Device, causal: bool) -> None:
    """The second call is launched directly, with other scales and other memory; each takes the kernel."""
    # Against what is stored an H200 had a similarity of 0.99973 and an LSE within 0.007; 0.9962 against what was given.
    check_calls(chip, VARIANT.name, "e4m3", causal, 0.9996, 0.996, lse_within=2e-2, given_lse=E4M3_LSE)


@pytest.mark.parametrize("causal", [False, True])
def test_the_same_calls_by_the_reference(causal: bool) -> None:
    """What e4m3 loses is no kernel's: the limits hold where nothing else is lost."""
    check_calls(CPU, "reference", "e4m3", causal, 0.9999, 0.996, given_lse=E4M3_LSE)


def test_a_graph_replays_it(chip: Device) -> None:
    torch.manual_seed(0)
    narrow = portattn.quantize(*torch.randn(3, 1, 4, 700, 128, device=chip.name).unbind(), "e4m3")
    given = narrow.arguments() | {"backend": VARIANT.name}
    expected = portattn.attention(**given)
    assert portattn.last_plan().path == VARIANT.name
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        portattn.attention(**given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = portattn.attention(**given)
    out.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
