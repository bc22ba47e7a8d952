"""Logits of a lightning indexer, and the keys with the largest logits, which sparse attention reads."""

from __future__ import annotations

import torch

from portattn.api.page_table import PageTable
from portattn.api.signatures import operation


@operation
def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    page_table: torch.Tensor | PageTable | None = None,
    seqlens_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    validate: bool | None = None,
) -> torch.Tensor:
    """Compute an indexer's logits: of row i and key j, Σ over heads of weights[i, h]·ReLU(q[i, h]·k[j]), in float32.

    Args:
        q: (T, H, D), packed rows of any sequences; with page_table (B, Sq, H, D). float16, bfloat16, float32 or
            float8_e4m3fn, whose scale the caller multiplies into `weights`. Any strides; D up to 256
        k: (S, D), one head of keys for all rows; with page_table pages (P, page, D). q's dtype; any strides
        weights: float32, (T, H) or (B, Sq, H)
        k_scale: float32, with float8 alone: a positive factor for each key, (S,) or (P, page), any strides
        row_starts, row_ends: (T,) int32 on q's device: row i sees keys row_starts[i] to row_ends[i] - 1; None: from the
            first key, to the last
        page_table: (B, pages a sequence) int32, page ids in a sequence's order, or a PageTable
        seqlens_k: (B,) int32, keys of each sequence with the new ones. The last of Sq rows sees all of them, each row
            before it one less
        out: memory for the result, whose last axis is contiguous; None: allocated
        backend: "auto", or a path that must be taken: "triton", "reference", on a CPU "interpreter"; None: the setting
        validate: read ranges, lengths and page ids back and check them; None for the setting, which checks on the CPU
            only. Unchecked numbers are clamped to the keys and pages that exist

    Returns:
        (T, S) or (B, Sq, pages a sequence · page) float32: −inf where the row does not see the key. NaN in an operand
        stays NaN.

    Memory beyond the inputs: the result, 4·T·S bytes. For less, call it for blocks of rows with one `out`, and
    `topk_indices` after each.

    Raises:
        ArgumentError: An argument is malformed, or a tensor requires a gradient. Nothing is written.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden. Nothing is written.

    Examples:
        >>> import torch, portattn
        >>> q, k, weights = torch.randn(3, 4, 32), torch.randn(9, 32), torch.randn(3, 4)
        >>> ends = torch.tensor([7, 8, 9], dtype=torch.int32)
        >>> logits = portattn.indexer_logits(q, k, weights, row_ends=ends)
        >>> logits.shape, logits.isneginf().sum(1).tolist()
        (torch.Size([3, 9]), [2, 1, 0])
        >>> torch.allclose(logits[2], (weights[2, :, None] * (q[2] @ k.t()).relu()).sum(0), atol=1e-4)
        True
    """


@operation
def topk_indices(
    logits: torch.Tensor,
    k: int,
    *,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    sorted: bool = False,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    validate: bool | None = None,
) -> torch.Tensor:
    """Find the keys of each row's k largest logits, exactly: of equal logits the key with the lower index first.

    Args:
        logits: (T, S) or (B, Sq, S), float32, float16 or bfloat16; any strides
        k: keys to choose, from 1 on
        row_starts, row_ends: (T,) or (B, Sq) int32 on logits' device: only logits from row_starts to row_ends - 1 are
            read and chosen; None: from the first, to the last
        sorted: order by descending logits, equal ones by index; False: by index
        out: contiguous memory for the result; None: allocated
        backend: "auto", or a path that must be taken: "triton", "reference", on a CPU "interpreter"; None: the setting
        validate: read the ranges back and check them; None for the setting, which checks on the CPU only. Unchecked
            numbers are clamped to the logits that exist

    −inf and NaN are never chosen, and 0 equals −0. Results repeat bit by bit, whatever other rows there are.

    Returns:
        (T, k) or (B, Sq, k) int32: indices into the last axis, −1 after a row's last where it has fewer than k.

    Memory beyond the inputs: the result; with `sorted` a few copies of it, and on the reference path of the logits.

    Raises:
        ArgumentError: An argument is malformed, or a tensor requires a gradient. Nothing is written.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden. Nothing is written.

    Examples:
        >>> import torch, portattn
        >>> logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [5.0, torch.nan, -torch.inf, -torch.inf]])
        >>> portattn.topk_indices(logits, 2).tolist()
        [[1, 2], [0, -1]]
        >>> portattn.topk_indices(logits, 3, sorted=True).tolist()
        [[1, 2, 0], [0, -1, -1]]
    """
