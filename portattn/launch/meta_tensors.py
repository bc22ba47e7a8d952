"""meta_call: a call that has shapes and strides but no data, for planning a compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from portattn.schema.call import Call
from portattn.schema.features import FEATURES
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import DS_MLA, NV_BLOCK, NVFP4, PAIRED, WORD_ALIGNMENT, ds_row_bytes
from portattn.schema.tensors import KV_STORED, TORCH_DTYPE

PAGES = 4096  # pages of a cache whose size a problem does not say; nothing compiled depends on it
CAP = 50.0
ANGLES = 4096  # rows of a rotary embedding's tables, likewise
DROPPED = 0.1


def meta_call(problem: Problem) -> Call:
    """A call of this problem on the meta device. An unaligned problem gets rows one element longer than wide, or by a
    word where a quantised cache is aligned by words."""
    p = problem
    dtype, pad = TORCH_DTYPE[p.dtype], 0 if p.aligned else 1
    pad_k = WORD_ALIGNMENT if pad and p.word_aligned and p.kv_format != "as_q" else pad
    stored, queries, values = (dtype if f == "as_q" else KV_STORED for f in (p.kv_format, p.q_format, p.v_format))
    batch_q, rows_q = p.query_rows
    queries_first = p.layout == "bshd" or p.packed or (p.writes and p.page_size > 0)

    def view(
        batch: int, heads: int, seq: int, dim: int, heads_last: bool, dtype: torch.dtype = dtype, pad: int = pad
    ) -> torch.Tensor:
        shape = (batch, seq, heads) if heads_last else (batch, heads, seq)
        full = torch.empty(*shape, dim + pad, dtype=dtype, device="meta")[..., :dim]
        return full.transpose(1, 2) if heads_last else full

    def keys(dim: int, dtype: torch.dtype = stored) -> torch.Tensor:
        if p.page_size:
            return view(PAGES, p.heads_k, p.page_size, dim, p.page_layout == "phd", dtype, pad_k)
        if p.total_k is not None:
            return view(1, p.heads_k, p.total_k, dim, True, dtype, pad_k)
        return view(p.batch, p.heads_k, p.seq_k, dim, p.layout == "bshd", dtype, pad_k)

    def scales(of: Callable[[int], torch.Tensor], scaled: bool = True) -> torch.Tensor | None:
        if p.kv_scales == "none" or not scaled:
            return None
        if p.kv_scales == "head":
            return torch.empty(p.batch, p.heads_k, device="meta")
        return of(1)[..., 0].to(torch.float32)

    def rows(dim: int) -> torch.Tensor:
        return view(batch_q, p.heads_q, rows_q, dim, queries_first, queries)

    def integers(given: bool, *shape: int) -> torch.Tensor | None:
        return torch.empty(shape, dtype=torch.int32, device="meta") if given else None

    sizes = {"b": p.batch, "h": p.heads_q, "q": p.seq_q, "k": p.seq_k, "t": p.tokens, "s": batch_q, "r": rows_q}
    sizes |= {"m": -(-p.seq_q // p.block_q), "n": -(-p.seq_k // p.block_k)}
    features: dict[str, Any] = {
        name: torch.empty(
            [sizes[axis] for axis in feature.axes],
            dtype=getattr(torch, feature.dtype) if feature.dtype else dtype,
            device="meta",
        )
        for name, feature in FEATURES.items()
        if feature.axes and getattr(p, name)
    }
    latent = p.op == "mla_attention"
    pair = 2 if p.kv_format in PAIRED else 1  # numbers that share a byte
    k = keys(ds_row_bytes(p.head_dim, p.head_dim_v) if p.kv_format == DS_MLA else p.head_dim // pair)
    if p.kv_format == NVFP4:
        features["k_block_scale"], features["v_block_scale"] = (
            keys(dim // NV_BLOCK, KV_STORED) for dim in (p.head_dim, p.head_dim_v)
        )
    if p.dropout:
        features["dropout_seed"] = torch.empty(1, dtype=torch.int64, device="meta")
        features["dropout_p"] = DROPPED
    if p.writes:
        features |= _new_rows(p, view)
    if p.backward:
        features |= _gradients(p, view, keys)
    return Call(
        problem=p,
        q=rows(p.head_dim_v if latent else p.head_dim),
        q_rope=view(batch_q, p.heads_q, rows_q, p.head_dim - p.head_dim_v, queries_first) if latent else None,
        k=k,
        v=k[..., : p.head_dim_v] if latent else keys(p.head_dim_v // pair, values),
        q_scale=scales(rows, p.q_format != "as_q"),
        k_scale=scales(keys),
        v_scale=scales(keys, p.v_format != "as_q"),
        scale=-(p.head_dim**-0.5) if p.negative_scale else p.head_dim**-0.5,
        softcap=CAP if p.softcap else 0.0,
        cu_seqlens_q=integers(p.packed, p.batch + 1),
        cu_seqlens_k=integers(p.total_k is not None, p.batch + 1),
        page_table=integers(p.page_size > 0 and not p.writes, p.batch, p.seq_k // p.page_size if p.page_size else 0),
        indices=integers(p.op == "sparse_attention", p.batch, p.heads_q, p.tokens),
        counts=integers(p.op == "sparse_attention", p.batch, p.heads_q),
        magicpig_bits=integers(p.magicpig, p.heads_q),
        magicpig_tables=integers(p.magicpig, p.heads_q),
        **features,
    )


def _new_rows(p: Problem, view: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """What is written, beside the new keys: slots and positions as int64, as engines have them."""
    found = {"new_v": view(p.batch, p.heads_k, p.seq_q, p.head_dim_v, p.page_size > 0 or p.layout == "bshd")}
    tables = [torch.empty(ANGLES, p.rotary_dim // 2, device="meta") for _ in range(2)]
    whole = torch.empty(p.seq_q, dtype=torch.int64, device="meta")
    found |= {"cos": tables[0], "sin": tables[1]} if p.rotary_dim else {}
    found |= {"slots": whole} if p.page_size else {}
    return found | ({"positions": whole} if p.page_size and p.rotary_dim else {})


def _gradients(p: Problem, view: Callable[..., torch.Tensor], keys: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """What the gradients' operation has beside the forward's tensors."""
    batch, rows = p.query_rows
    last = p.layout == "bshd" or p.packed

    def numbers(given: bool = True) -> torch.Tensor | None:
        return torch.empty(batch, p.heads_q, rows, device="meta") if given else None

    def queries(dim: int) -> torch.Tensor:
        return view(batch, p.heads_q, rows, dim, last)

    bias = torch.empty(p.batch, p.heads_q, p.seq_q, p.seq_k, device="meta") if p.grad_bias else None
    return {
        "forward_out": queries(p.head_dim_v), "grad_out": queries(p.head_dim_v), "grad_q": queries(p.head_dim),
        "grad_k": keys(p.head_dim), "grad_v": keys(p.head_dim_v), "forward_lse": numbers(),
        "grad_lse": numbers(p.grad_lse), "grad_slopes": numbers(p.grad_slopes), "grad_bias": bias,
    }  # fmt: skip
