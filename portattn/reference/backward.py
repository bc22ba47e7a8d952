"""Gradients of the blockwise path, tile by tile, from the row statistics of its forward pass.

The formulas are from Dao, "FlashAttention-2" (arXiv 2307.08691, section 3.2): with P = exp(S − largest) / sum,
delta = rowsum(out·grad_out) − grad_lse and dP = grad_out·Vᵀ, dV = Pᵀ·grad_out and dS = P·(dP − delta), the gradient of
the scores. Autograd then differentiates the scores by Q·Kᵀ and by their other terms, inside one tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from portattn.reference.extents import Reach
from portattn.reference.keyblocks import key_blocks, key_heads
from portattn.reference.rowblocks import RowBlock, RowTensor, Statistics
from portattn.reference.scoreterms import finite_sinks, has_terms, with_terms
from portattn.reference.tiles import Tile, Tiling, dropout_keep_mask
from portattn.schema.call import Call


class KeyGradients:
    """Sums in the tiling's dtype: (B, Hk, Sk, X) for contiguous keys, (1, Hk, Tk, X) for packed ones, and
    (B, H, places, X) for keys gathered from pages or by indices, scattered back at the end."""

    def __init__(self, call: Call, tiling: Tiling) -> None:
        p = call.problem
        self.call, self.tiling = call, tiling
        self.gathered = call.page_table is not None or call.indices is not None
        shape = (p.batch, key_heads(call), tiling.places) if self.gathered else call.k.shape[:3]
        self.k = call.empty(*shape, p.head_dim, dtype=tiling.dtype).zero_()
        self.v = call.empty(*shape, p.head_dim_v, dtype=tiling.dtype).zero_()

    def add(self, tile: Tile, k: torch.Tensor, v: torch.Tensor) -> None:
        """A tile's part: (B, H, n, D) and (B, H, n, Dv)."""
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
        """The gradients of the call's k and v; of latent rows, of which v is a part, of k alone."""
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
    """A row block in the backward pass.

    rows            its queries, 0 where nothing is attended
    base, inverse   (B, Hq, n, 1): P = exp(S − base)·inverse
    delta           (B, Hq, n, 1)
    grads           (B·H, group·n, Dv): grad_out, 0 where nothing is attended
    """

    rows: RowBlock
    base: torch.Tensor
    inverse: torch.Tensor
    delta: torch.Tensor
    grads: torch.Tensor


class Backward:
    """The gradients of one call."""

    def __init__(self, call: Call, tiling: Tiling, statistics: Statistics, wanted: list[str]) -> None:
        self.call, self.tiling, self.statistics, self.wanted = call, tiling, statistics, wanted
        self.q, self.keys = RowTensor.zeros(call, call.problem.head_dim), KeyGradients(call, tiling)
        self.scored = has_terms(call)
        self.found: dict[str, torch.Tensor] = {}
        for name in ("alibi_slopes", "log_weights", "sinks"):
            if name in wanted:
                self.found[name] = torch.zeros_like(getattr(call, name), dtype=tiling.dtype)
        if call.bias is not None and "bias" in wanted:
            self.found["bias"] = call.bias.new_zeros(call.bias.shape)  # no element is part of two tiles

    def run(self, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """By name, in the dtypes of the tensors. None stands for zeros."""
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
        """The tile's part of the gradient of the block's queries: (B, Hq, n, D)."""
        call, shape = self.call, block.rows.q.shape[:3]
        queries = block.rows.q
        if tile.keep is not None and call.sinks is not None:
            # With a sink, a row that is hidden from all keys attends something, and may hold NaN all the same.
            queries = queries.masked_fill(~tile.keep.any(dim=-1, keepdim=True), 0.0)
        q, v = queries.reshape(*block.grads.shape[:2], -1), tile.v.flatten(0, 1)
        k = tile.k.flatten(0, 1)
        products = torch.bmm(q, k.transpose(1, 2)).view(*shape, -1)
        graph = _Graph(call, block.rows, tile, products) if self.scored else None
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

    def __init__(self, call: Call, rows: RowBlock, tile: Tile, products: torch.Tensor) -> None:
        given = {"products": products, "bias": tile.bias, "q": None, "k": None}
        given |= {"alibi_slopes": call.alibi_slopes, "log_weights": call.log_weights}
        if call.problem.magicpig:  # whose weights depend on the lengths of q and k as well
            given |= {"q": rows.q, "k": tile.k}
        self.leaves = {
            name: tensor.detach().to(products.dtype).requires_grad_()
            for name, tensor in given.items()
            if tensor is not None
        }
        leaves = self.leaves
        made = replace(call, alibi_slopes=leaves.get("alibi_slopes"), log_weights=leaves.get("log_weights"))
        rows, k = replace(rows, q=leaves.get("q", rows.q)), leaves.get("k", tile.k)
        with torch.enable_grad():
            self.scores = with_terms(made, rows, tile.keys, k, leaves["products"], tile.distance, leaves.get("bias"))

    def gradients(self, of_scores: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of everything that the scores are made of, by name."""
        found = torch.autograd.grad(self.scores, list(self.leaves.values()), of_scores)
        return dict(zip(self.leaves, found, strict=True))


def _hidden(tile: Tile, values: torch.Tensor, fill: float) -> torch.Tensor:
    """The values (B, Hq, rows, keys), with `fill` where the row does not attend the key."""
    return values if tile.keep is None else values.masked_fill(~tile.keep, fill)
