"""Peers' Python packages as they document themselves, on the CPU: signatures, layouts, conventions."""

import importlib.machinery
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peer_libraries import _mixed, _scores

from portattn.tools.bench.peers import packages


@contextmanager
def installed(**modules: types.SimpleNamespace) -> Iterator[None]:
    """Inside the block these modules can be imported; a name's dots are written as two underscores."""
    names = {name.replace("__", "."): parts for name, parts in modules.items()}
    kept = {name: sys.modules.get(name) for name in names}
    for name, parts in names.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(vars(parts))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    packages.missing.cache_clear()
    try:
        yield
    finally:
        for name, before in kept.items():
            sys.modules.pop(name)
            if before is not None:
                sys.modules[name] = before
        packages.missing.cache_clear()


def attend(q: Any, k: Any, v: Any, scale: float | None, causal: bool, window: tuple[int, int] = (-1, -1)) -> Any:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _mixed(_scores(q, k) * scale, v, window[0], 0 if causal else window[1]).to(q.dtype)


def spans(starts: Any) -> list[slice]:
    ends = [int(start) for start in starts]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def attend_each(q: Any, rows: Any, keys: Any, values: Any, *how: Any) -> Any:
    out = None
    for place, k, v in zip(rows, keys, values, strict=True):
        part = attend(q[place], k, v, *how)
        out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype) if out is None else out
        out[place] = part
    return out


def packed(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *how: Any) -> Any:
    return attend_each(q, spans(cu_q), *([x[span] for span in spans(cu_k)] for x in (k, v)), *how)


def dense(q: Any, k: Any, v: Any, *how: Any) -> Any:
    return attend_each(q, range(len(q)), k, v, *how)


def pages_of(cache: Any, tables: Any, lengths: Any) -> list[Any]:
    """The rows of each sequence in pages (P, page, H, D), or in slots where there is no table."""
    whole = cache if tables is None else [cache[ids.long()].flatten(0, 1) for ids in tables]
    return [rows[: int(length)] for rows, length in zip(whole, lengths, strict=True)]


def flash_attn(pages: str, page: int, with_lse: bool = False, asked: list[Any] | None = None) -> types.SimpleNamespace:
    """flash_attn 2.8, or flash_attn_interface of FlashAttention-3. pages: its name of a page table. asked: gets what
    `deterministic` was in each call that has it."""

    def answer(out: Any) -> Any:
        return (out, out.float()) if with_lse else out

    def told(deterministic: bool) -> None:
        if asked is not None:
            asked.append(deterministic)

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False):
        told(deterministic)
        return answer(dense(q, k, v, softmax_scale, causal, window_size))

    def flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, causal=False, window_size=(-1, -1), block_table=None,
        deterministic=False,
    ):  # fmt: skip
        told(deterministic)
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        how = softmax_scale, causal, window_size
        if block_table is None:
            return answer(packed(q, k, v, cu_q, cu_k, *how))
        keys, values = (pages_of(x, block_table, cu_k.diff()) for x in (k, v))
        return answer(attend_each(q, spans(cu_q), keys, values, *how))

    def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, softmax_scale=None, causal=False, **named):
        table = named.pop(pages, None)
        window = named.pop("window_size", (-1, -1))
        cu, longest = named.pop("cu_seqlens_q", None), named.pop("max_seqlen_q", None)
        assert not named
        assert table is None or k_cache.shape[1] % page == 0
        assert cu is None or int(cu.diff().max()) <= longest
        keys, values = (pages_of(x, table, cache_seqlens) for x in (k_cache, v_cache))
        rows = range(len(q)) if cu is None else spans(cu)
        return answer(attend_each(q, rows, keys, values, softmax_scale, causal, window))

    return types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )  # fmt: skip


