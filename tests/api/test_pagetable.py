"""PageTable.from_csr against a plain loop, and through the ops that take one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from opcalls import CALLS, given, perform, problem
from support import Device, random_call

import portattn
from portattn import PageTable
from portattn.errors import ArgumentError


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def csr(counts: list[int], seed: int) -> tuple[list[int], list[int]]:
    """indptr and indices: some pages are in two sequences, and the last three of `indices` in none."""
    chosen = random.Random(seed)
    indptr = [0]
    for count in counts:
        indptr.append(indptr[-1] + count)
    return indptr, [chosen.randrange(50) for _ in range(indptr[-1] + 3)]


COUNTS = ([3, 1, 2], [0, 2, 0, 5, 0], [1], [0], [0, 0], [], [4] * 7)


@pytest.mark.parametrize("most", ["found", "exact", "more"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_it_is_what_a_loop_makes(device: Device, counts: list[int], most: str) -> None:
    indptr, indices = csr(counts, seed=len(counts))
    last = [count % 4 + 1 for count in counts]
    longest = max(counts, default=0)
    columns = {"found": longest, "exact": longest, "more": longest + 2}[most]
    tensors = (int32(*values).to(device.name) for values in (indptr, indices, last))
    table = PageTable.from_csr(*tensors, max_pages=None if most == "found" else columns)
    assert tuple(table.pages.shape) == (len(counts), columns)
    assert table.pages.is_contiguous()
    for name in ("pages", "counts", "last_page_len"):
        assert getattr(table, name).dtype == torch.int32
        assert getattr(table, name).device.type == device.name
    assert table.counts.tolist() == counts
    for b, count in enumerate(counts):
        own = [indices[place] for place in range(indptr[b], indptr[b + 1])]
        assert table.pages[b].tolist() == own + [-1] * (columns - count)
    for page_size in (1, 4, 16):
        lengths = table.seqlens(page_size)
        assert lengths.dtype == torch.int32
        expected = [(count - 1) * page_size + end if count else 0 for count, end in zip(counts, last, strict=True)]
        assert lengths.tolist() == expected


def test_fewer_columns_than_pages_are_the_first() -> None:
    """Their lengths say more than the table holds: where values are read back that is an error (tests/validate)."""
    table = PageTable.from_csr(int32(0, 3, 5), int32(9, 8, 7, 6, 5), int32(2, 4), max_pages=1)
    assert table.pages.tolist() == [[9], [6]]
    assert table.seqlens(4).tolist() == [10, 8]
    assert PageTable.from_csr(int32(0, 3), int32(9, 8, 7), int32(2), max_pages=0).pages.shape == (1, 0)


def test_no_page_at_all() -> None:
    table = PageTable.from_csr(int32(0, 0, 0), int32(), int32(0, 0), max_pages=3)
    assert table.pages.tolist() == [[-1] * 3] * 2
    assert table.seqlens(4).tolist() == [0, 0]
    assert PageTable.from_csr(int32(0, 0, 0), int32(), int32(0, 0)).pages.shape == (2, 0)


def test_views_are_taken_as_they_are() -> None:
    indptr, indices = int32(0, 9, 3, 9, 5, 9)[::2], int32(9, 0, 8, 0, 7, 0, 6, 0, 5, 0)[::2]
    table = PageTable.from_csr(indptr, indices, int32(2, 0, 4, 0)[::2])
    assert table.pages.tolist() == [[9, 8, 7], [6, 5, -1]]
    assert table.seqlens(4).tolist() == [10, 8]


def test_the_last_page_of_no_page_does_not_count() -> None:
    """FlashInfer's users write 0 there, or a whole page."""
    for value in (0, 4, 77, -3):
        table = PageTable.from_csr(int32(0, 0, 1), int32(3), int32(value, 4))
        assert table.seqlens(4).tolist() == [0, 4]


