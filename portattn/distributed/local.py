"""One rank's own work: attention of a span by portattn's functions, and its gradients.

All tensors here are views (B, H, rows, D) of whatever layout the caller has; packed rows have B = 1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from portattn.api.kernel_backward import gradients, may_have_kernels, sink_share
from portattn.api.ops import attention, plan, varlen_attention
from portattn.distributed.sharding import Span
from portattn.schema.ops import ROWS

Pair = tuple[torch.Tensor, torch.Tensor]
_UNSET = {"causal": False, "dropout_p": 0.0, "layout": "bhsd", "return_lse": True, "validate": False}


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What scores are made of, for every span alike.

    scale, softcap, backend  as portattn.attention takes them
    slopes                   ALiBi's, (Hq,) or (sequences, Hq) float32, or None
    """

    scale: float | None = None
    softcap: float | None = None
    backend: str | None = None
    slopes: torch.Tensor | None = None


@dataclass(slots=True)
class _SpanCall:
    """A span as a call of portattn's: the operation, its arguments, and what its LSE lacks.

    lacks  (B or 1, Hq, rows) that an LSE of whole distances has beyond the call's own, or None
    """

    op: str
    given: dict[str, Any]
    lacks: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.op == "varlen_attention"


def _call(span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions) -> _SpanCall:
    """q: this rank's rows; k, v: those of the block."""
    rows, keys = slice(*span.rows), slice(*span.keys)
    q, k, v = q[:, :, rows], k[:, :, keys], v[:, :, keys]
    window = None if span.left is None and span.right is None else (span.left, span.right)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "window": window, "scale": scores.scale}
    given |= {"softcap": scores.softcap, "backend": scores.backend}
    if span.cu is not None:
        cu = torch.tensor(span.cu, dtype=torch.int32).to(q.device, non_blocking=True)
        longest = max(stop - start for start, stop in itertools.pairwise(span.cu))
        given |= {name: given[name][0].transpose(0, 1) for name in "qkv"}
        given |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        if scores.slopes is not None:
            several = scores.slopes.ndim == 2
            last = span.document + len(span.cu) - 1
            given["alibi_slopes"] = scores.slopes[span.document : last] if several else scores.slopes
        return _SpanCall("varlen_attention", given)
    call = _SpanCall("attention", given)
    if scores.slopes is not None:
        _add_distances(call, span, scores.slopes)
    return call


def _add_distances(call: _SpanCall, span: Span, slopes: torch.Tensor) -> None:
    """ALiBi by positions in the whole sequence.

    Where rows and keys are the same piece, the call's own distances are those. Where all keys come before all rows, or
    after them, a distance is a part of the row's and one of the key's: the key's part is a bias (·, Hq, 1, keys), and
    the row's part changes the LSE alone.
    """
    q, k = call.given["q"], call.given["k"]
    count_q, count_k = q.shape[2], k.shape[2]
    if slopes.ndim == 2 and q.shape[0] == 1:
        slopes = slopes[span.document : span.document + 1]
    if span.shift == count_k - count_q:
        call.given["alibi_slopes"] = slopes
        return
    of_heads = slopes.float()[None] if slopes.ndim == 1 else slopes.float()
    at_q = torch.arange(count_q, dtype=torch.float32, device=q.device)
    at_k = torch.arange(count_k, dtype=torch.float32, device=q.device)
    if span.shift >= count_k - 1:  # the keys come first
        of_keys, of_rows = at_k - (count_k - 1), -(at_q + (span.shift - count_k + 1))
    else:
        assert span.shift <= 1 - count_q, span
        of_keys, of_rows = -at_k, at_q + span.shift
    call.given["bias"] = of_heads[:, :, None, None] * of_keys
    call.lacks = of_heads[:, :, None] * of_rows


def attend(span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions) -> Pair:
    """(out, LSE) of a span: (B, Hq, rows, Dv) in q's dtype and (B, Hq, rows) float32."""
    call = _call(span, q, k, v, scores)
    if call.packed:
        out, lse = varlen_attention(**call.given, return_lse=True, validate=False)
        return out.transpose(0, 1)[None], lse[None]
    out, lse = attention(**call.given, return_lse=True)
    return out, lse if call.lacks is None else lse + call.lacks


def plan_span(span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions) -> None:
    """Raise what `attend` would raise before anything runs: PathUnavailable, say."""
    call = _call(span, q, k, v, scores)
    plan(call.op, **call.given, return_lse=True, **({"validate": False} if call.packed else {}))


@dataclass(frozen=True, slots=True)
class RankRows:
    """What the backward pass has of this rank's rows: of attention over all keys, not of one block's.

    q, out, lse, grad_out  (B, Hq, S, ·), lse without the last axis, float32
    grad_lse               as lse, or None
    """

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor | None
    grad_lse: torch.Tensor | None


def differentiate(
    span: Span, rows: RankRows, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A span's parts of (dQ, dK, dV), by portattn's own operation of the gradients, in the tensors' dtypes.

    That operation takes the LSE and the result of all keys, so that parts of blocks only need to be added.
    """
    call = _call(span, rows.q, k, v, scores)
    at = slice(*span.rows)
    out, lse = rows.out[:, :, at], rows.lse[:, :, at]
    grad_out = None if rows.grad_out is None else rows.grad_out[:, :, at]
    grad_lse = None if rows.grad_lse is None else rows.grad_lse[:, :, at]
    if call.lacks is not None:
        lse = lse - call.lacks
    if call.packed:
        out, lse = out[0].transpose(0, 1), lse[0]
        grad_out = None if grad_out is None else grad_out[0].transpose(0, 1)
        grad_lse = None if grad_lse is None else grad_lse[0]
    row = ROWS[call.op]
    given: dict[str, Any] = _UNSET | call.given
    # Where no kernel takes the shapes or runs here, the reference computes them of the same LSE.
    if not may_have_kernels(call.op, given["q"], given["v"], given["backend"]):
        given["backend"] = "reference"
    found = gradients(
        call.op,
        [given.get(name) for name in row.parameters],
        [given.get(name) for name in (*row.fixed, "backend", "validate")],
        [given[name] for name in row.lengths],
        out,
        lse.contiguous(),
        grad_out,
        grad_lse,
        ("q", "k", "v"),
        otherwise="reference",
    )
    assert found is not None
    made = (found["q"], found["k"], found["v"])
    if call.packed:
        q, k, v = (gradient.transpose(0, 1)[None] for gradient in made)
        return q, k, v
    return made


def of_sinks(sinks: torch.Tensor, rows: RankRows) -> torch.Tensor:
    """This rank's rows' part of the gradient of the sinks, (Hq,): -P·(rowsum(out·grad_out) - grad_lse), summed."""
    delta = torch.zeros_like(rows.lse)
    if rows.grad_out is not None:
        delta = (rows.out.float() * rows.grad_out.float()).sum(-1)
    if rows.grad_lse is not None:
        delta = delta - rows.grad_lse
    nothing = torch.isneginf(rows.lse)
    return -(sink_share(sinks, rows.lse) * delta.masked_fill(nothing, 0.0)).sum((0, 2)).to(sinks.dtype)
