"""The whole of a cached call by native.c, against the same call by Python: every operation, launches recorded."""

from typing import Any

import pytest
from fakedriver import run_by_any
from packaging.version import Version

pytestmark = pytest.mark.compiles
WELL = ("hit", "same", "asked", "moved", "ours", "last")
OPS = ("attention", "varlen", "decode", "paged", "sparse", "mla")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_by_any("hot_child.py", tmp_path_factory)


def test_a_call_by_c_is_the_call_by_python(seen: dict[str, Any]) -> None:
    assert seen["why not"] == ""
    assert seen["reads"], "this torch's tensors are read by torch's C functions"
    variants = ["attention gluon", "mla gluon"] if Version(seen["triton"]) >= Version("3.6") else []
    for name in [f"{op} triton" for op in OPS] + variants:
        found = seen[name]
        assert found["way"] == "native", found["reason"]
        # Launches and results are the same by C, where tensors are asked in Python, and with other tensors; results are
        # what was allocated; last_plan is the call's.
        assert {key: found[key] for key in WELL} == dict.fromkeys(WELL, True), name
        assert {"allocated 0", "allocated 1"} <= set(found["named"])
        assert any(arg.startswith("q") for arg in found["named"]), "the caller's own tensors are launched"
    assert seen["decode triton"]["launches"] == 2
    if variants:
        assert [seen[name]["path"] for name in variants] == ["gluon_forward", "gluon_mla"]


def test_a_first_call_launches_what_later_ones_do(seen: dict[str, Any]) -> None:
    """As many bytes of parameters to the same kernels, among them the results' and the given tensors' addresses."""
    compared = {name: found for name, found in seen.items() if isinstance(found, dict) and "by C" in found}
    assert len(compared) >= len(OPS)
    for name, found in compared.items():
        first = found["first"]
        assert first["launches"] == found["by C"], name
        assert first["results"], name
        assert first["given"] >= 3, name


def test_what_is_kept_holds_no_tensor(seen: dict[str, Any]) -> None:
    for name, found in seen.items():
        if isinstance(found, dict) and "held" in found:
            assert found["held"] == [], name


def test_a_prepared_call_launches_into_what_it_is_given(seen: dict[str, Any]) -> None:
    """The core's kernels and the variants': the same number of launches, and not a byte allocated."""
    made = {name: found for name, found in seen.items() if isinstance(found, dict) and "prepared" in found}
    assert len(made) >= len(OPS)
    for name, found in made.items():
        assert found["prepared"] == {"allocated": 0, "given": True, "launches": found["launches"],
            "path": found["path"], "out": True, "odd": True}, name  # fmt: skip


def test_a_prepared_call_launches_into_no_wrong_place(seen: dict[str, Any]) -> None:
    made = {name: found["refused"] for name, found in seen.items() if isinstance(found, dict) and "refused" in found}
    assert len(made) >= len(OPS)
    for name, refused in made.items():
        assert len(refused) == 11, name
        assert refused == {what: [what.split()[0], 0] for what in refused}, name


def test_kernels_write_into_memory_that_the_caller_brings(seen: dict[str, Any]) -> None:
    """The first call of a kind is copied; later ones, by native.c and by Python, allocate no result."""
    made = {name: found for name, found in seen.items() if isinstance(found, dict) and "into" in found}
    assert len(made) >= len(OPS)
    for name, found in made.items():
        assert found["copied"], name
        assert found["into"] == [{"returned": True, "held": True, "allocated": []}] * 2, name
        assert found["past"] == [], name


def test_partial_results_lie_in_memory_that_is_given_back(seen: dict[str, Any]) -> None:
    """Once all is launched, and where the driver refuses; where there is no more nothing is launched."""
    taken = seen["taken"][0]
    assert taken["before"] == [], "by Python it is a tensor"
    assert taken["took"][0] > 0
    assert taken["took"][1] == 7, "the stream that is launched on"
    two, four, again = taken["sizes"]
    assert two == again < four, "as much as the call's sizes need"
    assert taken["given"] == [[2, True]], "after both launches, which have its address"
    assert taken["tensors"] == [False] * len(taken["tensors"]), "results alone are tensors"
    assert taken["refused"][0].startswith("RuntimeError: CUDA's driver refused a launch: ")
    assert (taken["refused"][1], taken["full"]) == ([[0, True]], ["MemoryError: no more", [], 0])
    assert taken["prepared"] == [[], 2], "a handle has memory of its own"
    assert taken["left"] == 0


