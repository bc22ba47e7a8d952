"""The example backend and its compiler, installed as packages, and the command line in a process that finds them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from places import ROOT, TESTS

PACKAGES = ("example_backend", "example_compiler")


class Called(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that both packages are installed in, by pip and without an index."""
    folder = tmp_path_factory.mktemp("example")
    for name in PACKAGES:
        copy = folder / "sources" / name
        shutil.copytree(TESTS / "plugins" / name, copy)  # a build writes beside its sources
    command = [
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index",
        "--disable-pip-version-check", "--target", str(folder / "site"),
    ]  # fmt: skip
    done = subprocess.run([*command, *(str(folder / "sources" / name) for name in PACKAGES)], capture_output=True,
        text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Callable[..., Called]:
    """run("plan", …): the command line in a process of its own, which finds the packages."""
    path = os.pathsep.join(map(str, (site, ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "PORTATTN_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)

    def call(*arguments: str, exits: int | None = None, **variables: str) -> Called:
        command = [sys.executable, "-m", "portattn", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment | variables)
        assert exits in (None, done.returncode), done.stdout + done.stderr
        return Called(done.returncode, done.stdout, done.stderr)

    return call
