"""docs/backends.md, "Bringing your own compiler": its quotations are in the example's files, what it shows happens."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import support
from places import DOCS, TESTS

from portattn.schema.compilers import Compiler, Recipe

SECTION = (DOCS / "backends.md").read_text(encoding="utf-8").split("### Bringing your own compiler\n")[1]
SECTION = SECTION.split("\n### ")[0]
EXAMPLE = TESTS / "plugins" / "example_backend" / "portattn_example"
QUOTED = re.findall(r"^```(?:python|toml)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)


def test_what_is_quoted_is_in_the_files() -> None:
    files = [path.read_text(encoding="utf-8") for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    assert len(QUOTED) == 5
    for text in QUOTED:
        # Lines of a class that stand apart in the file are quoted together.
        whole = any(text.strip("\n") in file for file in files)
        lines = any(all(line in file for line in text.splitlines()) for file in files)
        assert whole or (text is QUOTED[0] and lines), text


def test_every_key_is_explained() -> None:
    keys = set(re.findall(r"^\| `([\w.]+)` \|", SECTION, re.MULTILINE))
    own = {field.name for field in msgspec.structs.fields(Compiler)} - {"name", "brought_by", "file", "lab"}
    assert keys == own | {f"lab.{field.name}" for field in msgspec.structs.fields(Recipe)}


@pytest.mark.compiles
def test_what_is_shown_happens(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := support.no_interpreter():
        pytest.skip(missing)
    monkeypatch.chdir(tmp_path)
    [console] = re.findall(r"^```console\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ portattn (.*)\n((?:(?!\$ ).*\n)+)", console, re.MULTILINE)
    assert len(commands) == console.count("$ ") == 6
    for command, shown in commands:
        called = run(*shlex.split(command), COLUMNS="120", exits=0)  # of the terminal that the page shows
        printed = [line.rstrip() for line in called.out.splitlines()]
        for line in shown.splitlines():
            assert line in printed, f"{command}\n{called.out}"
