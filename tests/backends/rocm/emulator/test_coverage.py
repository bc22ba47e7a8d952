"""The coverage table has nothing that is used and not modelled, and coverage.json is what the tests execute. Every
instruction that our kernels use is compared with a definition of AMD's documents, or stands in isa_outside.py with the
reason and the tests that it has instead."""

from __future__ import annotations

import re
from pathlib import Path

import asmkit
import coverage_data
import isa_run
import pytest

# Imported for the instructions that they say they check.
import test_isa_lanes  # noqa: F401
import test_isa_masks  # noqa: F401
import test_isa_memory  # noqa: F401
import test_isa_scalar  # noqa: F401
import test_isa_vector  # noqa: F401
from isa_outside import OUTSIDE
from places import DOCS

from portattn.backends.rocm.emulator.amdgpu import coverage


def test_the_table_names_no_instruction_that_is_not_modelled() -> None:
    table = coverage_data.table()
    assert "| vector | " in table
    assert "Not modelled: none." in table


def test_everything_that_kernels_use_is_modelled() -> None:
    used = coverage_data.data()["used"]
    assert set(used) == set(asmkit.ARCH_NAMES)
    assert not [name for names in used.values() for name in names if coverage.family(name) is None]


@pytest.mark.compiles  # slow: it runs the instruction tests
def test_the_tests_execute_what_the_table_says() -> None:
    assert coverage_data.executed() == coverage_data.data()["tested"], "coverage_data.py tested"


def test_a_table_of_other_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.s").write_text(asmkit.text("gfx942", ["v_mov_b32_e32 v1, v0", "s_nop 0"]))
    assert coverage.main([str(tmp_path)]) == 0
    assert "| vector | 1 / 1 / 0 |" in capsys.readouterr().out
    (tmp_path / "two.s").write_text(asmkit.text("gfx942", ["v_frobnicate_b32 v1, v0"]))
    assert coverage.main([str(tmp_path)]) == 1
    assert "Not modelled: v_frobnicate_b32" in capsys.readouterr().out
    assert coverage.main([str(tmp_path / "nowhere")]) == 2


EVERYTHING = {(arch, name) for arch, names in isa_run.USED.items() for name in names}


def outside(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern, _, _ in OUTSIDE)


def test_all_that_is_used_is_checked_or_outside() -> None:
    assert not {case for case in EVERYTHING - isa_run.CHECKED if not outside(case[1])}


def test_nothing_outside_is_checked_and_no_row_is_idle() -> None:
    assert not {name for _, name in isa_run.CHECKED if outside(name)}
    for pattern, _, _ in OUTSIDE:
        assert any(re.fullmatch(pattern, name) for _, name in EVERYTHING), pattern


def test_the_tests_that_are_named_exist() -> None:
    for _, reason, tests in OUTSIDE:
        assert reason
        for name in re.findall(r"test_\w+\.py", tests):
            assert (Path(__file__).parent / name).is_file(), name


def test_the_guide_has_the_numbers() -> None:
    inside = len(EVERYTHING & isa_run.CHECKED)
    assert f"{inside} of {len(EVERYTHING)} pairs" in (DOCS / "emulation.md").read_text(encoding="utf-8")
