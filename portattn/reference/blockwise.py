"""The reference path: attention in plain torch, by key blocks, so that memory grows with S and not S².

It runs every operation and feature on any device, reads no length back from an accelerator, and shares no code with
the kernels. The backward pass recomputes probabilities from a few numbers a row (tiles.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from portattn.reference.blocks import Reach, RowBlock, RowBlockResults, RowTensor, Statistics, key_heads
from portattn.reference.tiles import Backward, Tiling, dropout_keep_mask, finite_sinks, has_terms, with_terms
from portattn.schema.call import TENSORS, Call
from portattn.schema.ops import CAPTURED, DIFFERENTIABLE
from portattn.schema.tensors import are_mapped

Results = tuple[torch.Tensor, torch.Tensor]  # out and LSE


@dataclass(frozen=True)
class Steps:
    """The forward pass's functions."""

    tiling: Callable[[Call], Tiling]
    forward: Callable[[Call, Statistics], Results]  # without gradients; fills the statistics
    recorded: Callable[[Call], Results]  # in steps that autograd follows, for derivatives of the gradients


def is_possible(call: Call) -> bool:
    """Return whether probabilities can be recomputed: dropout has a seed, and no transform of torch.func is active."""
    drawn = call.dropout_p != 0.0 and call.dropout_seed is None
    return not drawn and not torch._C._are_functorch_transforms_active()


def run_recomputed(call: Call, steps: Steps) -> Results:
    """Return out and LSE, whose gradients recompute the probabilities."""
    # Of latent rows the values are columns of k.
    names = [name for name in DIFFERENTIABLE if name != "v" or call.problem.op != "mla_attention"]
    names = [name for name in names if getattr(call, name) is not None]
    out, lse = _Recomputed.apply(call, steps, names, *(getattr(call, name) for name in names))
    return out, lse


class _Recomputed(torch.autograd.Function):
    """(call, steps, names, tensors of those names) -> (out, LSE)."""

    @staticmethod
    def forward(ctx: Any, call: Call, steps: Steps, names: list[str], *_: torch.Tensor) -> Results:
        plain = replace(call, problem=msgspec.structs.replace(call.problem, needs_grad=False))
        statistics = Statistics.empty(plain)
        out, lse = steps.forward(plain, statistics)
        # Lengths and masks too, so that writing to one before the backward pass is an error.
        given = {name: tensor for name in TENSORS if (tensor := getattr(call, name)) is not None}
        given = {name: tensor for name, tensor in given.items() if not tensor.is_inference()}
        rows = (statistics.largest, statistics.sum, statistics.out)
        kept = (*(None if r is None else r.values for r in rows), out if statistics.out is None else None)
        ctx.save_for_backward(*given.values(), *kept)
        absent: dict[str, Any] = dict.fromkeys(given)
        ctx.call, ctx.given = replace(call, **absent), list(given)
        ctx.steps, ctx.names = steps, names
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors  # asked for once: checkpointing gives each tensor once, and other hooks unpack it
        with _without_autocast(saved[0].device.type):
            return _Recomputed._gradients(ctx, saved, grad_out, grad_lse)

    @staticmethod
    def _gradients(
        ctx: Any, saved: tuple[Any, ...], grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> Any:
        *given, largest, total, out, result = saved
        call = replace(ctx.call, **dict(zip(ctx.given, given, strict=True)))
        wanted = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needed]
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or are_mapped(grad_out, grad_lse):
            found = _by_autograd(call, ctx.steps.recorded, wanted, grad_out, grad_lse)
        else:
            rows = RowTensor.of(call, result) if out is None else RowTensor(out)
            statistics = Statistics(RowTensor(largest), RowTensor(total), rows)
            found = Backward(call, ctx.steps.tiling(call), statistics, wanted).run(grad_out, grad_lse)
        return None, None, None, *(found.get(name) for name in ctx.names)


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast, as in the forward pass."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _by_autograd(
    call: Call,
    recorded: Callable[[Call], Results],
    wanted: list[str],
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Return the gradients by autograd, which can differentiate and map them in turn."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of their own: of two tensors one may be computed from the other, or both may be one.
        views = {name: getattr(call, name).view_as(getattr(call, name)) for name in wanted}
        call = replace(call, **views)
        if call.problem.op == "mla_attention":
            call.v = call.k[..., : call.problem.head_dim_v]
        pairs = zip(recorded(call), (grad_out, grad_lse), strict=True)
        reached = [(result, grad) for result, grad in pairs if grad is not None]
    found = torch.autograd.grad(
        [result for result, _ in reached],
        list(views.values()),
        [grad for _, grad in reached],
        create_graph=again,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(wanted, found, strict=True))


