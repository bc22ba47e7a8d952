"""flash_attn_with_kvcache of both generations: append new keys and values to a cache in place, and attend it.

With cache_batch_idx or packed queries each sequence of the cache is one page, so that nothing is copied.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from portattn.api import autocast, ops
from portattn.api.signatures import request_of
from portattn.config import current
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.core import size_of
from portattn.integrations.flash_attn.kvcache_checks import (
    CachedCall,
    as_written,
    check,
    check_values,
    places,
    query_positions,
    rotary_style,
    rotate_queries,
)
from portattn.schema.tensors import KV_FORMAT

DECODE_QUERIES = 16  # more queries a sequence than this are attention's: decode_attention is for few
_MOST_KNOWN = 1024
_known: set[Any] = set()  # kinds of calls on an accelerator with attention that was validated before a write


def attend_cached(call: CachedCall) -> Any:
    """Return out, or (out, lse) with -inf for rows without keys, outside of autograd; a refused call writes nothing."""
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        return _attended(call)


def _attended(call: CachedCall) -> Any:
    check(call)
    casts = autocast.is_on(call.q)
    call = _in_one_dtype(replace(call, max_seqlen_q=size_of(call.max_seqlen_q)), casts)
    with _without_autocast(call) if casts else nullcontext():
        before, total = _lengths(call), call.q.shape[0]
        check_values(call, before)
        if call.table is not None and call.batch_idx is not None:
            rows = call.batch_idx.clamp(0, call.table.shape[0] - 1).long()
            call = replace(call, table=call.table[rows], batch_idx=None)
        if call.cos is not None:
            call = replace(call, cos=as_written(call.cos, call.q), sin=as_written(call.sin, call.q))
            turned = rotate_queries(call.q, call.cos, call.sin, query_positions(call, before), call.interleaved)
            call = replace(call, q=turned)
        beginnings = call.cu_seqlens_q if call.leftpad is not None else None
        if beginnings is not None:  # packed queries have no mask, which hides the padding
            call = replace(call, q=_last_rows(call), cu_seqlens_q=None, max_seqlen_q=None)
        if not call.appends:
            operation, given = _attention(call, before)
        else:
            new = call.k.shape[1] if call.cu_seqlens_k_new is None else call.cu_seqlens_k_new.diff()
            # A sequence whose length is negative takes no part: nothing of it is written, and it has no keys.
            operation, given = _attention(call, torch.where(before < 0, 0, before + new).to(torch.int32))
            _validated(operation, given)
            _write(call, before)
        found = getattr(ops, operation)(**given)
    return found if beginnings is None else _packed(found, beginnings, total)


def _last_rows(call: CachedCall) -> torch.Tensor:
    """Return packed queries (Tq, H, D) as a batch (B, longest, H, D), arbitrary ones before a sequence's own."""
    total = call.q.shape[0]
    # A sequence's queries come last: the last query and the last key are aligned.
    longest = min(call.max_seqlen_q, total)
    source = call.cu_seqlens_q[1:, None] - longest + torch.arange(longest, device=call.q.device)
    return call.q[source.clamp(0, max(total - 1, 0))]


def _packed(found: Any, beginnings: torch.Tensor, total: int) -> Any:
    """Return results of `_last_rows` for the packed queries, with 0 and -inf after the last sequence."""
    out, lse = found if isinstance(found, tuple) else (found, None)
    sequence, within = places(beginnings, total)
    row = (out.shape[1] - beginnings.diff()[sequence] + within).clamp(0, max(out.shape[1] - 1, 0))
    counts = torch.arange(total, device=out.device) < beginnings[-1]
    out = torch.where(counts[:, None, None], out[sequence, row], 0.0).to(out.dtype)
    if lse is None:
        return out
    return out, torch.where(counts[:, None], lse[sequence, :, row], -torch.inf).t()


def _without_autocast(call: CachedCall) -> AbstractContextManager[Any]:
    return torch.autocast(call.q.device.type, enabled=False)


