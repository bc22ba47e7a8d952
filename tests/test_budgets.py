"""scripts/budgets.py: each measure counts a planted fault, and a limit can only be lowered."""

import subprocess
from pathlib import Path

import pytest
import tomlkit
from places import ROOT

from portattn.worker.own_kernels import load

budgets = load(str(ROOT / "scripts" / "budgets.py"))
BUDGETS = tomlkit.parse((ROOT / "scripts" / "budgets.toml").read_text(encoding="utf-8")).unwrap()
CLEAN = '''"""Compute one number."""


def number(x):
    """Return x."""
    return x
'''
JIT = "@triton.jit\ndef tile({names}):\n    pass\n\n\n@triton.jit\ndef entry(q):\n    tile(q)\n"
# A measure, the file in which a fault is planted, its text, and by how much the measure rises.
FAULTS = [
    ("modules", "portattn/more.py", "x = 1\n", 1),
    ("repeated_classes", "backends/more.py", "class State:\n    pass\n", 1),
    ("participles", "portattn/more.py", "def told():\n    pass\n", 1),
    ("participles", "portattn/more.py", "class Admitted:\n    pass\n", 1),
    ("participles", "portattn/more.py", "def paged():\n    pass\n\n\ndef _told():\n    pass\n", 0),
    ("phrases", "portattn/more.py", '"""The rows of those that nobody has asked for."""\n', 2),
    ("phrases", "portattn/more.py", "x = 1  # where there\ny = 2  # is none\n", 1),
    ("phrases", "portattn/more.py", "# where there\n# is none\nx = 1\n", 1),
    ("phrases", "docs/page.md", "It says of\nwhat it is.\n", 1),
    ("wide_functions", "portattn/more.py", JIT.format(names=", ".join(f"p{n}" for n in range(21))), 1),
    ("wide_functions", "portattn/more.py", JIT.format(names=", ".join(f"p{n}" for n in range(20))), 0),
    ("inner_jit_parameters", "portattn/more.py", JIT.format(names=", ".join(f"p{n}" for n in range(33))), 33),
    ("hidden_imports", "portattn/more.py", 'import importlib\n\nimportlib.import_module("portattn.api")\n', 1),
    ("hidden_imports", "portattn/more.py", 'import importlib\n\nimportlib.import_module("triton")\n', 0),
    ("machinery_lines", "scripts/more.py", "x = 1\ny = 2\n", 2), ("test_lines", "tests/test_more.py", "x = 1\n", 1),
    ("words", "docs/page.md", "Four words stand here.\n", 4), ("long_files", "tests/test_more.py", "x = 1\n" * 501, 1),
    ("long_files", "tests/test_more.py", "x = 1\n" * 500, 0),
]  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("portattn/tools", "portattn/cli", "backends", "quirks", "scripts", "tests", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("Words.\n")
    (tmp_path / "portattn" / "one.py").write_text(CLEAN)
    (tmp_path / "portattn" / "two.py").write_text("class State:\n    pass\n")
    return tmp_path


@pytest.mark.parametrize(("name", "file", "text", "rise"), FAULTS)
def test_a_planted_fault_raises_its_measure(tree: Path, name: str, file: str, text: str, rise: int) -> None:
    before = budgets.measure(name, budgets.Tree(tree))
    (tree / file).write_text(text)
    assert budgets.measure(name, budgets.Tree(tree)) == before + rise


def test_docstrings_are_a_share_of_the_lines(tree: Path) -> None:
    (tree / "portattn" / "two.py").unlink()
    assert budgets.measure("docstring_share", budgets.Tree(tree)) == round(100 * 2 / 6, 1)


def _with_budgets(tree: Path, limit: int) -> Path:
    path = tree / "scripts" / "budgets.toml"
    rows = {name: {**row, "limit": 10**6} for name, row in BUDGETS.items()}
    rows["modules"]["limit"] = limit
    path.write_text("# A comment that stays.\n" + tomlkit.dumps(rows))
    return path


@pytest.mark.parametrize(("limit", "status"), [(1, 1), (2, 0), (3, 0)])
def test_a_number_over_its_limit_fails(tree, monkeypatch, capsys, limit: int, status: int) -> None:
    monkeypatch.setitem(budgets.MEASURES, "single_importers", lambda tree: [])  # needs an importable portattn
    _with_budgets(tree, limit)
    assert budgets.main([], tree) == status
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.endswith("OVER")] == printed[1:2] * status
    assert printed[1].split()[-3 - status + 1] == "2"


@pytest.mark.parametrize(("limit", "written"), [(1, 1), (3, 2)])
def test_write_lowers_a_limit_and_never_raises_it(tree, monkeypatch, limit: int, written: int) -> None:
    monkeypatch.setitem(budgets.MEASURES, "single_importers", lambda tree: [])
    path = _with_budgets(tree, limit)
    assert budgets.main(["--write"], tree) == (limit < 2)
    assert tomlkit.parse(path.read_text()).unwrap()["modules"]["limit"] == written
    assert path.read_text().startswith("# A comment that stays.")


def test_every_measure_has_a_budget_whose_goal_is_no_higher_than_its_start() -> None:
    assert BUDGETS.keys() == budgets.MEASURES.keys()
    for row in BUDGETS.values():
        assert row.keys() == {"title", "start", "limit", "goal"}
        assert row["goal"] <= row["start"]


def test_a_limit_above_an_earlier_commits_fails(tree: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(budgets.MEASURES, "single_importers", lambda tree: [])

    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        subprocess.run(["git", *author, *words], cwd=tree, check=True, capture_output=True)

    def status(limit: int, *commit: str) -> tuple[int, str]:
        _with_budgets(tree, limit)
        if commit:
            git("add", "-A")
            git("commit", "-qm", *commit)
        return budgets.main([], tree), capsys.readouterr().err

    skipped = "budgets: no earlier budgets.toml in git, so no limit was compared with one\n"
    assert status(4) == (0, skipped)
    git("init", "-q", "-b", "main")
    assert status(4) == (0, skipped)
    assert status(4, "first") == (0, "")
    assert status(5) == (1, "budgets: the limit of modules was raised from 4 to 5\n")
    assert status(3, "lowered") == (0, "")
    git("tag", "v1")
    assert status(4) == (1, "budgets: the limit of modules was raised from 3 to 4\n")
    assert status(4, "raised")[0] == 1
