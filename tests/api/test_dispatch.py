"""What a call does with its plan: run it, say so once, fall back after a failed compile, and never hide an error."""

import functools
import os
import subprocess
import sys
import warnings

import msgspec
import pytest
import torch
from threads import run_threads

import portattn
from portattn import FallbackWarning, PathUnavailable
from portattn.api import dispatch
from portattn.backends.cuda import CudaBackend
from portattn.backends.sdpa import SdpaPath
from portattn.compile import ensure_compiled
from portattn.compile.record_store import _store, store
from portattn.config import Settings
from portattn.planning.backend import Backend
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.problem import Problem

pytestmark = pytest.mark.usefixtures("core_only")  # variants: test_variants.py


def tensors(**changes):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 33, 64, generator=generator).half()
    k, v = (torch.randn(2, 2, 40, 64, generator=generator).half() for _ in range(2))
    return q, k, v


@pytest.fixture
def launched(monkeypatch):
    """Plans whose kernels were launched. There is no device: outputs become 0, and nothing is compiled here."""
    plans: list = []

    def launch_all(launches, made, q):
        plans.append(made)
        for name in ("out", "lse"):
            if launches[-1].arguments.get(name) is not None:
                launches[-1].arguments[name].zero_()

    monkeypatch.setattr(dispatch, "launch_all", launch_all)
    monkeypatch.setattr(ensure_compiled, "_in_this_process", lambda *arguments: None)
    return plans


def given(calls, **settings):
    with warnings.catch_warnings(record=True) as caught, portattn.settings(compile_seconds=3.0, **settings):
        warnings.simplefilter("always")
        calls()
    return [w for w in caught if issubclass(w.category, FallbackWarning)]


def test_the_core_path_runs_without_a_word(sm_90, compiler, launched):
    compiler("ok")
    q, k, v = tensors()
    assert given(lambda: portattn.attention(q, k, v, causal=True)) == []
    [made] = launched
    assert made.path == "triton"
    assert portattn.last_plan() is made
    assert portattn.plan("attention", q, k, v, causal=True) == made


@pytest.mark.parametrize("way", ["op", "handle"])
def test_the_warning_points_at_the_caller(sm_90, compiler, launched, way):
    compiler("error")
    q, k, v = tensors()

    def call():
        if way == "op":
            portattn.attention(q, k, v)
        else:
            portattn.prepare("attention", q, k, v).run(q, k, v)

    assert {warning.filename for warning in given(call)} == {__file__}


@pytest.mark.parametrize("behaviour", ["error", "crash", "hang"])
def test_a_failed_compile_falls_back_with_one_warning(sm_90, compiler, launched, behaviour):
    requests = compiler(behaviour)
    q, k, v = tensors()
    outs = []

    def twice():
        for _ in range(2):
            outs.append(portattn.attention(q, k, v))

    [warning] = given(twice)
    assert launched == []
    made = portattn.last_plan()
    assert (made.path, made.requested) == ("sdpa", "auto")
    assert made.fell_back
    message = str(warning.message)
    assert "attention runs on the sdpa path, not triton" in message
    assert made.rejected[0].incident in message
    assert "ttgir" in message
    assert warning.filename == __file__, "the warning must point at the caller"
    asked = 2 if behaviour == "crash" else 1  # a compiler that dies is retried once
    assert len(requests.read_text().splitlines()) == asked, "what failed is not compiled again"
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(outs[0], expected)
    assert torch.equal(outs[1], expected)


def test_a_second_process_sees_the_record(sm_90, compiler, launched):
    requests = compiler("crash")
    q, k, v = tensors()
    given(lambda: portattn.attention(q, k, v))
    asked = requests.read_text()
    # What a new process has not: plans, records read, keys known to compile, warnings given.
    dispatch.forget_plans()
    dispatch._warned.clear()
    _store.cache_clear()
    made = portattn.plan("attention", q, k, v)
    assert made.path == "sdpa"
    assert "SIGABRT" in made.rejected[0].reason
    assert len(given(lambda: portattn.attention(q, k, v))) == 1
    assert requests.read_text() == asked


def test_one_warning_for_each_cause(sm_90, launched):
    wide, less = [torch.zeros(1, 1, 3, 576).half()] * 3, torch.zeros(1, 1, 3, 512).half()

    def calls():
        for _ in range(3):
            portattn.attention(*wide)  # no other path takes values of 576 columns
            with torch.enable_grad():  # the gradients' kernels take heads of 256
                portattn.attention(less.clone().requires_grad_(), less, less)

    caught = [str(w.message) for w in given(calls)]
    assert len(caught) == 2
    assert any("reference path, not triton: head_dim_v is 576" in m for m in caught)
    assert any("gradients are asked for: head_dim is 512, and the kernel's tiles take up to 256" in m for m in caught)


def test_silent_falls_back_without_a_word_and_error_not_at_all(sm_90, launched):
    wide = [torch.zeros(1, 1, 3, 576).half()] * 3
    assert given(lambda: portattn.attention(*wide), fallback="silent") == []
    assert portattn.last_plan().path == "reference"
    with portattn.settings(fallback="error"), pytest.raises(PathUnavailable) as error:
        portattn.attention(*wide)
    assert "fallback='error'" in str(error.value)
    assert "head_dim_v is 576" in str(error.value)
    assert error.value.rejected[0].path == "triton"


