"""Nothing is legal too: no batch, no rows, no keys, no pages, no columns, no tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opcalls import CALLS, given, paths, perform, problem, watched
from support import Device, poisoned, random_call


@pytest.fixture(params=["reference", "core"])
def way(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Keyword arguments of either path. An empty tensor has no memory that might be touched: addresses are watched."""
    if request.param == "core" and device.path == "interpreter":
        with watched(monkeypatch):
            yield paths(device)["core"]
    else:
        yield paths(device)[request.param]


def int32(device: Device, *values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device.name)


def assert_nothing(result: tuple[torch.Tensor, torch.Tensor], out: tuple[int, ...], lse: tuple[int, ...]) -> None:
    """Zeros and an LSE of -inf, of these shapes."""
    assert (tuple(result[0].shape), tuple(result[1].shape)) == (out, lse)
    assert not result[0].any()
    assert not result[0].isnan().any()
    assert torch.isneginf(result[1]).all()


BATCHED = {
    # arguments whose first axis is the batch; cu_seqlens begin with one 0 more
    "attention": ("q", "k", "v", "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"),
    "decode": ("q", "k_cache", "v_cache", "seqlens_k", "leftpad_k"),
    "paged": ("q", "page_table", "seqlens_k"),
    "sparse": ("q", "k_cache", "v_cache", "indices", "counts", "seqlens_k"),
    "sparse paged": ("q", "indices", "counts", "page_table", "seqlens_k"),
    "mla": ("q_nope", "q_rope", "page_table", "seqlens_k"),
}


