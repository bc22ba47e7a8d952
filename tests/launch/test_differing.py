"""What a cached call must not be taken for, and what goes by Python: by native.c, and where there is none.
differing_child.py makes the calls: one is cached, another follows, and it is told how that was answered."""

from typing import Any

import pytest
from fakedriver import run_by_any

pytestmark = pytest.mark.compiles
KEPT = ["C", "python"]  # how a call that is kept is answered, with native.c and without
BY_PYTHON = ["python", "python"]
NOTHING = ["nothing", "nothing"]  # validated and planned


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = run_by_any("differing_child.py", tmp_path_factory)
    assert found["why not"] == ""
    return found


TORCHS = (  # what torch does around a call: forward-mode differentiation, modes, transforms, inference, autocast
    "dual level", "tangent", "fake tensors' mode", "a mode that counts", "inference", "vmap", "grad", "jit.trace",
    "functionalize", "jvp", "kept in inference, outside",
)  # fmt: skip
OTHER = (
    "scale", "type", "type in a tuple", "float in a tuple", "list", "window", "array", "dtype", "aligned", "axes",
    "gradient", "k is v", "more", "less", "no tensor", "subclass", "negated", "other settings", "freed", "nested",
    "sparse", "oneDNN's", "64 axes",
    "recorded", "not required",  # a kernel without a backward must not answer where gradients are recorded
    "two, twins kept", "equal, twins kept", "twins, two kept",
    "True after 3", "3.0 after 3", "None after 3", "1 after 3, k None", "3 after none",
)  # fmt: skip
SAME = (
    "same", "shorter", "strides", "equal settings", "after all", "not recorded", "not recorded again",
    "no_grad, none asked for", "after modes", "kept in inference, inside", "kept in autocast, inside",
    "autocast", "kept in autocast, outside",  # of bfloat16, which autocast leaves as it is
    "twins, twins kept", "other twins, twins kept", "twins, both kept", "two, both kept",
    "3 after 3", "4 after 3", "none after none",
)  # fmt: skip
WAYS = dict.fromkeys((*OTHER, *TORCHS), NOTHING) | dict.fromkeys(SAME, KEPT) | {
    "device": BY_PYTHON, "hook": BY_PYTHON, "context": ["python"],
    f"{2**70} after 3": ["nothing", "no class"],  # validation names it
}  # fmt: skip


def test_what_is_another_call_and_what_goes_by_python(seen: dict[str, Any]) -> None:
    assert {name: seen["ways"][name] for name in WAYS} == WAYS
    assert seen["refused"] == "CUDA's driver refused a launch: invalid argument"
    assert seen["stream"] == 11, "launched on the stream that is current"
    assert seen["twins' launches"] == {"C": True, "python": True}
    assert seen["kinds in a dual level"] == 0, "calls that nothing could find again drive out kinds that are used"


def test_a_handle_takes_no_other_sizes(seen: dict[str, Any]) -> None:
    """Those of the longer cache are of the same class, and would be written into the handle's memory."""
    assert seen["handle"]["hit"]
    for way in ("C", "python"):
        first, longer, again = seen["handle"][way]
        assert first == again == f"2 launches by {way}"
        assert longer.startswith("prepare('decode_attention').run: k_cache is ((2, 2, 656, 64)")


def test_sizes_of_a_class_in_turn(seen: dict[str, Any]) -> None:
    assert (seen["classes"], seen["sizes"]) == (1, {"C": True, "python": True})
    assert seen["plans"] == [[2, 640], [3, 656], [3, 672], [2, 640],
        [3, 656]] * 2, ("last_plan is of the last call's sizes")  # fmt: skip


def test_tensor_maps_follow_addresses_sizes_and_strides(seen: dict[str, Any]) -> None:
    if "maps" not in seen:
        pytest.skip("the variants need Triton 3.6 or newer")
    assert (seen["maps"]["path"], seen["maps"]["C"], seen["maps"]["python"]) == ("gluon_forward", True, True)
    assert seen["maps"]["made by native.c"] == [True] * 4, "those of q, k, v and out, as Triton makes them"


def test_another_thread_launches_by_parameters_of_its_own(seen: dict[str, Any]) -> None:
    """A call of the same kind with other sizes: before the first one's launch, and while the driver has it."""
    for name in ("together by C", "together by python"):
        found = seen[name]
        assert found["way"] == ["python"], name
        assert found["way then"] == ["python", "held"], name
        assert (found["allocating"], found["launching"]) == (True, True), name
        assert found["launches"] == 4
