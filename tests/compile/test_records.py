"""CompileRecords on disk: whole or absent, among any number of processes."""

from __future__ import annotations

import datetime
import multiprocessing
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import random_call

from portattn import CompileRecord, Incident, Problem
from portattn.backends.cuda import CudaBackend
from portattn.compile import store as compile_store
from portattn.compile import variants
from portattn.compile.store import CompileStore, store
from portattn.config import Settings
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target


def record(key: str = "k", reason: str = "", passed: bool = False) -> CompileRecord:
    return CompileRecord(
        key=key, kernel="dense_forward", target="cuda:sm_90", toolchain="triton==3.6.0", level="compiles",
        passed=passed, date=datetime.date(2026, 11, 21), reason=reason, facts={"spills": 0},
    )  # fmt: skip


def incident(name: str, hour: int) -> Incident:
    return Incident(
        id=name, key="k", kernel="dense_forward", target="cuda:sm_90", toolchain="triton==3.6.0", symptom="hang",
        stage="ttgir", message="no answer", log="…", command="echo", environment={},
        date=datetime.datetime(2026, 11, 21, hour, tzinfo=datetime.timezone.utc),
    )  # fmt: skip


def test_what_is_put_is_found_by_another_store(tmp_path: Path) -> None:
    first, second = CompileStore(tmp_path), CompileStore(tmp_path)
    assert second.get("k") is None
    first.put(record(reason="boom"))
    assert second.get("k") == first.get("k") == record(reason="boom")
    assert second.get("other") is None


def test_nothing_but_the_file_is_left_behind(tmp_path: Path) -> None:
    CompileStore(tmp_path).put(record())
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["k.json"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"key": "k"}', b'{"schema": 2}'])
def test_a_file_that_cannot_be_read_counts_as_absent(tmp_path: Path, data: bytes) -> None:
    cached = CompileStore(tmp_path)
    cached.put(record())
    (tmp_path / "records" / "k.json").write_bytes(data)
    assert CompileStore(tmp_path).get("k") is None
    CompileStore(tmp_path).put(record(passed=True))
    assert CompileStore(tmp_path).get("k").passed


def test_a_torn_file_counts_as_absent(tmp_path: Path) -> None:
    CompileStore(tmp_path).put(record())
    path = tmp_path / "records" / "k.json"
    whole = path.read_bytes()
    for length in range(0, len(whole), 17):
        path.write_bytes(whole[:length])
        assert CompileStore(tmp_path).get("k") is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = CompileStore(tmp_path)
    cached.put(record(reason="old"))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(UserWarning, match="No space"):
        cached.put(record(reason="new"))
    assert CompileStore(tmp_path).get("k").reason == "old"
    assert [p.name for p in (tmp_path / "records").iterdir()] == ["k.json"]


def test_clear_forgets_verdicts_and_keeps_incidents(tmp_path: Path) -> None:
    cached = CompileStore(tmp_path)
    cached.put(record("a"))
    cached.put(record("b"))
    cached.add_incident(incident("20261121-x", 1))
    assert cached.clear() == 2
    assert cached.get("a") is None
    assert cached.clear() == 0
    assert cached.incident("20261121-x") is not None


def test_incidents_come_oldest_first_and_are_found_by_name(tmp_path: Path) -> None:
    cached = CompileStore(tmp_path)
    assert list(cached.incidents()) == []
    for name, hour in (("b", 3), ("a", 5), ("c", 1)):
        cached.add_incident(incident(name, hour))
    (tmp_path / "incidents" / "torn.json").write_text("{")
    assert [i.id for i in cached.incidents()] == ["c", "b", "a"]
    assert cached.incident("b") == incident("b", 3)
    assert cached.incident("torn") is None
    assert cached.incident("none") is None
    assert (tmp_path / "incidents" / "b.json").read_text().count("\n") > 5  # people read them


def test_the_settings_name_the_folder(tmp_path: Path) -> None:
    store(Settings(cache_dir=str(tmp_path / "one"))).put(record())
    assert (tmp_path / "one" / "records" / "k.json").exists()
    assert store(Settings(cache_dir=str(tmp_path / "two"))).get("k") is None
    assert store(Settings()).folder.name == "portattn"


def _write_many(folder: str, writer: int) -> None:
    for turn in range(60):
        CompileStore(Path(folder)).put(record(reason=f"{writer} " * 500, passed=bool(turn % 2)))


def test_concurrent_writers_never_show_half_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(str(tmp_path), n)) for n in range(3)]
    for writer in writers:
        writer.start()
    path = tmp_path / "records" / "k.json"
    read = 0
    while any(w.is_alive() for w in writers):
        if path.exists():
            found = compile_store.unseal(path.read_bytes(), "record", "k", CompileRecord)
            assert found is not None
            assert len(set(found.reason.split())) == 1, "two writers in one file"
            read += 1
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert read
    assert [p.name for p in path.parent.iterdir()] == ["k.json"]


def _hold(folder: str, events: multiprocessing.Queue, name: str) -> None:
    with CompileStore(Path(folder)).lock("k", 30.0):
        events.put(("in", name))
        multiprocessing.Event().wait(0.2)
        events.put(("out", name))


def test_a_key_is_locked_among_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    events = context.Queue()
    processes = [context.Process(target=_hold, args=(str(tmp_path), events, str(n))) for n in range(2)]
    for process in processes:
        process.start()
    seen = [events.get(timeout=60) for _ in range(4)]
    for process in processes:
        process.join(60)
    assert [kind for kind, _ in seen] == ["in", "out", "in", "out"]
    assert seen[0][1] == seen[1][1]


def test_a_folder_that_takes_no_files_costs_one_warning_and_nothing_else(tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("a file where the folder should be")
    store = CompileStore(occupied)
    with pytest.warns(UserWarning, match="PORTATTN_CACHE_DIR"):
        store.put(record("first"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put(record("second"))
        with store.lock("first", 1.0):
            pass
    assert store.get("first") == record("first")
    assert store.get("second") == record("second")


def test_launches_of_a_variant_are_described_again_for_another_cap_and_another_alignment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant, described = CudaBackend.variants[0], []
    monkeypatch.setattr(variants, "signatures", lambda variant, call: described.append(call) or [])
    p = Problem(batch=1, heads_q=1, heads_k=1, seq_q=4, seq_k=4, head_dim=64, softcap=True)
    made = plan(p, parse_target("cuda:sm_90", "triton==3.6.0"))
    call = random_call(p)
    shifted = torch.zeros(call.q.numel() + 1, dtype=call.q.dtype)[1:].view(call.q.shape)
    calls = [call, replace(call, softcap=2 * call.softcap), replace(call, q=shifted)]
    monkeypatch.setattr(variants, "_seen", {})
    for one in (*calls, *calls):
        variants.launch_signatures(variant, made, one)
    assert len(described) == 3
