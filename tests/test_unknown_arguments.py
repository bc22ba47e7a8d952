"""An argument that an operation does not have: the error says what it is called here, as docs/coming-from.md does."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from places import tables

import portattn
from portattn.api.argument_errors import TABLES, ArgumentRow, Table, register, require, unknown_argument
from portattn.schema.ops import PUBLIC

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
ROWS = [(table, row) for table in TABLES for row in table.rows]
ALL = (*PUBLIC, "merge_states")
Q = torch.zeros(1, 2, 3, 8)
INTS = torch.zeros(1, dtype=torch.int32)


def tables_of_the_page() -> Iterator[tuple[str, tuple[str, str], list[tuple[str, str]]]]:
    heading, rows = "", []
    for line in [*PAGE.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        if line.startswith("|"):
            left, right = (cell.strip() for cell in line.strip("|").split(" | "))
            rows.append((left, right))
        elif rows:
            head, rule, *body = rows
            assert set("".join(rule)) <= {"-", " "}, rule
            yield heading, head, body
            rows = []


def test_the_page_and_the_table_are_one() -> None:
    page = list(tables_of_the_page())
    assert page == [(t.library, tuple(t.head), [tuple(row) for row in t.rows]) for t in TABLES]


def parameters(op: str) -> set[str]:
    return set(inspect.signature(getattr(portattn, op)).parameters)


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[row.theirs for _, row in ROWS])
def test_a_row_names_what_there_is(table: Table, row: ArgumentRow) -> None:
    known = set().union(*(parameters(op) for op in table.ops)) | set(ALL) | {"None"}
    given = set(row.arguments)
    assert given <= known, f"{table.ops} have no argument {given - known}"
    if row.ours.startswith("the same"):
        assert all(any(name in parameters(op) for op in table.ops) for name in row.names), row
    else:
        assert given or row.ours.startswith(("not needed", "no:", "natural")), row


# What somebody who comes from another library writes, in which operation, and what must be said.
WRITTEN = tables(__file__)["written"]


@pytest.mark.parametrize(("op", "name", "said"), WRITTEN, ids=[f"{op} {name}" for op, name, _ in WRITTEN])
def test_an_unknown_argument_is_named_with_what_it_is_here(op: str, name: str, said: str) -> None:
    """Also where what must be given is missing, as it is where it was given under another name."""
    for given in ([Q, Q, Q], []):
        with pytest.raises(TypeError) as raised:
            getattr(portattn, op)(*given[: len(parameters(op))][:2], **{name: INTS})
        error = raised.value
        assert isinstance(error, portattn.UnknownArgument)
        assert isinstance(error, portattn.ArgumentError)
        assert str(error).startswith(f"{op} has no argument {name!r}: ")
        assert said in str(error)
        assert (error.op, error.argument) == (op, name)


def test_no_row_is_silent() -> None:
    """Each name of the table, in each operation that lacks it, is answered by its row or by who has it."""
    for table, row in ROWS:
        for name in row.names:
            for op in set(table.ops) - {op for op in ALL if name in parameters(op)}:
                text = str(unknown_argument(op, [name]))
                assert str(row) in text or "it is an argument of" in text, text


# What is given by position beyond what an operation takes so, and what the error must say.
EXCESS: list[tuple[str, int, tuple[Any, ...], str]] = [
    ("attention", 3, (True,), "(q, k, v), but 4 were given; all others are given by name: did you mean causal=True?"),
    ("attention", 3, (None, 0.0, True), "but 6 were given; all others are given by name: did you mean causal=True?"),
    ("attention", 3, (Q.bool(),), "did you mean mask=...?"), ("attention", 3, (Q,), "did you mean bias=...?"),
    ("attention", 3, (0.125,), "did you mean scale=0.125?"), ("attention", 3, ("bshd",), "did you mean layout='bshd'?"),
    ("attention", 3, ("top_left",), "did you mean causal='top_left'?"),
    ("attention", 3, ((3, 0),), "did you mean window=(3, 0)?"),
    ("attention", 3, (INTS,), "did you mean seqlens_k=...?"),
    ("attention", 3, (None,), "all others are given by name, from q_scale on"),
    ("varlen_attention", 7, (0.0,), "cu_seqlens_k, max_seqlen_q, max_seqlen_k), but 8 were given"),
    ("decode_attention", 4, ("triton",), "did you mean backend='triton'?"),
    ("paged_attention", 5, (INTS,), "did you mean cu_seqlens_q=...?"),
    ("sparse_attention", 5, (INTS[None],), "did you mean page_table=...?"),
    ("mla_attention", 5, (0.1,), "did you mean scale=0.1?"),
    ("merge_states", 2, (1,), "merge_states() takes 2 arguments by position (outs, lses), but 3 were given"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "taken", "excess", "said"), EXCESS)
def test_too_many_by_position_are_told_how_many_and_which(op, taken, excess, said):
    given = (*[Q] * taken, *excess)
    calls = [lambda: getattr(portattn, op)(*given)]
    if op != "merge_states":
        calls += [lambda: portattn.plan(op, *given), lambda: portattn.explain(op, *given)]
        calls += [lambda: portattn.prepare(op, *given)]
    for call in calls:
        with pytest.raises(TypeError) as raised:
            call()
        text = str(raised.value)
        assert text.startswith(f"{op}() takes {taken} arguments by position (")
        assert said in text
        for name in parameters(op):
            if f"did you mean {name}=" in text:
                break
        else:
            assert "did you mean" not in text


def test_a_handles_run_says_so_too_and_a_wrong_name_comes_first() -> None:
    handle = portattn.prepare("attention", Q, Q, Q)
    with pytest.raises(TypeError, match=r"attention\(\) takes 3 arguments by position .*did you mean causal=True\?"):
        handle.run(Q, Q, Q, True)
    with pytest.raises(portattn.UnknownArgument, match="no argument 'is_causal'"):
        portattn.attention(Q, Q, Q, True, is_causal=True)  # type: ignore[arg-type, call-arg]


def test_several_names_of_one_row_are_one_answer() -> None:
    with pytest.raises(portattn.UnknownArgument) as raised:
        portattn.attention(query=Q, key=Q, value=Q, is_causal=True)  # type: ignore[arg-type, call-arg]
    text = str(raised.value)
    assert text.startswith("attention has no argument 'query', 'key' or 'value': from torch: query, key, value -> q,")
    assert text.count("->") == 2
    assert "Nor has it 'is_causal': " in text


@pytest.mark.parametrize("asking", ["plan", "explain", "prepare"])
def test_planning_says_the_same(asking: str) -> None:
    with pytest.raises(portattn.UnknownArgument, match="attention has no argument 'is_causal': from torch"):
        getattr(portattn, asking)("attention", Q, Q, Q, is_causal=True)


def test_a_handles_run_knows_its_own_arguments() -> None:
    handle = portattn.prepare("attention", Q, Q, Q)
    with pytest.raises(portattn.UnknownArgument, match=r"attention has no argument 'output': did you mean out\?"):
        handle.run(Q, Q, Q, output=Q)
    with pytest.raises(portattn.UnknownArgument, match="attention has no argument 'sm_scale': from FlashInfer"):
        handle.run(Q, Q, Q, sm_scale=1.0)
    assert handle.run(Q, Q, Q).shape == Q.shape  # type: ignore[union-attr]


def test_a_specs_unknown_argument_is_named() -> None:
    spec = {"op": "attention", **dict.fromkeys("qkv", "fp32[1,2,3,8]"), "sm_scale": 1.0}
    with pytest.raises(portattn.ArgumentError, match=r"specs\[0\].*'sm_scale': from FlashInfer: sm_scale -> scale"):
        portattn.warmup([spec])


MISSING: list[tuple[str, tuple[Any, ...], str]] = [
    ("attention", (), "attention() missing 3 required positional arguments: 'q', 'k', and 'v'"),
    ("attention", (Q,), "attention() missing 2 required positional arguments: 'k' and 'v'"),
    ("decode_attention", (Q, Q, Q), "decode_attention() missing 1 required positional argument: 'seqlens_k'"),
    ("paged_attention", (Q, Q, Q), "paged_attention() missing 1 required positional argument: 'page_table'"),
    ("mla_attention", (Q, Q, Q, INTS), "mla_attention() missing 1 required keyword-only argument: 'scale'"),
    ("merge_states", ([Q],), "merge_states() missing 1 required positional argument: 'lses'"),
    ("varlen_attention", (Q, Q, Q, INTS, INTS),
     "varlen_attention() missing 2 required positional arguments: 'max_seqlen_q' and 'max_seqlen_k'"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "given", "said"), MISSING, ids=[said for _, _, said in MISSING])
def test_what_is_missing_is_pythons_own_error(op: str, given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(TypeError) as raised:
        getattr(portattn, op)(*given)
    assert str(raised.value) == said
    assert not isinstance(raised.value, portattn.ArgumentError)


def test_pythons_words_are_pythons() -> None:
    """What `require` says of a function, and what Python says of the same function without defaults."""

    def plain(a: int, b: int, c: int, *, d: int, e: int) -> None: ...

    @register
    def ours(a: int, b: int, c: int, *, d: int, e: int, **unknown: NoReturn) -> None:
        require("ours", {"a": a, "b": b, "c": c, "d": d, "e": e})

    for given in ((), (1,), (1, 2), (1, 2, 3)):
        with pytest.raises(TypeError) as pythons:
            plain(*given)  # type: ignore[misc, call-arg]
        with pytest.raises(TypeError) as said:
            ours(*given)  # type: ignore[misc, call-arg]
        assert str(said.value) == str(pythons.value).replace(plain.__qualname__, "ours")
    assert ours(1, 2, 3, d=4, e=5) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("op", ALL)
def test_signatures_show_what_a_caller_may_write(op: str) -> None:
    signature = inspect.signature(getattr(portattn, op))
    assert not {"unknown", "excess"} & set(signature.parameters)
    assert "missing" not in str(signature)
    first = next(iter(signature.parameters.values()))
    assert first.default is first.empty
    assert re.search(r"def \w+\(", inspect.getsource(getattr(portattn, op)))
