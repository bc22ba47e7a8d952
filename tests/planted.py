"""A compiler that fails as it is told: speaks the worker's protocol, and each arch ends in its own way. And the command
line, called in this process."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from portattn.cli import main

PLANTED = """\
#!{python}
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("serve", sys.argv[2])
serve = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serve)
FITS = {{"scratchpad_bytes": 1024, "registers": 64, "spills": 0}}
def answer(request, say):
    arch = str(request["target"][1])
    say({{"stage": "ttgir"}})
    if arch == "80":
        print("Assertion `planted' failed.", file=sys.stderr, flush=True)
        os.abort()
    if arch == "86":
        time.sleep(600)
    if arch == "89":
        said = {{"kind": "RuntimeError", "message": "planted refusal\\nmore", "log": "trace"}}
        return {{"ok": False, "stage": "ttgir", **said}}
    if arch == "120":
        return {{"ok": True, "facts": FITS | {{"mma": 4, "spills": 96}}}}
    if arch == "gfx90a":
        return {{"ok": True, "facts": FITS}}
    return {{"ok": True, "facts": FITS | {{"mma": 4, "wgmma": 8, "tcgen05": 8, "mfma": 8, "wmma": 8}}}}
serve.answer = answer
serve.main()
"""


@pytest.fixture
def planted(tmp_path: Path) -> str:
    """A program that takes the place of a Python with Triton: sm_80 aborts, sm_86 hangs, sm_89 refuses, sm_120 spills,
    gfx90a has no matrix instruction, every other arch compiles."""
    path = tmp_path / "planted-compiler"
    path.write_text(PLANTED.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


class Called:
    """What a call left: its exit status, standard output, standard error, and output as JSON."""

    def __init__(self, result: click.testing.Result) -> None:
        self.status, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def portattn() -> Callable[..., Called]:
    """portattn("plan", "attention", …, exits=0): run a command. An exception that no user should see, or another exit
    status than `exits`, fails the test."""

    def call(*arguments: Any, exits: int | None = None) -> Called:
        result = click.testing.CliRunner().invoke(main, [str(a) for a in arguments], prog_name="portattn")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert exits in (None, result.exit_code), result.output
        return Called(result)

    return call
