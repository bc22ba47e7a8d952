"""The examples of docs/operations.md, in one namespace and in order, print what the page says they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from places import DOCS

HIDDEN = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"), "")
# Runs the examples that it reads, and writes what each printed.
CHILD = """
import contextlib, io, json, sys, warnings
warnings.simplefilter("ignore")  # on a CPU the reference path runs, and says so
namespace, printed = {}, []
for body in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(body, "docs/operations.md", "exec"), namespace)
    printed.append(output.getvalue())
print(json.dumps(printed))
"""


def test_the_examples_of_the_operations_page(tmp_path: Path) -> None:
    """In a process that sees no accelerator, whatever this machine has: the page shows what a CPU does."""
    text = (DOCS / "operations.md").read_text()
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    bodies = [body for kind, body in blocks if kind == "python"]
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(bodies), capture_output=True, text=True, timeout=240,
        cwd=tmp_path, env={**os.environ, **HIDDEN},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = iter(json.loads(done.stdout))
    printed = ""
    shown = 0
    for kind, body in blocks:
        if kind == "text":
            assert printed == body
            printed, shown = "", shown + 1
            continue
        assert not printed, f"the page does not show what is printed: {printed}"
        printed = next(outputs)
    assert not printed
    assert shown >= 8
