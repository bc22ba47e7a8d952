"""A class from its space to its choice: what is never timed, never chosen, and when an incumbent goes."""

from collections import Counter

import pytest
from faketunable import OTHER, SMALL, TIMED, FakeClock, FakeTunable, Made, choice

from portattn.tools.tune import race
from portattn.tools.tune.log import History
from portattn.tools.tune.records import CandidateRecord, CodeRecord, Trying
from portattn.tools.tune.run import red
from portattn.tools.tune.search import TuningDeviceLost


def verdicts(records) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for record in records:
        if isinstance(record, CandidateRecord):
            found.setdefault(record.choice.launch["block_n"], []).append(record.verdict)
    return found


def test_the_fastest_replaces_the_incumbent(class_of, search):
    tunable = FakeTunable({64: Made(100.0), 32: Made(80.0), 128: Made(90.0)})
    outcome, records = search(tunable, class_of(tunable))
    assert (outcome.choice, outcome.incumbent) == (choice(32), choice(64))
    assert (outcome.replaces, outcome.measured) == (True, True)
    assert (outcome.ratio, outcome.runner_up) == (pytest.approx(0.8), choice(128))
    (result,) = outcome.results
    assert (result.times.least, result.times.median) == (pytest.approx(80.0), pytest.approx(80.4))
    assert (result.incumbent, result.runner_up) == (pytest.approx(100.5), pytest.approx(90.45))
    assert 0 <= result.error <= result.budget
    last = {block_n: words[-1] for block_n, words in verdicts(records).items()}
    assert last == {32: "chosen", 64: "slower", 128: "slower"}
    assert red(records, {outcome.name: outcome}) == []


@pytest.mark.parametrize("behaviour", ["wrong", "nan", "raises"])
def test_what_is_wrong_is_never_timed_and_never_chosen(class_of, search, behaviour):
    tunable = FakeTunable({64: Made(100.0), 32: Made(1.0, behaviour), 128: Made(90.0)})
    clock = FakeClock()
    outcome, records = search(tunable, class_of(tunable), clock=clock)
    assert outcome.choice == choice(128)
    assert verdicts(records)[32] == ["broke" if behaviour == "raises" else "wrong"]
    (record,) = [r for r in records if isinstance(r, CandidateRecord) and r.choice == choice(32)]
    assert record.times is None
    if behaviour == "wrong":
        assert record.error > record.budget > 0
        assert 0 < record.mean_error < record.error
    if behaviour == "raises":
        assert record.reason == "RuntimeError: no kernel image"
    assert len(red(records, {outcome.name: outcome})) == 1


@pytest.mark.parametrize(("us", "behaviour"), [(10.0, "wrong after 1"), (85.0, "wrong after 4")])
def test_what_goes_wrong_while_it_is_timed_is_not_chosen(class_of, search, us, behaviour):
    tunable = FakeTunable({64: Made(100.0), 32: Made(us, behaviour), 128: Made(90.0)})
    outcome, records = search(tunable, class_of(tunable))
    assert (outcome.choice, verdicts(records)[32][-1]) == (choice(128), "wrong")


def test_within_the_noise_the_incumbent_stays(class_of, search):
    tunable = FakeTunable({64: Made(100.0), 32: Made(100.0 * (1 - race.NOISE / 2))})
    outcome, records = search(tunable, class_of(tunable))
    assert (outcome.choice, outcome.replaces) == (choice(64), False)
    assert {n: words[-1] for n, words in verdicts(records).items()} == {64: "kept", 32: "within noise"}


def test_a_restless_card_asks_for_more(class_of, search):
    """3 % faster is enough on a steady clock, and not where rounds differ by 10 %."""
    tunable = FakeTunable({64: Made(100.0), 32: Made(97.0)})
    of = class_of(tunable)
    assert search(tunable, of)[0].choice == choice(32)
    outcome, _ = search(tunable, of, clock=FakeClock(jitter=0.05))
    assert outcome.choice == choice(64)
    assert outcome.noise > 0.03


def test_the_clearly_slower_are_abandoned_after_a_probe(class_of, search):
    tunable = FakeTunable({64: Made(100.0), 32: Made(100.0 * race.ABANDON + 1), 128: Made(110.0)})
    clock = FakeClock()
    _, records = search(tunable, class_of(tunable), clock=clock, rounds=3)
    assert (verdicts(records)[32], clock.thorough.count(False)) == (["slower", "abandoned"], 3)
    assert clock.thorough.count(True) == 2 * (3 + 1)
    # Only so many finalists take turns.
    tunable = FakeTunable({64: Made(100.0)} | {n: Made(100.0 + i) for i, n in enumerate((1, 2, 4, 8, 16, 32, 128))})
    clock = FakeClock()
    search(tunable, class_of(tunable), clock=clock, rounds=1)
    assert clock.thorough.count(True) == (race.FINALISTS + 1) * 2


