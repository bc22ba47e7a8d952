"""Keys and values of a cache of narrower numbers than q's, as float32, for the blockwise path."""

from __future__ import annotations

import torch

from portattn.schema.problem import DS_GROUP
from portattn.schema.tensors import KV_DTYPE


def widened(stored: torch.Tensor, kind: str, scale: torch.Tensor | None) -> torch.Tensor:
    """Numbers (…, n, D) of a block, times their scales (…, n) or (…, 1); as they are where they are of q's dtype.

    kind  the cache's format, Problem.kv_format
    """
    if kind == "as_q":
        return stored
    numbers = stored.view(KV_DTYPE[kind]).float()
    return numbers if scale is None else numbers * scale[..., None]


def latent_rows(stored: torch.Tensor, rank: int) -> torch.Tensor:
    """Rows (…, n, rank + rope) of fp8_ds_mla bytes (…, n, width), dequantised, as float32.

    rank  e4m3 numbers of a row; then come their scales, and bfloat16 numbers
    """
    groups = rank // DS_GROUP
    numbers = stored[..., :rank].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (groups, DS_GROUP))
    scales = stored[..., rank : rank + 4 * groups].contiguous().view(torch.float32)
    rotary = stored[..., rank + 4 * groups :].contiguous().view(torch.bfloat16)
    return torch.cat([(numbers * scales[..., None]).flatten(-2), rotary.float()], dim=-1)
