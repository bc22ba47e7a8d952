"""On an accelerator: lists of blocks and tree masks, at sizes at which loops are pipelined, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import portattn
from portattn.testing.tolerance import budget, largest

pytestmark = pytest.mark.gpu

SIZE = 128


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q (B, Hq, Sq, D), k and v (B, Hk, Sk, D), seen broadcast to (B, Hq, Sq, Sk): by definition, in a dtype. What
    nobody sees counts as 0; a row that sees nothing gives 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (torch.nan_to_num(x).to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = (q.to(dtype) @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v


def check(out: torch.Tensor, *given: torch.Tensor) -> None:
    exact, same = (attended(*given, dtype) for dtype in (torch.float64, out.dtype))
    assert torch.isfinite(out).all()
    assert largest(out.double() - exact) <= budget(out.dtype, exact, same)


def lists_of(listed: torch.Tensor) -> portattn.BlockMask:
    """(1, H, R, C) bools as lists of whole blocks."""
    counts = listed.sum(-1).int()
    order = (~listed).int().argsort(dim=-1, stable=True).int()
    return portattn.BlockMask(counts, order, block_size=(SIZE, SIZE))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["random", "documents", "single blocks", "nothing"])
@pytest.mark.parametrize(("rows", "keys", "dim"), [(1024, 1024, 128), (700, 1500, 64)])
def test_lists_of_blocks(kind: str, causal: bool, rows: int, keys: int, dim: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 4, rows, dim, device="cuda").bfloat16()
    k, v = (torch.randn(1, 2, keys, dim, device="cuda").bfloat16() for _ in range(2))
    down, across = -(-rows // SIZE), -(-keys // SIZE)
    row, column = torch.arange(down)[:, None], torch.arange(across)
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "random": lambda: torch.rand(1, 4, down, across) < 0.4,
        "documents": lambda: (row // 3 == column // 3).expand(1, 4, -1, -1),
        "single blocks": lambda: (row % 2 == column % 2).expand(1, 4, -1, -1),
        "nothing": lambda: torch.zeros(1, 4, down, across, dtype=torch.bool),
    }
    listed = makers[kind]().cuda()
    seen = listed.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3)[:, :, :rows, :keys]
    if causal:
        seen = seen & torch.ones(rows, keys, dtype=torch.bool, device="cuda").tril(keys - rows)
    unseen = ~listed.any(2).any(1).repeat_interleave(SIZE, 1)[:, :keys]  # blocks that no query of any head attends
    for tensor in (k, v):
        tensor[unseen[:, None].expand(1, 2, keys)] = torch.nan
    out = portattn.attention(q, k, v, block_mask=lists_of(listed), causal=causal)
    assert portattn.last_plan().path not in ("reference", "vendor")
    check(out, q, k, v, seen)


def test_lists_change_in_a_graph() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda").bfloat16() for _ in range(3))
    lists = lists_of(torch.ones(1, 4, 4, 4, dtype=torch.bool, device="cuda"))
    portattn.attention(q, k, v, block_mask=lists)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = portattn.attention(q, k, v, block_mask=lists)
    listed = (torch.rand(1, 4, 4, 4) < 0.5).cuda()
    for kept, new in zip(lists[:2], lists_of(listed)[:2], strict=True):
        assert kept is not None
        kept.copy_(new)  # type: ignore[arg-type]
    graph.replay()
    torch.cuda.synchronize()
    check(out, q, k, v, listed.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3))


def trees(batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents of random trees, and what each token sees of its tree."""
    parents = torch.tensor([[-1] + [int(torch.randint(i, ())) for i in range(1, count)] for _ in range(batch)])
    seen = torch.eye(count, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for i in range(1, count):
            seen[b, i] |= seen[b, int(parents[b, i])]
    return parents, seen


@pytest.mark.parametrize("count", [4, 16, 64])
def test_trees_over_pages_follow_a_graph(count: int) -> None:
    """Drafted trees are verified; then other trees, lengths and pages in the same graph."""
    torch.manual_seed(0)
    batch, most, page = 8, 1024, 16
    q = torch.randn(batch, 8, count, 128, device="cuda").bfloat16()
    k, v = (torch.randn(batch * most // page, page, 2, 128, device="cuda").bfloat16() for _ in range(2))
    table = torch.randperm(batch * most // page, dtype=torch.int32, device="cuda").view(batch, -1)
    lengths = torch.full((batch,), most, dtype=torch.int32, device="cuda")
    parents, seen = trees(batch, count)
    words = portattn.tree_mask(parents).cuda()

    def run() -> torch.Tensor:
        out = portattn.paged_attention(q, k, v, table, lengths, tree_mask=words)
        assert isinstance(out, torch.Tensor)
        return out

    def check_now(out: torch.Tensor) -> None:
        for b, length in enumerate(lengths.tolist()):
            rows_k, rows_v = (x[table[b].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k, v))
            shown = torch.ones(count, length, dtype=torch.bool, device="cuda")
            shown[:, length - count :] = seen[b].cuda()
            check(out[b : b + 1], q[b : b + 1], rows_k, rows_v, shown)

    check_now(run())
    assert portattn.last_plan().path not in ("reference", "vendor")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    parents, seen = trees(batch, count)
    words.copy_(portattn.tree_mask(parents))
    lengths.copy_(torch.randint(count, most, (batch,), dtype=torch.int32))
    table.copy_(table.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    check_now(out)
