"""How long each kind of failure counts: a compiler's own lasts, a time-out counts for a day, the rest passes."""

import datetime
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from places import TESTS, tables
from test_compiling import planned, requests_in

import portattn
from portattn.api import dispatch
from portattn.compile import ensure_compiled, record_store
from portattn.compile.ensure_compiled import code_key
from portattn.compile.record_store import CompileStore, _store, standing, store
from portattn.config import Settings
from portattn.launch import cache
from portattn.schema.compile_record import Standing
from portattn.worker.client import Reply

LOGS = TESTS / "tools" / "quirks" / "lifecycle" / "logs"


def error(kind: str, message: str, stage: str = "ttgir", log: str = "") -> Reply:
    return Reply(outcome="error", stage=stage, kind=kind, message=message, log=log)


CASES: list[tuple[Reply, Standing]] = [(Reply(**reply), expected) for expected, reply in tables(__file__)["cases"]]


@pytest.mark.parametrize(("reply", "expected"), CASES, ids=lambda case: getattr(case, "kind", case))
def test_each_failure(reply: Reply, expected: Standing) -> None:
    assert standing(reply) == expected
    assert standing(reply, room=False) == "passing", "what happens on a full disk says nothing"


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("ascend-3.2-div-rn.log", "MLIRCompilationError", "lasting"),
        ("ascend-3.2-early-return.log", "MLIRCompilationError", "lasting"),
        ("ascend-3.2-pointer-if.log", "MLIRCompilationError", "lasting"),
        ("ascend-3.2-tf32.log", "CompilationError", "lasting"),
        ("ascend-old-passes.log", "RuntimeError", "lasting"),
        ("ascend-3.2-no-cann.log", "MLIRCompilationError", "passing"),
    ],
)
def test_logs_of_real_failures(name: str, kind: str, expected: Standing) -> None:
    log = (LOGS / name).read_text()
    assert standing(error(kind, log[log.rindex(f"{kind}: ") + len(kind) + 2 :], "load", log)) == expected


def test_a_full_disk_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "there"))
    assert record_store.has_room()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=4096))
    assert not record_store.has_room()


def test_no_folder_for_temporary_files_is_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python has no other word for it: it tries each folder by a file, and none took one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def none() -> str:
        raise FileNotFoundError("no usable temporary directory found")

    monkeypatch.setattr(record_store.tempfile, "gettempdir", none)
    assert not record_store.has_room()


def test_the_disk_of_tritons_cache_is_looked_at_where_triton_has_it(monkeypatch, tmp_path):
    asked: list[str] = []
    usage = shutil.disk_usage(tmp_path)

    def look(folder: Path) -> Any:
        asked.append(str(folder))
        if not folder.exists():
            raise FileNotFoundError(folder)
        return usage

    monkeypatch.setattr(shutil, "disk_usage", look)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    record_store.has_room()
    assert str(tmp_path / ".triton" / "cache") in asked
    assert str(tmp_path / ".triton") in asked
    assert str(tmp_path) in asked
    asked.clear()
    monkeypatch.delenv("TRITON_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    record_store.has_room()
    assert str(tmp_path / "home" / ".triton" / "cache") in asked


def test_a_disk_that_nobody_can_ask_about_has_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", Mock(side_effect=OSError("no such device")))
    monkeypatch.setattr(record_store, "ROOM", 1)
    assert not record_store.has_room()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=str(tmp_path / "records-here"), compile_seconds=1.0)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = Clock()
    monkeypatch.setattr(record_store, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def _own_store() -> None:
    _store.cache_clear()


def test_a_passing_failure_is_asked_again_after_some_time(compiler, settings: Settings, clock: Any) -> None:
    """Each time it waits twice as long; the incident is of the first."""
    requests = compiler("full disk")
    made, launches, q, target = planned()
    waits = []
    for _ in range(6):
        failed = ensure_compiled.ensure(made, launches, q, target, settings)
        waits.append(failed.wait)
        assert failed.until is not None, "what is launched instead is kept as long"
        left = failed.until - datetime.datetime.now(datetime.timezone.utc)
        assert failed.wait - 60 < left.total_seconds() <= failed.wait
        clock.now += failed.wait - 1
        assert ensure_compiled.known_failure(made, launches, settings) == failed
        assert not ensure_compiled.unseen(made, launches, settings)
        clock.now += 2
        assert ensure_compiled.known_failure(made, launches, settings) is None
        assert ensure_compiled.unseen(made, launches, settings)
    assert waits == [300, 600, 1200, 2400, 3600, 3600]
    assert requests_in(requests) == 6
    assert len(list(store(settings).incidents())) == 1
    assert "tried again after 1 hour, or when the environment changes" in failed.told()
    assert "could not be compiled now" in failed.told()


@pytest.mark.parametrize("name", ["PATH", "TMPDIR", "CC", "TRITON_PTXAS_PATH"])
def test_a_passing_failure_is_asked_again_in_other_surroundings(compiler, settings, monkeypatch, name):
    requests = compiler("no ptxas")
    made, launches, q, target = planned()
    for value in ("/one", "/one", "/two"):
        monkeypatch.setenv(name, value if name != "PATH" else f"{value}:/usr/bin:/bin")
        assert ensure_compiled.ensure(made, launches, q, target, settings) is not None
    assert requests_in(requests) == 2


def test_other_surroundings_have_another_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensure_compiled, "_worker", None)
    first = ensure_compiled._shared_worker()
    assert ensure_compiled._shared_worker() is first
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/elsewhere")
    second = ensure_compiled._shared_worker()
    assert second is not first
    assert ensure_compiled._shared_worker() is second
    first.close()
    second.close()


