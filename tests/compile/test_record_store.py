"""CompileRecords on disk: whole or absent, among any number of processes."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import torch
from planted_records import WHEN, incident, record
from support import random_call

from portattn import Problem
from portattn.backends.cuda import CudaBackend
from portattn.compile import variants
from portattn.compile.record_store import CompileStore, store
from portattn.config import Settings
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target


def test_clear_forgets_verdicts_and_keeps_incidents(tmp_path: Path) -> None:
    cached = CompileStore(tmp_path)
    cached.put(record("a"))
    cached.put(record("b"))
    cached.add_incident(incident("20261121-x"))
    assert cached.clear() == 2
    assert cached.get("a") is None
    assert cached.clear() == 0
    assert cached.incident("20261121-x") is not None


def test_incidents_come_oldest_first_and_are_found_by_name(tmp_path: Path) -> None:
    cached = CompileStore(tmp_path)
    assert list(cached.incidents()) == []
    for name, hour in (("b", 3), ("a", 5), ("c", 1)):
        cached.add_incident(incident(name, date=WHEN.replace(hour=hour)))
    (tmp_path / "incidents" / "torn.json").write_text("{")
    assert [i.id for i in cached.incidents()] == ["c", "b", "a"]
    assert cached.incident("b") == incident("b", date=WHEN.replace(hour=3))
    assert cached.incident("torn") is None
    assert cached.incident("none") is None
    assert (tmp_path / "incidents" / "b.json").read_text().count("\n") > 5  # people read them


def test_the_settings_name_the_folder(tmp_path: Path) -> None:
    store(Settings(cache_dir=str(tmp_path / "one"))).put(record())
    assert (tmp_path / "one" / "records" / "k.json").exists()
    assert store(Settings(cache_dir=str(tmp_path / "two"))).get("k") is None
    assert store(Settings()).folder.name == "portattn"


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
    assert ([kind for kind, _ in seen], seen[0][1]) == (["in", "out", "in", "out"], seen[1][1])


def test_launches_of_a_variant_are_described_again_for_another_cap_and_another_alignment(monkeypatch):
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
