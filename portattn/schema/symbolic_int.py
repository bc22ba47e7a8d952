"""Sizes that record a computation's operations and comparisons on them, to be repeated with other sizes.

A `Size` stands for a number whose value differs from call to call (a length, a batch, a stride). Code that
is given Sizes in place of integers computes and branches as it always does; a `Trace` writes down each operation, and
each comparison with its outcome. The `Program` made of it takes other numbers: where all comparisons come out as they
did, the code would have taken the same branches, and the program's results are the code's; where one does not, it
gives None, and the code itself has to run.

A result that cannot be recorded is never guessed. A use that needs the number itself (an index, a key of a dictionary,
a float) pins the Size: the program then holds for that one value. Anything else that Python does not allow on an object
that is no int raises.
"""

from __future__ import annotations

import array
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, cast

import msgspec

Ref = tuple[str, int]  # ("input", place), ("constant", value) or ("result", place of the operation)


class Untraceable(Exception):
    """Why a computation cannot be done again with other sizes.

    No TypeError: torch's operators take one for "not implemented", and Python then compares two tensors by identity.
    """


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    trace = _trace_of((n,))
    return 1 << max(n - 1, 0).bit_length() if trace is None else trace.operation("pow2", n)


def _trace_of(values: tuple[Any, ...]) -> Trace | None:
    """The trace that Sizes among some values are of; None where there are none."""
    return next((value.trace for value in values if isinstance(value, Size)), None)


def least(*values: int) -> int:
    """The least of some numbers. Of Sizes the builtin would branch: a program would hold for one order of them."""
    return _folded("least", min, values)


def most(*values: int) -> int:
    """The greatest of some numbers, as `least`."""
    return _folded("most", max, values)


def _folded(name: str, plain: Callable[[Any], int], values: tuple[int, ...]) -> int:
    trace = _trace_of(values)
    if trace is None:
        return plain(values)
    found = values[0]
    for value in values[1:]:
        found = trace.operation(name, found, value)
    return found


FUNCTIONS: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "least": min,
    "most": max,
    "pow2": next_power_of_two,
}
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "ge": operator.ge, "le": operator.le, "gt": operator.gt,
}  # fmt: skip
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


