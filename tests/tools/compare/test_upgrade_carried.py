"""What of variants and schedules carries over from one compiler to another."""

import evidence_files
import msgspec
import pytest
import quirk_files

from portattn.cli.lifecycle import variant_line
from portattn.errors import ArgumentError
from portattn.planning.data_files import load_verified
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.toolchain import Toolchain
from portattn.tools.compare import registry_changes
from portattn.tools.compare.registry_changes import compare
from portattn.tools.compare.sides import Pair, Side, cautions, parse_compiler
from portattn.tools.matrix.problems import NamedProblem, dense, full, quick


def upgraded(before, after, *targets, new=None, problems=()):
    known = Registry.load()
    pairs = [Pair(Side(known.target(t, before), known), Side(known.target(t, after), new or known)) for t in targets]
    return compare(pairs, problems or quick())


def test_a_variant_that_nobody_has_run_with_the_new_compiler_is_tried_by_its_canaries():
    made = upgraded("triton==3.6.0", "triton==3.7.0", "cuda:sm_90", "rocm:gfx942")
    found = made.variants
    assert [one.name for one in found] == ["gluon_forward", "gluon_backward", "gluon_mla", "gluon_indexer"]
    assert all((one.before, one.after, one.refuses) == ("run", "tried", {}) for one in found)
    assert all(one.unseen == one.takes for one in found)
    assert all(one.less_sure and "canaries" in one.said for one in found)


@pytest.mark.parametrize(("release", "level"), [("3.7.1", "runs"), ("3.8.0", "measured"), ("3.9.0", "measured")])
def test_what_was_run_with_the_new_compiler_carries_over_and_names_that_run(release, level):
    toolchain = f"triton=={release}"
    (seen,) = [one for one in load_verified(Registry.load().backends["cuda"].folder) if one.toolchain == toolchain]
    *found, newer = upgraded("triton==3.6.0", toolchain, "cuda:sm_90").variants
    assert [one.name for one in found] == ["gluon_forward", "gluon_backward", "gluon_mla"]
    assert (newer.name, newer.after, newer.evidence) == ("gluon_indexer", "tried", None), "it ran with 3.6.0 alone"
    expected = {"toolchain": toolchain, "level": level, "what": seen.what}
    assert [msgspec.to_builtins(one)["evidence"] for one in found] == 3 * [expected]
    assert {variant_line(one) for one in found} == {f"carries over; {level} with {toolchain}: {seen.what}"}


def test_the_evidence_is_the_new_compilers_and_what_it_lacks_is_tried_by_its_canaries(tmp_path, monkeypatch):
    evidence_files.plant(tmp_path, monkeypatch)
    made = upgraded("triton==3.6.0", "triton==3.7.1", "cuda:sm_90")
    assert {one.name: one.evidence and str(one.evidence) for one in made.variants} == {
        "gluon_forward": "runs with triton==3.7.1: planted by a test",
        "gluon_backward": None, "gluon_mla": None, "gluon_indexer": None,
    }  # fmt: skip
    for other in ("triton==3.7.0", "triton==3.5.1"):
        assert {one.evidence for one in upgraded("triton==3.6.0", other, "cuda:sm_90").variants} == {None}
    after = {one.name: one.after for one in made.variants}
    lacking = ("gluon_backward", "gluon_mla", "gluon_indexer")
    assert after == {"gluon_forward": "run"} | dict.fromkeys(lacking, "tried")
    assert {one.name for one in made.variants if one.less_sure} == set(lacking)
    # A problem whose tests had not run with the old one either is no loss.
    back = upgraded("triton==3.7.1", "triton==3.7.0", "cuda:sm_90")
    assert [one.name for one in back.variants if one.unseen] == ["gluon_forward"]


