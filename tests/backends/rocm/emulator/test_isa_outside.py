"""Every instruction that our kernels use is compared with a definition of AMD's documents, or stands in isa_outside.py
with the reason and the tests that it has instead."""

from __future__ import annotations

import re
from pathlib import Path

import isa_run

# Imported for the instructions that they say they check.
import test_isa_division  # noqa: F401
import test_isa_lanes  # noqa: F401
import test_isa_masks  # noqa: F401
import test_isa_memory  # noqa: F401
import test_isa_scalar  # noqa: F401
import test_isa_vector  # noqa: F401
from isa_outside import OUTSIDE
from places import DOCS

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
