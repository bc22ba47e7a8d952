"""FlexAttention, compiled by torch for each case anew (tens of seconds each)."""

from __future__ import annotations

import functools

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender
from portattn.tools.bench.tensors import Tensors


def absent() -> str:
    return ""


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    if case.op != "attention":
        return {}
    return {"flex": functools.partial(_build, case, t)}


def _build(case: Case, t: Tensors) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    left, right = case.window
    if case.causal != "none":
        right = 0
    lengths = t.seqlens_k
    # Where lengths are given, queries and keys of a sequence begin at 0 both.
    shift = 0 if lengths is not None or case.causal == "top_left" else case.seq_k - case.seq_q

    def keep(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        kept = key >= 0
        if right is not None:
            kept = kept & (key <= row + shift + right)
        if left is not None:
            kept = kept & (key >= row + shift - left)
        return kept if lengths is None else kept & (key < lengths[b])

    torch._dynamo.reset()  # it gives up compiling after some shapes, and would run eagerly then
    blocks = None
    if case.causal != "none" or case.windowed or lengths is not None:
        batch = None if lengths is None else case.batch
        blocks = create_block_mask(keep, batch, None, case.seq_q, case.seq_k, device=str(t.q.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.group > 1
    return Contender(lambda: compiled(t.q, t.k, t.v, block_mask=blocks, scale=case.scale, enable_gqa=grouped))
