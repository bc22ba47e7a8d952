"""Tuning files: the first entry that holds is taken; what is outside the schema is an error with its line."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest
from support import problem

from portattn import DataError, Registry
from portattn.planning.data_files import load_tuning
from portattn.planning.kernel_specs import CORES, KERNEL_NAMES
from portattn.schema.toolchain import Toolchain

HEAD = """\
[provenance]
chip = "test"
toolchain = "triton==3.6.0"
date = 2026-11-01
measured = false
"""
TIMED = HEAD.replace("measured = false", "measured = true")
TRITON = Toolchain.parse("triton==3.6.0")
ENTRIES = """
[[entry]]
kernel = "dense_forward"
when = ["head_dim>=128", "causal"]
launch = { block_m = 128, waves_per_eu = 2 }
lowering = { load = "descriptor" }

[[entry]]
kernel = "dense_forward"
launch = { block_m = 32 }
"""

TWO = """
[[entry]]
kernel = "dense_backward"
launch = { block_m = 128, rows_m = 64 }
"""


def load(folder: Path, text: str):
    path = folder / "chip.toml"
    path.write_text(text)
    return load_tuning(path, "rocm")


def features(**fields):
    return problem(**fields).features()


def test_the_first_entry_that_holds(tmp_path: Path) -> None:
    tuning = load(tmp_path, HEAD + ENTRIES)
    wide = tuning.find("dense_forward", features(head_dim=128, causal="top_left"), TRITON)
    assert wide is not None
    assert wide.lowering == {"load": "descriptor"}
    assert tuning.find("dense_forward", features(head_dim=128), TRITON).launch == {"block_m": 32}
    assert tuning.find("decode_split", features(), TRITON) is None


RANGES = """
[[entry]]
kernel = "dense_forward"
toolchain = { triton = ">=3.8" }
launch = { block_m = 64 }

[[entry]]
kernel = "dense_forward"
toolchain = { triton = ">=3.6", ptxas = ">=13" }
launch = { block_m = 16 }

