"""attention with lists of blocks beside FlexAttention, and tree masks of drafted tokens over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import portattn
from engine_parts.measure import OURS, Measure, attend, judged, worst

DIM, SIZE = 128, 128
DOCUMENT, WINDOW = 2048, 1024
Mod = Callable[..., torch.Tensor]


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Documents of equal length, whole blocks each: no block is attended in part."""
    return q // DOCUMENT == k // DOCUMENT


def sliding(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Blocks whose distance is at most the window's: none is attended in part."""
    return (q // SIZE - k // SIZE).abs() <= WINDOW // SIZE


def causal_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Blocks on the diagonal are attended in part."""
    return documents(b, h, q, k) & (q >= k)


def rows(measure: Measure) -> Iterator[dict[str, Any]]:
    for name, mod in (("documents", documents), ("sliding", sliding), ("causal documents", causal_documents)):
        name = f"block_mask 16k, {name}"
        if measure.wanted(name):
            yield from _blocks(measure, name, mod)
    name = "tree_mask 64 x (16 of 4k), pages of 16"
    if measure.wanted(name):
        yield from _tree(measure, name)


def _blocks(measure: Measure, name: str, mod: Mod) -> Iterator[dict[str, Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    heads, length = (2, 3 * DOCUMENT // 2) if measure.tiny else (16, 16_384)
    q, k, v = (measure.normal(1, heads, length, DIM) for _ in range(3))
    lists = create_block_mask(mod, None, None, length, length, device=measure.device, BLOCK_SIZE=SIZE)
    partial = int(lists.kv_num_blocks.sum())
    ours = portattn.BlockMask(
        lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices, (SIZE, SIZE)
    )
    causal = mod is causal_documents
    compiled = flex_attention if measure.tiny else torch.compile(flex_attention, dynamic=False)
    runs: dict[str, Any] = {
        OURS: lambda: portattn.attention(q, k, v, block_mask=ours, causal=causal),
        "flex": lambda: compiled(q, k, v, block_mask=lists),
        "portattn, everything": lambda: portattn.attention(q, k, v, causal=causal),
    }
    some = torch.tensor([0, SIZE - 1, SIZE, length // 2 - 1, length // 2 + 70, length - 1], device=measure.device)
    some = torch.cat([some, torch.randint(length, (250,), device=measure.device)])
    seen = mod(0, 0, some[:, None], torch.arange(length, device=measure.device))

    def expected(dtype: torch.dtype) -> torch.Tensor:
        scores = (q[0, :, some].to(dtype) @ k[0].to(dtype).mT) * DIM**-0.5
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[0].to(dtype)

    exact, same = expected(torch.float64), expected(torch.bfloat16)

    def judge(name: str) -> Callable[[], dict[str, Any]]:
        def now() -> dict[str, Any]:
            out = runs[name]()
            return judged(out[0][:, some], exact, same) | (
                {"path": portattn.last_plan().path, "note": f"{partial} blocks in part"} if name == OURS else {}
            )

        return now

    yield from measure.rows(name, runs, {name: judge(name) for name in (OURS, "flex")}, peer="flex")


def _tree(measure: Measure, name: str) -> Iterator[dict[str, Any]]:
    """Each request verifies a drafted tree of 16 tokens, with parents of its own."""
    torch.manual_seed(0)
    batch, drafted, keys, page, heads, kv_heads = 64, 16, 4096, 16, 32, 8
    if measure.tiny:
        batch, keys = 4, 128
    parents = torch.tensor([[-1] + [int(torch.randint(i, ())) for i in range(1, drafted)] for _ in range(batch)])
    words = portattn.tree_mask(parents).to(measure.device)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=measure.device)
    lengths[:3] = torch.tensor([drafted, drafted + 1, keys - 5], dtype=torch.int32)
    table = torch.randperm(batch * keys // page, dtype=torch.int32, device=measure.device).view(batch, -1)
    q = measure.normal(batch, drafted, heads, DIM)
    k, v = (measure.normal(batch * keys // page, page, kv_heads, DIM) for _ in range(2))

    def run(**more: Any) -> Any:
        return portattn.paged_attention(q, k, v, table, lengths, layout="bshd", **more)

    runs: dict[str, Any] = {OURS: lambda: run(tree_mask=words), "chain (causal)": lambda: run(causal=True)}

    def judge() -> dict[str, Any]:
        out, found = runs[OURS](), []
        path = portattn.last_plan().path
        for b in range(0, batch, 3):
            length = int(lengths[b])
            rows_k, rows_v = (x[table[b].long()].flatten(0, 1)[:length] for x in (k, v))
            seen = torch.ones(drafted, length, dtype=torch.bool, device=measure.device)
            seen[:, length - drafted :] = _ancestors(parents[b]).to(measure.device)
            exact, same = (
                attend(q[b], rows_k, rows_v, dtype, causal=False, seen=seen)
                for dtype in (torch.float64, torch.bfloat16)
            )
            found.append(judged(out[b], exact, same))
        return worst(found) | {"path": path}

    def chain() -> dict[str, Any]:
        runs["chain (causal)"]()
        return {"path": portattn.last_plan().path}

    yield from measure.rows(name, runs, {OURS: judge, "chain (causal)": chain}, peer="chain (causal)")


def _ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Bools (n, n): what each token of a tree sees of it, itself and its ancestors."""
    count = parents.shape[0]
    seen = torch.eye(count, dtype=torch.bool)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen
