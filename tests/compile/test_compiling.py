"""From a planned kernel to one that is known to compile: in a child, once, with failures classified and cached."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from support import BEHAVIOURS, problem, random_call

import portattn
from portattn.compile import ensure_compiled
from portattn.compile.ensure_compiled import code_key
from portattn.compile.record_store import CompileStore, store
from portattn.config import Settings
from portattn.launch import kernel_calls
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.worker.client import Reply, Worker, is_crash


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=str(tmp_path / "records-here"), compile_seconds=3.0)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of what was compiled in this process, where there is no device to compile for."""
    seen: list[str] = []

    def compiles(key, made, launches, load, q, target, records):
        seen.append(key)

    monkeypatch.setattr(ensure_compiled, "_in_this_process", compiles)
    return seen


def planned(**fields):
    p = problem(dtype="fp16", seq_q=64, seq_k=64, head_dim=64, **fields)
    target = parse_target("cuda:sm_90", "triton==3.6.0")
    made = plan(p, target, settings=Settings(backend="triton"))
    launches, out, _ = kernel_calls(made, random_call(p), 132)
    return made, launches, out, target


class Startable:
    """In the place of the child of first compiles."""

    def __init__(self) -> None:
        self.starts = 0

    def start(self) -> None:
        self.starts += 1


def test_a_child_is_expected_where_nothing_was_compiled(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; not where compiles are this process's, and not where something was recorded, by whatever process."""
    child = Startable()
    monkeypatch.setattr(ensure_compiled, "_worker", None)
    assert ensure_compiled._shared_worker() is ensure_compiled._shared_worker()  # of all threads; not started
    monkeypatch.setattr(ensure_compiled, "_worker", None)
    monkeypatch.setattr(ensure_compiled, "_shared_worker", lambda: child)
    ensure_compiled.expect(msgspec.structs.replace(settings, isolate="never"))
    assert child.starts == 0
    ensure_compiled.expect(settings)
    assert child.starts == 1
    monkeypatch.setattr(ensure_compiled, "_worker", child)
    ensure_compiled.expect(settings)
    assert child.starts == 1
    monkeypatch.setattr(ensure_compiled, "_worker", None)
    made, *_ = planned()
    CompileStore(Path(settings.cache_dir)).put(ensure_compiled._record("0" * 32, made, passed=True))
    assert not store(settings).empty()
    ensure_compiled.expect(settings)
    assert child.starts == 1


def requests_in(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_a_first_compile_is_isolated_and_remembered(compiler, settings, in_process) -> None:
    requests = compiler("ok")
    made, launches, q, target = planned()
    assert ensure_compiled.ensure(made, launches, q, target, settings) is None
    assert ensure_compiled.ensure(made, launches, q, target, settings) is None
    assert requests_in(requests) == 1
    assert in_process == [code_key(made, launches)]
    seen = CompileStore(Path(settings.cache_dir)).get(code_key(made, launches))
    assert seen.passed
    assert (seen.level, seen.kernel, seen.target, seen.toolchain) == (
        "compiles", "dense_forward", "cuda:sm_90", "triton==3.6.0",
    )  # fmt: skip
    assert seen.facts == {"scratchpad_bytes": 1024, "num_warps": 4, "spills": 0}


LONG = {"dtype": "fp16", "seq_q": 1, "seq_k": 4096, "batch": 1, "head_dim": 64}
PAGES = LONG | {"page_size": 64, "seqlens_k": True}
LAUNCHES = {
    "attention": (LONG, ["dense_forward"]),
    "varlen_attention": (LONG | {"total_q": 1, "total_k": 4096}, ["dense_forward"]),
    "decode_attention": (LONG, ["warps_apart", "combine"]), "paged_attention": (PAGES, ["warps_apart", "combine"]),
    "sparse_attention": (LONG | {"tokens": 2048}, ["sparse_split", "combine"]),
    "mla_attention": (PAGES | {"heads_k": 1, "head_dim_v": 32}, ["decode_split", "combine"]),
}  # fmt: skip


@pytest.mark.parametrize("op", LAUNCHES)
def test_every_launch_of_a_plan_is_compiled(compiler, settings, in_process, op) -> None:
    requests = compiler("ok")
    fields, functions = LAUNCHES[op]
    p = problem(op=op, **fields)
    target = parse_target("cuda:sm_90", "triton==3.6.0")
    made = plan(p, target, settings=Settings(backend="triton"))
    assert (made.launch.splits > 1) is (len(functions) > 1)
    launches, q, _ = kernel_calls(made, random_call(p), 132)
    assert ensure_compiled.ensure(made, launches, q, target, settings) is None
    asked = [json.loads(line)["signature"]["function"] for line in requests.read_text().splitlines()]
    assert asked == functions


def test_both_kernels_of_gradients_are_compiled_with_their_own_tiles(compiler, settings, in_process) -> None:
    requests = compiler("ok")
    p = problem(op="attention_backward", dtype="bf16", seq_q=256, seq_k=256, head_dim=64, return_lse=False)
    target = parse_target("cuda:sm_90", "triton==3.6.0")
    made = plan(p, target, settings=Settings(backend="triton"))
    tiles = {"block_m": 128, "block_n": 32, "num_warps": 4, "rows_m": 64, "rows_n": 16, "rows_warps": 8}
    made = msgspec.structs.replace(made, launch=made.launch.changed(tiles))
    launches, q, _ = kernel_calls(made, random_call(p), 132)
    assert ensure_compiled.ensure(made, launches, q, target, settings) is None
    asked = [json.loads(line)["signature"] for line in requests.read_text().splitlines()]
    seen = {
        one["function"]: (*(one["constants"].get(f"BLOCK_{axis}") for axis in "MN"), one["options"]["num_warps"])
        for one in asked
    }
    assert seen == {"backward_delta": (32, None, 4), "backward_keys": (128, 32, 4), "backward_rows": (64, 16, 8)}
    other = msgspec.structs.replace(made, launch=made.launch.changed({"rows_warps": 4}))
    assert code_key(other, kernel_calls(other, random_call(p), 132)[0]) != code_key(made, launches)


def test_each_device_loads_with_the_variables_of_the_plan(compiler, settings, monkeypatch) -> None:
    """What is compiled for one device is compiled again for the next, and a quirk's variables hold there too."""
    requests, seen = compiler("ok"), []
    made, launches, _, target = planned()
    made = msgspec.structs.replace(made, env={"PORTATTN_TEST_MARK": "1"})
    monkeypatch.setattr(ensure_compiled, "device_guard", lambda q: contextlib.nullcontext())

    def load(launch) -> None:
        seen.append(os.environ.get("PORTATTN_TEST_MARK"))

    for device in ("cuda:0", "cuda:1", "cuda:1"):
        q = SimpleNamespace(device=torch.device(device))
        assert ensure_compiled.ensure_all(made, launches, load, q, target, settings) is None
    assert seen == ["1", "1"]
    assert requests_in(requests) == 1
    assert "PORTATTN_TEST_MARK" not in os.environ
    assert not ensure_compiled.unseen(made, launches, settings)


@pytest.mark.parametrize(
    ("isolate", "children"), [("auto", 1), ("always", 2), ("never", 0)], ids=["auto", "always", "never"]
)
def test_isolation(compiler, tmp_path, in_process, isolate: str, children: int) -> None:
    """Two processes in turn: `always` compiles in a child in each, record or not."""
    requests = compiler("ok")
    made, launches, q, target = planned()
    chosen = Settings(cache_dir=str(tmp_path / "v"), isolate=isolate)
    for _ in range(2):
        assert ensure_compiled.ensure(made, launches, q, target, chosen) is None
        ensure_compiled._ready.clear()
    assert requests_in(requests) == children
    assert len(in_process) == 2


FAILURES = {
    # behaviour -> how it stands, symptom, stage, what the message holds. An answer that is no JSON, or an end without a
    # word, says nothing about the compiler, nor does what the machine lacks: that passes, and is tried again.
    "error": ("lasting", "compile-error", "ttgir", "RuntimeError at ttgir: PassManager::run failed"),
    "crash": (
        "lasting", "compiler-crash", "ttgir",
        "SIGABRT at ttgir: python: TypeConverter.cpp:42: Assertion `!repl` failed.",
    ),
    "exit": ("passing", "compiler-crash", "ttgir", "exit status 3 at ttgir"),
    "hang": ("timeout", "hang", "ttgir", "timeout at ttgir: no answer in 3 s"),
    "closes its answers": ("timeout", "hang", "ttgir", "timeout at ttgir: closed its answers"),
    "no json": ("passing", "compile-error", "ttgir", "ProtocolError at ttgir"),
    "too large": (
        "lasting", "resource-limit", "load",
        "OutOfResources at load: out of resource: shared memory, required 1000000000 bytes, sm_90 has 232448",
    ),
    "full disk": ("passing", "compile-error", "ttgir", "No space left on device"),
    "a file too large": ("passing", "compiler-crash", "ttgir", "SIGXFSZ"),
    "killed": ("passing", "compiler-crash", "ttgir", "SIGKILL"),
    "out of memory": ("passing", "compile-error", "ttgir", "MemoryError"),
    "no ptxas": ("passing", "compile-error", "cubin", "Cannot find ptxas"),
    "bus error": ("passing", "compiler-crash", "ttgir", "SIGBUS"),
}  # fmt: skip

NOW_AND_THEN = ("crash once", "a program of its dies once")


def test_every_planted_failure_is_tried() -> None:
    assert {*FAILURES, *NOW_AND_THEN, "ok", "full disk once"} == set(BEHAVIOURS)


@pytest.mark.parametrize("behaviour", FAILURES)
def test_failures_are_classified_and_kept(compiler, settings, in_process, behaviour: str) -> None:
    requests = compiler(behaviour)
    made, launches, q, target = planned()
    failed = ensure_compiled.ensure(made, launches, q, target, settings)
    assert not failed.passed
    assert in_process == [], "what fails in the child must not be compiled here"
    standing, symptom, stage, message = FAILURES[behaviour]
    cached = CompileStore(Path(settings.cache_dir))
    assert cached.get(code_key(made, launches)) == (None if standing == "passing" else failed)
    assert failed.standing == standing
    assert ensure_compiled.known_failure(made, launches, settings) == failed
    assert ensure_compiled.ensure(made, launches, q, target, settings) == failed, "this process remembers"
    assert requests_in(requests) == (2 if behaviour in ("crash", "bus error") else 1)
    [incident] = cached.incidents()
    assert incident.id == failed.incident
    assert (incident.symptom, incident.stage) == (symptom, stage)
    assert message in incident.message
    assert incident.message == failed.reason
    assert "\n" not in incident.message
    assert incident.key == code_key(made, launches)
    assert incident.kernel == "dense_forward"
    assert "*fp16" in json.dumps(incident.specialisation)
    if behaviour == "crash":  # it is tried twice, and the first death is not forgotten
        assert incident.log.startswith("the first time: SIGABRT at ttgir: python: TypeConverter.cpp:42: Assertion")


def test_what_another_process_saw_fail_is_not_compiled_here(compiler, settings, in_process) -> None:
    """The plan was made before the record came: it must not take this process down."""
    requests = compiler("crash")
    made, launches, q, target = planned()
    assert ensure_compiled.ensure(made, launches, q, target, settings) is not None
    asked = requests_in(requests)
    for isolate in ("auto", "never"):
        again = ensure_compiled.ensure(
            made, launches, q, target, Settings(cache_dir=settings.cache_dir, compile_seconds=3.0, isolate=isolate)
        )
        assert not again.passed
    assert requests_in(requests) == asked
    assert in_process == []


@pytest.mark.parametrize("behaviour", NOW_AND_THEN)
def test_a_compiler_that_dies_now_and_then(compiler, settings, in_process, behaviour: str) -> None:
    requests = compiler(behaviour)
    made, launches, q, target = planned()
    assert ensure_compiled.ensure(made, launches, q, target, settings) is None
    assert requests_in(requests) == 2
    records = CompileStore(Path(settings.cache_dir))
    seen = records.get(code_key(made, launches))
    assert seen.passed
    assert seen.facts == {"scratchpad_bytes": 1024, "num_warps": 4, "spills": 0, "deaths": 1}
    assert not list(records.incidents())


class AdapterError(Exception):
    """As triton-ascend's: what the adapter printed, and nothing of how it ended."""


def dying_once(error: Exception) -> Callable[[object], None]:
    """A loader in this process whose compiler ends so the first time."""
    calls: list[object] = []

    def load(launch: object) -> None:
        calls.append(launch)
        if len(calls) > 1:
            return
        try:
            raise error
        except subprocess.CalledProcessError as ended:
            raise AdapterError("Assertion `abstractType' failed.") from ended

    return load


@pytest.mark.parametrize("isolate", ["auto", "never"])
def test_a_compiler_that_dies_in_this_process(compiler, tmp_path, monkeypatch, isolate: str) -> None:
    """As triton-ascend's, which compiles here what the child only lowered."""
    compiler("ok")
    settings = Settings(cache_dir=str(tmp_path / "cache"), compile_seconds=3.0, isolate=isolate)
    monkeypatch.setattr(ensure_compiled, "device_guard", lambda q: contextlib.nullcontext())
    made, launches, q, target = planned()
    load = dying_once(subprocess.CalledProcessError(-6, "triton-adapter-opt"))
    assert ensure_compiled.ensure_all(made, launches, load, q, target, settings) is None
    seen = CompileStore(Path(settings.cache_dir)).get(code_key(made, launches))
    assert (seen.facts["deaths"] if seen else None) == (1 if isolate == "auto" else None)
    made, launches, q, target = planned(causal="bottom_right")
    load = dying_once(subprocess.CalledProcessError(1, "triton-adapter-opt"))
    assert "exit status 1" in ensure_compiled.ensure_all(made, launches, load, q, target, settings).reason


@pytest.mark.parametrize(("number", "cached"), [(6, True), (9, False)])
def test_who_was_killed_is_asked_again_by_the_next_process(compiler, tmp_path, monkeypatch, number, cached):
    """A signal that somebody sent, for memory perhaps, says nothing about the compiler."""
    settings = Settings(cache_dir=str(tmp_path / "cache"), compile_seconds=3.0, isolate="never")
    monkeypatch.setattr(ensure_compiled, "device_guard", lambda q: contextlib.nullcontext())
    made, launches, q, target = planned()

    def load(launch: object) -> None:
        raise subprocess.CalledProcessError(-number, "triton-adapter-opt")

    assert ensure_compiled.ensure_all(made, launches, load, q, target, settings) is not None
    assert (CompileStore(Path(settings.cache_dir)).get(code_key(made, launches)) is not None) is cached
    assert next(iter(store(settings).incidents())).symptom == "compiler-crash"


@pytest.mark.parametrize(
    ("reply", "dead"),
    [
        (Reply(outcome="crash", kind="SIGSEGV"), True),
        (Reply(outcome="crash", kind="SIGKILL"), False),
        (Reply(outcome="crash", kind="exit status 1"), False),
        (Reply(outcome="hang", kind="timeout"), False),
        (Reply(outcome="error", kind="RuntimeError", message="triton-adapter-opt died of signal 6\nx"), True),
        (Reply(outcome="error", kind="RuntimeError", message="triton-adapter-opt died of signal 9\nx"), False),
        (Reply(outcome="error", kind="CalledProcessError", message="'x' died with <Signals.SIGKILL: 9>."), False),
        (
            Reply(outcome="error", kind="PTXASError", message="PTXAS error: `ptxas` raised SIGSEGV\n`ptxas` stderr"),
            True,
        ),
        (Reply(outcome="error", kind="PTXASError", message="PTXAS error: `ptxas` failed with error code -11"), True),
        (Reply(outcome="error", kind="PTXASError", message="PTXAS error: `ptxas` failed with error code 1"), False),
        (Reply(outcome="error", kind="RuntimeError", message="triton-adapter-opt exit status 1\nx"), False),
        (
            Reply(outcome="error", kind="CalledProcessError", message="Command 'x' died with <Signals.SIGABRT: 6>."),
            True,
        ),
        (Reply(outcome="ok", message="died of signal 6"), False),
    ],
)
def test_who_died(reply: Reply, dead: bool) -> None:
    assert is_crash(reply) is dead


@pytest.mark.compiles
def test_a_real_reproducer_fails_the_same_way(settings, monkeypatch, tmp_path) -> None:
    """An arch that the real compiler refuses; the kept command gives the same answer in a shell."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    made, launches, q, target = planned()
    launches[0].constexprs["BLOCK_D"] = 48  # no power of two
    with Worker() as worker:
        monkeypatch.setattr(ensure_compiled, "_worker", worker)
        limit = Settings(cache_dir=settings.cache_dir, compile_seconds=120.0)
        failed = ensure_compiled.ensure(made, launches, q, target, limit)
    assert "CompilationError" in failed.reason
    incident = store(settings).incident(failed.incident)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        ["sh", "-c", incident.command], capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["ok"] is False
    assert answer["kind"] == "CompilationError"


@pytest.mark.parametrize(
    ("reply", "symptom"),
    [
        (Reply(outcome="hang"), "hang"),
        (Reply(outcome="crash", kind="SIGSEGV"), "compiler-crash"),
        (Reply(outcome="error", kind="RuntimeError", message="x"), "compile-error"),
        (Reply(outcome="error", kind="OutOfResources", message="x"), "resource-limit"),
        (Reply(outcome="error", kind="MLIRCompilationError", message="ub overflow, requires 1"), "resource-limit"),
        (Reply(outcome="error", kind="RuntimeError", message="ptxas: uses too much shared data"), "resource-limit"),
    ],
)
def test_symptoms_are_the_words_of_quirks(reply: Reply, symptom: str) -> None:
    assert ensure_compiled.symptom_of(reply) == symptom


@pytest.mark.gpu
def test_a_launch_on_the_device_was_compiled_before(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 33, 64, device="cuda", dtype=torch.float16)
    with portattn.settings(cache_dir=str(tmp_path), isolate="always"):
        out = portattn.attention(q, q, q, backend="triton")
        made = portattn.last_plan()
    assert out.isfinite().all()
    assert made.path == "triton"
    assert list((tmp_path / "records").glob("*.json"))


def test_what_is_not_the_compilers_passes_through(monkeypatch, settings, tmp_path) -> None:
    made, launches, q, target = planned()

    class Kernel:
        def warmup(self, *arguments, **options):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(ensure_compiled, "load_kernels", lambda *a, **k: type("M", (), {"dense_forward": Kernel()}))
    with pytest.raises(torch.OutOfMemoryError):
        ensure_compiled.ensure(made, launches, q, target, Settings(cache_dir=settings.cache_dir, isolate="never"))
    assert ensure_compiled.known_failure(made, launches, settings) is None
    assert list(store(settings).incidents()) == []


def test_the_plans_key_is_part_of_what_a_record_is_about() -> None:
    """Two chips, or compilers, whose launches have one signature."""
    made, launches, _, _ = planned()
    assert code_key(msgspec.structs.replace(made, key="another"), launches) != code_key(made, launches)


def test_the_signature_is_part_of_what_a_record_is_about() -> None:
    """Two calls with one plan whose machine code differs: a base off by two bytes."""
    made, launches, _, _ = planned(aligned=False)
    before = code_key(made, launches)
    q = launches[0].arguments["q"]
    launches[0].arguments["q"] = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    assert code_key(made, launches) != before


def test_nothing_is_compiled_for_nothing(compiler, settings, in_process) -> None:
    requests = compiler("error")
    target = parse_target("cuda:sm_90", "triton==3.6.0")
    p = problem(dtype="fp16", seq_q=0, head_dim=64)
    made = plan(p, target, settings=Settings(backend="triton"))
    launches, q, _ = kernel_calls(made, random_call(p), 132)
    assert ensure_compiled.ensure(made, launches, q, target, settings) is None
    assert not requests.exists() or requests_in(requests) == 0
