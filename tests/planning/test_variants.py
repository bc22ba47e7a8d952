"""Variants are candidates like any other: quirks and records reject them, a first compile is isolated, canaries run,
plans and cells say how they are scheduled. Where one does not apply the core runs, which is no fall-back."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from planted_records import record
from quirk_files import planned, plant, registry
from support import PlantedWorker

import portattn
from portattn import Problem, Target
from portattn.api import dispatch
from portattn.backends.cuda import CudaBackend
from portattn.compile import ensure_compiled
from portattn.compile.record_store import CompileStore, _store, store
from portattn.config import Settings, current
from portattn.launch import Signature
from portattn.planning import planner
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.schema.plan import Rejection
from portattn.testing import canary
from portattn.worker.client import Reply

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
P = Problem(batch=2, heads_q=8, heads_k=8, seq_q=1024, seq_k=1024, head_dim=128)
VARIANTS = {variant.name: variant for variant in CudaBackend.variants}
NAME = "gluon_forward"


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_says_how_it_is_scheduled_and_what_it_needs() -> None:
    made = plan(P, SM_90)
    assert made.path == NAME
    assert made.schedule == VARIANTS[NAME].describe(P) | VARIANTS[NAME].sizes(P)
    assert (made.schedule["width"], made.schedule["groups"]) == (128, 2)
    assert made.needs.startswith("sm_90, Triton 3.6 or newer")
    text = made.explain()
    assert "schedule width=128 groups=2" in text
    assert f"needs    {made.needs}" in text
    assert json.loads(msgspec.json.encode(made))["schedule"] == made.schedule
    core = plan(P, SM_90, settings=Settings(backend="triton"))
    assert (core.schedule, core.needs) == ({}, "")


def test_a_plan_says_what_follows_from_the_sizes_and_compiles_nothing_anew_for_it() -> None:
    few = msgspec.structs.replace(P, batch=1, seq_q=128, seq_k=16384)
    made = plan(few, SM_90)
    assert (made.schedule["splits"], made.schedule["heads_together"]) == (16, 1)
    more = plan(msgspec.structs.replace(few, heads_q=16, heads_k=16), SM_90)
    assert (more.schedule["splits"], more.key) == (8, made.key)
    causal = msgspec.structs.replace(P, causal="bottom_right", seq_q=4096, seq_k=4096)
    assert plan(causal, SM_90).schedule["heads_together"] == 8
    assert "cuda-0018-register-a-variants" in made.explain()


REACH: dict[str, tuple[str, str, bool]] = {
    "all variants": ('kernels = ["gluon_*"]', 'path = "core"', True), "every kernel": ("", 'path = "core"', True),
    "another variant": ('kernels = ["gluon_mla"]', 'path = "core"', False),
    "another version": ('kernels = ["gluon_*"]\ntoolchain = { triton = "<3.6" }', 'path = "core"', False),
    "another problem": ('kernels = ["gluon_*"]\nfeatures = ["head_dim>128"]', 'path = "core"', False),
    "this problem": ('kernels = ["gluon_*"]\nfeatures = ["head_dim>64"]', 'path = "core"', True),
    "a choice of the core's": ('kernels = ["gluon_*"]\nlowering = { load = "pointer" }', 'path = "core"', False),
    "a launch value of the core's": ('kernels = ["gluon_*"]\nlaunch = { num_warps = 4 }', 'path = "core"', False),
    "the core's number of programs": ('kernels = ["gluon_*"]\nfeatures = ["programs>0"]', 'path = "core"', False),
    "what sets the core's launch": ("", "launch = { num_stages = 3 }", False),
}  # fmt: skip


@pytest.mark.parametrize("name", REACH)
def test_a_quirk_speaks_against_a_variant(tmp_path: Path, name: str) -> None:
    when, effect, reaches = REACH[name]
    plant(tmp_path, "cuda-0901-x", effect, when, title="it hangs")
    made = planned(registry(tmp_path, variants=True), problem=P)
    assert made.path == ("triton" if reaches else NAME)
    assert not made.fell_back
    assert made.rejected == ()
    if reaches:
        assert "not gluon_forward: it hangs [cuda-0901-x]" in made.notes
        assert [(q.id, q.sets) for q in made.quirks] == [("cuda-0901-x", {"path": "core"})]
        assert "the core path is taken" in made.explain()
        assert planned(registry(tmp_path, variants=True), problem=P, quirks="-cuda-0901-x").path == NAME
        with pytest.raises(portattn.PathUnavailable, match="it hangs"):
            planned(registry(tmp_path, variants=True), problem=P, backend=NAME)


def test_a_quirk_out_of_range_can_be_forced_on(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-x", 'path = "core"', 'kernels = ["gluon_*"]\ntoolchain = { triton = "<3.6" }')
    known = registry(tmp_path, variants=True)
    assert planned(known, problem=P).path == NAME
    assert planned(known, problem=P, quirks="+cuda-0901-x").path == "triton"


def test_a_quirk_of_every_kernel_leads_past_variant_and_core(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-x", 'path = "vendor"')
    made = planned(registry(tmp_path, variants=True), problem=P)
    assert (made.path, made.rejected[0].quirk) == ("sdpa", "cuda-0901-x")
    assert any("not gluon_forward" in note for note in made.notes)


def test_core_is_no_path_that_speaks_against_the_core(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-x", 'path = "core"', 'kernels = ["dense_forward", "gluon_*"]')
    made = planned(registry(tmp_path), problem=P)
    assert (made.path, made.quirks) == ("triton", ())


def test_a_caution_is_listed_and_changes_nothing(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-x", 'note = "look out"', 'kernels = ["gluon_forward"]')
    made = planned(registry(tmp_path, variants=True), problem=P)
    assert (made.path, [q.id for q in made.quirks]) == (NAME, ["cuda-0901-x"])
    assert "look out" in made.quirks[0].sentence
    assert "says why): cuda-0901-x\n" in made.explain() + "\n"


@pytest.mark.parametrize("toolchain", ["triton==3.4.0", "triton==3.5.1"])
def test_compilers_that_lack_what_the_variants_call_are_quirks(toolchain: str) -> None:
    made = plan(P, parse_target("cuda:sm_90", toolchain))
    assert made.path == "triton"
    assert any(quirk.id.startswith("cuda-0016") for quirk in made.quirks)


def test_a_key_is_of_one_schedule_type_and_toolchain() -> None:
    sized = msgspec.structs.replace(P, seq_q=777)
    assert plan(P, SM_90).key == plan(sized, SM_90).key  # the launches' signatures say the rest
    others = [
        plan(msgspec.structs.replace(P, dtype="bf16"), SM_90),
        plan(msgspec.structs.replace(P, head_dim=64, head_dim_v=64), SM_90),
        plan(msgspec.structs.replace(P, sinks=True), SM_90),
        plan(P, parse_target("cuda:sm_90", "triton==3.6.0,ptxas==13.3.33")),
        plan(P, SM_90, settings=Settings(backend="triton")),
    ]
    assert len({made.key for made in others} | {plan(P, SM_90).key}) == 6


def test_a_variant_leaves_a_problem_to_the_core_but_for_two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs it where it was asked for by name, and where the core cannot."""
    monkeypatch.setattr(type(VARIANTS[NAME]), "defers_to_core", lambda variant, problem: "it is small")
    left = plan(P, SM_90)
    assert left.path == "triton"
    assert "not gluon_forward: it leaves such problems to the core: it is small" in left.notes
    named = plan(P, SM_90, settings=Settings(backend=NAME))
    assert named.path == NAME
    failed = record(left.key, reason="boom", incident="20261121-x-1")
    made = plan(P, SM_90, records={failed.key: failed})
    assert made.path == NAME
    why = "not triton: this specialisation failed here on 2026-11-21: boom [20261121-x-1]"
    assert made.notes == (*named.notes, why)


