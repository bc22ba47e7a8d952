"""The coverage table has nothing that is used and not modelled, and coverage.json is what the tests execute."""

from __future__ import annotations

from pathlib import Path

import asmkit
import coverage_data
import pytest

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
