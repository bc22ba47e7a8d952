"""Operations that compute no attention: caches are filled, and the keys of sparse attention are chosen."""

from __future__ import annotations

import torch

from portattn.api.page_table import PageTable
from portattn.api.signatures import operation


@operation
def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    rotary: str = "neox",
    layout: str = "bhsd",
    backend: str | None = None,
    validate: bool | None = None,
) -> None:
    """Append new keys and values to the sequences of a contiguous cache, in place.

    Args:
        k, v: (B, Hk, S, D) and (B, Hk, S, Dv), the new rows of each sequence, or (B, S, Hk, D) with layout="bshd";
            float16, bfloat16 or float32; any strides
        k_cache, v_cache: (B, Hk, Smax, D) and (B, Hk, Smax, Dv) in the same layout, as `decode_attention` takes them.
            Both of one dtype: float16, bfloat16 or float32, to which numbers are converted, or a format of
            docs/low-precision.md, in which they are quantised. Any strides but 0
        seqlens_k: (B,) int32 on k's device: keys that each sequence has before the call. Its new row i goes to row
            seqlens_k[b] + i. A sequence with a negative number is not written. The tensor stays on the device
        k_scale, v_scale: float32, of a quantised cache, both or neither. (), (1,), (Hk,) or (B, Hk): the stored number
            is the given one divided by its scale; positive and finite. A scale for each token and head, (B, Hk, Smax),
            with bshd (B, Smax, Hk), of any strides but 0: it is computed from the new row and written, |largest|/limit
            of the format; of int4 a fifteenth of the row's range, with the number for 0 in its lowest four bits. int8
            and int4 must have them; float8 without them holds the numbers themselves
        k_block_scale, v_block_scale: float8_e4m3fn: with them the bytes are nvfp4 numbers (e2m1). They are computed
            from the new rows and written, one for each 16 neighbours of a row: |largest|/6 after division by k_scale
            and v_scale, if given. (B, Hk, Smax, D/16) and (…, Dv/16), in the caches' layout, last axis contiguous
        cos, sin: (positions, R/2) float32 or k's dtype, R ≤ D even: the keys' first R columns are rotated before they
            are stored, by the angle of their row in the cache; None for no rotation. The queries are not rotated
        rotary: columns that are rotated together: "neox", i and i + R/2; "interleaved", 2i and 2i + 1 (GPT-J)
        layout: "bhsd", or "bshd": the order of the axes of k, v and both caches
        backend: "auto", or a path that must be taken: "triton", "reference", on a CPU "interpreter"; None: the setting
        validate: read lengths and scales back and check them; None for the setting, which checks on the CPU only.
            Unchecked rows beyond the cache are not written, and angles beyond the tables are the last

    Numbers are rounded to the nearest, ties to even, on every path alike. A number beyond a quantised format, infinity
    too, becomes its largest (448, 57344, 240 or ±127, in int4 the first or the last of sixteen, in nvfp4 ±6). NaN stays
    NaN, and is 0 in int8, int4 and nvfp4.

    Returns:
        None: the caches hold the new rows, and the caller counts them (`seqlens_k` is only read).

    Memory beyond the inputs: none in the kernels; on the reference path a few copies of the new rows.

    Raises:
        ArgumentError: An argument is malformed, or a tensor requires a gradient. Nothing is written.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden. Nothing is written.

    Examples:
        >>> import torch, portattn
        >>> k_cache, v_cache = torch.zeros(2, 2, 100, 64), torch.zeros(2, 2, 100, 64)
        >>> k, v = torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64)
        >>> portattn.append_kv(k, v, k_cache, v_cache, torch.tensor([30, -1], dtype=torch.int32))
        >>> torch.equal(k_cache[0, :, 30], k[0, :, 0]), int(k_cache[1].count_nonzero())
        (True, 0)
    """


