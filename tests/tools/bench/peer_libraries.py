"""Peers' op libraries, in torch on the CPU: their schemas, and by definition what their ops compute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from portattn.schema import toml_reader

FA3, FA3_SCHEDULE, FA3_UPSTREAM, FLASHMLA = toml_reader.read(Path(__file__).with_name("peer_schemas.toml"))[0].values()
NAMES = [part.split()[-1] for part in FA3[4 : FA3.index(")")].replace("\n", " ").split(",")]


@contextmanager
def registered(namespace: str, ops: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside the block torch.ops has these ops, by their schemas, on the CPU."""
    library = torch.library.Library(namespace, "DEF")
    for schema, function in ops.items():
        name = library.define(" ".join(schema.split())) or schema.partition("(")[0]
        library.impl(name.partition("::")[2] or name, function, "CPU")
    try:
        yield
    finally:
        library._destroy()
        for schema in ops:  # torch.ops remembers what it has looked up
            vars(getattr(torch.ops, namespace)).pop(schema.partition("(")[0], None)


@contextmanager
def vllm_fa3() -> Iterator[list[dict[str, Any]]]:
    """torch.ops._vllm_fa3_C; yields the arguments of each of its calls."""
    calls: list[dict[str, Any]] = []

    def fwd(*values: Any) -> list[torch.Tensor]:
        given = dict(zip(NAMES, values, strict=True))
        calls.append(given)
        assert any(given[name] is not None for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"))
        return [_fa3(given)]

    with registered("_vllm_fa3_C", {FA3: fwd, FA3_SCHEDULE: lambda *values: torch.zeros(8, dtype=torch.int32)}):
        yield calls


@contextmanager
def upstream_fa3() -> Iterator[None]:

    def fwd(*values: Any) -> tuple[torch.Tensor, ...]:
        names = [part.split()[-1].partition("=")[0] for part in FA3_UPSTREAM[4 : FA3_UPSTREAM.index(")")].split(",")]
        given = {**dict.fromkeys(names), "is_causal": False, "window_size_left": -1, "window_size_right": -1}
        out = _fa3(given | dict(zip(names, values, strict=False)))  # torch leaves out defaults at the end
        return out, out, out, out

    with registered("flash_attn_3", {FA3_UPSTREAM: fwd}):
        yield


def _fa3(given: dict[str, Any]) -> torch.Tensor:
    """FlashAttention-3's convention: (B, S, H, D) or packed (T, H, D), bottom-right, pages (P, page, Hk, D)."""
    q, k, v, q_v = (given[name] for name in ("q", "k", "v", "q_v"))
    cu_q, cu_k, used_q, used_k, table = (
        given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
    )
    assert (cu_q is None) == (q.ndim == 4)
    assert cu_q is None or given["max_seqlen_q"] is not None
    assert cu_k is None or given["max_seqlen_k"] is not None
    assert table is None or used_k is not None
    out = q.new_full((*q.shape[:-1], v.shape[-1]), float("nan"))
    for b in range(len(q) if cu_q is None else len(cu_q) - 1):
        rows = (b, slice(0, q.shape[1] if used_q is None else int(used_q[b])))
        rows = rows if cu_q is None else slice(int(cu_q[b]), int(cu_q[b + 1]))
        if table is not None:
            keys, values = (t[table[b].long()].flatten(0, 1) for t in (k, v))
        elif cu_k is not None:
            keys, values = (t[int(cu_k[b]) : int(cu_k[b + 1])] for t in (k, v))
        else:
            keys, values = k[b], v[b]
        if used_k is not None:
            keys, values = keys[: int(used_k[b])], values[: int(used_k[b])]
        assert given["max_seqlen_k"] is None or len(keys) <= given["max_seqlen_k"]
        right = 0 if given["is_causal"] else given["window_size_right"]
        scores = _scores(q[rows], keys) + (0 if q_v is None else _scores(q_v[rows], values))
        out[rows] = _mixed(scores * given["softmax_scale"], values, given["window_size_left"], right).to(q.dtype)
    return out


@contextmanager
def flashmla() -> Iterator[None]:

    def decode(q, cache, rank, used, table, scale, causal, schedule, splits, out) -> tuple[torch.Tensor, ...]:
        out = q.new_empty(*q.shape[:3], rank)
        for b in range(len(q)):
            rows = cache[table[b].long()].flatten(0, 1)[: int(used[b])]
            scores = _scores(q[b], rows) * scale
            out[b] = _mixed(scores, rows[..., :rank], -1, 0 if causal else -1).to(q.dtype)
        return out, out.float(), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    with registered("_flashmla_C", {FLASHMLA: decode}):
        yield


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(S, H, D) and (K, Hk, D): (H, S, K) in float64."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("shd,khd->hsk", q.double(), k)


def _mixed(scores: torch.Tensor, v: torch.Tensor, left: int, right: int) -> torch.Tensor:
    heads, rows, keys = scores.shape
    distance = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    v = v.double().repeat_interleave(heads // v.shape[1], dim=1)
    return torch.einsum("hsk,khd->shd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
