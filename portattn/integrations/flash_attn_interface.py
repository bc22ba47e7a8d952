"""FlashAttention-3's functions (its module flash_attn_interface) over portattn: same names, arguments and results.

They have no dropout and no ALiBi. Hints that change no result (`pack_gqa`) are accepted, others refused:
docs/flash-attn.md lists each argument.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from portattn.api import autocast
from portattn.api.merge_states import merge_states
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.core import (
    FLOATS,
    Packing,
    ScoreArguments,
    WindowSize,
    check_bool,
    check_dtypes,
    check_packed,
    forward_only,
    rename_errors,
    repeated_bits,
    run,
    scores_of,
    shape_of,
    splits_of,
)
from portattn.integrations.flash_attn.kvcache import attend_cached
from portattn.integrations.flash_attn.kvcache_checks import CachedCall
from portattn.integrations.flash_attn.low_level import used_rows
from portattn.schema.tensors import KV_FORMAT
from portattn.validate.checks import Number, as_plain, check_dense


def _check_hints(op: str, num_splits: Any, pack_gqa: Any, attention_chunk: Any, sm_margin: Any) -> None:
    splits_of(op, num_splits)
    if pack_gqa is not None:
        check_bool(op, "pack_gqa", pack_gqa)
    if type(as_plain(attention_chunk)) is not int or attention_chunk < 0:
        limit = "must be an integer ≥ 0, the keys of a chunk, or 0 for no chunks"
        raise ArgumentError(op, "attention_chunk", attention_chunk, limit)
    if type(sm_margin) is not int or sm_margin != 0:
        raise ArgumentError(op, "sm_margin", sm_margin, "must be 0: kernels leave no part of the device free")


def _attend(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None,
    descales: tuple[torch.Tensor | None, ...],
    scores: ScoreArguments,
    deterministic: bool,
    return_attn_probs: bool,
    packing: Packing | None = None,
    used: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Any:
    """Attend dense tensors, or packed ones by the packing and their valid rows `used`; float8 has no gradient."""
    check_dtypes(op, FLOATS, q=q, k=k, v=v, **({} if qv is None else {"qv": qv}))
    block = repeated_bits(op, deterministic)
    wanted = check_bool(op, "return_attn_probs", return_attn_probs)
    q, k, scale = _with_qv(op, q, k, v, qv, scores.scale)
    queries = None
    if packing is not None:
        (cu_q, cu_k), longest = packing.beginnings, packing.longest
        queries, keys = used_rows(op, "q", cu_q, used[0], q), used_rows(op, "k", cu_k, used[1], k)
        if queries is not None:
            q, cu_q = queries.packed(q), queries.beginnings
        if keys is not None:
            k, v, cu_k = keys.packed(k), keys.packed(v), keys.beginnings
        packing = Packing((cu_q, cu_k), longest)
    q_scale, k_scale, v_scale = descales
    attend = functools.partial(
        run, q, k, v, packing, block, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=wanted,
        **scores.arguments() | {"scale": scale},
    )  # fmt: skip
    found = forward_only((op, "q.dtype", q.dtype), attend, q, k, v) if q.dtype in KV_FORMAT else attend()
    if queries is None:
        return found
    if not wanted:
        return queries.restored(found, 0.0)
    return queries.restored(found[0], 0.0), queries.restored(found[1].t(), -torch.inf).t()


def _with_qv(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None, scale: Number | None
) -> tuple[torch.Tensor, torch.Tensor, Number | None]:
    """Return queries and keys whose products are q·k + qv·v, and the scale."""
    if qv is None:
        return q, k, scale
    for name, tensor in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        check_dense(op, name, tensor)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            given = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ArgumentError(op, name, given, "must be of float16, bfloat16 or float32 with qv")
        # Put beside each other they would be promoted without a word. Autocast's dtype is that of all.
        if tensor.dtype != q.dtype and (name == "qv" or not autocast.is_on(q)):
            raise ArgumentError(op, f"{name}.dtype", tensor.dtype, f"must be q's, {q.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(op, f"{name}.device", str(tensor.device), f"must be q's, {q.device}")
        if tensor.ndim != q.ndim or not tensor.ndim:
            raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), "must have q's axes, head_dim the last")
    if k.shape[:-1] != v.shape[:-1]:
        limit = f"must be k's but for head_dim, {(*k.shape[:-1], v.shape[-1])}"
        raise ArgumentError(op, "v.shape", tuple(v.shape), limit)
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        limit = f"must be q's with v's head_dim, {(*q.shape[:-1], v.shape[-1])}, {q.dtype}"
        raise ArgumentError(op, "qv", (tuple(qv.shape), qv.dtype), limit)
    width = q.shape[-1] + v.shape[-1]
    return torch.cat((q, qv), -1), torch.cat((k, v), -1), width**-0.5 if scale is None else scale


@rename_errors()
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
    """Run flash_attn_func on queries, keys and values in one tensor.

    Args:
        qkv: (B, S, 3, H, D); or (B, S, Hq + 2·Hk, D) with num_heads_q, heads of queries, keys, values in turn
        num_heads_q: Hq of the second form

    Returns:
        out (B, S, Hq, D); with return_attn_probs, (out, lse).

    Examples:
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
    _check_hints(op, 1, None, attention_chunk, sm_margin)
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, None, attention_chunk)
    return _attend(op, q, k, v, None, descales, scores, deterministic, return_attn_probs)


