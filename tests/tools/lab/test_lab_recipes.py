"""Environments of a compiler that another package brings: made as its recipe says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from portattn.errors import ArgumentError
from portattn.schema import compilers
from portattn.tools import lab
from portattn.tools.lab import LabError

NAME = "triton-musa==2.0"
RECIPE = """
[triton-musa]
package = "triton_musa"
spelling = '(\\d+\\.\\d+)\\.post'

[triton-musa.lab]
releases = ["1.0"]
python = ">=3.9"
also = { "triton==9.1.0" = ">=2", "absent-package" = "<2" }
index = "https://example.com/simple"
programs = "{programs}"
"""


@pytest.fixture
def bring(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Have the compiler of RECIPE brought by a package."""
    compilers.all_compilers()
    before = compilers._brought.compilers or {}

    def add(programs: str = "") -> None:
        (tmp_path / "compilers.toml").write_text(RECIPE.replace("{programs}", programs))
        compilers.bring(before | compilers.read(tmp_path, "portattn-musa 0.1"))

    yield add
    compilers.bring(before)


def test_it_is_made_with_what_the_recipe_names(publish, bring: Callable[..., None]) -> None:
    publish()
    publish("triton-musa", "2.0", {"triton_musa/__init__.py": ""})
    with pytest.raises(ArgumentError, match="'triton-musa' is no known compiler"):
        lab.create(NAME)
    bring()
    assert lab.toolchains()[-1] == "triton-musa==1.0"
    made = lab.create(NAME)
    assert (made.toolchain, made.versions["triton"], made.versions["triton-musa"]) == (NAME, "9.1.0", "2.0")
    with lab.worker(NAME) as worker:
        assert worker.request("hello", 60).toolchain == "9.1.0"
    assert lab.states()[-1].environment == made
    (made.folder / "lib").rename(made.folder / "gone")
    assert lab.find(NAME) is None
    with pytest.raises(LabError, match="its lab environment is broken: the triton package is not in it"):
        lab.need(NAME)
    lab.remove(NAME)


def test_a_release_that_pip_does_not_find_says_where_it_is_published(publish, bring: Callable[..., None]) -> None:
    publish()
    bring()
    with pytest.raises(LabError, match=r"it is published at https://example\.com/simple: PIP_EXTRA_INDEX_URL"):
        lab.create(NAME)


def test_another_distribution_in_its_place_is_refused(publish, bring: Callable[..., None]) -> None:
    publish()
    publish("triton-musa", "2.0", {"elsewhere/__init__.py": ""})
    bring()
    with pytest.raises(LabError, match=r"triton-musa==2\.0: installed, but triton_musa/ in it belongs to"):
        lab.create(NAME)


def test_programs_beside_python(publish, bring: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of triton-ascend, by another package's module; one that cannot be imported breaks no other environment."""
    module = ModuleType("musa_programs")
    fetched: list[list[str]] = []

    def fetch(folder: Path, names: list[str], say: object, commands: object) -> dict[str, str]:
        fetched.append(names)
        (folder / "musa-opt").touch()
        return {"musa-opt": "7"}

    module.ALL, module.NoTools, module.fetch = ("musa-opt",), LookupError, fetch  # type: ignore[attr-defined]
    module.tools = lambda folder: {"musa-opt": "x"} if (folder / "musa-opt").exists() else {}  # type: ignore[attr-defined]
    module.missing = lambda folder: [n for n in module.ALL if n not in module.tools(folder)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "musa_programs", module)
    publish()
    publish("triton-musa", "2.0", {"triton_musa/__init__.py": ""})
    bring("musa_programs")
    made = lab.create(NAME)
    assert (fetched, made.tools, made.versions["musa-opt"]) == ([["musa-opt"]], {"musa-opt": "x"}, "7")
    bring("no_such_module")
    states = {state.toolchain: state for state in lab.states()}
    assert "its module of programs, no_such_module: ModuleNotFoundError" in states[NAME].broken
    assert states["triton==3.6.0"].broken == ""
