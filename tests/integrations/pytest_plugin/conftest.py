"""Runs of pytest inside a test, with the plug-in loaded as pyproject.toml's entry point says."""

import functools
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from places import ROOT
from planted import planted as planted
from pytest_runs import Runner

# Imported before any inner run: it forgets every module that it was the first to import, and Triton cannot be imported
# twice.
from portattn.integrations.pytest_plugin import session
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import executor
from portattn.tools.compare import verdict  # noqa: F401
from portattn.tools.matrix import results  # noqa: F401

if importlib.util.find_spec("triton") is not None:
    importlib.import_module("triton")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def entry_point(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in is installed, as far as pytest can tell: also where this portattn is a checkout on the path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "portattn_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: portattn-plugin\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["pytest11"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    monkeypatch.syspath_prepend(str(folder))
    path = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


@pytest.fixture
def inner(pytester: pytest.Pytester, entry_point: None) -> Runner:
    """inner(*arguments) runs pytest in this process; with alone=True in one of its own."""

    def run(*arguments: str | Path, alone: bool = False) -> pytest.RunResult:
        # One collects garbage five times a run, of all that the outer process holds; one imports Hypothesis each time.
        left_out = ("cacheprovider", "unraisableexception", "hypothesispytest", "anyio")
        given = [*(part for name in left_out for part in ("-p", f"no:{name}")), *map(str, arguments)]
        return pytester.runpytest_subprocess(*given) if alone else pytester.runpytest_inprocess(*given)

    return run


@pytest.fixture
def planted_compiler(planted: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The installed toolchain is the compiler that fails as tests/planted.py says, and nothing is interpreted."""
    options = functools.partial(session.Options, pythons={str(installed_toolchain()): planted}, left_out=("emulated",))
    monkeypatch.setattr(session, "Options", options)
    monkeypatch.setattr(executor, "interpreter_missing", lambda: "left out by this test")
    return planted
