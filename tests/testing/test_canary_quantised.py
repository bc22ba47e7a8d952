"""Canaries of quantised caches: they read such caches, and find a kernel that widens their numbers wrongly."""

import importlib.util
from typing import ClassVar

import msgspec
import pytest
import torch
from opcalls import pretend_accelerator
from places import ROOT, tables
from support import PlantedWorker

import portattn
from portattn.api import dispatch
from portattn.compile.record_store import CompileStore
from portattn.config import Settings
from portattn.kernels import attend
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import parse_target
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import formats_of
from portattn.schema.tensors import KV_STORED
from portattn.testing import canary, verdict
from portattn.testing.executor import interpreter_missing
from portattn.worker.client import Reply

TABLES = tables(__file__)

MI300 = parse_target("rocm:gfx942", "triton==3.6.0")
CUDA = torch.device("cuda", 0)
READERS = ("decode_attention", "paged_attention")
STORED = [(op, kind, scales) for op in READERS for kind, row in formats_of(op).items() for scales in row.scales]
SOURCE = ROOT / "portattn" / "kernels" / "dequantize.py"
# Wrong widenings: what stands in kernels/dequantize.py, and what a compiler might make of it.
WRONG = TABLES["wrong"]


def made_for(op, kind, scales):
    return portattn.plan(canary.over(canary.CASES[op][0], kind, scales), MI300)


@pytest.mark.parametrize("op", READERS)
def test_verify_runs_every_format_and_kind_of_scales(op):
    plain, found = canary.CASES[op], canary.of_op(op)
    assert found[: len(plain)] == plain
    stored = [(p.kv_format, p.kv_scales) for p in found[len(plain) :]]
    assert stored == list(canary.STORED[op])
    assert {kind for kind, _ in stored} == set(formats_of(op))
    assert {scales for _, scales in stored} == {"none", "head", "token"}
    assert {p.dtype for p in found[len(plain) :]} == {"fp16", "bf16"}


@pytest.mark.parametrize(("op", "kind", "scales"), STORED)
def test_the_set_is_of_the_plans_own_cache(op, kind, scales):
    found = canary.cases(made_for(op, kind, scales))
    assert len(found) == len(canary.CASES[op])
    assert {(p.kv_format, p.kv_scales) for p in found} == {(kind, scales)}
    plans = [canary.plan_case(problem, MI300, Settings(), "triton") for problem in found]
    assert {plan.kernel for plan in plans if plan} == {CORES[op].name}
    assert None not in plans


@pytest.mark.parametrize(("op", "kind", "scales"), STORED)
def test_its_calls_hold_such_numbers(op, kind, scales):
    """What a child would make of each: bytes of that format, many different ones, and scales that differ."""
    for problem in canary.cases(made_for(op, kind, scales)):
        call = _call(problem)
        assert (call.problem.kv_format, call.problem.kv_scales) == (kind, scales)
        assert call.k.dtype is call.v.dtype is KV_STORED
        assert min(len(x.unique()) for x in (call.k, call.v)) > 64
        for scale in (call.k_scale, call.v_scale):
            if scales == "none":
                assert scale is None
            else:
                assert scale.ndim == (3 if scales == "token" else 2)
                assert len(scale.unique()) > 2


def _call(problem):
    plan = canary.plan_case(problem, MI300, Settings(), "triton")
    return verdict.call_of(canary.request_of(plan, problem, plan.path, "cpu:generic", "cpu"))


def test_a_canarys_record_is_of_one_chip_compiler_and_source(monkeypatch):
    replace = msgspec.structs.replace
    tools = MI300.toolchain
    targets = [
        MI300, parse_target("rocm:gfx90a", str(tools)),
        *(replace(MI300, toolchain=replace(tools, **part)) for part in (
            {"version": "3.4.0"}, {"distribution": "triton-ascend"}, {"components": (("rocm", "9.9"),)},
        )),
    ]  # fmt: skip
    keys = {canary.key_of("decode_split", target) for target in targets} | {canary.key_of("paged_split", MI300)}
    assert len(keys) == len(targets) + 1
    monkeypatch.setattr(canary, "kernel_source_digest", lambda: "another")
    assert canary.key_of("decode_split", MI300) not in keys


