"""`portattn bench --release …` on a device that is the CPU: real processes, of one Triton where the machine has one."""

import itertools
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from benchfakes import a_result, figures, made
from fakedriver import triton_folders
from test_bench_cli import bench
from test_bench_cli import device as device  # the fixture

from portattn.errors import ArgumentError
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.bench import comparison, firstcall, releases, results, run
from portattn.tools.bench.cases import SETS

HERE = Path(__file__).parent
OWN = installed_toolchain()
TRITONS = triton_folders()
SEED = ("--set", "seed", "--only", "decode", "--peer", "sdpa", "--rounds", "2")

ABOUT = {
    "sets": ("seed",), "asked": (("seed", "a case"),), "rounds": 1, "backend": "auto", "core": False,
    "only_host": False, "commit": "c",
}  # fmt: skip

pytestmark = pytest.mark.skipif(OWN.distribution != "triton", reason="community Triton is not installed")


@pytest.fixture
def copy(tmp_path: Path) -> str:
    """The installed Triton once more, under the name of another release."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "triton").symlink_to(OWN.path)
    return f"99.0.0={tmp_path / 'copy'}"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, dict[str, object]]:
    """What goes wrong in releases' processes, which are release_child's, by release."""
    found: dict[str, dict[str, object]] = {}
    places = [str(HERE), str(HERE.parent), str(HERE.parents[1]), *sys.path]

    def variables(release: releases.Release) -> dict[str, str]:
        path = os.pathsep.join(p for p in (release.folder, *places) if p)
        return {
            "PYTHONPATH": path, "RELEASE": release.version, "TURNS": str(tmp_path / "turns"),
            "FAULTS": json.dumps(found),
        }  # fmt: skip

    monkeypatch.setattr(releases.Release, "variables", property(variables))
    monkeypatch.setattr(releases, "TASK", "bench.release_child:answer")
    return found


def own(*more: str) -> tuple[str, ...]:
    return tuple(word for text in (OWN.version, *more) for word in ("--release", text))


@pytest.mark.usefixtures("device")
def test_releases_take_turns_and_are_compared(tmp_path, copy, faults):
    faults["99.0.0"] = {"slow": 2.0}
    out = tmp_path / "out"
    called = bench(*SEED, *own(copy), "--out", str(out), "--json", "--commit", "c0ffee", exits=0)
    told = json.loads(called.stdout)
    assert [(one["release"], one["failed"]) for one in told["releases"]] == [(OWN.version, ""), ("99.0.0", "")]
    assert {(c["case"], c["contender"], c["best"]) for c in told["cases"]} == {
        (case, who, OWN.version)
        for case in ("seed decode", "seed paged decode")
        for who in ("portattn", "portattn prepared")
    }
    for case in told["cases"]:
        first, second = case["releases"][OWN.version], case["releases"]["99.0.0"]
        assert (first["of_best"], second["of_best"]) == (1.0, 0.5)
        assert (first["ms"], second["ms"], first["path"]) == (1.0, 2.0, second["path"])
    means = {(s["contender"], s["release"]): s["of_best"] for s in told["sets"]}
    assert means["portattn", "99.0.0"] == pytest.approx(0.5)
    # Each release's own results, with the peers of the same rounds.
    for name, slow in ((OWN.version, 1.0), ("99.0.0", 2.0)):
        result = results.read(out / name)
        assert result.runs[0].toolchain == f"triton=={name}"
        assert result.runs[0].ceilings is not None
        assert [row.name for row in result.rows] == ["seed decode", "seed paged decode"]
        ours, theirs = result.rows[0].figures("portattn"), result.rows[0].figures("sdpa")
        assert (ours.rounds_ms, len(theirs.rounds_ms)) == ((slow, slow), 2)
        assert not any("@" in f.name for f in result.rows[0].contenders)
        assert (out / name / "bench.json").exists()
    assert json.loads((out / "releases.json").read_text())["cases"] == told["cases"]
    assert re.search(
        r"\| seed \| seed decode \| portattn \| 1000\.0 µs \(\d\.\d\d\), 1\.00", (out / "releases.md").read_text()
    )
    # Nobody began a turn before another's had ended, and both worked in turns.
    moments = sorted((float(at), name) for at, name, _ in map(str.split, (tmp_path / "turns").open()))
    pairs = list(zip(moments[::2], moments[1::2], strict=True))
    assert all(begun[1] == ended[1] for begun, ended in pairs)
    assert sum(a != b for a, b in itertools.pairwise([begun[1] for begun, _ in pairs])) >= 4
    text = bench(*SEED, *own(copy), "--out", str(out)).stdout
    assert "99.0.0" in text
    # The report says the same, of the file alone.
    again, told = bench("report", str(out)).stdout, text.partition("written: ")[0]
    assert again == told


@pytest.mark.usefixtures("device")
def test_who_does_not_start_is_named_and_the_others_are_timed(tmp_path, copy, faults):
    faults["99.0.0"] = {"start": "libtriton.so: no such symbol"}
    out = tmp_path / "out"
    told = json.loads(bench(*SEED, *own(copy), "--out", str(out), "--json", exits=1).stdout)
    assert ["libtriton.so: no such symbol" in one["failed"] for one in told["releases"]] == [False, True]
    assert all(list(case["releases"]) == [OWN.version] for case in told["cases"])
    assert len(told["cases"]) == 4
    assert not (out / "99.0.0").exists()


def test_another_release_than_was_named_is_not_timed(copy, faults):
    (release,) = releases.releases((copy,))
    faults["99.0.0"] = {"is": "98.0.0"}
    with releases.ReleaseProcess(release) as asked:
        with pytest.raises(releases.ReleaseProcessError, match=r"has triton==98\.0\.0, and not triton==99\.0\.0"):
            asked.identify(ABOUT)
        assert asked.prepare(SETS["seed"][0], "auto", False)[0].contenders == {}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("fault", "first", "second"),
    [
        ({"dies": "seed decode"}, "exit status 3", ""),
        ({"hangs": "seed decode"}, "no answer in", ""),
        ({"fails": "seed decode", "wrong": "paged"}, "an unlucky launch", "over the budget"),
    ],
)
def test_a_case_that_fails_in_one_release_is_measured_with_the_others(monkeypatch, copy, faults, fault, first, second):
    monkeypatch.setattr(releases, "TURN_S", 3.0)
    faults["99.0.0"] = fault
    told = json.loads(bench(*SEED, *own(copy), "--json", exits=1).stdout)
    of = {case["case"]: case for case in told["cases"] if case["contender"] == "portattn"}
    broken = of["seed decode"]["releases"]
    assert first in broken["99.0.0"]["refused"]
    assert (broken["99.0.0"]["ms"], broken[OWN.version]["ms"]) == (None, 1.0)
    assert of["seed decode"]["best"] == OWN.version
    # The next case finds a process again.
    later = of["seed paged decode"]["releases"]
    assert second in later["99.0.0"]["refused"]
    assert (later["99.0.0"]["ms"], later[OWN.version]["ms"]) == (None if second else 1.0, 1.0)


@pytest.mark.usefixtures("device")
def test_a_run_goes_on_where_every_release_has_a_cell(tmp_path, copy, faults):
    out = tmp_path / "out"
    chosen = (*SEED[:4], "--peer", "none", "--rounds", "1", "--out", str(out))
    assert "1 cells are left" in bench(*chosen, *own(copy), "--budget", "0.001", "--json", exits=0).stderr
    # An interrupt between the two releases' rows: only one has it.
    with results.Store(out / "99.0.0") as folder:
        result = results.read(out / "99.0.0")
        result.rows = []
        folder.replace(result)
    bench(*chosen, *own(copy), "--resume", "--json", exits=0)
    for name in (OWN.version, "99.0.0"):
        result = results.read(out / name)
        assert Counter(row.name for row in result.rows) == {"seed decode": 1, "seed paged decode": 1}
        assert {row.run for row in result.rows} == {1}
    other = bench(*chosen[:-2], "--out", str(out), *own(copy), "--resume", "--core-only", exits=2)
    assert "its core is False" in other.stderr
    nothing = bench(*chosen[:-2], "--out", str(tmp_path / "new"), *own(copy), "--resume", exits=2)
    assert "no release's rows.jsonl" in nothing.stderr


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


SHORT = (*SEED[:4], "--peer", "none", "--rounds", "1")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "out"


@pytest.fixture
def out(tmp_path: Path, kept: Path, copy: str, faults: object, device: object) -> Path:
    """Return a folder that a run of both releases has ended in: a copy of the first one's."""
    if not kept.exists():
        assert bench(*SHORT, *own(copy), "--out", str(kept)).exit_code == 0
    return Path(shutil.copytree(kept, tmp_path / "out"))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("moment", "resume"),
    [
        *itertools.product(((releases.ReleaseProcess, "identify"), (results.Store, "append")), ((), ("--resume",))),
        ((run, "run_case"), ()),
    ],
)
def test_an_interrupt_before_the_first_figure_leaves_the_comparison(out, copy, monkeypatch, resume, moment):
    before = contents(out)
    monkeypatch.setattr(*moment, interrupted)
    bench(*SHORT, *own(copy), "--out", str(out), *resume, exits=130)
    after = contents(out)
    kept = [name for name in before if name.endswith(("releases.json", "releases.md", "bench.json"))]
    assert (len(kept), {name: after[name] for name in kept}) == (4, {name: before[name] for name in kept})


