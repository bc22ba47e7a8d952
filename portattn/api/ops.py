"""The public operations. Each looks for a cached launch; validation, planning and dispatch do the rest.

The tensors and values of `try_cached` stand in the order of the operation's row (schema/ops.py).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from portattn.api.arguments import magicpig_tensors, table_tensors
from portattn.api.binding import named_arguments
from portattn.api.excess_arguments import wrong_arguments
from portattn.api.jagged import are_jagged, packed, unpacked
from portattn.api.page_table import PageTable
from portattn.api.perform import perform, plan_request, try_cached
from portattn.api.prepare import Prepared
from portattn.api.request import Request, Result, request_of
from portattn.api.tracing import are_transformed
from portattn.api.unknown_arguments import operation
from portattn.config import current
from portattn.errors import ArgumentError, TracingError
from portattn.planning.planner import plan as plan_problem
from portattn.schema.ops import PUBLIC
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target

Window = tuple[int | None, int | None]


@operation
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *excess: NoReturn,
    scale: float | None = None,
    causal: bool | str = False,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    leftpad_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    backend: str | None = None,
    validate: bool | None = None,
    **unknown: NoReturn,
) -> Result:
    """Attention of dense queries over dense keys and values: softmax(q·kᵀ·scale + mask)·v.

    q           (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd"; float16, bfloat16 or float32; any strides
    k, v        (B, Hk, Sk, D) and (B, Hk, Sk, Dv); Hq must be a multiple of Hk (GQA, MQA)
    scale       factor on the scores; None for 1/√D. Negative and zero are legal
    causal      True or "bottom_right": the last query sees the last key (FlashAttention's convention);
                "top_left": query i sees keys 0..i (SDPA's is_causal); False: no mask
    window      (left, right), inclusive: a query sees that many keys before and after its own position, which is
                aligned as `causal` says (bottom-right without one). None or -1 on a side: no limit. A model that
                speaks of a window of W keys with the query's own among them means (W - 1, 0)
    softcap     scores become softcap·tanh(score / softcap), before anything is added to them; None or 0 for none
    alibi_slopes  (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
    sinks       (Hq,) float32 or q's dtype: one more score of each row, without a value (attention sinks). The LSE
                counts it; a row with nothing to attend has it as its LSE
    bias        added to the scores; q's dtype or float32, broadcast to (B, Hq, Sq, Sk). -inf masks, whatever the key
                holds
    mask        bool, broadcast to (B, Hq, Sq, Sk): True = attend
    seqlens_q, seqlens_k  (B,) int32 on q's device: valid rows of each sequence; the rest is padding, which is never
                attended and, as a query, gives 0. Causal alignment is each sequence's own
    leftpad_q, leftpad_k  (B,) int32: padding rows before a sequence's first valid row (left-padded batches)
    dropout_p   share of the probabilities that become 0, in [0, 1); the others count 1/(1 - dropout_p)
    dropout_seed  (1,) int64 on q's device: which ones they are follows from it alone, on every path and in the backward
                (portattn.dropout_mask has the mask); None draws one from torch's generator
    return_lse  also return the natural log of each row's sum of exponentials, float32 (B, Hq, Sq)
    layout      "bhsd", or "bshd": the order of the axes of q, k, v and of the result
    backend     "auto", or a path that must be taken: "triton", "vendor", "reference", a vendor path's own name, and
                on a CPU "interpreter"; None for the setting. A named path never falls back
    validate    read lengths back and check them (on an accelerator that waits for the device); None for the setting,
                which checks on the CPU only. What is not checked is clamped: nothing is read outside the tensors given

    Jagged nested tensors (B, Hq, *, D), or (B, *, Hq, D) with layout="bshd", are packed rows: varlen_attention takes
    them as they lie, and the results are jagged likewise.

    Returns out in q's dtype and layout, (B, Hq, Sq, Dv); with return_lse, (out, lse). A row with nothing to attend
    gives 0 and an LSE of -inf. A key that no query may attend can hold anything, NaN included.

    Memory beyond the inputs: the output, the LSE where it is asked for, 256 bytes a program while a launch that uses
    tensor descriptors runs, and a copy of q, k or v whose rows lie more than 2³¹ elements apart within a tile.

    Raises ArgumentError (argument, value, limit), UnknownArgument for a keyword that it does not have (one of another
    library's names is answered with its own), PathUnavailable when a named path cannot run this or falling back is
    forbidden, QuirkConflict when the registry contradicts itself, TracingError for what graphs and transforms
    cannot have of it (forward-mode and second derivatives).

    >>> import torch, portattn
    >>> q, k, v = torch.randn(2, 8, 16, 64), torch.randn(2, 2, 16, 64), torch.randn(2, 2, 16, 64)
    >>> out = portattn.attention(q, k, v, causal=True)
    >>> right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    >>> torch.allclose(out, right, atol=1e-5)
    True
    """
    if excess or unknown:
        raise wrong_arguments("attention", excess, unknown)
    found = try_cached(
        "attention",
        (q, k, v, alibi_slopes, sinks, bias, mask, seqlens_q, seqlens_k, leftpad_q, leftpad_k, dropout_seed),
        (scale, causal, window, softcap, dropout_p, return_lse, layout, backend, validate),
    )
    if found is not None:
        return found
    if are_jagged(q, k, v):
        # By name: dynamo's locals() are not those of the source where it has broken the graph.
        given = {
            "q": q, "k": k, "v": v, "scale": scale, "causal": causal, "window": window, "softcap": softcap,
            "alibi_slopes": alibi_slopes, "sinks": sinks, "bias": bias, "mask": mask, "seqlens_q": seqlens_q,
            "seqlens_k": seqlens_k, "leftpad_q": leftpad_q, "leftpad_k": leftpad_k, "dropout_p": dropout_p,
            "dropout_seed": dropout_seed, "return_lse": return_lse, "layout": layout, "backend": backend,
            "validate": validate,
        }  # fmt: skip
        return unpacked(given, varlen_attention(**packed(given)))
    return perform(request_of("attention", locals()))


@operation
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *excess: NoReturn,
    scale: float | None = None,
    causal: bool | str = False,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    validate: bool | None = None,
    **unknown: NoReturn,
) -> Result:
    """Attention of packed sequences: all their rows one after the other, without padding.

    q           (Tq, Hq, D): sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; float16, bfloat16 or
                float32; any strides
    k, v        (Tk, Hk, D) and (Tk, Hk, Dv), likewise by cu_seqlens_k; Hq must be a multiple of Hk
    cu_seqlens_q, cu_seqlens_k  (B + 1,) int32 on q's device, from 0 on, never falling (else the result is undefined,
                and still nothing outside the tensors is read). They stay on the device. Sequences may have no rows, and
                their queries and keys may differ in number
    max_seqlen_q, max_seqlen_k  rows of the longest sequence, or more: with less, what longer sequences give is
                undefined
    scale       factor on the scores; None for 1/√D. Negative and zero are legal
    causal      True or "bottom_right": the last query sees the last key; "top_left": query i sees keys 0..i; False: no
                mask. Each sequence is aligned by its own lengths
    window      (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on
                a side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
    softcap     scores become softcap·tanh(score / softcap); None or 0 for none
    alibi_slopes  (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
    sinks       (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
    dropout_p, dropout_seed  as of `attention`, by positions in each sequence
    return_lse  also return the natural log of each row's sum of exponentials, float32 (Hq, Tq)
    backend     "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
    validate    read lengths and ids back and check them; None for the setting, which checks on the CPU only

    Returns out (Tq, Hq, Dv) in q's dtype; with return_lse, (out, lse). Rows after the last sequence give 0 and -inf.

    Memory beyond the inputs: as of `attention`.

    Raises ArgumentError (argument, value, limit), UnknownArgument for a keyword that it does not have, PathUnavailable
    where a named path cannot run this or falling back is forbidden, TracingError for what graphs and transforms
    cannot have of it (forward-mode and second derivatives).

    >>> import torch, portattn
    >>> lengths = torch.tensor([0, 5, 5, 45], dtype=torch.int32)  # sequences of 5, 0 and 40 rows
    >>> q, k, v = torch.randn(45, 8, 64), torch.randn(45, 2, 64), torch.randn(45, 2, 64)
    >>> out = portattn.varlen_attention(q, k, v, lengths, lengths, 40, 40, causal=True)
    >>> alone = portattn.attention(q[None, 5:], k[None, 5:], v[None, 5:], causal=True, layout="bshd")
    >>> torch.allclose(out[5:], alone[0], atol=1e-5)
    True
    """
    if excess or unknown:
        raise wrong_arguments("varlen_attention", excess, unknown)
    found = try_cached(
        "varlen_attention",
        (q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, dropout_seed),
        (scale, causal, window, softcap, dropout_p, return_lse, backend, validate),
        (max_seqlen_q, max_seqlen_k),
    )
    return perform(request_of("varlen_attention", locals())) if found is None else found


@operation
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor | None,
    *excess: NoReturn,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    backend: str | None = None,
    validate: bool | None = None,
    **unknown: NoReturn,
) -> Result:
    """Attention of a few queries a sequence over a contiguous key/value cache.

    q           (B, Hq, Sq, D), Sq small (1 for ordinary decoding), or (B, Sq, Hq, D) with layout="bshd"; float16,
                bfloat16 or float32; any strides
    k_cache, v_cache  (B, Hk, Smax, D) and (B, Hk, Smax, Dv), in the same layout as q; Hq must be a multiple of Hk. Of
                q's dtype, or quantised: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or int8, both alike, with q in
                float16 or bfloat16
    seqlens_k   (B,) int32 on q's device: keys in each sequence's cache; None when every cache is full. It stays on
                the device: no host synchronisation, so a CUDA graph can replay the call with lengths changed in place
    k_scale, v_scale  float32, of a quantised cache: what its numbers are multiplied by, positive and finite. Each (),
                (1,), (Hk,) or (B, Hk); or both for each token and head: (B, Hk, Smax), with bshd (B, Smax, Hk), of any
                strides. int8 must have them; float8 numbers count as they are without
    leftpad_k   (B,) int32: padding rows before a sequence's first key
    scale       factor on the scores; None for 1/√D. Negative and zero are legal
    causal      True or "bottom_right": query i sees what ends Sq-1-i keys before the last (speculative decoding);
                "top_left": query i sees keys 0..i; False: no mask. Each sequence is aligned by its own lengths
    window      (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on
                a side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
    softcap     scores become softcap·tanh(score / softcap); None or 0 for none
    alibi_slopes  (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
    sinks       (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
    bias        added to the scores; q's dtype or float32, broadcast to (B, Hq, Sq, Smax). -inf masks
    mask        bool, broadcast to (B, Hq, Sq, Smax): True = attend
    num_splits  programs that share a row's keys; None for what fits the chip best. In the kernels 1 gives each sequence
                bit for bit the same result whatever the batch is
    return_lse  also return the natural log of each row's sum of exponentials, float32 (B, Hq, Sq)
    layout      "bhsd", or "bshd": the order of the axes of q, of both caches and of the result
    backend     "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
    validate    read lengths and ids back and check them; None for the setting, which checks on the CPU only

    Returns out (B, Hq, Sq, Dv) in q's dtype and layout; with return_lse, (out, lse). A sequence without keys gives 0
    and -inf.

    Memory beyond the inputs: as of `attention`, and where keys are split over programs float32 partial results of
    splits·B·Hq·Sq·(Dv + 2) elements.

    Raises ArgumentError (argument, value, limit), also where a tensor requires a gradient, which this operation has on
    the reference path alone, UnknownArgument for a keyword that it does not have, PathUnavailable where a named path
    cannot run this or falling back is forbidden, TracingError for what graphs and transforms cannot have of it
    (forward-mode and second derivatives).

    >>> import torch, portattn
    >>> q, k_cache, v_cache = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
    >>> out = portattn.decode_attention(q, k_cache, v_cache, torch.tensor([30, 100], dtype=torch.int32))
    >>> alone = portattn.attention(q[:1], k_cache[:1, :, :30], v_cache[:1, :, :30])
    >>> torch.allclose(out[:1], alone, atol=1e-5)
    True
    """
    if excess or unknown:
        raise wrong_arguments("decode_attention", excess, unknown)
    found = try_cached(
        "decode_attention",
        (q, k_cache, v_cache, k_scale, v_scale, alibi_slopes, sinks, bias, mask, seqlens_k, leftpad_k),
        (scale, causal, window, softcap, num_splits, return_lse, layout, backend, validate),
    )
    return perform(request_of("decode_attention", locals())) if found is None else found


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
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
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
                Of q's dtype, or quantised: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or int8, both alike, with q in
                float16 or bfloat16
    page_table  (B, pages a sequence) int32 on q's device: page ids of each sequence in order; entries past its length
                are never used. Or a PageTable, whose lengths each call computes (six small kernels; in a hot path
                give `table.pages` and `table.seqlens(page_size)`)
    seqlens_k   (B,) int32: keys of each sequence, its own new ones included; may be 0. A PageTable brings its own
    k_scale, v_scale  float32, of a quantised cache: what its numbers are multiplied by, positive and finite. Each (),
                (1,), (Hk,) or (B, Hk); or both for each token and head: (P, page, Hk), with hpd (P, Hk, page), of any
                strides. int8 must have them; float8 numbers count as they are without
    cu_seqlens_q  (B + 1,) int32: sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q
    max_seqlen_q  rows of the longest sequence of packed queries, or more, if known
    scale       factor on the scores; None for 1/√D. Negative and zero are legal
    causal      True or "bottom_right": the last query sees the last key; "top_left": query i sees keys 0..i; False: no
                mask. Each sequence is aligned by its own lengths
    window      (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on
                a side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
    softcap     scores become softcap·tanh(score / softcap); None or 0 for none
    alibi_slopes  (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
    sinks       (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
    bias        added to the scores; q's dtype or float32, broadcast to (B, Hq, Sq, pages a sequence · page); not with
                packed queries. -inf masks
    mask        bool, broadcast to (B, Hq, Sq, pages a sequence · page); not with packed queries. True = attend
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
        (q, k_pages, v_pages, k_scale, v_scale, page_table, seqlens_k, alibi_slopes, sinks, bias, mask, cu_seqlens_q),
        (scale, causal, window, softcap, num_splits, return_lse, layout, page_layout, backend, validate),
        (max_seqlen_q,),
    )
    return perform(request_of("paged_attention", locals())) if found is None else found


@operation
def sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *excess: NoReturn,
    page_table: torch.Tensor | PageTable | None = None,
    seqlens_k: torch.Tensor | None = None,
    log_weights: torch.Tensor | None = None,
    magicpig: tuple[int | torch.Tensor, int | torch.Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    page_layout: str = "phd",
    backend: str | None = None,
    validate: bool | None = None,
    **unknown: NoReturn,
) -> Result:
    """Decode attention over tokens that were chosen for each query head.

    q           (B, Hq, 1, D), or (B, 1, Hq, D) with layout="bshd"
    k_cache, v_cache  (B, Hk, Smax, D) and (B, Hk, Smax, Dv) in q's layout, or pages with page_table, as in
                `paged_attention`
    indices     (B, Hq, Lmax) int32: token positions, in any order; negative ones are padding and passed over. A token
                that is listed twice counts twice
    counts      (B, Hq) int32: how many places of a head's row of `indices` are used, from the first on
    seqlens_k   (B,) int32: keys of each sequence; tokens beyond are passed over. None: as many as the cache holds
    log_weights   (B, Hq, Lmax) float32, added to the scores of the tokens in those places: the logarithm of a weight
                (minus that of a sampling probability); -inf masks
    magicpig    (K, L): the tokens were sampled by L hash tables of K bits each, a token being taken when two tables
                or more find it; the kernel computes each one's sampling probability u from the angle between query and
                key, and takes log u off its score (Chen et al., "MagicPIG", arXiv 2410.16179). Two integers, for
                which the kernel is compiled, or (Hq,) int32 tensors.
                Angles are between q and k as given: keys that were centred before they were hashed must be here
    page_table  (B, pages a sequence) int32, or a PageTable, where k_cache and v_cache are pages; None where they are
                contiguous
    scale       factor on the scores; None for 1/√D. Negative and zero are legal
    softcap     scores become softcap·tanh(score / softcap); None or 0 for none
    alibi_slopes  (Hq,) or (B, Hq) float32: scores lose slope·|distance|; the query's position is that of the last key
    sinks       (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
    num_splits  programs that share a row's keys; None for what fits the chip best. In the kernels 1 gives each sequence
                bit for bit the same result whatever the batch is
    return_lse  also return the natural log of each row's sum of exponentials, float32 (B, Hq, 1)
    layout      "bhsd", or "bshd": the order of the axes of q, of contiguous caches and of the result
    page_layout  "phd", or "hpd": whether a page's tokens or its heads come first
    backend     "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
    validate    read lengths and ids back and check them; None for the setting, which checks on the CPU only

    A causal mask, a window, a mask or a bias are choices of tokens or log_weights here.

    Returns out (B, Hq, 1, Dv) in q's dtype and layout; with return_lse, (out, lse). A head without tokens gives 0 and
    -inf.

    Memory beyond the inputs: as of `attention`, and where tokens are split over programs float32 partial results of
    splits·B·Hq·(Dv + 2) elements.

    Raises ArgumentError (argument, value, limit), also where a tensor requires a gradient, which this operation has on
    the reference path alone, UnknownArgument for a keyword that it does not have, PathUnavailable where a named path
    cannot run this or falling back is forbidden, TracingError for what graphs and transforms cannot have of it
    (forward-mode and second derivatives).

    >>> import torch, portattn
    >>> q, k_cache, v_cache = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
    >>> indices = torch.tensor([7, 90, 3], dtype=torch.int32).expand(1, 2, 3).contiguous()  # (B, Hq, Lmax)
    >>> out = portattn.sparse_attention(q, k_cache, v_cache, indices, torch.full((1, 2), 3, dtype=torch.int32))
    >>> chosen = portattn.attention(q, k_cache[:, :, [7, 90, 3]], v_cache[:, :, [7, 90, 3]])
    >>> torch.allclose(out, chosen, atol=1e-5)
    True
    """
    if excess or unknown:
        raise wrong_arguments("sparse_attention", excess, unknown)
    op = "sparse_attention"
    if page_table is not None:
        page_table, seqlens_k = table_tensors(op, page_table, seqlens_k, k_cache, page_layout, backend, validate)
    sampling, constants = magicpig_tensors(op, magicpig, counts)
    found = try_cached(
        op,
        (
            q, k_cache, v_cache, indices, counts, page_table, seqlens_k, alibi_slopes, sinks, log_weights,
            sampling["magicpig_bits"], sampling["magicpig_tables"],
        ),
        (scale, softcap, num_splits, return_lse, layout, page_layout, constants, backend, validate),
    )  # fmt: skip
    if found is None:
        if constants is None and magicpig is not None:
            magicpig = sampling["magicpig_bits"], sampling["magicpig_tables"]
        found = perform(request_of(op, locals()))
    return found


@operation
def mla_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor | PageTable,
    seqlens_k: torch.Tensor | None = None,
    *excess: NoReturn,
    scale: float,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool | str = False,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
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
                heads share it
    page_table  (B, pages a sequence) int32 on q's device: page ids of each sequence in order, or a PageTable
    seqlens_k   (B,) int32: keys of each sequence, its own new ones included; may be 0. A PageTable brings its own
    scale       factor on the scores. It has no default: a model scales by its heads' width before absorption
                (1/√192 for DeepSeek-V3), which the tensors no longer show
    cu_seqlens_q  (B + 1,) int32: sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q_nope
    max_seqlen_q  rows of the longest sequence of packed queries, or more, if known
    causal      True or "bottom_right": the last query sees the last key; "top_left": query i sees keys 0..i; False: no
                mask. Each sequence is aligned by its own lengths
    window      (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on
                a side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
    softcap     scores become softcap·tanh(score / softcap); None or 0 for none
    alibi_slopes  (H,) or (B, H) float32: scores lose slope·|distance| (ALiBi)
    sinks       (H,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
    bias        added to the scores; q's dtype or float32, broadcast to (B, H, Sq, pages a sequence · page); not with
                packed queries. -inf masks
    mask        bool, broadcast to (B, H, Sq, pages a sequence · page); not with packed queries. True = attend
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
        (q_nope, q_rope, kv_pages, kv_pages, page_table, seqlens_k, alibi_slopes, sinks, bias, mask, cu_seqlens_q),
        (scale, causal, window, softcap, num_splits, return_lse, layout, backend, validate),
        (max_seqlen_q,),
    )
    return perform(request_of(op, locals())) if found is None else found


def plan(op: str | Problem, *args: Any, **kwargs: Any) -> Plan:
    """How a call would run, without running it.

    op          the operation's name, "attention" say; or a Problem
    args, kwargs  the operation's own arguments: plans for the tensors' device. Of a Problem: the Target alone, also of
                a machine that is not here; compile records of this machine's cache are not consulted then

    Returns the Plan: path, kernel, quirks applied, and a reason for each path that is not taken. Nothing is launched.

    Raises what the call would raise before launching: ArgumentError, UnknownArgument, PathUnavailable, QuirkConflict.

    >>> import torch, portattn
    >>> q = torch.randn(1, 8, 16, 64)
    >>> portattn.plan("attention", q, q, q, causal=True).path
    'sdpa'
    >>> problem = portattn.Problem(batch=1, heads_q=8, heads_k=8, seq_q=16, seq_k=16, head_dim=64)
    >>> portattn.plan(problem, portattn.target("rocm:gfx942", "triton==3.6.0")).kernel
    'dense_forward'
    """
    if isinstance(op, Problem):
        target = args[0] if args else kwargs.pop("target", None)
        if not isinstance(target, Target) or len(args) > 1 or kwargs:
            raise ArgumentError(
                "plan", "arguments", (*args, *kwargs), "plan(problem, target) takes a Problem and a Target"
            )
        return plan_problem(op, target, settings=current())
    return plan_request(make_request("plan", op, args, kwargs))


def explain(op: str | Problem, *args: Any, **kwargs: Any) -> str:
    """`plan(...)` as text for people: path, kernel, the quirks applied, and why each other path is not taken.

    op          as of `plan`
    args, kwargs  as of `plan`

    Returns the text, several lines: `Plan.explain` of the plan.

    Raises what `plan` raises.

    >>> import torch, portattn
    >>> q = torch.randn(1, 8, 16, 64)
    >>> print(portattn.explain("attention", q, q, q).splitlines()[0])
    attention q (1,8,16,64) kv (1,8,16,64) fp32
    """
    return plan(op, *args, **kwargs).explain()


def prepare(op: str, *args: Any, **kwargs: Any) -> Prepared:
    """Plan a call, compile what it needs and allocate its partial results: a handle whose `run` does the rest.

    op          the operation's name, "paged_attention" say
    args, kwargs  the operation's own arguments; later runs may differ in data only, not in shapes, strides or types

    Returns a Prepared: `handle.run(...)` takes the same arguments, and `out=` and `lse=`.

    Memory: the handle holds the partial results of a split (`decode_attention` says how many), and no tensor of the
    call.

    Raises what the call would raise before launching: ArgumentError, UnknownArgument, PathUnavailable, QuirkConflict.

    >>> import torch, portattn
    >>> q, k, v = torch.randn(3, 2, 8, 16, 64).unbind()
    >>> handle = portattn.prepare("attention", q, k, v, causal=True)
    >>> out = torch.empty_like(q)
    >>> handle.run(q, k, v, causal=True, out=out) is out
    True
    >>> torch.equal(out, portattn.attention(q, k, v, causal=True))
    True
    """
    return Prepared(make_request("prepare", op, args, kwargs))


def make_request(asker: str, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
    """The request that a call with these arguments makes."""
    if not isinstance(op, str) or op not in PUBLIC:
        problem = "a Problem or " if asker == "plan" else ""
        given = type(op).__name__ if isinstance(op, torch.Tensor) else op  # not a page of numbers
        raise ArgumentError(asker, "op", given, f"must be {problem}one of {', '.join(PUBLIC)}")
    given = named_arguments(op)(*args, **kwargs)
    if asker == "plan" and op == "attention" and are_jagged(given["q"], given["k"], given["v"]):
        op, given = "varlen_attention", packed(given)
    request = request_of(op, given)
    if are_transformed(request.tensors.values()):
        raise TracingError(f"{asker}: torch.func has the tensors of this call. Ask outside of the transform")
    return request
