"""How one checked call runs: over a ring, over Ulysses groups, over both, or on a rank that has all rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from portattn.api.ops import attention, plan, varlen_attention
from portattn.api.request import settings_for
from portattn.distributed.arguments import Arguments
from portattn.distributed.groups import Ranks
from portattn.distributed.local import Scores
from portattn.distributed.ring import Ring
from portattn.distributed.sharding import Shards
from portattn.distributed.ulysses import Ulysses
from portattn.errors import ArgumentError, PortattnError


@dataclass(frozen=True)
class Execution:
    """Runs and plans calls over these ranks. `by_heads`: q, k and v have all rows already, and nothing is sent.

    shards  how a sequence is cut
    ring    the ranks that keys and values go round; None where there is no ring
    inner   the ranks that exchange heads for rows; None where there are none
    """

    shards: Shards
    ring: Ranks | None
    inner: Ranks | None

    def run(self, call: Arguments, by_heads: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, LSE) as (B, Hq, S, Dv) and (B, Hq, S)."""
        if by_heads:
            return _whole(call, call.q, call.k, call.v, call.alibi_slopes, call.sinks)
        inner = self.inner
        if inner is None:
            return self._around(call, call.q, call.k, call.v, call.alibi_slopes, call.sinks)
        run = Ulysses.over(inner, self.shards, call.length, call.q.shape[1], call.k.shape[1])
        q, k, v = run.to_heads(call.q, call.k, call.v, of=(run.heads.q, run.heads.kv, run.heads.kv))
        out, lse = self._around(call, q, k, v, *_of_heads(call, run))
        return run.to_rows(out, lse)

    def _around(
        self, call: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any, sinks: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a shard of the ring; without a ring, of the whole sequence."""
        if self.ring is None:
            return _whole(call, q, k, v, slopes, sinks)
        return self._ring_of(self.ring, call, slopes).attention(q, k, v, sinks)

    def _ring_of(self, ranks: Ranks, call: Arguments, slopes: Any) -> Ring:
        scores = Scores(call.scale, call.softcap, call.backend, None if slopes is None else slopes.detach())
        return Ring(ranks, self.shards, call.length, call.mask, call.documents, scores)

    def refuse_what_cannot_run(self, op: str, call: Arguments, by_heads: bool) -> None:
        """Raise ArgumentError where this rank's own calls would raise once others wait for what it sends: where a path
        is named or nothing may fall back. Without that each call runs on some path, and nothing is planned here."""
        settings = settings_for(op, call.backend, None)
        if settings.backend == "auto" and settings.fallback != "error" and not settings.quirks:
            return
        try:
            self._plan(call, by_heads)
        except ArgumentError as error:
            raise ArgumentError(op, error.argument, error.value, error.limit) from None
        except PortattnError as error:
            raise ArgumentError(op, "backend", settings.backend, f"cannot run here: {error}") from error

    def _plan(self, call: Arguments, by_heads: bool) -> None:
        """Plan what `run` is going to run, of tensors like those that it will have then."""
        q, k, v, slopes, sinks = call.q, call.k, call.v, call.alibi_slopes, call.sinks
        if self.inner is not None and not by_heads:
            run = Ulysses.over(self.inner, self.shards, call.length, q.shape[1], k.shape[1])
            q, k, v = run.like_heads(q, k, v, of=(run.heads.q, run.heads.kv, run.heads.kv))
            slopes, sinks = _of_heads(call, run)
        if self.ring is not None and not by_heads:
            self._ring_of(self.ring, call, slopes).plan(q, k, v)
        else:
            which, given = _whole_call(call, q, k, v, slopes, sinks)
            plan(which, **given)


def _whole(
    call: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any, sinks: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention where all rows are here: (B, H, S, Dv), and the LSE."""
    which, given = _whole_call(call, q, k, v, slopes, sinks)
    if which == "attention":
        found: Any = attention(**given)
        return found
    packed: Any = varlen_attention(**given)
    out, lse = packed
    return out.transpose(0, 1)[None], lse[None]


def _whole_call(
    call: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any, sinks: Any
) -> tuple[str, dict[str, Any]]:
    """The operation of a call where all rows are here, and its arguments."""
    given: dict[str, Any] = {"scale": call.scale, "causal": call.causal, "window": call.window, "softcap": call.softcap}
    given |= {"alibi_slopes": slopes, "sinks": sinks, "backend": call.backend, "return_lse": True}
    if call.documents is None:
        return "attention", given | {"q": q, "k": k, "v": v}
    cu = torch.tensor(call.documents.cu, dtype=torch.int32).to(q.device, non_blocking=True)
    longest = max((b - a for a, b in itertools.pairwise(call.documents.cu)), default=0)
    given |= {name: tensor[0].transpose(0, 1) for name, tensor in (("q", q), ("k", k), ("v", v))}
    given |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return "varlen_attention", given


def _of_heads(call: Arguments, run: Ulysses) -> tuple[Any, Any]:
    """Slopes and sinks of this rank's heads."""
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[..., run.mine]
    return slopes, None if call.sinks is None else call.sinks[run.mine]