def test_one_problem_that_was_left_out_is_named(monkeypatch):
    some = {"dense causal bf16 D=128 GQA"}
    lacking = {named.problem for named in quick() if named.name in some}
    real = registry_changes.seen_to_run
    monkeypatch.setattr(
        registry_changes, "seen_to_run",
        lambda target, registry, p: None if p in lacking and "3.9.0" in str(target.toolchain) else real(
            target, registry, p
        ),
    )  # fmt: skip
    unsure = [one for one in upgraded("triton==3.6.0", "triton==3.9.0", "cuda:sm_90").variants if one.less_sure]
    one = unsure[0]
    assert [each.name for each in unsure] == ["gluon_forward", "gluon_indexer"], "the latter ran with 3.6.0 alone"
    assert set(one.unseen) == some
    assert one.said.startswith(f"is tried by its canaries for {some.pop()}: no complete run")


def test_back_on_the_compiler_that_they_were_run_with_they_carry_over():
    made = upgraded("triton==3.9.0", "triton==3.6.0", "cuda:sm_90")
    # The indexer's kernel has run with 3.6.0 alone since it changed.
    assert {one.said for one in made.variants if one.name != "gluon_indexer"} == {"carries over"}
    assert not any(one.less_sure for one in made.variants)
    timed = [one for one in made.schedules if one.timed_with]
    assert len(timed) >= 5
    assert all(one.carries and not one.lost for one in timed)


def test_a_version_gate_refuses_with_its_quirk_and_the_core_is_what_changes():
    made = upgraded("triton==3.6.0", "triton==3.5.1", "cuda:sm_90")
    assert {one.said for one in made.variants} == {"refuses"}
    for one in made.variants:
        assert one.takes == ()
        assert all("[cuda-0016-gluon-aggregates]" in why for why in one.refuses.values())
    newly = {entry.id for entry in made.entries if entry.change == "newly applies"}
    assert "cuda-0016-gluon-aggregates" in newly, "also a quirk that concerns variants alone"
    assert {(one.before, one.after) for one in made.moved} >= {("gluon_forward", "triton"), ("gluon_mla", "triton")}


def test_a_variant_that_refuses_some_says_how_many(tmp_path):
    when = 'kernels = ["gluon_forward"]\nfeatures = ["dtype=fp16"]'
    quirk_files.plant(tmp_path, "cuda-0901-some", 'path = "core"', when)
    known = Registry.load()
    added = Registry.read(known.backends, tmp_path).quirks
    new = msgspec.structs.replace(known, quirks=known.quirks | added)
    made = upgraded("triton==3.6.0", "triton==3.6.0", "cuda:sm_90", new=new)
    forward = next(one for one in made.variants if one.name == "gluon_forward")
    assert forward.said == "carries over, and refuses 2 that it took"
    assert all("planted [cuda-0901-some]" in why for why in forward.refuses.values())


SMALL = dense("256 keys", dtype="fp16", batch=2, heads_q=8, heads_k=8, seq_q=256, seq_k=256, head_dim=64, head_dim_v=64)


def test_a_variant_takes_what_plans_take_it_for():
    """Of what it could run it leaves some to the core, as its schedules for that compiler say."""
    problems = [SMALL, *(named for named in full() if named.problem.op == "attention")]
    made = upgraded("triton==3.6.0", "triton==3.9.0", "cuda:sm_90", problems=problems)
    known, paths = Registry.load(), {}
    target = known.target("cuda:sm_90", "triton==3.9.0")
    for named in problems:
        paths.setdefault(plan(named.problem, target, known).path, set()).add(named.name)
    assert {one.name: set(one.takes) for one in made.variants} == {
        name: names for name, names in paths.items() if name.startswith("gluon")
    }
    assert SMALL.name in paths["triton"], "or this test asks nothing"


