"""Peers that are Python packages, FlashAttention's and others'; presence of torch.ops libraries."""

import ctypes
import functools
import importlib
import importlib.metadata as metadata
import importlib.util
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, as_is, transpose_heads
from portattn.tools.bench.gate import FAILURES, reason
from portattn.tools.bench.tensors import Tensors

WORKSPACE = 256 << 20  # bytes; FlashInfer's documentation recommends 128 MiB and more for long splits
WIDEST = 256
FLOAT8 = ("e4m3", "e5m2")  # FlashInfer's formats of a cache's numbers, besides the queries' dtype


@functools.cache
def missing(package: str) -> str:
    """Return why a package cannot be used here, or "". Imports it."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        return f"no package {package.partition('.')[0]} is installed"
    try:
        importlib.import_module(package)
    except Exception as failure:  # noqa: BLE001  # whatever a package raises on import: it cannot be used, and this is why
        return f"import {package}: {type(failure).__name__}: {reason(failure)}"
    return ""


def module(package: str) -> ModuleType:
    return importlib.import_module(package)


def version(distribution: str) -> str:
    """Return a distribution's version, or "here" for a module that has none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "here"


def has_op(namespace: str, op: str) -> bool:
    """Return whether torch.ops has this op, which a loaded library registers."""
    return hasattr(getattr(torch.ops, namespace), op)


