"""Cached launches against Triton's own: what reaches the driver is the same, byte for byte, with every Triton here.

A process with a libcuda that records launches (fakedriver.py) compiles small kernels and launches them by all ways.
"""

from __future__ import annotations

from typing import Any

import pytest
from fakedriver import run, triton_folders
from packaging.version import Version

from portattn.launch import triton_compat

WAYS = ("driver", "launcher", "native")
TRITONS = triton_folders()
KNOWN = sorted((v for v in TRITONS if tuple(map(int, v.split(".")[:2])) in triton_compat.KNOWN), key=Version)
# The installed one comes first; of the lab's the oldest and the newest, for each takes some seconds.
LOOKED_AT = list(dict.fromkeys([*[v for v in list(TRITONS)[:1] if v in KNOWN], *KNOWN[:1], *KNOWN[-1:]]))


@pytest.fixture(scope="module", params=LOOKED_AT or ["none"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one Triton's process saw."""
    if request.param not in TRITONS:
        pytest.skip("no Triton that is known is installed, and the lab has none for this Python")
    return run("direct_child.py", tmp_path_factory.mktemp("direct"), TRITONS[request.param])


def _kinds(seen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: found for name, found in seen.items() if isinstance(found, dict)}


@pytest.mark.compiles
def test_all_ways_launch_the_same(seen: dict[str, Any]) -> None:
    kinds = _kinds(seen)
    version = tuple(map(int, seen["triton"].split(".")[:2]))
    expected = {"copy", "two", "unaligned"}
    expected |= {"scratch"} if version >= (3, 3) and "scratch" in kinds else set()
    expected |= {"dependent"} if version >= (3, 4) else set()
    expected |= {"host descriptor"} if version >= (3, 5) else set()
    assert set(kinds) == expected
    for name, found in kinds.items():
        assert found["ways"] == ["driver", "native"], (name, found["reasons"])
        assert len(found["triton"]) == (2 if name == "two" else 1), name
        for way in WAYS:
            assert found[way] == found["triton"], f"{name} by {way}"


@pytest.mark.compiles
def test_a_dependent_launch_says_so(seen: dict[str, Any]) -> None:
    serialization = 1 << 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert seen["copy"]["native"][0][3] & serialization == 0
    if "dependent" in seen:
        assert seen["dependent"]["native"][0][3] & serialization


@pytest.mark.compiles
def test_tensor_maps_are_made_for_each_address_and_kept(seen: dict[str, Any]) -> None:
    if "maps" not in seen:
        pytest.skip("this Triton passes no tensor maps from the host")
    assert seen["maps"] == 2 * [[True, False], [False, True], [True, False]], "by Python and by C"
    assert seen["maps without a context"] == [1, 1], "a backward's thread may have none yet"
    assert seen["hooked without a context"] == 1
    assert seen["maps kept"] == [0, 64]
    assert seen["maps by C"]
    assert not seen["maps of another make"], "native.c's maps are used where they are Triton's, byte for byte"


@pytest.mark.compiles
def test_hooks_threads_and_refusals(seen: dict[str, Any]) -> None:
    assert seen["hooks"] == [["enter"], True], "a hook is called once, and the launch is the same"
    assert seen["context"] == [9], "a thread without a context gets one"
    assert seen["refused"] == "CUDA's driver refused a launch: invalid argument"
    assert seen["after"] == 1
    assert seen["nothing"] == 0, "a grid of nothing launches nothing"
    assert seen["threads"] == [150, True], "every launch has its own addresses"
    if "scratch" in seen:
        assert seen["scratch"]["scratch"] > 0
        assert "no role" in seen["scratch without a role"]