def traceable(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A function of integers that is one operation of a program. native.c has the same function under this name."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        FUNCTIONS[name] = function

        def call(*values: int) -> int:
            trace = _trace_of(values)
            return function(*values) if trace is None else trace.operation(name, *values)

        call.__doc__, call.__name__ = function.__doc__, function.__name__
        return call

    return register


class Trace:
    """The operations and comparisons on some inputs."""

    def __init__(self) -> None:
        self.inputs: list[int] = []
        self._results: list[tuple[str, tuple[Ref, ...]]] = []
        self._known: dict[tuple[str, tuple[Ref, ...]], Ref] = {}
        # In the order in which they were made: ("result", place), or (comparison, a, b).
        self._order: list[tuple[Any, ...]] = []
        self._compared: set[tuple[Any, ...]] = set()

    def input(self, value: int) -> int:
        """A new input, which is this number now. It is typed as the int that it stands for."""
        self.inputs.append(int(value))
        return cast("int", Size(self, ("input", len(self.inputs) - 1), int(value)))

    def operation(self, name: str, *values: int) -> int:
        """The result of an operation on Sizes and integers."""
        refs = tuple(map(self.ref, values))
        value = FUNCTIONS[name](*map(plain, values))
        found = self._known.get((name, refs))
        if found is None:
            found = self._known[name, refs] = ("result", len(self._results))
            self._order.append(found)
            self._results.append((name, refs))
        return cast("int", Size(self, found, value))

    def compare(self, name: str, a: int, b: int) -> bool:
        """Whether a comparison holds, which it must from now on as well."""
        holds = COMPARISONS[name](plain(a), plain(b))
        one = (name if holds else _OPPOSITE[name], self.ref(a), self.ref(b))
        if one not in self._compared:
            self._compared.add(one)
            self._order.append(one)
        return holds

    def ref(self, value: int | Size) -> Ref:
        if isinstance(value, Size):
            if value.trace is not self:
                raise Untraceable("sizes of two calls are mixed")
            return value.ref
        if isinstance(value, bool) or type(value) is not int:
            raise Untraceable(f"a size meets {value!r}")
        return ("constant", value)

    def program(self, outputs: Sequence[int]) -> TraceProgram:
        """What gives these results of other inputs; outputs may be integers too."""
        constants: dict[int, int] = {}
        needed: set[int] = set()
        kept: list[tuple[Any, ...]] = []

        def need(ref: Ref) -> None:
            if ref[0] == "constant":
                constants.setdefault(ref[1], len(constants))
            elif ref[0] == "result" and ref[1] not in needed:
                needed.add(ref[1])

        ends = [self.ref(value) for value in outputs]
        for ref in ends:
            need(ref)
        for one in reversed(self._order):  # what nothing needs is left out
            if one[0] != "result":
                need(one[1])
                need(one[2])
                kept.append(one)
            elif one[1] in needed:
                for ref in self._results[one[1]][1]:
                    need(ref)
                kept.append(one)
        kept.reverse()
        # Comparisons of inputs with constants first: they need nothing, and tell most calls apart.
        plain_ones = [one for one in kept if one[0] != "result" and {one[1][0], one[2][0]} <= {"input", "constant"}]
        rest = [one for one in kept if one not in plain_ones]
        registers: dict[Ref, int] = {("input", i): i for i in range(len(self.inputs))}
        registers |= {("constant", value): len(self.inputs) + place for value, place in constants.items()}
        code: list[tuple[str, tuple[int, ...]]] = []
        for one in (*plain_ones, *rest):
            if one[0] == "result":
                name, refs = self._results[one[1]]
                code.append((name, tuple(registers[ref] for ref in refs)))
                registers[one] = len(registers)
            else:
                code.append((one[0], (registers[one[1]], registers[one[2]])))
        return TraceProgram(len(self.inputs), tuple(constants), tuple(code), tuple(registers[ref] for ref in ends))


class Size:
    """A number in a Trace. It is used as an int, and is none: nothing takes its value without the trace's knowing."""

    __slots__ = ("ref", "trace", "value")

    def __init__(self, trace: Trace, ref: Ref, value: int) -> None:
        self.trace, self.ref, self.value = trace, ref, value

    def pin(self) -> int:
        """Its value, which from now on is the only one."""
        self.trace.compare("eq", cast("int", self), self.value)
        return self.value

    def __index__(self) -> int:
        return self.pin()

    def __int__(self) -> int:
        return self.pin()

    def __float__(self) -> float:
        return float(self.pin())

    def __hash__(self) -> int:
        return hash(self.pin())

    def __bool__(self) -> bool:
        return self.trace.compare("ne", cast("int", self), 0)

    def __pow__(self, exponent: Any) -> Any:
        return self.pin() ** exponent

    def __truediv__(self, other: Any) -> NoReturn:
        raise Untraceable("a size is divided without rounding: use // or a traceable function")

    __rtruediv__ = __truediv__

    def __neg__(self) -> int:
        return self.trace.operation("sub", 0, cast("int", self))

    def __repr__(self) -> str:  # in texts for people
        return str(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value, form)


def _arithmetic(name: str, swapped: bool) -> Callable[[Size, Any], Any]:
    def apply(self: Size, other: Any) -> Any:
        if not is_size(other):
            return NotImplemented
        return self.trace.operation(name, other, self) if swapped else self.trace.operation(name, self, other)  # type: ignore[arg-type]

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Size, f"__{_name}__", _arithmetic(_name, False))
    setattr(Size, f"__r{_name}__", _arithmetic(_name, True))


def _comparison(name: str) -> Callable[[Size, Any], Any]:
    def apply(self: Size, other: Any) -> Any:
        if type(other) is float and math.isfinite(other):
            if name in ("eq", "ne") and not other.is_integer():
                return name == "ne"  # as for every integer
            # Between two integers nothing else lies: the comparison is one with an integer.
            other = math.ceil(other) if name in ("ge", "lt") else math.floor(other)
        if not is_size(other):
            if isinstance(other, numbers.Number):  # Python would take "not comparable" for "not equal"
                raise Untraceable(f"a size is compared with {other!r}")
            return NotImplemented
        return self.trace.compare(name, self, other)  # type: ignore[arg-type]

    return apply


for _name in COMPARISONS:
    setattr(Size, f"__{_name}__", _comparison(_name))


def is_size(value: Any) -> bool:
    """Whether it is an integer, and no bool, or stands for one."""
    return isinstance(value, (int, Size)) and not isinstance(value, bool)


