"""FlashAttention-3's functions (its module flash_attn_interface) over portattn: same names, arguments, order, defaults
and results.

They have no dropout and no ALiBi. What sets how FlashAttention-3's own kernels run is taken where it changes no result
(`pack_gqa`), and refused where something would be promised that is not done. docs/flash-attn.md lists each argument.
"""

from __future__ import annotations

import functools

import torch

from portattn.api import ops
from portattn.api.merge_states import merge_states
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.cache import attend_cached
from portattn.integrations.flash_attn.cached_call import Cached
from portattn.integrations.flash_attn.calls import scores_of, shape_of, size_of
from portattn.integrations.flash_attn.generation3 import by_dtype, check_hints, dense, with_qv
from portattn.integrations.flash_attn.options import (
    FLOATS,
    WindowSize,
    check_bool,
    check_dtypes,
    check_packed,
    named,
    repeated_bits,
    splits_of,
)
from portattn.integrations.flash_attn.used import used_rows
from portattn.validate.checks import Number, check_dense


@named()
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: Number | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: Number = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As flash_attn_func, of queries, keys and values in one tensor.

    qkv          (B, S, 3, H, D); or (B, S, Hq + 2·Hk, D) with num_heads_q, heads of queries, keys, values in turn
    num_heads_q  Hq, of the latter

    Returns out (B, S, Hq, D); with return_attn_probs, (out, lse).

    Raises ArgumentError as flash_attn_func does.

    >>> import torch
    >>> from portattn.integrations.flash_attn_interface import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.randn(1, 5, 8, 16), num_heads_q=4, causal=True).shape
    torch.Size([1, 5, 4, 16])
    """
    op = "flash_attn_qkvpacked_func"
    check_dense(op, "qkv", qkv)
    if isinstance(qkv, torch.Tensor) and qkv.ndim == 4:
        heads = qkv.shape[2]
        if type(num_heads_q) is not int or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
            limit = f"must be an integer that leaves an even number of qkv's {heads} heads to keys and values"
            raise ArgumentError(op, "num_heads_q", num_heads_q, limit)
        others = (heads - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, others, others), dim=2)
    else:
        check_packed(op, "qkv", qkv, 2, 3, "batch, seqlen, 3, heads, head_dim")
        q, k, v = qkv.unbind(2)
    descales = (q_descale, k_descale, v_descale)
    check_hints(op, 1, None, attention_chunk, sm_margin)
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, None, attention_chunk)
    return dense(op, q, k, v, None, descales, scores, deterministic, return_attn_probs)


@named()
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: Number | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: Number = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense tensors, with FlashAttention-3's arguments. Gradients flow to q, k, v and qv.

    q         (B, Sq, Hq, D); float16, bfloat16 or float32; any strides. Or float8, with k and v of the same dtype
    k, v      (B, Sk, Hk, D) and (B, Sk, Hk, Dv); Hq must be a multiple of Hk
    softmax_scale  factor on the scores; None for 1/√D, with qv 1/√(D + Dv)
    causal    the last query sees the last key
    qv        (B, Sq, Hq, Dv): scores are (q·k + qv·v)·softmax_scale. D + Dv ≤ 576; q, qv, k and v are copied for it
    q_descale, k_descale, v_descale  (B, Hk) float32: what float8 numbers are multiplied by
    window_size  (left, right), inclusive, aligned at the last key; negative: no limit
    attention_chunk  a query sees the keys of the chunk of so many keys that its position, aligned at the last key, lies
              in; 0 for no chunks
    softcap   scores become softcap·tanh(score / softcap); up to 0 for none
    num_splits  any integer: changes no result; the plan decides here
    pack_gqa  None, True or False: changes no result; the plan decides here
    deterministic  kernels of gradients repeat their bits; a graph needs torch.use_deterministic_algorithms(True) for it
    sm_margin  0; anything else is refused: kernels take the whole device
    return_attn_probs  also return the LSE, float32 (B, Hq, Sq), -inf where a row has nothing to attend

    Returns out (B, Sq, Hq, Dv) in q's dtype, bfloat16 of float8; with return_attn_probs, (out, lse).

    Raises ArgumentError with FlashAttention's names for the function and the argument.

    >>> import torch
    >>> from portattn.integrations.flash_attn_interface import flash_attn_func
    >>> q, k, v = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 64)
    >>> out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 16, 8, 64]), torch.Size([2, 8, 16]))
    """
    op = "flash_attn_func"
    check_hints(op, num_splits, pack_gqa, attention_chunk, sm_margin)
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, None, attention_chunk)
    return dense(op, q, k, v, qv, (q_descale, k_descale, v_descale), scores, deterministic, return_attn_probs)


