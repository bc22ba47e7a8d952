"""What a cached call must not be taken for, and what goes by Python: by native.c, and where there is none.
differing_child.py makes the calls: one is cached, another follows, and it is told how that was answered."""

from typing import Any

import pytest
from fakedriver import run_by_any

KEPT = ["C", "python"]  # how a call that is kept is answered, with native.c and without
BY_PYTHON = ["python", "python"]
NOTHING = ["nothing", "nothing"]  # validated and planned


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = run_by_any("differing_child.py", tmp_path_factory)
    assert found["why not"] == ""
    return found


def ways(seen: dict[str, Any], *names: str) -> dict[str, list[str]]:
    return {name: seen["ways"][name] for name in names}


@pytest.mark.compiles
def test_other_arguments_are_another_call(seen: dict[str, Any]) -> None:
    names = (
        "scale", "type", "type in a tuple", "float in a tuple", "list", "window", "array", "dtype", "aligned", "axes",
        "gradient", "k is v", "more", "less", "no tensor", "subclass", "negated", "other settings", "freed",
        "nested", "sparse", "oneDNN's", "64 axes",
    )  # fmt: skip
    assert ways(seen, *names) == dict.fromkeys(names, NOTHING)


@pytest.mark.compiles
def test_other_sizes_and_equal_settings_are_no_other_call(seen: dict[str, Any]) -> None:
    names = ("same", "shorter", "strides", "equal settings", "after all")
    assert ways(seen, *names) == dict.fromkeys(names, KEPT)


@pytest.mark.compiles
def test_what_native_does_not_handle_goes_by_python(seen: dict[str, Any]) -> None:
    assert ways(seen, "device", "hook") == {"device": BY_PYTHON, "hook": BY_PYTHON}
    assert ways(seen, "context") == {"context": ["python"]}
    assert seen["refused"] == "CUDA's driver refused a launch: invalid argument"
    assert seen["stream"] == 11, "launched on the stream that is current"


@pytest.mark.compiles
def test_what_torch_does_around_a_call_is_part_of_it(seen: dict[str, Any]) -> None:
    """Forward-mode differentiation, modes that see every operator, transforms, inference and autocast."""
    names = (
        "dual level", "tangent", "fake tensors' mode", "a mode that counts", "inference", "vmap", "grad", "jit.trace",
        "functionalize", "jvp", "kept in inference, outside",
    )  # fmt: skip
    assert ways(seen, *names) == dict.fromkeys(names, NOTHING)
    names = (
        "no_grad, none asked for", "after modes", "kept in inference, inside", "kept in autocast, inside",
        "autocast", "kept in autocast, outside",  # of bfloat16, which autocast leaves as it is
    )  # fmt: skip
    assert ways(seen, *names) == dict.fromkeys(names, KEPT)


@pytest.mark.compiles
def test_calls_that_nothing_could_find_again_are_not_kept(seen: dict[str, Any]) -> None:
    """Each would be one more kind, and drive kinds that are used out."""
    assert seen["kinds in a dual level"] == 0


@pytest.mark.compiles
def test_whether_gradients_are_recorded(seen: dict[str, Any]) -> None:
    """A kernel without a backward must not answer where they are."""
    assert ways(seen, "recorded", "not required") == {"recorded": NOTHING, "not required": NOTHING}
    assert ways(seen, "not recorded", "not recorded again") == {"not recorded": KEPT, "not recorded again": KEPT}


@pytest.mark.compiles
def test_tensors_that_are_one_tensor(seen: dict[str, Any]) -> None:
    other = ("two, twins kept", "equal, twins kept", "twins, two kept")
    assert ways(seen, *other) == dict.fromkeys(other, NOTHING)
    same = ("twins, twins kept", "other twins, twins kept", "twins, both kept", "two, both kept")
    assert (ways(seen, *same), seen["twins' launches"]) == (dict.fromkeys(same, KEPT), {"C": True, "python": True})


@pytest.mark.compiles
def test_lengths_of_other_types(seen: dict[str, Any]) -> None:
    other = ("True after 3", "3.0 after 3", "None after 3", "1 after 3, k None", "3 after none")
    assert ways(seen, *other) == dict.fromkeys(other, NOTHING)
    assert ways(seen, "3 after 3", "4 after 3", "none after none") == dict.fromkeys(("3 after 3", "4 after 3",
        "none after none"), KEPT)  # fmt: skip
    assert seen["ways"][f"{2**70} after 3"] == ["nothing", "no class"], "validation names it"


@pytest.mark.compiles
def test_a_handle_takes_no_other_sizes(seen: dict[str, Any]) -> None:
    """Those of the longer cache are of the same class, and would be written into the handle's memory."""
    assert seen["handle"]["hit"]
    for way in ("C", "python"):
        first, longer, again = seen["handle"][way]
        assert first == again == f"2 launches by {way}"
        assert longer.startswith("prepare('decode_attention').run: k_cache is ((2, 2, 656, 64)")


@pytest.mark.compiles
def test_sizes_of_a_class_in_turn(seen: dict[str, Any]) -> None:
    assert (seen["classes"], seen["sizes"]) == (1, {"C": True, "python": True})
    assert seen["plans"] == [[2, 640], [3, 656], [3, 672], [2, 640],
        [3, 656]] * 2, ("last_plan is of the last call's sizes")  # fmt: skip


@pytest.mark.compiles
def test_tensor_maps_follow_addresses_sizes_and_strides(seen: dict[str, Any]) -> None:
    if "maps" not in seen:
        pytest.skip("the variants need Triton 3.6 or newer")
    assert (seen["maps"]["path"], seen["maps"]["C"], seen["maps"]["python"]) == ("gluon_forward", True, True)
    assert seen["maps"]["made by native.c"] == [True] * 4, "those of q, k, v and out, as Triton makes them"


@pytest.mark.compiles
def test_another_thread_launches_by_parameters_of_its_own(seen: dict[str, Any]) -> None:
    """A call of the same kind with other sizes: before the first one's launch, and while the driver has it."""
    for name in ("together by C", "together by python"):
        found = seen[name]
        assert found["way"] == ["python"], name
        assert found["way then"] == ["python", "held"], name
        assert (found["allocating"], found["launching"]) == (True, True), name
        assert found["launches"] == 4
