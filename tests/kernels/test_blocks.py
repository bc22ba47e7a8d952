"""block_sparse_attention: each query row over the blocks of keys that it lists, and the gradients."""

from __future__ import annotations

from typing import Any

import pytest
from support import Device, assert_right, random_call, run_core

from portattn import Problem
from portattn.reference import blockwise
from portattn.schema.call import Call
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


def call_of(name: str, seed: int, place: str, **fields: Any) -> Call:
    scale = -0.2 if name == "one_head_a_group" else None
    p = Problem(**(LISTED | CASES[name] | fields))
    strides = "spare" if name == "one_head_a_group" else "plain"
    return random_call(p, seed, device=place, extremes=bool(seed % 2), scale=scale, strides=strides)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_the_oracles_results(device: Device, name: str, seed: int) -> None:
    """NaN lies in blocks that no row lists, behind the sequences, and in the memory of results."""
    call = call_of(name, seed, device.name, return_lse=True)
    assert_right(call, *run_core(device, call, launch={"splits": 1 + 2 * seed}))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_give_the_oracles_gradients(
    monkeypatch: pytest.MonkeyPatch, device: Device, name: str, seed: int
) -> None:
    """Of odd seeds the rows that list a block are several chunks."""
    monkeypatch.setattr("portattn.planning.kernel_specs.backward.CHUNK", 12 if seed else 16384)
    fields = {"op": "block_sparse_attention_backward", "grad_lse": bool(seed)}
    call = call_of(name, seed, device.name, **fields)
    whole = {"block_n": 32, "rows_m": 32, "rows_n": 16} if call.problem.group > 16 else {}  # tiles hold a group
    delta, _ = run_core(device, call, launch=whole)
    facts = verdict.judge_backward(call, delta)
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]


@pytest.mark.parametrize("name", CASES)
def test_the_reference(name: str) -> None:
    call = call_of(name, 1, "cpu", return_lse=True)
    assert_right(call, *blockwise.run(call))
    call = call_of(name, 1, "cpu", op="block_sparse_attention_backward", grad_lse=True)
    facts = verdict.judge_backward(call, blockwise.run_backward(call)[0])
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]
