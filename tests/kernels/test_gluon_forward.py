"""The scheduled forwards of sm_90 on such a chip: their numbers, and what they must not see or touch."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from gluon_forward_cases import BASE, CAUSAL, FEW_TILES, PACKED, ROWS, SIZES, UNSEEN, VARIANT, WINDOWS, problem
from kernel_cases import NAN_BYTE, with_lengths
from support import random_call
from variantchip import assert_variant_right, device_for

import portattn
from portattn.backends.cuda.hopper_forward.other_variants import Fp8Variant, Int8Variant
from portattn.launch.run import run_variant
from portattn.planning.backend import Variant
from portattn.schema.call import TENSORS
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import nan_filled_memory, on_cpu


class Kind(NamedTuple):
    """One kernel of the forward, and what its problems have beside the shared tables'.

    between  (D, Dv) beside the kernel's own widths
    turns    fields, seed and extreme lengths of each run of a table's problem
    spoils   tensors and the number in their place, one after the other"""

    variant: Variant
    fields: dict[str, Any]
    widths: tuple[int, ...]
    between: tuple[tuple[int, int], ...]
    causal: tuple[str, ...]
    turns: tuple[tuple[dict[str, Any], int, bool], ...]
    spoils: tuple[tuple[str, float], ...]


NAN = float("nan")
KINDS = {
    "16 bits": Kind(
        VARIANT, {}, (64, 128, 256),
        ((8, 8), (40, 40), (40, 32), (72, 72), (72, 64), (96, 96), (136, 136), (136, 128), (192, 192)), CAUSAL,
        (({}, 0, True), ({}, 1, True)), (("k v", NAN), ("k v", float("inf"))),
    ),
    "e4m3": Kind(
        Fp8Variant(), {"kv_format": "e4m3", "kv_scales": "head"}, (64, 128, 256),
        (*((n, n) for n in (16, 48, 80, 96, 144, 160, 192, 240)), (80, 112), (144, 208), (192, 144)), ("bottom_right",),
        (({}, 1, False), ({"kv_scales": "none"}, 1, False)), (("k", NAN_BYTE), ("v", NAN_BYTE)),
    ),
    "int8": Kind(
        Int8Variant(), {"kv_format": "int8", "kv_scales": "token"}, (64, 128),
        ((16, 16), (48, 48), (80, 112), (96, 72)), ("bottom_right",),
        (({"dtype": "fp16"}, 1, False), ({"dtype": "bf16"}, 1, False)), (("k", 127), ("k_scale", NAN), ("v", NAN)),
    ),
}  # fmt: skip
WIDTHS = [(kind, head_dim) for kind in KINDS for head_dim in KINDS[kind].widths]
PARTS = [(kind, head_dim, causal) for kind, head_dim in WIDTHS for causal in KINDS[kind].causal]


def of(kind, head_dim=128, base=BASE, **fields):
    """A problem of the kind; int8 takes no softcap, and 16 bits alone take functions."""
    if kind == "int8":
        fields["softcap"] = False
    if kind != "16 bits":
        fields |= {"score_mod": "", "mask_mod": "", "block_mask": False, "block_q": 128, "block_k": 128}
    return problem(base, **{"head_dim": head_dim, "head_dim_v": head_dim} | KINDS[kind].fields | fields)


@pytest.fixture
def chip(device):
    return device_for(VARIANT, BASE, device)


def assert_right(call, kind="16 bits"):
    assert_variant_right(KINDS[kind].variant, call)


@pytest.mark.parametrize(("kind", "head_dim"), WIDTHS)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("name", SIZES)
def test_numbers(chip, name, causal, kind, head_dim):
    for more, seed, extremes in KINDS[kind].turns:
        p = of(kind, head_dim, **more | {"causal": causal} | SIZES[name])
        assert_right(random_call(p, seed, device=chip.name, extremes=extremes), kind)


@pytest.mark.parametrize(("kind", "head_dim"), WIDTHS)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(chip, window, causal, kind, head_dim):
    sides = {"window_left": window[0], "window_right": window[1] if causal == "none" else -1}
    for sizes in (
        {}, {"seq_q": 500, "seq_k": 260}, {"seq_q": 130, "seq_k": 900}, {"seqlens_q": True, "seqlens_k": True},
    ):  # fmt: skip
        p = of(kind, head_dim, causal=causal, **sides, **sizes)
        assert_right(random_call(p, 3, device=chip.name, extremes=KINDS[kind].turns[0][2]), kind)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("kind", "widths"), [(kind, pair) for kind in KINDS for pair in KINDS[kind].between], ids=str)
def test_heads_between_the_kernel_s_widths(chip, kind, widths, causal):
    p = of(kind, causal=causal, head_dim=widths[0], head_dim_v=widths[1])
    assert_right(random_call(p, 5, device=chip.name), kind)


def packed_call(kind, p, keys, queries, device):
    """Of these lengths. What a random call does not use has scales that are no scales: some of it is used here."""
    call = with_lengths(random_call(p, 7, device=device), keys, queries)
    for name in ("q_scale", "k_scale") if kind == "int8" else ():
        scale = getattr(call, name)
        setattr(call, name, torch.where((scale > 0) & (scale < 1), scale, 0.02))
    return call


@pytest.mark.parametrize(("kind", "head_dim"), WIDTHS)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("name", ROWS)
def test_packed(chip, name, causal, kind, head_dim):
    queries, keys = zip(*ROWS[name], strict=True)
    sizes = {"batch": len(queries), "seq_q": max(1, *queries), "seq_k": max(1, *keys), "total_q": sum(queries) + 3,
             "total_k": sum(keys) + 3}  # fmt: skip
    for fields in ({}, {"sinks": True, "softcap": True}, {"window_left": 30}):
        p = of(kind, head_dim, PACKED, causal=causal, **sizes, **fields)
        assert_right(packed_call(kind, p, keys, queries, chip.name), kind)


@pytest.mark.parametrize(("kind", "head_dim", "causal"), PARTS)
@pytest.mark.parametrize("name", FEW_TILES)
def test_keys_of_few_tiles_are_split(chip, name, kind, head_dim, causal):
    fields = {"batch": 1, "heads_q": 2, "heads_k": 1} | FEW_TILES[name]
    for _, seed, extremes in KINDS[kind].turns:
        p = of(kind, head_dim, causal=causal, **fields)
        assert_right(random_call(p, seed, device=chip.name, extremes=extremes), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_of_nothing(chip, kind):
    assert_right(random_call(of(kind, causal="bottom_right"), 2, device=chip.name, scale=0.0), kind)


@pytest.mark.parametrize(("kind", "head_dim"), WIDTHS)
@pytest.mark.parametrize("many", [False, True], ids=["split", "whole"])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_row_sees_may_be_anything(chip, name, many, kind, head_dim):
    fields, keys = UNSEEN[name]
    heads = {"heads_q": 64, "heads_k": 32} if many else {"batch": 1, "heads_q": 2, "heads_k": 1}
    call = random_call(of(kind, head_dim, **fields, **heads), 3, device=chip.name)
    expected = run_variant(KINDS[kind].variant, call)[1]
    for names, value in KINDS[kind].spoils:
        for tensor in names.split():
            getattr(call, tensor)[:, :, keys] = value
        assert torch.equal(run_variant(KINDS[kind].variant, call)[1], expected)


@pytest.mark.parametrize("fields", [{}, {"seqlens_k": True}, {"seq_q": 1, "seq_k": 3000}], ids=str)
def test_the_largest_sinks(chip, fields):
    """One takes all the weight or none, and is as it was given where it is a row's LSE."""
    call = random_call(problem(sinks=True, **fields), 4, device=chip.name, extremes=True)
    most = torch.finfo(torch.float32).max
    call.sinks = torch.tensor([3e38, -3e38, most, -most], device=chip.name)
    assert_right(call)
    with nan_filled_memory():
        _, _, lse = run_variant(VARIANT, call)
    torch.testing.assert_close(lse.cpu().double(), oracle(on_cpu(call))[1], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_both_ends_of_one_tile(chip, head_dim, causal):
    """NaN before the window and behind the keys of one tile, which warp groups clear at the same time."""
    p = problem(
        batch=32, heads_q=8, heads_k=8, seq_q=9, seq_k=60, head_dim=head_dim, head_dim_v=head_dim, causal=causal,
        window_left=17, seqlens_q=True, seqlens_k=True,
    )  # fmt: skip
    for seed in range(3):
        call = random_call(p, seed, device=chip.name, poison="v")
        for _ in range(3):
            assert_right(call)


@pytest.mark.parametrize(("kind", "head_dim", "causal"), [one for one in PARTS if one[0] != "int8"])
def test_packed_neighbours_may_hold_anything(chip, kind, head_dim, causal):
    queries, keys = (100, 1, 130, 69), (70, 33, 200, 97)
    sizes, variant = {"total_q": 303, "total_k": 403, "seq_q": 130, "seq_k": 200}, KINDS[kind].variant
    for fields in ({}, {"window_left": 30}):
        p = of(kind, head_dim, PACKED, **fields, causal=causal, **sizes)
        call = packed_call(kind, p, keys, queries, chip.name)
        expected = run_variant(variant, call)[1]
        for number in (0, 1, 2):  # the others must not notice
            spoilt = dataclasses.replace(call, q=call.q.clone(), k=call.k.clone(), v=call.v.clone())
            rows = slice(sum(queries[:number]), sum(queries[: number + 1]))
            some = slice(sum(keys[:number]), sum(keys[: number + 1]))
            nan = NAN_BYTE if kind == "e4m3" else NAN
            spoilt.q[:, :, rows] = spoilt.k[:, :, some] = spoilt.v[:, :, some] = nan
            out = run_variant(variant, spoilt)[1]
            others = torch.ones(p.query_rows[1], dtype=torch.bool, device=out.device)
            others[rows] = False
            assert torch.equal(out[:, :, others], expected[:, :, others])


@pytest.mark.parametrize("softcap", [30.0, 64.0, 256.0, 3e4, 1e8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_caps_of_any_size(chip, head_dim, softcap):
    """A tanh's absolute error times the cap may be more than a score has."""
    for causal in ("none", "bottom_right"):
        p = problem(head_dim=head_dim, head_dim_v=head_dim, causal=causal, softcap=True)
        call = random_call(p, 4, device=chip.name)
        call.softcap = softcap
        assert_right(call)
        if softcap < 1e3:  # scores past the series, and past where the cap is reached
            call.scale = softcap / head_dim**0.5
            assert_right(call)


LOWEST, HIGHEST = -(2**31), 2**31 - 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
def test_wild_beginnings_and_lengths_touch_nothing_outside(chip, causal, head_dim):
    """They are clamped; what is not of a sequence's own rows stays as it was, and other sequences are right."""
    fields: dict[str, Any] = {"causal": causal, "head_dim": head_dim, "head_dim_v": head_dim}
    packed = random_call(problem(PACKED, **fields, window_left=50), 3, device=chip.name)
    for wild in ((LOWEST, HIGHEST, -1, 600, 2**30), (HIGHEST, 0, 0, LOWEST, 3), (700, 699, 5, 700, 0), (0, 0, 0, 0, 0)):
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            call = dataclasses.replace(packed)
            setattr(call, name, torch.tensor(wild, dtype=torch.int32, device=chip.name))
            assert fenced(call)
    padded = random_call(problem(**fields, batch=5, seqlens_q=True, seqlens_k=True), 3, device=chip.name)
    exact = run_variant(VARIANT, padded)[1]
    for name in ("seqlens_q", "seqlens_k"):
        call = dataclasses.replace(padded)
        changed = getattr(padded, name).clone()
        changed[1::2] = torch.tensor([LOWEST, HIGHEST], dtype=torch.int32, device=chip.name)
        setattr(call, name, changed)
        assert fenced(call)
        assert torch.equal(run_variant(VARIANT, call)[1][::2], exact[::2])


def fenced(call):
    """Whether a run writes nothing before and after the memory of out and LSE."""
    fence, results = 1 << 16, []
    tensors: dict[str, Any] = {name: getattr(call, name) for name in TENSORS}
    for name, like in (("out", call.new_out()), ("lse", call.new_lse())):
        memory = torch.full((like.numel() + 2 * fence,), 7.0, dtype=like.dtype, device=like.device)
        tensors[name] = torch.as_strided(memory, like.shape, like.stride(), fence)
        results.append(memory)
    VARIANT.launcher(call)(tensors)
    torch.cuda.synchronize()
    return all(bool((m[:fence] == 7.0).all() and (m[-fence:] == 7.0).all()) for m in results)


def test_launches_that_wait_for_another_stream_run_beside_its_next_ones(chip):
    """No two of them may draw from one counter (tests/backends/cuda/test_copies.py)."""
    call = random_call(
        problem(head_dim=64, head_dim_v=64, heads_q=40, heads_k=8, seq_q=512, seq_k=512), 5, device=chip.name
    )
    tensors: dict[str, Any] = {name: getattr(call, name) for name in TENSORS}
    launch, expected, _ = run_variant(VARIANT, call)
    slow, fast, gate = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    small = random_call(problem(batch=1, heads_q=1, heads_k=1, seq_q=1, seq_k=1, return_lse=False), 5, device=chip.name)
    small_tensors = {name: getattr(small, name) for name in TENSORS} | {"out": small.new_out(), "lse": None}
    other = VARIANT.launcher(small)
    results = [call.new_out() for _ in range(8)]
    torch.cuda.synchronize()
    with torch.cuda.stream(fast):
        for _ in range(500):
            other(small_tensors)
        gate.record()
    with torch.cuda.stream(slow):
        slow.wait_event(gate)
        for out in results:
            launch(tensors | {"out": out, "lse": call.new_lse()})
    with torch.cuda.stream(fast):
        for _ in range(500):
            other(small_tensors)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in results)


def test_strides(chip):
    call = random_call(problem(batch=1), 8, device=chip.name)
    expected = run_variant(VARIANT, call)[1]
    for name in ("q", "k", "v"):
        setattr(call, name, getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(run_variant(VARIANT, call)[1], expected)
    broadcast = random_call(problem(), 9, device=chip.name)
    broadcast.k, broadcast.v = (t[:1].expand(t.shape) for t in (broadcast.k, broadcast.v))
    assert_right(broadcast)


def test_the_public_call_takes_it_keeps_it_and_replays_it(chip):
    call = random_call(problem(return_lse=False, causal="bottom_right"), 5, device=chip.name)
    first = portattn.attention(call.q, call.k, call.v, causal=True)
    assert portattn.last_plan().path == "gluon_forward"
    for _ in range(3):
        assert torch.equal(first, portattn.attention(call.q, call.k, call.v, causal=True))
    core = portattn.attention(call.q, call.k, call.v, causal=True, backend="triton")
    torch.testing.assert_close(first, core, atol=2e-2, rtol=2e-2)
    swapped = [t.transpose(1, 2).contiguous() for t in (call.q, call.k, call.v)]
    for _ in range(2):
        assert torch.equal(portattn.attention(*swapped, causal=True, layout="bshd").transpose(1, 2), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = portattn.attention(call.q, call.k, call.v, causal=True)
    call.q.neg_()
    streams = [torch.cuda.Stream() for _ in range(3)]
    expected = portattn.attention(call.q, call.k, call.v, causal=True)
    torch.cuda.synchronize()
    found = []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            found.append(portattn.attention(call.q, call.k, call.v, causal=True))
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)
    assert torch.equal(held, expected)