@pytest.mark.usefixtures("device")
def test_an_interrupt_while_rows_are_begun_ends_as_any_other(tmp_path, copy, faults, monkeypatch):
    out, start, begun = tmp_path / "out", results.Store.start, []

    def second(self: results.Store) -> Path | None:
        begun.append(self)
        return start(self) if len(begun) == 1 else interrupted()

    monkeypatch.setattr(results.Store, "start", second)
    assert json.loads(bench(*SHORT, *own(copy), "--out", str(out), "--json", exits=130).stdout)["releases"] == []
    assert not (out / "releases.json").exists()


def test_where_no_release_starts_nothing_is_written(out, copy, faults):
    before = contents(out)
    faults["99.0.0"] = faults[OWN.version] = {"start": "no such symbol"}
    for resume in ((), ("--resume",)):
        assert "written" not in bench(*SHORT, *own(copy), "--out", str(out), *resume, exits=1).stdout
        assert contents(out) == before


@pytest.mark.usefixtures("device")
def test_a_release_that_begins_later_loses_nobodys_rows(tmp_path, copy, faults):
    """All cells are measured anew with it; what the others have is kept under its date."""
    out = tmp_path / "out"
    faults["99.0.0"] = {"start": "no such symbol"}
    assert bench(*SHORT, *own(copy), "--out", str(out)).exit_code == 1
    before = (out / OWN.version / "rows.jsonl").read_bytes()
    del faults["99.0.0"]
    called = bench(*SHORT, *own(copy), "--out", str(out), "--resume", "--json", exits=0)
    (kept,) = (out / OWN.version).glob("rows-*.jsonl")
    assert kept.read_bytes() == before
    assert f"triton==99.0.0 begins: triton=={OWN.version}'s rows are now {kept}" in called.stderr
    done = [results.read(out / name).done for name in (OWN.version, "99.0.0")]
    assert done[0] == done[1] != set()


