"""FlashInfer, by its wrappers, which plan once and run often: packed prefill, paged prefill and decode, latent decode.

docs.flashinfer.ai, flashinfer-python 0.6: BatchPrefillWithRaggedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper,
BatchDecodeWithPagedKVCacheWrapper, flashinfer.mla.BatchMLAPagedAttentionWrapper. Planning is not timed; it compiles
what it runs on first use. Causal masks are bottom-right; a window has a left side only.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, as_is, transpose_heads
from portattn.tools.bench.peers.availability import missing, module
from portattn.tools.bench.tensors import Tensors

PACKAGE = "flashinfer"
WORKSPACE = 256 << 20  # bytes; its documentation recommends 128 MiB and more for long splits
WIDEST = 256
FORMATS = ("e4m3", "e5m2")  # of a cache's numbers, besides the queries' dtype


def absent() -> str:
    return missing(PACKAGE)


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    one_sided = case.causal != "none" or case.window[1] is None
    if case.dtype == "fp32" or not one_sided or case.op in ("sparse_attention", "decode_attention"):
        return {}
    if case.quantised:
        # It has a number for the scale of all keys and one for all values, and none for a token's.
        if case.op != "paged_attention" or case.packed or case.seq_q != 1 or case.kv_scales != "head":
            return {}
        if case.kv_format not in FORMATS or case.head_dim > WIDEST:
            return {}
        return _decodes(case, t)
    if case.op == "mla_attention":
        return {} if case.packed else {"flashinfer": functools.partial(_latent, case, t)}
    if case.head_dim > WIDEST or (case.op == "attention" and case.lengths_q):
        return {}
    if case.op == "paged_attention":
        builds: dict[str, Build] = {"flashinfer/prefill": functools.partial(_pages, case, t)}
        if not case.packed and case.seq_q == 1:
            builds |= _decodes(case, t)
        return builds
    return {"flashinfer": functools.partial(_packed, case, t)}


def _decodes(case: Case, t: Tensors) -> dict[str, Build]:
    return {
        "flashinfer/decode": functools.partial(_decode, case, t, False),
        "flashinfer/decode, tensor cores": functools.partial(_decode, case, t, True),
    }


def _workspace(t: Tensors) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=t.q.device)


def _options(case: Case, t: Tensors) -> dict[str, Any]:
    left = case.window[0]
    return {"sm_scale": case.scale, "window_left": -1 if left is None else left, "q_data_type": t.q.dtype}


def _sums(lengths: tuple[int, ...], t: Tensors) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=t.q.device)


def _packed(case: Case, t: Tensors) -> Contender:
    """Full slots are sequences of one length: (B, H, S, D) is copied to (B·S, H, D) before the clock starts."""
    q, k, v = t.q, t.k, t.v
    full = case.op == "attention"
    if full:
        q, k, v = (transpose_heads(x).flatten(0, 1).contiguous() for x in (q, k, v))
    wrapper = module(PACKAGE).BatchPrefillWithRaggedKVCacheWrapper(_workspace(t), "NHD")
    wrapper.plan(
        _sums(case.queries, t), _sums(case.keys, t), case.heads_q, case.heads_k, case.head_dim,
        head_dim_vo=case.width_v, causal=case.causal != "none", **_options(case, t),
    )  # fmt: skip
    return Contender(
        lambda: wrapper.run(q, k, v),
        lambda out: transpose_heads(out.unflatten(0, (case.batch, case.seq_q))) if full else out,
    )


def _table(case: Case, t: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its page table: (beginnings of the sequences' page ids, page ids, tokens in each one's last page)."""
    assert t.page_table is not None
    counts = [-(-keys // case.page_size) for keys in case.keys]
    ids = torch.cat([row[:count] for row, count in zip(t.page_table, counts, strict=True)])
    last = [keys - (count - 1) * case.page_size for keys, count in zip(case.keys, counts, strict=True)]
    return _sums(tuple(counts), t), ids, torch.tensor(last, dtype=torch.int32, device=t.q.device)


def _pages(case: Case, t: Tensors) -> Contender:
    wrapper = module(PACKAGE).BatchPrefillWithPagedKVCacheWrapper(_workspace(t), "NHD")
    wrapper.plan(
        _sums(case.queries, t), *_table(case, t), case.heads_q, case.heads_k, case.head_dim, case.page_size,
        causal=case.causal != "none", **_options(case, t),
    )  # fmt: skip
    if case.packed:
        return Contender(lambda: wrapper.run(t.q, (t.k, t.v)), as_is)
    q = transpose_heads(t.q).flatten(0, 1).contiguous()
    return Contender(
        lambda: wrapper.run(q, (t.k, t.v)), lambda out: transpose_heads(out.unflatten(0, (case.batch, case.seq_q)))
    )


def _decode(case: Case, t: Tensors, tensor_cores: bool) -> Contender:
    wrapper = module(PACKAGE).BatchDecodeWithPagedKVCacheWrapper(_workspace(t), "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        *_table(case, t), case.heads_q, case.heads_k, case.head_dim, case.page_size, kv_data_type=t.k.dtype,
        **_options(case, t),
    )  # fmt: skip
    q = t.q[:, :, 0].contiguous()
    scales = {}
    if t.k_scale is not None and t.v_scale is not None:
        scales = {"k_scale": t.k_scale.item(), "v_scale": t.v_scale.item()}
    return Contender(lambda: wrapper.run(q, (t.k, t.v), **scales), lambda out: out[:, :, None])


def _latent(case: Case, t: Tensors) -> Contender:
    rank = case.width_v
    beginnings, ids, _ = _table(case, t)
    keys = torch.tensor(case.keys, dtype=torch.int32, device=t.q.device)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    wrapper = module(f"{PACKAGE}.mla").BatchMLAPagedAttentionWrapper(_workspace(t), backend="auto")
    wrapper.plan(
        _sums(case.queries, t), beginnings, ids, keys, case.heads_q, rank, case.head_dim - rank, case.page_size,
        case.causal != "none", scale, t.q.dtype, t.k.dtype,
    )  # fmt: skip
    q = t.q.flatten(0, 1)
    given = (q[..., :rank], q[..., rank:], t.k[..., :rank], t.k[..., rank:])
    return Contender(
        lambda: wrapper.run(*given), lambda out: transpose_heads(out.unflatten(0, (case.batch, case.seq_q)))
    )
