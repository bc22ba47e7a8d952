"""The CPU: torch's flash kernel as the vendor's path, for every op whose keys are contiguous or on pages.

Its LSE serves lengths, pages, windows and sinks, and shows the rows that it gets wrong (flash.check_rows)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portattn.planning.backend import Backend, VendorPath, first_refusal
from portattn.schema.target import Arch

if TYPE_CHECKING:
    import torch

    from portattn.backends.cpu.flash import Terms
    from portattn.schema.call import Call
    from portattn.schema.plan import Rejection
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target

Results = tuple["torch.Tensor", "torch.Tensor | None"]


class CpuSdpaPath(VendorPath):
    """torch's flash kernel for CPUs, whose order of sums may depend on the batch: `num_splits` is the reference's."""

    name = "sdpa"
    ops = ("attention", "decode_attention", "varlen_attention", "paged_attention", "mla_attention")
    takes = frozenset(
        {
            "causal", "causal_top_left", "window", "chunk", "bias", "mask", "sinks", "seqlens_q", "seqlens_k",
            "leftpad_q", "leftpad_k", "packed", "paged", "return_lse", "needs_grad", "negative_scale", "gqa",
            "head_dim_v", "grad_captured",
        }
    )  # fmt: skip

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p = problem
        lacking = [name for name in p.demands() if name not in self.takes]
        beside = [
            name
            for name in p.demands()
            if name not in ("needs_grad", "causal", "causal_top_left", "negative_scale", "gqa", "head_dim_v")
        ]
        empty = [n for n in ("batch", "seq_q", "seq_k") if getattr(p, n) == 0]
        return first_refusal(
            self.name,
            (p.op not in self.ops, f"has no operation of this kind, and op is {p.op}", "backend='reference'"),
            (bool(lacking), f"does not have {', '.join(lacking)}", "backend='reference'"),
            (
                p.needs_grad and (p.op != "attention" or bool(beside)),
                "has no gradients of " + (f"calls with {', '.join(beside)}" if beside else p.op),
                "backend='reference'",
            ),
            (
                p.needs_grad and p.causal == "bottom_right" and p.seq_q not in (1, p.seq_k),
                "has a causal mask that is aligned at the top left, and gradients are asked for with causal "
                f"bottom-right, seq_q {p.seq_q} and seq_k {p.seq_k}",
                "backend='reference'",
            ),
            (
                p.needs_grad and bool(empty),
                f"takes no empty tensors where gradients are asked for, and {', '.join(empty)} is 0",
                "backend='reference'",
            ),
        )

    def run(self, call: Call) -> Results:
        """Run the call, or the reference if a score is NaN or infinite: torch's kernel makes such rows 0.

        Memory: a mask of at most 4 MiB, a few MiB of float32 if 16-bit products are slow, two outputs if a causal
        mask has many keys before its square, for pages one sequence's keys and values."""
        from portattn.backends.cpu.flash import NotFinite
        from portattn.reference import blockwise

        try:
            return _by_kernel(call)
        except NotFinite:
            return blockwise.run(call)

    def repeated(self, call: Call) -> Callable[..., Results] | None:
        """Return the cached form of plain and causal attention; None for other calls."""
        p = call.problem
        plain = {"causal", "causal_top_left", "window", "gqa", "return_lse", "negative_scale", "head_dim_v"}
        if p.op != "attention" or not plain.issuperset(p.demands()):
            return None
        from portattn.backends.cpu import flash
        from portattn.reference import blockwise
        from portattn.schema.call import Call

        scale, sight, with_lse, swapped = call.scale, _sight(p, p.seq_q, p.seq_k), p.return_lse, p.layout == "bshd"

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Results:
            if swapped:
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            lse: torch.Tensor | None
            try:
                out, lse = flash.attend(q, k, v, scale, sight, wide=with_lse)
            except flash.NotFinite:
                out, lse = blockwise.run(Call(problem=p, q=q, k=k, v=v, scale=scale))
            out = out.transpose(1, 2).contiguous() if swapped else out.contiguous()
            return out, lse.contiguous() if lse is not None and with_lse else None

        return run


@dataclass(frozen=True, slots=True)
class Segment:
    """Sequences of one length: all of a batch, or one of it, without padding."""

    batch: int
    stored: slice  # place of its rows in q
    rows: slice  # positions along the axes of bias and mask
    keys: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _sight(p: Problem, rows: int, keys: int) -> Any:
    """Return the keys that causal mask and window show to rows of such sequences."""
    from portattn.backends.cpu.flash import Sight

    left = p.window_left if p.window_left >= 0 else math.inf
    right = p.window_right if p.window_right >= 0 else math.inf
    shift = 0 if p.causal == "top_left" else keys - rows
    return Sight(shift, left, right if p.causal == "none" else 0)


def _by_kernel(call: Call) -> Results:
    """Run a call by torch's kernel. Raises NotFinite (flash.check_rows)."""
    p = call.problem
    if p.needs_grad:
        return _differentiable(call), None
    if not (p.padded or p.packed or p.page_size or p.total_k is not None):
        out, lse = _attended(call, Segment(0, slice(None), slice(None), slice(None), call.q, call.k, call.v))
        return _laid_out(call, out), lse.contiguous() if p.return_lse else None
    return _by_sequence(call)


