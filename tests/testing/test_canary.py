"""Canaries: what each answer of a run means, what is kept of it, and a wrong kernel that ends in another path."""

import threading
from pathlib import Path
from typing import Any, ClassVar

import evidence_files
import msgspec
import pytest
import torch
from opcalls import pretend_accelerator
from support import PlantedWorker

import portattn
from portattn import Problem
from portattn.api import dispatch
from portattn.backends.cuda.schedules import FORWARD
from portattn.compile.record_store import CompileStore
from portattn.config import Settings
from portattn.planning import core_path
from portattn.planning.data_files import load_verified
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import parse_target
from portattn.schema.problem_limits import OPS
from portattn.testing import canary
from portattn.testing.oracle import dense_view
from portattn.testing.random_calls import random_call
from portattn.testing.tolerance import judge
from portattn.worker.client import Reply

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
MI300 = parse_target("rocm:gfx942", "triton==3.6.0")
GOOD = Reply(outcome="ok", facts={"error": 1e-4, "budget": 1e-3, "wrong": 0, "lse_error": 0.0, "lse_budget": 1e-5})
WRONG = msgspec.structs.replace(GOOD, facts=GOOD.facts | {"error": 0.5})
NAN = msgspec.structs.replace(GOOD, facts=GOOD.facts | {"wrong": 3})
ANSWERS: dict[str, tuple[Reply, str]] = {
    "good": (GOOD, ""), "wrong numbers": (WRONG, "wrong-result"), "NaN": (NAN, "wrong-result"),
    "hang": (Reply(outcome="hang", stage="run", kind="timeout", message="no answer in 3 s"), "hang"),
    "crash": (Reply(outcome="crash", stage="run", kind="SIGSEGV", message="SIGSEGV"), "compiler-crash"),
    "illegal access": (
        Reply(outcome="error", kind="AcceleratorError", message="CUDA error: an illegal memory access"), "wrong-result",
    ),
}  # fmt: skip
NO_COMPILE = Reply(outcome="error", stage="ttgir", kind="CompilationError", message="at 3:4: unsupported")


class Fake(PlantedWorker):
    """A worker that answers as planted, and counts."""

    started: ClassVar[int] = 0
    requests: ClassVar[list[dict[str, Any]]] = []
    answer: ClassVar[Reply] = GOOD

    def __init__(self, **options):
        assert options == {"runs": "kernels"}
        Fake.started += 1

    def request(self, task, seconds, **fields):
        assert (task, seconds) == ("portattn.testing.verdict:compare", 3.0)
        Fake.requests.append(fields)
        return Fake.answer


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(canary, "Worker", Fake)
    monkeypatch.setattr(canary, "MOST_AT_ONCE", 1)  # on machines of many cores too
    Fake.started, Fake.requests, Fake.answer = 0, [], GOOD
    yield Settings(canary="always", cache_dir=str(tmp_path), compile_seconds=3.0)
    dispatch.forget_plans()


def made_for(op, target=SM_90):
    return portattn.plan(canary.CASES[op][0], target)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", [SM_90, MI300], ids=str)
def test_every_family_has_cases_that_its_kernel_takes(op, target):
    plans = [canary.plan_case(problem, target, Settings(), "triton") for problem in canary.CASES[op]]
    assert {made.kernel for made in plans} == {CORES[op].name}
    assert all(canary.cases(made) == canary.CASES[op] for made in plans)


def test_they_run_where_nobody_has_run_the_tests():
    assert core_path.seen_to_run(SM_90).level == "measured"
    newer = parse_target("cuda:sm_90", "triton==3.7.0")
    for target, auto in (
        (SM_90, False),
        (MI300, True),
        (newer, True),
        (parse_target("cuda:sm_80", "triton==3.6.0"), True),
    ):
        assert core_path.canaries_wanted(target, Settings()) is auto
        assert core_path.canaries_wanted(target, Settings(canary="always"))
        assert not core_path.canaries_wanted(target, Settings(canary="never"))


def test_evidence_that_is_not_as_it_should_be_is_an_error(tmp_path):
    (tmp_path / "verified.toml").write_text('[[seen]]\narch = ["sm_90"]\ntoolchain = "x"\nlevel = "compiles"\n')
    with pytest.raises(portattn.DataError, match=r"verified\.toml"):
        core_path._seen(tmp_path)
    assert core_path._seen(tmp_path / "elsewhere") == ()


