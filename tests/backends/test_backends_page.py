"""docs/backends.md holds what is true: its table is the data, and its example package runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import DOCS

from portattn.backends import BUILTIN
from portattn.planning.registry import load_arches

PAGE = DOCS / "backends.md"
TEXT = PAGE.read_text(encoding="utf-8")


def rows() -> dict[str, list[str]]:
    """Cells of the table of architectures by `backend:arch`."""
    lines = [line.strip("| ").split("|") for line in TEXT.splitlines() if re.match(r"\| `\w+:\w+` \|", line)]
    return {cells[0].strip(" `"): [c.strip() for c in cells[1:]] for cells in lines}


def test_the_table_of_architectures_is_the_data() -> None:
    expected = {}
    for backend in BUILTIN:
        for arch in load_arches(backend.folder).values():
            if backend.name != "cpu":
                title = arch.title + ("; refused" if arch.refused else "")
                numbers = [str(n) if n else "" for n in (arch.warp_size, arch.registers)]
                memory = f"{arch.scratchpad_bytes // 1024} KiB"
                precisions = [", ".join(arch.fp8), ", ".join(arch.dot_precisions)]
                expected[f"{backend.name}:{arch.name}"] = [
                    title,
                    ", ".join(arch.families),
                    str(arch.cores),
                    memory,
                    *numbers,
                    *precisions,
                ]
    assert rows() == expected


def test_every_vendor_path_is_on_the_page() -> None:
    for backend in BUILTIN:
        for path in backend.vendor:
            assert f"### `{path.name}`\n" in TEXT


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example package as an installed distribution: its files, and the metadata that an installer writes."""
    files = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
    assert set(files) == {"pyproject.toml", "portattn_acme/arches.toml", "portattn_acme/__init__.py"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    points = re.search(r'entry-points\."(portattn\.backends)"\]\n(.*?)\n\n', files["pyproject.toml"], re.DOTALL)
    assert points is not None
    metadata = tmp_path / "portattn_acme-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: portattn-acme\nVersion: 0.1\n")
    entry = points[2].replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[{points[1]}]\n{entry}\n")
    return tmp_path


def python(script: str, folder: Path) -> str:
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_what_the_page_says(example: Path) -> None:
    console = re.search(r'^\$ python -c "\n(.*?)^"\n(.*?)^```', TEXT, re.MULTILINE | re.DOTALL)
    assert console is not None
    assert python(console[1], example) == console[2]


def test_the_examples_path_runs(example: Path) -> None:
    script = """
import torch
from portattn import Problem
from portattn.schema.call import Call
from portattn.planning.registry import Registry
backend = Registry.load().backends["acme"]
assert backend.detect() is None
p = Problem(batch=1, heads_q=2, heads_k=2, seq_q=3, seq_k=5, head_dim=8, dtype="fp32", return_lse=True)
q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
out, lse = backend.vendor[0].run(Call(problem=p, q=q, k=k, v=v, scale=0.5))
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5))
print(tuple(lse.shape))
"""
    assert python(script, example) == "(1, 2, 3)\n"


FLAGS = """
import msgspec
from portattn import Problem, target
from portattn.planning.planner import plan
where = target('acme:acme1', toolchain='none')
for flags in ({}, {'return_lse': True}, *({name: True} for name in NAMES), {'window_left': 4}, {'causal': 'top_left'}):
    asked = Problem(batch=1, heads_q=8, heads_k=8, seq_q=128, seq_k=128, head_dim=64, **flags)
    made = plan(asked, where)
    print(made.path, *(no.reason for no in made.rejected), sep=': ')
"""
NAMES = ("mask", "bias", "softcap", "alibi_slopes", "sinks", "dropout", "needs_grad", "seqlens_k", "leftpad_q")


def test_the_example_takes_what_it_declares_and_nothing_else(example: Path) -> None:
    """It planned masks, biases, windows and dropout, and ignored them, before features were denied by default."""
    lines = python(f"NAMES = {NAMES}\n{FLAGS}", example).splitlines()
    assert lines[:2] == ["acme_attention", "acme_attention"]
    for name, line in zip((*NAMES, "window", "causal_top_left"), lines[2:], strict=True):
        assert line == f"reference: does not declare that it takes {name}"
