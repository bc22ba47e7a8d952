"""What native.c is told of memory is checked where its objects are made, and they take memory by what is in them."""

from __future__ import annotations

from typing import Any

import pytest

from portattn import config
from portattn.launch import native
from portattn.planning.splits import split_cheapest
from portattn.schema.symbolic_int import Trace


@pytest.fixture(scope="module")
def module() -> Any:
    found, why = native.load(config.current().cache_dir)
    if found is None:
        pytest.skip(why)
    return found


def test_an_object_takes_no_room_for_the_largest_call(module: Any) -> None:
    """There is one for each class of sizes, and there may be 64 classes of each kind of call."""
    sizes = {name: getattr(module, name).__basicsize__ for name in ("Launches", "Sized", "Kind")}
    assert max(sizes.values()) < 1024, sizes


FAULTS: dict[str, tuple[int, tuple[Any, ...], tuple[Any, ...]]] = {
    "a map of a role that is not there": (1, ((0, 1, (), None, None),), ()),
    "a map of a negative role": (1, ((0, -1, (), None, None),), ()),
    "a map of a negative output": (1, ((0, 0, (-1,), None, None),), ()),
    "a map of an output beyond all": (1, ((0, 0, (512,), None, None),), ()),
    "a write of a negative output": (1, (), ((0, 4, -1),)),
    "a write of more bytes than a number has": (1, (), ((0, 9, 0),)),
    "a write of no bytes": (1, (), ((0, 0, 0),)),
    "a negative number of roles": (-1, (), ()),
    "more roles than there is room for": (65, (), ()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_places_outside_of_what_is_there(module: Any, fault: str) -> None:
    roles, maps, writes = FAULTS[fault]
    with pytest.raises(ValueError, match=r"role|output|bytes"):
        module.Launches(b"", 0, 0, roles, (), maps, writes)


def test_a_launch_brings_every_output_that_is_named(module: Any) -> None:
    by_map = module.Launches(b"", 0, 0, 1, (), ((0, 0, (2,), {}, None),), ())
    with pytest.raises(ValueError, match="outputs are missing"):
        by_map(7, (64,), (1, 2))
    with pytest.raises(KeyError):  # enough: the mapping is asked
        by_map(7, (64,), (1, 2, 3))


def sized(module: Any, launches: Any, program: Any) -> Any:
    return module.Sized(
        inputs=(0,) * program.inputs, constants=program.constants, code=program.encoded(module.OPERATIONS),
        registers=program.outputs, out=(), lse=(), memory=(), offsets=(), codes=(0, 0), dtype=None, lse_dtype=None,
        memory_dtype=None, each=(), launches=launches, plan=None, planner=None,
    )  # fmt: skip


def test_a_class_has_the_outputs_of_its_tensor_maps(module: Any) -> None:
    trace = Trace()
    program = trace.program([trace.input(3)])
    sized(module, module.Launches(b"", 0, 0, 1, (), ((0, 0, (0,), {}, None),), ()), program)
    with pytest.raises(TypeError, match="do not fit"):
        sized(module, module.Launches(b"", 0, 0, 1, (), ((0, 0, (1,), {}, None),), ()), program)


def test_costs_that_do_not_fit_a_number_go_by_python(module: Any) -> None:
    """The least cost that did not fit would be a negative one."""
    large = 2**26
    for programs, limit, known in ((1, 300, True), (large, 4096, False)):
        values = (programs, large, 1, limit, large, 0, large)
        trace = Trace()
        program = trace.program([split_cheapest(*[trace.input(value) for value in values])])
        own = sized(module, module.Launches(b"", 0, 0, 0, (), (), ()), program)
        assert own(values) == ((split_cheapest(*values),) if known else None)


def test_remainders_of_the_least_number(module: Any) -> None:
    trace = Trace()
    program = trace.program([trace.input(7) % trace.input(3)])
    own = sized(module, module.Launches(b"", 0, 0, 0, (), (), ()), program)
    for pair in ((-(2**63), 3), (-(2**63), -3), (2**63 - 1, -2), (-7, 3), (7, -3), (6, 3)):
        assert own(pair) == (pair[0] % pair[1],)
