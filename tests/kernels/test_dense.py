"""dense_forward against the float64 oracle: features, shapes and memory layouts, and relations between problems."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from support import Device, assert_right, problem, random_call, run_core

CAUSAL = ("none", "bottom_right", "top_left")
FEATURES = {
    "dense": {},
    "no_lse": {"return_lse": False},
    "gqa": {"heads_q": 4, "heads_k": 2},
    "mqa": {"heads_q": 3, "heads_k": 1},
    "seqlens_k": {"seqlens_k": True},
    "seqlens": {"seqlens_q": True, "seqlens_k": True},
    "leftpad_k": {"leftpad_k": True},
    "padded": {"seqlens_q": True, "seqlens_k": True, "leftpad_q": True, "leftpad_k": True, "batch": 3},
    "bshd_gqa_padded": {"layout": "bshd", "heads_q": 4, "seqlens_k": True, "leftpad_k": True, "leftpad_q": True},
}


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features_are_right(device: Device, causal: str, features: dict) -> None:
    call = random_call(problem(causal=causal, **features), seed=1, device=device.name)
    assert_right(call, *run_core(device, call))


@pytest.mark.parametrize(
    "sizes",
    [
        {"seq_q": 0},
        {"seq_k": 0},
        {"batch": 0},
        {"seq_q": 0, "seq_k": 0},
        {"seq_q": 1, "seq_k": 1},
        {"seq_q": 1, "seq_k": 16},
        {"seq_q": 16, "seq_k": 16},
        {"seq_q": 15, "seq_k": 17},
        {"seq_q": 17, "seq_k": 15},
        {"seq_q": 40, "seq_k": 3},
        {"seq_q": 3, "seq_k": 40},
        {"seq_q": 32, "seq_k": 48},
        {"seq_q": 2, "seq_k": 31},  # the first bottom-right row ends one key before, at, and after a tile's end
        {"seq_q": 2, "seq_k": 32},
        {"seq_q": 2, "seq_k": 33},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", CAUSAL)
def test_lengths_at_the_edges_of_tiles(device: Device, sizes: dict, causal: str) -> None:
    call = random_call(problem(causal=causal, batch=sizes.get("batch", 1), **_less(sizes, "batch")), device=device.name)
    assert_right(call, *run_core(device, call))


@pytest.mark.parametrize("scale", [-0.7, 0.0, -0.0, 1.0, 4.0])
def test_any_scale(device: Device, scale: float) -> None:
    call = random_call(problem(causal="bottom_right", seqlens_k=True), seed=3, device=device.name, scale=scale)
    assert_right(call, *run_core(device, call))


def test_a_scale_of_zero_averages_what_is_attended(device: Device) -> None:
    call = random_call(problem(seq_k=20), device=device.name, scale=0.0)
    out, lse = run_core(device, call)
    torch.testing.assert_close(out, call.v.mean(dim=2, keepdim=True).expand_as(out), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, torch.full_like(lse, 20.0).log())


def test_scores_too_large_for_an_exponential(device: Device) -> None:
    call = random_call(problem(), seed=4, device=device.name, scale=200.0)
    assert_right(call, *run_core(device, call))


def test_rows_with_nothing_to_attend(device: Device) -> None:
    """Bottom-right with more queries than keys: the first rows see no key. An empty sequence: none does."""
    call = random_call(problem(seq_q=24, seq_k=5, causal="bottom_right"), device=device.name)
    out, lse = run_core(device, call)
    assert not out[:, :, :19].any()
    assert torch.isneginf(lse[:, :, :19]).all()
    assert torch.isfinite(lse[:, :, 19:]).all()

    call = random_call(problem(seqlens_k=True), device=device.name)
    call.seqlens_k.zero_()
    call.k.fill_(float("nan"))
    call.v.fill_(float("nan"))
    out, lse = run_core(device, call)
    assert not out.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("seed", range(16))
def test_random_problems(device: Device, seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    heads_k = pick(1, 2, 3)
    p = problem(
        batch=pick(1, 2, 3), heads_k=heads_k, heads_q=heads_k * pick(1, 2, 3), seq_q=pick(*range(1, 35)),
        seq_k=pick(*range(1, 41)), head_dim=pick(8, 16, 24, 33), head_dim_v=pick(8, 16, 40),
        dtype=pick("fp32", "fp16", "bf16"), causal=pick(*CAUSAL), seqlens_q=pick(True, False),
        seqlens_k=pick(True, False), leftpad_q=pick(True, False), leftpad_k=pick(True, False),
        layout=pick("bhsd", "bshd"),
    )  # fmt: skip
    call = random_call(p, seed, device=device.name, scale=pick(None, -0.3, 0.8), strides=pick("plain", "spare"))
    assert_right(call, *run_core(device, call, launch={"block_m": pick(16, 32), "block_n": pick(16, 32)}))


def test_padded_equals_dense_on_valid_rows(device: Device) -> None:
    call = random_call(problem(seqlens_q=True, seqlens_k=True, causal="bottom_right"), seed=6, device=device.name)
    call.seqlens_q = torch.tensor([9, 19], dtype=torch.int32, device=device.name)
    call.seqlens_k = torch.tensor([37, 21], dtype=torch.int32, device=device.name)
    call.q, call.k, call.v = (t.nan_to_num(0.5) for t in (call.q, call.k, call.v))
    out, lse = run_core(device, call)
    for b, (rows, keys) in enumerate(((9, 37), (19, 21))):
        alone = _dense(call, b, slice(0, rows), slice(0, keys))
        out_alone, lse_alone = run_core(device, alone)
        torch.testing.assert_close(out[b : b + 1, :, :rows], out_alone, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse[b : b + 1, :, :rows], lse_alone, atol=2e-6, rtol=1e-6)
        assert not out[b, :, rows:].any()


@pytest.mark.parametrize("causal", CAUSAL)
def test_left_padding_equals_right_padding_shifted(device: Device, causal: str) -> None:
    right = random_call(problem(seqlens_q=True, seqlens_k=True, causal=causal), seed=7, device=device.name)
    right.seqlens_q = torch.tensor([13, 19], dtype=torch.int32, device=device.name)
    right.seqlens_k = torch.tensor([30, 8], dtype=torch.int32, device=device.name)
    right.q, right.k, right.v = (t.nan_to_num(0.5) for t in (right.q, right.k, right.v))
    fields = {"seqlens_q": False, "seqlens_k": False, "leftpad_q": True, "leftpad_k": True}
    left = replace(right, problem=msgspec.structs.replace(right.problem, **fields))
    left.seqlens_q = left.seqlens_k = None
    left.leftpad_q, left.leftpad_k = (19 - right.seqlens_q).int(), (37 - right.seqlens_k).int()
    left.q = _rolled(right.q, left.leftpad_q)
    left.k, left.v = _rolled(right.k, left.leftpad_k), _rolled(right.v, left.leftpad_k)
    out_right, lse_right = run_core(device, right)
    out_left, lse_left = run_core(device, left)
    torch.testing.assert_close(out_left, _rolled(out_right, left.leftpad_q), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse_left[..., None], _rolled(lse_right[..., None], left.leftpad_q), atol=2e-6, rtol=1e-6)


def test_one_bottom_right_query_sees_every_key(device: Device) -> None:
    causal = random_call(problem(seq_q=1, causal="bottom_right"), seed=8, device=device.name)
    free = replace(causal, problem=msgspec.structs.replace(causal.problem, causal="none"))
    for ours, same in zip(run_core(device, causal), run_core(device, free), strict=True):
        torch.testing.assert_close(ours, same, atol=1e-6, rtol=1e-6)


def test_top_left_equals_bottom_right_on_a_square(device: Device) -> None:
    call = random_call(problem(seq_q=33, seq_k=33, causal="bottom_right"), seed=9, device=device.name)
    other = replace(call, problem=msgspec.structs.replace(call.problem, causal="top_left"))
    assert torch.equal(run_core(device, call)[0], run_core(device, other)[0])


def test_layouts_give_the_same_numbers(device: Device) -> None:
    call = random_call(problem(heads_q=4, causal="bottom_right"), seed=10, device=device.name)
    swapped = replace(call, problem=msgspec.structs.replace(call.problem, layout="bshd"))
    swapped.q, swapped.k, swapped.v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (call.q, call.k, call.v))
    out, lse = run_core(device, call)
    out_swapped, lse_swapped = run_core(device, swapped)
    assert torch.equal(out, out_swapped)
    assert torch.equal(lse, lse_swapped)
    assert out.is_contiguous()
    assert out_swapped.transpose(1, 2).is_contiguous()


def _less(fields: dict, *names: str) -> dict:
    return {k: v for k, v in fields.items() if k not in names}


def _dense(call, b: int, rows: slice, keys: slice):
    """One sequence of a padded call, cut to its valid rows and keys."""
    q, k, v = call.q[b : b + 1, :, rows], call.k[b : b + 1, :, keys], call.v[b : b + 1, :, keys]
    fields = {"batch": 1, "seq_q": q.shape[2], "seq_k": k.shape[2], "seqlens_q": False, "seqlens_k": False}
    return replace(
        call, problem=msgspec.structs.replace(call.problem, **fields), q=q, k=k, v=v, seqlens_q=None, seqlens_k=None
    )


def _rolled(tensor: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Each sequence's rows moved towards the end by its own shift, round the end."""
    return torch.stack([t.roll(int(s), dims=1) for t, s in zip(tensor, shifts, strict=True)])
