"""block_sparse_attention: each query row over the blocks of keys that it lists, and the gradients."""

from typing import Any

import pytest
import torch
from opcalls import use_small_tiles, watched
from support import assert_right, random_call, run_core

import portattn
from portattn import Problem
from portattn.reference import blockwise
from portattn.testing import verdict

LISTED: dict[str, Any] = {
    "op": "block_sparse_attention", "batch": 2, "heads_q": 6, "heads_k": 2, "seq_q": 9, "seq_k": 77, "head_dim": 32,
    "dtype": "fp32", "tokens": 4, "block_k": 32,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "top_left_sinks": {"causal": "top_left", "sinks": True, "dtype": "fp16", "block_k": 16},
    "lengths_bshd": {"seqlens_k": True, "causal": "bottom_right", "layout": "bshd", "dtype": "bf16"},
    "one_head_a_group": {"heads_q": 2, "head_dim": 40, "head_dim_v": 24, "negative_scale": True},
    "decode_of_many_heads": {"seq_q": 1, "heads_q": 40, "tokens": 2, "seqlens_k": True, "block_k": 64},
    "more_queries_than_keys": {"seq_q": 45, "seq_k": 20, "block_k": 16, "causal": "bottom_right", "batch": 1},
}


def call_of(name, seed, place, **fields):
    scale = -0.2 if name == "one_head_a_group" else None
    p = Problem(**(LISTED | CASES[name] | fields))
    strides = "spare" if name == "one_head_a_group" else "plain"
    return random_call(p, seed, device=place, extremes=bool(seed % 2), scale=scale, strides=strides)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_kernel_and_reference_give_the_oracles_results(device, name, seed):
    """NaN lies in blocks that no row lists, behind the sequences, and in the memory of results."""
    call = call_of(name, seed, device.name, return_lse=True)
    assert_right(call, *run_core(device, call, launch={"splits": 1 + 2 * seed}))
    assert_right(call, *blockwise.run(call))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_kernels_and_reference_give_the_oracles_gradients(monkeypatch, device, name, seed):
    monkeypatch.setattr("portattn.planning.kernel_specs.backward.CHUNK", 12 if seed else 16384)
    call = call_of(name, seed, device.name, op="block_sparse_attention_backward", grad_lse=bool(seed))
    whole = {"block_n": 32, "rows_m": 32, "rows_n": 16} if call.problem.group > 16 else {}  # tiles hold a group
    for compute in (lambda: run_core(device, call, launch=whole), lambda: blockwise.run_backward(call)):
        facts = verdict.judge_backward(call, compute()[0])
        assert not facts["wrong"]
        assert facts["error"] <= facts["budget"]


def tensors(rows=21, keys=40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, h, s, 16, generator=generator).to(dtype) for h, s in ((4, rows), (2, keys), (2, keys)))


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("backend", ["reference", pytest.param("interpreter", marks=pytest.mark.interpreter)])
def test_public_calls_and_gradients_are_those_of_a_mask(monkeypatch, backend, layout, places):
    use_small_tiles(monkeypatch)
    q, k, v = tensors()
    listed = torch.rand(2, 2, 21, 3, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :places].int()
    listed[:, :, 3], counts = -1, torch.full((2, 2, 21), places, dtype=torch.int32)
    counts[:, 1, 7], listed[:, 1, 7, -1] = places - 1, 99
    named = torch.where(torch.arange(places) < counts[..., None], listed, -1)[..., None]
    mask = (named == torch.arange(40) // 16).any(3).repeat_interleave(2, dim=1)
    turn = (lambda t: t.transpose(1, 2).contiguous()) if layout == "bshd" else (lambda t: t)
    given: tuple[Any, ...] = turn(listed), {"block_counts": turn(counts), "block_size": 16, "causal": True}
    found = []
    for function, lists, more in ((portattn.block_sparse_attention, given[:1], {"backend": backend, **given[1]}),
                                  (portattn.attention, (), {"mask": mask, "causal": True})):  # fmt: skip
        leaves = [turn(t).clone().requires_grad_() for t in (q, k, v)]
        out, lse = function(*leaves, *lists, **more, return_lse=True, layout=layout)
        (out * turn(q)).sum().add(lse[lse.isfinite()].sum()).backward()
        found.append((out, lse, *(leaf.grad for leaf in leaves)))
    torch.testing.assert_close(*found, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.interpreter
def test_wild_numbers_that_nothing_validates_stay_inside(monkeypatch, causal):
    use_small_tiles(monkeypatch)
    least, most = -(2**31), 2**31 - 1
    wild = torch.tensor([[most, least, -1, 0], [4, 5, 2**27, 2**28 - 1], [2**26 + 1, 2, 1, least]], dtype=torch.int32)
    listed, counts = wild.repeat(7, 1)[:21].expand(2, 2, 21, 4), torch.tensor([most, least, -1, 0, 2, 4, 5] * 3)
    given = {"block_counts": counts.int().expand(2, 2, 21), "seqlens_k": torch.tensor([most, 33], dtype=torch.int32)}
    found = []
    for backend in ("interpreter", "reference"):
        leaves = [tensor.requires_grad_() for tensor in tensors()]
        with watched(monkeypatch) as kernels:
            out, lse = portattn.block_sparse_attention(
                *leaves, listed, block_size=16, causal=causal, return_lse=True, backend=backend, validate=False, **given
            )
            found.append((out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
        assert kernels or backend == "reference"
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


LISTS = torch.tensor([[0, 1]], dtype=torch.int32).expand(2, 2, 21, 2)
WRONG: dict[str, tuple[Any, ...]] = {
    "block_size": (LISTS, {"block_size": 16.0}, "must be one of 16, 32, 64, 128"),
    "block_indices.ndim": (LISTS[0], {}, r"must be 4: \(batch, heads_k, seq_q, places\)"),
    "block_indices.dtype": (LISTS.long(), {}, "must be torch.int32"),
    "block_indices[0, 0, 0, 1]": (LISTS * 3, {}, "must be below 3, the blocks of keys"),
    "block_indices[0, 0, 0]": (LISTS * 0, {}, "must be in a row's list once"),
    "block_indices.stride(-1)": (LISTS.contiguous().transpose(2, 3).contiguous().transpose(2, 3), {}, "must be 1"),
    "block_counts[0, 0, 0]": (LISTS, {"block_counts": LISTS[..., 0] + 5}, "must be in 0..2"),
    "v's seq": (LISTS, {"v": torch.zeros(2, 2, 39, 16)}, "must be k's, 40"),
    "heads_q": (LISTS, {"q": torch.zeros(2, 3, 21, 16)}, "must be a multiple of the 2 key/value heads"),
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments_are_named_with_their_limit(argument):
    listed, more, limit = WRONG[argument]
    call = dict(zip("qkv", tensors(), strict=True)) | {"block_indices": listed, "block_size": 16} | more
    with pytest.raises(portattn.ArgumentError, match=limit) as caught:
        portattn.block_sparse_attention(**call)
    assert caught.value.argument == argument
