"""xFormers' memory_efficient_attention_forward, by its documented biases (xformers.ops.fmha.attn_bias, 0.0.33).

It takes (B, S, H, D), and where heads share keys (B, S, Hk, group, D) with keys that are expanded, not copied.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, transpose_heads
from portattn.tools.bench.peers.availability import missing, module
from portattn.tools.bench.tensors import Tensors

PACKAGE = "xformers.ops"


def absent() -> str:
    return missing(PACKAGE)


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    padded = case.op != "paged_attention" and case.op != "varlen_attention" and bool(case.lengths_k)
    queries = case.op == "paged_attention" and (case.packed or case.seq_q > 1)
    if case.op in ("mla_attention", "sparse_attention") or padded or queries or case.causal == "top_left":
        return {}
    if case.windowed and case.op != "attention":
        return {}
    return {"xformers": functools.partial(_build, case, t)}


def _build(case: Case, t: Tensors) -> Contender:
    function: Any = module(PACKAGE).fmha.memory_efficient_attention_forward
    bias = _bias(case, t)
    if case.op == "varlen_attention":
        q, k, v = (x[None] for x in (t.q, t.k, t.v))
    elif case.page_size:
        q = transpose_heads(t.q).flatten(0, 1)[None]
        k, v = (x.flatten(0, 1)[None] for x in (t.k, t.v))
    else:
        q, k, v = (transpose_heads(x) for x in (t.q, t.k, t.v))
    grouped = case.group > 1
    if grouped:
        q = q.unflatten(2, (case.heads_k, case.group))
        k, v = (x[:, :, :, None].expand(-1, -1, -1, case.group, -1) for x in (k, v))

    def shaped(out: torch.Tensor) -> torch.Tensor:
        out = out.flatten(2, 3) if grouped else out
        if case.op == "varlen_attention":
            return out[0]
        return transpose_heads(out[0].unflatten(0, (case.batch, case.seq_q)) if case.page_size else out)

    return Contender(lambda: function(q, k, v, attn_bias=bias, scale=case.scale), shaped)


def _bias(case: Case, t: Tensors) -> Any:
    biases: Any = module("xformers.ops.fmha.attn_bias")
    causal = case.causal != "none"
    if case.op == "varlen_attention":
        lengths = biases.BlockDiagonalMask.from_seqlens(list(case.queries), list(case.keys), device=t.q.device)
        return lengths.make_causal_from_bottomright() if causal else lengths
    if case.page_size:
        return biases.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * case.batch, kv_seqlen=list(case.keys), block_tables=t.page_table, page_size=case.page_size
        )
    if case.windowed:
        # A side without a limit reaches as far as there is anything.
        left, right = (case.seq_k if side is None else side for side in case.window)
        return biases.LocalAttentionFromBottomRightMask(window_left=left, window_right=0 if causal else right)
    return biases.LowerTriangularFromBottomRightMask() if causal and case.seq_q > 1 else None