def test_compiling_rules_out_before_the_device_is_asked(class_of, search):
    good = {"registers": 128, "scratchpad_bytes": 1000, "num_warps": 4, "spills": 0}
    tunable = FakeTunable(
        {
            64: Made(100.0), 1: Made(1.0, facts=good | {"spills": 8}),
            2: Made(1.0, facts=good | {"scratchpad_bytes": 10**6}), 4: Made(1.0, facts=good | {"registers": 256}),
            8: Made(1.0, failure="ttgir: no"), 16: Made(1.0, facts=good | {"serialized_wgmma": 2}),
            32: Made(1.0, facts=good | {"registers": 255, "num_warps": 16}), 128: Made(90.0, facts=good),
        }
    )  # fmt: skip
    outcome, records = search(tunable, class_of(tunable))
    assert (outcome.choice, set(tunable.started)) == (choice(128), {64, 128})
    reasons = {r.choice.launch["block_n"]: r.reason for r in records if getattr(r, "verdict", "") == "ruled out"}
    assert reasons == {
        1: "8 bytes spilled, 0 allowed", 2: "1000000 bytes of shared memory, sm_90 has 232448",
        4: "256 registers, sm_90 has 255", 8: "ttgir: no", 16: "ptxas serialised its wgmma instructions",
        32: "over-subscribed: 1 programs a core are asked for, 0 fit",
    }  # fmt: skip
    assert red(records, {outcome.name: outcome}) == []
    assert search(tunable, class_of(tunable), spills=8)[0].choice == choice(1)


def test_twins_and_what_the_planner_refuses_are_left_out(class_of, search):
    tunable = FakeTunable({64: Made(100.0), 1: Made(90.0, "twin"), 2: Made(90.0, "twin"), 4: Made(1.0, "refused")})
    outcome, records = search(tunable, class_of(tunable))
    assert (outcome.choice, verdicts(records)[2], verdicts(records)[4]) == (choice(1), ["twin"], ["refused"])


def test_a_choice_for_several_problems_is_the_best_on_average_and_right_on_all(class_of, search):
    class Uneven(FakeTunable):
        """Twice as slow on two sequences with a tile of 32."""

        def build(self, problem, choice, target):
            self.made[32].us = 160.0 if problem.batch == 2 else 70.0
            return super().build(problem, choice, target)

    of = class_of(Uneven({64: Made(100.0), 32: Made(), 128: Made(95.0)}), SMALL, OTHER)
    assert len(of.workloads) == 2
    tunable = FakeTunable({64: Made(100.0), 128: Made(95.0)})
    outcome, _ = search(tunable, of)
    assert outcome.choice == choice(128)
    assert [result.problem for result in outcome.results] == [SMALL, OTHER]


def test_without_a_device_the_incumbent_stays_if_it_compiles(class_of, search):
    tunable = FakeTunable({64: Made(), 128: Made()})
    outcome, records = search(tunable, class_of(tunable), timed=False)
    assert (outcome.choice, outcome.replaces, outcome.measured) == (choice(64), False, False)
    assert (verdicts(records), tunable.started) == ({64: ["kept"], 128: ["compiles"]}, [])


NOT_TIMED = TIMED.replace("NVIDIA H200", "H100, not present").replace("true", "false")
NOT_TIMED += '[[entry]]\nkernel = "dense_forward"\nlaunch = { block_m = 64, block_n = 64 }\n'


def test_without_a_device_what_spills_is_replaced_by_the_largest_tile_that_does_not(class_of, search):
    spilling = {"registers": 255, "spills": 400, "scratchpad_bytes": 1}
    tunable = FakeTunable({64: Made(facts=spilling), 16: Made(), 32: Made(), 128: Made(facts=spilling)})
    outcome, _ = search(tunable, class_of(tunable, file=NOT_TIMED), timed=False)
    assert (outcome.choice, outcome.replaces, outcome.measured) == (choice(32), True, False)
    # What was timed stays, spills or not.
    assert search(tunable, class_of(tunable), timed=False)[0].choice == choice(64)


