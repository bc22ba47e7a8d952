"""Traced sizes: a program gives what the code it was traced from gives, or None; in Python and in C."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support import native_module

from portattn.planning.kernel_specs.base import split_cheapest, split_evenly
from portattn.schema.symbolic_int import (
    COMPARISONS,
    FUNCTIONS,
    Size,
    Trace,
    Untraceable,
    is_size,
    least,
    most,
    next_power_of_two,
    pin_sizes,
    plain_sizes,
)

Code = Callable[..., Sequence[int]]


def traced(code: Code, *values: int) -> tuple[Any, Sequence[int]]:
    """The program of some code, traced at these values, and what it gave there."""
    trace = Trace()
    results = code(*(trace.input(value) for value in values))
    return trace.program(results), plain_sizes(list(results))


def in_c(program: Any, inputs: Sequence[int]) -> Any:
    """native.c's run of a program; None where it holds that the inputs are of another class."""
    module = native_module()
    launches = module.Launches(b"", 0, 0, 0, (), (), ())
    return module.Sized(
        inputs=(0,) * program.inputs, constants=program.constants, code=program.encoded(module.OPERATIONS),
        registers=program.outputs, out=(), lse=(), memory=(), offsets=(), codes=(0, 0), dtype=None, lse_dtype=None,
        memory_dtype=None, each=(), launches=launches, plan=None, planner=None,
    )(tuple(inputs))  # fmt: skip


