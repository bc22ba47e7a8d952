"""A variant under a release of Triton that nobody has run it with: it is planned with a caution, its canaries decide,
and what the release lacks leads to the core."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import evidence_files
import msgspec
import pytest
from support import PlantedWorker
from test_variants import NAME, Compiler, P, ran, silently, tensors  # noqa: F401 - `ran` is a fixture

import portattn
from portattn import Problem, Target
from portattn.api import dispatch
from portattn.backends.cuda import CudaBackend
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.compile import ensure_compiled, variants
from portattn.compile.record_store import CompileStore, _store
from portattn.config import Settings
from portattn.planning.core_path import canaries_wanted
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.schema.plan import AppliedQuirk
from portattn.schema.quirk import ASSUMED
from portattn.testing import canary
from portattn.tools.compare import registry_changes
from portattn.worker.client import Reply

BACKWARD = Problem(
    op="attention_backward", batch=2, heads_q=8, heads_k=8, seq_q=1024, seq_k=1024, head_dim=128, dtype="bf16"
)
LATENT = next(v for v in CudaBackend.variants if v.name == "gluon_mla").canaries[0]
NARROW = msgspec.structs.replace(P, kv_format="e4m3", kv_scales="head")
WHOLE = msgspec.structs.replace(P, kv_format="int8", kv_scales="token")
PROBLEMS = {
    "gluon_forward": P, "gluon_forward_fp8": NARROW, "gluon_forward_int8": WHOLE, "gluon_backward": BACKWARD,
    "gluon_mla": LATENT,
}  # fmt: skip
# The core is taken unless they are asked for.
ASKED = {name: Settings(backend=name) for name in ("gluon_forward_fp8", "gluon_forward_int8")}
UNTRIED = ("triton==3.7.0", "triton==3.10.0", "triton==3.6.0+git1a2b")
NEWER = parse_target("cuda:sm_90", "triton==3.10.0")


def caution(made: portattn.Plan) -> str:
    (found,) = [note for note in made.notes if "no complete test run" in note] or [""]
    return found


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "doubt"), [("3.6.0", ""), ("3.10.0", ASSUMED), ("4.0", ASSUMED)])
def test_a_bug_of_an_assembler_whose_version_is_not_known_is_said_to_be_assumed(version: str, doubt: str) -> None:
    """Nobody knows which ptxas an unknown release brings; in the words of `ci`."""
    target = parse_target("cuda:sm_90", f"triton=={version}")
    made = plan(P, target)
    (noted,) = [quirk for quirk in made.quirks if quirk.id.startswith("cuda-0018-")]
    assert (made.path, noted.note) == (NAME, doubt)
    (line,) = [line for line in made.explain().splitlines() if noted.id in line]
    assert line.endswith(f"[{doubt}]") if doubt else "[" not in line
    assert doubt == registry_changes._note(Registry.load().quirks[noted.id], "stays", target)


def test_what_is_known_of_a_toolchain_is_not_listed_with_what_is_assumed() -> None:
    quirks = [AppliedQuirk(id=name, sentence="", note=note) for name, note in (("a", ""), ("b", ASSUMED), ("c", ""))]
    made = msgspec.structs.replace(plan(P, NEWER), quirks=tuple(quirks))
    lines = [line.rpartition("): ")[2] for line in made.explain().splitlines() if line.startswith("  noted ")]
    assert lines == ["a, c", f"b [{ASSUMED}]"]


@pytest.mark.parametrize("toolchain", UNTRIED)
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_planned_and_the_plan_says_that_canaries_decide(name: str, toolchain: str) -> None:
    made = plan(PROBLEMS[name], parse_target("cuda:sm_90", toolchain), settings=ASKED.get(name, Settings()))
    assert (made.path, made.fell_back) == (name, False)
    told = caution(made)
    assert told.startswith(f"{name} has no complete test run on sm_90 with {toolchain}: its canaries")
    assert f"note     {told}" in made.explain()


RUN = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # of verified.toml, which leaves out nothing of them
LEFT_OUT = {  # of the planted evidence
    ("gluon_backward", "3.7.1"), ("gluon_mla", "3.7.1"),
    ("gluon_forward_fp8", "3.9.0"), ("gluon_forward_int8", "3.9.0"),
}  # fmt: skip


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    evidence_files.plant(tmp_path, monkeypatch)


@pytest.mark.parametrize("release", RUN)
@pytest.mark.parametrize("name", PROBLEMS)
def test_what_was_run_is_planned_without_a_caution(name: str, release: str) -> None:
    made = plan(PROBLEMS[name], parse_target("cuda:sm_90", f"triton=={release}"), settings=ASKED.get(name, Settings()))
    assert (made.path, caution(made)) == (name, "")


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.9.0"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_what_a_run_left_out_is_planned_with_a_caution(parts: None, name: str, release: str) -> None:
    made = plan(PROBLEMS[name], parse_target("cuda:sm_90", f"triton=={release}"), settings=ASKED.get(name, Settings()))
    assert made.path == name
    if (name, release) in LEFT_OUT:
        assert (
            f"{name} has no complete test run on sm_90 with triton=={release}, for such problems: its canaries"
            in caution(made)
        )
    else:
        assert caution(made) == ""


DECODE = Problem(op="decode_attention", batch=4, heads_q=8, heads_k=8, seq_q=1, seq_k=1024, head_dim=64, dtype="bf16")
PAGED = msgspec.structs.replace(DECODE, op="paged_attention", page_size=16, pages_in_line=True, seqlens_k=True)
APPEND = Problem(
    op="append_kv", batch=4, heads_q=8, heads_k=8, seq_q=1, seq_k=1024, head_dim=64, dtype="bf16", seqlens_k=True
)
WRITE = msgspec.structs.replace(APPEND, op="write_pages", page_size=16, seqlens_k=False)
PACKED = Problem(
    op="varlen_attention_backward", batch=2, heads_q=8, heads_k=8, seq_q=1024, seq_k=1024, head_dim=128, dtype="bf16",
    total_q=1500, total_k=1500,
)  # fmt: skip


CACHED = [
    msgspec.structs.replace(problem, kv_format=kv_format, kv_scales="none" if kv_format == "nvfp4" else "head")
    for problem in (DECODE, PAGED, APPEND, WRITE)
    for kv_format in ("e4m3", "int8", "nvfp4")
]
PROBLEMS_OF_OPS = [DECODE, PAGED, APPEND, WRITE, PACKED, LATENT, *CACHED]


def of_cache(problem: Problem) -> str:
    return f"{problem.op}, {problem.kv_format}"


@pytest.mark.parametrize("release", RUN)
@pytest.mark.parametrize("problem", PROBLEMS_OF_OPS, ids=of_cache)
def test_of_what_was_run_no_canary_decides(problem: Problem, release: str) -> None:
    target = parse_target("cuda:sm_90", f"triton=={release}")
    assert caution(plan(problem, target)) == ""
    assert not canaries_wanted(target, Settings(), problem=problem)


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.9.0"])
@pytest.mark.parametrize("problem", PROBLEMS_OF_OPS, ids=of_cache)
def test_what_a_run_left_out_is_what_the_canaries_decide(parts: None, problem: Problem, release: str) -> None:
    target = parse_target("cuda:sm_90", f"triton=={release}")
    no_such_cache = release == "3.9.0" and problem.kv_format == "nvfp4"
    left_out = no_such_cache or (release == "3.7.1" and problem in (PACKED, LATENT))
    assert bool(caution(plan(problem, target))) is left_out
    assert canaries_wanted(target, Settings(), problem=problem) is left_out


@pytest.mark.parametrize(
    ("where", "toolchain", "said"),
    [
        ("cuda:sm_90", "triton==3.6.0", ""), ("cuda:sm_90", "triton==3.9.0", ""),
        ("cuda:sm_90", "triton==3.7.0", "sm_90 with triton==3.7.0: its canaries"),
        ("rocm:gfx942", "triton==3.6.0", "gfx942 with triton==3.6.0: its canaries"),
        ("ascend:ascend910b2", "triton-ascend==3.2.0", "ascend910b2 with triton-ascend==3.2.0: its canaries"),
    ],
)  # fmt: skip
def test_a_core_plan_says_it_too(where: str, toolchain: str, said: str) -> None:
    target = parse_target(where, toolchain)
    made = plan(DECODE, target)
    assert made.path == "triton"
    assert (said in caution(made)) if said else (caution(made) == "")
    never = plan(DECODE, target, settings=Settings(canary="never"))
    assert ("runs it without canaries" in caution(never)) is bool(said)
    assert caution(plan(DECODE, parse_target("cpu:generic"), settings=Settings(backend="interpreter"))) == ""


@pytest.mark.parametrize(("release", "forward", "backward"), [("3.7.0", 1, 1), ("3.7.1", 0, 1), ("3.9.0", 0, 0)])
def test_a_training_calls_plan_says_it_of_its_gradients(parts: None, release: str, forward: int, backward: int) -> None:
    where = parse_target("cuda:sm_90", f"triton=={release}")
    told = plan(msgspec.structs.replace(P, needs_grad=True), where).notes
    for kernel, expected in (("gluon_forward", forward), ("gluon_backward", backward)):
        assert sum(f"{kernel} has no complete test run on sm_90" in note for note in told) == expected
    assert told[-1] == "gradients by gluon_backward"


@pytest.mark.parametrize("name", ["gluon_forward", "gluon_mla"])
def test_canaries_that_were_asked_for_are_said(name: str) -> None:
    seen = parse_target("cuda:sm_90", "triton==3.8.0")
    made = plan(PROBLEMS[name], seen, settings=Settings(canary="always"))
    assert f"canary='always': the canaries of {name} run before its first call" in made.notes
    assert made.key == plan(PROBLEMS[name], seen).key


@pytest.mark.parametrize("toolchain", ["flagtree==3.6.0", "none"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_another_compiler_is_refused(name: str, toolchain: str) -> None:
    target = parse_target("cuda:sm_90", toolchain)
    made = plan(PROBLEMS[name], target)
    assert made.path != name
    assert f"not {name}: it needs Triton 3.6 or newer, and this is {target.toolchain}" in made.notes


def test_without_canaries_the_plan_says_that_nothing_decides() -> None:
    made = plan(P, NEWER, settings=Settings(canary="never"))
    assert made.path == NAME
    assert caution(made).endswith("runs it without canaries")
    assert made.key == plan(P, NEWER).key


# --- calls ------------------------------------------------------------------------------------------------------------


class Child(PlantedWorker):
    """In the place of the child that runs canaries: answers for the variant as planted, and well for the core."""

    asked: list[str]
    variants: Reply

    def request(self, task: str, seconds: float, **fields: Any) -> Reply:
        Child.asked.append(fields["path"])
        return Child.variants if fields["path"] == NAME else GOOD


GOOD = Reply(outcome="ok", facts={"error": 1e-4, "budget": 1e-3, "wrong": 0})
WRONG = msgspec.structs.replace(GOOD, facts=GOOD.facts | {"error": 0.5})
NO_ROOM = Reply(outcome="error", stage="run", kind="AcceleratorError", message="CUDA error: out of memory")


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Target:
    """CPU tensors are planned as if they lay on an H100 with a Triton that does not exist yet."""
    monkeypatch.setattr(dispatch, "detect_target", lambda device_type, index: (NEWER, ""))
    monkeypatch.setattr(canary, "Worker", Child)
    monkeypatch.setattr(ensure_compiled, "compile_in", Compiler(refused=""))
    monkeypatch.setattr(variants, "_seen", {})  # launches that were described before
    Child.asked, Child.variants = [], GOOD
    return NEWER


def test_right_canaries_let_it_run(newer, ran, tmp_path: Path) -> None:  # noqa: F811
    with portattn.settings(cache_dir=str(tmp_path)):
        silently(lambda: portattn.attention(*tensors()))
    assert (ran, Child.asked) == ([NAME], [NAME] * len(ForwardVariant.canaries))
    assert CompileStore(tmp_path).get(canary.key_of(NAME, NEWER)).passed
    assert caution(portattn.last_plan())


def test_a_wrong_canary_leads_to_the_core_with_an_incident(newer, ran, tmp_path: Path) -> None:  # noqa: F811
    Child.variants = WRONG
    with portattn.settings(cache_dir=str(tmp_path)):
        for _ in range(2):
            silently(lambda: portattn.attention(*tensors()))
    assert ran == ["triton"] * 2
    assert Child.asked.count(NAME) == 1  # the first one decides
    (incident,) = CompileStore(tmp_path).incidents()
    assert (incident.kernel, incident.symptom, incident.toolchain) == (NAME, "wrong-result", "triton==3.10.0")
    made = portattn.last_plan()
    assert not made.fell_back
    assert any(note.startswith(f"not {NAME}: it failed here") and incident.id in note for note in made.notes)


def test_never_means_that_no_canary_runs(newer, ran, tmp_path: Path) -> None:  # noqa: F811
    Child.variants = WRONG
    with portattn.settings(canary="never", cache_dir=str(tmp_path)):
        silently(lambda: portattn.attention(*tensors()))
    assert (ran, Child.asked) == ([NAME], [])


def test_where_no_canary_says_anything_the_core_runs_until_the_next_process(newer, ran, tmp_path: Path) -> None:  # noqa: F811
    Child.variants = NO_ROOM
    with portattn.settings(cache_dir=str(tmp_path)):
        with pytest.warns(UserWarning, match="inconclusive"):
            portattn.attention(*tensors())
        asked = len(Child.asked)
        silently(lambda: portattn.attention(*tensors()))
        assert (ran, len(Child.asked)) == (["triton"] * 2, asked)
        (note,) = [note for note in portattn.last_plan().notes if NAME in note]
        assert "no canary of it could say whether it is right here" in note
        assert "out of memory" in note
        assert not list(CompileStore(tmp_path).incidents())
        # The next process: nothing is on the disk, and what was in the way is gone.
        Child.variants = GOOD
        _store.cache_clear()
        dispatch.forget_plans()
        silently(lambda: portattn.attention(*tensors()))
    assert ran[-1] == NAME


def test_a_release_that_does_not_compile_it_leads_to_the_core(newer, ran, monkeypatch, tmp_path: Path) -> None:  # noqa: F811
    monkeypatch.setattr(ensure_compiled, "compile_in", Compiler("scheduled_forward"))
    with portattn.settings(cache_dir=str(tmp_path)):
        silently(lambda: portattn.attention(*tensors()))
    assert ran == ["triton"]
    (incident,) = CompileStore(tmp_path).incidents()
    assert (incident.kernel, incident.toolchain) == ("scheduled_forward", "triton==3.10.0")
    assert NAME not in Child.asked  # what does not compile has no canary


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'triton.experimental.gluon.language.nvidia'"),
        AttributeError("module 'triton.experimental.gluon.language' has no attribute 'warp_specialize'"),
        TypeError("TensorDescriptor.__init__() takes 4 positional arguments but 6 were given"),
        AssertionError("rank mismatch"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_release_that_lacks_what_describes_it_leads_to_the_core(
    newer,
    ran,  # noqa: F811
    monkeypatch,
    tmp_path: Path,
    error: Exception,
) -> None:
    """No compiler is asked: the launches cannot even be described in this process."""
    monkeypatch.setattr(variants, "signatures", Mock(side_effect=error))
    with portattn.settings(cache_dir=str(tmp_path)):
        assert portattn.plan("attention", *tensors()).path == "triton"
        for _ in range(2):
            silently(lambda: portattn.attention(*tensors()))
        made = portattn.last_plan()
    assert ran == ["triton"] * 2
    (incident,) = CompileStore(tmp_path).incidents()
    assert (incident.kernel, incident.symptom, incident.stage) == (NAME, "compile-error", "parse")
    assert str(error) in incident.message
    assert "lacking" in incident.log  # where it was raised
    assert "doctor" in incident.command
    (note,) = [note for note in made.notes if NAME in note]
    assert incident.id in note


def test_where_it_was_run_such_an_error_is_its_own(ran, sm_90, monkeypatch, tmp_path: Path) -> None:  # noqa: F811
    monkeypatch.setattr(variants, "_seen", {})
    monkeypatch.setattr(variants, "signatures", Mock(side_effect=TypeError("a mistake of the variant's")))
    with portattn.settings(cache_dir=str(tmp_path)), pytest.raises(TypeError, match="a mistake of the variant's"):
        portattn.attention(*tensors())
    assert ran == []


def test_asked_for_by_name_it_never_gives_way(newer, ran, tmp_path: Path) -> None:  # noqa: F811
    Child.variants = WRONG
    with portattn.settings(cache_dir=str(tmp_path)), pytest.raises(portattn.PathUnavailable, match="canary"):
        portattn.attention(*tensors(), backend=NAME)
    assert ran == []


def test_what_is_untested_in_gradients_alone() -> None:
    """Caps ran in the forward's tests on the chip, and are newer in the scheduled gradients."""
    for problem in (BACKWARD, msgspec.structs.replace(BACKWARD, op="attention")):
        for softcap in (False, True):
            made = plan(msgspec.structs.replace(problem, softcap=softcap), parse_target("cuda:sm_90", "triton==3.8.0"))
            assert made.path.startswith("gluon_")
            assert any("no complete test run" in note for note in made.notes) is (softcap and problem.backward)
