"""What else torch has: its varlen_attn (FlashAttention-2, packed and paged), and tokens gathered by indexing."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as functional

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, as_is
from portattn.tools.bench.tensors import Tensors

PAGE = 256  # tokens, of which FlashAttention-2's pages have a multiple


def absent() -> str:
    return ""


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    if case.op == "sparse_attention" and case.magicpig is None:
        return {"torch-gather": functools.partial(_gather, case, t)}
    paged = case.op == "paged_attention" and case.page_size % PAGE == 0 and (case.packed or case.seq_q == 1)
    if case.dropout:  # it has none
        return {}
    if (case.op == "varlen_attention" or paged) and case.dtype != "fp32" and _function():
        return {"torch-varlen": functools.partial(_varlen, case, t)}
    return {}


def _function() -> Any:
    """torch.nn.attention.varlen.varlen_attn, which torch has from 2.10 on; None before."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _varlen(case: Case, t: Tensors) -> Contender:
    function = _function()
    known = inspect.signature(function).parameters
    cu_q = t.cu_seqlens_q
    q = t.q if case.packed else t.q[:, :, 0]
    if cu_q is None:
        cu_q = torch.arange(case.batch + 1, dtype=torch.int32, device=q.device)
    options: dict[str, Any] = {"scale": case.scale} if case.scale is not None else {}
    left, right = (-1 if side is None else side for side in case.window)
    window = (left, right if case.causal == "none" else 0)
    if "window_size" in known:
        options["window_size"] = window
    elif case.windowed:
        raise ValueError("this torch's varlen_attn has no window_size")
    else:
        options["is_causal"] = case.causal != "none"
    if case.group > 1 and "enable_gqa" in known:
        options["enable_gqa"] = True
    if case.page_size:
        if "block_table" not in known:
            raise ValueError("this torch's varlen_attn has no block_table")
        options |= {"seqused_k": t.seqlens_k, "block_table": t.page_table}
    given = (q, t.k, t.v, cu_q, t.cu_seqlens_k, max(case.queries), max(case.keys))
    return Contender(lambda: function(*given, **options), as_is if case.packed else lambda out: out[:, :, None])


def _gather(case: Case, t: Tensors) -> Contender:
    """Keys and values of the chosen tokens copied together, then SDPA."""
    heads = (torch.arange(case.heads_q, device=t.q.device) // case.group)[None, :, None]
    batches = torch.arange(case.batch, device=t.q.device)[:, None, None]

    def run() -> torch.Tensor:
        assert t.indices is not None
        if t.page_table is not None:
            page = t.page_table[batches, t.indices // case.page_size]
            place = t.indices % case.page_size
            k, v = t.k[page, place, heads], t.v[page, place, heads]
        else:
            k, v = t.k[batches, heads, t.indices], t.v[batches, heads, t.indices]
        return functional.scaled_dot_product_attention(t.q, k, v, scale=case.scale)

    return Contender(run)