def test_a_failure_to_load_here_does_not_hide_a_good_record_for_good(compiler, settings, clock, monkeypatch):
    """The child compiled; loading failed for want of a C compiler. A plan's variables are set while loading only."""
    import contextlib

    compiler("ok")
    monkeypatch.setattr(ensure_compiled, "device_guard", lambda q: contextlib.nullcontext())
    made, launches, q, target = planned()
    made = msgspec.structs.replace(made, env={"TRITON_OF_A_QUIRK": "1"})
    answers: list[Exception] = [RuntimeError("Failed to find C compiler.")]

    def load(launch: object) -> None:
        if answers:
            raise answers.pop()

    failed = ensure_compiled.ensure_all(made, launches, load, q, target, settings)
    assert failed.standing == "passing"
    assert ensure_compiled.ensure_all(made, launches, load, q, target, settings) == failed
    clock.now += failed.wait + 1
    assert ensure_compiled.ensure_all(made, launches, load, q, target, settings) is None


def test_a_time_out_counts_for_a_day_or_until_there_is_more_time(compiler, settings: Settings) -> None:
    compiler("hang")
    made, launches, q, target = planned()
    failed = ensure_compiled.ensure(made, launches, q, target, settings)
    key, folder = code_key(made, launches), Path(settings.cache_dir)
    assert (failed.wait, failed.limit) == (86_400.0, 1.0)
    assert "tried again after 24 hours, or with compile_seconds over 1" in failed.told()
    assert CompileStore(folder).get(key, 1.0) == failed
    assert CompileStore(folder).get(key, 0.5) == failed
    assert CompileStore(folder).get(key, 1.5) is None
    for shift in (-86_401, +86_401):  # it is over; the clock was set back
        moved = msgspec.structs.replace(failed, until=failed.until + datetime.timedelta(seconds=shift))
        put_as_it_is(folder, moved)
        assert CompileStore(folder).get(key, 1.0) is None


def put_as_it_is(folder: Path, record: portattn.CompileRecord) -> None:
    from portattn.compile import record_store as records

    (folder / "records" / f"{record.key}.json").write_bytes(records.seal("record", record.key, record))


