"""What takes two processes to see: one compile for both, and nothing that outlives a compiler that is killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from portattn.worker.client import Worker

SECONDS = 120.0  # a limit against hangs, for what takes a few

# A compiler that notes each request, and answers once both processes have asked: whoever asks second waits for the
# first one's answer, or has been waiting for it.
COMPILER = """\
#!{python}
import json, sys, time
from pathlib import Path
for line in sys.stdin:
    with open({requests!r}, "a") as file:
        file.write(line)
    asked = json.loads(line)["id"]
    print(json.dumps({{"id": asked, "stage": "ttgir"}}), flush=True)
    while len(list(Path({folder!r}).glob("*.asks"))) < 2:
        time.sleep(0.05)
    time.sleep(2.0)
    facts = {{"scratchpad_bytes": 1024, "num_warps": 4}}
    print(json.dumps({{"id": asked, "version": 2, "ok": True, "facts": facts}}), flush=True)
"""
# Plans a kernel for an H100, says that it asks, and asks whether it compiles. Workers run under sys.executable.
PROCESS = """\
import os, sys
from pathlib import Path
import torch
from portattn import Problem
from portattn.compile import compile_check
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
folder, compiler = sys.argv[1:]
problem = Problem(batch=2, heads_q=2, heads_k=2, seq_q=64, seq_k=64, head_dim=64, dtype="fp16")
target = parse_target("cuda:sm_90", "triton==3.6.0")
made = plan(problem, target, settings=Settings(backend="triton"))
launches, _, _ = kernel_calls(made, meta_call(problem), 132)
compile_check.new_worker = lambda: compile_check.Worker(python=compiler)
settings = Settings(cache_dir=folder, compile_seconds=60.0)
Path(folder, f"{os.getpid()}.asks").touch()
failed = compile_check.ensure_all(made, launches, lambda launch: None, torch.empty(0), target, settings)
sys.exit(failed.reason if failed else 0)
"""


def test_who_waited_for_another_processs_compile_does_not_compile_again(tmp_path: Path) -> None:
    """Both find no record, one compiles, and the other looks once more when it is its turn."""
    compiler, requests = tmp_path / "compiler", tmp_path / "requests.jsonl"
    compiler.write_text(COMPILER.format(python=sys.executable, requests=str(requests), folder=str(tmp_path)))
    compiler.chmod(0o755)
    command = [sys.executable, "-c", PROCESS, str(tmp_path), str(compiler)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
    asked = [json.loads(line)["task"] for line in requests.read_text().splitlines()]
    assert asked == ["compile"]


# A compiler that has a program of its own at work, which holds a lock for as long as it lives, and never answers.
HANGS = """\
#!{python}
import fcntl, json, os, subprocess, sys, time
held = open({held!r}, "w")
fcntl.flock(held, fcntl.LOCK_EX)
nothing = subprocess.DEVNULL
command = [sys.executable, "-c", "import time; time.sleep(600)"]
program = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, pass_fds=[held.fileno()])
held.write(str(program.pid))
held.flush()
for line in sys.stdin:
    print(json.dumps({{"id": json.loads(line)["id"], "stage": "ptx"}}), flush=True)
    time.sleep(600)
"""


def test_a_compilers_own_programs_end_with_it(tmp_path: Path) -> None:
    """ptxas, a linker: what a compiler that hangs has started is killed too, and holds nothing any longer."""
    script, held = tmp_path / "compiler", tmp_path / "held"
    script.write_text(HANGS.format(python=sys.executable, held=str(held)))
    script.chmod(0o755)
    with Worker(python=str(script)) as worker:
        reply = worker.request("compile", 5.0)
        assert (reply.outcome, reply.stage) == ("hang", "ptx")
        freed = _freed(held)
        if not freed:  # it is alive, and nobody else ends it
            os.kill(int(held.read_text()), signal.SIGKILL)
        assert freed


def _freed(held: Path, seconds: float = 20.0) -> bool:
    """Whether nobody holds the file's lock any longer, after so many seconds at most."""
    deadline = time.monotonic() + seconds
    with held.open() as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
            else:
                return True
    return False
