"""Keys and values of a cache of narrower numbers than q's, as float32, for the blockwise path."""

from __future__ import annotations

import torch

from portattn.schema.tensors import KV_DTYPE


def widened(stored: torch.Tensor, kind: str, scale: torch.Tensor | None) -> torch.Tensor:
    """Numbers (…, n, D) of a block, times their scales (…, n) or (…, 1); as they are where they are of q's dtype.

    kind  the cache's format, Problem.kv_format
    """
    if kind == "as_q":
        return stored
    numbers = stored.view(KV_DTYPE[kind]).float()
    return numbers if scale is None else numbers * scale[..., None]