def _attended(call: Call, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    from portattn.backends.cpu import flash

    q, k, v = segment.q, segment.k, segment.v
    p = call.problem
    terms = _terms(call, segment) if call.bias is not None or call.mask is not None else None
    sight = _sight(p, q.shape[2], k.shape[2])
    if p.chunk:
        out, lse = flash.attend_in_chunks(q, k, v, call.scale, sight, p.chunk, terms, p.return_lse)
    else:
        out, lse = flash.attend(q, k, v, call.scale, sight, terms, p.return_lse)
    out = out[..., : p.head_dim_v]
    if call.sinks is not None:  # one more score of each row: it takes its part of the weights, and brings no value
        sinks = call.sinks.float()[None, :, None]
        weight = torch.sigmoid(lse - sinks).masked_fill(lse == float("-inf"), 0.0)  # a sink of -inf: -inf + inf
        out = (out.float() * weight[..., None]).to(out.dtype)
        lse = torch.logaddexp(lse, sinks)
    return out, lse


def _terms(call: Call, segment: Segment) -> Terms:
    from portattn.backends.cpu.flash import Terms

    batch = slice(segment.batch, segment.batch + segment.q.shape[0])
    return Terms(*(None if t is None else t[batch, :, segment.rows, segment.keys] for t in (call.bias, call.mask)))


def _laid_out(call: Call, out: torch.Tensor) -> torch.Tensor:
    """Return out in the layout of Call.new_out; the kernel's has rows before heads."""
    if call.problem.layout == "bshd":
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()


def _by_sequence(call: Call) -> Results:
    p = call.problem
    out, lse = call.new_out().zero_(), call.new_lse().fill_(-math.inf)
    for segment in _segments(call):
        batch = 0 if p.packed else segment.batch
        found, found_lse = _attended(call, segment)
        out[batch, :, segment.stored], lse[batch, :, segment.stored] = found[0], found_lse[0]
    return out, lse if p.return_lse else None


def _segments(call: Call) -> Iterator[Segment]:
    """Yield the sequences that have query rows, without their padding."""
    import torch

    from portattn.reference.blocks import key_extent, query_extent

    p = call.problem
    if call.q.shape[2] == 0:
        return
    queries, keys = query_extent(call), key_extent(call)
    numbers = (queries.origin, queries.first, queries.end, keys.origin, keys.first, keys.end)
    for b, (row, first, last, origin, begin, end) in enumerate(torch.stack(numbers, dim=1).tolist()):
        if first >= last:
            continue
        end = max(begin, end)
        stored, at = slice(row + first, row + last), slice(0, 1) if p.packed else slice(b, b + 1)
        q = call.q[at, :, stored]
        if call.q_rope is not None:
            q = torch.cat([q, call.q_rope[at, :, stored]], dim=3)
        k, v = _keys(call, b, slice(origin + begin, origin + end))
        yield Segment(b, stored, slice(first, last), slice(begin, end), q, k, v)


def _keys(call: Call, b: int, places: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K (1,Hk,n,D) and V (1,Hk,n,Dv) of a sequence; whole latent rows are both."""
    p = call.problem
    if call.page_table is None:
        at = slice(0, 1) if p.total_k is not None else slice(b, b + 1)
        return call.k[at, :, places], call.v[at, :, places]
    found = []
    for storage in (call.k,) if p.op == "mla_attention" else (call.k, call.v):
        pages = call.page_table[b, : -(-places.stop // p.page_size)] if storage.shape[0] else call.page_table[b, :0]
        pages = pages.long().clamp(0, max(storage.shape[0] - 1, 0))
        gathered = storage.transpose(0, 1)[:, pages].flatten(1, 2)  # (Hk, n, D)
        found.append(gathered[None, :, places])
    return found[0], found[-1]


def _differentiable(call: Call) -> torch.Tensor:
    """Run plain or causal attention by torch's kernel, which autograd can differentiate once."""
    from portattn.backends.cpu import flash

    p, k, v = call.problem, call.k, call.v
    causal = p.causal == "top_left" or (p.causal == "bottom_right" and p.seq_q > 1)
    if p.causal == "top_left" and p.seq_k > p.seq_q:  # keys that no row sees may hold NaN, and 0·NaN is NaN
        k, v = k[:, :, : p.seq_q], v[:, :, : p.seq_q]
    out, lse = flash.kernel(call.q, k, v, call.scale, None, causal)
    flash.check_rows(lse, call.q, k, call.scale)
    return _laid_out(call, out)


class CpuBackend(Backend):
    name = "cpu"
    title = "CPU"
    device_type = "cpu"
    folder = Path(__file__).parent
    core_path = "interpreter"
    vendor = (CpuSdpaPath(),)

    def detect(self, index: int | None = None) -> str:
        return "generic"

    def triton_target(self, arch: Arch) -> tuple[str, str | int, int]:
        raise NotImplementedError("Triton has no CPU target here; the interpreter runs the kernels' Python")