[[entry]]
kernel = "dense_forward"
launch = { block_m = 32 }
"""


@pytest.mark.parametrize(
    ("toolchain", "rows"),
    [
        ("triton==3.6.0", 32),  # the version of ptxas is not known
        ("triton==3.6.0,ptxas==13.1", 16),
        ("triton==3.8.0", 64),
        ("triton==3.9.0", 64),
        ("triton-ascend==3.8.0", 32),
    ],
)
def test_an_entry_for_a_range_of_compilers(tmp_path: Path, toolchain: str, rows: int) -> None:
    entry = load(tmp_path, HEAD + RANGES).find("dense_forward", features(), Toolchain.parse(toolchain))
    assert entry is not None
    assert entry.launch == {"block_m": rows}


def test_problems_are_left_to_the_core_for_the_compilers_of_the_entry_alone(tmp_path: Path) -> None:
    text = '\n[[entry]]\nkernel = "gluon_forward"\nwhen = []\ncore = true\nnote = "the core is faster"\n'
    tuning = load(tmp_path, HEAD + text + 'toolchain = { triton = "<3.8" }\n')
    for release, said in (("3.6.0", "the core is faster"), ("3.8.0", "")):
        assert tuning.left_to_core("gluon_forward", features(), Toolchain.parse(f"triton=={release}")) == said


def test_a_range_that_leaves_out_what_the_choice_was_timed_with(tmp_path: Path) -> None:
    """Of a file that was timed with 3.6.0; an entry that was only compiled may be for any."""
    timed = HEAD.replace("measured = false", "measured = true")
    with pytest.raises(DataError, match=r"leaves out 'triton==3\.6\.0', which its choice was timed with"):
        load(tmp_path, timed + RANGES)
    load(tmp_path, timed + RANGES.replace('">=3.8" }', '">=3.8" }\ntimed = false'))


def test_values_of_the_kernel_of_rows(tmp_path: Path) -> None:
    for pattern in ("dense_backward", "*_backward"):
        tuning = load(tmp_path, HEAD + TWO.replace("dense_backward", pattern))
        entry = tuning.find("dense_backward", features(op="attention_backward", return_lse=False), TRITON)
        assert entry is not None
        assert entry.launch == {"block_m": 128, "rows_m": 64}


def test_what_a_choice_may_spill(tmp_path: Path) -> None:
    """Nothing but with the compiler that it was timed with, and there as much as every timed choice, or its record."""
    tuning = load(tmp_path, TIMED + ENTRIES.replace("launch", "spills = 512\nlaunch", 1))
    recorded, other = tuning.entry
    assert [tuning.most_spilled(entry, TRITON) for entry in (recorded, other, None)] == [512, 256, 0]
    assert tuning.most_spilled(recorded, Toolchain.parse("triton==3.8.0")) == 0
    compiled = load(tmp_path, TIMED + ENTRIES.replace("launch", "timed = false\nlaunch"))
    assert [compiled.most_spilled(entry, TRITON) for entry in compiled.entry] == [0, 0]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (HEAD + RANGES.replace("ptxas", "assembler"), ["assembler", "unknown", "ptxas"]),
        (HEAD + RANGES.replace(">=3.8", "3.8 on"), ["'3.8 on'", "PEP 440"]),
        (ENTRIES, ["provenance"]),
        (HEAD + ENTRIES.replace("when", "where", 1), ["where", "unknown key"]),
        (HEAD + ENTRIES.replace("head_dim>=128", "head_dims>=128"), ["head_dims", "unknown name"]),
        (HEAD + ENTRIES.replace('"causal"', '"casual"'), ["casual", "unknown flag"]),
        (HEAD + ENTRIES.replace("block_m = 128", "block_m = 100"), ["block_m", "100", "power of two"]),
        (HEAD + ENTRIES.replace("block_m = 128", "block_m = 0"), ["block_m", "≥ 1"]),
        (HEAD + ENTRIES.replace("block_m = 128", 'block_m = "128"'), ["block_m", "'128'", "integer"]),
        (HEAD + ENTRIES.replace("block_m = 128", "block_q = 128"), ["block_q", "unknown launch value"]),
        (HEAD + ENTRIES.replace("waves_per_eu = 2", "waves_per_eu = true"), ["waves_per_eu", "type int"]),
        (HEAD + ENTRIES.replace("waves_per_eu", "maxnreg"), ["maxnreg", "an option of cuda, and not of rocm"]),
        (HEAD + ENTRIES.replace("waves_per_eu", "splits"), ["splits", "computed from the sizes"]),
        (HEAD + ENTRIES.replace("waves_per_eu", "rows_m"), ["rows_m", "gradients alone", "block_m"]),
        (HEAD + TWO.replace("dense_backward", "dense_*"), ["rows_m", "gradients alone"]),
        (HEAD + TWO.replace("rows_m = 64", "rows_m = 48"), ["rows_m", "48", "power of two"]),
        (HEAD + TWO.replace("rows_m = 64", "rows_warps = 3"), ["rows_warps", "3", "power of two"]),
        (HEAD + TWO.replace("rows_m = 64", "rows_stages = 0"), ["rows_stages", "≥ 1"]),
        (HEAD + TWO.replace("rows_m = 64", "rows_k = 64"), ["rows_k", "unknown launch value", "rows_stages"]),
        (HEAD + ENTRIES.replace("head_dim>=128", "programs<64"), ["programs<64", "follows from the entry's launch"]),
        (HEAD + ENTRIES.replace('"descriptor"', '"tma"'), ["load", "'tma'", "descriptor"]),
        (HEAD + ENTRIES.replace("load =", "loads ="), ["loads", "outside"]),
        (HEAD + ENTRIES.replace("dense_forward", "*_forward").replace("lowering", "flags"), ["flags", "'*_forward'"]),
        (HEAD + ENTRIES.replace('lowering = { load = "descriptor" }', "core = true"), ["core", "note"]),
        (HEAD.replace("2026-11-01", '"soon"') + ENTRIES, ["provenance.date"]),
        (TIMED + ENTRIES.replace("launch", "spills = 300\nlaunch", 1), ["spills", "multiple of 256"]),
        (TIMED + ENTRIES.replace("launch", "spills = 256\nlaunch", 1), ["spills", "and more"]),
        (HEAD + ENTRIES.replace("launch", "spills = 512\nlaunch", 1), ["spills = 512", "that was timed"]),
    ],
)
def test_errors_name_file_line_and_value(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(DataError) as error:
        load(tmp_path, text)
    assert "chip.toml" in str(error.value)
    for part in parts:
        assert part in str(error.value)
    if "provenance" not in parts:
        assert error.value.line is not None


def test_shipped_files_are_read_and_name_kernels_that_exist() -> None:
    registry = Registry.load()
    found = 0
    for backend, tunings in registry.tunings.items():
        known = {arch.tuning or name for name, arch in registry.arches[backend].items()}
        for name, tuning in tunings.items():
            assert name in known, f"{backend}/tuning/{name}.toml belongs to no arch"
            for entry in tuning.entry:
                variants = [variant.name for variant in registry.backends[backend].variants]
                assert fnmatch.filter((*KERNEL_NAMES, *variants), entry.kernel), entry.kernel
                assert not entry.flags or entry.kernel in variants, entry.kernel
                found += 1
    assert found


def test_shipped_entries_are_all_reachable() -> None:
    """Of an entry that comes after one of the same kernel which holds wherever it does, nothing would be taken."""
    for tunings in Registry.load().tunings.values():
        for name, tuning in tunings.items():
            for index, entry in enumerate(tuning.entry):
                reached = [
                    kernel
                    for kernel in fnmatch.filter(KERNEL_NAMES, entry.kernel) or [entry.kernel]  # a variant
                    if not any(
                        fnmatch.fnmatchcase(kernel, other.kernel)
                        and set(other.when) <= set(entry.when)
                        and other.toolchain in ({}, entry.toolchain)
                        for other in tuning.entry[:index]
                    )
                ]
                assert reached, f"{name}: entry {index}, {entry.kernel} when {entry.when}, is never taken"


def test_every_choice_of_a_shipped_entry_is_read_by_its_kernel() -> None:
    choices = {kernel.name: kernel.choices for kernel in CORES.values()}
    for tunings in Registry.load().tunings.values():
        for name, tuning in tunings.items():
            for entry in tuning.entry:
                for kernel in fnmatch.filter(KERNEL_NAMES, entry.kernel):
                    assert set(entry.lowering) <= set(choices[kernel]), (name, kernel)