def test_each_format_and_kind_of_scales_has_a_record():
    stored = ["", *(canary.stored_as(made_for(*one)) for one in STORED if one[0] == "decode_attention")]
    assert len({canary.key_of("decode_split", MI300, one) for one in stored}) == len(stored)
    assert canary.key_of("decode_split", MI300, "") == canary.key_of("decode_split", MI300)


class Interpreted(PlantedWorker):
    """A worker that runs the kernels here, under the interpreter."""

    requests: ClassVar[list[Problem]] = []

    def request(self, task, seconds, **fields):
        fields |= {"path": "interpreter", "target": "cpu:generic", "device": "cpu"}
        Interpreted.requests.append(verdict.call_of(fields).problem)
        return Reply(outcome="ok", facts=verdict.compare(fields)["facts"])


@pytest.fixture
def settings(tmp_path, monkeypatch):
    if interpreter_missing():
        pytest.skip(interpreter_missing())
    monkeypatch.setattr(canary, "Worker", Interpreted)
    Interpreted.requests = []
    yield Settings(canary="always", cache_dir=str(tmp_path), compile_seconds=60.0)
    dispatch.forget_plans()


def plant(monkeypatch, folder, old, new):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file = folder / "planted_stored.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("dequantize", "packed_qk", "packed_pv", "nvfp4_qk", "nvfp4_pv"):
        monkeypatch.setattr(attend, name, getattr(module, name))


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_widening_is_found(settings, monkeypatch, tmp_path, kind):
    """The kernel as it is passes; with a fault planted its first canary quarantines that format alone."""
    other = "none" if kind == "nvfp4" else "token"
    for scales in (other, "head"):
        made = made_for("paged_attention", kind, scales)
        assert canary.check(made, MI300, settings, CUDA) is None
        assert Interpreted.requests == list(canary.cases(made))
        Interpreted.requests = []
    for number, (old, new) in enumerate(WRONG[kind].values()):
        own = Settings(canary="always", cache_dir=str(tmp_path / str(number)), compile_seconds=60.0)
        with monkeypatch.context() as patch:
            plant(patch, tmp_path, old, new)
            record = canary.check(made, MI300, own, CUDA)
        assert record is not None, old
        assert not record.passed
        assert f"cache {kind} scales head" in record.reason
        (incident,) = CompileStore(tmp_path / str(number)).incidents()
        assert (incident.kernel, incident.symptom) == ("paged_split", "wrong-result")
        assert incident.problem.kv_format == kind
        assert canary.known_failure(made, MI300, own) == record
        assert canary.known_failure(made_for("paged_attention", kind, other), MI300, own) is None
        assert canary.known_failure(portattn.plan(canary.CASES["paged_attention"][0], MI300), MI300, own) is None


@pytest.mark.interpreter
def test_a_call_over_that_format_takes_another_path_and_is_right(settings, monkeypatch, tmp_path):
    """End to end; the same operation over int8, and over the queries' dtype, stays on the core."""
    if portattn.plan("attention", *(torch.zeros(1, 1, 1, 16),) * 3).toolchain == "none":
        pytest.skip("no Triton to interpret with")
    pretend_accelerator(monkeypatch)
    monkeypatch.setattr(Problem, "words", False)  # bytes: what is planted widens those
    dispatch._warned.clear()
    plant(monkeypatch, tmp_path, *WRONG["e4m3"]["exponents one too small"])
    q, plain = torch.randn(2, 4, 1, 64, dtype=torch.float16), torch.randn(2, 2, 40, 64, dtype=torch.float16)
    one = torch.ones(())
    with portattn.settings(canary="always", cache_dir=settings.cache_dir):
        narrow = plain.to(torch.float8_e4m3fn)
        with pytest.warns(portattn.FallbackWarning, match=r"canary.*cache e4m3 scales none.*over its budget"):
            out = portattn.decode_attention(q, narrow, narrow, None)
        assert portattn.last_plan().path != "triton"
        wide = narrow.to(torch.float32)
        expected = portattn.decode_attention(q.float(), wide, wide, None, backend="reference")
        torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=1e-2)
        numbers = (plain * 20).round().to(torch.int8)
        portattn.decode_attention(q, numbers, numbers, None, k_scale=one / 20, v_scale=one / 20)
        assert portattn.last_plan().path == "triton"
        portattn.decode_attention(q, plain, plain, None)
        assert portattn.last_plan().path == "triton"
