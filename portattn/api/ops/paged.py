"""Attention over a paged key/value cache."""

from __future__ import annotations

from typing import NoReturn

import torch

from portattn.api.arguments import table_tensors
from portattn.api.call import perform, try_cached
from portattn.api.excess_arguments import wrong_arguments
from portattn.api.page_table import PageTable
from portattn.api.request import Result, Window, request_of
from portattn.api.unknown_arguments import operation, short_traceback
from portattn.validate.checks import Number


@operation
def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor | PageTable,
    seqlens_k: torch.Tensor | None = None,
    *excess: NoReturn,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale: Number | None = None,
    causal: bool | str = False,
    window: Window | None = None,
    chunk: int | None = None,
    softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    page_layout: str = "phd",
    backend: str | None = None,
    validate: bool | None = None,
    **unknown: NoReturn,
) -> Result:
    """Attention over a paged key/value cache: decoding, chunked prefill, or both in one ragged call.

    q           (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd"; with cu_seqlens_q packed, (Tq, Hq, D); float16,
                bfloat16 or float32; any strides
    k_pages, v_pages  (P, page, Hk, D) and (P, page, Hk, Dv), or (P, Hk, page, D) with page_layout="hpd"; any page size
                and any strides, so both can be views of one cache: cache[:, 0] and cache[:, 1] of (P, 2, Hk, page, D).
                Of q's dtype, or quantised, with q in float16 or bfloat16: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz
                or int8, both alike, or uint8, D/2 and Dv/2 wide: int4, two numbers a byte (docs/low-precision.md)
    page_table  (B, pages a sequence) int32 on q's device: page ids of each sequence in order. Ids of pages past its
                length may be anything (−1), and of pages that window, chunk or causal mask hide from every query. Or a
                PageTable, whose lengths each call computes (six small kernels; in a hot path give `table.pages` and
                `table.seqlens(page_size)`)
    seqlens_k   (B,) int32: keys of each sequence, its own new ones included; may be 0. A PageTable brings its own
    k_scale, v_scale  float32, of a quantised cache: what its numbers are multiplied by, positive and finite. Each (),
                (1,), (Hk,) or (B, Hk); or both for each token and head: (P, page, Hk), with hpd (P, Hk, page), of any
                strides. int8 and int4 must have them; float8 numbers count as they are without
    k_block_scale, v_block_scale  float8_e4m3fn, finite, not negative: with them bytes are nvfp4 numbers (e2m1, D and Dv
                multiples of 16), and each 16 neighbours of a row share one of these scales. k_scale and v_scale, not
                for each token, multiply them all, and may be absent.
                (P, page, Hk, D/16) and (P, page, Hk, Dv/16), or with heads first as the pages; the last axis contiguous
    cu_seqlens_q  (B + 1,) int32: sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q
    max_seqlen_q  rows of the longest sequence of packed queries, or more, if known
    scale       factor on the scores; None for 1/√D. Negative and zero are legal. A 0-d tensor is read back, which on an
                accelerator waits for the device
    causal      True or "bottom_right": the last query sees the last key; "top_left": query i sees keys 0..i; False: no
                mask. Each sequence is aligned by its own lengths
    window      (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on
                a side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
    chunk       number of keys in a chunk (chunked local attention, FlashAttention-3's attention_chunk): a query attends
                only keys of its own position's chunk. Chunks count from the sequence's first key; positions are aligned
                as a window's. causal and window hide keys in addition. None for no chunks
    softcap     scores become softcap·tanh(score / softcap); None or 0 for none
    alibi_slopes  (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
    sinks       (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
    bias        added to the scores; q's dtype or float32, broadcast to (B, Hq, Sq, pages a sequence · page); not with
                packed queries. -inf masks
    mask        bool, broadcast to (B, Hq, Sq, pages a sequence · page); not with packed queries. True = attend
    tree_mask   int64 (B, Sq) or (Sq,), packed (Tq,), rows contiguous: of a sequence's last keys, as many as rows, its
                new tokens, query i sees number j where bit j of its word is set; it sees all earlier keys. What
                causal, window and mask hide stays hidden. Up to 64 queries a sequence (packed: max_seqlen_q must be
                given where Tq is larger). `portattn.tree_mask` makes it, of parents or of bools
    num_splits  programs that share a row's keys; None for what fits the chip best. In the kernels 1 gives each sequence
                bit for bit the same result whatever the batch is
    return_lse  also return the natural log of each row's sum of exponentials, float32 (B, Hq, Sq), packed (Hq, Tq)
    layout      "bhsd", or "bshd": the order of the axes of q and of the result
    page_layout  "phd", or "hpd": whether a page's tokens or its heads come first
    backend     "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
    validate    read lengths and ids back and check them; None for the setting, which checks on the CPU only

    Returns out like q with Dv columns; with return_lse, (out, lse). Nothing waits for the device.

    Memory beyond the inputs: as of `attention`, and where keys are split over programs float32 partial results of
    splits·B·Hq·Sq·(Dv + 2) elements (packed: splits·Hq·Tq·(Dv + 2)).

    Raises ArgumentError (argument, value, limit), also where a tensor requires a gradient, which this operation has on
    the reference path alone, UnknownArgument for a keyword that it does not have, PathUnavailable where a named path
    cannot run this or falling back is forbidden, TracingError for what graphs and transforms cannot have of it
    (forward-mode and second derivatives).

    >>> import torch, portattn
    >>> q, cache = torch.randn(1, 8, 1, 64), torch.randn(12, 2, 16, 2, 64)  # 12 pages of 16 tokens: (P, 2, page, Hk, D)
    >>> table, lengths = torch.tensor([[3, 1, 7]], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    >>> out = portattn.paged_attention(q, cache[:, 0], cache[:, 1], table, lengths)
    >>> k, v = cache[[3, 1, 7]].transpose(0, 1).reshape(2, 1, 48, 2, 64).transpose(2, 3)[..., :40, :]
    >>> torch.allclose(out, portattn.attention(q, k, v), atol=1e-5)
    True
    """
    if excess or unknown:
        raise wrong_arguments("paged_attention", excess, unknown)
    page_table, seqlens_k = table_tensors(
        "paged_attention", page_table, seqlens_k, k_pages, page_layout, backend, validate
    )
    found = try_cached(
        "paged_attention",
        (
            q, k_pages, v_pages, k_scale, v_scale, k_block_scale, v_block_scale, page_table, seqlens_k, alibi_slopes,
            sinks, bias, mask, tree_mask, cu_seqlens_q,
        ),
        (scale, causal, window, chunk, softcap, num_splits, return_lse, layout, page_layout, backend, validate),
        (max_seqlen_q,),
    )  # fmt: skip
    if found is None:
        with short_traceback:
            return perform(request_of("paged_attention", locals()))
    return found