def test_what_is_newly_left_to_the_core_is_said_and_no_refusal(monkeypatch):
    name = "dense causal bf16 D=128 GQA"
    (problem,) = [named.problem for named in quick() if named.name == name]
    kind = type(next(one for one in Registry.load().backends["cuda"].variants if one.name == "gluon_forward"))
    real = kind.defers_to_core
    monkeypatch.setattr(
        kind, "defers_to_core",
        lambda self, p: "planted" if p == problem and "3.9.0" in str(self.toolchain) else real(self, p),
    )  # fmt: skip
    one = next(one for one in upgraded("triton==3.6.0", "triton==3.9.0", "cuda:sm_90").variants)
    assert (one.name, one.leaves, one.refuses) == ("gluon_forward", {name: "planted"}, {})
    assert name not in one.takes
    alone = upgraded("triton==3.6.0", "triton==3.9.0", "cuda:sm_90", problems=[NamedProblem(name, problem)])
    assert [(one.said, one.after) for one in alone.variants] == [("leaves all that it took to the core", "refused")]
    back = upgraded("triton==3.9.0", "triton==3.6.0", "cuda:sm_90", problems=[NamedProblem(name, problem)])
    assert [(one.before, one.after) for one in back.variants] == [("refused", "run")]


def test_schedules_are_what_the_plans_say_of_their_timing():
    """A schedule carries over exactly where the plan has no note that it was timed with another compiler, or never."""
    for compiler in ("triton==3.6.0", "triton==3.9.0"):
        made = upgraded("triton==3.6.0", compiler, "cuda:sm_90", "cuda:sm_80", "rocm:gfx942")
        known, seen = Registry.load(), 0
        for one in made.schedules:
            for named in (named for named in quick() if named.name in one.problems):
                notes = " ".join(plan(named.problem, known.target(one.target, compiler), known).notes)
                never = any(word in notes for word in ("was not timed", "never timed", "default tile"))
                assert one.carries == (not never and "by times with" not in notes)
                assert bool(one.timed_with) == (not never)
                seen += 1
        assert seen == 3 * len(quick())


def test_a_schedule_is_lost_only_where_it_was_timed_with_the_old_compiler():
    lost = {one.kernel for one in upgraded("triton==3.6.0", "triton==3.9.0", "cuda:sm_90").schedules if one.lost}
    assert {"gluon_forward", "decode_split"} <= lost
    assert "append_write" not in lost, "it was timed with no release"
    later = upgraded("triton==3.7.1", "triton==3.9.0", "cuda:sm_90")
    assert not any(one.lost for one in later.schedules)
    carried = {(one.kernel, one.timed_with) for one in later.schedules if one.carries}
    assert carried == {("gluon_forward", "triton==3.9.0")}, "those that were timed with the new one"


def test_a_plan_that_keeps_its_path_and_changes_its_schedule_is_told(monkeypatch):
    variant = Registry.load().backends["cuda"].variants[0]
    real = type(variant).describe
    calls: list[int] = []
    # Each plan gets another schedule, and so both sides of a problem.
    monkeypatch.setattr(
        type(variant), "describe", lambda self, p: real(self, p) | {"keys": (calls.append(1), len(calls))[1]}
    )
    made = upgraded("triton==3.6.0", "triton==3.9.0", "cuda:sm_90")
    (line,) = {one.differs[0].partition(":")[0] for one in made.moved if one.before == variant.name}
    assert line == "keys"


def test_versions_as_they_are_given():
    assert str(parse_compiler("ci", "--to", "triton==3.9")) == "triton==3.9.0", "as the lab and the records write it"
    assert parse_compiler("ci", "--to", "triton==3.9.0,ptxas==13.3.33").component("ptxas") == "13.3.33"
    for text in ("triton", "none", "triton==three", "jax==1.0"):
        with pytest.raises(ArgumentError) as refused:
            parse_compiler("ci", "--to", text)
        assert (refused.value.argument, refused.value.value) == ("--to", text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("triton==3.9.0", []),
        ("triton==3.99", ["nobody is known to have run it"]),
        ("triton==3.7.0.dev20260101", ["no known release", "comes before 3.7.0"]),
        ("triton==3.6.0+git1234", ["a build of its own: nothing that was seen with 3.6.0"]),
    ],
)
def test_what_is_to_be_known_of_a_version(text, words):
    found = list(cautions(Toolchain.parse(text)))
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))
