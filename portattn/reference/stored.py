"""Keys and values of a cache of narrower numbers than q's, as float32, for the blockwise path."""

from __future__ import annotations

import torch

from portattn.schema.problem_limits import DS_GROUP, NV_BLOCK, NVFP4
from portattn.schema.tensors import BLOCK_SCALES, INT4, KV_DTYPE

ZERO_BITS = 0xF  # of a token's scale of int4 numbers: the lowest bits of its fraction
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the code's lower three bits; the fourth is the sign
MIDDLE = 8  # the int4 number that stands for 0 where a scale is not a token's


def dequantize(
    stored: torch.Tensor,
    kind: str,
    scale: torch.Tensor | None,
    by_token: bool = False,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Numbers (…, n, D) of a block, times their scales (…, n) or (…, 1); as they are where they are of q's dtype.

    kind      the cache's format, Problem.kv_format. Of int4 and nvfp4 `stored` is (…, n, D / 2)
    by_token  each token has a scale of its own: of int4 it says which number stands for 0
    blocks    of nvfp4, the bytes of its blocks' scales (…, n, D / 16)
    """
    if kind == "as_q":
        return stored
    if kind == NVFP4:
        assert blocks is not None
        numbers = of_blocks(stored, blocks)
        return numbers if scale is None else numbers * scale[..., None]
    if kind == INT4:
        assert scale is not None
        numbers = unpack_int4(stored).float()
        if by_token:
            scale, zero = split_scale(scale)
            return (numbers - zero[..., None]) * scale[..., None]
        return (numbers - MIDDLE) * scale[..., None]
    numbers = stored.view(KV_DTYPE[kind]).float()
    return numbers if scale is None else numbers * scale[..., None]


def of_blocks(stored: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Numbers (…, D) of nvfp4 bytes (…, D / 2), times the scales (…, D / 16) of their blocks of 16."""
    codes = unpack_int4(stored)
    numbers = torch.tensor(E2M1, device=stored.device)[(codes & 7).long()]
    numbers = torch.where(codes & 8 != 0, -numbers, numbers).unflatten(-1, (-1, NV_BLOCK))
    return (numbers * blocks.view(BLOCK_SCALES).float()[..., None]).flatten(-2)


def unpack_int4(stored: torch.Tensor) -> torch.Tensor:
    """The numbers 0 to 15 (…, D) of bytes (…, D / 2), as int8: of each byte the lower four bits come first."""
    return torch.stack((stored & 15, (stored >> 4) & 15), dim=-1).flatten(-2)


def split_scale(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's scale of int4 numbers without its lowest four bits, and what these say: the number that stands for 0.

    Source: vLLM's int4_per_token_head, vllm/v1/attention/ops/int4_per_token_head.py.
    """
    bits = scale.view(torch.int32)
    return (bits & ~ZERO_BITS).view(torch.float32), (bits & ZERO_BITS).float()


def latent_rows(stored: torch.Tensor, rank: int) -> torch.Tensor:
    """Rows (…, n, rank + rope) of fp8_ds_mla bytes (…, n, width), dequantised, as float32.

    rank  e4m3 numbers of a row; then come their scales, and bfloat16 numbers
    """
    groups = rank // DS_GROUP
    numbers = stored[..., :rank].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (groups, DS_GROUP))
    scales = stored[..., rank : rank + 4 * groups].contiguous().view(torch.float32)
    rotary = stored[..., rank + 4 * groups :].contiguous().view(torch.bfloat16)
    return torch.cat([(numbers * scales[..., None]).flatten(-2), rotary.float()], dim=-1)