@pytest.mark.parametrize(
    "newer",
    [
        'untested_ops = ["decoding"]',
        'untested = ["kv_format=!as_q"]',
        'untested_gradients = ["kv_format=!as_q"]',
        'untested_queries = ["e4"]',
    ],
)
def test_evidence_that_leaves_out_what_there_is_not_is_an_error(tmp_path, newer):
    seen = 'arch = ["sm_90"]\ntoolchain = "x"\nlevel = "runs"\ndate = 2026-11-24\nwhat = "tests"\n'
    (tmp_path / "verified.toml").write_text(f"[[seen]]\n{seen}{newer}\n")
    with pytest.raises(portattn.DataError, match=r"verified\.toml.*untested|verified\.toml.*kv_format"):
        load_verified(tmp_path)


@pytest.mark.parametrize("name", ANSWERS)
def test_each_answer_is_a_record_that_is_kept(settings, name):
    Fake.answer, symptom = ANSWERS[name]
    record = canary.check(made_for("paged_attention"), MI300, settings, torch.device("cuda", 1))
    store = CompileStore(Path(settings.cache_dir))
    assert Fake.started == 1
    assert {request["device"] for request in Fake.requests} == {"cuda:1"}  # the call's own
    if not symptom:
        assert record is None
        cached = store.get(canary.key_of("paged_split", MI300))
        assert (cached.passed, cached.level, cached.error) == (True, "runs", 1e-4)
        assert len(Fake.requests) == len(canary.CASES["paged_attention"])
        assert not list(store.incidents())
    else:
        assert not record.passed
        assert record.standing == ("timeout" if symptom == "hang" else "lasting")
        (incident,) = store.incidents()
        assert (incident.symptom, incident.stage, incident.id) == (symptom, "run", record.incident)
        assert (incident.kernel, incident.target, incident.toolchain) == ("paged_split", MI300.name, "triton==3.6.0")
        assert (incident.problem, incident.lowering is None) == (canary.CASES["paged_attention"][0], False)
        assert f"quirks new --from-incident {incident.id}" in record.reason
        assert len(Fake.requests) == 1  # the first mismatch decides
    # Neither this process nor the next looks again.
    again = canary.check(made_for("paged_attention"), MI300, settings, torch.device("cuda", 1))
    assert (again is None) is (record is None)
    assert Fake.started == 1


INCONCLUSIVE = {
    "a compile that fails": NO_COMPILE,
    "killed for memory": Reply(outcome="crash", stage="run", kind="SIGKILL", message="SIGKILL"),
    "no room on the device": Reply(
        outcome="error", stage="run", kind="AcceleratorError", message="CUDA error: out of memory"
    ),
    "the device is another's": Reply(
        outcome="error", stage="run", kind="AcceleratorError", message="CUDA error: all devices are busy or unavailable"
    ),
    "a device in trouble": Reply(
        outcome="error", stage="run", kind="AcceleratorError", message="CUDA error: uncorrectable ECC error"
    ),
    "a full disk": Reply(outcome="crash", stage="run", kind="SIGABRT", message="x", log="No space left on device"),
    "a signal that nobody raises": Reply(outcome="crash", stage="run", kind="SIGBUS", message="SIGBUS"),
    "slow to begin": Reply(outcome="hang", stage="start", kind="timeout", message="no answer in 3 s"),
    "dead before the kernels": Reply(outcome="crash", stage="import", kind="SIGSEGV", message="SIGSEGV"),
}  # fmt: skip


@pytest.mark.parametrize("name", INCONCLUSIVE)
def test_what_says_nothing_is_said_and_tried_again(settings, name):
    Fake.answer = INCONCLUSIVE[name]
    with pytest.warns(UserWarning, match="inconclusive"):
        assert canary.check(made_for("attention"), MI300, settings, torch.device("cuda", 0)) is None
    assert CompileStore(Path(settings.cache_dir)).get(canary.key_of("dense_forward", MI300)) is None


class Sabotaged(Fake):
    """Really runs the kernels, under the interpreter, and spoils one element of what they give."""

    def request(self, task, seconds, **fields):
        from portattn.testing import verdict

        fields |= {"path": "interpreter", "target": "cpu:generic", "device": "cpu"}
        original = verdict.run_core

        def spoiled(plan, call, cores):
            out, lse = original(plan, call, cores)
            if plan.kernel == "decode_split":
                out[0, -1, -1, -1] += 0.25
            return out, lse

        verdict.run_core = spoiled
        try:
            return Reply(outcome="ok", facts=verdict.compare(fields)["facts"])
        finally:
            verdict.run_core = original