@pytest.mark.usefixtures("device")
def test_kernels_are_compiled_with_every_release_first(copy, faults):
    several = releases.releases((OWN.version, copy))
    cases = [case for case in SETS["seed"] if "decode" in case.name]
    seen = []
    assert releases.prime_releases(several, cases, "auto", False, 2, lambda *item: seen.append(item))
    assert {(release.version, case.name) for release, case, _ in seen} == {
        (version, case.name) for version in (OWN.version, "99.0.0") for case in cases
    }
    assert {failure for *_, failure in seen} == {""}
    late = releases.prime_releases(several, cases, "auto", False, 2, lambda *item: seen.append(item), seconds=0.0)
    assert not late
    assert len(seen) == 4


def test_a_release_that_keeps_dying_is_asked_no_more(copy, faults, monkeypatch):
    monkeypatch.setattr(releases, "MOST_DEATHS", 2)
    (release,) = releases.releases((copy,))
    faults["99.0.0"] = {"dies": "decode"}
    case = next(case for case in SETS["seed"] if case.name == "seed decode")
    with releases.ReleaseProcess(release) as asked:
        for _ in range(releases.MOST_DEATHS):
            admitted, _ = asked.prepare(case, "auto", False)
            with pytest.raises(releases.ReleaseProcessError, match="exit status 3"):
                admitted.contenders["portattn"].run()
            with pytest.raises(releases.ReleaseProcessError, match="ended"):
                admitted.contenders["portattn prepared"].run()
        admitted, _ = asked.prepare(case, "auto", False)
        assert "asked no more" in admitted.refused["portattn"]
        asked.drop()


