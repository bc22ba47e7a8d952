"""Attention over a key/value cache: contiguous, paged, of latent rows (MLA), and over chosen keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

from portattn.api.page_table import PageTable
from portattn.api.request import Result, Window
from portattn.api.signatures import operation
from portattn.validate.checks import Number


@operation
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor | None,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
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
    score_mod: Callable[..., torch.Tensor] | None = None,
    mask_mod: Callable[..., torch.Tensor] | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    backend: str | None = None,
    validate: bool | None = None,
) -> Result:
    """Attention of a few queries a sequence over a contiguous key/value cache.

    Args:
        q: (B, Hq, Sq, D), Sq small (1 for ordinary decoding), or (B, Sq, Hq, D) with layout="bshd"; float16, bfloat16
            or float32; any strides
        k_cache, v_cache: (B, Hk, Smax, D) and (B, Hk, Smax, Dv), in the same layout as q; Hq must be a multiple of Hk.
            Of q's dtype, or both in a format of docs/low-precision.md, with q in float16 or bfloat16
        seqlens_k: (B,) int32 on q's device: keys in each sequence's cache; None when every cache is full. It stays on
            the device: no host synchronisation, so a CUDA graph can replay the call with lengths changed in place
        k_scale, v_scale: float32 factors of a quantised cache's numbers, positive and finite. Each (), (1,), (Hk,) or
            (B, Hk); or both for each token and head: (B, Hk, Smax), with bshd (B, Smax, Hk), of any strides.
            Integers must have them, float8 may
        k_block_scale, v_block_scale: float8_e4m3fn, finite, not negative: with them bytes are nvfp4 numbers (e2m1, D
            and Dv multiples of 16), and each 16 neighbours of a row share a scale. k_scale and v_scale, not for each
            token, multiply all, and may be absent. (B, Hk, Smax, D/16) and (B, Hk, Smax, Dv/16), in the caches' layout,
            the last axis contiguous
        leftpad_k: (B,) int32: padding rows before a sequence's first key
        scale: factor on the scores (None: 1/√D), also negative or 0. A 0-d tensor is read back: an accelerator waits
        causal: True or "bottom_right": query i sees all keys but the last Sq-1-i (speculative decoding); "top_left":
            query i sees keys 0..i; False: no mask. Each sequence is aligned by its own lengths
        window: (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on a
            side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
        chunk: keys of a chunk (chunked local attention, FlashAttention-3's attention_chunk): a query attends only keys
            of its own position's chunk. Chunks count from the sequence's first key; positions are aligned as a
            window's; causal and window still apply. None: no chunks
        softcap: scores become softcap·tanh(score / softcap); None or 0 for none
        alibi_slopes: (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
        sinks: (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
        bias: added to the scores; q's dtype or float32, broadcast to (B, Hq, Sq, Smax). -inf masks
        mask: bool, broadcast to (B, Hq, Sq, Smax): True = attend
        tree_mask: int64 (B, Sq) or (Sq,), its rows contiguous: of a sequence's new tokens (its last Sq keys) query i
            sees number j if bit j of its word is set; it sees all earlier keys. Keys hidden by causal, window or mask
            stay hidden. Up to 64 queries a sequence. `portattn.tree_mask` makes it, of parents or of bools
        score_mod, mask_mod: as of `attention`; a query has the number of its own key: q_idx counts as kv_idx does, from
            the sequence's first key, so that a function of training serves. mask_mod is computed for every score
        num_splits: programs that share a row's keys; None: the plan chooses. In the kernels, 1 gives each sequence
            bitwise the same result in every batch
        return_lse: also return the natural log of each row's sum of exponentials, float32 (B, Hq, Sq)
        layout: "bhsd", or "bshd": the order of the axes of q, of both caches and of the result
        backend: "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
        validate: read lengths and ids back and check them; None for the setting, which checks on the CPU only

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype and layout; with return_lse, (out, lse). A sequence without keys gives 0 and
        -inf.

    Memory beyond the inputs: as of `attention`, and if keys are split over programs, float32 partial results of
    splits·B·Hq·Sq·(Dv + 2) elements.

    Raises:
        ArgumentError: An argument is malformed: the error has the argument, its value and the limit; or a tensor
            requires a gradient, which only the reference path of this operation computes.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        TracingError: Forward-mode or second derivatives are requested.

    Examples:
        >>> import torch, portattn
        >>> q, k_cache, v_cache = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
        >>> out = portattn.decode_attention(q, k_cache, v_cache, torch.tensor([30, 100], dtype=torch.int32))
        >>> alone = portattn.attention(q[:1], k_cache[:1, :, :30], v_cache[:1, :, :30])
        >>> torch.allclose(out[:1], alone, atol=1e-5)
        True
    """


@operation
def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor | PageTable,
    seqlens_k: torch.Tensor | None = None,
    *,
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
    score_mod: Callable[..., torch.Tensor] | None = None,
    mask_mod: Callable[..., torch.Tensor] | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    page_layout: str = "phd",
    backend: str | None = None,
    validate: bool | None = None,
) -> Result:
    """Attention over a paged key/value cache: decoding, chunked prefill, or both in one ragged call.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd"; with cu_seqlens_q packed, (Tq, Hq, D); float16,
            bfloat16 or float32; any strides
        k_pages, v_pages: (P, page, Hk, D) and (P, page, Hk, Dv), or (P, Hk, page, D) with page_layout="hpd"; any page
            size and any strides, so both can be views of one cache: cache[:, 0] and cache[:, 1] of (P, 2, Hk, page, D).
            Of q's dtype, or both in a format of docs/low-precision.md, with q in float16 or bfloat16
        page_table: (B, pages a sequence) int32 on q's device: page ids of each sequence in order. Ids of pages past its
            length may be anything (−1), and of pages that window, chunk or causal mask hide from every query. Or a
            PageTable, whose lengths each call computes (six small kernels; in a hot path give `table.pages` and
            `table.seqlens(page_size)`)
        seqlens_k: (B,) int32: keys of each sequence, its own new ones included; may be 0. A PageTable brings its own
        k_scale, v_scale: float32 factors of a quantised cache's numbers, positive and finite. Each (), (1,), (Hk,) or
            (B, Hk); or both for each token and head: (P, page, Hk), with hpd (P, Hk, page), of any strides.
            Integers must have them, float8 may
        k_block_scale, v_block_scale: float8_e4m3fn, finite, not negative: with them bytes are nvfp4 numbers (e2m1, D
            and Dv multiples of 16), and each 16 neighbours of a row share a scale. k_scale and v_scale, not for each
            token, multiply all, and may be absent. (P, page, Hk, D/16) and (P, page, Hk, Dv/16), or with heads first as
            the pages; the last axis contiguous
        cu_seqlens_q: (B + 1,) int32: sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q
        max_seqlen_q: rows of the longest sequence of packed queries, or more, if known
        scale: factor on the scores (None: 1/√D), also negative or 0. A 0-d tensor is read back: an accelerator waits
        causal: True or "bottom_right": the last query sees the last key; "top_left": query i sees keys 0..i; False: no
            mask. Each sequence is aligned by its own lengths
        window: (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on a
            side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
        chunk: keys of a chunk (chunked local attention, FlashAttention-3's attention_chunk): a query attends only keys
            of its own position's chunk. Chunks count from the sequence's first key; positions are aligned as a
            window's; causal and window still apply. None: no chunks
        softcap: scores become softcap·tanh(score / softcap); None or 0 for none
        alibi_slopes: (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
        sinks: (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
        bias: added to the scores; q's dtype or float32, broadcast to (B, Hq, Sq, pages a sequence · page); not with
            packed queries. -inf masks
        mask: bool, broadcast to (B, Hq, Sq, pages a sequence · page); not with packed queries. True = attend
        tree_mask: int64 (B, Sq) or (Sq,), packed (Tq,), rows contiguous: of a sequence's new tokens (its last keys, as
            many as rows) query i sees number j if bit j of its word is set; it sees all earlier keys. Keys hidden by
            causal, window or mask stay hidden. Up to 64 queries a sequence (packed: with a larger Tq, max_seqlen_q must
            be given). `portattn.tree_mask` makes it, of parents or of bools
        score_mod, mask_mod: as of `attention`; a query has the number of its own key: q_idx counts as kv_idx does, from
            the sequence's first key, so that a function of training serves. mask_mod is computed for every score
        num_splits: programs that share a row's keys; None: the plan chooses. In the kernels, 1 gives each sequence
            bitwise the same result in every batch
        return_lse: also return the natural log of each row's sum of exponentials, float32 (B, Hq, Sq), packed (Hq, Tq)
        layout: "bhsd", or "bshd": the order of the axes of q and of the result
        page_layout: "phd", or "hpd": whether a page's tokens or its heads come first
        backend: "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
        validate: read lengths and ids back and check them; None for the setting, which checks on the CPU only

    Returns:
        out like q with Dv columns; with return_lse, (out, lse). Nothing waits for the device.

    Memory beyond the inputs: as of `attention`, and if keys are split over programs, float32 partial results of
    splits·B·Hq·Sq·(Dv + 2) elements (packed: splits·Hq·Tq·(Dv + 2)).

    Raises:
        ArgumentError: An argument is malformed: the error has the argument, its value and the limit; or a tensor
            requires a gradient, which only the reference path of this operation computes.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        TracingError: Forward-mode or second derivatives are requested.

    Examples:
        >>> import torch, portattn
        >>> q, cache = torch.randn(1, 8, 1, 64), torch.randn(12, 2, 16, 2, 64)  # 12 pages: (P, 2, page, Hk, D)
        >>> table, lengths = torch.tensor([[3, 1, 7]], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
        >>> out = portattn.paged_attention(q, cache[:, 0], cache[:, 1], table, lengths)
        >>> k, v = cache[[3, 1, 7]].transpose(0, 1).reshape(2, 1, 48, 2, 64).transpose(2, 3)[..., :40, :]
        >>> torch.allclose(out, portattn.attention(q, k, v), atol=1e-5)
        True
    """


@operation
def mla_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor | None,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor | PageTable | None = None,
    seqlens_k: torch.Tensor | None = None,
    *,
    scale: Number,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
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
) -> Result:
    """Multi-head latent attention over a paged latent cache (DeepSeek-V2, arXiv 2405.04434, in its absorbed form).

    Args:
        q_nope: (B, H, Sq, R): queries with the key up-projection absorbed; R is the latent rank, 512 in DeepSeek's
            models. Or (B, Sq, H, R) with layout="bshd"; with cu_seqlens_q packed, (Tq, H, R); float16, bfloat16 or
            float32; any strides
        q_rope: (B, H, Sq, E): the part of the queries that carries positions, E = 64 there; in q_nope's layout. None if
            q_nope is whole, as wide as rows that are also whole values (E = 0)
        kv_pages: (P, page, R + E): latent rows; each is read once, whole as key and its first R columns as value. All
            heads share it. Of q_nope's dtype, or quantised, with queries in float16 or bfloat16: float8_e4m3fn,
            float8_e5m2, float8_e4m3fnuz or int8; or uint8, the bytes of vLLM's fp8_ds_mla rows, with queries in
            bfloat16: R e4m3 numbers, a float32 scale for each 128 of them, E bfloat16 numbers (656 bytes for 512 and
            64)
        page_table: (B, pages a sequence) int32 on q's device: page ids of each sequence in order, or a PageTable. None
            with indices
        seqlens_k: (B,) int32: keys of each sequence, its own new ones included; may be 0. A PageTable brings its own
        indices: (B, Sq, topk) int32, or of packed queries (Tq, topk) without cu_seqlens_q: sparse attention (DSA). Each
            query attends the listed slots of the cache, page · page size + row, for all heads; −1 is a hole, anywhere.
            A slot that is listed twice counts twice. They replace page_table, seqlens_k and all masks
        topk_length: (B, Sq) or (Tq,) int32: places of a query's list that count, from the first on; None for all
        scale: factor on the scores. It has no default: a model scales by its heads' width before absorption (1/√192 for
            DeepSeek-V3), which the tensors no longer show
        kv_scale: float32 factors of a quantised cache's numbers, positive and finite. () or (1,), or for each token (P,
            page), of any strides. int8 must have it, float8 may, fp8_ds_mla rows hold their own
        cu_seqlens_q: (B + 1,) int32: sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q_nope
        max_seqlen_q: rows of the longest sequence of packed queries, or more, if known
        causal: True or "bottom_right": the last query sees the last key; "top_left": query i sees keys 0..i; False: no
            mask. Each sequence is aligned by its own lengths
        window: (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on a
            side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
        chunk: keys of a chunk (chunked local attention, FlashAttention-3's attention_chunk): a query attends only keys
            of its own position's chunk. Chunks count from the sequence's first key; positions are aligned as a
            window's; causal and window still apply. None: no chunks
        softcap: scores become softcap·tanh(score / softcap); None or 0 for none
        alibi_slopes: (H,) or (B, H) float32: scores lose slope·|distance| (ALiBi)
        sinks: (H,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
        bias: added to the scores; q's dtype or float32, broadcast to (B, H, Sq, pages a sequence · page); not with
            packed queries. -inf masks
        mask: bool, broadcast to (B, H, Sq, pages a sequence · page); not with packed queries. True = attend
        tree_mask: int64 (B, Sq) or (Sq,), packed (Tq,), rows contiguous: of a sequence's new tokens (its last keys, as
            many as rows) query i sees number j if bit j of its word is set; it sees all earlier keys. Keys hidden by
            causal, window or mask stay hidden. Up to 64 queries a sequence (packed: with a larger Tq, max_seqlen_q must
            be given). `portattn.tree_mask` makes it, of parents or of bools
        num_splits: programs that share a row's keys; None: the plan chooses. In the kernels, 1 gives each sequence
            bitwise the same result in every batch
        return_lse: also return the natural log of each row's sum of exponentials, float32 (B, H, Sq), packed (H, Tq)
        layout: "bhsd", or "bshd": the order of the axes of q_nope, q_rope and of the result
        backend: "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
        validate: read lengths and ids back and check them; None for the setting, which checks on the CPU only

    Returns:
        out (B, H, Sq, R) in q_nope's dtype and layout, which the value up-projection then expands; with return_lse,
        (out, lse). Nothing waits for the device.

    Memory beyond the inputs: as of `paged_attention`, with Hq = H and Dv = R.

    Raises:
        ArgumentError: An argument is malformed: the error has the argument, its value and the limit; or a tensor
            requires a gradient, which only the reference path of this operation computes.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        TracingError: Forward-mode or second derivatives are requested.

    Examples:
        >>> import torch, portattn
        >>> q_nope, q_rope, latent = torch.randn(1, 4, 1, 512), torch.randn(1, 4, 1, 64), torch.randn(8, 16, 576)
        >>> table, lengths = torch.tensor([[2, 5]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
        >>> out = portattn.mla_attention(q_nope, q_rope, latent, table, lengths, scale=192**-0.5)
        >>> rows = latent[[2, 5]].reshape(1, 1, 32, 576)[:, :, :20]
        >>> dense = portattn.attention(torch.cat((q_nope, q_rope), -1), rows, rows[..., :512], scale=192**-0.5)
        >>> torch.allclose(out, dense, atol=1e-5)
        True
    """


@operation
def sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    page_table: torch.Tensor | PageTable | None = None,
    seqlens_k: torch.Tensor | None = None,
    log_weights: torch.Tensor | None = None,
    magicpig: tuple[int | torch.Tensor, int | torch.Tensor] | None = None,
    scale: Number | None = None,
    softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    page_layout: str = "phd",
    backend: str | None = None,
    validate: bool | None = None,
) -> Result:
    """Decode attention over tokens that were chosen for each query head.

    Args:
        q: (B, Hq, 1, D), or (B, 1, Hq, D) with layout="bshd"
        k_cache, v_cache: (B, Hk, Smax, D) and (B, Hk, Smax, Dv) in q's layout, or pages with page_table, as in
            `paged_attention`. Of q's dtype, or both in a format of docs/low-precision.md, with q in float16 or bfloat16
        indices: (B, Hq, Lmax) int32: token positions, in any order; negative numbers are padding. A token that is
            listed twice counts twice
        counts: (B, Hq) int32: how many places of a head's row of `indices` are used, from the first on
        k_scale, v_scale: float32 factors of a quantised cache's numbers, positive and finite. Each (), (1,), (Hk,) or
            (B, Hk); or both for each token and head, in the cache's shape without its last axis, of any strides.
            Integers must have them, float8 may
        seqlens_k: (B,) int32: keys of each sequence; tokens beyond are skipped. None: as many as the cache holds
        log_weights: (B, Hq, Lmax) float32, added to the scores of the tokens in those places: the logarithm of a weight
            (minus that of a sampling probability); -inf masks
        magicpig: (K, L): the tokens were sampled by L hash tables of K bits each; a token is taken if two tables or
            more find it; the kernel computes its sampling probability u from the angle between query and key, and
            subtracts log u from its score (Chen et al., "MagicPIG", arXiv 2410.16179). Two integers, for which the
            kernel is compiled, or (Hq,) int32 tensors. Angles are between q and k as given: keys that were centred for
            hashing must be centred here too
        page_table: (B, pages a sequence) int32, or a PageTable, where k_cache and v_cache are pages; None where they
            are contiguous
        scale: factor on the scores (None: 1/√D), also negative or 0. A 0-d tensor is read back: an accelerator waits
        softcap: scores become softcap·tanh(score / softcap); None or 0 for none
        alibi_slopes: (Hq,) or (B, Hq) float32: scores lose slope·|distance|; the query's position is that of the last
            key
        sinks: (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
        num_splits: programs that share a row's keys; None: the plan chooses. In the kernels, 1 gives each sequence
            bitwise the same result in every batch
        return_lse: also return the natural log of each row's sum of exponentials, float32 (B, Hq, 1)
        layout: "bhsd", or "bshd": the order of the axes of q, of contiguous caches and of the result
        page_layout: "phd", or "hpd": whether a page's tokens or its heads come first
        backend: "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
        validate: read lengths and ids back and check them; None for the setting, which checks on the CPU only

    A causal mask, a window, a chunk, a mask or a bias are choices of tokens or log_weights here.

    Returns:
        out (B, Hq, 1, Dv) in q's dtype and layout; with return_lse, (out, lse). A head without tokens gives 0 and -inf.

    Memory beyond the inputs: as of `attention`, and if tokens are split over programs, float32 partial results of
    splits·B·Hq·(Dv + 2) elements.

    Raises:
        ArgumentError: An argument is malformed: the error has the argument, its value and the limit; or a tensor
            requires a gradient, which only the reference path of this operation computes.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        TracingError: Forward-mode or second derivatives are requested.

    Examples:
        >>> import torch, portattn
        >>> q, k_cache, v_cache = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
        >>> indices = torch.tensor([7, 90, 3], dtype=torch.int32).expand(1, 2, 3).contiguous()  # (B, Hq, Lmax)
        >>> out = portattn.sparse_attention(q, k_cache, v_cache, indices, torch.full((1, 2), 3, dtype=torch.int32))
        >>> chosen = portattn.attention(q, k_cache[:, :, [7, 90, 3]], v_cache[:, :, [7, 90, 3]])
        >>> torch.allclose(out, chosen, atol=1e-5)
        True
    """
