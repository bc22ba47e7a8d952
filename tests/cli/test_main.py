"""The root command: quick help, and one line for every error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from portattn import __version__
from portattn.cli import COMMANDS
from portattn.tools.matrix import reading
from portattn.tools.quirks import audit as quirk_files

PLAN = ("plan", "attention", "--target", "rocm:gfx942", "--toolchain", "triton==3.6.0")
SHAPES = ("--q", "1,2,16,64", "--kv", "1,2,16,64", "--dtype", "fp16")


def test_help_names_every_command_and_the_exit_statuses(portattn):
    called = portattn("--help")
    assert called.status == 0
    for name in COMMANDS:
        assert f"  {name} " in called.out
    assert "Exit status" in called.out
    assert portattn("--version").out == f"portattn, version {__version__}\n"


GROUPS = ("quirks", "matrix", "lab")
COMMANDS_OF_GROUPS = (
    "quirks list",
    "quirks audit",
    "matrix run",
    "matrix report",
    "matrix site",
    "lab list",
    "lab create",
    "lab remove",
)


@pytest.mark.parametrize("command", [*COMMANDS, *COMMANDS_OF_GROUPS])
def test_every_command_has_help_and_json(portattn, command):
    called = portattn(*command.split(), "--help")
    assert called.status == 0
    assert "--json" in called.out or command in GROUPS


def test_help_imports_neither_torch_nor_triton():
    code = (
        "import sys; from portattn.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'triton', 'numpy', 'msgspec') if m in sys.modules])"
    )
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
    called = portattn("quirks", "audit", "--json")
    assert called.status == 2
    assert called.json["error"]["kind"] == "OSError"
    assert called.json["error"]["message"].endswith(".toml: Too many open files")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plam",), "No such command 'plam'"),
        (("explain",), "No such command 'explain': it is `portattn plan`"),
        ((*PLAN, *SHAPES, "--bogus"), "No such option '--bogus'"),
        ((*PLAN, "--kv", "1,2,16,64", "--dtype", "fp16"), "Missing option '--q'"),
        ((*PLAN, "--q", "1,2,16,64", "--kv", "1,2,16,64"), "Missing option '--dtype': fp16|bf16|fp32"),
        ((*PLAN, "--q", "1,2,16", *SHAPES[2:]), "--q is '1,2,16', but must be four whole numbers B,H,S,D"),
        ((*PLAN, "--q", "1,2,-16,64", *SHAPES[2:]), "--q is '1,2,-16,64', but must be four whole numbers"),
        ((*PLAN, "--q", "1,3,16,64", *SHAPES[2:]), "heads_q is 3, but must be a multiple of the 2"),
        ((*PLAN, "--q", "2,2,16,64", *SHAPES[2:]), "--kv's batch is 1, but must be --q's, 2"),
        ((*PLAN, "--q", "1,2,16,32", *SHAPES[2:]), "--kv's head_dim is 64, but must be --q's, 32"),
        (
            (*PLAN, "--q", "1,2,16,577", "--kv", "1,2,16,577", "--dtype", "fp16"),
            "head_dim is 577, but must be an integer from 1 to 576",
        ),
        ((*PLAN, *SHAPES[:4], "--dtype", "fp8"), "dtype is 'fp8', but must be one of fp16, bf16, fp32"),
        ((*PLAN, *SHAPES, "--dv", "0"), "--dv is 0, but must be 1 or more"),
        ((*PLAN, *SHAPES, "--causal=left"), "--causal is 'left', but must be one of bottom_right, top_left"),
        ((*PLAN, *SHAPES, "--layout", "sbhd"), "layout is 'sbhd', but must be one of bhsd, bshd"),
        ((*PLAN, *SHAPES, "--backend", "cudnn"), "backend is 'cudnn', but rocm knows"),
        ((*PLAN, *SHAPES, "--quirks=+rocm-0999-x"), "'+rocm-0999-x' names no quirk; did you mean rocm-0"),
        ((*PLAN, *SHAPES, "--quirks=rocm"), "'rocm' must start with +"),
        (
            ("plan", "sdpa", *SHAPES),
            "OP is 'sdpa', but must be one of attention, varlen_attention, attention_backward,",
        ),
        (("plan",), "Missing argument 'OP'. It is one of attention, varlen_attention"),
        (
            ("plan", "attention", "--target", "mi400x", *SHAPES),
            "plan: --target is 'mi400x', but must be BACKEND:ARCH, an arch ",
        ),
        (("plan", "attention", "--target", "h1000", *SHAPES), "such as h100 (cuda:sm_90)"),
        ((*PLAN, *SHAPES, "--quirks=-rocm"), "'-rocm' begins several quirks: rocm-0"),
        (("plan", "attention", "--target", "rocm:gfx9", *SHAPES), "--target is 'rocm:gfx9', but rocm knows gfx90a"),
        (("plan", "attention", "--target", "tpu:v5", *SHAPES), "is 'tpu:v5', but its backend must be one of cuda"),
        (("plan", "attention", "--toolchain", "triton", *SHAPES), "plan: --toolchain is 'triton', but "),
        (("plan", "attention", "--toolchain", "3.9.0", *SHAPES), "must be NAME==VERSION, as in triton==3.9.0"),
        (("quirks", "list", "--active-on", "h1000"), "quirks list: --active-on is 'h1000', but must be BACKEND:ARCH"),
        (("quirks", "new"), "--from-log is None, but must be given, the output of a failed compile, or --from-in"),
        (("quirks", "new", "--from-log", "x", "--from-incident", "y"), "--from-incident is 'y', but goes without"),
        (("quirks", "show", "cuda-0912"), "ID is 'cuda-0912', but no quirk has this id; did you mean cuda-0"),
        (("quirks", "show", "cuda"), "ID is 'cuda', but several begin so: cuda-0001-"),
        (("quirks", "probe", "cuda-0912"), "quirks probe: ID is 'cuda-0912', but no quirk has this id; did you mean"),
        (("quirks", "bisect", "cuda-0912"), "quirks bisect: ID is 'cuda-0912', but no quirk has this id; did you mean"),
        (("quirks", "reduce", "cuda-0912"), "ID is 'cuda-0912', but must be a quirk's or an incident's id"),
        (("quirks", "retire", "cuda-0912", "--reason", "x"), "quirks retire: ID is 'cuda-0912', but no quirk has"),
        (("quirks", "list", "--symptom", "bad"), "--symptom is 'bad', but must be one of compile-error"),
        (("quirks", "list", "--backend", "tpu"), "--backend is 'tpu', but must be one of cuda"),
        (
            ("quirks", "list", "--toolchain", "triton==3.6.0"),
            "--toolchain is 'triton==3.6.0', but goes with --active-on",
        ),
        (("quirks", "why", "rocm"), "quirks why: TARGET is 'rocm', but must be BACKEND:ARCH"),
        (("matrix", "run", "--quick", "--full"), "--full is 'on', but goes without --quick"),
        (("quirks", "audit", "--folder", "/nowhere"), "'/nowhere' does not exist"),
        (("matrix", "run", "--targets", "sm_91"), "--targets is 'sm_91', but must be BACKEND:ARCH"),
        (("matrix", "run", "--ops", "conv"), "--ops is 'conv', but must match an op"),
        (("matrix", "run", "--jobs", "0"), "'--jobs': 0 is not in the range"),
        (("matrix", "run", "--seconds", "0"), "'--seconds': 0.0 is not in the range"),
        (("matrix", "run", "--ascend-python", "/nowhere"), "--ascend-python is '/nowhere', but cannot be run"),
        (("matrix", "report", "/nowhere"), "/nowhere/results.jsonl: cannot be read"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(portattn, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    called = portattn(*arguments)
    assert called.status == 2
    assert called.out == ""
    assert len(called.err.splitlines()) == 1
    assert called.err.startswith("portattn")
    assert message in called.err
    assert message in portattn(*arguments, "--json").json["error"]["message"]
    assert list(tmp_path.glob("*.jsonl")) == []


def test_a_json_error_names_argument_value_and_limit(portattn):
    error = portattn(*PLAN, "--q", "x", *SHAPES[2:], "--json").json["error"]
    assert error["kind"] == "ArgumentError"
    assert (error["argument"], error["value"]) == ("--q", "x")
    assert error["limit"].startswith("must be four whole numbers")


def test_an_interrupt_is_no_red_cell(portattn, monkeypatch):
    """Also where a command reads its input, before the work that it tells an interrupt of itself."""

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "read_cells", interrupted)
    called = portattn("matrix", "site", "/nowhere", "--out", "/nowhere/site")
    assert (called.status, called.err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "line",
    [
        ("matrix", "log", "A", "FILE"),
        ("matrix", "diff", "FILE", "FILE"),
        ("matrix", "check", "FILE"),
        ("matrix", "check", ".", "--baseline", "FILE.toml"),
        ("matrix", "merge", "FILE", "--out", "out"),
        ("bench", "report", "FILE"),
        ("bench", "compare", "FILE", "FILE"),
        ("bench", "join", "FILE", "--out", "out"),
        ("warmup", "FILE"),
        ("quirks", "new", "--from-log", "FILE"),
    ],
    ids=lambda line: " ".join(line[:2]),
)
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_devices_and_pipes_are_not_read(portattn, tmp_path, line, kind) -> None:
    """/dev/zero fills the memory, and a pipe that nobody writes to is waited for for ever."""
    for place in (tmp_path / "FILE", tmp_path / "FILE.toml"):
        place.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(place)
    called = portattn(*(str(tmp_path / word) if word in ("FILE", "FILE.toml", "out", ".") else word for word in line))
    assert called.status == 2
    if line[:4] != ("matrix", "check", ".", "--baseline"):  # that folder has no results: which it says first
        assert {"device": "it is a character device", "pipe": "it is a pipe"}[kind] in called.err
