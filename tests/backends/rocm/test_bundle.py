"""Bundles of AMD cells: their launches run in the model from the bundle's files alone, their runner, their refusals."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from click.testing import CliRunner

from portattn.backends.rocm.emulator.amdgpu.machine import Program
from portattn.backends.rocm.emulator.amdgpu.memory import Memory
from portattn.backends.rocm.emulator.executor import EmulatorExecutor
from portattn.cli import main
from portattn.testing import bundle
from portattn.testing.bundle import BundleArgument, BundleCell
from portattn.tools.matrix import provenance, results
from portattn.tools.matrix.cells import Cell

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(support.TRITON is None, reason="Triton is not installed")]
PROBLEMS = "dense full fp16 *,decode*,append*,packed gradients*"
AUTHOR = "Ada Example <ada@example.org>"
RUNNER = EmulatorExecutor.runner


def invoke(*words: Any, status: int = 0) -> str:
    done = CliRunner().invoke(main, ["matrix", *map(str, words)])
    assert done.exit_code == status, done.output
    return done.output if status else done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    invoke("run", "--targets", "gfx942,gfx1100", "--problems", PROBLEMS, "--no-emulate", "--out", folder)
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    said = json.loads(invoke("export", run, "--out", folder, "--json"))
    assert (len(said["cells"]), said["left_out"]) == (8, {})
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def replay(folder: Path, cell: BundleCell, arch: str) -> bytes:
    """Run a cell's launches in the model, from the bundle's files alone; return its memory afterwards."""
    buffers = [np.fromfile(folder / file, np.uint8) for file, _ in cell.buffers]
    for launch in cell.launches:
        memory = Memory()
        addresses = [memory.add(buffer) for buffer in buffers]

        def value(argument: BundleArgument, addresses: list[int] = addresses) -> int | float:
            place = argument.tensor
            return (
                argument.value if place is None else 0 if place.buffer < 0 else addresses[place.buffer] + place.offset
            )

        program = Program.parse((folder / launch.assembly).read_text())
        assert (program.name, program.assembly.arch.name) == (launch.symbol, arch)
        assert launch.threads == launch.waves * program.assembly.wave
        program.launch(
            launch.grid, list(map(value, launch.arguments)), memory, lds_bytes=launch.lds, waves=launch.waves
        )
    return b"".join(buffer.tobytes() for buffer in buffers)


def write_results(folder: Path, arch: str, memory: dict[str, bytes], **changes: str) -> None:
    manifest = bundle.read(folder)
    said = {
        "portattn-results": f"1 {manifest.id}", "author": AUTHOR, "date": "2026-11-30T12:00:00Z", "device": arch,
        "chip": "", "runtime": "1", "model": "the model of this test",
    } | changes  # fmt: skip
    lines = [f"{key} {value}" for key, value in said.items()] + [f"cell {k} {len(v)}" for k, v in memory.items()]
    (folder / bundle.RESULTS).write_bytes("\n".join((*lines, "end\n")).encode() + b"".join(memory.values()))


def merged(run: Path, folder: Path) -> tuple[list[Cell], str]:
    """Merge a bundle's results with its run; return the cells of the results' chip and the author of each."""
    invoke("merge", run, folder, "--out", folder / "merged")
    made, cells = results.read_cells(folder / "merged")
    mine = [cell for cell in cells if made.known[cell.origin].author]
    assert {made.known[cell.origin].author for cell in mine} == {AUTHOR}
    return mine, (folder / "merged" / "index.html").read_text()


@pytest.mark.parametrize(("arch", "model"), [("gfx942", ""), ("gfx1100", "the model of this test")])
def test_launches_run_from_the_files_alone(arch: str, model: str, run: Path, folder: Path) -> None:
    cells = [cell for cell in bundle.read(folder).cells if cell.target == f"rocm:{arch}"]
    memory = {cell.id: replay(folder, cell, arch) for cell in cells}
    for cell in cells:
        starts = np.cumsum([0, *(size for _, size in cell.buffers)])
        for result in cell.results.values():
            place, expected = result.tensor, np.load(folder / result.expected)
            begin = starts[place.buffer] + place.offset
            found = torch.frombuffer(bytearray(memory[cell.id]), dtype=getattr(torch, place.dtype), offset=int(begin))
            ours = found.as_strided(place.shape, place.strides).double().numpy()
            both = np.isfinite(ours) & np.isfinite(expected)
            assert both.any()
            assert np.abs(ours[both] - expected[both]).max() <= result.budget
    write_results(folder, f"{arch}:sramecc+:xnack-", memory, chip="a chip", model=model)
    found, page = merged(run, folder)
    assert {(cell.status, cell.level) for cell in found} == {("PASS", "emulated" if model else "runs")}
    assert len(found) == len(cells) == 4
    assert f"{AUTHOR.partition(' <')[0]}, 2026-11-30" in page


def test_the_runner_launches_what_the_manifest_says(run: Path, folder: Path, tmp_path: Path) -> None:
    """Compiled against HIP in host memory, whose kernels do nothing: the results must be red."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    program, warnings = tmp_path / "run_bundle", ("-Wall", "-Wextra", "-Werror", "-std=c++17")
    include = ("-I", str(Path(__file__).parent))
    subprocess.run(["g++", *warnings, *include, str(folder / RUNNER.name), "-o", str(program)], check=True)
    done = subprocess.run(
        [program, folder, AUTHOR], env={"STAND_IN_ARCH": "gfx942:xnack-"}, capture_output=True, text=True, check=True
    )
    *launched, last = done.stdout.splitlines()
    assert last.startswith("4 cells on gfx942:xnack-")
    wanted = [launch for cell in bundle.read(folder).cells if cell.target == "rocm:gfx942" for launch in cell.launches]
    shown = [" ".join(map(str, (one.symbol, *one.grid, one.threads, one.lds, 1))) for one in wanted]
    assert launched == shown
    found, _ = merged(run, folder)
    assert {cell.status for cell in found} == {"FAIL"}
    other = subprocess.run([program, folder, AUTHOR], env={"STAND_IN_ARCH": "gfx90a"}, capture_output=True, check=False)
    assert other.returncode == 3