# (namespace of torch.ops, op) -> the package that may bring it, and the library's place there.
_INSTALLED = {
    ("_vllm_fa3_C", "fwd"): ("vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
    ("_flashmla_C", "dense_decode_fwd"): ("vllm", "_flashmla_C*.so"),
    ("flash_attn_3", "fwd"): ("flash_attn_3", "_C*.so"),
}
# A CUDA runtime of another release than torch's, for libraries that were linked to it: found by its name once loaded.
_RUNTIMES = "libcudart.so.*"


def load(folder: Path | None) -> dict[str, str]:
    """Load *.so of the folder and of packages: {file's name without its path: "loaded", or why not}."""
    seen: dict[str, str] = {}
    if folder:
        for file in sorted(folder.glob(_RUNTIMES)):
            try:
                ctypes.CDLL(str(file), mode=ctypes.RTLD_LOCAL)
            except OSError as failure:
                seen[file.name] = reason(failure)
        seen |= {file.name: _loaded(file) for file in sorted(folder.glob("*.so"))}
    for (namespace, op), (package, pattern) in _INSTALLED.items():
        if has_op(namespace, op):
            continue
        spec = importlib.util.find_spec(package)  # of a package without dots: nothing is imported
        for place in (spec and spec.submodule_search_locations) or ():
            seen |= {file.name: _loaded(file) for file in sorted(Path(place).glob(pattern))}
    return seen


def _loaded(file: Path) -> str:
    try:
        torch.ops.load_library(str(file))
    except FAILURES as failure:
        return reason(failure.__cause__ or failure)  # torch's own message leaves out why
    return "loaded"


def window_of(case: Case) -> tuple[int, int]:
    """Return a window's sides in FlashAttention's form: -1 for a side without a limit."""
    left, right = (-1 if side is None else side for side in case.window)
    return left, right


def used_keys(case: Case, t: Tensors) -> torch.Tensor:
    """Return the keys of each sequence, (B,) int32, also of a case without lengths."""
    if t.seqlens_k is not None:
        return t.seqlens_k
    return torch.full((case.batch,), case.seq_k, dtype=torch.int32, device=t.q.device)


def row_starts(case: Case, t: Tensors) -> torch.Tensor:
    return torch.arange(case.batch + 1, dtype=torch.int32, device=t.q.device) * case.seq_q


def with_sequences(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the map of a packed result of full sequences, (B·S, H, D), to (B, H, S, D)."""
    return lambda out: transpose_heads(out.unflatten(0, (case.batch, case.seq_q)))


def first_of(result: Any) -> torch.Tensor:
    out: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
    return out


def flashinfer(case: Case, t: Tensors) -> dict[str, Build]:
    one_sided = case.causal != "none" or case.window[1] is None
    if case.dtype == "fp32" or not one_sided or case.op in ("sparse_attention", "decode_attention"):
        return {}
    decodes: dict[str, Build] = {
        "flashinfer/decode": functools.partial(_flashinfer_decode, case, t, False),
        "flashinfer/decode, tensor cores": functools.partial(_flashinfer_decode, case, t, True),
    }
    if case.quantised:
        # It has a number for the scale of all keys and one for all values, and none for a token's.
        if case.op != "paged_attention" or case.packed or case.seq_q != 1 or case.kv_scales != "head":
            return {}
        return decodes if case.kv_format in FLOAT8 and case.head_dim <= WIDEST else {}
    if case.op == "mla_attention":
        return {} if case.packed else {"flashinfer": functools.partial(_flashinfer_latent, case, t)}
    if case.head_dim > WIDEST or (case.op == "attention" and case.lengths_q):
        return {}
    if case.op == "paged_attention":
        prefill: dict[str, Build] = {"flashinfer/prefill": functools.partial(_flashinfer_pages, case, t)}
        return prefill | (decodes if not case.packed and case.seq_q == 1 else {})
    return {"flashinfer": functools.partial(_flashinfer_packed, case, t)}


def _wrapper(name: str, t: Tensors, **options: Any) -> Any:
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=t.q.device)
    return getattr(module("flashinfer"), name)(workspace, "NHD", **options)


def _flashinfer_options(case: Case, t: Tensors) -> dict[str, Any]:
    return {"sm_scale": case.scale, "window_left": window_of(case)[0], "q_data_type": t.q.dtype}


def _sums(lengths: tuple[int, ...], t: Tensors) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=t.q.device)


def _flashinfer_packed(case: Case, t: Tensors) -> Contender:
    """Full slots are sequences of one length: (B, H, S, D) is copied to (B·S, H, D) before the clock starts."""
    q, k, v = t.q, t.k, t.v
    full = case.op == "attention"
    if full:
        q, k, v = (transpose_heads(x).flatten(0, 1).contiguous() for x in (q, k, v))
    wrapper = _wrapper("BatchPrefillWithRaggedKVCacheWrapper", t)
    wrapper.plan(
        _sums(case.queries, t), _sums(case.keys, t), case.heads_q, case.heads_k, case.head_dim,
        head_dim_vo=case.width_v, causal=case.causal != "none", **_flashinfer_options(case, t),
    )  # fmt: skip
    return Contender(lambda: wrapper.run(q, k, v), with_sequences(case) if full else as_is)


def _page_ids(case: Case, t: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return FlashInfer's page table: (starts of the sequences' page ids, page ids, tokens in each last page)."""
    assert t.page_table is not None
    counts = [-(-keys // case.page_size) for keys in case.keys]
    ids = torch.cat([row[:count] for row, count in zip(t.page_table, counts, strict=True)])
    last = [keys - (count - 1) * case.page_size for keys, count in zip(case.keys, counts, strict=True)]
    return _sums(tuple(counts), t), ids, torch.tensor(last, dtype=torch.int32, device=t.q.device)


def _flashinfer_pages(case: Case, t: Tensors) -> Contender:
    wrapper = _wrapper("BatchPrefillWithPagedKVCacheWrapper", t)
    wrapper.plan(
        _sums(case.queries, t), *_page_ids(case, t), case.heads_q, case.heads_k, case.head_dim, case.page_size,
        causal=case.causal != "none", **_flashinfer_options(case, t),
    )  # fmt: skip
    if case.packed:
        return Contender(lambda: wrapper.run(t.q, (t.k, t.v)))
    q = transpose_heads(t.q).flatten(0, 1).contiguous()
    return Contender(lambda: wrapper.run(q, (t.k, t.v)), with_sequences(case))


def _flashinfer_decode(case: Case, t: Tensors, tensor_cores: bool) -> Contender:
    wrapper = _wrapper("BatchDecodeWithPagedKVCacheWrapper", t, use_tensor_cores=tensor_cores)
    wrapper.plan(
        *_page_ids(case, t), case.heads_q, case.heads_k, case.head_dim, case.page_size, kv_data_type=t.k.dtype,
        **_flashinfer_options(case, t),
    )  # fmt: skip
    q = t.q[:, :, 0].contiguous()
    scales = {}
    if t.k_scale is not None and t.v_scale is not None:
        scales = {"k_scale": t.k_scale.item(), "v_scale": t.v_scale.item()}
    return Contender(lambda: wrapper.run(q, (t.k, t.v), **scales), lambda out: out[:, :, None])


def _flashinfer_latent(case: Case, t: Tensors) -> Contender:
    rank = case.width_v
    starts, ids, _ = _page_ids(case, t)
    keys = torch.tensor(case.keys, dtype=torch.int32, device=t.q.device)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=t.q.device)
    wrapper = module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    wrapper.plan(
        _sums(case.queries, t), starts, ids, keys, case.heads_q, rank, case.head_dim - rank, case.page_size,
        case.causal != "none", scale, t.q.dtype, t.k.dtype,
    )  # fmt: skip
    q = t.q.flatten(0, 1)
    given = (q[..., :rank], q[..., rank:], t.k[..., :rank], t.k[..., rank:])
    return Contender(lambda: wrapper.run(*given), with_sequences(case))


def absent(places: Sequence[str]) -> str:
    """Return "" if one of the places has the module, else why the first has not."""
    return "" if any(not missing(place) for place in places) else missing(places[0])


def flash_attention(
    name: str, places: Sequence[str], case: Case, t: Tensors, *, pages: str, page: int = 1, dropout: bool = False
) -> dict[str, Build]:
    """Return the contender of one of the packages of github.com/Dao-AILab/flash-attention.

    places: modules that may hold the functions; the first installed one counts. pages: the package's name for a page
    table; page: tokens of which a page has a multiple; dropout: whether the functions have dropout_p"""
    latent_or_chosen = case.op in ("mla_attention", "sparse_attention")
    if latent_or_chosen or case.dtype == "fp32" or case.head_dim > WIDEST or case.page_size % page:
        return {}
    if case.dropout and not dropout:
        return {}
    if case.op == "attention" and case.lengths_q:  # padded queries: neither has lengths of queries for full slots
        return {}
    return {name: functools.partial(_flash_attention, case, t, places, pages)}


def _flash_attention(case: Case, t: Tensors, places: Sequence[str], pages: str) -> Contender:
    functions: Any = module(next(place for place in places if not missing(place)))
    options: dict[str, Any] = {
        "softmax_scale": case.scale, "causal": case.causal != "none", "window_size": window_of(case),
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
            options["cache_seqlens"] = used_keys(case, t)
    else:
        used = used_keys(case, t)
        options[pages] = t.page_table
        if not case.packed:
            given, shaped = (transpose_heads(t.q), t.k, t.v), transpose_heads
            options["cache_seqlens"] = used
        elif pages == "page_table":  # 3 takes packed queries over pages as they are
            options |= {"cache_seqlens": used, "cu_seqlens_q": t.cu_seqlens_q, "max_seqlen_q": longest[0]}
        else:  # 2 takes them by its function of packed sequences, which reads as many keys as cu_seqlens_k says
            cu = torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(torch.int32)
            function, given = functions.flash_attn_varlen_func, (*given, t.cu_seqlens_q, cu, *longest)
    return Contender(lambda: first_of(function(*given, **options)), shaped)


CUTE, FRONTEND = "flash_attn.cute.interface", "cudnn.sdpa.fwd.api_dsl"
D_TILE = 512  # columns of its tiles, on some chips at any head dim: narrower rows pay for them all


def fa4(case: Case, t: Tensors) -> dict[str, Build]:
    """Return FlashAttention-4's contender of full slots and packed sequences; its functions read no slots of caches."""
    padded = case.op == "attention" and (case.lengths_q or case.lengths_k)
    if case.op not in ("attention", "varlen_attention") or case.dtype == "fp32" or padded or case.dropout:
        return {}
    return {"fa4": functools.partial(_fa4, case, t)} if case.head_dim <= WIDEST else {}


def _fa4(case: Case, t: Tensors) -> Contender:
    options: dict[str, Any] = {
        "softmax_scale": case.scale, "causal": case.causal != "none", "window_size": case.window,
        "deterministic": case.deterministic,
    }  # fmt: skip
    if case.op == "attention":
        function, given = module(CUTE).flash_attn_func, tuple(map(transpose_heads, (t.q, t.k, t.v)))
        return Contender(lambda: first_of(function(*given, **options)), transpose_heads)
    varlen = module(CUTE).flash_attn_varlen_func
    options |= {"cu_seqlens_q": t.cu_seqlens_q, "cu_seqlens_k": t.cu_seqlens_k}
    options |= {"max_seqlen_q": max(case.queries), "max_seqlen_k": max(case.keys)}
    return Contender(lambda: first_of(varlen(t.q, t.k, t.v, **options)))


def cudnn_frontend(case: Case, t: Tensors) -> dict[str, Build]:
    """Return the forward that cudnn-frontend compiles by CuTe, one function a chip; cuDNN itself is SDPA's."""
    plain = case.op == "attention" and not (case.lengths_q or case.lengths_k or case.windowed or case.dropout)
    if not plain or case.dtype == "fp32" or not WIDEST < case.head_dim <= D_TILE:
        return {}
    return {"cudnn-frontend": functools.partial(_cudnn_frontend, case, t)}


def _cudnn_frontend(case: Case, t: Tensors) -> Contender:
    major, minor = torch.cuda.get_device_capability(t.q.device)
    function = getattr(module(FRONTEND), f"sdpa_fwd_wrapper_dsl_sm{major}{minor}")
    options = {
        "is_causal": case.causal != "none", "causal_bottom_right": case.causal == "bottom_right",
        "scale_softmax": case.scale,
    }  # fmt: skip
    return Contender(lambda: function(t.q, t.k, t.v, **options)["o_tensor"])