def arithmetic(a: int, b: int, c: int) -> list[int]:
    return [a + b, a - b, a * b, 3 - a, -a, a // 7, -(-a // 16), a % 16, (a * b) // c if c else 0, 5 * b + c, 1]


def branches(a: int, b: int, c: int) -> list[int]:
    tile = 64 if a > 64 else 16
    found = [a // tile, most(a, b), least(a, b, c), next_power_of_two(a)]
    if b and a % 16 == 0 and b != c:
        found.append(min(a, b))
    return [*found, max(c, 1), 2 if 0 < a <= b < c else 3, sum((a, b, c))]


def splitting(a: int, b: int, c: int) -> list[int]:
    if a >= 0.8 * 132 or b <= 4 or not a:
        return [1]
    evenly = split_evenly(a, b, 132 * most(c, 1), 128)
    return [evenly, next_power_of_two(evenly), split_cheapest(a, b, 132, least(b, 32), 3, 4, 0),
            split_cheapest(a, b, 132, least(b, 264), 4, 0, 4)]  # fmt: skip


@pytest.mark.parametrize("code", [arithmetic, branches, splitting])
def test_a_program_is_its_code(code: Code) -> None:
    """For random numbers: where it answers, its answer is the code's; and at the traced numbers it does answer."""
    rng = random.Random(7)
    answered = 0
    for _ in range(60):
        program, here = traced(code, *(values := [rng.choice((0, 1, 2, 15, 16, 64, 65, 100, 4096)) for _ in "abc"]))
        assert program(values) == here == list(code(*values))
        assert in_c(program, values) == tuple(here)
        tried = [[rng.choice((0, 1, 3, 16, 17, 63, 64, 65, 128, 200, 1000)) for _ in "abc"] for _ in range(40)]
        assert program.holding(torch.tensor(tried).unbind(1)).tolist() == [program(one) is not None for one in tried]
        for others in tried:
            found = program(others)
            by_c = in_c(program, others)
            assert (None if found is None else tuple(found)) == by_c
            if found is not None:
                answered += 1
                assert found == list(code(*others)), (values, others)
    assert answered > 50


def test_each_branch_is_a_program_of_its_own() -> None:
    program, _ = traced(branches, 65, 2, 3)
    assert program((66, 2, 3)) == branches(66, 2, 3)
    assert program((64, 2, 3)) is None
    assert program((66, 2)) is None, "another number of inputs"


def test_negative_numbers_and_signs_of_division() -> None:
    program, _ = traced(lambda a, b: [a // b, a % b, -(-a // b)], -7, 2)
    for a, b in ((-8, 3), (8, -3), (-8, -3), (7, 2), (0, -5)):
        assert program((a, b)) == [a // b, a % b, -(-a // b)]
        assert in_c(program, (a, b)) == (a // b, a % b, -(-a // b))
    assert program((1, 0)) is None
    assert in_c(program, (1, 0)) is None
    assert in_c(program, (-(2**63), -1)) is None


def test_what_c_cannot_count_goes_by_python() -> None:
    program, _ = traced(lambda a, b: [a * b, a + b], 2, 3)
    assert program((2**40, 2**40)) == [2**80, 2**41]
    assert in_c(program, (2**40, 2**40)) is None
    assert in_c(program, (2**62, 2)) is None


def test_uses_of_the_number_itself_pin_it() -> None:
    uses: list[Callable[[int], Any]] = [
        lambda a: list(range(a)), lambda a: {4: 1}[a], lambda a: a**-0.5, float, int, lambda a: [0] * a,
        lambda a: bytes(a), lambda a: "x"[a:],
    ]  # fmt: skip
    for use in uses:
        trace = Trace()
        size = trace.input(4)
        use(size)
        program = trace.program([size])
        assert program((4,)) == [4]
        assert program((5,)) is None


def test_what_cannot_be_traced_raises() -> None:
    one, other = Trace().input(4), Trace().input(4)
    with pytest.raises(Untraceable, match="two calls"):
        _ = one + other
    with pytest.raises(Untraceable, match="without rounding"):
        _ = one / 2
    with pytest.raises(TypeError):
        _ = one + 0.5
    with pytest.raises(TypeError):
        _ = one < "x"
    assert one != "x"
    assert (one is None) is False


def test_comparisons_with_floats() -> None:
    for limit in (2.5, 105.6, 3.0):
        for value in (2, 3, 4, 105, 106):
            program, (held,) = traced(lambda a: [int(a >= limit) + 2 * int(a > limit) + 4 * int(a < limit)], value)  # noqa: B023
            assert held == int(value >= limit) + 2 * int(value > limit) + 4 * int(value < limit)
            assert program((value,)) == [held]
            program, held = traced(lambda a: [int(a == limit), int(a != limit)], value)  # noqa: B023
            assert held == [int(value == limit), int(value != limit)]
            for other in (2, 3, value + 1):
                assert program((other,)) in (None, [int(other == limit), int(other != limit)])


@pytest.mark.parametrize("number", [True, float("inf"), np.int64(128), Fraction(128)])
def test_no_comparison_with_another_kind_of_number_is_passed_over(number: Any) -> None:
    """Python takes what two objects cannot compare for unequal, and asks nobody."""
    for value in (1, 128):
        for compare in (operator.eq, operator.ne):
            with pytest.raises(Untraceable, match="compared with"):
                compare(Trace().input(value), number)


def test_a_size_is_an_integer_to_those_who_ask() -> None:
    size: Any = Trace().input(4)
    assert isinstance(size, Size)
    assert not isinstance(size, int)
    assert is_size(size)
    assert is_size(3)
    assert not is_size(True)
    assert not is_size(3.0)
    assert f"{size} {size:>3} {size!r}" == "4   4 4"


def test_sizes_in_containers() -> None:
    from portattn.schema.lowering import Launch

    trace = Trace()
    size: Any = trace.input(32)
    launch = Launch(block_m=size, splits=3)
    assert plain_sizes({"a": [size, (size, 1)], "b": launch}) == {"a": [32, (32, 1)], "b": Launch(block_m=32, splits=3)}
    assert trace.program([size])((33,)) == [33], "nothing was pinned"
    assert pin_sizes(launch) == Launch(block_m=32, splits=3)
    assert trace.program([size])((33,)) is None


def test_native_knows_every_operation() -> None:
    assert set(native_module().OPERATIONS) == set(FUNCTIONS) | set(COMPARISONS)


def test_a_program_that_does_not_fit_is_refused() -> None:
    """Registers and places that are not there: an error where it is made, not memory read at run time."""
    module = native_module()
    program, _ = traced(lambda a, b: [a + b], 1, 2)
    right: dict[str, Any] = {
        "inputs": (0, 0), "constants": program.constants, "code": program.encoded(module.OPERATIONS),
        "registers": program.outputs, "out": (), "lse": (), "memory": (), "offsets": (), "codes": (0, 0),
        "dtype": None, "lse_dtype": None, "memory_dtype": None, "each": (), "plan": None, "planner": None,
        "launches": module.Launches(b"", 0, 0, 0, (), (), ()),
    }  # fmt: skip
    assert module.Sized(**right)((3, 4)) == (7,)
    import array

    add = module.OPERATIONS.index("add")
    bad: list[dict[str, Any]] = [
        {"registers": (3,)}, {"registers": (-1,)}, {"out": (0,)}, {"out": (0, 1)}, {"memory": (1,)}, {"codes": (0,)},
        {"code": array.array("i", [add, 0]).tobytes()}, {"code": array.array("i", [add, 0, 2]).tobytes()},
        {"code": array.array("i", [99, 0, 0]).tobytes()}, {"code": b"123"}, {"inputs": (0,) * 300},
        {"launches": module.Launches(b"", 0, 0, 0, (), (), ((0, 4, 5),))},
    ]  # fmt: skip
    for fields in bad:
        with pytest.raises(TypeError, match="do not fit"):
            module.Sized(**(right | fields))


def reference_even(programs: int, key_tiles: int, slots: int, limit: int) -> int:
    """By definition: the efficiency of the last wave times that of the last share."""
    from fractions import Fraction

    found = {}
    for count in range(1, min(limit, key_tiles, max(slots // programs, 1) * 2) + 1):
        waves, share = -(-programs * count // slots), -(-key_tiles // count)
        found[count] = Fraction(programs * count, slots * waves) * Fraction(key_tiles, share * count)
    best = max(found.values())
    return min(count for count, value in found.items() if value >= Fraction(85, 100) * best)


def test_splits_against_their_definition() -> None:
    rng = random.Random(3)
    for _ in range(300):
        programs, tiles, slots = rng.randint(1, 100), rng.randint(5, 600), rng.choice((20, 132, 264, 528))
        assert split_evenly(programs, tiles, slots, 128) == reference_even(programs, tiles, slots, 128)
