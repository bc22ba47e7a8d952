"""Tiles of the blockwise path: rows and keys taken together, visible keys of each row, terms of scores, gradients.

Dao, "FlashAttention-2" (arXiv 2307.08691, section 3.2): P = exp(S − largest) / sum, delta = rowsum(out·grad_out) −
grad_lse, dP = grad_out·Vᵀ, dV = Pᵀ·grad_out, dS = P·(dP − delta). Autograd differentiates S's terms inside a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from portattn.reference.blocks import (
    Extent,
    KeyBlock,
    Reach,
    RowBlock,
    RowTensor,
    Statistics,
    block_size,
    compute_dtype,
    key_blocks,
    key_extent,
    key_heads,
    key_places,
    load_rows,
    query_extent,
    reach,
)
from portattn.reference.dropout import keep_mask
from portattn.reference.score_functions import WHOLE, call_mod, listed_marks
from portattn.schema.call import Call
from portattn.schema.ops import ADDED, BACKWARD, CAPTURED, FEATURES
from portattn.schema.problem_limits import MAX_TREE


def in_tree(call: Call, rows: RowBlock, keys: KeyBlock, queries: Extent, all_keys: Extent) -> torch.Tensor:
    """Return which keys the tree mask shows each row: bool (B, 1, rows, keys); all keys before the new ones."""
    assert call.tree_mask is not None
    if rows.storage is None:
        words = call.tree_mask[:, rows.start : rows.stop]
    else:  # a row of no sequence is the one after the last
        words = call.tree_mask[0][rows.storage.clamp(max=call.tree_mask.shape[1] - 1)]
    first = all_keys.end - (queries.end - queries.first)
    node = keys.position - first[:, None, None]  # (B, 1, keys)
    shifted = words[:, :, None] >> node.clamp(0, MAX_TREE - 1)  # (B, rows, keys)
    return ((node < 0) | (shifted & 1).bool())[:, None]


def in_blocks(call: Call, marks: torch.Tensor, rows: RowBlock, keys: KeyBlock) -> torch.Tensor:
    """Return the marks (B, Hq, blocks, blocks) of the blocks that scores lie in: int8 (B, Hq, rows, keys)."""
    p, device = call.problem, call.q.device
    down = torch.arange(rows.start, rows.stop, device=device) // p.block_q
    across = torch.arange(keys.start, keys.stop, device=device) // p.block_k
    return marks[:, :, down[:, None], across]


@dataclass(frozen=True, slots=True)
class Tile:
    """A row block's rows and a block of keys, in the compute dtype."""

    keys: KeyBlock
    k: torch.Tensor  # (B, H, n, D); like v, 0 where no row attends
    v: torch.Tensor  # (B, H, n, Dv)
    bias: torch.Tensor | None  # (B, Hq, rows, n)
    distance: torch.Tensor | None  # (B, 1 or Hq, rows, n) int64: query's position less key's; None if unneeded
    keep: torch.Tensor | None  # (B, 1 or Hq, rows, n) bool: the row attends the key; None if all do


