"""Nothing in coverage.json is used and not modelled, and it is what the tests execute. Every instruction in use is
compared with a definition of AMD's documents, or stands in isa_outside.py with the reason and other tests."""

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

from portattn.backends.rocm.emulator.amdgpu.decode import family


def test_everything_that_kernels_use_is_modelled() -> None:
    used = coverage_data.data()["used"]
    assert set(used) == set(asmkit.ARCH_NAMES)
    assert not [name for names in used.values() for name in names if family(name) is None]


@pytest.mark.compiles  # slow: it runs the instruction tests
def test_the_tests_execute_what_the_file_says() -> None:
    assert coverage_data.executed() == coverage_data.data()["tested"], "coverage_data.py tested"


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
