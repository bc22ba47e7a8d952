"""Attention of dense tensors, and of nested ones as packed rows."""

from __future__ import annotations

from typing import NoReturn

import torch

from portattn.api.block_mask import BlockMask, block_tensors
from portattn.api.call import perform, try_cached
from portattn.api.excess_arguments import wrong_arguments
from portattn.api.jagged import are_jagged, jagged_results, packed
from portattn.api.ops.varlen import varlen_attention
from portattn.api.request import Result, Window, request_of
from portattn.api.unknown_arguments import operation, short_traceback
from portattn.validate.checks import Number


@operation
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *excess: NoReturn,
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
    **unknown: NoReturn,
) -> Result:
    """Attention of dense queries over dense keys and values: softmax(q·kᵀ·scale + mask)·v.

    q           (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd"; float16, bfloat16 or float32; any strides
    k, v        (B, Hk, Sk, D) and (B, Hk, Sk, Dv); Hq must be a multiple of Hk (GQA, MQA). Of q's dtype. Or quantised:
                q, k and v of float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz; q and k of int8, v in float16 or bfloat16
                (portattn.quantize makes either). Products then are exact: docs/low-precision.md
    q_scale, k_scale, v_scale  float32, factors of quantised q, k and v, positive and finite. Each (), (1,), (Hk,)
                or (B, Hk), q's for the query heads of a key/value head together. float8 numbers without scales count
                as they are. int8 q and k must have scales, also one for each token and head, (B, Hq, Sq) and
                (B, Hk, Sk) in the layout; v is then of 16 bits without a scale
    scale       factor on the scores; None for 1/√D. Negative and zero are legal. A 0-d tensor is read back, which on an
                accelerator waits for the device, and breaks a graph of torch.compile (with fullgraph=True an error)
    causal      True or "bottom_right": the last query sees the last key (FlashAttention's convention);
                "top_left": query i sees keys 0..i (SDPA's is_causal); False: no mask
    window      (left, right), inclusive: a query sees that many keys before and after its own position, which is
                aligned as `causal` says (bottom-right without one). None or -1 on a side: no limit. A model that
                speaks of a window of W keys with the query's own among them means (W - 1, 0)
    chunk       number of keys in a chunk (chunked local attention, FlashAttention-3's attention_chunk): a query attends
                only keys of its own position's chunk. Chunks count from the sequence's first key; positions are aligned
                as a window's. causal and window hide keys in addition. None for no chunks
    softcap     scores become softcap·tanh(score / softcap), before anything is added to them; None or 0 for none
    alibi_slopes  (Hq,) or (B, Hq) float32: scores lose slope·|distance| (ALiBi)
    sinks       (Hq,) float32 or q's dtype: one more score of each row, without a value (attention sinks). The LSE
                counts it; a row with nothing to attend has it as its LSE
    bias        added to the scores; q's dtype or float32, broadcast to (B, Hq, Sq, Sk). -inf masks, whatever the key
                holds
    mask        bool, broadcast to (B, Hq, Sq, Sk): True = attend
    block_mask  lists of the blocks of keys that each block of queries attends: a portattn.BlockMask, or torch's
                (torch.nn.attention.flex_attention), whose mask_mod is then computed as a mask at each call. Blocks that
                no list names are hidden, and skipped; inside the others mask and the rest say what is attended. Blocks
                count from the first row and key, so left padding goes without
    seqlens_q, seqlens_k  (B,) int32 on q's device: valid rows of each sequence; the rest is padding, which is never
                attended and, as a query, gives 0. Causal alignment is each sequence's own
    leftpad_q, leftpad_k  (B,) int32: padding rows before a sequence's first valid row (left-padded batches)
    dropout_p   share of the probabilities that become 0, in [0, 1); the others count 1/(1 - dropout_p)
    dropout_seed  (1,) int64 on q's device: it alone decides which ones, on every path and in the backward
                (portattn.dropout_mask has the mask); None draws one from torch's generator
    out_dtype   of quantised q: torch.bfloat16 or torch.float16; None for bfloat16 of float8 numbers, and for v's dtype
                beside int8. Otherwise None or q's dtype
    return_lse  also return the natural log of each row's sum of exponentials, float32 (B, Hq, Sq)
    layout      "bhsd", or "bshd": the order of the axes of q, k, v and of the result
    backend     "auto", or a path that must be taken: "triton", "vendor", "reference", a vendor path's own name, and
                on a CPU "interpreter"; None for the setting. A named path never falls back
    validate    read lengths back and check them (on an accelerator that waits for the device); None for the setting,
                which checks on the CPU only. Unchecked lengths are clamped: nothing outside the tensors is read

    Jagged nested tensors (B, Hq, *, D), or (B, *, Hq, D) with layout="bshd", run as packed rows, without a copy;
    the results are jagged too.

    Returns out in q's dtype, or out_dtype, and layout, (B, Hq, Sq, Dv); with return_lse, (out, lse). A row with nothing
    to attend gives 0 and an LSE of -inf. A key that no query may attend can hold anything, NaN included.

    Memory beyond the inputs: the output, the LSE where it is asked for, 256 bytes a program while a launch that uses
    tensor descriptors runs, and a copy of q, k or v whose rows lie more than 2³¹ elements apart within a tile.

    Raises ArgumentError (argument, value, limit), UnknownArgument for an unknown keyword (for another library's name it
    tells portattn's), PathUnavailable when a named path cannot run the call or falling back is forbidden, QuirkConflict
    when the registry contradicts itself, TracingError for forward-mode and second derivatives.

    >>> import torch, portattn
    >>> q, k, v = torch.randn(2, 8, 16, 64), torch.randn(2, 2, 16, 64), torch.randn(2, 2, 16, 64)
    >>> out = portattn.attention(q, k, v, causal=True)
    >>> right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    >>> torch.allclose(out, right, atol=1e-5)
    True
    """
    if excess or unknown:
        raise wrong_arguments("attention", excess, unknown)
    block_size, blocks = None, block_mask
    if block_mask is not None:
        blocks, mask, block_size = block_tensors(block_mask, mask, q, k, layout, validate)
    found = try_cached(
        "attention",
        (
            q, k, v, q_scale, k_scale, v_scale, alibi_slopes, sinks, bias, mask, blocks, seqlens_q, seqlens_k,
            leftpad_q, leftpad_k, dropout_seed,
        ),
        (
            scale, causal, window, chunk, softcap, block_size, dropout_p, out_dtype, return_lse, layout, backend,
            validate,
        ),
    )  # fmt: skip
    if found is not None:
        return found
    if are_jagged(q, k, v):
        # By name: after a graph break dynamo's locals() are not the source's.
        given = {
            "q": q, "k": k, "v": v, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale,
            "scale": scale, "causal": causal, "window": window, "chunk": chunk, "softcap": softcap,
            "alibi_slopes": alibi_slopes, "sinks": sinks, "bias": bias, "mask": mask, "block_mask": block_mask,
            "seqlens_q": seqlens_q,
            "seqlens_k": seqlens_k, "leftpad_q": leftpad_q, "leftpad_k": leftpad_k, "dropout_p": dropout_p,
            "dropout_seed": dropout_seed, "out_dtype": out_dtype, "return_lse": return_lse, "layout": layout,
            "backend": backend, "validate": validate,
        }  # fmt: skip
        return jagged_results(given, varlen_attention(**packed(given)))
    with short_traceback:
        return perform(request_of("attention", locals() | {"block_mask": blocks}))