class First(type(VARIANTS[NAME])):  # type: ignore[misc]
    name = "first"

    def defers_to_core(self, problem: Problem) -> str:
        return "the first says so"


class Second(First):
    name = "second"
    refusal = ""

    def defers_to_core(self, problem: Problem) -> str:
        return "the second says so"

    def rejects(self, problem: Problem, target: Target) -> Any:
        return Rejection(path=self.name, reason=self.refusal) if self.refusal else None


def two_variants(refusal: str = "", swapped: bool = False) -> Registry:
    """`first`, and `second`, which cannot run the problem where a refusal is given."""
    both = (First(), type("Refusing", (Second,), {"refusal": refusal})())

    class Backend(CudaBackend):
        variants = both[::-1] if swapped else both

    return msgspec.structs.replace(Registry.load(), backends={**Registry.load().backends, "cuda": Backend()})


def test_of_two_variants_that_leave_a_problem_to_the_core_the_first_runs_where_it_cannot() -> None:
    left = plan(P, SM_90, two_variants())
    assert left.path == "triton"
    assert [note for note in left.notes if "leaves such problems" in note] == [
        "not first: it leaves such problems to the core: the first says so",
        "not second: it leaves such problems to the core: the second says so",
    ]
    failed = record(left.key, reason="boom")
    assert plan(P, SM_90, two_variants(), {failed.key: failed}).path == "first"
    made = plan(P, SM_90, two_variants("has no such tile", swapped=True), {failed.key: failed})
    assert made.path == "first"
    assert made.notes[0] == "not second: it has no such tile", "why the one before it was passed over"
    assert made.notes[-1] == "not triton: this specialisation failed here on 2026-11-21: boom"


