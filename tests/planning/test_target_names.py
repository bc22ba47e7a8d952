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
        ("Jetson AGX Thor", "cuda:sm_110"), ("dgx spark", "cuda:sm_121"),
        ("H100 SXM", "cuda:sm_90"), ("a100", "cuda:sm_80"), ("rtx-4090", "cuda:sm_89"), ("cuda:h100", "cuda:sm_90"),
        ("mi300x", "rocm:gfx942"), ("mi300", "rocm:gfx942"), ("910B1", "ascend:ascend910b1"), ("cpu", "cpu:generic"),
        ("910b", "ascend:ascend910b2"),  # a family: the arch whose tuning the others share
        ("hopper", "cuda:sm_90"), ("cuda:Hopper", "cuda:sm_90"), ("rdna3", "rocm:gfx1100"), ("RDNA4", "rocm:gfx1201"),
    ],
)  # fmt: skip
def test_a_target_by_the_name_that_people_use(text: str, name: str) -> None:
    assert KNOWN.target(text, "none").name == name


def test_a_family_names_its_arches() -> None:
    arches = KNOWN.arches["rocm"].values()
    rdna3 = [f"rocm:{arch.name}" for arch in arches if "rdna3" in arch.families]
    assert KNOWN.family("rdna3") == KNOWN.family("rocm:RDNA-3") == rdna3
    assert {"rocm:gfx1100", "rocm:gfx1101", "rocm:gfx1151"} <= set(rdna3)
    assert KNOWN.family("cuda:rdna3") == KNOWN.family("gfx1100") == KNOWN.family("") == []


def test_a_family_of_several_tunings_is_answered_with_its_members() -> None:
    with pytest.raises(ArgumentError, match=r"is a name of cuda:sm_100, .* and cuda:sm_121: say which"):
        KNOWN.target("blackwell")


def test_no_name_is_a_family_s_and_something_else_s() -> None:
    """A family that is called as a chip or an arch would hide one of them."""
    for backend, arches in KNOWN.arches.items():
        families = {family for arch in arches.values() for family in arch.families}
        for family in families - set(arches):
            assert family not in KNOWN.backends, family
            inside = {f"{backend}:{arch.name}" for arch in arches.values() if family in arch.families}
            assert set(KNOWN.family(family)) == inside
        assert not families & set(arches)


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
        ("volta", "cuda:sm_80, rocm:gfx90a"),
        ("rdna33", "rdna3 (family of rocm:gfx1100, "),
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
