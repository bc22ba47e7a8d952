"""The flash_attn module: dense attention, and attention over a cache to which the call appends, beside FA3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import portattn
from engine_parts import fa3
from engine_parts.measure import OURS, Measure, attend, judged, worst
from portattn.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache

HEADS, KV_HEADS, DIM = 32, 8, 128


def rows(measure: Measure) -> Iterator[dict[str, Any]]:
    for name, batch, length, causal in (
        ("flash_attn_func 4 x 4k, causal", 4, 4096, True),
        ("flash_attn_func 4 x 4k", 4, 4096, False),
        ("flash_attn_func 16 x 512, causal", 16, 512, True),
    ):
        if measure.tiny:
            batch, length = 2, length // 32
        if measure.wanted(name):
            yield from _dense(measure, name, batch, length, causal)
    for name, batch, room, page in (
        ("flash_attn_with_kvcache 64 x 8k, append", 64, 8192, None),
        ("flash_attn_with_kvcache 64 x 8k, append, pages of 256", 64, 8192, 256),
    ):
        if measure.tiny:
            batch, room = 4, 512
        if measure.wanted(name):
            yield from _cached(measure, name, batch, room, page)


def _dense(measure: Measure, name: str, batch: int, length: int, causal: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    q = measure.normal(batch, length, HEADS, DIM)
    k, v = (measure.normal(batch, length, KV_HEADS, DIM) for _ in range(2))
    expected = [
        [attend(q[b], k[b], v[b], dtype, causal) for dtype in (torch.float64, torch.bfloat16)] for b in (0, batch - 1)
    ]

    def judge(out: torch.Tensor) -> dict[str, Any]:
        pairs = zip((0, batch - 1), expected, strict=True)
        return worst([judged(out[b], exact, same) for b, (exact, same) in pairs])

    runs: dict[str, Any] = {OURS: lambda: flash_attn_func(q, k, v, causal=causal)}
    judges: dict[str, Any] = {OURS: lambda: judge(runs[OURS]()) | {"path": portattn.last_plan().path}}
    if fa3.here():  # vllm's build takes packed sequences alone
        cu = torch.arange(batch + 1, dtype=torch.int32, device=measure.device) * length
        run = fa3.Forward(
            q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1), cu_seqlens_q=cu, cu_seqlens_k=cu,
            max_seqlen_q=length, max_seqlen_k=length, softmax_scale=DIM**-0.5, is_causal=causal,
        ).prepared()  # fmt: skip
        runs["fa3"], judges["fa3"] = run, lambda: judge(run()[0].view_as(q))
    yield from measure.rows(name, runs, judges, peer="fa3")


def _cached(measure: Measure, name: str, batch: int, room: int, page: int | None) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    q = measure.normal(batch, 1, HEADS, DIM)
    k, v = (measure.normal(batch, 1, KV_HEADS, DIM) for _ in range(2))
    keys, values = (measure.normal(batch, room, KV_HEADS, DIM) for _ in range(2))
    lengths = torch.full((batch,), room - 1, dtype=torch.int32, device=measure.device)
    table = None
    if page:
        count = batch * room // page
        table = torch.randperm(count, dtype=torch.int32, device=measure.device).view(batch, room // page)
        places = torch.argsort(table.flatten().long())

        def as_cache(rows_of: torch.Tensor) -> torch.Tensor:
            return rows_of.reshape(count, page, KV_HEADS, DIM)[places].contiguous()
    else:

        def as_cache(rows_of: torch.Tensor) -> torch.Tensor:
            return rows_of.clone()

    caches = as_cache(keys), as_cache(values)

    def dense(cache: torch.Tensor) -> torch.Tensor:
        return cache if table is None else cache[table.long()].flatten(1, 2)

    def ours() -> torch.Tensor:
        return flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=lengths, causal=True, **({} if table is None else {"block_table": table})
        )

    def judge(out: torch.Tensor) -> dict[str, Any]:
        """out, and what stands in the cache: the new row in its place, everything else as it was."""
        found = []
        now = [dense(cache) for cache in caches]
        for b, length in enumerate(lengths.tolist()):
            rows_k, rows_v = (torch.cat([old[b, :length], new[b]]) for old, new in ((keys, k), (values, v)))
            exact, same = (attend(q[b], rows_k, rows_v, dtype) for dtype in (torch.float64, torch.bfloat16))
            found.append(judged(out[b], exact, same))
            written = all(
                torch.equal(cache[b, : length + 1], rows_of)
                and torch.equal(cache[b, length + 1 :], old[b, length + 1 :])
                for cache, rows_of, old in zip(now, (rows_k, rows_v), (keys, values), strict=True)
            )
            found[-1]["right"] &= written
        return worst(found)

    def restore() -> None:
        for cache, old in zip(caches, (keys, values), strict=True):
            cache.copy_(as_cache(old))

    def judge_ours() -> dict[str, Any]:
        restore()
        found = judge(ours()) | {"path": portattn.last_plan().path}
        replay = _replayed()
        return found | {
            "replay": replay, "right": found["right"] and replay["right"],
            "note": measure.replay_note(replay["right"]),
        }  # fmt: skip

    def _replayed() -> dict[str, Any]:
        """Captured with full caches, replayed with shorter ones."""
        held: list[torch.Tensor] = []
        replay = measure.replayed(lambda: held.append(ours()))
        restore()
        kept = lengths.clone()
        lengths.copy_(torch.randint(0, room - 2, (batch,), dtype=torch.int32))
        lengths[:2] = torch.tensor([0, room - 1], dtype=torch.int32)
        replay()
        found = judge(held[-1])
        lengths.copy_(kept)
        restore()
        return found

    runs: dict[str, Any] = {OURS: ours}
    judges: dict[str, Any] = {OURS: judge_ours}
    peer = "fa3 without the append"
    if fa3.here():  # vllm's build appends nothing: it reads a cache that has the new rows already
        after = lengths + 1
        run = fa3.Forward(
            q=q[:, 0], k=caches[0], v=caches[1], seqused_k=after, softmax_scale=DIM**-0.5, is_causal=True,
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=measure.device), max_seqlen_q=1,
            page_table=table, max_seqlen_k=room,
        ).prepared()  # fmt: skip

        def judge_peer() -> dict[str, Any]:
            ours()  # puts the new rows into the cache
            return judge(run()[0][:, None])

        runs[peer], judges[peer] = run, judge_peer
    yield from measure.rows(name, runs, judges, peer=peer)