def test_error_also_stops_after_a_failed_compile(sm_90, compiler, launched):
    compiler("error")
    with portattn.settings(fallback="error"), pytest.raises(PathUnavailable, match="PassManager::run failed"):
        portattn.attention(*tensors())


def test_a_named_path_never_falls_back(sm_90, compiler, launched):
    compiler("error")
    q, k, v = tensors()
    with pytest.raises(PathUnavailable, match=r"(?s)cannot run this on.*PassManager::run failed") as error:
        portattn.attention(q, k, v, backend="triton")
    assert error.value.rejected[0].incident
    with pytest.raises(PathUnavailable, match="PassManager::run failed"):  # and by the kept record
        portattn.attention(q, k, v, backend="triton")
    with pytest.raises(PathUnavailable, match="seqlens_k"):
        portattn.attention(q, k, v, seqlens_k=torch.tensor([1, 2], dtype=torch.int32), backend="sdpa")
    assert launched == []


def test_an_error_while_running_is_not_caught_and_not_retried(sm_90, compiler, launched, monkeypatch):
    compiler("ok")
    tried = []

    def fails(*arguments):
        tried.append(arguments)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(dispatch, "launch_all", fails)
    for backend in ("auto", "triton"):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            portattn.attention(*tensors(), backend=backend)
    assert len(tried) == 2
    assert portattn.last_plan() is None, "a call that failed has not run"
    assert not list(store(Settings(cache_dir=portattn.config.current().cache_dir)).incidents())


def test_a_vendor_error_passes_through(sm_90, launched, monkeypatch):
    def fails(*arguments, **rest):
        raise RuntimeError("cuDNN: bad")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    with pytest.raises(RuntimeError, match="cuDNN: bad"):
        portattn.attention(*tensors(), backend="sdpa")


def test_a_second_call_does_not_plan(monkeypatch):
    made = []
    real = dispatch.plan
    monkeypatch.setattr(dispatch, "plan", lambda *a, **k: made.append(a) or real(*a, **k))
    q, k, v = tensors()
    for _ in range(3):
        portattn.attention(q, k, v)
    assert len(made) == 1
    portattn.attention(q, k, v, causal=True)
    assert len(made) == 2
    with portattn.settings(fallback="silent"):
        portattn.attention(q, k, v)
    assert len(made) == 3
    dispatch.forget_plans()
    portattn.attention(q, k, v)
    assert len(made) == 4


def test_plan_and_explain_run_nothing(monkeypatch):
    for module, name in ((dispatch, "runner"), (dispatch, "launch_all")):
        monkeypatch.setattr(module, name, lambda *a: pytest.fail("something ran"))
    q, k, v = tensors()
    made = portattn.plan("attention", q, k, v, causal="top_left", return_lse=True)
    assert made.problem.causal == "top_left"
    assert (made.path, made.target) == ("sdpa", "cpu:generic")
    assert "sdpa path" in portattn.explain("decode_attention", q, k, v, None)
    assert portattn.last_plan() is None
    with pytest.raises(portattn.ArgumentError, match="scale is nan"):
        portattn.plan("attention", q, k, v, scale=float("nan"))


def test_last_plan_is_the_plan_that_ran():
    assert portattn.last_plan() is None
    q, k, v = tensors()
    portattn.attention(q, k, v)
    assert portattn.last_plan().problem.op == "attention"
    portattn.decode_attention(q, k, v, None)
    assert portattn.last_plan().problem.op == "decode_attention"
    seen = []
    run_threads(lambda: seen.append(portattn.last_plan()))
    assert seen == [None]


def test_threads_do_not_disturb_each_other():
    q, k, v = tensors()
    wrong = []

    def work(causal):
        for _ in range(20):
            portattn.attention(q, k, v, causal=causal)
            if (portattn.last_plan().problem.causal == "none") != (causal is False):
                wrong.append(causal)

    run_threads(*(functools.partial(work, c) for c in (False, True, False, True)))
    assert wrong == []


def test_a_device_that_no_backend_knows(monkeypatch):
    target, unknown = dispatch.detect_target("xpu", 0)
    assert target.name == "cpu:generic"
    assert "no backend knows device xpu:0" in unknown
    assert "cuda" in unknown
    q = torch.zeros(1, 1, 3, 8)
    monkeypatch.setattr(dispatch, "detect_target", lambda device_type, index: (target, unknown))
    [warning] = given(lambda: portattn.attention(q, q, q))
    assert "no backend knows device xpu:0" in str(warning.message)
    with pytest.raises(PathUnavailable, match="no backend knows device xpu"):
        portattn.attention(q, q, q, backend="triton")


