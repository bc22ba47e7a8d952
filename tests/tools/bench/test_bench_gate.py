"""Tensors of every kind of case, portattn's calls of them, and the gate, on the CPU."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tiny import CASES, distinct

from portattn.tools.bench import gate
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import CORE, OURS, PREPARED, Contender, ours, own, plan_of
from portattn.tools.bench.tensors import Tensors

CPU = torch.device("cpu")
KINDS = {case.name: case for case in distinct() if not case.backward}  # those: test_bench_backward.py


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return KINDS[request.param]


def test_portattn_passes(case):
    tensors = Tensors.random(case, CPU)
    admitted = gate.admit(case, tensors, own(case, tensors))
    assert admitted.refused == {}
    assert list(admitted.contenders) == ([OURS, PREPARED] if case.reads_cache else [OURS])
    assert all(0 <= error <= admitted.budget for error in admitted.errors.values())
    assert plan_of(case, tensors).problem.op == case.op


def test_the_wrong_are_refused(case):
    """One wrong value in the last row of the last sequence's last head is seen, and so is what is nearly right."""
    tensors = Tensors.random(case, CPU)
    right = ours(case, tensors)

    def spoiled(value: float) -> Contender:
        def run() -> torch.Tensor:
            out = right.shaped(right.run()).clone()
            last = (-1, -1, 0) if case.packed else (-1, -1, case.queries[-1] - 1, 0)
            out[last] += value
            return out

        return Contender(run)

    def fails() -> Contender:
        raise RuntimeError("no kernel here\nsecond line")

    builds = {
        "off by one value": lambda: spoiled(0.5), "NaN": lambda: spoiled(float("nan")),
        "scaled": lambda: Contender(lambda: right.shaped(right.run()) * 1.5),
        "of another shape": lambda: Contender(lambda: right.shaped(right.run())[..., :-1]), "failing": fails,
        "right": lambda: right,
    }  # fmt: skip
    admitted = gate.admit(case, tensors, builds)
    assert list(admitted.contenders) == ["right"]
    assert admitted.refused["failing"] == "no kernel here"
    assert "over the budget" in admitted.refused["off by one value"]
    assert admitted.refused["NaN"] == "not finite somewhere: not timed"
    assert admitted.refused["of another shape"].startswith("returns (")


def test_a_part_is_a_case_of_its_own(case):
    """The oracle of one sequence and head is what the op gives for them in the whole case."""
    tensors = Tensors.random(case, CPU)
    one, part = tensors.part(case, case.batch - 1, case.heads_k - 1)
    assert (one.batch, one.heads_k, one.packed, one.queries, one.keys) == (
        1, 1, False, case.queries[-1:], case.keys[-1:],
    )  # fmt: skip
    assert part.k.data_ptr() >= tensors.k.data_ptr()
    assert part.k.untyped_storage().data_ptr() == tensors.k.untyped_storage().data_ptr()
    admitted = gate.admit(one, part, own(one, part))
    assert admitted.refused == {}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.page_size])
def test_every_page_has_one_owner(name):
    case = CASES[name]
    table = Tensors.random(case, CPU).page_table
    owned = [
        page for row, keys in zip(table.tolist(), case.keys, strict=True) for page in row[: -(-keys // case.page_size)]
    ]
    assert sorted(owned) == list(range(len(owned)))
    assert len(owned) == Tensors.random(case, CPU).k.shape[0]


def test_chosen_tokens_differ_and_exist():
    case = msgspec.structs.replace(CASES["seed sparse"], batch=2, lengths_k=(70, 9))
    tensors = Tensors.random(case, CPU)
    for keys, heads in zip(case.keys, tensors.indices.tolist(), strict=True):
        for tokens in heads:
            assert len(set(tokens)) == case.tokens
            assert all(0 <= token < keys for token in tokens)


def test_the_sample_is_small_and_reaches_both_ends():
    large = msgspec.structs.replace(CASES["seed decode"], batch=128, heads_q=32, heads_k=8, lengths_k=())
    pairs = gate.sample(large)
    assert len(pairs) == len(set(pairs)) == gate.CHECKED_PARTS
    assert (pairs[0], pairs[-1]) == ((0, 0), (127, 7))
    assert {head for _, head in pairs} == set(range(8))
    assert gate.sample(msgspec.structs.replace(large, batch=1, heads_q=1, heads_k=1)) == [(0, 0)]


def test_a_lost_device_is_told_with_who_ran():
    case = CASES["seed decode"]
    tensors = Tensors.random(case, CPU)

    def breaks():
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(gate.DeviceLost, match=r"breaker: an illegal memory access.*lost to this process: gone") as lost:
        gate.admit(case, tensors, {"breaker": breaks}, lambda: "gone")
    assert lost.value.name == "breaker"


def test_the_context_is_around_the_call():
    case, inside = CASES["seed decode"], []

    class Around:
        def __enter__(self):
            inside.append(True)

        def __exit__(self, *_):
            inside.pop()

    tensors = Tensors.random(case, CPU)
    right = ours(case, tensors)

    def run():
        assert inside
        return right.run()

    admitted = gate.admit(case, tensors, {"within": lambda: Contender(run, right.shaped, Around)})
    assert list(admitted.contenders) == ["within"]
    assert not inside


def test_the_core_is_a_contender_when_it_is_asked_for():
    case = CASES["seed decode"]
    tensors = Tensors.random(case, CPU)
    assert CORE not in own(case, tensors)
    admitted = gate.admit(case, tensors, own(case, tensors, core=True))
    assert list(admitted.contenders) == [OURS, PREPARED]
    assert "triton" in admitted.refused[CORE]  # there is no device for it here
    assert admitted.contenders[OURS].path == plan_of(case, tensors).path == "sdpa"


def test_the_path_is_the_one_that_ran(monkeypatch):
    """A kernel that does not compile here: what was planned before the call is not what ran."""
    case = next(case for case in KINDS.values() if case.op == "attention")
    tensors = Tensors.random(case, CPU)
    planned = plan_of(case, tensors)
    elsewhere = msgspec.structs.replace(planned, path="triton")
    monkeypatch.setattr("portattn.tools.bench.contenders.plan_of", lambda *given: elsewhere)
    assert ours(case, tensors).path == "triton"
    admitted = gate.admit(case, tensors, {OURS: lambda: ours(case, tensors)})
    assert admitted.contenders[OURS].path == planned.path != "triton"
