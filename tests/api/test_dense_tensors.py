"""Nested and sparse tensors, in the place of any tensor of any public function: one error that names the argument."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import opcalls
import pytest
import torch
from opcalls import CALLS, perform, pretend_accelerator, problem
from support import Device, random_call

import portattn
from portattn.api import dispatch
from portattn.errors import ArgumentError
from portattn.launch import cache
from portattn.schema.ops import PUBLIC, ROWS, WRITERS


def nested(layout: torch.layout) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(like: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros((n, *like.shape[2:]), dtype=like.dtype, device=like.device) for n in (2, 3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that they are a prototype
            return torch.nested.nested_tensor(parts, layout=layout)

    return make


def compressed(like: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are in beta state
        return torch.zeros((4, 6), dtype=like.dtype, device=like.device).to_sparse_csr()


UNUSUAL: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "strided nested": (nested(torch.strided), "is 'a nested tensor'.*to_padded_tensor"),
    "jagged nested": (nested(torch.jagged), "is 'a jagged nested tensor'.*varlen_attention takes packed rows"),
    "coo": (lambda like: like.to_sparse(), r"is 'a torch.sparse_coo tensor'.*to_dense\(\)"),
    "csr": (compressed, r"is 'a torch.sparse_csr tensor'.*to_dense\(\)"),
}
LIMIT = "must be a dense, strided torch.Tensor"
# What of one kind of call another does not have.
MORE: dict[str, dict[str, Any]] = {
    "attention": {"alibi_slopes": True, "sinks": True, "bias": True, "mask": True},
    "decode": {"dtype": "bf16", "kv_format": "int8", "kv_scales": "head"},
    "paged": {"dtype": "bf16", "kv_format": "int8", "kv_scales": "token"},
    "sparse": {"log_weights": True},
    "sparse paged": {"magicpig": True},
    "mla ragged": {"sinks": True},
}


@pytest.fixture(params=list(UNUSUAL))
def unusual(request: pytest.FixtureRequest) -> tuple[Callable[[torch.Tensor], torch.Tensor], str]:
    return UNUSUAL[request.param]


def refused(name: str, said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match=f": {re.escape(name)} {said}") as caught:
        call()
    assert LIMIT in str(caught.value)
    assert caught.value.argument == name


@pytest.mark.parametrize("name", CALLS)
def test_every_tensor_of_every_operation(name: str, unusual: Any) -> None:
    make, said = unusual
    p = problem(name, **MORE.get(name, {}))
    arguments = opcalls.given(random_call(p, seed=1))
    tensors = [n for n, value in arguments.items() if isinstance(value, torch.Tensor)]
    assert set(tensors) <= set(ROWS[p.op].parameters)
    handle = portattn.prepare(p.op, **arguments)
    for argument in tensors:
        given = arguments | {argument: make(arguments[argument])}
        refused(argument, said, lambda given=given: perform(p.op, given))
        refused(argument, said, lambda given=given: portattn.prepare(p.op, **given))
        refused(argument, said, lambda given=given: portattn.plan(p.op, **given))
        refused(argument, said, lambda given=given: portattn.explain(p.op, **given))
        refused(argument, said, lambda given=given: handle.run(**given))


def test_every_parameter_is_among_them() -> None:
    asked: dict[str, set[str]] = {}
    for name in CALLS:
        p = problem(name, **MORE.get(name, {}))
        asked.setdefault(p.op, set()).update(opcalls.given(random_call(p, seed=1)))
    # The same loop over the row's tensors refuses them: these are the ones that the other calls have.
    common = {"alibi_slopes", "sinks", "bias", "mask", "magicpig_bits", "magicpig_tables", "dropout_seed"}
    common |= {"q_scale", "k_scale", "v_scale", "kv_scale", "k_block_scale", "v_block_scale", "tree_mask", "block_mask"}
    for op in set(PUBLIC) - set(WRITERS):  # theirs: test_cache_writers.py
        row = ROWS[op]
        assert set(row.parameters) - asked[op] <= common, op


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("other", ["number", "tensor"])
def test_magicpigs_numbers(place: int, other: str, unusual: Any) -> None:
    make, said = unusual
    arguments = opcalls.given(random_call(problem("sparse"), seed=1))
    heads = torch.full((4,), 3, dtype=torch.int32)
    numbers: list[Any] = [heads, heads] if other == "tensor" else [3, 3]
    numbers[place] = make(heads.expand(2, 2, 4))
    name = ("magicpig's K", "magicpig's L")[place]
    refused(name, said, lambda: perform("sparse_attention", arguments, magicpig=tuple(numbers)))
    mixed = (heads, 3) if place else (3, heads)
    counts = make(arguments["counts"])
    refused("counts", said, lambda: perform("sparse_attention", arguments, magicpig=mixed, counts=counts))


@pytest.mark.parametrize("name", ["paged", "sparse paged", "mla"])
def test_beside_a_page_table(name: str, unusual: Any) -> None:
    """Its lengths are computed of the size of the pages, before anything else is looked at."""
    make, said = unusual
    p = problem(name)
    arguments = opcalls.given(random_call(p, seed=1))
    lengths = arguments.pop("seqlens_k")
    table = arguments["page_table"]
    arguments["page_table"] = portattn.PageTable(table, torch.full_like(lengths, 1), torch.full_like(lengths, 2))
    pages = ROWS[p.op].tensors["k"]
    refused(pages, said, lambda: perform(p.op, arguments, **{pages: make(arguments[pages])}))
    refused("seqlens_k", said, lambda: perform(p.op, arguments, seqlens_k=make(lengths.expand(2, 2, 3))))


def test_page_tables(unusual: Any) -> None:
    make, said = unusual
    ints = torch.zeros(2, dtype=torch.int32)
    fields: dict[str, torch.Tensor] = {"pages": ints[:, None], "counts": ints, "last_page_len": ints}
    rows = {"indptr": torch.zeros(3, dtype=torch.int32), "indices": ints, "last_page_len": ints}
    other = make(torch.zeros(2, 2, dtype=torch.int32))
    for name in fields:
        refused(name, said, lambda name=name: portattn.PageTable(**(fields | {name: other})))
    for name in rows:
        refused(name, said, lambda name=name: portattn.PageTable.from_csr(**(rows | {name: other})))


def test_partial_results(unusual: Any) -> None:
    make, said = unusual
    out, lse = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3)
    odd = make(out)
    refused("outs[1]", said, lambda: portattn.merge_states([out, odd], [lse, lse]))
    refused("outs[0]", said, lambda: portattn.merge_states([odd], [lse]))
    refused("lses[0]", said, lambda: portattn.merge_states([out], [make(lse)]))
    refused("outs", said, lambda: portattn.merge_states(odd, [lse, lse]))
    refused("lses", said, lambda: portattn.merge_states([out, out], odd))


def test_places_for_results(unusual: Any) -> None:
    make, said = unusual
    q = torch.zeros(2, 4, 3, 8)
    handle = portattn.prepare("attention", q, q, q, return_lse=True)
    for name, like in (("out", q), ("lse", q[..., 0])):
        refused(name, said, lambda name=name, like=like: handle.run(q, q, q, return_lse=True, **{name: make(like)}))
    with pytest.raises(ArgumentError, match=r"out is 'int', but must be a torch\.Tensor of"):
        handle.run(q, q, q, return_lse=True, out=3)


def test_specs_of_a_warmup(unusual: Any) -> None:
    make, said = unusual
    q = torch.zeros(2, 4, 3, 8)
    spec = {"op": "attention", "q": "fp32[2,4,3,8]", "k": make(q), "v": "fp32[2,4,3,8]"}
    refused("specs[0].k", said, lambda: portattn.warmup([spec], device="cpu"))


def test_a_jagged_tensor_as_packed_rows() -> None:
    """What the error advises."""
    sequences = [torch.randn(n, 2, 16) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(sequences, layout=torch.jagged)
    rows, beginnings = jagged.values(), jagged.offsets().int()
    out = portattn.varlen_attention(rows, rows, rows, beginnings, beginnings, 5, 5)
    alone = portattn.attention(*[sequences[1][None]] * 3, layout="bshd")[0]
    torch.testing.assert_close(out[3:], alone)


def test_a_call_like_a_cached_one_is_refused(device: Device, unusual: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = unusual
    if device.path == "interpreter":
        pretend_accelerator(monkeypatch)
    q = torch.randn(2, 4, 3, 16, device=device.name)
    cache.forget()
    expected = portattn.attention(q, q, q.clone())
    planned: list[Any] = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *given: planned.append(given) or run(*given))
    other = q.clone()
    assert torch.equal(portattn.attention(q, q, other), expected)
    assert not planned, "it is a cached one"
    refused("v", said, lambda: portattn.attention(q, q, make(q)))
    refused("q", said, lambda: portattn.attention(make(q), q, other))
