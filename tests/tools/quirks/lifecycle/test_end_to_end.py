"""A compile that fails, and what becomes of it: incident, draft, entry, plans round it on every chip, probe."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from support import random_call

from portattn.compile import ensure_compiled
from portattn.config import Settings, current
from portattn.errors import DataError
from portattn.launch import kernel_calls
from portattn.planning.planner import plan
from portattn.planning.quirk_files import load_quirk
from portattn.planning.registry import Registry, find_backends
from portattn.schema.compile_record import Incident
from portattn.schema.problem import Problem
from portattn.tools.quirks import drafts, failure_facts, probe
from portattn.tools.quirks.draft_texts import MARK

PROBLEM = Problem(batch=1, heads_q=2, heads_k=2, seq_q=64, seq_k=128, head_dim=64, dtype="fp16", causal="bottom_right")
TOOLCHAIN = "triton==3.6.0"


def fail(arch: str, registry: Registry, buggy, monkeypatch) -> Incident:
    """Compile the problem's plan as a call would, and give the incident that this leaves."""
    target = registry.target(f"cuda:{arch}", TOOLCHAIN)
    made = plan(PROBLEM, target, registry)
    made = msgspec.structs.replace(made, launch=made.launch.changed({"num_stages": 3}))
    launches, q, _ = kernel_calls(made, random_call(PROBLEM), target.arch.cores)
    with buggy.worker() as worker:
        monkeypatch.setattr(ensure_compiled, "_worker", worker)
        verdict = ensure_compiled.ensure(made, launches, q, target, current())
    kept = ensure_compiled.store(current()).incident(verdict.incident)
    assert kept is not None
    return kept


def fill_in(path: Path, effect: str) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith(MARK)]
    lines.insert(lines.index("[effect]") + 1, effect)
    path.write_text("\n".join(lines) + "\n")


def test_from_a_failed_compile_to_a_work_around(buggy, worker, registry, triton, monkeypatch, tmp_path) -> None:
    first, second = (fail(arch, registry, buggy, monkeypatch) for arch in ("sm_86", "sm_89"))
    assert (first.problem, first.launch.num_stages) == (PROBLEM, 3)

    # Draft: both chips, the words of the compiler, the specialisation; and its program fails again here.
    out = tmp_path / "drafts"
    found = failure_facts.from_incident(first, ensure_compiled.store(current()).incidents(), registry)
    draft = drafts.make(found, registry, out, worker=worker)
    assert draft.known == ()
    assert draft.reproduced is True
    program, report, entry = (Path(file) for file in draft.files)
    assert [path.suffix for path in (program, report, entry)] == [".py", ".md", ".toml"]
    text = entry.read_text()
    assert 'arch      = ["sm_86", "sm_89"]' in text
    assert second.id in text
    assert 'kernels   = ["dense_forward"]' in text
    assert "causal_align=bottom_right" in text

    # The loader refuses it, at the line that is to be filled in.
    assert draft.open
    with pytest.raises(DataError, match=rf"{entry.name}:{draft.open[0][0]}: .*{MARK}"):
        load_quirk(entry, tuple(registry.backends))

    # The engineer fills it in: plans go round the bug on both chips, and are the same elsewhere.
    fill_in(entry, "launch = { num_stages = 2 }")
    known = Registry.read(find_backends(), out)
    quirk = known.quirks[draft.id]
    for arch, stages in (("sm_86", 2), ("sm_89", 2), ("sm_80", None), ("sm_90", None)):
        target = known.target(f"cuda:{arch}", TOOLCHAIN)
        made = plan(PROBLEM, target, known, settings=Settings(backend="triton"))
        assert (draft.id in {applied.id for applied in made.quirks}) is (stages is not None)
        assert made.launch is not None
        if stages:
            assert made.launch.num_stages == stages

    # Its probe shows both: that it fails without the work-around, and passes with it.
    assert quirk.evidence.probe.startswith("plan: attention --target cuda:sm_86")
    result = probe.run(quirk, TOOLCHAIN, registry=known, worker=worker)
    assert (result.verdict, result.off.word, result.on.word) == ("confirmed", "fail:signature", "pass")

    # The program, in which no plan has a part, says the same: it is what goes into the report.
    told = msgspec.structs.replace(quirk.evidence, probe=f"probes/{program.name}")
    alone = msgspec.structs.replace(quirk, evidence=told)
    stand_alone = probe.run(alone, TOOLCHAIN, registry=known, worker=worker)
    assert (stand_alone.control.word, stand_alone.off.word) == ("pass", "fail:signature")
    assert program.name in report.read_text()
    assert "'ttg.async_copy' op has 3 uses" in report.read_text()


def test_a_crash_becomes_an_entry_that_leads_to_another_path(buggy, worker, registry, triton, monkeypatch, tmp_path):
    incident = fail("sm_80", registry, buggy, monkeypatch)
    assert incident.symptom == "compiler-crash"
    out = tmp_path / "drafts"
    draft = drafts.make(failure_facts.from_incident(incident, [incident], registry), registry, out, worker=worker)
    assert draft.reproduced is True
    fill_in(Path(draft.files[-1]), 'path = "vendor"')
    known = Registry.read(find_backends(), out)
    assert plan(PROBLEM, known.target("cuda:sm_80", TOOLCHAIN), known).path == "sdpa"
    assert known.quirks[draft.id].symptom == "compiler-crash"
    assert re.search(known.quirks[draft.id].evidence.signature, incident.log)
    assert probe.run(known.quirks[draft.id], TOOLCHAIN, registry=known, worker=worker).verdict == "confirmed"


def test_a_failure_that_an_entry_explains_is_said_first(buggy, worker, registry, triton, monkeypatch, tmp_path) -> None:
    """The second time the registry knows it: nothing is written without force."""
    incident = fail("sm_86", registry, buggy, monkeypatch)
    out = tmp_path / "drafts"
    draft = drafts.make(failure_facts.from_incident(incident, [], registry), registry, out, worker=worker)
    fill_in(Path(draft.files[-1]), "launch = { num_stages = 2 }")
    known = Registry.read(find_backends(), out)
    found = failure_facts.from_incident(incident, [], known)
    again = drafts.make(found, known, out, worker=worker)
    assert (again.files, [(entry.id, entry.in_range) for entry in again.known]) == ((), [(draft.id, True)])
    forced = drafts.make(found, known, out, worker=worker, force=True)
    assert drafts._NUMBERED.match(forced.id)[2] == f"{int(draft.id.split('-')[1]) + 1:04d}"


def test_the_command_line_goes_the_same_way(portattn, buggy, registry, monkeypatch, tmp_path) -> None:
    incident = fail("sm_86", registry, buggy, monkeypatch)
    words = ("--out", tmp_path / "d", "--no-replay", "--json")
    called = portattn("quirks", "new", "--from-incident", incident.id, *words, exits=0)
    [made] = called.json["failures"]
    assert made["failure"]["stage"] == "ttgir"
    assert all(Path(file).is_file() for file in made["files"])
    assert made["id"].startswith("cuda-")
    assert "FILL-IN-effect" in json.dumps(called.json)
    unknown = portattn("quirks", "new", "--from-incident", "nobody", "--json", exits=2)
    assert incident.id in unknown.json["error"]["limit"]
