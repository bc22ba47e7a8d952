"""Attention of dense tensors, of nested ones as packed rows, of packed sequences, and over chosen blocks of keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

from portattn.api.masks import BlockMask
from portattn.api.request import Result, Window
from portattn.api.signatures import operation
from portattn.validate.checks import Number


@operation
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: Number | None = None,
    causal: bool | str = False,
    window: Window | None = None,
    chunk: int | None = None,
    softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None,
    mask_mod: Callable[..., torch.Tensor] | None = None,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    leftpad_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    dropout_p: Number = 0.0,
    dropout_seed: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    backend: str | None = None,
    validate: bool | None = None,
) -> Result:
    """Attention of dense queries over dense keys and values: softmax(q·kᵀ·scale + mask)·v.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd"; float16, bfloat16 or float32; any strides
        k, v: (B, Hk, Sk, D) and (B, Hk, Sk, Dv); Hq must be a multiple of Hk (GQA, MQA). Of q's dtype. Or quantised: q,
            k and v of float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz; q and k of int8, v in float16 or bfloat16
            (portattn.quantize makes either). Products then are exact: docs/low-precision.md
        q_scale, k_scale, v_scale: float32, factors of quantised q, k and v, positive and finite. Each (), (1,), (Hk,)
            or (B, Hk), q's for the query heads of a key/value head together. float8 numbers may have none. int8 q and k
            must have scales, also one for each token and head, (B, Hq, Sq) and (B, Hk, Sk) in the layout; v is then of
            16 bits without a scale
        scale: factor on the scores (None: 1/√D), also negative or 0. A 0-d tensor is read back: an accelerator waits,
            and a graph of torch.compile breaks (with fullgraph=True an error)
        causal: True or "bottom_right": the last query sees the last key (FlashAttention's convention); "top_left":
            query i sees keys 0..i (SDPA's is_causal); False: no mask
        window: (left, right), inclusive: a query sees that many keys before and after its own position, which is
            aligned as `causal` says (bottom-right without one). None or -1 on a side: no limit. A model's window of W
            keys, the query's own among them, is (W - 1, 0)
        chunk: keys of a chunk (chunked local attention, FlashAttention-3's attention_chunk): a query attends only keys
            of its own position's chunk. Chunks count from the sequence's first key; positions are aligned as a
            window's; causal and window still apply. None: no chunks
        softcap: scores become softcap·tanh(score / softcap), before anything is added to them; None or 0 for none
        alibi_slopes: (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
        sinks: (Hq,) float32 or q's dtype: one more score of each row, without a value (attention sinks). The LSE counts
            it; it is the LSE of a row with nothing to attend
        bias: added to the scores; q's dtype or float32, broadcast to (B, Hq, Sq, Sk). -inf masks, even a NaN key
        mask: bool, broadcast to (B, Hq, Sq, Sk): True = attend
        block_mask: lists of the blocks of keys that each block of queries attends: a portattn.BlockMask, or torch's
            (torch.nn.attention.flex_attention) with its mask_mod. Blocks that no list names are hidden, and skipped;
            inside the others, mask and all other arguments apply, but mask_mod not in whole blocks of the full lists.
            Blocks count from the first row and key, so left padding goes without
        score_mod: function (score, b, h, q_idx, kv_idx) -> score of FlexAttention's signature, of single numbers:
            score float32, already scaled, the others int32: numbers of the sequence, the query head, the query and the
            key, which count from a sequence's first. softcap, alibi_slopes and bias apply to its result. It may read
            tensors on q's device, at most 4 with 8 axes together, which can have gradients. It is traced (torch
            operations on numbers, indices of tensors, torch.where instead of if), and compiled into the kernel
        mask_mod: function (b, h, q_idx, kv_idx) -> bool, traced likewise: True = attend. No mask is stored: blocks that
            it hides are found once for a function, sizes and tensors, and skipped
        seqlens_q, seqlens_k: (B,) int32 on q's device: valid rows of each sequence; the rest is padding, which is never
            attended and, as a query, gives 0. Causal alignment is each sequence's own
        leftpad_q, leftpad_k: (B,) int32: padding rows before a sequence's first valid row (left-padded batches)
        dropout_p: share of the probabilities that become 0, in [0, 1); the others count 1/(1 - dropout_p)
        dropout_seed: (1,) int64 on q's device: it alone decides the dropped probabilities, on every path and in the
            backward (portattn.dropout_mask has the mask); None draws one from torch's generator
        out_dtype: of quantised q: torch.bfloat16 or torch.float16; None for bfloat16 of float8 numbers, and for v's
            dtype beside int8. Otherwise None or q's dtype
        return_lse: also return the natural log of each row's sum of exponentials, float32 (B, Hq, Sq)
        layout: "bhsd", or "bshd": the order of the axes of q, k, v and of the result
        backend: "auto", or a path that must be taken: "triton", "vendor", "reference", a vendor path's own name, and on
            a CPU "interpreter"; None for the setting. A named path never falls back
        validate: read lengths back and check them (on an accelerator that waits for the device); None for the setting,
            which checks on the CPU only. Unchecked lengths are clamped: nothing outside the tensors is read

    Jagged nested tensors (B, Hq, *, D), or (B, *, Hq, D) with layout="bshd", run as packed rows, without a copy;
    the results are jagged too.

    Returns:
        out in q's dtype, or out_dtype, and layout, (B, Hq, Sq, Dv); with return_lse, (out, lse). A row with nothing to
        attend gives 0 and an LSE of -inf. A key that no query may attend can hold anything, NaN included.

    Memory beyond the inputs: the output, the LSE if requested, 256 bytes a program while a launch that uses tensor
    descriptors runs, and a copy of q, k or v whose rows lie more than 2³¹ elements apart within a tile.

    Raises:
        ArgumentError: An argument is malformed: the error has the argument, its value and the limit.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        QuirkConflict: The registry contradicts itself.
        TracingError: Forward-mode or second derivatives are requested.

    Examples:
        >>> import torch, portattn
        >>> q, k, v = torch.randn(2, 8, 16, 64), torch.randn(2, 2, 16, 64), torch.randn(2, 2, 16, 64)
        >>> out = portattn.attention(q, k, v, causal=True)
        >>> right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        >>> torch.allclose(out, right, atol=1e-5)
        True
    """


@operation
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: Number | None = None,
    causal: bool | str = False,
    window: Window | None = None,
    chunk: int | None = None,
    softcap: Number | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None,
    mask_mod: Callable[..., torch.Tensor] | None = None,
    dropout_p: Number = 0.0,
    dropout_seed: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    validate: bool | None = None,
) -> Result:
    """Attention of packed sequences: all their rows one after the other, without padding.

    Args:
        q: (Tq, Hq, D): sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; float16, bfloat16 or
            float32; any strides
        k, v: (Tk, Hk, D) and (Tk, Hk, Dv), likewise by cu_seqlens_k; Hq must be a multiple of Hk. Of q's dtype, or
            quantised as of `attention`
        q_scale, k_scale, v_scale: float32, factors of quantised q, k and v, positive and finite. Each (), (1,), (Hk,)
            or (B, Hk), q's for the query heads of a key/value head together. float8 numbers may have none. int8 q and k
            must have scales, also one for each token and head, (Tq, Hq) and (Tk, Hk); v is then of 16 bits without a
            scale
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device, from 0 on, never falling (else the result is
            undefined, and still nothing outside the tensors is read). They stay on the device. Sequences may have no
            rows, and their queries and keys may differ in number
        max_seqlen_q, max_seqlen_k: rows of the longest sequence, or more: results of longer sequences are undefined
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
        score_mod, mask_mod: as of `attention`; b is the sequence's number. mask_mod is computed for every score
        dropout_p, dropout_seed: as of `attention`, by positions in each sequence
        out_dtype: of quantised q: torch.bfloat16 or torch.float16; None for bfloat16 of float8 numbers, and for v's
            dtype beside int8. Otherwise None or q's dtype
        return_lse: also return the natural log of each row's sum of exponentials, float32 (Hq, Tq)
        backend: "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
        validate: read lengths and ids back and check them; None for the setting, which checks on the CPU only

    Returns:
        out (Tq, Hq, Dv) in q's dtype, or out_dtype; with return_lse, (out, lse). Rows after the last sequence give 0
        and -inf.

    Memory beyond the inputs: as of `attention`.

    Raises:
        ArgumentError: An argument is malformed: the error has the argument, its value and the limit.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        TracingError: Forward-mode or second derivatives are requested.

    Examples:
        >>> import torch, portattn
        >>> lengths = torch.tensor([0, 5, 5, 45], dtype=torch.int32)  # sequences of 5, 0 and 40 rows
        >>> q, k, v = torch.randn(45, 8, 64), torch.randn(45, 2, 64), torch.randn(45, 2, 64)
        >>> out = portattn.varlen_attention(q, k, v, lengths, lengths, 40, 40, causal=True)
        >>> alone = portattn.attention(q[None, 5:], k[None, 5:], v[None, 5:], causal=True, layout="bshd")
        >>> torch.allclose(out[5:], alone[0], atol=1e-5)
        True
    """


@operation
def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    *,
    block_size: int = 64,
    block_counts: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    scale: Number | None = None,
    causal: bool | str = False,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    backend: str | None = None,
    validate: bool | None = None,
) -> Result:
    """Attention of each query over the blocks of keys that it lists for a key/value head (NSA, MoBA, MSA, QSA).

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd"; float16, bfloat16 or float32; any strides
        k, v: (B, Hk, Sk, D) and (B, Hk, Sk, Dv), dense or a cache; Hq must be a multiple of Hk. Of q's dtype
        block_indices: (B, Hk, Sq, T) int32 in the layout's order, (B, Sq, Hk, T) with "bshd", the last axis contiguous:
            numbers of blocks in any order, which all query heads of the group attend. Negative numbers are holes,
            anywhere. A number must not be repeated in a row's list: an error if values are checked, else undefined
        block_size: keys of a block: 16, 32, 64 or 128. Block n holds keys n · block_size and on; the last may be short
        block_counts: (B, Hk, Sq) int32 in the layout's order: places of a row's list that count, from the first on;
            None for all. Later places may hold anything
        seqlens_k: (B,) int32: keys of each sequence; None for Sk. A block behind them counts for nothing; one behind
            Sk is an error if values are checked
        scale: factor on the scores (None: 1/√D), also negative or 0. A 0-d tensor is read back: an accelerator waits
        causal: True or "bottom_right": the last query sees the last key; "top_left": query i sees keys 0..i; False: no
            mask. It hides keys of listed blocks one by one
        sinks: (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
        num_splits: programs that share a row's keys; None: the plan chooses. In the kernels, 1 gives each sequence
            bitwise the same result in every batch
        return_lse: also return the natural log of each row's sum of exponentials, float32 (B, Hq, Sq)
        layout: "bhsd", or "bshd": the order of the axes of q, k, v, of the lists and of the result
        backend: "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
        validate: read lengths and lists back and check them; None for the setting, which checks on the CPU only

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype and layout; with return_lse, (out, lse). A query without a key gives 0 and -inf
        (or its sink).

    Gradients of q, k, v and sinks are computed by kernels up to D = 256 and 128 query heads a group, and repeat bit by
    bit: a program goes through the rows that list its block.

    Memory beyond the inputs: as of `attention`; if keys are split over programs, float32 partial results of
    splits·B·Hq·Sq·(Dv + 2) elements; for gradients 20 bytes for each place of the lists, and float32
    partial results of B·Hk·chunks·block_size·(D + Dv) elements, where a block that many rows list has several chunks.

    Raises:
        ArgumentError: An argument is malformed: the error has the argument, its value and the limit.
        UnknownArgument: A keyword is unknown. For another library's name the error has portattn's.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        TracingError: Forward-mode or second derivatives are requested.

    Examples:
        >>> import torch, portattn
        >>> q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 80, 64), torch.randn(1, 2, 80, 64)
        >>> blocks = torch.tensor([4, 1, -1], dtype=torch.int32).expand(1, 2, 1, 3)
        >>> out = portattn.block_sparse_attention(q, k, v, blocks, block_size=16)
        >>> keys = [*range(64, 80), *range(16, 32)]
        >>> torch.allclose(out, portattn.attention(q, k[:, :, keys], v[:, :, keys]), atol=1e-5)
        True
    """