@named()
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: Number | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: Number = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed sequences, with FlashAttention-3's arguments. Gradients flow to q, k, v and qv.

    q         (Tq, Hq, D): sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
    k, v      (Tk, Hk, D) and (Tk, Hk, Dv), likewise by cu_seqlens_k
    cu_seqlens_q, cu_seqlens_k  (B + 1,) int32
    max_seqlen_q, max_seqlen_k  rows of the longest sequence, or more
    seqused_q, seqused_k  (B,) int32: how many of a sequence's first rows count; for it q, or k and v, are copied. Rows
              of q that do not count give 0 and an LSE of -inf, whatever they hold

    The other arguments are flash_attn_func's. The LSE is (Hq, Tq).

    Returns out (Tq, Hq, Dv); with return_attn_probs, (out, lse).

    Raises ArgumentError as flash_attn_func does.

    >>> import torch
    >>> from portattn.integrations.flash_attn_interface import flash_attn_varlen_func
    >>> lengths, used = torch.tensor([0, 5, 45], dtype=torch.int32), torch.tensor([3, 40], dtype=torch.int32)
    >>> q, k, v = torch.randn(45, 8, 64), torch.randn(45, 2, 64), torch.randn(45, 2, 64)
    >>> flash_attn_varlen_func(q, k, v, lengths, lengths, 40, 40, seqused_k=used).shape
    torch.Size([45, 8, 64])
    """
    op = "flash_attn_varlen_func"
    check_hints(op, num_splits, pack_gqa, attention_chunk, sm_margin)
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, None, attention_chunk)
    check_dtypes(op, FLOATS, q=q, k=k, v=v, **({} if qv is None else {"qv": qv}))
    block = repeated_bits(op, deterministic)
    wanted = check_bool(op, "return_attn_probs", return_attn_probs)
    q, k, scale = with_qv(op, q, k, v, qv, scores.scale)
    queries, keys = used_rows(op, "q", cu_seqlens_q, seqused_q, q), used_rows(op, "k", cu_seqlens_k, seqused_k, k)
    if queries is not None:
        q, cu_seqlens_q = queries.packed(q), queries.beginnings
    if keys is not None:
        k, v, cu_seqlens_k = keys.packed(k), keys.packed(v), keys.beginnings
    attend = functools.partial(
        ops.varlen_attention, q, k, v, cu_seqlens_q, cu_seqlens_k, size_of(max_seqlen_q), size_of(max_seqlen_k),
        q_scale=q_descale, k_scale=k_descale, v_scale=v_descale, return_lse=wanted,
        **scores.arguments() | {"scale": scale},
    )  # fmt: skip
    with block:
        found = by_dtype(op, attend, q, k, v)
    if queries is None:
        return found
    if not wanted:
        return queries.restored(found, 0.0)
    return queries.restored(found[0], 0.0), queries.restored(found[1].t(), -torch.inf).t()


@named()
def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys into attention over all of them.

    out_partial  (N, B, Sq, H, Dv) float32
    lse_partial  (N, B, Sq, H) float32
    out          (B, Sq, H, Dv) to write to, or None
    out_dtype    of the result; None for float32

    Returns out (B, Sq, H, Dv) and lse (B, Sq, H).

    Raises ArgumentError where shapes or dtypes do not go together.

    >>> import torch
    >>> from portattn.integrations.flash_attn_interface import flash_attn_combine
    >>> out, lse = flash_attn_combine(torch.randn(3, 1, 2, 4, 16), torch.randn(3, 1, 2, 4))
    >>> out.shape, lse.shape
    (torch.Size([1, 2, 4, 16]), torch.Size([1, 2, 4]))
    """
    op = "flash_attn_combine"
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        check_dense(op, name, tensor)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            given = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ArgumentError(op, name, given, "must be a torch.Tensor of torch.float32")
    if lse_partial.shape != out_partial.shape[:-1]:
        limit = f"must be out_partial's without the last axis, {tuple(out_partial.shape[:-1])}"
        raise ArgumentError(op, "lse_partial.shape", tuple(lse_partial.shape), limit)
    dtype = out_dtype if out_dtype is not None else torch.float32
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(op, "out_dtype", out_dtype, "must be None or a floating-point torch.dtype")
    check_dense(op, "out", out)
    if out is not None and not isinstance(out, torch.Tensor):
        raise ArgumentError(op, "out", type(out).__name__, "must be None or a torch.Tensor")
    if out is not None and (out.shape != out_partial.shape[1:] or out.dtype != dtype):
        raise ArgumentError(
            op, "out", (tuple(out.shape), out.dtype), f"must be {tuple(out_partial.shape[1:])}, {dtype}"
        )
    if out is not None and (out.device != out_partial.device or (out.requires_grad and torch.is_grad_enabled())):
        limit = f"must be on {out_partial.device} and require no gradient"
        raise ArgumentError(op, "out's (device, requires_grad)", (str(out.device), out.requires_grad), limit)
    merged, lse = merge_states(out_partial, lse_partial)
    return (merged.to(dtype) if out is None else out.copy_(merged)), lse


