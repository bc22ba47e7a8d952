"""With a demanded number of splits, nothing that decides a sequence's arithmetic depends on the rest of the batch."""

import itertools
from typing import Any

import msgspec
import pytest
import torch

import portattn
from portattn import Problem, Registry, plan
from portattn.planning.kernel_specs import CORES

OPS = {
    "decode_attention": {}, "paged_attention": {"page_size": 16},
    "mla_attention": {"page_size": 64, "heads_k": 1, "head_dim": 576, "head_dim_v": 512}, "sparse_attention": {},
}  # fmt: skip
PACKED = ("paged_attention", "mla_attention")


def problem(op: str, batch: int, rows: int, packed: bool, room: int = 8192) -> Problem:
    """`batch` sequences of one row, and when packed one more of `rows`; a table has room for `room` keys."""
    fields = {"heads_q": 32, "heads_k": 8, "head_dim": 128, "dtype": "bf16", "seq_k": room, "seqlens_k": True} | OPS[op]
    if op == "sparse_attention":
        fields["tokens"] = max(room // 16, 64)
    if packed:
        fields |= {"total_q": batch + rows, "seq_q": max(rows, 1)}
    return Problem(op=op, batch=batch + int(packed), num_splits=1, **({"seq_q": 1} | fields))


@pytest.mark.parametrize(("op", "packed"), [*((op, False) for op in OPS), *((op, True) for op in PACKED)])
def test_one_split_is_one_tile_whatever_the_batch(op: str, packed: bool) -> None:
    batches = [(1, 1), (64, 1), (64, 2048), (500, 7)] if packed else [(1, 0), (64, 0), (500, 0)]
    seen = set()
    for target in Registry.load().targets("triton==3.6.0"):
        if target.backend == "ascend":
            continue  # community Triton compiles nothing for it
        first = plan(problem(op, 1, int(packed), packed, 8192), target)
        if any("compiles nothing for" in no.reason for no in first.rejected):
            continue  # an arch that this release does not know
        seen.add(target.name)
        chosen = set()
        rooms = (8192,) if op == "decode_attention" else (48, 1024, 8192, 200_000)  # a cache is given, a table grows
        for (batch, rows), room in itertools.product(batches, rooms):
            lowering, launch = plan(problem(op, batch, rows, packed, room), target).specialised
            chosen.add((tuple(getattr(lowering, name) for name in CORES[op].choices if name != "grid"), launch))
        assert len(chosen) == 1, f"{target.name}: {chosen}"
    assert {"cuda:sm_90", "rocm:gfx942"} <= seen


@pytest.mark.parametrize("window", [None, (40, 0)])
@pytest.mark.parametrize("op", PACKED)
def test_where_a_prompt_is_cut_changes_no_bit(op: str, window: tuple[int, int] | None, device: Any) -> None:
    """A row's place in its tile must not choose its arithmetic: chunks begin wherever a batch had room."""
    generator = torch.Generator().manual_seed(0)
    rows, page, heads = (70, 16, 4) if device.path == "interpreter" else (1000, 16, 32)
    pages = -(-rows // page)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device.name, torch.float16)

    def index(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device.name)

    shared = {"page_table": index(*range(pages))[None], "causal": True, "window": window, "num_splits": 1}
    if op == "mla_attention":
        queries, cache = {"q_nope": normal(rows, heads, 32), "q_rope": normal(rows, heads, 16)}, normal(pages, page, 48)
        shared |= {"kv_pages": cache, "scale": 0.125}
    else:
        queries = {"q": normal(rows, heads, 32)}
        shared |= {name: normal(pages, page, 2, 32) for name in ("k_pages", "v_pages")} | {"page_layout": "phd"}

    def chunk(begin: int, end: int) -> torch.Tensor:
        part = {name: q[begin:end] for name, q in queries.items()}
        lengths = {"seqlens_k": index(end), "cu_seqlens_q": index(0, end - begin), "max_seqlen_q": end - begin}
        return getattr(portattn, op)(**part, **shared, **lengths)

    with portattn.settings(backend=device.path):
        whole = chunk(0, rows)
        for cut in (1, 21, rows - 1):
            assert torch.equal(torch.cat([chunk(0, cut), chunk(cut, rows)]), whole), cut


@pytest.mark.parametrize("op", PACKED)
def test_packed_rows_with_demanded_splits_mask_every_tile(op: str) -> None:
    """Scores that are not masked are scaled in the exponential, and compilers round that product once less."""
    made = plan(problem(op, 4, 100, True), portattn.target("h100", "triton==3.6.0"))
    lowering, launch = made.specialised
    assert CORES[op].constexprs(made.problem, lowering, launch)["PIPELINE"] == "masked"
    free = msgspec.structs.replace(made.problem, num_splits=0)
    assert CORES[op].constexprs(free, lowering, launch)["PIPELINE"] == "plain"
