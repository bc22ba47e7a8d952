"""Targets by the names that people use: an arch alone, a chip, a family of chips."""

from __future__ import annotations

import pytest

from portattn.errors import ArgumentError
from portattn.planning import target_names
from portattn.planning.registry import Registry

KNOWN = Registry.load()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sm_90", "cuda:sm_90"), ("SM90", "cuda:sm_90"), ("h100", "cuda:sm_90"), ("h200", "cuda:sm_90"),
        ("H100 SXM", "cuda:sm_90"), ("a100", "cuda:sm_80"), ("rtx-4090", "cuda:sm_89"), ("cuda:h100", "cuda:sm_90"),
        ("mi300x", "rocm:gfx942"), ("mi300", "rocm:gfx942"), ("910B1", "ascend:ascend910b1"), ("cpu", "cpu:generic"),
        ("910b", "ascend:ascend910b2"),  # a family: the arch whose tuning the others share
    ],
)  # fmt: skip
def test_a_target_by_the_name_that_people_use(text: str, name: str) -> None:
    assert KNOWN.target(text, "none").name == name


def test_every_chip_of_a_title_means_its_arch() -> None:
    for backend, arches in KNOWN.arches.items():
        for name, arch in arches.items():
            for chip in target_names.chips(arch.title):
                if any(c.isdigit() for c in chip):
                    assert KNOWN.target(chip, "none").name == f"{backend}:{name}"


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("h1000", "h100 (cuda:sm_90)"),
        ("sm_9", "sm90 (cuda:sm_90)"),  # no shortened number is taken for another
        ("mi3", "mi350x (rocm:gfx950)"),
        ("hopper", "cuda:sm_80, rocm:gfx90a"),
        ("cuda", ", ".join(f"cuda:{arch}" for arch in KNOWN.arches["cuda"])),
    ],
)
def test_a_name_of_nothing_is_answered_with_the_nearest(text: str, limit: str) -> None:
    with pytest.raises(ArgumentError, match=f"target: target is '{text}', but must be BACKEND:ARCH") as caught:
        KNOWN.target(text)
    assert limit in caught.value.limit


def test_a_name_of_several_arches_is_refused() -> None:
    """Two backends with one arch's name, and a chip that two arches' titles have."""
    arch = KNOWN.arches["cuda"]["sm_90"]
    with pytest.raises(ArgumentError, match="is a name of one:sm_90 and two:sm_90: say which"):
        target_names.resolve("sm_90", {"one": {"sm_90": arch, "x": arch}, "two": {"sm_90": arch, "y": arch}})
    with pytest.raises(ArgumentError, match="is a name of one:a and one:b: say which"):
        target_names.resolve("h100", {"one": {"a": arch, "b": arch}})
