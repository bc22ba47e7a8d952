"""PageTable.from_csr against a plain loop, and through the ops that take one."""

import copy
import io
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opcalls import CALLS, assert_right, given, perform, problem
from support import Device, random_call

import portattn
from portattn import PageTable
from portattn.api.prepare import Prepared
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
        assert PageTable.from_csr(int32(0, 0, 1), int32(3), int32(value, 4)).seqlens(4).tolist() == [0, 4]


GOOD: dict[str, Any] = {"indptr": int32(0, 2, 3), "indices": int32(4, 5, 6), "last_page_len": int32(1, 2)}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"indptr": [0, 2, 3]}, "indptr is 'list'", "a torch.Tensor of torch.int32 with one axis"),
    ({"indptr": torch.tensor([0, 2, 3])}, "indptr is (torch.int64, (3,))", "of torch.int32"),
    ({"indices": None}, "indices is 'NoneType'", "of torch.int32 with one axis"),
    ({"indices": int32(1, 2, 3)[None]}, "indices is (torch.int32, (1, 3))", "with one axis"),
    ({"last_page_len": torch.ones(2)}, "last_page_len is (torch.float32, (2,))", "of torch.int32"),
    ({"last_page_len": torch.tensor(1, dtype=torch.int32)}, "last_page_len is (torch.int32, ())", "with one axis"),
    ({"indices": int32(4, 5, 6).to("meta")}, "indices.device is 'meta'", "must be indptr's, cpu"),
    ({"last_page_len": int32(1, 2).to("meta")}, "last_page_len.device is 'meta'", "must be indptr's, cpu"),
    ({"indptr": int32(0, 3)}, "indptr.shape is (2,)", "must have one element more than last_page_len, 3"),
    ({"indptr": int32(), "last_page_len": int32()}, "indptr.shape is (0,)", "one element more than last_page_len, 1"),
    ({"indptr": int32(1, 2, 3)}, "indptr[0] is 1", "must be 0, the first page"),
    ({"indptr": int32(-1, 2, 3)}, "indptr[0] is -1", "must be 0, the first page"),
    ({"indptr": int32(0, 2, 1)}, "indptr[2] is 1", "must be at least indptr[1], 2"),
    ({"indptr": int32(0, 2, 4)}, "indptr[2] is 4", "must be at most 3, the pages in indices"),
    ({"last_page_len": int32(1, 0)}, "last_page_len[1] is 0", "must be at least 1"),
    ({"last_page_len": int32(-4, 1)}, "last_page_len[0] is -4", "must be at least 1"),
    ({"max_pages": -1}, "max_pages is -1", "must be None or an integer ≥ 0"),
    ({"max_pages": 2.0}, "max_pages is 2.0", "must be None or an integer ≥ 0"),
    ({"max_pages": True}, "max_pages is True", "must be None or an integer ≥ 0"),
    ({"max_pages": torch.tensor(2)}, "max_pages is tensor(2)", "must be None or an integer"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda case: str(case[1]))
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
        pages = PageTable.from_csr(indptr, GOOD["indices"], GOOD["last_page_len"], max_pages=2).pages
        assert ((pages == -1) | ((pages >= 4) & (pages <= 6))).all()
    assert PageTable.from_csr(**{n: t.to("meta") for n, t in GOOD.items()}, max_pages=4).pages.shape == (2, 4)


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


# Handles of prepare(), copied and saved with the module that holds them: each is prepared again by its first run.
ROOT = Path(portattn.__file__).parent.parent


class Layer(torch.nn.Module):
    """A module that holds a handle."""

    def __init__(self, q: torch.Tensor) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), device=q.device), requires_grad=False)
        self.handle = portattn.prepare("attention", q, q, q, causal=True)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return self.handle.run(q * self.scale, q, q, causal=True)


def saved_by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved_by_torch, "twice": lambda value: copy.deepcopy(pickle.loads(pickle.dumps(value))),
}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
def test_a_module_with_a_handle_is_copied(device: Device, how: str) -> None:
    q = torch.randn(2, 4, 5, 16, device=device.name)
    layer = Layer(q)
    right = layer(q)
    made = COPIES[how](layer)
    assert (made.handle.plan, repr(made.handle)) == (layer.handle.plan, repr(layer.handle))
    for _ in range(2):
        assert torch.equal(made(q), right)
    assert made.handle.plan == layer.handle.plan == portattn.last_plan()


