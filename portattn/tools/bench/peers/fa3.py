"""FlashAttention-3: upstream's library (torch.ops.flash_attn_3), and vllm's build of it for lengths and pages only
(torch.ops._vllm_fa3_C), with and without the schedule that vllm computes once a step."""

from __future__ import annotations

import functools
from typing import Any

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, as_is, transpose_heads
from portattn.tools.bench.peers.availability import has_op
from portattn.tools.bench.tensors import Tensors

WIDEST = 256
# vllm's op has no defaults. What says "as if the argument were not there" follows.
_NEUTRAL: dict[str, Any] = {
    "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True, "num_splits": 0,
    "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip
_ABSENT = (
    "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k",
    "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata", "pack_gqa", "s_aux",
    "cp_tot_seqused_k",
)  # fmt: skip


def _vllm() -> bool:
    return has_op("_vllm_fa3_C", "fwd")


def _upstream() -> bool:
    return has_op("flash_attn_3", "fwd")


def neutral() -> dict[str, Any]:
    """Every argument of vllm's op as if it were not there."""
    return {**dict.fromkeys(_ABSENT), **_NEUTRAL}


def absent() -> str:
    if _vllm() or _upstream():
        return ""
    return "no library has registered torch.ops._vllm_fa3_C or torch.ops.flash_attn_3"


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    latent = case.op == "mla_attention"
    if case.dtype == "fp32" or case.op == "sparse_attention" or (case.head_dim > WIDEST and not latent):
        return {}
    found: dict[str, Build] = {}
    if _vllm():
        found["fa3/vllm"] = functools.partial(_build, case, t, "_vllm_fa3_C", scheduled=False)
        if case.reads_cache:
            found["fa3/vllm, schedule given"] = functools.partial(_build, case, t, "_vllm_fa3_C", scheduled=True)
    if _upstream():
        found["fa3/upstream"] = functools.partial(_build, case, t, "flash_attn_3", scheduled=False)
    return found


def _build(case: Case, t: Tensors, library: str, scheduled: bool) -> Contender:
    given, shaped = call(case, t)
    op = getattr(torch.ops, library).fwd
    if library == "flash_attn_3":
        if case.op == "attention":
            given["num_splits"] = 1
            if not case.lengths_k:
                del given["seqused_k"]
    else:
        given = neutral() | given
        if scheduled:
            given["scheduler_metadata"] = schedule(given, case.batch, case.page_size or None)
    return Contender(lambda: op(**given)[0], shaped)


def call(case: Case, t: Tensors) -> tuple[dict[str, Any], Any]:
    """The arguments of `fwd` but for those left at their defaults, and how its result becomes (B, H, S, D).

    It takes (B, S, H, D), or packed (T, H, D), with any strides but along D.
    """
    left, right = (-1 if side is None else side for side in case.window)
    given: dict[str, Any] = {
        "softmax_scale": case.head_dim**-0.5 if case.scale is None else case.scale,
        # For one row it says nothing, and picks better tiles over pages of width 128, as vllm does.
        "is_causal": case.causal != "none" or case.seq_q == 1,
        "window_size_left": left,
        "window_size_right": right,
    }
    if case.op == "varlen_attention":
        given |= {"q": t.q, "k": t.k, "v": t.v, "cu_seqlens_q": t.cu_seqlens_q, "cu_seqlens_k": t.cu_seqlens_k}
        given |= {"max_seqlen_q": max(case.queries), "max_seqlen_k": max(case.keys)}
        return given, as_is
    used = t.seqlens_k
    if used is None:
        used = torch.full((case.batch,), case.seq_k, dtype=torch.int32, device=t.q.device)
    given["seqused_k"] = used
    if not case.page_size:
        given |= {"q": transpose_heads(t.q), "k": transpose_heads(t.k), "v": transpose_heads(t.v)}
        return given | ({} if t.seqlens_q is None else {"seqused_q": t.seqlens_q}), transpose_heads
    given |= {"page_table": t.page_table, "max_seqlen_k": max(case.keys)}
    if case.op == "mla_attention":
        return given | _latent(case, t), lambda out: transpose_heads(out.unflatten(0, (case.batch, case.seq_q)))
    given |= {"k": t.k, "v": t.v}
    if case.packed:
        return given | {"q": t.q, "cu_seqlens_q": t.cu_seqlens_q, "max_seqlen_q": max(case.queries)}, as_is
    if case.seq_q == 1:
        return given | {"q": t.q[:, :, 0], **_beginnings(case, t)}, lambda out: out[:, :, None]
    return given | {"q": transpose_heads(t.q)}, transpose_heads


def _beginnings(case: Case, t: Tensors) -> dict[str, Any]:
    cu = torch.arange(case.batch + 1, dtype=torch.int32, device=t.q.device) * case.seq_q
    return {"cu_seqlens_q": cu, "max_seqlen_q": case.seq_q}


def _latent(case: Case, t: Tensors) -> dict[str, Any]:
    """Its form of latent attention: scores are q·k of the part with positions and q_v·v of the rest."""
    if case.packed:
        raise ValueError("packed latent queries are not written for it")
    rank = case.width_v
    q, rows = t.q.flatten(0, 1), t.k[:, :, None]
    return {
        "q": q[..., rank:],
        "q_v": q[..., :rank],
        "k": rows[..., rank:],
        "v": rows[..., :rank],
        **_beginnings(case, t),
    }


def schedule(given: dict[str, Any], batch: int, page_size: int | None) -> torch.Tensor:
    """What `fwd` computes before each call unless it is handed in, for these very arguments."""
    q, k, v = given["q"], given["k"], given["v"]
    longest_q, longest_k = given["max_seqlen_q"], given["max_seqlen_k"]
    made: torch.Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        batch,
        q.shape[1] if longest_q is None else longest_q,
        k.shape[1] if longest_k is None else longest_k,
        q.shape[-2],
        k.shape[-2],
        q.shape[-1],
        v.shape[-1],
        q.dtype,
        given["seqused_k"],
        given["cu_seqlens_q"],
        None,  # cu_seqlens_k
        None,  # cu_seqlens_k_new
        given["seqused_q"],
        None,  # leftpad_k
        page_size,
        0,  # max_seqlen_k_new
        given["is_causal"],
        given["window_size_left"],
        given["window_size_right"],
        False,  # softcap
        given["num_splits"],
        None,  # pack_gqa
        0,  # sm_margin
    )
    return made