def _in_one_dtype(call: CachedCall, casts: bool) -> CachedCall:
    """Return the call with queries in a dtype of the cache's operations, and their scale in the keys'."""
    # Autocast casts queries and new rows. float8 queries are the same numbers in bfloat16.
    q_scale, k_scale, v_scale = call.descales
    kept = call.k_cache.dtype
    if kept in KV_FORMAT and call.q.dtype in KV_FORMAT and call.q.dtype.is_floating_point:
        if q_scale is not None:
            _check_scale(call, "q_descale", q_scale)
            if k_scale is not None:
                _check_scale(call, "k_descale", k_scale)
            if k_scale is not None and any(
                mine != its and 1 not in (mine, its)
                for mine, its in zip(reversed(q_scale.shape), reversed(k_scale.shape), strict=False)
            ):
                limit = f"must go with k_descale's, {tuple(k_scale.shape)}"
                raise ArgumentError(call.op, "q_descale.shape", tuple(q_scale.shape), limit)
            k_scale = q_scale if k_scale is None else q_scale * k_scale
        for name in ("k", "v"):
            new = getattr(call, name)
            if new is not None and new.dtype != kept:
                raise ArgumentError(
                    call.op, f"{name}.dtype", new.dtype, f"must be the cache's, {kept}, beside float8 queries"
                )
        return replace(_cast(call, torch.bfloat16), descales=(None, k_scale, v_scale), narrow=True)
    if q_scale is not None:
        raise ArgumentError(call.op, "q_descale", tuple(q_scale.shape), "goes with float8 queries and a float8 cache")
    if casts:
        return _cast(call, torch.get_autocast_dtype(call.q.device.type) if kept in KV_FORMAT else kept)
    return call


def _check_scale(call: CachedCall, name: str, scale: torch.Tensor) -> None:
    if scale.dtype is not torch.float32:
        raise ArgumentError(call.op, f"{name}.dtype", scale.dtype, "must be torch.float32")
    if scale.device != call.q.device:
        raise ArgumentError(call.op, f"{name}.device", str(scale.device), f"must be q's, {call.q.device}")


def _cast(call: CachedCall, dtype: torch.dtype) -> CachedCall:
    k, v = (None if tensor is None else tensor.to(dtype) for tensor in (call.k, call.v))
    return replace(call, q=call.q.to(dtype), k=k, v=v)


def _lengths(call: CachedCall) -> torch.Tensor:
    """Return the keys of each sequence before the call, left padding included: (B,) int32."""
    length = call.capacity if call.cache_seqlens is None else call.cache_seqlens
    if isinstance(length, torch.Tensor):
        return length
    return torch.full((call.batch,), length, dtype=torch.int32, device=call.q.device)


def _attention(call: CachedCall, after: torch.Tensor) -> tuple[str, dict[str, Any]]:
    _, k_scale, v_scale = call.descales
    given: dict[str, Any] = call.scores.arguments()
    given |= {"sinks": call.sinks, "return_lse": call.return_lse, "layout": "bshd"}
    quantised = call.k_cache.dtype in KV_FORMAT
    if call.by_slots:
        table = _table(call)
        given |= {
            "q": call.q, "k_pages": call.k_cache, "v_pages": call.v_cache, "page_table": table, "seqlens_k": after,
            "k_scale": k_scale, "v_scale": v_scale, "num_splits": call.num_splits, "cu_seqlens_q": call.cu_seqlens_q,
            "max_seqlen_q": call.max_seqlen_q,
        }  # fmt: skip
        if call.leftpad is not None:  # the mask hides the padding; all else is aligned at the last key
            keys = table.shape[1] * call.k_cache.shape[1]
            given["mask"] = _beyond_padding(call.leftpad, after, call.q.shape[1], keys, given.pop("chunk", None))
        return "paged_attention", given
    # portattn counts the keys after the padding, flash_attn all rows up to the last key.
    if call.leftpad is not None:
        after = (after - call.leftpad).clamp(min=0)
    given |= {"q": call.q, "seqlens_k": after, "leftpad_k": call.leftpad}
    if quantised or call.num_splits is not None or call.q.shape[1] <= DECODE_QUERIES:
        given |= {"k_cache": call.k_cache, "v_cache": call.v_cache, "num_splits": call.num_splits}
        return "decode_attention", given | {"k_scale": k_scale, "v_scale": v_scale}
    return "attention", given | {"k": call.k_cache, "v": call.v_cache}


