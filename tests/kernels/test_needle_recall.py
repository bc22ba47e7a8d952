"""Needles among 65,536 keys in caches of four bits: found as often as in bfloat16.

Each query looks for one key, at the beginning, at the end or anywhere. It is found where of all values the needle's is
the one that the query's result points to most.
"""

from __future__ import annotations

import functools

import pytest
import torch
from support import Device, problem, run_core

from portattn.reference import writing
from portattn.schema.call import Call
from portattn.schema.problem import Problem

KEYS, WIDTH = 65536, 64
PLACES = (0, 1, 777, KEYS // 3, KEYS // 2 + 1, 60000, KEYS - 2, KEYS - 1)
QUERIES = len(PLACES)


@functools.cache
def needles() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (1, 1, 8, D), and keys and values of one head."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, WIDTH, generator=generator) for rows in (QUERIES, KEYS, KEYS))
    wanted = k[:, :, PLACES]
    k[:, :, PLACES] = 2.0 * wanted
    return 1.5 * wanted + 0.3 * q, k, v


def stored(kind: str, scales: str) -> Call:
    """decode_attention of the needles' queries over a cache that the reference has written."""
    q, k, v = needles()
    sizes = {"batch": 1, "heads_k": 1, "seq_k": KEYS, "head_dim": WIDTH, "kv_format": kind, "kv_scales": scales}
    p = problem(op="decode_attention", heads_q=QUERIES, seq_q=1, dtype="bf16", head_dim_v=WIDTH, **sizes)
    call = Call(
        problem=p, q=q.transpose(1, 2).reshape(1, QUERIES, 1, WIDTH).bfloat16(), scale=WIDTH**-0.5,
        **{name: torch.zeros(1, 1, KEYS, WIDTH // 2, dtype=torch.int8) for name in ("k", "v")},
    )  # fmt: skip
    if scales == "token":
        call.k_scale, call.v_scale = torch.zeros(2, 1, 1, KEYS).unbind()
    else:
        call.k_scale, call.v_scale = (x.abs().amax().view(1, 1) / (6.0 * 448.0) for x in (k, v))
    if kind == "nvfp4":
        call.k_block_scale, call.v_block_scale = torch.zeros(2, 1, 1, KEYS, WIDTH // 16, dtype=torch.int8).unbind()
    writing.run(Call(
        problem=Problem(op="append_kv", heads_q=1, seq_q=KEYS, dtype="fp32", seqlens_k=True, **sizes), q=k, new_v=v,
        k=call.k, v=call.v, scale=1.0, k_scale=call.k_scale, v_scale=call.v_scale, k_block_scale=call.k_block_scale,
        v_block_scale=call.v_block_scale, seqlens_k=torch.zeros(1, dtype=torch.int32),
    ))  # fmt: skip
    return call


def found(out: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
    """The share of needles that are found, and the least cosine of a result and its needle's value."""
    cosines = torch.nn.functional.normalize(out.float().cpu(), dim=-1) @ torch.nn.functional.normalize(values, dim=-1).T
    recall = (cosines.argmax(-1) == torch.tensor(PLACES)).float().mean()
    return float(recall), float(cosines[range(QUERIES), PLACES].min())


@pytest.mark.parametrize(("kind", "scales", "least"), [("int4", "token", 0.985), ("nvfp4", "head", 0.985)])
def test_needles_among_64k_keys_are_found(device: Device, kind: str, scales: str, least: float) -> None:
    q, k, v = needles()
    wide = torch.nn.functional.scaled_dot_product_attention(*(t.to(device.name, torch.bfloat16) for t in (q, k, v)))
    call = stored(kind, scales)
    for name in ("q", "k", "v", "k_scale", "v_scale", "k_block_scale", "v_block_scale"):
        tensor = getattr(call, name)
        setattr(call, name, None if tensor is None else tensor.to(device.name))
    out, _ = run_core(device, call, launch={"block_n": 2048 if device.path == "interpreter" else 64})
    recall, in_bf16 = found(out[0, :, 0], v[0, 0]), found(wide[0, 0], v[0, 0])
    assert in_bf16[0] == recall[0] == 1.0
    assert in_bf16[1] > 0.999
    assert recall[1] > least  # the value itself is of 4 bits
