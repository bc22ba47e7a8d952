"""Attention of packed sequences."""

from __future__ import annotations

from typing import NoReturn

import torch

from portattn.api.call import perform, try_cached
from portattn.api.excess_arguments import wrong_arguments
from portattn.api.request import Result, Window, request_of
from portattn.api.unknown_arguments import operation, short_traceback
from portattn.validate.checks import Number


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
    dropout_p: Number = 0.0,
    dropout_seed: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    validate: bool | None = None,
    **unknown: NoReturn,
) -> Result:
    """Attention of packed sequences: all their rows one after the other, without padding.

    q           (Tq, Hq, D): sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; float16, bfloat16 or
                float32; any strides
    k, v        (Tk, Hk, D) and (Tk, Hk, Dv), likewise by cu_seqlens_k; Hq must be a multiple of Hk. Of q's dtype, or
                quantised as of `attention`
    q_scale, k_scale, v_scale  float32, factors of quantised q, k and v, positive and finite. Each (), (1,), (Hk,)
                or (B, Hk), q's for the query heads of a key/value head together. float8 numbers without scales count
                as they are. int8 q and k must have scales, also one for each token and head, (Tq, Hq) and (Tk, Hk); v
                is then of 16 bits without a scale
    cu_seqlens_q, cu_seqlens_k  (B + 1,) int32 on q's device, from 0 on, never falling (else the result is undefined,
                and still nothing outside the tensors is read). They stay on the device. Sequences may have no rows, and
                their queries and keys may differ in number
    max_seqlen_q, max_seqlen_k  rows of the longest sequence, or more: results of longer sequences are undefined
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
    dropout_p, dropout_seed  as of `attention`, by positions in each sequence
    out_dtype   of quantised q: torch.bfloat16 or torch.float16; None for bfloat16 of float8 numbers, and for v's dtype
                beside int8. Otherwise None or q's dtype
    return_lse  also return the natural log of each row's sum of exponentials, float32 (Hq, Tq)
    backend     "auto", or the path that must be taken ("triton", "vendor", "reference", …); None for the setting
    validate    read lengths and ids back and check them; None for the setting, which checks on the CPU only

    Returns out (Tq, Hq, Dv) in q's dtype, or out_dtype; with return_lse, (out, lse). Rows after the last sequence give
    0 and -inf.

    Memory beyond the inputs: as of `attention`.

    Raises ArgumentError (argument, value, limit), UnknownArgument for an unknown keyword, PathUnavailable where a named
    path cannot run the call or falling back is forbidden, TracingError for forward-mode and second derivatives.

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
        (q, k, v, q_scale, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, dropout_seed),
        (scale, causal, window, chunk, softcap, dropout_p, out_dtype, return_lse, backend, validate),
        (max_seqlen_q, max_seqlen_k),
    )
    if found is None:
        with short_traceback:
            return perform(request_of("varlen_attention", locals()))
    return found
