"""The root command: quick help, and one line for every error."""

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from portattn import __version__
from portattn.cli import COMMANDS
from portattn.tools.matrix import results
from portattn.tools.quirks import audit as quirk_files

PLAN = ("plan", "attention", "--target", "rocm:gfx942", "--toolchain", "triton==3.6.0")
SHAPES = ("--q", "1,2,16,64", "--kv", "1,2,16,64", "--dtype", "fp16")


def test_help_names_every_command_and_the_exit_statuses(portattn):
    called = portattn("--help", exits=0)
    for name in COMMANDS:
        assert f"  {name} " in called.out
    assert "Exit status" in called.out
    assert portattn("--version").out == f"portattn, version {__version__}\n"


GROUPS = ("quirks", "matrix", "lab")
COMMANDS_OF_GROUPS = (
    "quirks list", "quirks audit", "matrix run", "matrix report", "matrix site", "lab list", "lab create", "lab remove",
)  # fmt: skip


@pytest.mark.parametrize("command", [*COMMANDS, *COMMANDS_OF_GROUPS])
def test_every_command_has_help_and_json(portattn, command):
    assert "--json" in portattn(*command.split(), "--help", exits=0).out or command in GROUPS


def test_help_imports_neither_torch_nor_triton():
    code = (
        "import sys; from portattn.cli import main\n" "try: main(['--help'])\n" "except SystemExit: pass\n"
        "print([m for m in ('torch', 'triton', 'numpy', 'msgspec') if m in sys.modules])"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [("--version",), ("quirks", "list"), ("quirks", "list", "--json"), ("plam",)])
def test_output_that_cannot_be_written_is_one_line(arguments):
    """A traceback and Python's own status 1 would tell that a check is red."""
    command = [sys.executable, "-m", "portattn", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "No such command 'plam'" if arguments == ("plam",) else "output cannot be written: No space left on device"
    assert done.returncode == 2
    assert done.stderr.startswith(f"portattn: {said}")
    assert len(done.stderr.splitlines()) == 1


def test_a_message_that_nobody_gets_keeps_its_status():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "portattn", "plam", "--json"], stdout=full, stderr=full, check=False
        )
    assert done.returncode == 2


def test_a_file_that_the_system_refuses_is_named(portattn, monkeypatch):
    def refuse(path, *arguments):
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(quirk_files, "check_file", refuse)
    called = portattn("quirks", "audit", "--json", exits=2)
    assert called.json["error"]["kind"] == "OSError"
    assert called.json["error"]["message"].endswith(".toml: Too many open files")


# Command lines that are refused, and their messages: … stands for any text.
REFUSED = [
    part.splitlines() for part in Path(__file__).with_name("refused.txt").read_text("utf-8").strip().split("\n\n")
]


@pytest.mark.parametrize(("line", "told"), REFUSED, ids=[line for line, _ in REFUSED])
def test_bad_input_gets_one_line_and_status_2(portattn, line, told, tmp_path, monkeypatch):
    arguments = shlex.split(line)[2:]
    message = ".*".join(map(re.escape, told.split("…")))
    monkeypatch.chdir(tmp_path)
    called = portattn(*arguments, exits=2)
    assert (called.out, len(called.err.splitlines())) == ("", 1)
    assert called.err.startswith("portattn")
    assert re.fullmatch(message, called.err.rstrip("\n"))
    assert re.fullmatch(message, portattn(*arguments, "--json").json["error"]["message"])
    assert list(tmp_path.glob("*.jsonl")) == []


def test_a_json_error_names_argument_value_and_limit(portattn):
    error = portattn(*PLAN, "--q", "x", *SHAPES[2:], "--json").json["error"]
    assert error["kind"] == "ArgumentError"
    assert (error["argument"], error["value"]) == ("--q", "x")
    assert error["limit"].startswith("must be four whole numbers")


def test_an_interrupt_is_no_red_cell(portattn, monkeypatch):
    """Also where a command reads its input, before the work that it tells an interrupt of itself."""
    monkeypatch.setattr(results, "read_cells", Mock(side_effect=KeyboardInterrupt))
    called = portattn("matrix", "site", "/nowhere", "--out", "/nowhere/site")
    assert (called.status, called.err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "line",
    [
        ("matrix", "log", "A", "FILE"), ("matrix", "diff", "FILE", "FILE"), ("matrix", "check", "FILE"),
        ("matrix", "check", ".", "--baseline", "FILE.toml"), ("matrix", "merge", "FILE", "--out", "out"),
        ("bench", "report", "FILE"), ("bench", "compare", "FILE", "FILE"), ("bench", "join", "FILE", "--out", "out"),
        ("warmup", "FILE"), ("quirks", "new", "--from-log", "FILE"),
    ],
    ids=lambda line: " ".join(line[:2]),
)  # fmt: skip
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_devices_and_pipes_are_not_read(portattn, tmp_path, line, kind) -> None:
    """/dev/zero fills the memory, and a pipe that nobody writes to is waited for for ever."""
    for place in (tmp_path / "FILE", tmp_path / "FILE.toml"):
        place.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(place)
    called = portattn(*(str(tmp_path / word) if word in ("FILE", "FILE.toml", "out", ".") else word for word in line))
    assert called.status == 2
    if line[:4] != ("matrix", "check", ".", "--baseline"):  # that folder has no results: which it says first
        assert {"device": "it is a character device", "pipe": "it is a pipe"}[kind] in called.err
