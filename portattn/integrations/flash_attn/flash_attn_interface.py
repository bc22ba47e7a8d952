"""FlashAttention-2's functions (flash_attn 2.8) over portattn: same names, arguments, order, defaults and results.

docs/flash-attn.md lists each argument's effect, and the refused ones.
"""

from __future__ import annotations

import torch

from portattn.integrations.flash_attn.core import (
    Packing,
    WindowSize,
    _get_block_size_n,
    attention_of,
    check_bool,
    check_packed,
    infinite,
    rename_errors,
    scores_of,
    splits_of,
)
from portattn.integrations.flash_attn.kvcache import attend_cached
from portattn.integrations.flash_attn.kvcache_checks import CachedCall
from portattn.integrations.flash_attn.low_level import (
    USE_TRITON_ROCM,
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    flash_attn_gpu,
)
from portattn.validate.checks import Number

# In flash_attn these are the same functions as torch operators.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

__all__ = [
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
]


def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor, or a contiguous copy if the elements of its rows are not contiguous; None for None."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


@rename_errors()
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend dense tensors, with flash_attn's arguments. Gradients flow to q, k, v and alibi_slopes.

    Args:
        q: (B, Sq, Hq, D); float16, bfloat16 or float32; any strides
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv); Hq must be a multiple of Hk
        dropout_p: share of the probabilities that become 0, in [0, 1); drawn from torch's generator
        softmax_scale: factor on the scores; None for 1/√D
        causal: the last query sees the last key
        window_size: (left, right), inclusive, around the query's own position, aligned at the last key; negative: no
            limit
        softcap: scores become softcap·tanh(score / softcap); up to 0 for none
        alibi_slopes: (Hq,) or (B, Hq) float32: scores lose slope·|distance|
        deterministic: gradients' kernels repeat their bits; in a graph only torch.use_deterministic_algorithms(True)
            does
        return_attn_probs: also return the LSE, float32 (B, Hq, Sq), +inf for a row with nothing to attend, and S_dmask:
            with dropout (B, Hq, Sq, Sk), exp(score - the largest score of the key's block of columns and all later
            ones), negative for a dropped probability; without, no elements

    Returns:
        out (B, Sq, Hq, Dv) in q's dtype; with return_attn_probs, (out, lse, S_dmask).

    Raises:
        ArgumentError: An argument is malformed. The error has flash_attn's names of the function and the argument.

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 64)
        >>> out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 16, 8, 64]), torch.Size([2, 8, 16]))
    """
    op = "flash_attn_func"
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return attention_of(op, q, k, v, dropout_p, scores, None, deterministic, return_attn_probs)


@rename_errors()
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run flash_attn_func on keys and values in one tensor.

    Args:
        kv: (B, Sk, 2, Hk, D): keys, then values; not copied

    Returns:
        out (B, Sq, Hq, D); with return_attn_probs, (out, lse, S_dmask).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(torch.randn(1, 3, 4, 16), torch.randn(1, 5, 2, 2, 16)).shape
        torch.Size([1, 3, 4, 16])
    """
    op = "flash_attn_kvpacked_func"
    check_packed(op, "kv", kv, 2, 2, "batch, seqlen, 2, heads, head_dim")
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    k, v = kv.unbind(2)
    return attention_of(op, q, k, v, dropout_p, scores, None, deterministic, return_attn_probs)


@rename_errors()
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run flash_attn_func on queries, keys and values in one tensor.

    Args:
        qkv: (B, S, 3, H, D): queries, keys, values; not copied

    Returns:
        out (B, S, H, D); with return_attn_probs, (out, lse, S_dmask).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(1, 5, 3, 2, 16), causal=True).shape
        torch.Size([1, 5, 2, 16])
    """
    op = "flash_attn_qkvpacked_func"
    check_packed(op, "qkv", qkv, 2, 3, "batch, seqlen, 3, heads, head_dim")
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    q, k, v = qkv.unbind(2)
    return attention_of(op, q, k, v, dropout_p, scores, None, deterministic, return_attn_probs)


@rename_errors(page_table="block_table", seqlens_k="cu_seqlens_k", k_pages="k", v_pages="v")
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend packed sequences, with flash_attn's arguments. Gradients flow unless there is a block_table.

    The other arguments are flash_attn_func's. The LSE is (Hq, Tq), S_dmask (B, Hq, max_seqlen_q, max_seqlen_k).

    Args:
        q: (Tq, Hq, D): sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
        k, v: (Tk, Hk, D) and (Tk, Hk, Dv), likewise; with block_table pages (P, page, Hk, D) of any page size
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32; with block_table the latter's differences are the sequences' lengths
        max_seqlen_q, max_seqlen_k: rows of the longest sequence, or more
        block_table: (B, pages a sequence) int32: page ids; forward only, without dropout

    Returns:
        out (Tq, Hq, Dv); with return_attn_probs, (out, lse, S_dmask).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn import flash_attn_varlen_func
        >>> lengths = torch.tensor([0, 5, 45], dtype=torch.int32)
        >>> q, k, v = torch.randn(45, 8, 64), torch.randn(45, 2, 64), torch.randn(45, 2, 64)
        >>> flash_attn_varlen_func(q, k, v, lengths, lengths, 40, 40, causal=True).shape
        torch.Size([45, 8, 64])
    """
    op = "flash_attn_varlen_func"
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    packing = Packing((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), block_table)
    return attention_of(op, q, k, v, dropout_p, scores, packing, deterministic, return_attn_probs)