def cut(folder: Path) -> None:
    file = next(folder.glob("*.in"))
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder: Path) -> None:
    file = next(folder.glob("*.co"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")


def change_budget(folder: Path) -> None:
    path = folder / bundle.MANIFEST
    path.write_text(re.sub(r'"budget": [\d.e-]+', '"budget": 9.0', path.read_text()))


REFUSED = {
    "size": (cut, {}, r"has \d+ bytes, and \d+ when the bundle was made"),
    "digest": (flip, {}, "is not as the bundle was made: its SHA-256 differs"),
    "missing": (lambda folder: next(folder.glob("*.s")).unlink(), {}, "cannot be read, and the bundle has it"),
    "manifest": (lambda folder: (folder / bundle.MANIFEST).write_text("{}"), {}, "is not a bundle's manifest"),
    "cells": (change_budget, {}, "its id is not that of its cells and files"),
    "other bundle": (None, {"portattn-results": "1 0123"}, "is of bundle '1 0123', not of '1 "),
    "author": (None, {"author": "somebody"}, "author 'somebody' must be `Name <mail>`"),
    "chip": (None, {"device": "gfx90a"}, "ran on 'gfx90a', and its cells are of gfx942"),
    "date": (None, {"date": "today"}, "is not a runner's results"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_sentence(case: str, folder: Path, run: Path, tmp_path: Path) -> None:
    change, said, text = REFUSED[case]
    cells = [cell for cell in bundle.read(folder).cells if cell.target == "rocm:gfx942"]
    write_results(folder, "gfx942", {cell.id: bytes(cell.bytes) for cell in cells}, **said)
    if change is not None:
        change(folder)
    output = invoke("merge", run, folder, "--out", tmp_path / "out", status=2)
    assert re.search(text, output), output
    assert output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def refused(run: Path, folder: Path, out: Path) -> str:
    cells = [cell for cell in bundle.read(folder).cells if cell.target == "rocm:gfx942"]
    write_results(folder, "gfx942", {cell.id: bytes(cell.bytes) for cell in cells})
    return invoke("merge", run, folder, "--out", out, status=2)


def test_what_cannot_be_judged_here(folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch has other random numbers, and another checkout other launches."""
    before = bundle.call_of
    monkeypatch.setattr(bundle, "call_of", lambda request: before(request | {"seed": 7}))
    assert "the call's random numbers differ here" in refused(run, folder, tmp_path / "out")
    monkeypatch.setattr(provenance, "kernel_source_digest", lambda: "0123")
    assert "is of other kernels: use the checkout that made it" in refused(run, folder, tmp_path / "out")
    output = invoke("export", run, "--out", tmp_path / "out", status=2)
    assert "is of other kernels: use the checkout that made it" in output


def test_results_that_were_cut(folder: Path, run: Path, tmp_path: Path) -> None:
    (cell, *_) = bundle.read(folder).cells
    write_results(folder, cell.target.partition(":")[2], {cell.id: bytes(cell.bytes - 1)})
    output = invoke("merge", run, folder, "--out", tmp_path / "out", status=2)
    assert f"has {cell.bytes - 1} bytes of memory" in output


def test_cells_that_no_program_runs(run: Path, tmp_path: Path) -> None:
    invoke("run", "--targets", "cpu", "--problems", "decode*", "--out", tmp_path / "cpu")
    output = invoke("export", tmp_path / "cpu", "--out", tmp_path / "bundle", status=3)
    assert "nothing was exported: no program runs launches on cpu" in output
    assert not (tmp_path / "bundle").exists()
    output = invoke("export", run, "--out", tmp_path / "cpu", status=2)
    assert "is not written over: it is not empty, and no bundle" in output
