"""FlashAttention and FlashMLA: registered op libraries, and the packages of github.com/Dao-AILab/flash-attention.

`fa3` is upstream's torch.ops.flash_attn_3, or vllm's torch.ops._vllm_fa3_C (lengths and pages only). All align causal
masks bottom-right and take (B, S, H, D) or packed (T, H, D), any strides but along D, and head_dim up to 256."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, as_is, transpose_heads
from portattn.tools.bench.peers import packages
from portattn.tools.bench.tensors import Tensors

WIDEST = 256
# Arguments of vllm's op, which has no defaults: the values that mean "not given".
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
LATENT = (576, 512, 64)  # FlashMLA's row width, width of the values and page


def has_vllm() -> bool:
    return packages.has_op("_vllm_fa3_C", "fwd")


def neutral() -> dict[str, Any]:
    return {**dict.fromkeys(_ABSENT), **_NEUTRAL}


def fa3_absent() -> str:
    if has_vllm() or packages.has_op("flash_attn_3", "fwd"):
        return ""
    return "no library has registered torch.ops._vllm_fa3_C or torch.ops.flash_attn_3"


def fa3(case: Case, t: Tensors) -> dict[str, Build]:
    latent = case.op == "mla_attention"
    if case.dtype == "fp32" or case.op == "sparse_attention" or (case.head_dim > WIDEST and not latent):
        return {}
    found: dict[str, Build] = {}
    if has_vllm():
        found["fa3/vllm"] = functools.partial(_fa3, case, t, "_vllm_fa3_C", scheduled=False)
        if case.reads_cache:
            found["fa3/vllm, schedule given"] = functools.partial(_fa3, case, t, "_vllm_fa3_C", scheduled=True)
    if packages.has_op("flash_attn_3", "fwd"):
        found["fa3/upstream"] = functools.partial(_fa3, case, t, "flash_attn_3", scheduled=False)
    return found


def _fa3(case: Case, t: Tensors, library: str, scheduled: bool) -> Contender:
    given, shaped = _fa3_call(case, t)
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


def _fa3_call(case: Case, t: Tensors) -> tuple[dict[str, Any], Any]:
    """Return the arguments of `fwd` without those left at their defaults, and the map of its result to (B, H, S, D)."""
    left, right = packages.window_of(case)
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
    given["seqused_k"] = packages.used_keys(case, t)
    if not case.page_size:
        given |= {"q": transpose_heads(t.q), "k": transpose_heads(t.k), "v": transpose_heads(t.v)}
        return given | ({} if t.seqlens_q is None else {"seqused_q": t.seqlens_q}), transpose_heads
    given |= {"page_table": t.page_table, "max_seqlen_k": max(case.keys)}
    rows = {"cu_seqlens_q": packages.row_starts(case, t), "max_seqlen_q": case.seq_q}
    if case.op == "mla_attention":
        # Scores are q·k of the part with positions and q_v·v of the rest.
        if case.packed:
            raise ValueError("packed latent queries are not written for it")
        rank, q, latent = case.width_v, t.q.flatten(0, 1), t.k[:, :, None]
        given |= {"q": q[..., rank:], "q_v": q[..., :rank], "k": latent[..., rank:], "v": latent[..., :rank]}
        return given | rows, packages.with_sequences(case)
    given |= {"k": t.k, "v": t.v}
    if case.packed:
        return given | {"q": t.q, "cu_seqlens_q": t.cu_seqlens_q, "max_seqlen_q": max(case.queries)}, as_is
    if case.seq_q == 1:
        return given | {"q": t.q[:, :, 0], **rows}, lambda out: out[:, :, None]
    return given | {"q": transpose_heads(t.q)}, transpose_heads


def schedule(given: dict[str, Any], batch: int, page_size: int | None) -> torch.Tensor:
    """Return the schedule that `fwd` computes before each call without one, for these very arguments."""
    q, k, v = given["q"], given["k"], given["v"]
    longest_q, longest_k = given["max_seqlen_q"], given["max_seqlen_k"]
    made: torch.Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        batch, q.shape[1] if longest_q is None else longest_q, k.shape[1] if longest_k is None else longest_k,
        q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.dtype, given["seqused_k"], given["cu_seqlens_q"],
        None,  # cu_seqlens_k
        None,  # cu_seqlens_k_new
        given["seqused_q"],
        None,  # leftpad_k
        page_size,
        0,  # max_seqlen_k_new
        given["is_causal"], given["window_size_left"], given["window_size_right"],
        False,  # softcap
        given["num_splits"],
        None,  # pack_gqa
        0,  # sm_margin
    )  # fmt: skip
    return made


def flashmla_absent() -> str:
    return (
        "" if packages.has_op("_flashmla_C", "dense_decode_fwd") else "no library has registered torch.ops._flashmla_C"
    )


def flashmla(case: Case, t: Tensors) -> dict[str, Build]:
    """Return FlashMLA's dense decoding (torch.ops._flashmla_C): 16-bit latent rows of 512 + 64, pages of 64."""
    if case.op != "mla_attention" or case.packed or case.dtype == "fp32":
        return {}
    if (case.head_dim, case.width_v, case.page_size) != LATENT:
        return {}
    return {"flashmla": functools.partial(_flashmla, case, t)}


