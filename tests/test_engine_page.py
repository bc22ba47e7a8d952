"""docs/engines.md is what docs/engines/*.json give; tests/engines/ writes such files and skips what is not there."""

import importlib.metadata as metadata
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import DOCS, ROOT, TESTS

pytest_plugins = ["pytester"]


engine_page = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "engine_page.py")))
features = SimpleNamespace(**runpy.run_path(str(TESTS / "engines" / "features.py")))


def run_of(version: str, **entries: Any) -> dict[str, Any]:
    versions = {"torch": "2.13.0", "triton": None, "portattn": "0.1.0"}
    return {
        "engine": "thing", "version": version, "versions": versions, "date": "2026-11-25", "features": dict(entries)
    }  # fmt: skip


def test_the_page_is_what_the_files_give() -> None:
    found = engine_page.read(DOCS / "engines")
    assert found
    assert engine_page.page(found) == (DOCS / "engines.md").read_text(encoding="utf-8")


def test_every_file_is_of_a_pinned_environment() -> None:
    """Nothing is claimed of a version that cannot be installed again."""
    pinned = {path.stem for path in (TESTS / "engines" / "requirements").glob("*.txt")}
    files = {path.stem for path in (DOCS / "engines").glob("*.json")}
    assert files
    assert files <= pinned


def test_both_ends_of_the_range_of_diffusers_ran() -> None:
    """Of the extra, which is the range that register() takes (tests/engines/diffusers)."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ends = re.search(r'"diffusers>=([\d.]+),<=([\d.]+)"', project)
    assert {f"diffusers-{end}" for end in ends.groups()} <= {path.stem for path in (DOCS / "engines").glob("*.json")}


def test_versions_are_in_order_and_failures_are_listed_with_their_reason(tmp_path: Path) -> None:
    works, refused = {"status": "works", "tests": 2}, {"status": "refused", "tests": 1, "reason": "x is 1 | `y`"}
    failed = {"status": "failed", "tests": 1, "reason": "call of `test_z`"}
    runs = [run_of("0.9", a_b=refused, z=works), run_of("0.10", a_b=refused, a_z=failed, new=works)]
    for run in runs:
        (tmp_path / f"thing-{run['version']}.json").write_text(json.dumps(run))
    text = engine_page.page(engine_page.read(tmp_path))
    assert text[text.index("| thing |") : text.index("## Environments")].splitlines() == [
        "| thing | 0.9 | 2.13.0 | – | 0.1.0 | 2026-11-25 | 3 | 1 | 1 | 0 |",
        "| thing | 0.10 | 2.13.0 | – | 0.1.0 | 2026-11-25 | 4 | 1 | 1 | 1 |",
        "", r"- thing 0.10, a\_z: **failed**: `call of 'test_z'`", "",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["thing-0.8.json", "other-0.9.json"])
def test_a_file_under_another_name_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(run_of("0.9")))
    with pytest.raises(ValueError, match=r"is named thing-0\.9\.json by what it holds"):
        engine_page.read(tmp_path)


def test_a_status_that_no_run_writes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "thing-0.9.json").write_text(json.dumps(run_of("0.9", a={"status": "fine", "tests": 1})))
    with pytest.raises(ValueError, match="fine"):
        engine_page.read(tmp_path)


INSTALLED = """
import pytest
@pytest.mark.engine_feature("works here")
def test_works(): pass
@pytest.mark.engine_feature("works here")
@pytest.mark.engine_feature("works half")
def test_works_too(): pass
@pytest.mark.engine_feature("works half")
def test_fails(): assert False
@pytest.mark.engine_feature("is refused", refused=True)
def test_refuses(refusal):
    with refusal(ValueError, match="thing"):
        raise ValueError("thing is 3, but \\n must be 4")
@pytest.mark.engine_feature("is not refused", refused=True)
def test_shows_no_refusal(): pass
@pytest.mark.engine_feature("needs a GPU")
def test_is_skipped(): pytest.skip("no GPU")
@pytest.mark.engine_feature("cannot be set up")
def test_of_a_fixture(missing): pass
def test_without_a_mark(): pass
"""


@pytest.fixture
def engines(pytester: pytest.Pytester) -> pytest.Pytester:
    """tests/engines with two engines: packaging, which pytest needs, and one that is not installed."""
    folder = pytester.mkdir("engines")
    for name in ("conftest.py", "features.py"):
        (folder / name).write_text((TESTS / "engines" / name).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "packaging").mkdir()
    (folder / "packaging" / "test_present.py").write_text(INSTALLED)
    (folder / "notinstalled").mkdir()
    (folder / "notinstalled" / "test_absent.py").write_text("import notinstalled\ndef test_it(): pass\n")
    pytester.makeini(
        "[pytest]\nmarkers =\n  engine_feature(name, refused=False): of a test\naddopts = --strict-markers"
    )
    return pytester


def run(engines: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return engines.runpytest_subprocess("-p", "no:cacheprovider", "-n", "0", "-rs", *arguments)


def test_a_run_of_an_engine_writes_what_its_tests_found(engines: pytest.Pytester) -> None:
    done = run(engines, "engines", "--engine-report", "reports")
    done.assert_outcomes(passed=4, failed=2, skipped=2, errors=1)
    name = f"packaging-{metadata.version('packaging')}.json"
    done.stdout.fnmatch_lines([f"features of engines: *{name}", "*notinstalled is not installed*engine_env.py*"])
    assert [path.name for path in (engines.path / "reports").iterdir()] == [name]
    written = json.loads((engines.path / "reports" / name).read_text(encoding="utf-8"))
    assert (written["engine"], written["versions"]["portattn"]) == ("packaging", "0.1.0")
    found = written["features"]
    assert (found["works here"], found["works half"]["status"]) == ({"status": "works", "tests": 2}, "failed")
    assert found["works half"]["tests"] == 2
    assert "test_fails" in found["works half"]["reason"]
    assert found["is refused"] == {"status": "refused", "tests": 1, "reason": "thing is 3, but must be 4"}
    assert found["is not refused"]["status"] == "failed"
    assert found["needs a GPU"] == {"status": "not run", "tests": 1, "reason": "no GPU"}
    assert (found["cannot be set up"]["status"], len(found)) == ("failed", 6)


@pytest.mark.parametrize("arguments", [["-k", "works"], ["engines/packaging/test_present.py"]], ids=["-k", "a file"])
def test_a_part_of_an_engine_writes_nothing(arguments: list[str], engines: pytest.Pytester) -> None:
    done = run(engines, "engines", *arguments, "--engine-report", "reports")
    done.stdout.fnmatch_lines(["*no report of engines was written: not a whole folder ran*"])
    assert not (engines.path / "reports").exists()


def test_a_feature_is_refused_by_all_of_its_tests_or_by_none() -> None:
    report = features.Report("thing")
    report.add([{"name": "a", "refused": False}], "passed", "")
    with pytest.raises(ValueError, match="'a' is marked refused=True by some"):
        report.add([{"name": "a", "refused": True}], "passed", "why")
