"""A cached call serves every size of its kind: launches are those of a process that knows no other call."""

import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
from fakedriver import run, run_by_any, triton_folders
from packaging.version import Version

TRITONS = triton_folders()
NATIVE = pytest.mark.skipif(
    platform.system() != "Linux" or not shutil.which("cc") or not TRITONS, reason="needs Linux, a C compiler and Triton"
)


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


# A first call compiles each of its kernels once (Triton 3.3 on): in a child, whose result this process then loads.

# The installed one comes first; of the lab's the oldest and the newest, for each takes some seconds.
BY_AGE = sorted(TRITONS, key=Version)
LOOKED_AT = list(dict.fromkeys([*list(TRITONS)[:1], *BY_AGE[:1], *BY_AGE[-1:]]))


@NATIVE
@pytest.mark.parametrize("version", LOOKED_AT)
def test_the_child_and_this_process_compile_the_same(version: str, tmp_path: Path) -> None:
    found: dict[str, Any] = run("once_child.py", tmp_path, TRITONS[version])
    decoding = "warps_apart" if Version(version) >= Version("3.6") else "decode_split"
    expected = {"dense_forward": 2, decoding: 1, "combine": 1, "sparse_split": 1}
    if version == "3.6.0":
        assert found["paths"] == ["gluon_forward"]
        expected["scheduled_forward"] = 1
    if version.startswith("3.2."):  # its argument specialisation has another form, which the child does not match
        expected = {name: 2 * count for name, count in expected.items()}
    assert (found["compiled"], found["launchers"]) == (expected, [])


# A warm-up of a range of sizes leaves nothing to plan for any of them: launches are recorded, not run.
RANGES = {"decode": 9000, "a view of a cache": 1640, "attention": 700, "varlen": 800}


@pytest.fixture(scope="module")
def seen_warmed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_by_any("warmed_child.py", tmp_path_factory)


@NATIVE
@pytest.mark.compiles
@pytest.mark.parametrize("name", RANGES)
def test_no_call_in_the_range_is_planned(seen_warmed: dict[str, Any], name: str) -> None:
    found = seen_warmed[name]
    assert (found["calls"], found["planned"], found["warnings"]) == (RANGES[name], [], [])


@NATIVE
@pytest.mark.compiles
@pytest.mark.parametrize("name", RANGES)
def test_each_class_is_run_once(seen_warmed: dict[str, Any], name: str) -> None:
    classes = seen_warmed[name]["classes"]
    assert 2 <= len(classes) <= 40
    assert len({one["call"] for one in classes}) == len(classes)
    assert all(one["cached"] and not one["failed"] and not one["sizes"] for one in classes)
    assert {one["spec"] for one in classes} == {0}
    told = seen_warmed[name]["told"]
    assert next(text for text in told if text.startswith("running")).endswith(classes[0]["call"])
    assert sum(text.startswith("running") for text in told) == len(classes) == seen_warmed[name]["traces"]


@NATIVE
@pytest.mark.compiles
def test_a_trace_of_other_launches_is_not_taken(seen_warmed: dict[str, Any]) -> None:
    found, classes = seen_warmed["mixed up"], len(seen_warmed["attention"]["classes"])
    assert found["traces"] == 2 * classes - classes % 2
    assert (found["planned"], found["warnings"]) == ([], [])


@NATIVE
@pytest.mark.compiles
def test_what_ends_a_range_is_reported(seen_warmed: dict[str, Any]) -> None:
    ends = seen_warmed["ends"]
    assert ends["many"][0] == ""
    assert ends["many"][-1].startswith("more than 2 classes of sizes: from B = ")
    assert ends["wrong"][0] == ""
    refused = ends["wrong"][1]
    assert refused.startswith("specs[0].heads_q is 4, but must be a multiple of the 3 key/value heads (heads_k)")
    (warned,) = ends["warned"]
    assert warned.endswith(refused)
