"""Symbolic integers: a Trace records the operations and comparisons on Sizes (lengths, batches, strides); its
TraceProgram repeats them for other sizes, or returns None if a comparison differs: the code would branch otherwise.
A use that needs the number itself (an index, a dictionary key, a float) pins the Size to this value."""

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
    """A computation cannot be repeated with other sizes.
    No TypeError: torch's operators take one for "not implemented", and Python then compares two tensors by identity."""


def next_power_of_two(n: int) -> int:
    trace = _trace_of((n,))
    return 1 << max(n - 1, 0).bit_length() if trace is None else trace.operation("pow2", n)


def _trace_of(values: tuple[Any, ...]) -> Trace | None:
    return next((value.trace for value in values if isinstance(value, Size)), None)


def least(*values: int) -> int:
    """Return the least number. The builtin would branch on Sizes: a program would hold for one order of them."""
    return _folded("least", min, values)


def most(*values: int) -> int:
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
    """Register a function of integers as one operation of a program. native.c has the same function under this name."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        FUNCTIONS[name] = function

        def call(*values: int) -> int:
            trace = _trace_of(values)
            return function(*values) if trace is None else trace.operation(name, *values)

        call.__doc__, call.__name__ = function.__doc__, function.__name__
        return call

    return register


class Trace:
    def __init__(self) -> None:
        self.inputs: list[int] = []
        self._results: list[tuple[str, tuple[Ref, ...]]] = []
        self._known: dict[tuple[str, tuple[Ref, ...]], Ref] = {}
        # In order of execution: ("result", place), or (comparison, a, b).
        self._order: list[tuple[Any, ...]] = []
        self._compared: set[tuple[Any, ...]] = set()

    def input(self, value: int) -> int:
        """Return a new input with this value, typed as the int that it stands for."""
        self.inputs.append(int(value))
        return cast("int", Size(self, ("input", len(self.inputs) - 1), int(value)))

    def operation(self, name: str, *values: int) -> int:
        refs = tuple(map(self.ref, values))
        value = FUNCTIONS[name](*map(plain, values))
        found = self._known.get((name, refs))
        if found is None:
            found = self._known[name, refs] = ("result", len(self._results))
            self._order.append(found)
            self._results.append((name, refs))
        return cast("int", Size(self, found, value))

    def compare(self, name: str, a: int, b: int) -> bool:
        """Return whether a comparison holds, and record that it must."""
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
        for one in reversed(self._order):  # unused results are left out
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
        plain_ones, rest = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        for one in kept:
            is_plain = one[0] != "result" and one[1][0] != "result" and one[2][0] != "result"
            (plain_ones if is_plain else rest).append(one)
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
    """An integer of a Trace. It acts as an int and is no int: nothing takes its value without the trace's knowing."""

    __slots__ = ("ref", "trace", "value")

    def __init__(self, trace: Trace, ref: Ref, value: int) -> None:
        self.trace, self.ref, self.value = trace, ref, value

    def pin(self) -> int:
        """Return its value, which from now on is the only one."""
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
            # No other integer lies between two integers: the comparison is equal to one with an integer.
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
    """Return whether a value is an integer, and no bool, or a Size."""
    return isinstance(value, (int, Size)) and not isinstance(value, bool)


def plain(value: int | Size) -> int:
    """Return the integer without pinning it: for texts, and for results that are checked."""
    return value.value if isinstance(value, Size) else value


def pin_sizes(value: Any) -> Any:
    """Return the value with every Size in its tuples, lists, dicts and structs pinned and replaced by its number."""
    return _replaced(value, Size.pin)


def plain_sizes(value: Any) -> Any:
    """Like `pin_sizes`, without pinning: the value for the traced call itself."""
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
    """A Trace's record. Called with other inputs it returns the outputs, or None if a comparison fails.

    Args:
        inputs: number of inputs, in the first registers
        constants: values of the next registers; each operation's result takes the register after them
        code: operations and comparisons: name, and registers
        outputs: registers of the results
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
        """Return whether it gives these outputs, step by step: compiling it would take longer."""
        registers = [*inputs, *self.constants]
        for name, places in self.code:
            given = [registers[place] for place in places]
            if name in COMPARISONS:
                if not COMPARISONS[name](*given):
                    return False
            else:
                registers.append(FUNCTIONS[name](*given))
        return [registers[place] for place in self.outputs] == list(outputs)

    def holding(self, columns: Sequence[Any]) -> Any:
        """Return a bool tensor: of which calls no comparison fails.

        Args:
            columns: the inputs, each an int for all calls or an int64 tensor of a number for each; at least one tensor
        """
        import torch

        count = next(column.shape[0] for column in columns if isinstance(column, torch.Tensor))
        found, left = torch.zeros(count, dtype=torch.bool), torch.arange(count)
        registers: list[Any] = [*columns, *self.constants]
        last = {place: step for step, (_, places) in enumerate(self.code) for place in places}
        for step, (name, places) in enumerate(self.code):
            given = [registers[place] for place in places]
            tests = [COMPARISONS[name](*given)] if name in COMPARISONS else []
            tests += [given[1] != 0] if name in ("floordiv", "mod") else []
            for holds in tests:
                if holds is not True and not (isinstance(holds, torch.Tensor) and bool(holds.all())):
                    which = torch.as_tensor(holds).expand(left.shape[0]).nonzero()[:, 0]
                    left = left.take(which)
                    registers = [one.take(which) if isinstance(one, torch.Tensor) else one for one in registers]
            if not left.shape[0]:
                return found
            if name not in COMPARISONS:
                registers.append(_elementwise(name, [registers[place] for place in places]))
            for place in places:
                registers[place] = None if last[place] == step else registers[place]
        found[left] = True
        return found

    def encoded(self, operations: Sequence[str]) -> bytes:
        """Return the code for native.c, int32: of each step its number in `operations`, then its registers."""
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


def _elementwise(name: str, given: Sequence[Any]) -> Any:
    """Return an operation's results of numbers, each an int or a tensor."""
    import torch

    if name in ("add", "sub", "mul", "floordiv", "mod") or not any(isinstance(one, torch.Tensor) for one in given):
        return FUNCTIONS[name](*given)
    columns = torch.broadcast_tensors(*map(torch.as_tensor, given))
    if name in ("least", "most"):
        return (torch.minimum if name == "least" else torch.maximum)(*columns)
    if name == "pow2":
        bits = (columns[0] - 1).clamp(min=0)
        for shift in (1, 2, 4, 8, 16, 32):
            bits = bits | bits >> shift
        return bits + 1
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    known = {row: FUNCTIONS[name](*row) for row in set(rows)}
    return torch.tensor([known[row] for row in rows])


class ProgramOutputs:
    """Numbers that a program shall return, collected before it is made: `of` returns a number's place."""

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
