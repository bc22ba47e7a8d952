"""docs/engines.md has a row of each of docs/engines/*.json; tests/engines/ writes them, and skips absent engines."""

import importlib.metadata as metadata
import json
import re
import runpy
from types import SimpleNamespace

import pytest
from places import DOCS, ROOT, TESTS

pytest_plugins = ["pytester"]


features = SimpleNamespace(**runpy.run_path(str(TESTS / "engines" / "features.py")))


def test_the_page_has_a_row_of_each_run_and_names_what_failed() -> None:
    page = (DOCS / "engines.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| \[(\w+)\]\([\w-]+\.md\) \| (.+) \|$", page, re.MULTILINE)
    found = {}
    for path in (DOCS / "engines").glob("*.json"):
        run = json.loads(path.read_bytes())
        assert path.stem == f"{run['engine']}-{run['version']}"
        statuses = [entry["status"] for entry in run["features"].values()]
        others = [name for name, entry in run["features"].items() if entry["status"] not in ("works", "refused")]
        assert all(f"**{name}**" in page for name in others), others
        tests = sum(entry["tests"] for entry in run["features"].values())
        numbers = tests, statuses.count("works"), statuses.count("refused"), len(others)
        versions = (run["versions"][name] for name in ("torch", "triton", "portattn"))
        found[path.stem] = " | ".join(map(str, (run["version"], *versions, run["date"], *numbers)))
    assert {f"{engine.lower()}-{row.partition(' ')[0]}": row for engine, row in shown} == found


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


def test_a_feature_is_refused_by_all_of_its_tests_or_by_none() -> None:
    report = features.Report("thing")
    report.add([{"name": "a", "refused": False}], "passed", "")
    with pytest.raises(ValueError, match="'a' is marked refused=True by some"):
        report.add([{"name": "a", "refused": True}], "passed", "why")