def test_a_training_call_is_launched_by_c_and_is_a_node(seen: dict[str, Any]) -> None:
    found = seen["training"]
    assert (found["native"], found["same"], found["planned"]) == (True, True, [])
    assert found["graph"] == [[None, "_CallBackward", False]] * 2, "none without autograd, or in given memory"
    forward, *gradients = found["launches"]
    assert {"q", "k", "v"} <= set(forward)
    assert {"do", "dq", "dk", "dv"} <= {name for launch in gradients for name in launch}


def test_a_backward_pass_is_one_call_of_c(seen: dict[str, Any]) -> None:
    """It launches what Python does, which computes the others. The forward's plan stays the last one."""
    plans, by_python = ["attention", "attention_backward"], ("a gradient of strides 0", "a mode", "forgotten")
    expected = {name: ["C", *plans, True] for name in seen["passes"]} | {"elsewhere": ["C", "None"]}
    expected |= {name: ["Python", *plans] for name in by_python}
    assert seen["passes"] == expected


def test_threads_have_their_own_addresses(seen: dict[str, Any]) -> None:
    launches, firsts, wrong = seen["threads"]
    assert (launches, firsts, wrong) == (300, 150, [])


def test_after_a_warm_up_the_first_call_compiles_nothing(seen: dict[str, Any]) -> None:
    found = seen["warmed"]
    assert found["report"]["failed"] == ""
    assert found["report"]["cached"]
    assert found["report"]["way"] == "native"
    assert "dense_forward" in found["report"]["loaded"]
    assert found["again"] == [], "a second warm-up loads nothing"
    assert found["first"] == {"ways": ["C"], "warnings": [], "launches": 1}


def test_the_monitor_names_what_differs(seen: dict[str, Any]) -> None:
    found = seen["monitored"]
    assert len(found["late"]) == 1
    (text,) = found["late"]
    differing = [f"{name}'s shape: (1, 4, 96, 72) instead of (1, 4, 96, 80)" for name in "qkv"]
    for part in ("dense_forward compiled after warm-up", "attention q (1,4,96,72)", "key ", *differing):
        assert part in text, text
    assert found["again"] == [], "a kernel is warned about once"
    assert (found["never"], found["off"], len(found["always"])) == ([], [], 1)
    assert "scale" not in found["always"][0]
    assert "causal: True instead of False" in found["always"][0], found["always"]


@pytest.fixture(scope="module")
def seen_graphs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_by_any("graphs_child.py", tmp_path_factory)


# Repeated launches are a graph's: the same kernels with each call's own addresses and sizes, in one call of CUDA's
# driver. What graphs_child.py saw, and why where the name does not say it.
GRAPHS: dict[str, Any] = {
    "launches": [2, 2], "by themselves": [0, 0, 0], "made": 1, "same": True, "launched": 3,
    "other sizes and stream": [True, True, True],
    "two streams": 4,  # which do not wait for each other, as those of one graph would
    "captured": [True, 0],  # inside a capture kernels are launched by themselves
    "after a capture": 1, "prepared": 1,
    "found in C": [True, 0] * 3,  # also in a block of other settings, and after it
    "unhashable": "scale",  # an argument that nothing can be found by is named
    "without a context": 2,  # the thread gets one, and the kernels are launched
    "ended": [True, 0, True, 0],  # with the cached launches; a capture under way went on
    "of a green context": [True, 0],  # a graph's kernels would run on all of the chip
    "none is made": [True, 0, 0], "its kernels take no parameters": [True, 0, 0], "it is not launched": [True, 0, 0],
    "switched off": [True, 0], "switched on again": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(seen_graphs: dict[str, Any], name: str) -> None:
    assert seen_graphs[name] == GRAPHS[name]


def test_graphs_of_other_streams_and_after_refusals(seen_graphs: dict[str, Any]) -> None:
    """A graph is launched on one stream, until launches are repeated on another alone."""
    first, last, same = seen_graphs["another stream"]
    assert first == 0
    assert last > 0
    assert same
    assert seen_graphs["refused"].startswith("CUDA's driver refused a launch")
    assert seen_graphs["after a refusal"]


def test_a_step_is_one_launch_from_the_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    seen = run_by_any("writing_child.py", tmp_path_factory)
    for op, found in seen.items():
        assert found["path"] == "triton"
        assert found["why fixed"] == "", "each number of tokens would be planned for itself"
        assert (found["hit"], found["way"], found["launches"]) == (True, "native", 1)
        assert found["same"], f"{op}: other launches by C, by Python, or prepared"
        assert found["allocated"] == 0
        assert found["planned"] == 0, "another number of tokens was planned"
        caches = {"k_cache", "v_cache"} if op == "append_kv" else {"k_pages", "v_pages", "slot_mapping", "positions"}
        assert caches | {"k", "v", "k_scale", "v_scale", "cos", "sin"} <= set(found["addresses"])
