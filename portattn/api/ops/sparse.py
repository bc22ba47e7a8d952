"""Attention over chosen keys of a cache."""

from __future__ import annotations

from typing import NoReturn

import torch

from portattn.api.arguments import magicpig_tensors, table_tensors
from portattn.api.call import perform, try_cached
from portattn.api.excess_arguments import wrong_arguments
from portattn.api.page_table import PageTable
from portattn.api.request import Result, request_of
from portattn.api.unknown_arguments import operation, short_traceback
from portattn.validate.checks import Number


@operation
def sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *excess: NoReturn,
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
    **unknown: NoReturn,
) -> Result:
    """Decode attention over tokens that were chosen for each query head.

    q           (B, Hq, 1, D), or (B, 1, Hq, D) with layout="bshd"
    k_cache, v_cache  (B, Hk, Smax, D) and (B, Hk, Smax, Dv) in q's layout, or pages with page_table, as in
                `paged_attention`. Of q's dtype, or quantised, with q in float16 or bfloat16: float8_e4m3fn,
                float8_e5m2, float8_e4m3fnuz or int8, both alike, or uint8, D/2 and Dv/2 wide: int4, two numbers a byte
    indices     (B, Hq, Lmax) int32: token positions, in any order; negative ones are padding and passed over. A token
                that is listed twice counts twice
    counts      (B, Hq) int32: how many places of a head's row of `indices` are used, from the first on
    k_scale, v_scale  float32, of a quantised cache: what its numbers are multiplied by, positive and finite. Each (),
                (1,), (Hk,) or (B, Hk); or both for each token and head, in the cache's shape without its last axis, of
                any strides. int8 and int4 must have them; float8 numbers count as they are without
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
    scale       factor on the scores; None for 1/√D. Negative and zero are legal. A 0-d tensor is read back, which on an
                accelerator waits for the device
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

    A causal mask, a window, a chunk, a mask or a bias are choices of tokens or log_weights here.

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
            q, k_cache, v_cache, indices, counts, k_scale, v_scale, page_table, seqlens_k, alibi_slopes, sinks,
            log_weights, sampling["magicpig_bits"], sampling["magicpig_tables"],
        ),
        (scale, softcap, num_splits, return_lse, layout, page_layout, constants, backend, validate),
    )  # fmt: skip
    if found is None:
        if constants is None and magicpig is not None:
            magicpig = sampling["magicpig_bits"], sampling["magicpig_tables"]
        with short_traceback:
            return perform(request_of(op, locals()))
    return found
