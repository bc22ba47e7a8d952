"""The flash_attn module on an accelerator: dense calls, and caches that grow in place inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch

import portattn
from portattn.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache
from portattn.testing.tolerance import budget, largest

pytestmark = pytest.mark.gpu


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, causal: bool) -> torch.Tensor:
    """q (Sq, Hq, D), k and v (Sk, Hk, D), by definition; the last query is the last key's."""
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def check(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    exact, same = (attended(q, k, v, dtype, causal) for dtype in (torch.float64, out.dtype))
    assert largest(out.double() - exact) <= budget(out.dtype, exact, same)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys", "dim"), [(1024, 1024, 128), (100, 900, 64), (1, 513, 256)])
def test_dense(rows: int, keys: int, dim: int, causal: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, rows, 8, dim, device="cuda").bfloat16()
    k, v = (torch.randn(2, keys, 2, dim, device="cuda").bfloat16() for _ in range(2))
    out = flash_attn_func(q, k, v, causal=causal)
    assert isinstance(out, torch.Tensor)
    for b in range(2):
        check(out[b], q[b], k[b], v[b], causal)


@pytest.mark.parametrize("page", [None, 64])
def test_a_cache_grows_inside_a_graph(page: int | None) -> None:
    """Captured once, replayed for six tokens of sequences of different lengths. Rows that hold nothing are NaN."""
    torch.manual_seed(0)
    batch, room, heads, kv_heads, dim = 4, 512, 8, 2, 128
    shape = (batch, room) if page is None else (batch * room // page, page)
    table = None if page is None else torch.randperm(shape[0], dtype=torch.int32, device="cuda").view(batch, -1)
    caches = [torch.full((*shape, kv_heads, dim), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def rows_of(cache: torch.Tensor, b: int) -> torch.Tensor:
        return cache[b] if table is None else cache[table[b].long()].flatten(0, 1)

    lengths = torch.tensor([0, 63, 64, room - 7], dtype=torch.int32, device="cuda")
    known = [[torch.randn(int(n), kv_heads, dim, device="cuda").bfloat16() for n in lengths] for _ in range(2)]
    for cache, of in zip(caches, known, strict=True):
        for b, rows in enumerate(of):
            place = torch.arange(rows.shape[0], device="cuda")
            if table is None:
                cache[b, place] = rows
            else:
                assert page is not None
                cache[table[b][place // page].long(), place % page] = rows
    q = torch.randn(batch, 1, heads, dim, device="cuda").bfloat16()
    k, v = (torch.randn(batch, 1, kv_heads, dim, device="cuda").bfloat16() for _ in range(2))

    def run() -> torch.Tensor:
        out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True)
        assert isinstance(out, torch.Tensor)
        return out

    run()  # writes the first token, which the first replay writes again
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(6):
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
        for b in range(batch):
            known[0][b], known[1][b] = torch.cat([known[0][b], k[b]]), torch.cat([known[1][b], v[b]])
            for cache, of in zip(caches, known, strict=True):
                count = of[b].shape[0]
                assert torch.equal(rows_of(cache, b)[:count], of[b])
                assert rows_of(cache, b)[count:].isnan().all()
            check(out[b], q[b], known[0][b], known[1][b], causal=True)
        lengths += 1


def test_a_block_table_with_too_few_pages() -> None:
    """The longest length is read back; the capture of a graph and `validate="never"` read nothing."""
    pages, table = torch.randn(2, 8, 1, 64, device="cuda").half(), torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    q, lengths = torch.randn(1, 1, 1, 64, device="cuda").half(), torch.tensor([9], dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=r"cache_seqlens\.max\(\) is 9, .* in block_table's 1 pages of 8"):
        flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
    with portattn.settings(validate="never"):
        out = flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
    assert torch.isfinite(out).all()