class Tiling:
    """A call in row blocks, and these in tiles of at most `size` keys and `elements` scores.

    If only some rows of a block see a key, a block has at most `rows` rows."""

    def __init__(self, call: Call, size: int, elements: int, rows: int) -> None:
        p = call.problem
        self.call, self.dtype = call, compute_dtype(call)
        self.q_extent, self.k_extent = query_extent(call), key_extent(call)
        self.places = key_places(call, self.k_extent)
        self.size = block_size(call, size, elements)
        self.marks = None if call.block_mask is None else listed_marks(call.block_mask, -(-p.seq_k // p.block_k))
        # Padded rows are results as well; packed sequences have only their own rows.
        self.longest = self.q_extent.longest(p.seq_q) if p.packed else p.seq_q
        if p.batch == 0 or call.q.shape[2] == 0:
            self.longest = 0
        self.count = max(elements // max(p.batch * p.heads_q * min(self.size, self.places or 1), 1), 1)
        if p.causal != "none" or p.window or p.chunk or p.block_mask:
            self.count = min(self.count, rows)  # the more rows, the more keys that only some of them see

    def row_blocks(self) -> Iterator[tuple[RowBlock, Reach]]:
        for start in range(0, self.longest, self.count):
            rows = load_rows(self.call, self.q_extent, start, min(start + self.count, self.longest))
            yield rows, reach(self.call, self.q_extent, self.k_extent, rows.start, rows.stop, self.places)

    def numbers(self, rows: RowBlock, keys: KeyBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of queries and of keys in their sequences that score and mask functions take.

        (B or 1, rows) and (B or 1, keys): a query of attention counts from its sequence's first, one of a cache as its
        key does."""
        call, first = self.call, self.q_extent.first
        if call.problem.op in BACKWARD or call.problem.backward:
            position = rows.position - first[:, None]
        else:
            position = _positions(call, rows, self.q_extent, self.k_extent)[:, 0, :, 0] - self.k_extent.first[:, None]
        return position, keys.position[:, 0] - self.k_extent.first[:, None]

    def tiles(self, rows: RowBlock, seen: Reach) -> Iterator[Tile]:
        call, p = self.call, self.call.problem
        at = _positions(call, rows, self.q_extent, self.k_extent)
        for keys in key_blocks(call, self.k_extent, self.size, seen.begin, seen.end):
            marks = None if self.marks is None else in_blocks(call, self.marks, rows, keys)
            listed = None if marks is None else marks != 0
            if listed is not None and listed.device.type == "cpu" and not listed.any():
                continue
            k, v = keys.k.to(self.dtype), keys.v.to(self.dtype)
            open_to_all = seen.all_begin <= keys.start and keys.stop <= seen.all_end
            bias = distance = keep = None
            if call.bias is not None:
                bias = call.bias[:, :, rows.start : rows.stop, keys.start : keys.stop].to(self.dtype)
            if call.alibi_slopes is not None or not open_to_all:
                distance = at - keys.position[:, :, None]  # (B, 1 or Hq, rows, keys)
            hiding = (bias, call.mask, call.tree_mask, listed, p.mask_mod or None)
            if not open_to_all or any(hides is not None for hides in hiding):
                keep = _keep(call, rows, keys, distance, bias)
                if p.chunk and not open_to_all:
                    first = self.k_extent.first[:, None, None, None]
                    keep = keep & ((at - first) // p.chunk == (keys.position[:, :, None] - first) // p.chunk)
                if call.tree_mask is not None:
                    keep = keep & in_tree(call, rows, keys, self.q_extent, self.k_extent)
                if p.mask_mod:
                    shown = call_mod(call, p.mask_mod, *self.numbers(rows, keys))
                    keep = keep & (shown if marks is None else shown | (marks == WHOLE))
                if listed is not None:
                    keep = keep & listed
                # Keys that no row attends can hold NaN, and 0·NaN is NaN in the output as well as in gradients.
                unused = ~keep.any(dim=2)  # (B, 1 or Hq, keys)
                if unused.shape[1] != 1:
                    unused = unused.reshape(p.batch, key_heads(call), -1, keys.stop - keys.start).all(dim=2)
                if unused.device.type != "cpu" or unused.any():
                    k, v = k.masked_fill(unused[..., None], 0.0), v.masked_fill(unused[..., None], 0.0)
            yield Tile(keys, k, v, bias, distance, keep)


def dropout_keep_mask(call: Call, rows: RowBlock, keys: KeyBlock) -> torch.Tensor:
    """Return which probabilities dropout's seed keeps: bool (B, Hq, rows, keys)."""
    assert call.dropout_seed is not None
    p, device = call.problem, call.q.device
    heads = torch.arange(p.batch * p.heads_q, device=device).view(p.batch, p.heads_q, 1, 1)
    places = torch.arange(keys.start, keys.stop, device=device)
    return keep_mask(call.dropout_seed, call.dropout_p, heads, rows.position[0][:, None], places)


def _positions(call: Call, rows: RowBlock, queries: Extent, keys: Extent) -> torch.Tensor:
    """Return each query's position among the keys: (B, 1, rows, 1)."""
    shift = keys.first - queries.first if call.problem.causal == "top_left" else keys.end - queries.end
    return (rows.position + shift[:, None])[:, None, :, None]


def _keep(
    call: Call, rows: RowBlock, keys: KeyBlock, distance: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return which keys each row attends: bool (B, 1 or Hq, rows, keys). Without `distance` no position hides a key."""
    p = call.problem
    keep = rows.inside[:, None, :, None] & keys.valid[:, :, None]
    if distance is not None:
        if p.causal != "none":
            keep = keep & (distance >= 0)
        if p.window_left >= 0:
            keep = keep & (distance <= p.window_left)
        if p.window_right >= 0:
            keep = keep & (distance >= -p.window_right)
    if call.mask is not None:
        keep = keep & call.mask[:, :, rows.start : rows.stop, keys.start : keys.stop]
    if bias is not None:
        keep = keep & (bias != float("-inf"))
    return keep


# Below this expected number of further tables that hold a key, its probability is a sum of powers: 8 of them leave
# less than one unit in float32's last place.
SERIES_BELOW = 0.5
SERIES_TERMS = 8


def has_terms(call: Call) -> bool:
    given = any(getattr(call, name) is not None for name in ADDED)
    return call.problem.softcap or call.problem.magicpig or bool(call.problem.score_mod) or given


def finite_sinks(call: Call, dtype: torch.dtype) -> torch.Tensor:
    """Return the call's sinks (Hq,) with +inf as the dtype's largest number, which takes all the weight as well."""
    assert call.sinks is not None
    return call.sinks.to(dtype).clamp(max=torch.finfo(dtype).max)


def with_terms(
    call: Call,
    rows: RowBlock,
    keys: KeyBlock,
    k: torch.Tensor,
    products: torch.Tensor,
    distance: torch.Tensor | None,
    bias: torch.Tensor | None,
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return scores (B, Hq, rows, keys) for the products Q·Kᵀ, with the terms in the documented order.

    Args:
        k: (B, H, keys, D), the keys of the products.
        distance: (B, 1 or Hq, rows, keys) int64, the query's position less the key's, for ALiBi.
        bias: (B, Hq, rows, keys).
        numbers: of queries and keys, for a score function (Tiling.numbers).
    """
    scores = products * call.scale
    if call.problem.score_mod:
        assert numbers is not None
        scores = call_mod(call, call.problem.score_mod, *numbers, scores)
    if call.problem.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        assert distance is not None
        scores = scores - call.alibi_slopes.to(scores.dtype)[:, :, None, None] * distance.abs()
    if bias is not None:
        scores = scores + bias
    if call.log_weights is not None:
        scores = scores + call.log_weights[:, :, None, keys.start : keys.stop].to(scores.dtype)
    if (hashing := call.hashing()) is not None:
        bits, tables = (t.to(scores.dtype)[None, :, None, None] for t in hashing)
        norms = rows.q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[:, :, None]  # (B, Hq, rows, keys)
        # Of a vector of zeros every direction is as good; it counts as orthogonal.
        cosine = products / norms.clamp(min=torch.finfo(torch.float32).tiny)
        scores = scores - log_sampled(cosine, bits, tables)
    return scores


def log_sampled(cosine: torch.Tensor, bits: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Return the log of the chance that a key at this cosine shares the query's bucket in two or more hash tables.

    Chen et al., "MagicPIG" (arXiv 2410.16179), with SimHash's collision probability: `tables` of `bits` bits each. All
    float32; the result is at least the log of the smallest normal number."""
    same_bit = torch.acos(-cosine.clamp(-1.0, 1.0)) / math.pi  # 1 − acos(c)/π without its cancellation
    x = same_bit**bits
    # 1 − (1−x)^L − L·x·(1−x)^(L−1) = −expm1((L−1)·log1p(−x) + log1p((L−1)·x)), which cancels only where (L−1)·x is
    # small. There it is the sum over k ≥ 2 of (−1)^k · (k−1) · C(L, k) · x^k.
    others = tables - 1.0
    expected = others * x
    direct = -torch.expm1(others * torch.log1p(-x.clamp(max=1.0 - 2.0**-24)) + torch.log1p(expected))
    power = 0.5 * tables * expected * x  # C(L, 2)·x², in an order that does not underflow before it has to
    series = power
    for k in range(3, 3 + SERIES_TERMS):
        power = -power * x * (tables - (k - 1)) / k
        series = series + (k - 1) * power
    probability = torch.where(expected < SERIES_BELOW, series, direct)
    return torch.log(probability.clamp(min=torch.finfo(torch.float32).tiny))


class KeyGradients:
    """Sums of dK and dV: (B, Hk, Sk, X), packed (1, Hk, Tk, X), or gathered (B, H, places, X), scattered at the end."""

    def __init__(self, call: Call, tiling: Tiling) -> None:
        p = call.problem
        self.call, self.tiling = call, tiling
        self.gathered = call.page_table is not None or call.indices is not None
        shape = (p.batch, key_heads(call), tiling.places) if self.gathered else call.k.shape[:3]
        self.k = call.empty(*shape, p.head_dim, dtype=tiling.dtype).zero_()
        self.v = call.empty(*shape, p.head_dim_v, dtype=tiling.dtype).zero_()

    def add(self, tile: Tile, k: torch.Tensor, v: torch.Tensor) -> None:
        keys = tile.keys
        if tile.keep is not None:  # of a place without a key nothing counts, whatever the rows hold
            nothing = ~keys.valid[..., None]
            k, v = k.masked_fill(nothing, 0.0), v.masked_fill(nothing, 0.0)
        if self.call.cu_seqlens_k is None:
            self.k[:, :, keys.start : keys.stop] += k
            self.v[:, :, keys.start : keys.stop] += v
            return
        origin = self.tiling.k_extent.origin[:, None]
        rows = (origin + keys.position[0]).clamp(max=self.k.shape[2] - 1).flatten()
        self.k[0].index_add_(1, rows, k.transpose(0, 1).flatten(1, 2))
        self.v[0].index_add_(1, rows, v.transpose(0, 1).flatten(1, 2))

    def finish(self) -> dict[str, torch.Tensor]:
        """Return the gradients of k and v, or of k alone for latent rows, of which v is a part."""
        call, latent = self.call, self.call.problem.op == "mla_attention"
        if not self.gathered:
            return {"k": self.k, "v": self.v}
        names = ("k",) if latent else ("k", "v")
        leaves = {name: getattr(call, name).detach().to(self.tiling.dtype).requires_grad_() for name in names}
        with torch.enable_grad():
            blocks = key_blocks(
                replace(call, **leaves), self.tiling.k_extent, max(self.tiling.places, 1), 0, self.tiling.places
            )
            whole = next(blocks, None)
        if whole is None:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        found = torch.autograd.grad([whole.k, whole.v], list(leaves.values()), [self.k, self.v])
        return dict(zip(names, found, strict=True))


@dataclass(frozen=True, slots=True)
class _Rows:
    rows: RowBlock  # its queries, 0 where nothing is attended
    base: torch.Tensor  # (B, Hq, n, 1), like inverse: P = exp(S − base)·inverse
    inverse: torch.Tensor
    delta: torch.Tensor  # (B, Hq, n, 1)
    grads: torch.Tensor  # (B·H, group·n, Dv): grad_out, 0 where nothing is attended


class Backward:
    """The gradients of one call."""

    def __init__(self, call: Call, tiling: Tiling, statistics: Statistics, wanted: list[str]) -> None:
        self.call, self.tiling, self.statistics, self.wanted = call, tiling, statistics, wanted
        self.q, self.keys = RowTensor.zeros(call, call.problem.head_dim), KeyGradients(call, tiling)
        self.scored = has_terms(call)
        self.found: dict[str, torch.Tensor] = {}
        for name in (name for name in (*CAPTURED, *FEATURES) if name in wanted and name != "bias"):
            self.found[name] = torch.zeros_like(getattr(call, name), dtype=tiling.dtype)
        if call.bias is not None and "bias" in wanted:
            self.found["bias"] = call.bias.new_zeros(call.bias.shape)  # no element is part of two tiles

    def run(self, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the wanted gradients by name, in their tensors' dtypes; None stands for zeros."""
        call = self.call
        if grad_out is None:
            grad_out = call.q.new_zeros(()).expand(*call.q.shape[:3], call.problem.head_dim_v)
        of_out = RowTensor.of(call, grad_out)
        of_lse = None if grad_lse is None else RowTensor.of(call, grad_lse[..., None])
        for rows, seen in self.tiling.row_blocks():
            self._add_block(self._block(rows, of_out, of_lse), seen)
        found, of_q = self.found | self.keys.finish(), self.q.whole(call)
        found["q"], found["q_rope"] = of_q.split((call.q.shape[3], of_q.shape[3] - call.q.shape[3]), dim=3)
        return {name: found[name].to(getattr(call, name).dtype) for name in self.wanted}

    def _block(self, rows: RowBlock, of_out: RowTensor, of_lse: RowTensor | None) -> _Rows:
        assert self.statistics.out is not None
        total, largest = self.statistics.sum.take(rows), self.statistics.largest.take(rows)
        nothing = (total == 0) | (largest == float("-inf")) | ~rows.inside[:, None, :, None]
        grads = of_out.take(rows).masked_fill(nothing, 0.0)
        delta = (grads * self.statistics.out.take(rows)).masked_fill(nothing, 0.0).sum(dim=-1, keepdim=True)
        if of_lse is not None:
            delta = delta - of_lse.take(rows).masked_fill(nothing, 0.0)
        return _Rows(
            rows=replace(rows, q=rows.q.masked_fill(nothing, 0.0)),
            base=largest.masked_fill(nothing, 0.0),
            inverse=(1.0 / total.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0),
            delta=delta,
            grads=grads.reshape(len(grads) * key_heads(self.call), -1, grads.shape[3]),
        )

    def _add_block(self, block: _Rows, seen: Reach) -> None:
        sinks = self.call.sinks
        if sinks is not None and "sinks" in self.found:  # each a score without a value
            scores = finite_sinks(self.call, self.tiling.dtype)[None, :, None, None]
            probabilities = torch.exp(scores - block.base) * block.inverse
            self.found["sinks"] -= (probabilities * block.delta).sum(dim=(0, 2, 3))
        of_q = torch.zeros_like(block.rows.q)
        for tile in self.tiling.tiles(block.rows, seen):
            of_q += self._add_tile(block, tile)
        self.q.put(block.rows, of_q)

    def _add_tile(self, block: _Rows, tile: Tile) -> torch.Tensor:
        """Add a tile's part of the gradients, and return its part of the queries': (B, Hq, n, D)."""
        call, shape = self.call, block.rows.q.shape[:3]
        queries = block.rows.q
        if tile.keep is not None and call.sinks is not None:
            # With a sink, a row that is hidden from all keys attends something, and may hold NaN all the same.
            queries = queries.masked_fill(~tile.keep.any(dim=-1, keepdim=True), 0.0)
        q, v = queries.reshape(*block.grads.shape[:2], -1), tile.v.flatten(0, 1)
        k = tile.k.flatten(0, 1)
        products = torch.bmm(q, k.transpose(1, 2)).view(*shape, -1)
        graph = _Graph(self.tiling, block.rows, tile, products) if self.scored else None
        scores = products * call.scale if graph is None else graph.scores.detach()
        probabilities = torch.exp(_hidden(tile, scores, float("-inf")) - block.base).mul_(block.inverse)
        of_probabilities = torch.bmm(block.grads, v.transpose(1, 2)).view_as(scores)
        dropped = probabilities
        if call.dropout_p:
            factor = dropout_keep_mask(call, block.rows, tile.keys).to(scores.dtype).div_(1.0 - call.dropout_p)
            dropped, of_probabilities = probabilities * factor, of_probabilities.mul_(factor)
        of_v = torch.bmm(dropped.view(*q.shape[:2], -1).transpose(1, 2), block.grads)
        of_scores = _hidden(tile, of_probabilities.sub_(block.delta).mul_(probabilities), 0.0)
        found = {} if graph is None else graph.gradients(of_scores)
        of_products = found.pop("products") if graph is not None else of_scores.mul_(call.scale)
        of_products = _hidden(tile, of_products, 0.0).view(*q.shape[:2], -1)
        of_q = torch.bmm(of_products, k).view_as(block.rows.q)
        of_k = torch.bmm(of_products.transpose(1, 2), q).view_as(tile.k)
        if "q" in found:
            of_q, of_k = of_q + found.pop("q"), of_k + found.pop("k")
        self.keys.add(tile, of_k, of_v.view_as(tile.v))
        for name in found.keys() & self.found.keys():
            if name == "bias":
                rows, keys = block.rows, tile.keys
                self.found[name][:, :, rows.start : rows.stop, keys.start : keys.stop] = found[name]
            else:
                self.found[name] += found[name]
        return of_q


class _Graph:
    """The scores of a tile, through which autograd computes the gradients of their terms."""

    def __init__(self, tiling: Tiling, rows: RowBlock, tile: Tile, products: torch.Tensor) -> None:
        call, numbers = tiling.call, tiling.numbers(rows, tile.keys)
        given = {"products": products} | {name: getattr(call, name) for name in ADDED} | {"bias": tile.bias}
        if call.problem.magicpig:  # whose weights depend on the lengths of q and k as well
            given |= {"q": rows.q, "k": tile.k}
        if call.problem.score_mod:
            captured = {name: getattr(call, name) for name in CAPTURED}
            given |= {name: each for name, each in captured.items() if each is not None and each.is_floating_point()}
        self.leaves = {
            name: (tensor.clone() if tensor.is_inference() else tensor.detach()).to(products.dtype).requires_grad_()
            for name, tensor in given.items()
            if tensor is not None
        }
        leaves = self.leaves
        added: dict[str, Any] = {name: leaves.get(name) for name in ADDED if name != "bias"}
        added |= {name: leaves[name] for name in CAPTURED if name in leaves}
        made = replace(call, **added)
        rows, k = replace(rows, q=leaves.get("q", rows.q)), leaves.get("k", tile.k)
        with torch.enable_grad():
            self.scores = with_terms(made, rows, tile.keys, k, leaves["products"], tile.distance, leaves.get("bias"),
                                     numbers)  # fmt: skip

    def gradients(self, of_scores: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = list(self.leaves.values())
        if not self.scores.requires_grad:  # a score function may read no score
            return {name: torch.zeros_like(leaf) for name, leaf in self.leaves.items()}
        found = torch.autograd.grad(self.scores, leaves, of_scores, allow_unused=True, materialize_grads=True)
        return dict(zip(self.leaves, found, strict=True))


def _hidden(tile: Tile, values: torch.Tensor, fill: float) -> torch.Tensor:
    """Return the values (B, Hq, rows, keys) with `fill` where the row does not attend the key."""
    return values if tile.keep is None else values.masked_fill(~tile.keep, fill)