@pytest.mark.parametrize("version", ["3.9.0"])
def test_a_release_of_a_folder_is_what_its_process_has(version, faults):
    if version not in TRITONS:
        pytest.skip(f"no Triton {version} for this Python: `portattn lab create triton=={version}` makes one")
    (release,) = releases.releases((f"{version}={TRITONS[version].parent}",))
    faults[version] = {"asks": True}
    with releases.ReleaseProcess(release) as asked:
        assert asked.identify(ABOUT).toolchain == f"triton=={version}"


def test_an_interrupt_leaves_no_process(tmp_path, copy, faults):
    (release,) = releases.releases((copy,))
    faults["99.0.0"] = {"hangs": "decode"}
    case = next(case for case in SETS["seed"] if case.name == "seed decode")
    before = signal.signal(signal.SIGALRM, Mock(side_effect=KeyboardInterrupt))
    try:
        with releases.ReleaseProcess(release) as asked:
            admitted, _ = asked.prepare(case, "auto", False)
            signal.alarm(1)
            with pytest.raises(KeyboardInterrupt):
                admitted.contenders["portattn"].run()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    (pid,) = {int(line.split()[2]) for line in (tmp_path / "turns").read_text().splitlines()}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("texts", "limit"),
    [
        (("3.8",), r"the lab has none: `portattn lab create triton==3\.8\.0` makes one, or give its folder, 3\.8\.0="),
        (("x",), "must be VERSION or VERSION=FOLDER"),
        (("99.0.0=/no/such/folder",), "triton/__init__.py"),
        ((OWN.version, f"triton=={OWN.version}"), "each release once"),
        ((OWN.version, OWN.version.removesuffix(".0")), f"each release once, and {re.escape(OWN.version)} was named"),
        ((OWN.version, f"v{OWN.version}"), "each release once"),
        ((OWN.version, f" {OWN.version} "), "each release once"),
    ],
)
@pytest.mark.usefixtures("device")
def test_bad_releases(texts, limit, monkeypatch, tmp_path):
    monkeypatch.setenv("PORTATTN_CACHE_DIR", str(tmp_path))
    with pytest.raises(ArgumentError, match=limit):
        releases.releases(texts)
    assert re.search(limit, bench(*(word for text in texts for word in ("--release", text)), exits=2).stderr)


def test_a_release_is_written_as_the_lab_writes_it(copy):
    """Its version is a folder of --out: one that another text names again."""
    folder = copy.partition("=")[2]
    found = releases.releases((f" 3.8={folder}", f"v99.0.0={folder}", f"triton=={OWN.version}"))
    assert [one.version for one in found] == ["3.8.0", "99.0.0", OWN.version]
    assert [one.folder for one in found] == [folder, folder, ""]
    assert found[0].variables["PYTHONPATH"].split(os.pathsep)[0] == folder, "before what is installed"
    with pytest.raises(ArgumentError, match=r"each release once, and 99\.0\.0 was named"):
        releases.releases((copy, f"99={folder}"))


def test_without_a_device_nobody_is_asked_for_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no device with events is here" in bench("--release", "99.0.0", exits=2).stderr


def test_the_best_is_told_from_the_rounds_that_they_shared():
    case = SETS["seed"][0]
    drifting = (1.0, 2.0, 4.0)
    fast = a_result(made("seed", case, figures("portattn", *drifting), figures("sdpa", 2.0, 4.0, 8.0)))
    slow = a_result(made("seed", case, figures("portattn", *(1.25 * ms for ms in drifting))))
    (found,) = comparison.cases({"a": slow, "b": fast})
    figures_of = found.releases
    assert (found.best, figures_of["a"].of_best, figures_of["b"].of_best, figures_of["b"].ratio) == ("b", 0.8, 1.0, 2.0)


def test_a_first_call_is_timed_with_the_release(monkeypatch):
    asked = {}
    monkeypatch.setattr(firstcall, "_child", lambda case, environment, *rest: asked.update(environment) or {
        "first_s": 1.0, "second_s": 1.0, "path": "triton", "warmup_s": 1.0,
    })  # fmt: skip
    firstcall.measure(firstcall.CASES[0], 0, variables={"PYTHONPATH": "/a/release"})
    assert asked["PYTHONPATH"] == "/a/release"
