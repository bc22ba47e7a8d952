"""Searching the gradients' kernels: what is tried, how it is judged, and how two sweeps are joined."""

import pytest
import torch
from faketunable import TIMED, Made, Timed

from portattn.planning.registry import parse_target
from portattn.reference import blockwise
from portattn.schema.lowering import OF_ROWS, Launch
from portattn.schema.ops import BACKWARD
from portattn.tools.bench.tensors import Tensors
from portattn.tools.tune.classes import call_of, classes, from_sets, parse, workload
from portattn.tools.tune.core import combine_sweeps, swept
from portattn.tools.tune.run import tunables
from portattn.tools.tune.search import GradientChecker, witnesses
from portattn.tools.tune.tunable import BuiltCandidate, Choice, CompileResult, RunnableCandidate

SMALL = "attention_backward q=1,2,20,16 kv=1,1,37,16 dtype=fp16 causal"
PACKED = "varlen_attention_backward q=2,2,20,16 kv=2,1,20,16 dtype=fp16 causal"
WIDE = "attention_backward q=2,4,512,128 kv=2,4,512,128 dtype=bf16 causal"
CPU = torch.device("cpu")
FILE = f"""{TIMED}
[[entry]]
kernel = "*_backward"
when = ["widest<=64"]
launch = {{ block_m = 64, block_n = 32 }}
"""


def tile(m: int, n: int, rows_m: int = 0, rows_n: int = 0) -> Choice:
    own = {"rows_m": rows_m, "rows_n": rows_n} if rows_m else {}
    return Choice(launch={"block_m": m, "block_n": n, **own})


def core(name: str, target: str = "cuda:sm_90", toolchain: str = "triton==3.6.0"):
    where = parse_target(target, toolchain) if toolchain else parse_target(target)
    return next(one for one in tunables(where) if one.name == name), where


def test_the_problem_is_that_of_the_gradients() -> None:
    for text, op in ((SMALL, "attention"), (PACKED, "varlen_attention")):
        problem = workload(parse(text)).problem
        assert (problem.op, problem.causal, problem.needs_grad) == (BACKWARD[op], "bottom_right", False)
    names = [case.name for case in from_sets(("backward18", "backward_more"), None)]
    assert len(names) == 18 + 9
    assert [name for name in names if "dropout" in name]
    assert not any("deterministic" in name for name in names)


def test_gradients_under_dropout_are_judged_with_the_mask_of_their_seed() -> None:
    case = parse("attention_backward q=2,2,160,16 kv=2,2,160,16 dtype=fp32 causal dropout=0.25")
    t = Tensors.random(case, CPU)
    call = call_of(case, t)
    assert call.problem.dropout
    judge, nothing = GradientChecker(case, t, call), torch.empty(0)
    blockwise.run_backward(call)
    assert judge.errors(nothing).largest <= 1.0
    call.dropout_seed = call.dropout_seed + 1
    blockwise.run_backward(call)
    assert judge.errors(nothing).largest > 100.0


def test_a_sweep_changes_one_kernel() -> None:
    tunable, where = core("dense_backward")
    problem, base = workload(parse(WIDE)).problem, tile(64, 64)
    found = list(tunable.space(problem, where, base))
    assert len(found) > 50
    launches = [Launch().changed(dict(one.launch)) for one in found]
    before = Launch().changed(dict(base.launch))
    rows = [one for one in launches if one.of_rows() != before]
    fields = tuple(OF_ROWS)
    keys = [one for one in launches if any(getattr(one, name) != getattr(before, name) for name in fields)]
    assert rows
    assert keys
    assert not [one for one in keys if any(getattr(one.of_rows(), name) != getattr(before, name) for name in fields)]
    # 128 keys of two gradients 128 wide beside two tiles of 64 scores: 384 registers of a thread of four warps.
    assert not any(one.block_m == 128 and one.num_warps == 4 and one.block_n == 64 for one in launches)
    # Which the kernel of rows has room for: one gradient.
    assert any(one.rows_m == 128 and one.rows_warps == 8 for one in launches)


def test_what_is_joined_is_the_best_of_both_sweeps() -> None:
    base = tile(64, 64)
    keys, slow_keys = tile(128, 32, 64, 64), tile(32, 16, 64, 64)
    rows, other_rows = tile(64, 64, 32, 32), tile(64, 64, 16, 16)
    found = [
        Launch().changed(dict(one.launch)) for one in combine_sweeps(base, [keys, rows, base, other_rows, slow_keys])
    ]
    tiles = [(one.block_m, one.block_n, one.rows_m, one.rows_n) for one in found]
    assert tiles == [(128, 32, 32, 32), (128, 32, 16, 16), (32, 16, 32, 32), (32, 16, 16, 16)]
    assert list(combine_sweeps(base, [keys, base])) == []
    assert swept(swept(base)) == swept(base)