def cute(asked: list[bool] | None = None) -> dict[str, types.SimpleNamespace]:
    """flash-attn-4 4.0.0b36 and nvidia-cudnn-frontend 1.32.0, as the adapters call them. asked: as of `flash_attn`."""
    two = flash_attn("page_table", 1, with_lse=True, asked=asked)

    def sides(window_size):
        return tuple(-1 if side is None else side for side in window_size)

    def flash_attn_func(q, k, v, qv=None, *, window_size=(None, None), **named):
        return two.flash_attn_func(q, k, v, window_size=sides(window_size), **named)

    def flash_attn_varlen_func(
        q, k, v, qv=None, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size=(None, None), **named
    ):  # fmt: skip
        given = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return two.flash_attn_varlen_func(*given, window_size=sides(window_size), **named)

    def sdpa_fwd_wrapper_dsl_sm90(q, k, v, is_causal=False, causal_bottom_right=False, *, scale_softmax=None):
        assert causal_bottom_right == is_causal
        return {"o_tensor": dense(*(x.transpose(1, 2) for x in (q, k, v)), scale_softmax, is_causal).transpose(1, 2)}

    none = types.SimpleNamespace
    return dict.fromkeys(("flash_attn", "flash_attn__cute", "cudnn", "cudnn__sdpa", "cudnn__sdpa__fwd"), none()) | {
        "flash_attn__cute__interface": none(
            flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
        ),
        "cudnn__sdpa__fwd__api_dsl": none(sdpa_fwd_wrapper_dsl_sm90=sdpa_fwd_wrapper_dsl_sm90),
    }  # fmt: skip


class _Planned:
    """What FlashInfer's wrappers share."""

    def __init__(self, workspace, *layout, **options):
        assert workspace.dtype == torch.uint8
        assert workspace.numel()
        assert not layout or layout == ("NHD",)

    def _cache(self, caches, indptr, ids, last, page):
        tables = [ids[span] for span in spans(indptr)]
        lengths = [(len(table) - 1) * page + int(rest) for table, rest in zip(tables, last, strict=True)]
        return [pages_of(x, tables, lengths) for x in caches]


class Ragged(_Planned):
    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
        window_left=-1, sm_scale=None, q_data_type="float16",
    ):  # fmt: skip
        self.given = qo_indptr, kv_indptr, sm_scale, causal, (window_left, -1)
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, q_data_type

    def run(self, q, k, v):
        assert (q.shape[1], k.shape[1], q.shape[2], q.dtype) == self.shape
        assert q.is_contiguous()
        return packed(q, k, v, *self.given)


class Paged(_Planned):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, causal=False, sm_scale=None, window_left=-1, q_data_type="float16",
    ):  # fmt: skip
        self.pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size
        self.indptr, self.how = qo_indptr, (sm_scale, causal, (window_left, -1))

    def run(self, q, cache):
        return attend_each(q, spans(self.indptr), *self._cache(cache, *self.pages), *self.how)


class Decode(_Planned):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left=-1,
        q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn, torch.float8_e5m2)
        self.pages, self.how = (indptr, indices, last_page_len, page_size), (sm_scale, True, (window_left, -1))
        self.dtype = kv_data_type

    def run(self, q, cache, *, k_scale=None, v_scale=None):
        assert {x.dtype for x in cache} == {self.dtype}
        if self.dtype is not q.dtype:
            assert type(k_scale) is type(v_scale) is float
            cache = [(x.float() * scale).to(q.dtype) for x, scale in zip(cache, (k_scale, v_scale), strict=True)]
        return attend_each(q, spans(range(len(q) + 1)), *self._cache(cache, *self.pages), *self.how)


class Latent(_Planned):
    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        self.given = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        self.how = sm_scale, causal
        self.widths = head_dim_ckv, head_dim_kpe

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        assert (ckv_cache.shape[-1], kpe_cache.shape[-1]) == self.widths
        indptr, pages, ids, lengths = self.given
        tables = [ids[span] for span in spans(pages)]
        ckv, kpe = (pages_of(x[:, :, None], tables, lengths) for x in (ckv_cache, kpe_cache))
        keys = [torch.cat(pair, -1) for pair in zip(ckv, kpe, strict=True)]
        return attend_each(torch.cat([q_nope, q_pe], -1), spans(indptr), keys, ckv, *self.how)


def flashinfer() -> dict[str, types.SimpleNamespace]:
    return {
        "flashinfer": types.SimpleNamespace(
            BatchPrefillWithRaggedKVCacheWrapper=Ragged,
            BatchPrefillWithPagedKVCacheWrapper=Paged,
            BatchDecodeWithPagedKVCacheWrapper=Decode,
        ),
        "flashinfer__mla": types.SimpleNamespace(BatchMLAPagedAttentionWrapper=Latent),
    }