@pytest.mark.parametrize("name", BATCHED)
def test_no_sequence(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    arguments = given(call)
    empty = {n: arguments[n][:0] for n in BATCHED[name]}
    out, lse = perform(call.problem.op, arguments | empty | {"validate": True}, **way)
    assert tuple(out.shape) == (0, 4, call.problem.seq_q, call.problem.head_dim_v)
    assert tuple(lse.shape) == (0, 4, call.problem.seq_q)


@pytest.mark.parametrize("name", ["varlen", "ragged", "mla ragged"])
@pytest.mark.parametrize("rows", [0, 5])
def test_no_packed_sequence(device: Device, way: dict[str, str], name: str, rows: int) -> None:
    """Rows of no sequence are results as well."""
    call = random_call(problem(name), device=device.name)
    arguments = given(call)
    changes = {n: arguments[n][:rows] for n in ("q", "q_nope", "q_rope") if n in arguments}
    changes |= {n: arguments[n][:0] for n in ("page_table", "seqlens_k") if n in arguments}
    changes |= {n: int32(device, 0) for n in ("cu_seqlens_q", "cu_seqlens_k") if n in arguments}
    sinks = torch.ones(4, device=device.name)
    with poisoned():
        result = perform(call.problem.op, arguments | changes | {"sinks": sinks}, **way)
    assert_nothing(result, (rows, 4, call.problem.head_dim_v), (4, rows))


@pytest.mark.parametrize("name", ["varlen", "ragged", "mla ragged"])
def test_sequences_without_rows(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    arguments = given(call)
    changes = {"cu_seqlens_q": int32(device, 0, 0, 0, 0)}
    with poisoned():
        result = perform(call.problem.op, arguments | changes, **way)
    assert_nothing(result, (33, 4, call.problem.head_dim_v), (4, 33))
    changes |= {n: arguments[n][:0] for n in ("q", "q_nope", "q_rope") if n in arguments}
    assert_nothing(perform(call.problem.op, arguments | changes, **way), (0, 4, call.problem.head_dim_v), (4, 0))


@pytest.mark.parametrize("name", [n for n in CALLS if n != "varlen"])
def test_sequences_without_keys(device: Device, way: dict[str, str], name: str) -> None:
    """With a sink, a row still has that as its LSE."""
    call = random_call(problem(name), device=device.name)
    p, arguments = call.problem, given(call)
    arguments["seqlens_k"] = int32(device, 0, 0, 0)
    if p.page_size:  # what a table then holds is nobody's business
        arguments["page_table"] = torch.full_like(arguments["page_table"], 2**31 - 1)
    out = (33, 4, p.head_dim_v) if p.packed else (3, 4, p.seq_q, p.head_dim_v)
    lse = (4, 33) if p.packed else (3, 4, p.seq_q)
    with poisoned():
        assert_nothing(perform(p.op, arguments, **way), out, lse)
        sunk = perform(p.op, arguments | {"sinks": torch.full((4,), 0.5, device=device.name)}, **way)
    assert not sunk[0].any()
    finite = torch.isfinite(sunk[1])
    assert (sunk[1][finite] == 0.5).all()
    assert finite.all() == (name != "attention")  # whose padding rows have no sink


@pytest.mark.parametrize("name", ["paged", "ragged", "sparse paged", "mla", "mla ragged"])
def test_no_columns_and_no_pages(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    p, arguments = call.problem, given(call)
    arguments["seqlens_k"] = int32(device, 0, 0, 0)
    if name == "sparse paged":
        arguments |= {"counts": torch.zeros_like(arguments["counts"]), "validate": True}
    out = (33, 4, p.head_dim_v) if p.packed else (3, 4, p.seq_q, p.head_dim_v)
    lse = (4, 33) if p.packed else (3, 4, p.seq_q)
    narrow = {"page_table": arguments["page_table"][:, :0]}
    none = {n: arguments[n][:0] for n in ("k_pages", "v_pages", "k_cache", "v_cache", "kv_pages") if n in arguments}
    for changes in (narrow, none, narrow | none):
        with poisoned():
            assert_nothing(perform(p.op, arguments | changes, **way), out, lse)
    if name == "sparse paged":  # a full table of a cache without pages: there is no key, whatever the table says
        changes = none | {"seqlens_k": None}
        assert_nothing(perform(p.op, arguments | changes, **way), out, lse)


@pytest.mark.parametrize("name", ["attention", "varlen", "decode", "sparse"])
def test_no_keys_at_all(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    p, arguments = call.problem, given(call)
    for n in ("k", "v", "k_cache", "v_cache"):
        if n in arguments:
            arguments[n] = arguments[n][:0] if name == "varlen" else arguments[n][:, :, :0]
    for n in ("seqlens_k", "leftpad_k", "cu_seqlens_k", "counts"):
        if n in arguments:
            arguments[n] = torch.zeros_like(arguments[n])
    out = (33, 4, 24) if p.packed else (3, 4, p.seq_q, 24)
    with poisoned():
        assert_nothing(perform(p.op, arguments, **way), out, (4, 33) if p.packed else (3, 4, p.seq_q))


@pytest.mark.parametrize("name", ["attention", "decode", "paged", "mla"])
def test_no_query_rows(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    arguments = given(call)
    for n in ("q", "q_nope", "q_rope"):
        if n in arguments:
            arguments[n] = arguments[n][:, :, :0]
    for n in ("seqlens_q", "leftpad_q"):
        if n in arguments:
            arguments[n] = torch.zeros_like(arguments[n])
    out, lse = perform(call.problem.op, arguments, **way)
    assert tuple(out.shape) == (3, 4, 0, call.problem.head_dim_v)
    assert tuple(lse.shape) == (3, 4, 0)


@pytest.mark.parametrize("name", ["sparse", "sparse paged"])
def test_no_places_for_tokens(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    arguments = given(call)
    changes = {"indices": arguments["indices"][..., :0], "counts": torch.zeros_like(arguments["counts"])}
    for splits in (None, 2):
        with poisoned():
            result = perform("sparse_attention", arguments | changes, num_splits=splits, **way)
        assert_nothing(result, (3, 4, 1, 24), (3, 4, 1))