@pytest.mark.interpreter
def test_a_wrong_kernel_is_quarantined_and_the_call_is_right(settings, monkeypatch):
    """End to end: the canary finds it, the call takes another path and says why, and other families go on."""
    if portattn.plan("attention", *(torch.zeros(1, 1, 1, 16),) * 3).toolchain == "none":
        pytest.skip("no Triton to interpret with")
    from portattn.testing.executor import interpreter_missing

    if interpreter_missing():
        pytest.skip(interpreter_missing())
    monkeypatch.setattr(canary, "Worker", Sabotaged)
    pretend_accelerator(monkeypatch)
    dispatch._warned.clear()
    q, k, v = torch.randn(2, 4, 1, 64), torch.randn(2, 2, 40, 64), torch.randn(2, 2, 40, 64)
    with portattn.settings(canary="always", cache_dir=settings.cache_dir):
        with pytest.warns(portattn.FallbackWarning, match="canary.*over its budget.*quirks new --from-incident"):
            out = portattn.decode_attention(q, k, v, None)
        plan = portattn.last_plan()
        assert plan.path != "triton"
        assert plan.rejected[0].incident
        (incident,) = CompileStore(Path(settings.cache_dir)).incidents()
        assert (incident.id, incident.symptom) == (plan.rejected[0].incident, "wrong-result")
        expected = portattn.attention(q.double().float(), k, v, backend="reference")
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        with portattn.settings(fallback="error"), pytest.raises(portattn.PathUnavailable, match="canary"):
            portattn.decode_attention(q, k, v, None)
        # What is only planned says the same.
        assert portattn.plan("decode_attention", q, k, v, None).path == plan.path
        assert "canary" in portattn.explain("decode_attention", q, k, v, None)
        portattn.attention(q.expand(2, 4, 3, 64), k, v)
        assert portattn.last_plan().path == "triton"


def test_what_a_run_on_the_chip_did_not_reach_has_canaries(tmp_path, monkeypatch):
    """Attention over e4m3 with 3.9.0; what passed there has none: caches of 8 bits, and what fills one."""
    evidence_files.plant(tmp_path, monkeypatch)
    target = parse_target("cuda:sm_90", "triton==3.9.0")
    seen = core_path.seen_to_run(target)
    plain = canary.CASES["decode_attention"][0]
    caches = [canary.over(plain, kind, "token") for kind in ("e4m3", "int8")]
    for problem in (plain, *caches, *canary.CASES["write_pages"], *canary.CASES["append_kv"]):
        assert seen.covers(problem)
        assert not core_path.canaries_wanted(target, Settings(), problem=problem)
    left = canary.over(canary.CASES["attention"][0], "e4m3", "head")
    assert left.q_format == "e4m3"
    assert not seen.covers(left)
    assert core_path.canaries_wanted(target, Settings(), problem=left)
    assert not core_path.canaries_wanted(target, Settings(canary="never"), problem=left)


class Meeting:
    """A worker whose first answers wait until several are asked at once; closing it ends what it is asked."""

    met: ClassVar[threading.Barrier]
    answers: ClassVar[dict[int, Reply]] = {}
    asked: ClassVar[list[str]] = []
    closed: ClassVar[int] = 0

    def __init__(self, **options):
        self.over = threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        Meeting.closed += 1
        self.over.set()

    def request(self, task, seconds, **fields):
        place = len(Meeting.asked)
        Meeting.asked.append(str(fields["problem"]))
        if place < Meeting.met.parties:
            Meeting.met.wait(10)
        answer = Meeting.answers.get(place, GOOD)
        if answer is ENDLESS:
            assert self.over.wait(10), "nobody ended it"
            return Reply(outcome="crash", stage="run", kind="closed")
        return answer


ENDLESS = Reply(outcome="hang", stage="run")


@pytest.mark.parametrize("fails", [False, True])
def test_several_run_at_once(tmp_path, monkeypatch, fails):
    """All answers count; and where the first is wrong, the ones that have not ended are ended, not waited for."""
    settings = Settings(canary="always", cache_dir=str(tmp_path), compile_seconds=3.0)
    monkeypatch.setattr(canary, "Worker", Meeting)
    monkeypatch.setattr(canary, "available_cores", lambda: 64)
    made = made_for("attention")
    number = min(canary.MOST_AT_ONCE, len(canary.CASES["attention"]))
    assert number > 1
    Meeting.met, Meeting.asked, Meeting.closed = threading.Barrier(number), [], 0
    # Which case is the first to be asked is not known, so all but the ones that wait for each other are endless.
    Meeting.answers = dict.fromkeys(range(number), WRONG) if fails else {}
    Meeting.answers |= dict.fromkeys(range(number, 20), ENDLESS) if fails else {}
    record = canary.check(made, MI300, settings, torch.device("cuda", 0))
    assert Meeting.closed == number
    if fails:
        assert not record.passed
    else:
        assert record is None
        assert len(Meeting.asked) == len(canary.CASES["attention"])


