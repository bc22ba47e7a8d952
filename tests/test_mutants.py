"""scripts/mutants.py: its data fits the tree, and every way in which a mutant can end is told from the others."""

import ast
import subprocess
from pathlib import Path

import pytest
import tiers
from places import ROOT

from portattn.worker.own_kernels import load

mutants = load(str(ROOT / "scripts" / "mutants.py"))
BY_HAND = mutants.by_hand()


@pytest.mark.parametrize("mutant", BY_HAND, ids=lambda m: m.name)
def test_an_entrys_old_text_is_there_once_and_its_tests_exist(mutant) -> None:
    """An entry whose code was rewritten must be rewritten with it."""
    changed = mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
    assert changed is not None, f"{mutant.file} has not exactly one {mutant.old!r}"
    if mutant.file.endswith(".py"):
        ast.parse(changed)
    assert mutant.tests
    for test in mutant.tests:
        file, _, function = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {function.partition('[')[0]}(" in text if function else text


def test_names_are_taken_once() -> None:
    names = [mutant.name for mutant in BY_HAND]
    assert len(set(names)) == len(names)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    (root / "module.py").write_text("def least(a, b):\n    return a if a < b else b\n\n\nUNUSED = 1\n")
    (root / "test_module.py").write_text(
        "from module import least\n\n\ndef test_least():\n    assert least(1, 2) == 1 and least(2, 1) == 1\n"
    )
    for command in (["init", "-q"], ["add", "module.py"]):  # the tests are not tracked yet
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def mutant(old: str, new: str, **fields):
    given = {"name": "m", "group": "g", "file": "module.py", "tests": ("test_module.py",)} | fields
    return mutants.Mutant(old=old, new=new, **given)


def test_every_way_in_which_a_mutant_ends(tree: Path) -> None:
    made = [
        mutant("a < b", "a > b"),
        mutant("a < b", "a <= b"),
        mutant("UNUSED = 1", "while True:\n    pass"),
        mutant("UNUSED = 1", "UNUSED = 1 +"),  # no test fails: nothing is imported
        mutant("UNUSED = 1", "import os\n\nos.abort()"),
        mutant("no such text", "x"),
        mutant("a", "b"),  # there more than once
        mutant("a < b", "a > b", file="gone.py"),
    ]
    found = list(mutants.run_by_hand(tree, made, 20.0))  # seconds: pytest's start on a machine that others use
    assert [f.outcome for f in found] == [
        "killed", "survived", "timeout", "broken", "killed", "stale", "stale", "stale",
    ]  # fmt: skip
    assert "'a < b' -> 'a <= b'" in found[1].detail
    assert found[4].detail == "pytest died of SIGABRT"
    assert "module.py has the old text 0 times" in found[5].detail
    assert (tree / "module.py").read_text().count("a < b") == 1, "only the copy is changed"
    assert mutants.report(found) == 2


def test_tests_that_fail_without_a_mutant_say_nothing(tree: Path) -> None:
    (tree / "test_module.py").write_text("def test_least():\n    assert False\n")
    with pytest.raises(mutants.NothingLearnt, match="without any mutant"):
        list(mutants.run_by_hand(tree, [mutant("a < b", "a > b")], 60.0))


# The tiers of tests: tests/slow.txt, and how it is made from measured times.
def lines(*tests: tuple[str, str, float, str]) -> list[dict[str, object]]:
    return [dict(zip(("test", "when", "seconds", "shared"), test, strict=True)) for test in tests]


def test_times_make_the_list() -> None:
    seconds = tiers.seconds_of(
        lines(
            ("tests/a.py::one", "setup", 2.0, "tests/a.py model=None"),
            ("tests/a.py::one", "call", 0.1, "tests/a.py model=None"),
            ("tests/a.py::two", "call", 0.1, "tests/a.py model=None"), ("tests/b.py::three[x]", "call", 1.1, ""),
            ("tests/b.py::three[y]", "call", 0.9, ""), ("tests/b.py::four[z]", "setup", 1.5, ""),
        )
    )  # fmt: skip
    slow = tiers.slow_by(*seconds, mutants=[], share=0.8)
    assert slow == {"tests/a.py::one", "tests/a.py::two", "tests/b.py::three[x]", "tests/b.py::four[z]"}
    assert list(tiers.lines_of(slow, seconds[0])) == ["tests/a.py", "tests/b.py::four", "tests/b.py::three[x]"]
    with pytest.raises(SystemExit, match="no measured test detects the mutant of tests/gone"):
        tiers.slow_by(*seconds, mutants=[["tests/gone.py::one"]])
    kept = tiers.slow_by(*seconds, [["tests/a.py::one", "tests/b.py::three"], ["tests/b.py::four"]], 0.8)
    assert kept == {"tests/a.py::one", "tests/a.py::two"}


@pytest.mark.parametrize(("name", "slow"), [("t/a.py::x[1]", True), ("t/b.py::y[1]", True), ("t/b.py::z[2]", False)])
def test_a_line_names_a_file_a_function_or_a_case(name: str, slow: bool) -> None:
    assert tiers.is_slow(name, frozenset(["t/a.py", "t/b.py::y", "t/b.py::z[1]"])) is slow


def function_exists(name: str) -> bool:
    file, _, function = name.partition("[")[0].partition("::")
    path = ROOT / file
    return path.is_file() and (not function or f"def {function.rpartition('::')[2]}(" in path.read_text("utf-8"))


def test_a_fast_test_detects_each_mutant_made_by_hand() -> None:
    listed = tiers.slow_tests()
    for mutant in tiers.tomllib.loads(tiers.MUTANTS.read_text(encoding="utf-8"))["mutant"]:
        fast = [test for test in mutant["tests"] if function_exists(test) and not tiers.is_slow(test, listed)]
        assert fast, mutant["name"]


def test_the_list_names_tests_that_there_are() -> None:
    assert [name for name in tiers.slow_tests() if not function_exists(name)] == []
    assert tiers.LIST.read_text(encoding="utf-8").startswith("# Written by tests/tiers.py")
