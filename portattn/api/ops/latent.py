"""Multi-head latent attention over a paged cache."""

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
def mla_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor | PageTable,
    seqlens_k: torch.Tensor | None = None,
    *excess: NoReturn,
    scale: Number,
    kv_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
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
    backend: str | None = None,
    validate: bool | None = None,
    **unknown: NoReturn,
) -> Result:
    """Multi-head latent attention over a paged latent cache (DeepSeek-V2, arXiv 2405.04434, in its absorbed form).

    q_nope      (B, H, Sq, R): queries with the key up-projection absorbed; R is the latent rank, 512 in DeepSeek's
                models. Or (B, Sq, H, R) with layout="bshd"; with cu_seqlens_q packed, (Tq, H, R); float16, bfloat16 or
                float32; any strides
    q_rope      (B, H, Sq, E): the part of the queries that carries positions, E = 64 there; in q_nope's layout
    kv_pages    (P, page, R + E): latent rows; each is read once, whole as key and its first R columns as value. All
                heads share it. Of q_nope's dtype, or quantised, with queries in float16 or bfloat16: float8_e4m3fn,
                float8_e5m2, float8_e4m3fnuz or int8; or uint8, the bytes of vLLM's fp8_ds_mla rows, with queries in
                bfloat16: R e4m3 numbers, a float32 scale for each 128 of them, E bfloat16 numbers (656 bytes for 512
                and 64)
    page_table  (B, pages a sequence) int32 on q's device: page ids of each sequence in order, or a PageTable
    seqlens_k   (B,) int32: keys of each sequence, its own new ones included; may be 0. A PageTable brings its own
    scale       factor on the scores. It has no default: a model scales by its heads' width before absorption
                (1/√192 for DeepSeek-V3), which the tensors no longer show
    kv_scale    float32, of a quantised cache: what its numbers are multiplied by, positive and finite. () or (1,), or
                for each token (P, page), of any strides. int8 must have it, float8 may, fp8_ds_mla rows hold their own
    cu_seqlens_q  (B + 1,) int32: sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q_nope
    max_seqlen_q  rows of the longest sequence of packed queries, or more, if known
    causal      True or "bottom_right": the last query sees the last key; "top_left": query i sees keys 0..i; False: no
                mask. Each sequence is aligned by its own lengths
    window      (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on
                a side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
    chunk       number of keys in a chunk (chunked local attention, FlashAttention-3's attention_chunk): a query attends
                only keys of its own position's chunk. Chunks count from the sequence's first key; positions are aligned
                as a window's. causal and window hide keys in addition. None for no chunks
    softcap     scores become softcap·tanh(score / softcap); None or 0 for none
    alibi_slopes  (H,) or (B, H) float32: scores lose slope·|distance| (ALiBi)
    sinks       (H,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
    bias        added to the scores; q's dtype or float32, broadcast to (B, H, Sq, pages a sequence · page); not with
                packed queries. -inf masks
    mask        bool, broadcast to (B, H, Sq, pages a sequence · page); not with packed queries. True = attend
    tree_mask   int64 (B, Sq) or (Sq,), packed (Tq,), rows contiguous: of a sequence's last keys, as many as rows, its
                new tokens, query i sees number j where bit j of its word is set; it sees all earlier keys. What
                causal, window and mask hide stays hidden. Up to 64 queries a sequence (packed: max_seqlen_q must be
                given where Tq is larger). `portattn.tree_mask` makes it, of parents or of bools
    num_splits  programs that share a row's keys; None for what fits the chip best. In the kernels 1 gives each sequence
                bit for bit the same result whatever the batch is
    return_lse  also return the natural log of each row's sum of exponentials, float32 (B, H, Sq), packed (H, Tq)
    layout      "bhsd", or "bshd": the order of the axes of q_nope, q_rope and of the result
    backend     "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
    validate    read lengths and ids back and check them; None for the setting, which checks on the CPU only

    Returns out (B, H, Sq, R) in q_nope's dtype and layout, which the value up-projection then expands; with return_lse,
    (out, lse). Nothing waits for the device.

    Memory beyond the inputs: as of `paged_attention`, with Hq = H and Dv = R.

    Raises ArgumentError (argument, value, limit), also where a tensor requires a gradient, which this operation has on
    the reference path alone, UnknownArgument for a keyword that it does not have, PathUnavailable where a named path
    cannot run this or falling back is forbidden, TracingError for what graphs and transforms cannot have of it
    (forward-mode and second derivatives).

    >>> import torch, portattn
    >>> q_nope, q_rope, latent = torch.randn(1, 4, 1, 512), torch.randn(1, 4, 1, 64), torch.randn(8, 16, 576)
    >>> table, lengths = torch.tensor([[2, 5]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    >>> out = portattn.mla_attention(q_nope, q_rope, latent, table, lengths, scale=192**-0.5)
    >>> rows = latent[[2, 5]].reshape(1, 1, 32, 576)[:, :, :20]
    >>> dense = portattn.attention(torch.cat((q_nope, q_rope), -1), rows, rows[..., :512], scale=192**-0.5)
    >>> torch.allclose(out, dense, atol=1e-5)
    True
    """
    if excess or unknown:
        raise wrong_arguments("mla_attention", excess, unknown)
    op = "mla_attention"
    page_table, seqlens_k = table_tensors(op, page_table, seqlens_k, kv_pages, "phd", backend, validate)
    found = try_cached(
        op,
        (
            q_nope, q_rope, kv_pages, kv_pages, kv_scale, kv_scale, page_table, seqlens_k, alibi_slopes, sinks, bias,
            mask, tree_mask, cu_seqlens_q,
        ),
        (scale, causal, window, chunk, softcap, num_splits, return_lse, layout, backend, validate),
        (max_seqlen_q,),
    )  # fmt: skip
    if found is None:
        with short_traceback:
            return perform(request_of(op, locals()))
    return found