@operation
def write_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    rotary: str = "neox",
    page_layout: str = "phd",
    backend: str | None = None,
    validate: bool | None = None,
) -> None:
    """Write new keys and values to slots of a paged cache, in place.

    Args:
        k, v: (T, Hk, D) and (T, Hk, Dv), tokens of any sequences one after the other; float16, bfloat16 or float32; any
            strides
        k_pages, v_pages: (P, page, Hk, D) and (P, page, Hk, Dv), or with page_layout="hpd" (P, Hk, page, D), as
            `paged_attention` takes them. Both of one dtype: float16, bfloat16 or float32, to which numbers are
            converted, or a format of docs/low-precision.md, in which they are quantised. Any strides but 0; both may be
            views of one tensor
        slot_mapping: (T,) int32 or int64 on k's device: token t goes to row slot_mapping[t] % page of page
            slot_mapping[t] // page. A token with a negative slot is not written. Of two tokens with one slot either may
            be stored. The tensor stays on the device
        k_scale, v_scale: float32, of a quantised cache, both or neither. (), (1,) or (Hk,): the stored number is the
            given one divided by its scale; positive and finite. A scale for each token and head, (P, page, Hk), with
            hpd (P, Hk, page), of any strides but 0: it is computed from the new row and written, |largest|/limit of the
            format; of int4 a fifteenth of the row's range, with the number for 0 in its lowest four bits. int8 and int4
            must have them; float8 without them holds the numbers themselves
        k_block_scale, v_block_scale: float8_e4m3fn: with them the bytes are nvfp4 numbers (e2m1). They are computed
            from the new rows and written, one for each 16 neighbours of a row: |largest|/6 after division by k_scale
            and v_scale, if given. (P, page, Hk, D/16) and (…, Dv/16), with hpd as the pages; last axis contiguous
        cos, sin: (N, R/2) float32 or k's dtype, R ≤ D even: the keys' first R columns are rotated before they are
            stored; None for no rotation. The queries are not rotated
        positions: (T,) int32 or int64 on k's device: the row of cos and sin of each token; goes with them
        rotary: columns that are rotated together: "neox", i and i + R/2; "interleaved", 2i and 2i + 1 (GPT-J)
        page_layout: "phd", or "hpd": whether tokens or heads come first in a page
        backend: "auto", or a path that must be taken: "triton", "reference", on a CPU "interpreter"; None: the setting
        validate: read slots, positions and scales back and check them; None for the setting, which checks on the CPU
            only. Unchecked tokens with slots beyond the cache are not written, and positions are clamped to the tables

    Numbers are rounded to the nearest, ties to even, on every path alike. A number beyond a quantised format, infinity
    too, becomes its largest (448, 57344, 240 or ±127, in int4 the first or the last of sixteen, in nvfp4 ±6). NaN stays
    NaN, and is 0 in int8, int4 and nvfp4.

    Returns:
        None: the pages hold the new rows.

    Memory beyond the inputs: none in the kernels; on the reference path a few copies of the new rows.

    Raises:
        ArgumentError: An argument is malformed, or a tensor requires a gradient. Nothing is written.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden. Nothing is written.

    Examples:
        >>> import torch, portattn
        >>> k_pages, v_pages = torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 64)
        >>> k, v = torch.randn(3, 2, 64), torch.randn(3, 2, 64)
        >>> portattn.write_pages(k, v, k_pages, v_pages, torch.tensor([17, -1, 50]))
        >>> torch.equal(k_pages[1, 1], k[0]), torch.equal(v_pages[3, 2], v[2]), int((k_pages != 0).any(-1).sum())
        (True, True, 4)
    """


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
            float8_e4m3fn, whose scale the caller multiplies into `weights`. Any strides; kernels take D up to 256
        k: (S, D), one head of keys for all rows; with page_table pages (P, page, D). q's dtype; any strides
        weights: float32, (T, H) or (B, Sq, H)
        k_scale: float32, with float8 alone: a positive factor for each key, (S,) or (P, page), any strides
        row_starts, row_ends: (T,) int32 on q's device: row i sees keys row_starts[i] to row_ends[i] - 1; None: from the
            first key, to the last
        page_table: (B, pages a sequence) int32, page ids in a sequence's order, or a PageTable
        seqlens_k: (B,) int32, keys of each sequence with the new ones. The last of Sq rows sees all of them, each row
            before it one less
        out: memory for the result, whose last axis is contiguous, and which overlaps no argument; None: allocated
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
        out: memory for the result, whose last axis is contiguous, and which overlaps no argument; None: allocated
        backend: "auto", or a path that must be taken: "triton", "reference", on a CPU "interpreter"; None: the setting
        validate: read the ranges back and check them; None for the setting, which checks on the CPU only. Unchecked
            numbers are clamped to the logits that exist

    −inf and NaN are never chosen, and 0 equals −0. Results repeat bit by bit, whatever other rows there are.

    Returns:
        (T, k) or (B, Sq, k) int32: indices into the last axis, −1 after a row's last where it has fewer than k.

    Memory beyond the inputs: the result; up to 32 MiB for rows longer than a tile (4,096 or 8,192 numbers); with
    `sorted` a few copies of the result, and on the reference path of the logits.

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
