"""dropout_mask: what dropout with a seed keeps, for comparisons."""

from __future__ import annotations

import torch

from portattn.errors import ArgumentError
from portattn.reference.dropout import block_mask
from portattn.validate.checks import check_dense, check_share, check_size

OP = "dropout_mask"
SEEDS = range(-(2**63), 2**63)


def dropout_mask(
    seed: int | torch.Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    seq_q: int,
    seq_k: int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Which attention probabilities dropout with this seed keeps: bool (batch, heads, seq_q, seq_k), True = kept.

    The mask that a call with this seed and dropout_p applies in its forward and its backward pass, on every path and
    device. A kept probability counts 1/(1 − dropout_p) times, a dropped one not at all; the LSE knows no dropout.

    seed       an int in [−2⁶³, 2⁶³), or a tensor (1,) of int64
    dropout_p  probability of each to be dropped, in [0, 1), to 2⁻¹⁷
    batch, heads, seq_q, seq_k  sizes; heads are the query heads. Rows and keys count from the first of the (B, H, S, D)
               tensors, padding included; of packed sequences from the first row and key of each, and batch is their
               number
    device     where the mask is made; of a tensor its own, of an int the CPU, unless given

    Returns bool (batch, heads, seq_q, seq_k).

    Element (b, h, i, j) is kept where its 16 bits are no less than round(dropout_p·2¹⁶). They are of word w of
    Philox2x32-10 with the key a and the counter (g(j), g(i) ^ c): the upper ones where bit 3 of j is set, of word 1
    where bit 3 of i is. g leaves bit 3 out: g(x) = 8·⌊x/16⌋ + x mod 8. a and c are words 0 and 1 of Philox4x32-10 with
    the key `seed` and the counter (b·heads + h, 0, 0, 0) (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
    2011). So a larger mask with as many heads contains a smaller one.

    Memory: the mask, and on a device other than the CPU a few int64 tensors of its shape.

    Raises ArgumentError where a size or the probability is out of range or the seed is no such number.

    >>> import portattn
    >>> mask = portattn.dropout_mask(seed=7, dropout_p=0.25, batch=2, heads=4, seq_q=64, seq_k=64)
    >>> mask.shape, round(mask.float().mean().item(), 2)
    (torch.Size([2, 4, 64, 64]), 0.75)
    """
    probability = check_share(OP, dropout_p)
    for name, size in {"batch": batch, "heads": heads, "seq_q": seq_q, "seq_k": seq_k}.items():
        check_size(OP, name, size)
    return block_mask(_key(seed, device), probability, batch, heads, range(seq_q), range(seq_k))


def _key(seed: int | torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """The seed as a tensor (1,) int64."""
    if device is not None:
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(OP, "device", device, f"must be a torch.device or the name of one: {error}") from error
    if isinstance(seed, torch.Tensor):
        check_dense(OP, "seed", seed)
        if seed.dtype != torch.int64 or seed.shape != (1,):
            raise ArgumentError(OP, "seed", (tuple(seed.shape), seed.dtype), "must be a tensor (1,) of torch.int64")
        return seed.detach() if device is None else seed.detach().to(device)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed not in SEEDS:
        raise ArgumentError(OP, "seed", seed, "must be an integer in [-2**63, 2**63), or a tensor (1,) of torch.int64")
    return torch.tensor([seed], dtype=torch.int64, device=device or "cpu")
