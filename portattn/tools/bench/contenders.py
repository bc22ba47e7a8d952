"""Portattn's own contenders: its calls as a user writes them, and the same calls prepared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import portattn
from portattn.tools.bench.cases import Case
from portattn.tools.bench.tensors import Tensors

Run = Callable[[], Any]  # a tensor; of a backward, the gradients of q, k and v
OURS, PREPARED, CORE, UNORDERED = "portattn", "portattn prepared", "portattn core", "portattn unordered"
MINE = (OURS, PREPARED, CORE, UNORDERED)
CORE_PATH = "triton"


def as_is(out: torch.Tensor) -> torch.Tensor:
    return out


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to compute a case.

    run     the timed call
    shaped  brings the result into the form (B, Hq, Sq, Dv), packed (Tq, Hq, Dv); not timed
    around  a context for all of its calls, entered before the clock starts
    path    the plan's path, of portattn's own contenders
    result_bytes  memory of a call's result, if it is told apart from other allocations
    """

    run: Run
    shaped: Callable[[torch.Tensor], torch.Tensor] = as_is
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    path: str = ""
    result_bytes: int = 0


Build = Callable[[], Contender]  # raises where the contender cannot run the case


def transpose_heads(out: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) as (B, H, S, D)."""
    return out.transpose(1, 2)


def arguments(case: Case, t: Tensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the case's op."""
    options: dict[str, Any] = {}
    if case.causal != "none":
        options["causal"] = case.causal
    if case.windowed:
        options["window"] = case.window
    if case.scale is not None:
        options["scale"] = case.scale
    if case.dropout:
        options["dropout_p"] = case.dropout
    if case.quantised:
        options |= {"k_scale": t.k_scale, "v_scale": t.v_scale}
    if t.k_block_scale is not None:
        options |= {"k_block_scale": t.k_block_scale, "v_block_scale": t.v_block_scale}
    if case.op == "attention":
        return (t.q, t.k, t.v), options | {"seqlens_q": t.seqlens_q, "seqlens_k": t.seqlens_k}
    if case.op == "varlen_attention":
        longest = max(case.queries), max(case.keys)
        return (t.q, t.k, t.v, t.cu_seqlens_q, t.cu_seqlens_k, *longest), options
    if case.op == "decode_attention":
        return (t.q, t.k, t.v, t.seqlens_k), options
    if case.op == "sparse_attention":
        options |= {"page_table": t.page_table, "seqlens_k": t.seqlens_k, "magicpig": case.magicpig}
        return (t.q, t.k, t.v, t.indices, t.counts), options
    if case.packed:
        options |= {"cu_seqlens_q": t.cu_seqlens_q, "max_seqlen_q": max(case.queries)}
    if case.op == "paged_attention":
        return (t.q, t.k, t.v, t.page_table, t.seqlens_k), options
    rank = case.width_v
    queries = t.q[..., :rank], t.q[..., rank:]
    return (*queries, t.k, t.page_table, t.seqlens_k), options | ({} if case.packed else {"layout": "bshd"})


def _shape(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    return transpose_heads if case.op == "mla_attention" and not case.packed else as_is


def ours(case: Case, t: Tensors, backend: str = "auto") -> Contender:
    """portattn's own call."""
    op, (args, options) = getattr(portattn, case.op), arguments(case, t)
    path = plan_of(case, t, backend).path
    return Contender(lambda: op(*args, **options, backend=backend), _shape(case), path=path)


def prepared_contender(case: Case, t: Tensors, backend: str = "auto") -> Contender:
    """The same call with a handle from `portattn.prepare`, and a place for its result."""
    args, options = arguments(case, t)
    options["backend"] = backend
    handle: Any = portattn.prepare(case.op, *args, **options)
    out = torch.empty_like(getattr(portattn, case.op)(*args, **options), memory_format=torch.contiguous_format)
    path = plan_of(case, t, backend).path
    return Contender(lambda: handle.run(*args, out=out, **options), _shape(case), path=path)


def plan_of(case: Case, t: Tensors, backend: str = "auto") -> portattn.Plan:
    args, options = arguments(case, t)
    return portattn.plan(case.op, *args, **options, backend=backend)


def own(case: Case, t: Tensors, backend: str = "auto", core: bool = False) -> dict[str, Build]:
    """portattn's contenders by name; a prepared one for the ops that serving loops repeat.

    core  the portable core as well, whatever the plan takes
    """
    builds: dict[str, Build] = {OURS: lambda: ours(case, t, backend)}
    if case.reads_cache:
        builds[PREPARED] = lambda: prepared_contender(case, t, backend)
    if core:
        builds[CORE] = lambda: ours(case, t, CORE_PATH)
    return builds
