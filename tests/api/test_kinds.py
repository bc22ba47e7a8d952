"""A cached call serves every size of its kind: launches are those of a process that knows no other call."""

from __future__ import annotations

from typing import Any

import pytest
from fakedriver import run, triton_folders
from packaging.version import Version

TRITONS = triton_folders()


VARIANTS = ("attention gluon", "attention gluon, causal", "varlen gluon", "paged gluon", "mla gluon")
# A process each.
GROUPS = {
    "caches": (
        "growing cache", "decode", "decode, odd width", "decode, several queries", "paged", "paged, packed", "sparse",
    ),
    "dense": ("attention", "attention bshd, causal", "attention, slices", "attention, bias", "varlen"),
    "variants": VARIANTS,
}  # fmt: skip


@pytest.fixture(scope="module", params=GROUPS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a group's process saw, by the names of its cases."""
    if not TRITONS:
        pytest.skip("Triton is not installed, and the lab has none for this Python")
    version = "3.6.0" if "3.6.0" in TRITONS else max(TRITONS, key=Version)
    if request.param == "variants" and Version(version) < Version("3.6"):
        pytest.skip("the variants need Triton 3.6 or newer")
    names = GROUPS[request.param]
    found = run("kinds_child.py", tmp_path_factory.mktemp("kinds"), TRITONS[version], "0", *names)
    assert found.pop("triton") == version
    assert tuple(found) == names
    return found


@pytest.mark.compiles
def test_a_call_launches_what_it_launches_alone(seen: dict[str, Any]) -> None:
    """Byte for byte: kernels, grids, parameters and tensor maps, results' shapes and strides, and the plan."""
    for name, found in seen.items():
        assert found["wrong"] == [], f"{name}: {found['wrong calls']} of {found['calls']}"
        assert found["by python"] == 0, f"{name}: launches by C are not those by Python"


@pytest.mark.compiles
def test_sizes_of_a_kind_are_planned_once_a_class(seen: dict[str, Any]) -> None:
    for name, found in seen.items():
        assert found["fixed"] == [""], f"{name} is kept for its own sizes alone"
        assert found["hit"], f"{name}: native.c has no such kind"
        assert found["kinds"] == 1, f"{name} is one kind of call"
        assert found["missed"] == 0, f"{name}: native.c leaves {found['missed']} calls to Python"
        assert found["planned"] == sum(found["classes"]), "each class is planned once"
        assert found["planned"] <= 20, f"{name}: {found['planned']} classes of {found['calls']} calls"
    if "growing cache" in seen:
        assert seen["growing cache"]["planned"] == 1
    if "attention" in seen:
        assert seen["attention"]["planned"] <= seen["attention"]["calls"] // 2


@pytest.mark.compiles
def test_the_variants_are_among_them(seen: dict[str, Any]) -> None:
    for name, found in seen.items():
        variant = ["gluon_mla"] if name == "mla gluon" else ["gluon_forward"]
        assert (found["paths"] == variant) == (name in VARIANTS), name