@rename_errors()
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run flash_attn_varlen_func on keys and values in one tensor.

    Args:
        kv: (Tk, 2, Hk, D): keys, then values; not copied

    Returns:
        out (Tq, Hq, D); with return_attn_probs, (out, lse, S_dmask).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn import flash_attn_varlen_kvpacked_func
        >>> lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> q, kv = torch.randn(5, 4, 16), torch.randn(5, 2, 2, 16)
        >>> flash_attn_varlen_kvpacked_func(q, kv, lengths, lengths, 3, 3).shape
        torch.Size([5, 4, 16])
    """
    op = "flash_attn_varlen_kvpacked_func"
    check_packed(op, "kv", kv, 1, 2, "tokens, 2, heads, head_dim")
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    packing = Packing((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    k, v = kv.unbind(1)
    return attention_of(op, q, k, v, dropout_p, scores, packing, deterministic, return_attn_probs)


@rename_errors(
    cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens", max_seqlen_q="max_seqlen", max_seqlen_k="max_seqlen"
)
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run flash_attn_varlen_func on queries, keys and values in one tensor.

    Args:
        qkv: (T, 3, H, D): queries, keys, values; not copied
        cu_seqlens, max_seqlen: (B + 1,) int32, the sequences' first rows; rows of the longest

    Returns:
        out (T, H, D); with return_attn_probs, (out, lse, S_dmask).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(5, 3, 2, 16), lengths, 3).shape
        torch.Size([5, 2, 16])
    """
    op = "flash_attn_varlen_qkvpacked_func"
    check_packed(op, "qkv", qkv, 1, 3, "tokens, 3, heads, head_dim")
    scores = scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    packing = Packing((cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen))
    q, k, v = qkv.unbind(1)
    return attention_of(op, q, k, v, dropout_p, scores, packing, deterministic, return_attn_probs)


@rename_errors(page_table="block_table", k_pages="k_cache", v_pages="v_cache")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: Number = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append k and v to a cache in place, and attend the cache.

    Autograd records nothing, as in flash_attn: tensors may require gradients, results require none. The other arguments
    are flash_attn_func's. Under autocast q, k and v are cast to the cache's dtype.

    Args:
        q: (B, Sq, Hq, D)
        k_cache, v_cache: (B, Smax, Hk, D) and (B, Smax, Hk, Dv); with cache_batch_idx of any number of sequences; with
            block_table pages (P, page, Hk, D) of any page size
        k, v: (B, S, Hk, D) and (B, S, Hk, Dv): written to rows cache_seqlens[b] on; both or neither
        rotary_cos, rotary_sin: (positions, R/2), of any float dtype, only with k and v: rotate the first R columns, of
            a key by its row in the cache, of query i by cache_seqlens + i if the call is causal or has a window, else
            by cache_seqlens
        cache_seqlens: (B,) int32, or one integer: rows of each sequence before the call, left padding included; None
            for full caches. If one is negative and k is given, its sequence is not written and its out is 0
        cache_batch_idx: (B,) int32: indices of sequences of the cache, or of rows of block_table
        cache_leftpad: (B,) int32: rows before a sequence's first key
        block_table: (B, pages a sequence) int32: page ids of each sequence
        rotary_interleaved: columns 2i and 2i + 1 are rotated together; False: i and i + R/2
        num_splits: programs that share a row's keys; up to 0 for the plan's choice
        return_softmax_lse: also return the LSE, float32 (B, Hq, Sq), +inf for a row with nothing to attend

    Returns:
        out (B, Sq, Hq, Dv); with return_softmax_lse, (out, lse).

    Raises:
        ArgumentError: See `flash_attn_func`. Nothing is written.

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 100, 2, 64), torch.zeros(2, 100, 2, 64)
        >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=30, causal=True)
        >>> out.shape, torch.equal(k_cache[:, 30], k[:, 0])
        (torch.Size([2, 1, 8, 64]), True)
    """
    op = "flash_attn_with_kvcache"
    wanted = check_bool(op, "return_softmax_lse", return_softmax_lse)
    found = attend_cached(
        CachedCall(
            op, "block_table", q, k_cache, v_cache, k, v,
            scores_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes), rotary_cos, rotary_sin,
            check_bool(op, "rotary_interleaved", rotary_interleaved), cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, num_splits=splits_of(op, num_splits), return_lse=wanted,
        )
    )  # fmt: skip
    return (found[0], infinite(found[1])) if wanted else found