def test_a_folder_that_takes_no_incident_names_none(compiler, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chosen = Settings(cache_dir=str(tmp_path / "file" / "cache"), compile_seconds=1.0)
    compiler("error")
    made, launches, q, target = planned()
    with pytest.warns(UserWarning, match="PORTATTN_CACHE_DIR"):
        failed = ensure_compiled.ensure(made, launches, q, target, chosen)
    assert failed.incident == ""


def test_a_call_falls_back_with_the_reason_and_comes_back(compiler, sm_90, core_only, clock, monkeypatch):
    """A server goes on by another path, and comes back once the disk has room."""
    requests, launched = compiler("full disk once"), []
    monkeypatch.setattr(ensure_compiled, "_in_this_process", lambda *given: None)
    monkeypatch.setattr(dispatch, "launch_all", lambda calls, made, q: launched.append(made))
    q = torch.randn(1, 2, 33, 64).half()
    with portattn.settings(canary="never"):
        with pytest.warns(portattn.FallbackWarning, match="could not be compiled now: .*No space left on device"):
            out = portattn.attention(q, q, q)
        plan = portattn.last_plan()
        assert plan.fell_back
        assert "tried again after 5 minutes, or when the environment changes" in plan.rejected[0].reason
        expected = torch.nn.functional.scaled_dot_product_attention(*[q.double()] * 3)
        torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
        portattn.attention(q, q, q)
        assert requests_in(requests) == 1
        assert "could not be compiled now" in portattn.explain("attention", q, q, q)
        clock.now += 301
        portattn.attention(q, q, q)
        assert not portattn.last_plan().fell_back
        assert [made.path for made in launched] == ["triton"]
        assert requests_in(requests) == 2


def failure(stands: str, **fields: Any) -> portattn.CompileRecord:
    made, *_ = planned()
    return ensure_compiled._record("k", made, passed=False, standing=stands, **fields)


def test_nothing_is_kept_of_a_call_that_a_variant_left_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's launches would be kept for good, and the variant never tried again."""
    cached: list[str] = []
    made, *_ = planned()
    own = SimpleNamespace(results=lambda: (torch.zeros(1), None), run=lambda: None)
    keeper = SimpleNamespace(keep=lambda first, seconds: cached.append(name))
    monkeypatch.setattr(dispatch, "_cached", lambda *a: SimpleNamespace(direct=None))
    for name in ("lasting", "timeout", "passing"):
        failed = {"k": failure(name)}
        monkeypatch.setattr(dispatch, "_compilable", lambda call, settings, failed=failed: (made, own, failed))
        dispatch.run(SimpleNamespace(q=torch.zeros(1), copied=False), Settings(), keeper)  # type: ignore[arg-type]
    assert cached == ["lasting", "timeout"]


def test_what_is_kept_after_a_time_out_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs for longer than a day tries the kernel again, as a new process does."""
    now = datetime.datetime.now(datetime.timezone.utc)
    ends = {
        name: failure("timeout", until=now + datetime.timedelta(hours=hours)) for name, hours in (("a", 9), ("b", 2))
    }
    assert dispatch._seconds({**ends, "c": failure("lasting")}) == pytest.approx(7200, abs=60)
    assert dispatch._seconds({"c": failure("lasting")}) == float("inf")
    clock = Clock()
    monkeypatch.setattr(cache, "time", clock)
    cache.forget()
    q = torch.zeros(1, 2, 4, 16)
    kinds = [cache.CallKey("attention", {"q": q}, (number,), {}, Settings()) for number in range(3)]
    for kind, seconds in zip(kinds, (float("inf"), 7200.0, 9000.0), strict=True):
        cache.remember(kind, seconds)
    clock.now += 7199
    assert [cache.kinds("attention", (number,)) for number in range(3)] == [(kind,) for kind in kinds]
    clock.now += 1
    assert [cache.kinds("attention", (number,)) for number in range(3)] == [()] * 3
    cache.remember(kinds[0])
    clock.now += 10_000
    assert cache.kinds("attention", (0,)) == (kinds[0],), "nothing that ends is left"
    cache.forget()


def test_surroundings_are_what_compilers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = record_store.surroundings()
    monkeypatch.setitem(os.environ, "PORTATTN_NOT_READ", "1")
    monkeypatch.setitem(os.environ, "SOMETHING", "1")
    assert record_store.surroundings() == before
    monkeypatch.setitem(os.environ, "AMDGCN_ENABLE_DUMP", "1")
    assert record_store.surroundings() != before
