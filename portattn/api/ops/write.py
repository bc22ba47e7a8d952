"""New keys and values into a contiguous cache or into pages."""

from __future__ import annotations

import torch

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
