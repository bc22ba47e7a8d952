"""Attention of a few rows over a contiguous key/value cache."""

from __future__ import annotations

from typing import NoReturn

import torch

from portattn.api.call import perform, try_cached
from portattn.api.excess_arguments import wrong_arguments
from portattn.api.request import Result, Window, request_of
from portattn.api.unknown_arguments import operation, short_traceback
from portattn.validate.checks import Number


@operation
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor | None,
    *excess: NoReturn,
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
                q's dtype, or quantised, with q in float16 or bfloat16: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or
                int8, both alike, or uint8, D/2 and Dv/2 wide: int4, two numbers a byte (docs/low-precision.md)
    seqlens_k   (B,) int32 on q's device: keys in each sequence's cache; None when every cache is full. It stays on
                the device: no host synchronisation, so a CUDA graph can replay the call with lengths changed in place
    k_scale, v_scale  float32, of a quantised cache: what its numbers are multiplied by, positive and finite. Each (),
                (1,), (Hk,) or (B, Hk); or both for each token and head: (B, Hk, Smax), with bshd (B, Smax, Hk), of any
                strides. int8 and int4 must have them; float8 numbers count as they are without
    k_block_scale, v_block_scale  float8_e4m3fn, finite, not negative: with them bytes are nvfp4 numbers (e2m1, D and Dv
                multiples of 16), and each 16 neighbours of a row share one of these scales. k_scale and v_scale, not
                for each token, multiply them all, and may be absent.
                (B, Hk, Smax, D/16) and (B, Hk, Smax, Dv/16), in the caches' layout, the last axis contiguous
    leftpad_k   (B,) int32: padding rows before a sequence's first key
    scale       factor on the scores; None for 1/√D. Negative and zero are legal. A 0-d tensor is read back, which on an
                accelerator waits for the device
    causal      True or "bottom_right": query i sees what ends Sq-1-i keys before the last (speculative decoding);
                "top_left": query i sees keys 0..i; False: no mask. Each sequence is aligned by its own lengths
    window      (left, right), inclusive: a query sees that many keys before and after its own position. None or -1 on
                a side: no limit. A model's window of W keys, the query's own among them, is (W - 1, 0)
    chunk       number of keys in a chunk (chunked local attention, FlashAttention-3's attention_chunk): a query attends
                only keys of its own position's chunk. Chunks count from the sequence's first key; positions are aligned
                as a window's. causal and window hide keys in addition. None for no chunks
    softcap     scores become softcap·tanh(score / softcap); None or 0 for none
    alibi_slopes  (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
    sinks       (Hq,) float32 or q's dtype: one more score of each row, without a value; the LSE counts it
    bias        added to the scores; q's dtype or float32, broadcast to (B, Hq, Sq, Smax). -inf masks
    mask        bool, broadcast to (B, Hq, Sq, Smax): True = attend
    tree_mask   int64 (B, Sq) or (Sq,), its rows contiguous: of each sequence's last Sq keys, its new tokens, query i
                sees number j where bit j of its word is set; it sees all earlier keys. What causal, window and mask
                hide stays hidden. Up to 64 queries a sequence. `portattn.tree_mask` makes it, of parents or of bools
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
        (
            q, k_cache, v_cache, k_scale, v_scale, k_block_scale, v_block_scale, alibi_slopes, sinks, bias, mask,
            tree_mask, seqlens_k, leftpad_k,
        ),
        (scale, causal, window, chunk, softcap, num_splits, return_lse, layout, backend, validate),
    )  # fmt: skip
    if found is None:
        with short_traceback:
            return perform(request_of("decode_attention", locals()))
    return found