GOOD: dict[str, Any] = {"indptr": int32(0, 2, 3), "indices": int32(4, 5, 6), "last_page_len": int32(1, 2)}
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "indptr is a list": ({"indptr": [0, 2, 3]}, "indptr is 'list'", "a torch.Tensor of torch.int32 with one axis"),
    "indptr is int64": ({"indptr": torch.tensor([0, 2, 3])}, "indptr is (torch.int64, (3,))", "of torch.int32"),
    "indices are None": ({"indices": None}, "indices is 'NoneType'", "of torch.int32 with one axis"),
    "indices of rank 2": ({"indices": int32(1, 2, 3)[None]}, "indices is (torch.int32, (1, 3))", "with one axis"),
    "last_page_len is float": (
        {"last_page_len": torch.ones(2)}, "last_page_len is (torch.float32, (2,))", "of torch.int32",
    ),
    "last_page_len of rank 0": (
        {"last_page_len": torch.tensor(1, dtype=torch.int32)}, "last_page_len is (torch.int32, ())", "with one axis",
    ),
    "indices elsewhere": ({"indices": int32(4, 5, 6).to("meta")}, "indices.device is 'meta'", "must be indptr's, cpu"),
    "last_page_len elsewhere": (
        {"last_page_len": int32(1, 2).to("meta")}, "last_page_len.device is 'meta'", "must be indptr's, cpu",
    ),
    "indptr of another batch": (
        {"indptr": int32(0, 3)}, "indptr.shape is (2,)", "must have one element more than last_page_len, 3",
    ),
    "indptr of nothing": (
        {"indptr": int32(), "last_page_len": int32()}, "indptr.shape is (0,)", "one element more than last_page_len, 1",
    ),
    "not from 0": ({"indptr": int32(1, 2, 3)}, "indptr[0] is 1", "must be 0, the first page"),
    "from below 0": ({"indptr": int32(-1, 2, 3)}, "indptr[0] is -1", "must be 0, the first page"),
    "falling": ({"indptr": int32(0, 2, 1)}, "indptr[2] is 1", "must be at least indptr[1], 2"),
    "beyond the indices": ({"indptr": int32(0, 2, 4)}, "indptr[2] is 4", "must be at most 3, the pages in indices"),
    "an empty last page": ({"last_page_len": int32(1, 0)}, "last_page_len[1] is 0", "must be at least 1"),
    "less than an empty last page": ({"last_page_len": int32(-4, 1)}, "last_page_len[0] is -4", "must be at least 1"),
    "max_pages is negative": ({"max_pages": -1}, "max_pages is -1", "must be None or an integer ≥ 0"),
    "max_pages is a float": ({"max_pages": 2.0}, "max_pages is 2.0", "must be None or an integer ≥ 0"),
    "max_pages is True": ({"max_pages": True}, "max_pages is True", "must be None or an integer ≥ 0"),
    "max_pages is a tensor": ({"max_pages": torch.tensor(2)}, "max_pages is tensor(2)", "must be None or an integer"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_errors_name_argument_value_and_limit(bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    PageTable.from_csr(**GOOD)
    with pytest.raises(portattn.ArgumentError) as error:
        PageTable.from_csr(**(GOOD | changes))
    message = str(error.value)
    assert message.startswith(f"PageTable.from_csr: {what}"), message
    assert limit in message.partition(", but ")[2], message


def test_nothing_is_read_back_where_max_pages_is_given() -> None:
    """Even of values that are wrong: nothing then waits for the device."""
    for indptr in (int32(0, 2, 1), int32(-5, 90, 2**31 - 1)):
        table = PageTable.from_csr(indptr, GOOD["indices"], GOOD["last_page_len"], max_pages=2)
        pages = table.pages
        assert ((pages == -1) | ((pages >= 4) & (pages <= 6))).all()
    shapes = {n: t.to("meta") for n, t in GOOD.items()}
    assert PageTable.from_csr(**shapes, max_pages=4).pages.shape == (2, 4)


PAGED = [n for n in CALLS if "page_size" in CALLS[n]]


@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
@pytest.mark.parametrize("name", PAGED)
def test_a_table_is_its_pages_and_lengths(name: str, page_layout: str) -> None:
    call = random_call(problem(name, page_layout=page_layout), seed=1)
    arguments, page = given(call), call.problem.page_size
    lengths = arguments["seqlens_k"].tolist()
    counts = [-(-length // page) for length in lengths]
    indices = [i for row, count in zip(arguments["page_table"].tolist(), counts, strict=True) for i in row[:count]]
    indptr = [0, *torch.tensor(counts).cumsum(0).tolist()]
    last = [(length - 1) % page + 1 for length in lengths]
    expected, expected_lse = perform(call.problem.op, arguments)
    for most in (None, 5, 9):
        table = PageTable.from_csr(int32(*indptr), int32(*indices), int32(*last), most)
        changes = {"page_table": table, "seqlens_k": None}
        out, lse = perform(call.problem.op, arguments | changes)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)
        assert portattn.plan(call.problem.op, **(arguments | changes)).problem.seq_k == table.pages.shape[1] * page


def test_it_cannot_be_changed() -> None:
    table = PageTable.from_csr(**GOOD)
    with pytest.raises(AttributeError):
        table.counts = None


@pytest.mark.gpu
def test_on_the_device_nothing_waits_where_max_pages_is_given() -> None:
    tensors = {n: t.cuda() for n, t in GOOD.items()}
    q, pages = torch.randn(2, 4, 1, 64, device="cuda").half(), torch.randn(8, 16, 2, 64, device="cuda").half()

    def run() -> torch.Tensor:
        return portattn.paged_attention(q, pages, pages, PageTable.from_csr(**tensors, max_pages=2))

    expected = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def test_a_last_page_that_holds_more_than_a_page_is_named() -> None:
    pages, q = torch.randn(6, 4, 1, 16), torch.randn(2, 1, 1, 16)
    table = portattn.PageTable.from_csr(int32(0, 2, 5), int32(1, 2, 5, 0, 3), int32(4, 5))
    with pytest.raises(ArgumentError, match=r"last_page_len\[1\] is 5, but must be in 1..4"):
        portattn.paged_attention(q, pages, pages, table)
    portattn.paged_attention(q, pages, pages, table, validate=False)


def test_a_table_is_made_of_int32_tensors() -> None:
    pages, ones = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="PageTable: last_page_len is 'NoneType'"):
        portattn.PageTable(pages, ones, None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="PageTable: counts is 'list'"):
        portattn.PageTable(pages, [1, 2], ones)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"counts.shape is \(3,\), but must have pages' first axis, 2"):
        portattn.PageTable(pages, torch.ones(3, dtype=torch.int32), ones)
