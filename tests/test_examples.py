"""examples/ run as they stand, each in a process of its own; what they print is right."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys

import pytest
from places import ROOT

import portattn

EXAMPLES = ROOT / "examples"
EXPECTED = {
    "compare_with_sdpa.py": ["causal, GQA: True", "top-left: True", "mask: True", "LSE: (2, 8, 64)"],
    "context_parallel.py": ["ring: out True, gradient True", "ulysses: out True, gradient True"],
    "generate.py": ["prompt: (2, 8, 17, 64) True", "token 0: [18, 10] True", "token 3: [21, 13] True"],
    "replace_sdpa.py": ["layer: True portattn", "because query is torch.float64", "flash kernel: True portattn"],
    "serve_pages.py": ["warmed up: ['", "prepared: True", "path: "],
    "serve_quantised.py": ["bf16          1024            0 of 512  - - - - - - - -", "e4m3           576  ", "int8 "],
    "train_llama.py": ["plain, eager: loss 2.692 -> 0.9", "plain, portattn: loss 2.692 -> 0.9", "and eager at most "],
    "train_llama_parallel.py": ["rank 0 of 2 has rows 0 to 63, 32 of 64", "alike: True, falling: True"],
    "which_path.py": ["attention q (1,8,128,64)", "cuda:sm_90: gluon_forward", "rocm:gfx942: triton; quirks: rocm-"],
}


def test_every_example_is_run_and_on_the_page() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name})" in page for name in EXPECTED)


@pytest.mark.on_device
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"  # as in this process: threads of tests side by side wait for each other
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in EXPECTED[name]:
        assert line in done.stdout


def test_the_arguments_of_other_libraries_are_ours() -> None:
    """Every argument of ours that docs/coming-from.md names is one."""
    page = (EXAMPLES.parent / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("|") and "---" not in line]
    given = {name for row in rows for name in re.findall(r"`(\w+)(?:=|`)", row)}
    operations = ("attention", "varlen_attention", "decode_attention", "paged_attention", "merge_states")
    known = {name for op in operations for name in inspect.signature(getattr(portattn, op)).parameters}
    words = {"None", "prepare", "run", "append_kv", "write_pages", *operations}  # a value, and functions
    assert given - words <= known, sorted(given - words - known)
    assert {"causal", "mask", "bias", "scale", "window", "seqlens_k", "page_table"} <= given
