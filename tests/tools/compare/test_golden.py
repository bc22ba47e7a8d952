"""Golden files of the commands that compare: text, JSON, Markdown and exit statuses, of planted regressions.

`WRITE_GOLDEN=1` writes the files anew; the change is then reviewed as any other."""

import os
import re
from pathlib import Path

import pytest
import quirk_files
from handmade import make_cell, make_run

from portattn.planning.registry import Registry
from portattn.schema.plan import Rejection
from portattn.testing.findings import KernelFacts, Numerics
from portattn.tools.matrix.cells import Footnote, PlanSummary
from portattn.tools.matrix.problems import decode
from portattn.tools.matrix.results import Results

GOLDEN = Path(__file__).parent / "golden"
BUMP = ("--from", "triton==3.6.0", "--to", "triton==3.9.0")
VARYING = ((r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)", "DATE"), (r"\b[0-9a-f]{16}\b", "DIGEST"))


def _same(name: str, text: str, folder: Path) -> None:
    text = text.replace(str(folder), "FOLDER")
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    file = GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), name


@pytest.fixture
def golden(portattn, tmp_path, monkeypatch):
    """golden("name", "matrix", "diff", …): compare a command's text and JSON with golden/name.txt."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)

    def check(name: str, *line: str, forms: tuple[tuple[str, ...], ...] = ((), ("--json",))) -> None:
        parts = []
        for form in forms:
            called = portattn(*line, *form)
            command = " ".join(("portattn", *line, *form))
            parts.append(f"$ {command}\n{called.out}{called.err}[exit status {called.status}]\n")
        _same(f"{name}.txt", "\n".join(parts), tmp_path)

    return check


TAKES = Footnote(id="rocm-0901-takes", role="rejected", sentence="x; the reference path is taken", upstream="none")
SETS = Footnote(id="rocm-0902-sets", role="applied", sentence="x; sets num_stages = 1", upstream="none",
                sets={"num_stages": 1})  # fmt: skip
REFERENCE = PlanSummary(
    path="reference", core_taken=False, rejected=(Rejection(path="triton", reason="planted", quirk=TAKES.id),)
)  # fmt: skip
PASSED = Numerics(outcome="pass", where="interpreter")
OTHER = decode("GQA", dtype="bf16", head_dim=128)


def _kernel(spills: int):
    return (KernelFacts(function="dense_forward", facts={"spills": spills, "registers": 128}),)


@pytest.fixture
def runs(tmp_path):
    """Folders of two runs: the second has planted losses of each kind, a new cell and a won one."""
    old = [
        make_cell(kernels=_kernel(0)), make_cell(named=OTHER, level="runs", interpreter=PASSED, kernels=_kernel(0)),
        make_cell(target="rocm:gfx942", level="emulated", interpreter=PASSED),
        make_cell(target="rocm:gfx950", kernels=_kernel(8)), make_cell(target="cuda:sm_80"),
        make_cell(target="rocm:gfx1100", footnotes=(SETS,)),
    ]  # fmt: skip
    new = [
        make_cell(toolchain="triton==3.9.0", status="NOTE", level="declared", reason="152 bytes spilled",
                  kernels=_kernel(152)),
        make_cell(toolchain="triton==3.9.0", named=OTHER, level="runs", label="sm_80 code on sm_90",
                  kernels=_kernel(8)),
        make_cell(target="rocm:gfx942", level="declared", plan=REFERENCE, footnotes=(TAKES,)),
        make_cell(target="rocm:gfx950", level="emulated", footnotes=(SETS,), kernels=_kernel(0)),
        make_cell(target="rocm:gfx90a"),
        make_cell(target="rocm:gfx1100", status="ERROR", level="declared", reason="planted refusal", stage="llir"),
    ]  # fmt: skip
    later = {"commit": "2" * 40, "digests": {"quirks/rocm": "s"}, "day": 22}
    for name, cells, changes in (("old", old, {}), ("new", new, later)):
        with Results(tmp_path / name) as file:
            file.replace(*make_run(cells, **changes))
    return tmp_path


def test_runs(golden, portattn, runs):
    assert portattn("matrix", "baseline", str(runs / "old"), str(runs / "b.toml")).status == 0
    old, new = str(runs / "old"), str(runs / "new")
    golden("diff", "matrix", "diff", old, new)
    kept = str(runs / "b.toml")
    golden("diff-partial", "matrix", "diff", kept, new, "--partial", "--fail-on", "facts,quirks,won,new")
    (runs / "expected.toml").write_text(
        '[[expected]]\ntarget = "rocm:gfx1100"\nproblem = "*"\nsignature = "planted"\nreason = "x"\nowner = "tests"\n'
        "expires = 2026-12-31\n"
    )
    against = ("--baseline", str(runs / "b.toml"), "--expected", str(runs / "expected.toml"), "--today")
    golden("check", "matrix", "check", new, *against, "2026-12-31")
    golden("check-expired", "matrix", "check", new, *against, "2027-01-01", "--fail-on", "note")
    golden("log", "matrix", "log", "cuda:sm_* d*", new, old)
    golden("log-none", "matrix", "log", "mla*", old, new)
    golden("check-alone", "matrix", "check", new, "--fail-on", "note,not_run")


@pytest.fixture
def planted_quirks(tmp_path, monkeypatch):
    """A registry of planted quirks alone: what is shipped may change, and these files may not."""
    seen = '[[verified]]\ntoolchain = "triton==3.9.0"\ntarget = "rocm:gfx942"\nlevel = "compiles"\n'
    for quirk, effect, when in (
        ("rocm-0901-fixed", "launch = { num_stages = 1 }", 'toolchain = { triton = "<3.7" }'),
        ("rocm-0902-stays", "launch = { num_warps = 2 }", 'toolchain = { triton = ">=3.4" }'),
        ("rocm-0903-takes", 'path = "reference"', 'features = ["paged"]\ntoolchain = { triton = ">=3.8,<3.10" }'),
        ("rocm-0905-slow", 'path = "vendor"', 'features = ["log_weights"]\ntoolchain = { triton = ">=3.4" }'),
        ("rocm-0904-notes", 'note = "planted"', 'toolchain = { triton = ">=3.8,<3.10" }'),
    ):
        symptom = "slow" if "slow" in quirk else "wrong-result"
        path = quirk_files.plant(tmp_path / "planted", quirk, effect, when, symptom=symptom)
        if quirk == "rocm-0902-stays":
            path.write_text(f'{path.read_text()}{seen}off = "fail:signature"\non = "pass"\ndate = 2026-11-20\n')
    known = quirk_files.registry(tmp_path / "planted")
    monkeypatch.setattr(Registry, "load", staticmethod(lambda: known))


def test_compilers(golden, planted_quirks, tmp_path):
    problems = ("--problems", "dense*fp16*,decode*,paged*")
    line = ("ci", *BUMP, "--targets", "gfx942,gfx950", *problems, "--summary", str(tmp_path / "ci.md"))
    golden("ci", *line)
    _same("ci.md", (tmp_path / "ci.md").read_text(encoding="utf-8"), tmp_path)
    golden("ci-fail-on", *line, "--fail-on", "unprobed,canaries,schedules,quirks", forms=((),))


def test_a_note_is_no_cause_of_what_the_toolchain_changes(portattn):
    """rocm-0024 applies to gfx1201 with 3.8.0, and changes no plan."""
    line = ("ci", "--from", "triton==3.6.0", "--to", "triton==3.8.0", "--targets", "gfx1201", "--fail-on", "quirks")
    line += ("--problems", "decode*,paged*,varlen*,gradients*")
    found = portattn(*line, "--json").json
    assert "rocm-0024-carried-ranges" in {entry["id"] for entry in found["upgrade"]["entries"]}
    assert (found["losses"], found["changes"]) == ([], [])