@rename_errors()
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
    """Attend dense tensors, with FlashAttention-3's arguments. Gradients flow to q, k, v and qv.

    Args:
        q: (B, Sq, Hq, D); float16, bfloat16 or float32; any strides. Or float8, with k and v of the same dtype
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv); Hq must be a multiple of Hk
        softmax_scale: factor on the scores; None for 1/√D, with qv 1/√(D + Dv)
        causal: the last query sees the last key
        qv: (B, Sq, Hq, Dv): scores are (q·k + qv·v)·softmax_scale. D + Dv ≤ 576; q, qv, k and v are copied for it
        q_descale, k_descale, v_descale: (B, Hk) float32: factors on float8 numbers
        window_size: (left, right), inclusive, aligned at the last key; negative: no limit
        attention_chunk: chunk size: a query sees the keys of its own chunk, aligned at the last key; 0 for no chunks
        softcap: scores become softcap·tanh(score / softcap); up to 0 for none
        num_splits, pack_gqa: any integer; None, True or False: change no result, since the plan decides
        deterministic: gradients' kernels repeat their bits; in a graph only torch.use_deterministic_algorithms(True)
            does
        sm_margin: 0; other values are refused: kernels take the whole device
        return_attn_probs: also return the LSE, float32 (B, Hq, Sq), -inf for a row with nothing to attend

    Returns:
        out (B, Sq, Hq, Dv) in q's dtype, bfloat16 for float8; with return_attn_probs, (out, lse).

    Raises:
        ArgumentError: An argument is malformed. The error has FlashAttention's names of the function and the argument.

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn_interface import flash_attn_func
        >>> q, k, v = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 64)
        >>> out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 16, 8, 64]), torch.Size([2, 8, 16]))
    """
    op = "flash_attn_func"
    _check_hints(op, num_splits, pack_gqa, attention_chunk, sm_margin)
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, None, attention_chunk)
    return _attend(op, q, k, v, qv, (q_descale, k_descale, v_descale), scores, deterministic, return_attn_probs)


@rename_errors()
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
    """Attend packed sequences, with FlashAttention-3's arguments. Gradients flow to q, k, v and qv.

    The other arguments are flash_attn_func's. The LSE is (Hq, Tq).

    Args:
        q: (Tq, Hq, D): sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
        k, v: (Tk, Hk, D) and (Tk, Hk, Dv), likewise by cu_seqlens_k
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32
        max_seqlen_q, max_seqlen_k: rows of the longest sequence, or more
        seqused_q, seqused_k: (B,) int32: a sequence's valid first rows; they copy q, or k and v. Invalid rows of q give
            0 and an LSE of -inf, whatever they hold

    Returns:
        out (Tq, Hq, Dv); with return_attn_probs, (out, lse).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn_interface import flash_attn_varlen_func
        >>> lengths, used = torch.tensor([0, 5, 45], dtype=torch.int32), torch.tensor([3, 40], dtype=torch.int32)
        >>> q, k, v = torch.randn(45, 8, 64), torch.randn(45, 2, 64), torch.randn(45, 2, 64)
        >>> flash_attn_varlen_func(q, k, v, lengths, lengths, 40, 40, seqused_k=used).shape
        torch.Size([45, 8, 64])
    """
    op = "flash_attn_varlen_func"
    _check_hints(op, num_splits, pack_gqa, attention_chunk, sm_margin)
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, None, attention_chunk)
    return _attend(
        op, q, k, v, qv, (q_descale, k_descale, v_descale), scores, deterministic, return_attn_probs,
        Packing((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)), (seqused_q, seqused_k),
    )  # fmt: skip