class FakeBackward:
    """dense_backward in name. Its kernels take as long as `us` says of their first block sizes; it computes rightly."""

    name, ops = "dense_backward", ("attention_backward",)

    def __init__(
        self, keys: dict[int, float], rows: dict[int, float], behaviour: str = "right",
        spills: dict[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.keys, self.rows, self.behaviour, self.spills = keys, rows, behaviour, spills or {}

    def space(self, problem, target, base):
        own = swept(base).launch
        yield from (Choice(launch=own | {"block_m": m}) for m in self.keys)
        yield from (Choice(launch=own | {"rows_m": m}) for m in self.rows)

    def joined(self, base, ranked):
        return combine_sweeps(base, ranked)

    def today(self, problem, target):
        return None

    def build(self, problem, choice, target) -> BuiltCandidate:
        launch = Launch().changed(dict(choice.launch))
        held = launch.block_m, launch.of_rows().block_m
        facts = {"registers": 128, "spills": self.spills.get(held[0], 0), "scratchpad_bytes": 1}
        one = Made(facts=facts, us=self.keys[held[0]] + self.rows[held[1]])

        def start(call) -> RunnableCandidate:
            delta = call.new_out()

            def run() -> None:
                made, _ = blockwise.run_backward(call)
                delta.copy_(made)
                if self.behaviour == "unwritten" and held == (32, 64):
                    call.grad_v[:, :, -1] = float("nan")
                if self.behaviour == "wrong" and held == (32, 64):
                    call.grad_k[..., -1, -1] += 0.5

            return RunnableCandidate(Timed(one, run), delta)

        return BuiltCandidate(
            f"{held} {problem.batch}", start, compile=lambda worker, seconds: CompileResult("", dict(one.facts))
        )


KEYS, ROWS = {64: 70.0, 32: 50.0, 16: 90.0}, {64: 40.0, 32: 30.0, 16: 60.0}


def test_the_best_of_both_is_chosen_and_written(class_of, search) -> None:
    tunable = FakeBackward(KEYS, ROWS)
    of = class_of(tunable, SMALL, file=FILE)
    assert of.incumbent == tile(64, 32)
    outcome, records = search(tunable, of)
    assert outcome.replaces
    assert (outcome.choice.launch["block_m"], outcome.choice.launch["rows_m"]) == (32, 32)
    assert outcome.ratio == pytest.approx(80 / 110)
    (result,) = outcome.results
    assert result.budget == 1.0
    assert 0 < result.error < 1.0
    assert not [one for one in records if getattr(one, "verdict", "") in ("wrong", "broke")]


@pytest.mark.parametrize("behaviour", ["wrong", "unwritten"])
def test_wrong_gradients_are_not_chosen(class_of, search, behaviour: str) -> None:
    tunable = FakeBackward(KEYS, ROWS, behaviour)
    outcome, records = search(tunable, class_of(tunable, SMALL, file=FILE))
    assert [one.choice.launch["block_m"] for one in records if getattr(one, "verdict", "") == "wrong"] == [32]
    assert (outcome.choice.launch["block_m"], outcome.choice.launch["rows_m"]) == (64, 32)


@pytest.mark.parametrize("as_today", [True, False])
def test_a_candidate_may_spill_what_todays_choice_does(class_of, search, as_today: bool) -> None:
    """Gradients' tiles that were the best on a chip spill more than is allowed elsewhere."""
    tunable = FakeBackward(KEYS, ROWS, spills={64: 900, 32: 880, 16: 901})
    outcome, records = search(tunable, class_of(tunable, SMALL, file=FILE), spills_as_today=as_today, spills=256)
    out = {one.choice.launch["block_m"] for one in records if getattr(one, "verdict", "") == "ruled out"}
    assert out == ({16} if as_today else {16, 32, 64})
    assert outcome.choice.launch["block_m"] == (32 if as_today else 64)


def test_witnesses_are_gradients_too() -> None:
    tunable, where = core("dense_backward")
    (of,) = classes([tunable], [workload(parse(WIDE))], None, where)
    (witness,) = witnesses(of)
    assert (witness.op, witness.grad_lse, witness.seqlens_q, witness.seqlens_k) == (
        BACKWARD["attention"], True, True, True,
    )  # fmt: skip
    assert tunable.build(witness, tile(64, 64), where).code