# Scores held at a time: rows × keys × heads × batch elements of float32. 2**24 of them are 64 MiB; on a CPU fewer are
# faster, as they stay in its caches: 8 MiB.
SCORE_ELEMENTS = 2**24
CPU_SCORE_ELEMENTS = 2**21
KEY_BLOCK = 512


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out in q's dtype, and LSE in float32 or None, shaped like Call.new_out and Call.new_lse.

    Products are float32 on every device, float64 for a handmade float64 call. Key blocks that no row sees are skipped
    if the lengths are on the CPU. Autograd records every step, and keeps all probabilities, only for second
    derivatives, transforms of torch.func and dropout without a seed."""
    if call.problem.has_lists:
        return _run_lists(call)
    return _run(by_block_mask(call) if call.problem.has_blocks else call)


def by_block_mask(call: Call) -> Call:
    """Return a call over chosen blocks as one with a block mask of single rows: (B, Hq, Sq, tokens + 2)."""
    p = call.problem
    assert call.indices is not None
    every = call.indices.new_full(call.indices.shape[:3], p.tokens) if call.counts is None else call.counts
    none = torch.zeros_like(every)
    lists = torch.cat([none[..., None], every[..., None], call.indices], dim=-1).repeat_interleave(p.group, dim=1)
    problem = msgspec.structs.replace(p, op="attention", block_mask=True, block_q=1, tokens=0)
    return replace(call, problem=problem, block_mask=lists, indices=None, counts=None)


def _run_lists(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call over lists of slots, some queries at a time: each gathers keys of its own."""
    p, queries = call.problem, call.by_query()
    assert queries.page_table is not None
    size = max(_score_elements(call) // (min(KEY_BLOCK, p.tokens) * max(p.heads_q, p.head_dim)), 1)
    parts = []
    for start in range(0, max(queries.problem.batch, 1), size):
        rows = {
            name: tensor[start : start + size]
            for name in ("q", "q_rope", "page_table", "seqlens_k", "k_scale", "v_scale")
            if (tensor := getattr(queries, name)) is not None
            and not (name.endswith("_scale") and tensor.ndim == 3)  # of tokens
        }
        problem = msgspec.structs.replace(queries.problem, batch=rows["q"].shape[0])
        parts.append(_run(replace(queries, problem=problem, **rows)))
    out = torch.cat([out[:, :, 0] for out, _ in parts]).unflatten(0, p.query_rows).transpose(1, 2)
    out = out if p.packed or p.layout == "bshd" else out.contiguous()
    if not p.return_lse:
        return out, None
    lse = torch.cat([lse[:, :, 0] for _, lse in parts if lse is not None]).unflatten(0, p.query_rows)
    return out, lse.transpose(1, 2).contiguous()


def _run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not call.problem.needs_grad:
        out, lse = _forward(call)
    elif is_possible(call):
        out, lse = run_recomputed(call, Steps(tiling_of, _forward, _recorded))
    else:
        out, lse = _recorded(call)
    return out, lse if call.problem.return_lse else None


def largest_scores(call: Call) -> torch.Tensor:
    """Return the largest score of each row of a dense call, (B, Hq, Sq) in the compute dtype: -inf without keys."""
    plain = replace(call, problem=msgspec.structs.replace(call.problem, needs_grad=False))
    statistics = Statistics.empty(plain)
    _forward(plain, statistics)
    return statistics.largest.values[..., 0]


def tiling_of(call: Call) -> Tiling:
    return Tiling(call, KEY_BLOCK, _score_elements(call), rows=KEY_BLOCK)


def _score_elements(call: Call) -> int:
    return SCORE_ELEMENTS if call.q.device.type != "cpu" else min(SCORE_ELEMENTS, CPU_SCORE_ELEMENTS)


def _recorded(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _forward(call)
    if not any(seen.begin < seen.end for _, seen in tiling_of(call).row_blocks()):
        # No product has seen the inputs: sums over nothing make the zeros part of the graph, as SDPA's are.
        for tensor in (getattr(call, name) for name in TENSORS):
            if tensor is not None and tensor.is_floating_point():
                out = out + tensor[..., :0].sum()
    return out, lse


def _forward(call: Call, statistics: Statistics | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    tiling, results = tiling_of(call), RowBlockResults(call)
    for rows, seen in tiling.row_blocks():
        out, row_max, row_sum, some = _attend(tiling, rows, seen)
        lse = row_max + torch.log(row_sum.masked_fill(~some, 1.0))
        if call.sinks is not None:  # +inf, which was counted as the largest number
            sinks = call.sinks.to(lse.dtype)[:, None, None]
            lse = lse + torch.where(sinks == math.inf, sinks, 0.0)
        lse = torch.where(some, lse, float("-inf"))[..., 0]
        if statistics is not None:
            statistics.put(rows, row_max, row_sum, out)
        results.add(rows, out.to(call.dtype), lse)
    return results.finish()


def _attend(
    tiling: Tiling, rows: RowBlock, seen: Reach
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a row block's output (B,Hq,n,Dv), largest score, sum of exp(score - largest) and any key, (B,Hq,n,1)."""
    call, p = tiling.call, tiling.call.problem
    count, heads = rows.stop - rows.start, key_heads(call)
    shape = (p.batch, p.heads_q, count)
    # (B·H, group·rows, D): one product for all query heads that share keys.
    q = rows.q.reshape(p.batch * heads, -1, p.head_dim)
    acc = q.new_zeros(p.batch * heads, q.shape[1], p.head_dim_v)
    row_max = q.new_full((*shape, 1), float("-inf"))
    row_sum = q.new_zeros(*shape, 1)

    def free(tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor as memory for a result, unless autograd keeps it."""
        return None if p.needs_grad else tensor

    if call.sinks is not None:  # a score that has been seen already, and that brought no value
        sinks = finite_sinks(call, tiling.dtype)[None, :, None, None].expand(*shape, 1)
        # A NaN counts in the sum alone: a maximum of NaN would make NaN of the keys that a row does not attend.
        row_max = sinks.detach().nan_to_num(float("-inf"), float("inf"), float("-inf"))
        row_sum = torch.exp(sinks - row_max.masked_fill(row_max == float("-inf"), 0.0))
    scored, lowest = has_terms(call), torch.finfo(tiling.dtype).min
    factor = 1.0 if scored else call.scale
    fixed = _FixedProducts(q, factor) if p.invariant else None
    scores_of = fixed or _Products(q, factor, min(tiling.size, max(seen.end, 1)), p.needs_grad)
    for tile in tiling.tiles(rows, seen):
        scores = scores_of(tile.k).view(*shape, -1)
        if scored:
            numbers = tiling.numbers(rows, tile.keys) if p.score_mod else None
            scores = with_terms(call, rows, tile.keys, tile.k, scores, tile.distance, tile.bias, numbers)
        if tile.keep is not None:
            scores = scores.masked_fill(~tile.keep, float("-inf"))
        new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True)).detach()
        base = new_max.clamp(min=lowest)  # of rows that have seen nothing, whose maximum is -inf
        probabilities = torch.sub(scores, base, out=free(scores))
        probabilities = torch.exp(probabilities, out=free(probabilities))
        correction = torch.exp(row_max - base)
        summed = probabilities if fixed is None else fixed.padded(probabilities)
        row_sum = row_sum * correction + summed.sum(dim=-1, keepdim=True)
        if call.dropout_p and call.dropout_seed is not None:
            probabilities = probabilities.masked_fill(~dropout_keep_mask(call, rows, tile.keys), 0.0) / (
                1.0 - call.dropout_p
            )
        elif call.dropout_p:
            probabilities = torch.nn.functional.dropout(probabilities, call.dropout_p)
        acc = torch.mul(acc, correction.view(*acc.shape[:2], 1), out=free(acc))
        flat = probabilities.view(*acc.shape[:2], -1)
        if fixed is not None:
            acc += fixed.mixed(flat, tile.v.flatten(0, 1))
        else:
            acc = torch.baddbmm(acc, flat, tile.v.flatten(0, 1), out=free(acc))
        row_max = new_max

    acc = acc.view(*shape, -1)
    some = (row_sum != 0) & rows.inside[:, None, :, None]  # NaN included: an attended NaN must stay visible
    attended = some & (row_max != float("-inf"))  # of a sink of NaN and no key, the sum is NaN and the output 0
    return torch.where(attended, acc / row_sum.masked_fill(~attended, 1.0), 0.0), row_max, row_sum, some


class _Products:
    """scale · Q·Kᵀ of a row block with one key block after another, in shared memory unless autograd keeps it."""

    def __init__(self, q: torch.Tensor, scale: float, keys: int, needs_grad: bool) -> None:
        self.q, self.scale = q, scale
        # A factor of 0 would let a BLAS pass over NaN.
        self.memory = None if needs_grad or scale == 0.0 else q.new_empty(q.shape[0], q.shape[1], keys)

    def __call__(self, k: torch.Tensor) -> torch.Tensor:
        """Return (B·H, group·rows, keys) for K (B, H, keys, D)."""
        across = k.flatten(0, 1).transpose(1, 2)
        if self.memory is None:
            return torch.bmm(self.q, across) * self.scale
        shape = (*self.q.shape[:2], across.shape[2])
        into = self.memory.view(-1)[: math.prod(shape)].view(shape)
        return torch.baddbmm(into, self.q, across, beta=0.0, alpha=self.scale, out=into)


FIXED_ROWS = 64


class _FixedProducts:
    """_Products whose rows' bits depend on no other row: a BLAS chooses its order of sums by the sizes of a product.

    Every product is one of FIXED_ROWS rows with KEY_BLOCK keys, padded with zeros, in memory that torch aligns."""

    def __init__(self, q: torch.Tensor, scale: float) -> None:
        self.q, self.scale = q, scale

    def __call__(self, k: torch.Tensor) -> torch.Tensor:
        """Return (B·H, group·rows, keys) for K (B, H, keys, D)."""
        keys = k.flatten(0, 1)
        found = self.q.new_empty(*self.q.shape[:2], keys.shape[1])
        for head in range(len(keys)):
            held = self._held(keys[head], KEY_BLOCK).t()
            for rows, product in self._products(self.q[head], held):
                found[head, rows] = product[:, : keys.shape[1]]
        return found if self.scale == 1.0 else found.mul_(self.scale)

    def mixed(self, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return P·V (B·H, rows, Dv) for P (B·H, rows, keys) and V (B·H, keys, Dv)."""
        found = v.new_empty(*p.shape[:2], v.shape[2])
        for head in range(len(p)):
            held = self._held(v[head], KEY_BLOCK)
            for rows, product in self._products(self.padded(p[head]), held):
                found[head, rows] = product
        return found

    def padded(self, p: torch.Tensor) -> torch.Tensor:
        """Return probabilities (…, keys) with zeros up to KEY_BLOCK keys."""
        return torch.nn.functional.pad(p, (0, KEY_BLOCK - p.shape[-1]))

    def _held(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        held = rows.new_zeros(count, rows.shape[1])
        held[: len(rows)] = rows
        return held

    def _products(self, left: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        for start in range(0, len(left), FIXED_ROWS):
            part = left[start : start + FIXED_ROWS]
            yield slice(start, start + len(part)), torch.mm(self._held(part, FIXED_ROWS), right)[: len(part)]


def run_backward(call: Call) -> tuple[torch.Tensor, None]:
    """(delta, None) as Call.new_out says; dQ, dK, dV and what else is asked for go where the call has memory for them.

    grad_slopes has the sums of all of a sequence's rows in the first one, and 0 in the others."""
    delta = call.new_out()
    if call.problem.has_blocks:
        call = by_block_mask(call)
    assert call.forward_out is not None
    assert call.forward_lse is not None
    assert call.grad_out is not None
    nothing = torch.isneginf(call.forward_lse)
    out = RowTensor.of(call, call.forward_out)
    largest = RowTensor.of(call, call.forward_lse.masked_fill(nothing, 0.0)[..., None])
    total = RowTensor.of(call, (~nothing).float()[..., None])  # P = exp(S - LSE)
    names = {"q": call.grad_q, "k": call.grad_k, "v": call.grad_v, "bias": call.grad_bias}
    names |= {name: getattr(call, f"grad_{name}") for name in CAPTURED}
    wanted = [name for name, memory in names.items() if memory is not None]
    if call.grad_slopes is not None:
        wanted.append("alibi_slopes")
    found = Backward(call, tiling_of(call), Statistics(largest, total, out), wanted).run(call.grad_out, call.grad_lse)
    for name, memory in names.items():
        if memory is None:
            continue
        gradient = found[name]
        axes = [axis for axis, size in enumerate(memory.shape) if size != gradient.shape[axis]]  # of a broadcast bias
        memory.copy_(gradient.sum(axes, keepdim=True) if axes else gradient)
    if call.grad_slopes is not None:
        _put_first(call, found["alibi_slopes"], call.grad_slopes)
    sums = (call.forward_out.float() * call.grad_out.float()).masked_fill(nothing[..., None], 0.0).sum(-1)
    if call.grad_lse is not None:
        sums = sums - call.grad_lse
    return delta.copy_(sums.masked_fill(nothing, 0.0)), None


def _put_first(call: Call, sums: torch.Tensor, parts: torch.Tensor) -> None:
    """Write sums (B, Hq) into each sequence's first row of parts (B, Hq, Sq) or (1, Hq, Tq), and 0 into the others."""
    parts.zero_()
    if call.cu_seqlens_q is None:
        parts[:, :, :1] = sums[..., None]
        return
    rows = parts.shape[2]
    if rows:
        # Sequences without rows have a sum of 0, wherever it is added.
        parts[0].index_add_(1, call.cu_seqlens_q[:-1].long().clamp(0, rows - 1), sums.transpose(0, 1).to(parts.dtype))