def test_meta_tensors_give_their_shape_without_a_word():
    q, v = torch.zeros(1, 2, 3, 8, device="meta"), torch.zeros(1, 2, 5, 4, device="meta")
    k = torch.zeros(1, 2, 5, 8, device="meta")
    outs = []
    assert given(lambda: outs.append(portattn.attention(q, k, v))) == []
    assert (outs[0].shape, outs[0].device.type) == ((1, 2, 3, 4), "meta")


class Graphics(Backend):
    """A backend whose device is there and whose arch is not known, as far as `seen` tells."""

    name, device_type, folder, vendor = "cuda", "meta", CudaBackend.folder, (SdpaPath(),)

    def __init__(self, arch, seen):
        self.arch, self.seen = arch, seen

    def detect(self, index=None):
        return self.arch

    def describe(self, index=None):
        return self.seen


@pytest.mark.parametrize(
    ("arch", "seen", "reason"),
    [
        (None, "compute capability 7.5", "backend cuda finds compute capability 7.5, which is none of its arches"),
        (None, "", "backend cuda finds device meta:0, which is none of its arches"),
        ("sm_52", "", "backend cuda finds arch sm_52, which is none of its arches"),
    ],
)
def test_a_device_of_a_known_backend_with_an_unknown_arch(monkeypatch, arch, seen, reason):
    registry = Registry.load()
    backends = {"cpu": registry.backends["cpu"], "cuda": Graphics(arch, seen)}
    other = msgspec.structs.replace(registry, backends=backends)
    monkeypatch.setattr(dispatch.Registry, "load", staticmethod(lambda: other))
    target, unknown = dispatch.detect_target("meta", 0)
    assert (target.name, unknown) == (f"cuda:{arch or 'unknown'}", "")
    made = plan(Problem(batch=1, heads_q=1, heads_k=1, seq_q=8, seq_k=8, head_dim=64), target, other)
    assert (made.path, made.fell_back) == ("sdpa", True)
    assert [r.path for r in made.rejected] == ["triton"]
    assert reason in made.rejected[0].reason
    with pytest.raises(PathUnavailable, match="none of its arches"):
        plan(made.problem, target, other, settings=Settings(backend="triton"))


def test_a_backend_without_a_device_here_is_no_target(monkeypatch):
    registry = Registry.load()
    other = msgspec.structs.replace(registry, backends=registry.backends | {"cuda": Graphics(None, "")})
    monkeypatch.setattr(dispatch.Registry, "load", staticmethod(lambda: other))
    target, unknown = dispatch.detect_target("meta", None)
    assert (target.name, bool(unknown)) == ("cpu:generic", True)


def test_planning_raises_what_the_call_raises(sm_90, launched):
    wide = [torch.zeros(1, 1, 3, 576).half()] * 3
    assert portattn.plan("attention", *wide).path == "reference"
    with portattn.settings(fallback="error"), pytest.raises(PathUnavailable, match="fallback='error'"):
        portattn.plan("attention", *wide)


def test_an_interpreter_that_cannot_run_here_is_an_unavailable_path():
    """Once Triton is imported to compile, as torch.compile and transformers do; explain says so too."""
    program = """
import triton, torch, portattn
q = torch.randn(1, 2, 5, 16)
for call in (portattn.attention, lambda *given, **named: portattn.explain("attention", *given, **named)):
    try:
        call(q, q, q, backend="interpreter")
    except portattn.PathUnavailable as error:
        print(error.rejected[0].path, error.rejected[0].reason, error.rejected[0].hint)
"""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=inherited, capture_output=True, text=True, check=True)
    said = "interpreter Triton was imported for compiling"
    assert [line.startswith(said) for line in done.stdout.splitlines()] == [True, True]
    assert "TRITON_INTERPRET=1" in done.stdout


def test_the_interpreter_runs_where_it_is_named(device):
    if device.path != "interpreter":
        pytest.skip("Triton compiles for the accelerator in this process")
    q, k, v = (t.float() for t in tensors())
    named = portattn.attention(q, k, v, causal=True, backend="interpreter")
    assert portattn.last_plan().path == "interpreter"
    torch.testing.assert_close(named, portattn.attention(q, k, v, causal=True), atol=2e-6, rtol=1e-5)
    assert portattn.last_plan().path == "sdpa"
    wide = torch.zeros(1, 1, 3, 512, requires_grad=True)
    with pytest.raises(PathUnavailable, match="gradients"):
        portattn.attention(wide, wide, wide, backend="interpreter")


@pytest.mark.gpu
def test_a_kept_call_gives_what_the_first_gave(tmp_path):
    q, k, v = (t.cuda() for t in tensors())
    with portattn.settings(cache_dir=str(tmp_path)):
        first, first_lse = portattn.attention(q, k, v, causal=True, return_lse=True)
        made = portattn.last_plan()
        dispatch._last.set(None)
        again, again_lse = portattn.attention(q, k, v, causal=True, return_lse=True)
        assert portattn.last_plan() is made
        assert torch.equal(first, again)
        assert torch.equal(first_lse, again_lse)
        assert not torch.equal(first, portattn.attention(q * 2, k, v, causal=True))
        assert isinstance(portattn.attention(q, k, v, causal=True), torch.Tensor)