def _flashmla(case: Case, t: Tensors) -> Contender:
    op = torch.ops._flashmla_C.dense_decode_fwd
    fixed = (t.q, t.k[:, :, None], case.width_v, t.seqlens_k, t.page_table, case.scale, case.causal != "none")
    # The first call makes its schedule; later ones take it, as a model's layers do.
    _, _, made, splits = op(*fixed, None, None, None)
    return Contender(lambda: op(*fixed, made, splits, None)[0], transpose_heads)


def package_absent(places: Sequence[str]) -> str:
    """Return "" if one of the places has the module, else why the first has not."""
    return "" if any(not packages.missing(place) for place in places) else packages.missing(places[0])


def package(
    name: str, places: Sequence[str], case: Case, t: Tensors, *, pages: str, page: int = 1, dropout: bool = False
) -> dict[str, Build]:
    """Return the contender of one of FlashAttention's packages.

    places: modules that may hold the functions; the first installed one counts. pages: the package's name for a page
    table; page: tokens of which a page has a multiple; dropout: whether the functions have dropout_p"""
    latent_or_chosen = case.op in ("mla_attention", "sparse_attention")
    if latent_or_chosen or case.dtype == "fp32" or case.head_dim > WIDEST or case.page_size % page:
        return {}
    if case.dropout and not dropout:
        return {}
    if case.op == "attention" and case.lengths_q:  # padded queries: neither has lengths of queries for full slots
        return {}
    return {name: functools.partial(_package, case, t, places, pages)}


def _package(case: Case, t: Tensors, places: Sequence[str], pages: str) -> Contender:
    functions: Any = packages.module(next(place for place in places if not packages.missing(place)))
    options: dict[str, Any] = {
        "softmax_scale": case.scale, "causal": case.causal != "none", "window_size": packages.window_of(case),
    }  # fmt: skip
    if case.dropout:
        options["dropout_p"] = case.dropout
    if case.deterministic:
        options["deterministic"] = True
    function: Any = functions.flash_attn_with_kvcache
    given: tuple[Any, ...] = (t.q, t.k, t.v)
    shaped: Any = as_is
    longest = max(case.queries), max(case.keys)
    if case.op == "varlen_attention":
        function, given = functions.flash_attn_varlen_func, (*given, t.cu_seqlens_q, t.cu_seqlens_k, *longest)
    elif not case.page_size:
        given, shaped = tuple(map(transpose_heads, given)), transpose_heads
        if case.op == "attention":
            function = functions.flash_attn_func
        else:
            options["cache_seqlens"] = packages.used_keys(case, t)
    else:
        used = packages.used_keys(case, t)
        options[pages] = t.page_table
        if not case.packed:
            given, shaped = (transpose_heads(t.q), t.k, t.v), transpose_heads
            options["cache_seqlens"] = used
        elif pages == "page_table":  # 3 takes packed queries over pages as they are
            options |= {"cache_seqlens": used, "cu_seqlens_q": t.cu_seqlens_q, "max_seqlen_q": longest[0]}
        else:  # 2 takes them by its function of packed sequences, which reads as many keys as cu_seqlens_k says
            cu = torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(torch.int32)
            function, given = functions.flash_attn_varlen_func, (*given, t.cu_seqlens_q, cu, *longest)
    return Contender(lambda: packages.first_of(function(*given, **options)), shaped)
