"""Dropout's mask by a counter-based generator, so that any block of it can be made at any time.

Philox4x32-10 (as in triton.language.philox and curand) and Philox2x32-10 of Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3" (SC 2011), in int64 tensors: torch has no product of uint32 with its upper half.
"""

from __future__ import annotations

import torch

ROUNDS = 10
FACTORS = (0xD2511F53, 0xCD9E8D57)  # of the first and the third counter word
FACTOR = 0xD256D193  # of Philox2x32
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the two key words after every round: the golden ratio, and √3 − 1
WORD = 0xFFFFFFFF
# Numbers made at a time on a CPU: 128 KiB a tensor stay in its caches, ten times faster than whole blocks.
CPU_ELEMENTS = 2**14


def philox(seed: torch.Tensor, *counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the four output words of Philox4x32-10, int64 in [0, 2³²), for a seed and four counter words.

    Words that depend on one counter word alone are computed once for it: a block's first two rounds cost little."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(ROUNDS):
        # 64 bits of a product, of which int64 shows the uppermost as a sign.
        first, third = c0 * FACTORS[0], c2 * FACTORS[1]
        c0, c1 = (third >> 32).bitwise_and_(WORD) ^ c1 ^ k0, third & WORD
        c2, c3 = (first >> 32).bitwise_and_(WORD) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def philox_of_two(key: torch.Tensor, *counter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two output words of Philox2x32-10, int64 in [0, 2³²), for a key word and two counter words."""
    c0, c1 = counter
    for _ in range(ROUNDS):
        product = c0 * FACTOR
        c0, c1 = (product >> 32).bitwise_and_(WORD) ^ c1 ^ key, product & WORD
        key = (key + WEYL[0]) & WORD
    return c0, c1


def threshold(probability: float) -> int:
    """Return the smallest 16 bits that are kept, round(p·2¹⁶); 2¹⁶ keeps nothing (only where p > 1 − 2⁻¹⁷)."""
    return round(probability * 2**16)


def keep_mask(
    seed: torch.Tensor,
    probability: float,
    batch_heads: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Return which probabilities are kept: bool, in the broadcast shape of the index tensors.

    Args:
        seed: (1,) int64, not read back.
        probability: chance of a drop, in [0, 1).
        batch_heads: int64, b·Hq + h.
        rows, keys: int64 indices in (B, H, S, D); of packed tensors counted within sequence b.
    """
    shape = torch.broadcast_shapes(batch_heads.shape, rows.shape, keys.shape)
    if keys.device.type == "cpu" and shape.numel() > CPU_ELEMENTS:
        axis = next(axis for axis, size in enumerate(shape) if size > 1)
        size = shape[axis]
        step = max(size * CPU_ELEMENTS // shape.numel(), 1)
        parts = [
            keep_mask(seed, probability, *(_part(x, len(shape), axis, begin, step) for x in (batch_heads, rows, keys)))
            for begin in range(0, size, step)
        ]
        return torch.cat(parts, dim=axis)
    nothing = torch.zeros((), dtype=torch.long, device=keys.device)
    key, turn, _, _ = philox(seed, batch_heads, nothing, nothing, nothing)
    word, other = philox_of_two(key, _group(keys), _group(rows) ^ turn)
    bits = torch.where((rows & 8) != 0, other, word)
    bits = torch.where((keys & 8) != 0, bits >> 16, bits & 0xFFFF)
    return bits >= threshold(probability)


def _group(positions: torch.Tensor) -> torch.Tensor:
    """Return the number of each position's group, which p and p + 8 share: p without bit 3."""
    return positions >> 4 << 3 | positions & 7


def _part(indices: torch.Tensor, axes: int, axis: int, begin: int, size: int) -> torch.Tensor:
    """Return up to `size` of the indices from `begin` along a broadcast axis; all if there is only one."""
    axis -= axes - indices.dim()
    if axis < 0 or indices.shape[axis] == 1:
        return indices
    return indices.narrow(axis, begin, min(size, indices.shape[axis] - begin))


def block_mask(
    seed: torch.Tensor, probability: float, batch: int, heads: int, rows: range, keys: range
) -> torch.Tensor:
    """Return the mask of a block of rows and keys: bool (batch, heads, rows, keys), True = kept."""

    def counted(indices: range, axis: int) -> torch.Tensor:
        found = torch.arange(indices.start, indices.stop, device=seed.device)
        return found.view(-1, *[1] * (2 - axis))

    mask = keep_mask(seed, probability, counted(range(batch * heads), 0), counted(rows, 1), counted(keys, 2))
    return mask.expand(batch * heads, len(rows), len(keys)).view(batch, heads, len(rows), len(keys))