@pytest.mark.parametrize("name", CALLS)
def test_a_copy_launches_as_the_original(device: Device, kept: str, name: str) -> None:
    call = random_call(problem(name), seed=1, device=device.name)
    arguments = given(call)
    handle = portattn.prepare(call.problem.op, **arguments)
    made = copy.deepcopy(handle)
    assert made._cached is None, "nothing is planned, compiled or allocated before the first run"
    assert_right(call, *made.run(**arguments))
    assert (made._cached is None, made.plan) == (handle._cached is None, handle.plan)
    torch.testing.assert_close(made.run(**arguments), handle.run(**arguments), rtol=0, atol=0)


def test_another_process_loads_it(tmp_path: Path) -> None:
    q = torch.randn(2, 4, 5, 16)
    handle = portattn.prepare("attention", q, q, q, causal=True)
    (tmp_path / "handle").write_bytes(pickle.dumps(handle))
    torch.save((q, handle.run(q, q, q, causal=True)), tmp_path / "tensors")
    program = (
        "import pickle, sys, torch\n" "handle = pickle.load(open(sys.argv[1], 'rb'))\n"
        "q, right = torch.load(sys.argv[2])\n" "torch.testing.assert_close(handle.run(q, q, q, causal=True), right)\n"
        "print(handle.plan.path)\n"
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "handle"), str(tmp_path / "tensors")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == handle.plan.path


def copied(**own: Any) -> tuple[Prepared, torch.Tensor]:
    q = torch.randn(2, 4, 5, 16)
    return COPIES["twice"](portattn.prepare("attention", q, q, q, causal=True, **own)), q


@pytest.mark.parametrize(
    ("name", "given", "was"), [("backend", "reference", "reference"), ("validate", True, "always")]
)
def test_a_copy_keeps_the_originals_backend_and_validate(name: str, given: Any, was: str) -> None:
    made, q = copied(**{name: given})
    with pytest.raises(portattn.ArgumentError, match=f"{name} is 'auto', but the call was prepared with '{was}'"):
        made.run(q, q, q, causal=True)
    made.run(q, q, q, causal=True, **{name: given})
    with portattn.settings(**{name: was}):
        assert made.run(q, q, q, causal=True).shape == q.shape
    with pytest.raises(portattn.ArgumentError, match=f"{name} is "):
        copied()[0].run(q, q, q, causal=True, **{name: given})


def test_a_copy_is_for_calls_like_the_originals() -> None:
    for changes, argument in (
        ({"causal": False}, "causal is False, but the call was prepared with True"),
        ({"q": torch.randn(2, 4, 6, 16)}, r"q is \(\(2, 4, 6, 16\)"),
        ({"k": torch.randn(2, 5, 4, 16).transpose(1, 2)}, r"k is \(\(2, 4, 5, 16\)"),
        ({"q": torch.randn(2, 4, 5, 16).half()}, "q is .*torch.float16"),
        ({"out": torch.empty(2, 4, 5, 15)}, r"out is \(\(2, 4, 5, 15\)"),
    ):
        made, q = copied()
        arguments: dict[str, Any] = {"q": q, "k": q, "v": q, "causal": True} | changes
        with pytest.raises(portattn.ArgumentError, match=rf"prepare\('attention'\)\.run: {argument}"):
            made.run(**arguments)


def test_a_copy_takes_the_device_and_the_settings_of_its_first_run() -> None:
    made, q = copied()
    with portattn.settings(backend="reference"):
        made.run(q, q, q, causal=True)
        assert made.plan.path == "reference"
    with pytest.raises(portattn.ArgumentError, match="backend is 'auto', but the call was prepared with 'reference'"):
        made.run(q, q, q, causal=True)
    made, q = copied()
    shapes = q.to("meta")
    with pytest.raises(portattn.ArgumentError, match=r"(q|k)\.device is '(meta|cpu)', but"):
        portattn.prepare("attention", q, q, q, causal=True).run(shapes, shapes, shapes, causal=True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert made.run(fake, fake, fake, causal=True).shape == q.shape
    assert torch.equal(made.run(q, q, q, causal=True), portattn.attention(q, q, q, causal=True))