def test_what_says_nothing_beside_others_is_asked_again_alone(tmp_path, monkeypatch):
    settings = Settings(canary="always", cache_dir=str(tmp_path), compile_seconds=3.0)
    monkeypatch.setattr(canary, "Worker", Meeting)
    monkeypatch.setattr(canary, "available_cores", lambda: 64)
    made, number = made_for("attention"), len(canary.CASES["attention"])
    Meeting.met, Meeting.asked, Meeting.closed = threading.Barrier(min(canary.MOST_AT_ONCE, number)), [], 0
    Meeting.answers = {0: Reply(outcome="error", kind="OutOfMemoryError", message="CUDA out of memory")}
    assert canary.check(made, MI300, settings, torch.device("cuda", 0)) is None
    assert (len(Meeting.asked), Meeting.closed) == (number + 1, min(canary.MOST_AT_ONCE, number) + 1)


def test_every_case_of_a_variant_is_run_once(tmp_path, monkeypatch):
    settings = Settings(canary="always", cache_dir=str(tmp_path), compile_seconds=3.0)
    newer = parse_target("cuda:sm_90", "triton==3.7.0")
    made = portattn.plan(FORWARD[0], newer)
    assert made.path == "gluon_forward"
    monkeypatch.setattr(canary, "Worker", Meeting)
    monkeypatch.setattr(canary, "available_cores", lambda: 64)
    Meeting.met, Meeting.asked, Meeting.closed, Meeting.answers = threading.Barrier(canary.MOST_AT_ONCE), [], 0, {}
    assert canary.check(made, newer, settings, torch.device("cuda", 0)) is None
    assert len(Meeting.asked) == len(set(Meeting.asked)) == len(FORWARD)
    assert len(FORWARD) > canary.MOST_AT_ONCE


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kv_format", ["e4m3", "int8", "int4", "nvfp4"])
@pytest.mark.parametrize("op", ["append_kv", "write_pages"])
def test_every_writer_has_cases_that_store_as_it_does(op, kv_format, dtype):
    """New rows of float32 are stored by bytes where those of 16 bits are stored in words."""
    problem = portattn.Problem(
        op=op, batch=1, heads_q=8, heads_k=8, seq_q=1, seq_k=8192, head_dim=64, kv_format=kv_format, dtype=dtype,
        kv_scales={"nvfp4": "none", "int4": "token"}.get(kv_format, "head"), seqlens_k=op == "append_kv",
        page_size=16 * (op == "write_pages"),
    )  # fmt: skip
    target = parse_target("cuda:sm_90", "triton==3.7.0")
    made = portattn.plan(problem, target)
    asked = canary._asked(made, target, Settings())
    assert len(asked) == 2
    assert all(case is not None and canary._in_words(case) == canary._in_words(made) for _, case in asked)


P = Problem(
    batch=2, heads_q=4, heads_k=2, seq_q=70, seq_k=400, head_dim=64, dtype="bf16", kv_format="e4m3", kv_scales="head",
    return_lse=True,
)  # fmt: skip


@pytest.fixture
def call():
    return random_call(P, 0)


def narrow(call, order=None):
    """By definition, probabilities e4m3; with an order the values are those of other keys."""
    view = dense_view(call)
    scores = view.products(view.q.double(), view.k.double()) * call.scale
    numbers = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = (numbers * 256).float().to(torch.float8_e4m3fn).double() / 256
    v = view.v.double() if order is None else view.v.double()[:, :, order]
    out = view.mixed(rounded / numbers.sum(-1, keepdim=True), v)
    return out.to(call.dtype), torch.logsumexp(scores, dim=-1).float()


def test_its_own_rounding_is_allowed_and_no_path_of_16_bits_may_have_it(call):
    out, lse = narrow(call)
    facts = judge(call, out, lse, probabilities="e4m3")
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]
    assert facts["lse_error"] <= facts["lse_budget"]
    strict = judge(call, out, lse)
    assert strict["error"] > strict["budget"]
    assert strict["lse_budget"] < facts["lse_budget"]


def test_two_keys_in_each_others_places_are_seen(call):
    order = torch.arange(P.seq_k).view(-1, 16)
    order[:, [2, 8]] = order[:, [8, 2]]  # as a wrong order of 16 keys would have it
    facts = judge(call, *narrow(call, order.flatten()), probabilities="e4m3")
    assert facts["error"] > facts["budget"]


def test_a_sum_that_is_too_small_is_seen(call):
    out, lse = narrow(call)
    facts = judge(call, out, lse - 0.1, probabilities="e4m3")
    assert facts["lse_error"] > facts["lse_budget"]