@named(k_pages="k_cache", v_pages="v_cache")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: Number = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append k and v to a cache in place, and attend the cache. It computes without a graph: tensors may require
    gradients, and the results require none.

    q         (B, Sq, Hq, D); with cu_seqlens_q packed, (Tq, Hq, D)
    k_cache, v_cache  (B, Smax, Hk, D) and (B, Smax, Hk, Dv); with cache_batch_idx of any number of sequences; with
              page_table pages (P, page, Hk, D) of any page size. Of q's dtype, or float8
    k, v      (B, S, Hk, D) and (B, S, Hk, Dv), with cu_seqlens_k_new packed: written to rows cache_seqlens[b] on
    qv        refused: of a latent cache portattn.mla_attention has it
    rotary_cos, rotary_sin  (positions, R/2), of any float dtype: k and q are rotated in their first R columns, as in
              flash_attn's function of generation 2
    cache_seqlens  (B,) int32, or one integer: rows of each sequence before the call, its left padding included; None
              for full caches. Where one is negative and k is given, nothing is written and out is 0
    cache_batch_idx  (B,) int32: which sequences of the cache, or rows of page_table, these are
    cache_leftpad  (B,) int32: rows before a sequence's first key
    page_table  (B, pages a sequence) int32: page ids of each sequence
    cu_seqlens_q, max_seqlen_q  (B + 1,) int32 and the longest sequence's rows, of packed queries
    cu_seqlens_k_new  (B + 1,) int32, of packed k and v
    rotary_seqlens  (B,) int32: where the rotation of new keys and queries begins, in the place of cache_seqlens
    q_descale, k_descale, v_descale  (B, Hk) float32, of a float8 cache. Beside float8 queries new rows have the
              cache's dtype and are stored as they are, beside others they are divided by their scale first
    scheduler_metadata  None, which is what get_scheduler_metadata gives
    num_splits  programs that share a row's keys; up to 0 for what fits the chip best
    return_softmax_lse  also return the LSE, float32 (B, Hq, Sq), packed (Hq, Tq), -inf where a row attends nothing

    The other arguments are flash_attn_func's. Under autocast q, k and v are cast to the cache's dtype.

    Returns out like q with Dv columns; with return_softmax_lse, (out, lse, out_accum, lse_accum), the last two without
    elements: partial results are not kept.

    Raises ArgumentError as flash_attn_func does. Nothing is written then.

    >>> import torch
    >>> from portattn.integrations.flash_attn_interface import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 100, 2, 64), torch.zeros(2, 100, 2, 64)
    >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    >>> out, lse, *_ = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=30, return_softmax_lse=True)
    >>> out.shape, torch.equal(v_cache[:, 30], v[:, 0])
    (torch.Size([2, 1, 8, 64]), True)
    """
    op = "flash_attn_with_kvcache"
    check_hints(op, 1, pack_gqa, attention_chunk, sm_margin)
    check_dense(op, "qv", qv)
    check_dense(op, "scheduler_metadata", scheduler_metadata)
    if qv is not None:
        limit = "is not taken: portattn.mla_attention attends a latent cache, and flash_attn_func takes qv without one"
        raise ArgumentError(op, "qv", shape_of(qv), limit)
    if scheduler_metadata is not None:
        limit = "must be None: there is no schedule of FlashAttention-3's to follow"
        raise ArgumentError(op, "scheduler_metadata", shape_of(scheduler_metadata), limit)
    wanted = check_bool(op, "return_softmax_lse", return_softmax_lse)
    found = attend_cached(
        Cached(
            op, "page_table", q, k_cache, v_cache, k, v,
            scores_of(op, softmax_scale, causal, window_size, softcap, None, attention_chunk), rotary_cos, rotary_sin,
            check_bool(op, "rotary_interleaved", rotary_interleaved), cache_seqlens, cache_batch_idx, cache_leftpad,
            page_table, cu_seqlens_q, max_seqlen_q, cu_seqlens_k_new, rotary_seqlens,
            (q_descale, k_descale, v_descale), splits_of(op, num_splits), wanted,
        )
    )  # fmt: skip
    if not wanted:
        return found
    out, lse = found
    return out, lse, lse.new_empty(0), lse.new_empty(0)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """Nothing: portattn's plans are made without data, once for calls of a kind, and need no schedule beforehand.

    cache_seqlens  (B,) int32; it and all other arguments are not looked at

    Returns None, which flash_attn_with_kvcache takes as its scheduler_metadata.
    """
    return None