def test_bounds_choose_among_what_does_not_spill_and_gains_five_per_cent(class_of, search):
    spilling = {"registers": 255, "spills": 400, "scratchpad_bytes": 1}
    gains = {64: Made(bound=100.0), 32: Made(bound=90.0), 16: Made(bound=94.0), 128: Made(bound=50.0, facts=spilling)}
    same = {64: Made(bound=100.0), 32: Made(bound=96.0)}
    unknown = {64: Made(), 32: Made(bound=1.0)}
    for made, expected in ((gains, 32), (same, 64), (unknown, 64)):
        tunable = FakeTunable(made)
        of = class_of(tunable, file=NOT_TIMED)
        outcome, _ = search(tunable, of, timed=False, by_bound=True)
        assert (outcome.choice, outcome.by_bound) == (choice(expected), expected != 64)
        (result,) = outcome.results
        assert (result.bound, result.incumbent_bound) == (made[expected].bound, made[64].bound)
    # Times are worth more than bounds, and without the option nothing is ranked.
    assert search(FakeTunable(gains), class_of(FakeTunable(gains)), timed=False, by_bound=True)[0].choice == choice(64)
    assert not search(FakeTunable(gains), of, timed=False)[0].by_bound


def test_nothing_that_compiles_is_red(class_of, search):
    tunable = FakeTunable({64: Made(failure="no"), 32: Made(failure="no")})
    for timed in (True, False):
        outcome, records = search(tunable, class_of(tunable, file=NOT_TIMED), timed=timed)
        assert outcome.choice is None
        assert len(red(records, {outcome.name: outcome})) == 1


def test_a_budget_that_is_spent_leaves_the_rest_and_says_so(class_of, search):
    tunable = FakeTunable({64: Made(100.0), 32: Made(1.0)})
    outcome, records = search(tunable, class_of(tunable), budget=1e-9)
    assert not outcome.complete
    assert outcome.choice is None or outcome.choice == choice(64)
    assert "not reached" in verdicts(records)[32]


def test_what_an_interrupted_run_compiled_is_not_compiled_again_and_what_ended_it_not_tried(class_of, search):
    tunable = FakeTunable({64: Made(100.0), 32: Made(80.0)})
    of = class_of(tunable)
    first, records = search(tunable, of)
    codes = [record for record in records if isinstance(record, CodeRecord)]
    assert Counter(tunable.compiled)[32] == len([c for c in codes if c.code.startswith("32")]) == 1
    tunable.compiled.clear()
    again, _ = search(tunable, of, history=History(codes))
    assert (tunable.compiled, again.choice) == ([], first.choice)
    tunable = FakeTunable({64: Made(100.0), 32: Made(1.0), 128: Made(90.0)})
    of = class_of(tunable)
    history = History([Trying(name=of.name, problem=SMALL, choice=choice(32).key)])
    outcome, records = search(tunable, of, history=history)
    assert (outcome.choice, verdicts(records)[32], 32 in tunable.started) == (choice(128), ["broke"], False)


def test_what_only_the_device_shows_not_to_fit_is_no_fault(class_of, search):
    """A candidate that no child compiles, as a variant's may be, is ruled out when it is first run."""
    tunable = FakeTunable({64: Made(100.0), 32: Made(1.0, "too large")})
    outcome, records = search(tunable, class_of(tunable))
    assert (verdicts(records)[32], red(records, {outcome.name: outcome})) == (["ruled out"], [])


def test_out_of_memory_ends_the_class_and_a_device_that_is_lost_the_run(class_of, search, monkeypatch):
    tunable = FakeTunable({64: Made(100.0, "out of memory")})
    outcome, _ = search(tunable, class_of(tunable))
    assert outcome.choice is None
    assert outcome.reason.startswith("out of memory")

    def synchronize(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    tunable = FakeTunable({64: Made(100.0), 32: Made(1.0)})
    monkeypatch.setattr("portattn.tools.tune.search.synchronize", synchronize)
    with pytest.raises(TuningDeviceLost, match="left the device unusable: CUDA error"):
        search(tunable, class_of(tunable))


class Stopwatch:
    """A benchmark clock that says what a call takes, and how it was asked."""

    has_graphs = True

    def __init__(self, ms: float) -> None:
        self.ms, self.turns, self.graphs = ms, [], 0

    def turn_ms(self, run, timing, calls, expected_ms):
        self.turns.append((run(), timing, calls))
        return self.ms

    def graphed(self, contender):
        self.graphs += 1
        return lambda: "replayed"


@pytest.mark.parametrize(("ms", "from_graph", "calls"), [(0.01, True, 100), (2.0, False, 4), (30.0, False, 1)])
def test_short_calls_are_replayed_from_a_graph(monkeypatch, ms, from_graph, calls):
    watch, clock = Stopwatch(ms), race.DeviceSampleClock()
    monkeypatch.setattr(clock, "_clock", watch)

    def run():
        return "launched"

    for _ in range(2):
        assert clock.samples(run, "cold", thorough=True) == [ms * 1e3] * 3
    assert watch.graphs == from_graph
    assert watch.turns[-1] == ("replayed" if from_graph else "launched", "cold", calls)