@rename_errors()
def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys into attention over all of them.

    Args:
        out_partial: (N, B, Sq, H, Dv) float32
        lse_partial: (N, B, Sq, H) float32
        out: (B, Sq, H, Dv) to write to, or None
        out_dtype: of the result; None for float32

    Returns:
        out (B, Sq, H, Dv) and lse (B, Sq, H).

    Raises:
        ArgumentError: Shapes or dtypes do not go together.

    Examples:
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


@rename_errors(k_pages="k_cache", v_pages="v_cache")
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
    """Append k and v to a cache in place, and attend the cache.

    Autograd records nothing: tensors may require gradients, results require none. The other arguments are
    flash_attn_func's. Under autocast q, k and v are cast to the cache's dtype.

    Args:
        q: (B, Sq, Hq, D); with cu_seqlens_q packed, (Tq, Hq, D)
        k_cache, v_cache: (B, Smax, Hk, D) and (B, Smax, Hk, Dv); with cache_batch_idx of any number of sequences; with
            page_table pages (P, page, Hk, D) of any page size. In q's dtype, or float8
        k, v: (B, S, Hk, D) and (B, S, Hk, Dv), with cu_seqlens_k_new packed: written to rows cache_seqlens[b] on
        qv: refused: portattn.mla_attention attends latent caches
        rotary_cos, rotary_sin: (positions, R/2), of any float dtype: rotate the first R columns of k and q, as in
            flash_attn's function of generation 2
        cache_seqlens: (B,) int32, or one integer: rows of each sequence before the call, left padding included; None
            for full caches. If one is negative and k is given, its sequence is not written and its out is 0
        cache_batch_idx: (B,) int32: indices of sequences of the cache, or of rows of page_table
        cache_leftpad: (B,) int32: rows before a sequence's first key
        page_table: (B, pages a sequence) int32: page ids of each sequence
        cu_seqlens_q, max_seqlen_q: (B + 1,) int32 and the longest sequence's rows, of packed queries
        cu_seqlens_k_new: (B + 1,) int32, of packed k and v
        rotary_seqlens: (B,) int32: first rotary positions of new keys and queries, instead of cache_seqlens
        q_descale, k_descale, v_descale: (B, Hk) float32, of a float8 cache. With float8 queries new rows have the
            cache's dtype and are stored unchanged; otherwise they are divided by their scale first
        scheduler_metadata: None, as get_scheduler_metadata returns
        num_splits: programs that share a row's keys; up to 0 for the plan's choice
        return_softmax_lse: also return the LSE, float32 (B, Hq, Sq), packed (Hq, Tq), -inf for a row with nothing to
            attend

    Returns:
        out like q with Dv columns; with return_softmax_lse, (out, lse, out_accum, lse_accum), the last two empty:
        partial
        results are not kept.

    Raises:
        ArgumentError: See `flash_attn_func`. Nothing is written.

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn_interface import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 100, 2, 64), torch.zeros(2, 100, 2, 64)
        >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
        >>> out, lse, *_ = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=30, return_softmax_lse=True)
        >>> out.shape, torch.equal(v_cache[:, 30], v[:, 0])
        (torch.Size([2, 1, 8, 64]), True)
    """
    op = "flash_attn_with_kvcache"
    _check_hints(op, 1, pack_gqa, attention_chunk, sm_margin)
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
        CachedCall(
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
    """Return None: plans need no schedule, since they are made without data, once for calls of a kind.

    Returns:
        None, which flash_attn_with_kvcache takes as its scheduler_metadata; all arguments are ignored.
    """
    return None