def _beyond_padding(
    leftpad: torch.Tensor, after: torch.Tensor, rows: int, keys: int, chunk: int | None
) -> torch.Tensor:
    """Return the mask (B, 1, 1 or rows, keys) of keys after the left padding; chunks count from the first of them."""
    key = torch.arange(keys, device=leftpad.device) - leftpad[:, None, None]
    mask = key >= 0
    if chunk:
        row = torch.arange(rows, device=leftpad.device)[:, None]
        position = row + (after - leftpad).clamp(min=0)[:, None, None] - rows
        mask = mask & (key // chunk == position // chunk)
    return mask[:, None]


def _table(call: CachedCall) -> torch.Tensor:
    if call.table is not None:
        return call.table
    if call.batch_idx is not None:
        return call.batch_idx[:, None]
    return torch.arange(call.batch, dtype=torch.int32, device=call.q.device)[:, None]


def _validated(operation: str, given: dict[str, Any]) -> None:
    """Validate a writing call's attention first; on an accelerator, where no length is read, once a kind of call."""
    if torch.compiler.is_dynamo_compiling():  # the whole graph is checked before any of it runs
        return
    kind = None
    if given["q"].device.type not in ("cpu", "meta"):
        kind = (operation, current().backend, *map(_kind, given.values()))
        if kind in _known:
            return
    request_of(operation, **given).build()
    if kind is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known.add(kind)


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _write(call: CachedCall, before: torch.Tensor) -> None:
    """Append k and v, rotated and, for a float8 cache, quantized unless they are already."""
    scales, style = _writing_scales(call), rotary_style(call.interleaved)
    if not call.by_slots:
        ops.append_kv(
            call.k, call.v, call.k_cache, call.v_cache, before, cos=call.cos, sin=call.sin, rotary=style,
            layout="bshd", **scales,
        )  # fmt: skip
        return
    if not call.batch:
        return
    first = before if call.rotation is None else call.rotation
    positions = None
    if call.cu_seqlens_k_new is None:
        k, v, slots = call.k.flatten(0, 1), call.v.flatten(0, 1), _slots(call, before)
        if call.cos is not None:
            positions = (first[:, None] + torch.arange(call.k.shape[1], device=before.device)).flatten()
    else:
        k, v = call.k, call.v
        sequence, within = places(call.cu_seqlens_k_new, k.shape[0])
        slots = _packed_slots(call, before, sequence, within)
        if call.cos is not None:
            positions = first[sequence] + within
    ops.write_pages(
        k,
        v,
        call.k_cache,
        call.v_cache,
        slots,
        cos=call.cos,
        sin=call.sin,
        positions=positions,
        rotary=style,
        **scales,
    )


def _slots(call: CachedCall, before: torch.Tensor) -> torch.Tensor:
    """Return each new row's slot, -1 for none: int64 (B·new rows,). A decode step waits for each operation here."""
    size, table, count = call.k_cache.shape[1], _table(call), call.k.shape[1]
    if not table.shape[1]:
        return before.new_full((call.batch * count,), -1, dtype=torch.int64)
    at = before[:, None]
    if count != 1:
        at = at + torch.arange(count, device=before.device)
    inside = at.clamp(0, size * table.shape[1] - 1)
    there = inside == at
    if count != 1:  # a sequence that takes no part has rows at 0 and behind it, too
        there = there & (before >= 0)[:, None]
    page = table.gather(1, (inside // size).long())
    there = there & (page >= 0)
    return torch.where(there, torch.add(inside % size, page.long(), alpha=size), -1).flatten()


def _packed_slots(
    call: CachedCall, before: torch.Tensor, sequence: torch.Tensor, within: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    size, table = call.k_cache.shape[1], _table(call)
    there = torch.arange(sequence.shape[0], device=before.device) < call.cu_seqlens_k_new[-1]
    start = before[sequence]
    at = start + within
    there = there & (start >= 0) & (at < size * table.shape[1])
    at = torch.where(there, at, 0)
    page = table[sequence, at // size] if table.shape[1] else torch.zeros_like(at)
    return torch.where(there & (page >= 0), page.long() * size + at % size, -1)


def _writing_scales(call: CachedCall) -> dict[str, Any]:
    """Return the scales by which new rows are quantized; none for rows that come in float8."""
    _, k_scale, v_scale = call.descales
    if call.narrow:
        return {}
    if k_scale is None and v_scale is None:
        return {}
    either = k_scale if k_scale is not None else v_scale
    return {
        "k_scale": torch.ones_like(either) if k_scale is None else k_scale,
        "v_scale": torch.ones_like(either) if v_scale is None else v_scale,
    }