def test_a_variants_failure_without_an_incident_is_a_sentence() -> None:
    failed = record(plan(P, SM_90).key, kernel=NAME, reason="boom")
    made = plan(P, SM_90, records={failed.key: failed})
    assert (made.path, made.notes[0]) == ("triton", "not gluon_forward: it failed here on 2026-11-21: boom")


def test_a_variant_that_cannot_run_a_problem_leaves_it_where_an_earlier_one_left_it() -> None:
    made = plan(P, SM_90, two_variants("has no such tile"))
    assert made.path == "triton"
    assert "not second: it has no such tile" in made.notes


def test_a_quirk_that_leads_a_variant_to_the_reference_says_nothing_of_the_core(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-x", 'path = "reference"', 'kernels = ["gluon_*"]\ntoolchain = { triton = "<3.7" }')
    made = planned(registry(tmp_path, variants=True), problem=P)
    assert made.path == "triton"
    assert [quirk.id for quirk in made.quirks if "path" in quirk.sets] == ["cuda-0901-x"]


def test_keys_are_digests_of_one_length() -> None:
    for made in (plan(P, SM_90), plan(P, SM_90, settings=Settings(backend="triton"))):
        assert re.fullmatch("[0-9a-f]{32}", made.key)


@pytest.mark.parametrize(("incident", "told"), [("20261121-x-1", "see incident 20261121-x-1"), ("", "")])
def test_a_refused_variant_says_what_would_help(tmp_path: Path, incident: str, told: str) -> None:
    """Where it was asked for by name, and so nothing else is taken."""
    failed = record(plan(P, SM_90).key, kernel=NAME, reason="boom", incident=incident)
    with pytest.raises(portattn.PathUnavailable) as caught:
        plan(P, SM_90, records={failed.key: failed}, settings=Settings(backend=NAME))
    (no,) = caught.value.rejected
    assert (no.path, no.hint, no.incident) == (NAME, told, incident)
    assert no.reason == "it failed here on 2026-11-21: boom"
    assert plan(P, SM_90, records={failed.key: msgspec.structs.replace(failed, passed=True)}).path == NAME

    plant(tmp_path, "cuda-0901-x", 'path = "core"', 'kernels = ["gluon_*"]\ntoolchain = { triton = "<3.7" }',
          title="it hangs", evidence="")  # fmt: skip
    with pytest.raises(portattn.PathUnavailable) as caught:
        planned(registry(tmp_path, variants=True), problem=P, backend=NAME)
    (no,) = caught.value.rejected
    assert (no.path, no.reason, no.hint, no.quirk) == (NAME, "it hangs", "concerns triton <3.7", "cuda-0901-x")


def test_the_source_of_a_variant_is_part_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "variant.py").write_text("one")
    monkeypatch.setattr(planner.inspect, "getfile", lambda kind: str(tmp_path / "variant.py"))
    first = planner.source_digest(VARIANTS[NAME])
    planner._source_digest.cache_clear()
    (tmp_path / "variant.py").write_text("two")
    assert planner.source_digest(VARIANTS[NAME]) != first
    planner._source_digest.cache_clear()


# --- a call -----------------------------------------------------------------------------------------------------------