def plain(value: int | Size) -> int:
    """The integer, without pinning it: for what is shown to people, and for results that are checked."""
    return value.value if isinstance(value, Size) else value


def pin_sizes(value: Any) -> Any:
    """The value with every Size in it, in tuples, lists, mappings and structs, replaced by its number, and pinned."""
    return _replaced(value, Size.pin)


def plain_sizes(value: Any) -> Any:
    """As `pinned`, without pinning: what the value is for the traced call itself."""
    return _replaced(value, plain)


def _replaced(value: Any, number: Callable[[Any], int]) -> Any:
    if isinstance(value, Size):
        return number(value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, number) for item in value)
    if type(value) is dict:
        return {name: _replaced(item, number) for name, item in value.items()}
    if isinstance(value, msgspec.Struct):
        found = {name: getattr(value, name) for name in value.__struct_fields__}
        other = {name: _replaced(item, number) for name, item in found.items()}
        changed = {name: item for name, item in other.items() if item is not found[name]}
        return msgspec.structs.replace(value, **changed) if changed else value
    return value


class TraceProgram:
    """What a Trace wrote down. Called with other inputs it gives the outputs, or None where a comparison fails.

    inputs     how many there are
    constants  what is in the registers after the inputs; each operation's result is in the next one
    code       operations and comparisons: name, and registers
    outputs    registers of the results
    """

    def __init__(
        self,
        inputs: int,
        constants: tuple[int, ...],
        code: tuple[tuple[str, tuple[int, ...]], ...],
        outputs: tuple[int, ...],
    ) -> None:
        self.inputs, self.constants, self.code, self.outputs = inputs, constants, code, outputs
        self._run: Callable[[Sequence[int]], list[int] | None] | None = None

    def __call__(self, inputs: Sequence[int]) -> list[int] | None:
        if len(inputs) != self.inputs:
            return None
        if self._run is None:
            self._run = self._compiled()
        return self._run(inputs)

    def check(self, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
        """Whether it gives these outputs, step by step: without the time that compiling it takes."""
        registers = [*inputs, *self.constants]
        for name, places in self.code:
            given = [registers[place] for place in places]
            if name in COMPARISONS:
                if not COMPARISONS[name](*given):
                    return False
            else:
                registers.append(FUNCTIONS[name](*given))
        return [registers[place] for place in self.outputs] == list(outputs)

    def encoded(self, operations: Sequence[str]) -> bytes:
        """The code as native.c reads it: of each step its number among `operations`, then its registers, as int32.

        Raises ValueError for an operation that is not among them.
        """
        numbers = array.array("i")
        for name, registers in self.code:
            if name not in operations:
                raise ValueError(f"native.c has no operation {name}")
            numbers.extend((operations.index(name), *registers))
        return numbers.tobytes()

    def _compiled(self) -> Callable[[Sequence[int]], list[int] | None]:
        names = [f"x[{i}]" for i in range(self.inputs)] + [f"({value})" for value in self.constants]
        symbols = {"eq": "==", "ne": "!=", "lt": "<", "ge": ">=", "le": "<=", "gt": ">", "add": "+", "sub": "-",
                   "mul": "*", "floordiv": "//", "mod": "%"}  # fmt: skip
        lines = ["def run(x):"]
        for name, registers in self.code:
            given = [names[register] for register in registers]
            if name in ("floordiv", "mod"):
                lines.append(f"    if {given[1]} == 0: return None")
            if name in COMPARISONS:
                lines.append(f"    if not {given[0]} {symbols[name]} {given[1]}: return None")
                continue
            value = f"{given[0]} {symbols[name]} {given[1]}" if name in symbols else f"{name}({', '.join(given)})"
            lines.append(f"    r{len(names)} = {value}")
            names.append(f"r{len(names)}")
        lines.append(f"    return [{', '.join(names[register] for register in self.outputs)}]")
        functions: dict[str, Any] = dict(FUNCTIONS)
        exec("\n".join(lines), functions)
        return cast("Callable[[Sequence[int]], list[int] | None]", functions["run"])


class ProgramOutputs:
    """Numbers that a program shall give, collected before it is made: `of` gives a number's place among them."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self._places: dict[Any, int] = {}

    def of(self, value: int | Size) -> int:
        key = value.ref if isinstance(value, Size) else ("constant", value)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.values)
            self.values.append(cast("int", value))
        return place

    def all_of(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self.of, values))
