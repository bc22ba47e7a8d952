"""FlexAttention, compiled by torch for each case anew (tens of seconds each), its backward with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, as_is
from portattn.tools.bench.tensors import Tensors

Keep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v as it takes them


def absent() -> str:
    return ""


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    """Return its contenders. It sees packed sequences as one, with a mask between them, only in a backward."""
    if case.dropout:  # it has none
        return {}
    if case.op == "attention":
        return {"flex": functools.partial(_build, case, t)}
    if case.op == "varlen_attention" and case.backward and case.lengths_q == case.lengths_k:
        return {"flex": functools.partial(_packed, case, t)}
    return {}


def _build(case: Case, t: Tensors) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = t.seqlens_k
    # Where lengths are given, queries and keys of a sequence begin at 0 both.
    shift = 0 if lengths is not None or case.causal == "top_left" else case.seq_k - case.seq_q
    near = _near(case, shift)

    def keep(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        kept = near(b, h, row, key)
        return kept if lengths is None else kept & (key < lengths[b])

    torch._dynamo.reset()  # it gives up compiling after some shapes, and would run eagerly then
    blocks = None
    if case.causal != "none" or case.windowed or lengths is not None:
        batch = None if lengths is None else case.batch
        blocks = create_block_mask(keep, batch, None, case.seq_q, case.seq_k, device=str(t.q.device))
    return _compiled(case, (t.q, t.k, t.v), blocks)


def _packed(case: Case, t: Tensors) -> Contender:
    """One sequence of all tokens, (1, H, T, D), in which each sees its own document: rows and keys of a document are as
    many, so that their distance is the same as inside of it."""
    from torch.nn.attention.flex_attention import create_block_mask

    total = sum(case.queries)
    lengths = torch.tensor(case.queries, device=t.q.device)
    document = torch.repeat_interleave(torch.arange(case.batch, device=t.q.device), lengths)
    near = _near(case, 0)

    def keep(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return near(b, h, row, key) & (document[row] == document[key])

    torch._dynamo.reset()
    blocks = create_block_mask(keep, None, None, total, total, device=str(t.q.device))
    q, k, v = (x.transpose(0, 1)[None] for x in (t.q, t.k, t.v))
    return _compiled(case, (q, k, v), blocks, lambda out: out[0].transpose(0, 1))


def _near(case: Case, shift: int) -> Keep:
    """The causal mask and the window."""
    left, right = case.window
    if case.causal != "none":
        right = 0

    def near(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        kept = key >= 0
        if right is not None:
            kept = kept & (key <= row + shift + right)
        if left is not None:
            kept = kept & (key >= row + shift - left)
        return kept

    return near


def _compiled(
    case: Case, given: Given, blocks: Any, shaped: Callable[[torch.Tensor], torch.Tensor] = as_is
) -> Contender:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.group > 1
    return Contender(
        lambda: compiled(*given, block_mask=blocks, scale=case.scale, enable_gqa=grouped), shaped,
        around=_repeatable if case.backward else contextlib.nullcontext,
    )  # fmt: skip


def _repeatable() -> AbstractContextManager[Any]:
    """A compiled backward may write over what its forward has saved, and then runs once; not here."""
    import torch._functorch.config as functorch

    change: AbstractContextManager[Any] = functorch.patch(donated_buffer=False)
    return change