class Compiler:
    """In the place of the child: refuses the functions that it is told to, and counts what it is asked."""

    def __init__(self, refused: str, reply: Reply | None = None) -> None:
        self.refused, self.asked = refused, list[str]()
        self.reply = reply or Reply(outcome="crash", stage="ttgir", kind="SIGABRT", message="planted", log="planted")

    def __call__(self, worker: Any, launch: Any, *_: Any) -> Reply:
        seen = ensure_compiled.signature_of(launch)
        self.asked.append(seen.function)
        return self.reply if seen.function == self.refused else Reply(outcome="ok", facts={"scratchpad_bytes": 1024})


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were launched: nothing is, and nothing is compiled in this process."""
    pytest.importorskip("triton.experimental.gluon")
    paths: list[str] = []

    def described(own: dispatch.VariantCandidate) -> Any:
        return {"out": own._call.new_out().zero_(), "lse": None}, lambda named: paths.append(own._variant.name)

    def launch_all(launches: Any, made: Any, q: Any) -> None:
        paths.append(made.path)

    monkeypatch.setattr(dispatch.VariantCandidate, "_described", described)
    monkeypatch.setattr(dispatch, "launch_all", launch_all)
    monkeypatch.setattr(ensure_compiled, "_in_this_process", lambda *arguments: None)
    monkeypatch.setattr("portattn.compile.variants.load_kernels", lambda *arguments, **options: None)
    return paths


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(2, 4, 33, 128, dtype=torch.float16) for _ in range(3)]


def silently(call: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", portattn.FallbackWarning)
        call()


def test_a_first_call_is_compiled_in_a_child_once(sm_90, ran, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Compiler(refused="")
    monkeypatch.setattr(ensure_compiled, "compile_in", child)
    for _ in range(2):
        silently(lambda: portattn.attention(*tensors()))
    assert ran == [NAME, NAME]
    # Few tiles: keys are split, and a second kernel merges.
    assert (child.asked[0], len(child.asked)) == ("scheduled_forward", len(set(child.asked)))
    longer = [torch.zeros(2, 4, 35, 128, dtype=torch.float16) for _ in range(3)]
    count = len(child.asked)
    silently(lambda: portattn.attention(*longer))
    assert len(child.asked) == count  # sizes do not make another kernel


@pytest.mark.parametrize(
    ("outcome", "kind"), [("error", "CompilationError"), ("crash", "SIGABRT"), ("hang", "timeout")]
)
def test_where_it_does_not_compile_the_core_runs(sm_90, ran, monkeypatch, outcome: str, kind: str) -> None:
    reply = Reply(outcome=outcome, stage="ttgir", kind=kind, message="boom", log="boom")
    child = Compiler("scheduled_forward", reply)
    monkeypatch.setattr(ensure_compiled, "compile_in", child)
    silently(lambda: portattn.attention(*tensors()))
    assert ran == ["triton"]
    made = portattn.last_plan()
    assert not made.fell_back
    (incident,) = store(current()).incidents()
    assert (incident.kernel, incident.stage, incident.problem.op) == ("scheduled_forward", "ttgir", "attention")
    assert incident.specialisation["function"] == "scheduled_forward"
    assert "serve.py" in incident.command
    assert NAME.replace("_", "-") in incident.id
    (note,) = [note for note in made.notes if NAME in note]
    assert incident.id in note
    assert "boom" in note

    # What a new process knows: it is planned so at once, and nobody compiles it again.
    dispatch.forget_plans()
    ensure_compiled._ready.clear()
    _store.cache_clear()
    asked = child.asked.count("scheduled_forward")
    assert portattn.plan("attention", *tensors()).path == "triton"
    silently(lambda: portattn.attention(*tensors()))
    assert (ran, child.asked.count("scheduled_forward")) == (["triton"] * 2, asked)


def test_a_variant_that_is_asked_for_by_name_never_gives_way(sm_90, ran, monkeypatch) -> None:
    monkeypatch.setattr(ensure_compiled, "compile_in", Compiler("scheduled_forward"))
    with pytest.raises(portattn.PathUnavailable, match="SIGABRT"):
        portattn.attention(*tensors(), backend=NAME)
    assert ran == []


def test_what_does_not_fit_the_chip_is_a_failure(sm_90, ran, monkeypatch) -> None:
    monkeypatch.setattr(
        ensure_compiled, "compile_in",
        Compiler("scheduled_forward", Reply(outcome="ok", facts={"scratchpad_bytes": 10**9})),
    )  # fmt: skip
    silently(lambda: portattn.attention(*tensors()))
    assert ran == ["triton"]
    (incident,) = store(current()).incidents()
    assert incident.symptom == "resource-limit"


# --- canaries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_canaries_that_it_takes(name: str) -> None:
    variant = VARIANTS[name]
    for problem in variant.canaries:
        made = canary.plan_case(problem, SM_90, Settings(), name)
        assert (made.path, canary.family(made)) == (name, name)
        assert canary.cases(made) == tuple(p for p in variant.canaries if p.kv_format == problem.kv_format)
    assert {problem.op for problem in variant.canaries} == set(variant.ops)
    assert canary.key_of(name, SM_90) != canary.key_of("dense_forward", SM_90)


class Child(PlantedWorker):
    """In the place of the child that runs canaries: a variant's numbers are wrong, the core's are right."""

    asked: list[dict[str, Any]]

    def request(self, task: str, seconds: float, **fields: Any) -> Reply:
        Child.asked.append(fields)
        wrong = 0.5 if fields["path"] == NAME else 1e-4
        return Reply(outcome="ok", facts={"error": wrong, "budget": 1e-3, "wrong": 0})


def test_wrong_numbers_quarantine_the_variant_and_not_the_core(sm_90, ran, monkeypatch, tmp_path: Path) -> None:
    Child.asked = []
    monkeypatch.setattr(canary, "Worker", Child)
    monkeypatch.setattr(ensure_compiled, "compile_in", Compiler(refused=""))
    with portattn.settings(canary="always", cache_dir=str(tmp_path)):
        silently(lambda: portattn.attention(*tensors()))
        assert ran == ["triton"]
        asked = len(Child.asked)
        silently(lambda: portattn.attention(*tensors(), causal=True))  # of the same family
        assert (ran, len(Child.asked)) == (["triton"] * 2, asked)
    first = Child.asked[0]
    assert (first["path"], "lowering" in first) == (NAME, False)
    assert {fields["path"] for fields in Child.asked} == {NAME, "triton"}
    seen = CompileStore(tmp_path)
    assert not seen.get(canary.key_of(NAME, SM_90)).passed
    assert seen.get(canary.key_of("dense_forward", SM_90)).passed
    (incident,) = seen.incidents()
    assert (incident.kernel, incident.symptom) == (NAME, "wrong-result")
    assert any(incident.id in note for note in portattn.last_plan().notes)


def test_a_variant_of_another_package_needs_no_more_than_its_steps() -> None:
    """The protocol's defaults: no schedule to show, never timed, the op's own canaries."""
    from portattn.planning.backend import Variant

    class Other(Variant):
        name, ops, arches = "other", ("attention",), ("sm_80",)

        def rejects(self, problem: Problem, target: Target) -> None:
            return None

        def launcher(self, call: Any) -> Any:
            return call

    other = Other()
    backend = CudaBackend()
    backend.variants = (other,)
    known = msgspec.structs.replace(Registry.load(), backends={**Registry.load().backends, "cuda": backend})
    made = plan(P, parse_target("cuda:sm_80", "triton==3.4.0"), known)
    assert (made.path, made.schedule, made.needs) == ("other", {}, "")
    assert made.key
    assert not other.timed_with(P)
    assert other.described("a call") == "a call"
    assert "schedule" not in made.explain()


def test_a_schedule_that_nobody_timed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from portattn.backends.cuda.hopper_forward.variant import ForwardVariant

    wide = msgspec.structs.replace(P, seq_q=4096, seq_k=4096)
    timed = plan(wide, SM_90)
    monkeypatch.setattr(ForwardVariant, "timed_with", lambda self, problem: "")
    untimed = plan(wide, SM_90)
    monkeypatch.setattr(ForwardVariant, "timed_with", lambda self, problem: "triton==3.5.1")
    other = plan(wide, SM_90)
    assert timed.path == untimed.path == ForwardVariant.name
    assert "timed" not in timed.explain()
    assert "this schedule was not timed: this concerns speed alone" in untimed.explain()
    assert "chosen by times with triton==3.5.1, not with triton==3.6.0: speed alone" in other.explain()
    assert untimed.key == timed.key == other.key


def test_signatures_are_plain_data_for_the_other_variant_too() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from portattn.testing import findings

    decode, merging = findings.variant_launches(VARIANTS["gluon_mla"], VARIANTS["gluon_mla"].canaries[0])
    assert isinstance(decode, Signature)
    assert (decode.function, merging.function) == ("latent_decode", "combine")
    assert decode.types["k_desc"].startswith("tensordesc<bf16[64, 128]")
    assert decode.constants["SPLIT"] is True
