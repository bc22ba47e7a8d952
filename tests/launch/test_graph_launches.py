"""Repeated launches are a graph's: the same kernels with each call's own addresses and sizes, in one call of CUDA's
driver."""

from __future__ import annotations

from typing import Any

import pytest
from fakedriver import run, triton_folders
from packaging.version import Version

TRITONS = triton_folders()
pytestmark = pytest.mark.compiles


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not TRITONS:
        pytest.skip("Triton is not installed, and the lab has none for this Python")
    version = "3.6.0" if "3.6.0" in TRITONS else max(TRITONS, key=Version)
    return run("graphs_child.py", tmp_path_factory.mktemp("graphs"), TRITONS[version])


def test_a_graph_launches_what_its_kernels_would(seen: dict[str, Any]) -> None:
    assert seen["launches"] == [2, 2]
    assert seen["by themselves"] == [0, 0, 0]
    assert seen["made"] == 1
    assert seen["same"]
    assert seen["launched"] == 3


def test_other_sizes_and_streams_are_the_same_graphs(seen: dict[str, Any]) -> None:
    assert seen["other sizes and stream"] == [True, True, True]


def test_launches_on_several_streams_do_not_wait_for_each_other(seen: dict[str, Any]) -> None:
    """As those of one graph would: it is launched on one stream, until launches are repeated on another alone."""
    assert seen["two streams"] == 4
    first, last, same = seen["another stream"]
    assert first == 0
    assert last > 0
    assert same


def test_inside_a_capture_kernels_are_launched_by_themselves(seen: dict[str, Any]) -> None:
    assert seen["captured"] == [True, 0]
    assert seen["after a capture"] == 1


def test_a_prepared_call_is_a_graph_as_well(seen: dict[str, Any]) -> None:
    assert seen["prepared"] == 1


def test_the_kind_of_a_repeated_call_is_found_without_python(seen: dict[str, Any]) -> None:
    """Also in a block of other settings, and after it; an argument that nothing can be found by is named."""
    assert seen["found in C"] == [True, 0] * 3
    assert seen["unhashable"] == "scale"


def test_a_refusal_is_an_error_and_the_next_call_is_right(seen: dict[str, Any]) -> None:
    assert seen["refused"].startswith("CUDA's driver refused a launch")
    assert seen["after a refusal"]
    assert seen["without a context"] == 2, "the thread gets one, and the kernels are launched"


def test_graphs_end_with_what_is_kept_of_their_calls(seen: dict[str, Any]) -> None:
    *rest, disturbed = seen["ended"]
    assert rest == [True, 0, True]
    assert disturbed == 0, "a capture that was under way would have ended"


def test_a_stream_with_a_part_of_the_chip_has_no_graph(seen: dict[str, Any]) -> None:
    """A graph's kernels would run on all of it."""
    assert seen["of a green context"] == [True, 0]


@pytest.mark.parametrize("name", ["none is made", "its kernels take no parameters", "it is not launched"])
def test_where_the_driver_makes_no_graph_kernels_are_launched_by_themselves(seen: dict[str, Any], name: str) -> None:
    assert seen[name] == [True, 0, 0]


def test_no_graph_is_made_where_none_is_wanted(seen: dict[str, Any]) -> None:
    assert seen["switched off"] == [True, 0]
    assert seen["switched on again"] == 1
