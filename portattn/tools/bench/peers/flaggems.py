"""FlagGems (flag_gems 5.0): its scaled_dot_product_attention, its packed and paged function, and its latent one."""

from __future__ import annotations

import functools
from typing import Any

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, as_is, transpose_heads
from portattn.tools.bench.peers.availability import missing, module
from portattn.tools.bench.tensors import Tensors

PACKAGE = "flag_gems"
SCALE = "its flash_mla has the scale 1/sqrt(head_dim) and no other"


def absent() -> str:
    return missing(PACKAGE)


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    if case.dtype == "fp32" or case.op == "sparse_attention":
        return {}
    if case.op == "mla_attention":
        return {} if case.packed or case.seq_q > 1 else {"flag_gems": functools.partial(_latent, case, t)}
    if case.op in ("varlen_attention", "paged_attention"):
        return {"flag_gems": functools.partial(_packed, case, t)}
    corner = case.causal != "none" and case.seq_q != case.seq_k  # its causal mask is top-left
    if case.lengths_k or case.windowed or corner:
        return {}
    return {"flag_gems": functools.partial(_dense, case, t)}


def _dense(case: Case, t: Tensors) -> Contender:
    function: Any = module(f"{PACKAGE}.ops").scaled_dot_product_attention
    options = {"is_causal": case.causal != "none", "scale": case.scale, "enable_gqa": case.group > 1}
    return Contender(lambda: function(t.q, t.k, t.v, **options))


def _packed(case: Case, t: Tensors) -> Contender:
    """Keyword by keyword: its order is vLLM's, not FlashAttention's."""
    function: Any = module(f"{PACKAGE}.ops").flash_attn_varlen_func
    left, right = (-1 if side is None else side for side in case.window)
    options: dict[str, Any] = {
        "max_seqlen_q": max(case.queries), "max_seqlen_k": max(case.keys), "softmax_scale": case.scale,
        "causal": case.causal != "none", "window_size": (left, right),
    }  # fmt: skip
    if case.page_size:
        options |= {"seqused_k": t.seqlens_k, "block_table": t.page_table}
    else:
        options["cu_seqlens_k"] = t.cu_seqlens_k
    q, cu, shaped = t.q, t.cu_seqlens_q, as_is
    if not case.packed:
        q = transpose_heads(t.q).flatten(0, 1).contiguous()
        cu = torch.arange(case.batch + 1, dtype=torch.int32, device=q.device) * case.seq_q

        def shaped(out: torch.Tensor) -> torch.Tensor:
            return transpose_heads(out.unflatten(0, (case.batch, case.seq_q)))

    return Contender(lambda: _out(function(q, t.k, t.v, cu_seqlens_q=cu, **options)), shaped)


def _out(result: Any) -> torch.Tensor:
    out: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
    return out


def _latent(case: Case, t: Tensors) -> Contender:
    if case.scale is not None and abs(case.scale - case.head_dim**-0.5) > 1e-9:
        raise ValueError(SCALE)
    function: Any = module(f"{PACKAGE}.fused").flash_mla
    rows = t.k[:, :, None]
    given = (
        t.q, t.page_table, rows, max(case.keys), case.page_size, case.batch, case.seq_q, t.seqlens_k, case.heads_q, 1,
        case.head_dim, case.width_v, True,
    )  # fmt: skip
    return Contender(
        lambda: function(*given), lambda out: transpose_heads(out.reshape(case.batch, case.seq_q, -1, case.width_v))
    )
