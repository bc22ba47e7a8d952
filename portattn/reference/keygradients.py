"""Gradients of keys and values, added up block by block, wherever the keys lie."""

from __future__ import annotations

from dataclasses import replace

import torch

from portattn.reference.keyblocks import key_blocks, key_heads
from portattn.reference.tiles import Tile, Tiling
from portattn.schema.call import Call


class KeyGradients:
    """Sums in the dtype that is computed with: (B, Hk, Sk, X) where keys lie in their slots, (1, Hk, Tk, X) where they
    are packed, and (B, H, places, X) of those that are gathered from pages or by indices, which go back at the end."""

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
