"""score_mod and mask_mod: functions of FlexAttention's signatures, traced into programs (kernels/score_program.py).

A function is called once with tensors without data; the operations that it runs are the program. The trace is cached
by the function's code, the values that it reads, and the shapes of its tensors: the next call with other tensors of
these shapes traces nothing, and neither does a new lambda with the same code.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from portattn.api.transform_checks import leave_out, left_out
from portattn.errors import ArgumentError
from portattn.kernels import score_program
from portattn.kernels.score_program import CAPTURES, INPUTS, SIZES, Node, Program
from portattn.reference.score_functions import block_marks as marks_of
from portattn.schema.ops import CAPTURED

Captured = tuple[torch.Tensor | None, ...]
_aten = torch.ops.aten
BLOCK = 128  # queries, and keys, of a block whose mask is looked at
_MOST_TRACES, _MOST_MARKS = 512, 32
_KINDS = {torch.bool: "b", torch.int8: "i", torch.uint8: "i", torch.int16: "i", torch.int32: "i", torch.int64: "l"}

_SAME = ("add", "sub", "mul", "div", "neg", "abs", "minimum", "maximum", "exp", "exp2", "log", "log2", "sqrt", "sin",
         "cos", "tanh", "sigmoid", "erf", "floor", "ceil", "where", "eq", "ne", "lt", "le", "gt", "ge")  # fmt: skip
# aten's names of operations whose program's operation has another name.
_OTHER = {
    "logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "not", "bitwise_and": "and",
    "bitwise_or": "or", "bitwise_xor": "xor", "__and__": "and", "__or__": "or", "__xor__": "xor",
    "bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift", "__lshift__": "lshift", "__rshift__": "rshift",
    "bitwise_not": "not", "remainder": "mod", "floor_divide": "floordiv",
}  # fmt: skip
_FLOATING = frozenset({"div", "exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "tanh", "sigmoid", "erf"})
_BOOLS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "not"})
_BITS = frozenset({"and", "or", "xor"})
_VIEWS = frozenset({"alias", "detach", "view", "expand", "squeeze", "unsqueeze", "clone", "lift_fresh", "_unsafe_view",
                    "reshape"})  # fmt: skip
_FILLED = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0, "zeros": 0.0, "ones": 1.0}


_DTYPES = {"f": torch.float32, "i": torch.int32, "l": torch.int64, "b": torch.bool}


class _Refusal(Exception):
    """A function that cannot be traced: why, and the line of its source."""


class _Indexed:
    """A captured tensor with its first indices."""

    def __init__(self, number: int, indices: tuple[str, ...]) -> None:
        self.number, self.indices = number, indices


class _Recorder(TorchDispatchMode):
    """Records the operations that a function runs on tensors without data."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.code, self.nodes = code, []
        self.words: dict[int, str | _Indexed] = {}  # of tensors by their id
        self.kinds: dict[str, str] = {}
        self.alive: list[torch.Tensor] = []  # so that no id is used twice
        self.captured: list[torch.Tensor] = []
        self.nonnegative = {"b", "h", "q_idx", "kv_idx"}

    def place(self) -> str:
        """Return file and line of the traced function that is being executed."""
        frame, found = sys._getframe(1), None
        while frame is not None:
            if frame.f_code is self.code:
                found = frame
            elif found is None and not frame.f_code.co_filename.startswith((_TORCH, _OWN)):
                found = frame
            frame = frame.f_back  # type: ignore[assignment]
        code = self.code if found is None else found.f_code
        line = getattr(code, "co_firstlineno", 0) if found is None else found.f_lineno
        return f"{os.path.basename(getattr(code, 'co_filename', '?'))}:{line}"

    def refuse(self, why: str) -> _Refusal:
        return _Refusal(f"{self.place()}: {why}")

    def emit(self, op: str, kind: str, *operands: str) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(Node(name, kind, op, operands))
        self.kinds[name] = kind
        return name

    def bind(self, tensor: torch.Tensor, word: str | _Indexed) -> torch.Tensor:
        self.words[id(tensor)] = word
        self.alive.append(tensor)
        return tensor

    def word(self, value: Any, kind: str | None = None) -> str:
        """Return the operand for a tensor or a number, cast to a kind."""
        if isinstance(value, torch.Tensor):
            found = self.words.get(id(value))
            if found is None:
                found = self.capture(value)
            if isinstance(found, _Indexed):
                found = self.load(found)
        elif isinstance(value, (bool, int, float)):
            found = _number(value)
        else:
            raise self.refuse(f"a {type(value).__name__} is no operand of a score")
        return found if kind is None else self.cast(found, kind)

    def kind_of(self, word: str) -> str:
        number = score_program.literal(word)
        if number is not None:
            return score_program.KINDS_OF_NUMBERS[type(number)]
        return "f" if word == "score" else self.kinds.get(word, "i")

    def cast(self, word: str, kind: str) -> str:
        own, number = self.kind_of(word), score_program.literal(word)
        if own == kind or (number is not None and {own, kind} == {"i", "l"}):
            return word
        if number is not None:
            return _number({"f": float, "i": int, "l": int, "b": bool}[kind](number))
        return self.emit(f"to_{kind}", kind, word)

    def capture(self, tensor: torch.Tensor) -> _Indexed:
        if tensor.ndim == 0 and tensor.device.type == "cpu" and tensor.is_meta:
            raise self.refuse("a tensor without data is read")
        for number, known in enumerate(self.captured):
            if known is tensor:
                return _Indexed(number, ())
        if tensor.ndim > 4:
            raise self.refuse(f"a captured tensor has {tensor.ndim} axes, and may have 4")
        self.captured.append(tensor)
        return _Indexed(len(self.captured) - 1, ())

    def load(self, found: _Indexed) -> str:
        tensor = self.captured[found.number]
        if len(found.indices) != tensor.ndim:
            raise self.refuse(f"a captured tensor {tuple(tensor.shape)} needs an index for each axis")
        kind = "f" if tensor.is_floating_point() else _KINDS.get(tensor.dtype)
        if kind is None:
            raise self.refuse(f"a captured tensor is {tensor.dtype}")
        return self.emit("load", kind, f"c{found.number}", *found.indices)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        kwargs = kwargs or {}
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place:
            if id(args[0]) not in self.words or isinstance(self.words[id(args[0])], _Indexed):
                raise self.refuse(f"{name} writes to a tensor that it does not own")
            name = name[:-1]
        found = self.record(name, func, args, kwargs)
        if isinstance(found, torch.Tensor):
            return found
        word, kind = found
        if in_place:
            self.words[id(args[0])] = word
            return args[0]
        return self.fresh(word, _DTYPES[kind])

    def fresh(self, word: str | _Indexed, dtype: torch.dtype, shape: Sequence[int] = ()) -> torch.Tensor:
        """Return a tensor without data that stands for an operand."""
        with torch._C._DisableTorchDispatch():
            return self.bind(torch.empty(shape, dtype=dtype, device="meta"), word)

    def record(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return (operand, kind) of an operation's result, or a tensor if it needs no node."""
        if name in ("_local_scalar_dense", "item", "is_nonzero", "equal"):
            raise self.refuse("the value of a tensor decides what is computed (hint: torch.where)")
        if name in _VIEWS:
            if name == "lift_fresh":  # torch.tensor(number)
                value = args[0]
                return (_number(value.item()), self._kind_of_dtype(value.dtype)) if value.ndim == 0 else value
            word = self.words.get(id(args[0]))
            if word is None:
                word = self.capture(args[0])
            if isinstance(word, _Indexed):
                return self.fresh(word, args[0].dtype, args[0].shape)
            return word, self.kind_of(word)
        if name in _FILLED or name in ("full", "full_like", "new_full", "scalar_tensor"):
            value = _FILLED.get(name, args[0] if name == "scalar_tensor" else args[-1])
            like = args[0] if args and isinstance(args[0], torch.Tensor) else None
            dtype = kwargs.get("dtype") or (like.dtype if like is not None else None)
            kind = self._kind_of_dtype(dtype) if dtype else score_program.KINDS_OF_NUMBERS[type(value)]
            return self.cast(_number(value), kind), kind
        if name == "index":
            return self.index(args[0], args[1])
        if name == "select":
            return self.index(args[0], [args[2]] if args[1] == 0 else self._refuse_axis())
        if name == "_to_copy":
            dtype = kwargs.get("dtype")
            word = self.word(args[0])
            kind = self._kind_of_dtype(dtype) if dtype else self.kind_of(word)
            return self.cast(word, kind), kind
        if name == "pow":
            return self.power(args[0], args[1])
        if name in ("square", "reciprocal", "rsqrt", "relu", "sign", "clamp", "clamp_min", "clamp_max", "rsub",
                    "isneginf", "isinf", "log1p", "expm1", "trunc"):  # fmt: skip
            return self.composite(name, args, kwargs)
        op = name if name in _SAME else _OTHER.get(name)
        if op is not None:
            return self.operation(op, args, kwargs)
        decomposed = _decompositions().get(func)
        if decomposed is None:
            raise self.refuse(f"{func} is no operation on single scores")
        with self:
            return decomposed(*args, **kwargs)

    def _refuse_axis(self) -> Any:
        raise self.refuse("an axis other than the first is indexed")

    def _kind_of_dtype(self, dtype: torch.dtype) -> str:
        kind = "f" if dtype.is_floating_point else _KINDS.get(dtype)
        if kind is None:
            raise self.refuse(f"{dtype} is no dtype of scores, indices or masks")
        return kind

    def operation(self, op: str, args: Any, kwargs: Any) -> tuple[str, str]:
        if kwargs.get("rounding_mode") == "floor":
            op = "floordiv"
        elif kwargs.get("rounding_mode") is not None:
            raise self.refuse(f"division is rounded by {kwargs['rounding_mode']!r}")
        if op in ("add", "sub") and kwargs.get("alpha", 1) != 1:
            args = (args[0], self.tensor("mul", args[1], kwargs["alpha"]))
        words = [self.word(value) for value in args]
        if op == "where":
            kind = self.promoted(words[1:])
            return self.emit(op, kind, self.cast(words[0], "b"), *(self.cast(word, kind) for word in words[1:])), kind
        kind = self.promoted(words)
        if op in _FLOATING:
            kind = "f"
        elif op == "not" or (op in _BITS and kind == "f"):
            kind = "b"  # logical_and and its kin take any numbers
        words = [self.cast(word, kind) for word in words]
        if op in ("floordiv", "mod"):
            return self.division(op, kind, words), kind
        made = self.emit(op, "b" if op in _BOOLS else kind, *words)
        if op in ("add", "mul", "minimum", "maximum") and all(map(self.is_nonnegative, words)):
            self.nonnegative.add(made)
        return made, self.kinds[made]

    def division(self, op: str, kind: str, words: list[str]) -> str:
        divisor = score_program.literal(words[1])
        if kind == "f":
            return self.emit(f"float_{op}", kind, *words)
        if self.is_nonnegative(words[0]) and divisor is not None and divisor > 0:
            made = self.emit(f"positive_{op}", kind, *words)
            self.nonnegative.add(made)
            return made
        return self.emit(op, kind, *words)

    def is_nonnegative(self, word: str) -> bool:
        number = score_program.literal(word)
        return word in self.nonnegative if number is None else number >= 0

    def promoted(self, words: list[str]) -> str:
        """Return the kind of an operation's result: torch's rule, by which a number changes no wider tensor."""
        kinds = {self.kind_of(word) for word in words}
        tensors = {self.kind_of(word) for word in words if score_program.literal(word) is None}
        if "f" in kinds:
            return "f"
        if "l" in tensors or not tensors:
            return "l" if "l" in tensors else max(kinds, key="bil".index)
        return "i" if "i" in kinds else "b"

    def tensor(self, op: str, *args: Any) -> torch.Tensor:
        """Return the result of an operation as a tensor that later operations take."""
        word, kind = self.operation(op, args, {})
        return self.fresh(word, _DTYPES[kind])

    def power(self, base: Any, exponent: Any) -> tuple[str, str]:
        number = exponent if not isinstance(exponent, torch.Tensor) else score_program.literal(self.word(exponent))
        if number == 0.5:
            return self.operation("sqrt", (base,), {})
        if number is not None and number == int(number) and 1 <= abs(number) <= 8:
            made = base
            for _ in range(abs(int(number)) - 1):
                made = self.tensor("mul", made, base)
            if number < 0:
                return self.operation("div", (1.0, made), {})
            return self.operation("mul", (made, 1), {}) if made is base else (self.word(made), self.kind_of(self.word(made)))
        if isinstance(base, (int, float)) and base > 0:  # aˣ = 2^(x·log₂ a)
            import math

            return self.operation("exp2", (self.tensor("mul", exponent, math.log2(base)),), {})
        raise self.refuse("a power has an exponent that is no whole number from -8 to 8 and not 0.5")

    def composite(self, name: str, args: Any, kwargs: Any) -> tuple[str, str]:
        x, op, t = args[0], self.operation, self.tensor
        if name == "square":
            return op("mul", (x, x), {})
        if name == "reciprocal":
            return op("div", (1.0, x), {})
        if name == "rsqrt":
            return op("div", (1.0, t("sqrt", x)), {})
        if name == "relu":
            return op("maximum", (x, 0), {})
        if name == "sign":
            return op("where", (t("gt", x, 0), 1, t("where", t("lt", x, 0), -1, 0)), {})
        if name == "rsub":
            return op("sub", (args[1], x), kwargs)
        if name == "log1p":
            return op("log", (t("add", x, 1.0),), {})
        if name == "expm1":
            return op("sub", (t("exp", x), 1.0), {})
        if name == "isneginf":
            return op("eq", (x, float("-inf")), {})
        if name == "isinf":
            return op("eq", (t("abs", x), float("inf")), {})
        if name == "trunc":
            return op("where", (t("lt", x, 0), t("ceil", x), t("floor", x)), {})
        given = [*args[1:], None, None]
        low = kwargs.get("min", given[0] if name != "clamp_max" else None)
        high = kwargs.get("max", given[0] if name == "clamp_max" else given[1])
        if low is not None:
            x = t("maximum", x, low)
        if high is not None:
            x = t("minimum", x, high)
        return self.word(x), self.kind_of(self.word(x))

    def index(self, tensor: torch.Tensor, indices: Any) -> Any:
        found = self.words.get(id(tensor))
        if found is None:
            found = self.capture(tensor)
        if not isinstance(found, _Indexed):
            raise self.refuse("a score is indexed")
        words = []
        for index in indices:
            if index is None or isinstance(index, slice):
                raise self.refuse("a captured tensor is sliced: give an index for each axis")
            word = self.word(index)
            if self.kind_of(word) in ("f", "b"):
                raise self.refuse("an index is no integer")
            words.append(word)
        whole = _Indexed(found.number, (*found.indices, *words))
        captured = self.captured[found.number]
        if len(whole.indices) == captured.ndim:
            word = self.load(whole)
            return word, self.kinds[word]
        if len(whole.indices) > captured.ndim:
            raise self.refuse(f"a captured tensor {tuple(captured.shape)} has {len(whole.indices)} indices")
        return self.fresh(whole, captured.dtype, captured.shape[len(whole.indices) :])


class _Indexing(TorchFunctionMode):
    """Takes tensors as indices: torch would read a single integer's value."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            indices = list(index) if isinstance(index, tuple) else [index]
            if any(isinstance(each, torch.Tensor) for each in indices):
                found = self.recorder.index(tensor, indices)
                return found if isinstance(found, torch.Tensor) else self.recorder.fresh(found[0], _DTYPES[found[1]])
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())


def _number(value: Any) -> str:
    return repr(float(value)) if isinstance(value, float) else repr(value)


_TORCH = os.path.dirname(torch.__file__)
_OWN = os.path.abspath(__file__)
Trace = tuple[Program, list[torch.Tensor]]  # captured tensors are numbered from 0


def trace(op: str, name: str, function: Any) -> Trace:
    """Return the program of a function, and the tensors that it captures. Raise ArgumentError if it has none."""
    scores = name == "score_mod"
    inputs = INPUTS if scores else INPUTS[1:]
    if not callable(function):
        limit = f"must be a function of ({', '.join(inputs)})"
        raise ArgumentError(op, name, type(function).__name__, limit)
    _check_arity(op, name, function, inputs)
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    recorder = _Recorder(getattr(inner, "__code__", getattr(getattr(inner, "__call__", None), "__code__", None)))
    shown = getattr(inner, "__qualname__", type(inner).__name__)
    given = []
    for word in inputs:
        dtype = torch.float32 if word == "score" else torch.int32
        given.append(recorder.bind(torch.empty((), dtype=dtype, device="meta"), word))
    try:
        with torch.no_grad(), _Indexing(recorder), recorder:
            result = function(*given)
        if isinstance(result, (list, tuple, dict, str)) or result is None:
            raise _Refusal(f"{recorder.place()}: it returns a {type(result).__name__}")
        if isinstance(result, torch.Tensor) and result.ndim:
            raise _Refusal(f"{recorder.place()}: it returns a tensor {tuple(result.shape)}, and no single score")
        word = recorder.word(result)
    except _Refusal as error:
        raise ArgumentError(op, name, shown, f"must be made of operations on single scores; {error}") from None
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        limit = f"must not decide by a tensor's value; {recorder.place()}: {str(error).splitlines()[0]}"
        raise ArgumentError(op, name, shown, limit + " (hint: torch.where)") from error
    kind = recorder.kind_of(word)
    wanted = "f" if scores else "b"
    if kind != wanted:
        returned = {"f": "a float", "i": "an int32", "l": "an int64", "b": "a bool"}
        limit = f"must return {'a floating-point score' if wanted == 'f' else 'a bool'}; it returns {returned[kind]}"
        raise ArgumentError(op, name, shown, f"{limit} ({recorder.place()})")
    first, captures = 0, {}
    for number, tensor in enumerate(recorder.captured):
        captures[number] = ("f" if tensor.is_floating_point() else _KINDS[tensor.dtype], tensor.ndim, first)
        first += tensor.ndim
    return Program(captures, tuple(recorder.nodes), word), recorder.captured


def _check_arity(op: str, name: str, function: Any, inputs: tuple[str, ...]) -> None:
    try:
        inspect.signature(function).bind(*inputs)
    except TypeError:
        signature = f"({', '.join(inspect.signature(function).parameters)})"
        raise ArgumentError(op, name, signature, f"must take {len(inputs)} arguments, ({', '.join(inputs)})") from None
    except ValueError:  # no signature: a function in C
        return


class _Reading:
    """The values that a function reads, as a key, and its tensors in the order in which they were found."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.sure = True  # whether the key has all that the function may read
        self.seen: set[int] = set()

    def key(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            first = next((i for i, known in enumerate(self.tensors) if known is value), len(self.tensors))
            self.tensors.append(value)
            return "tensor", first, value.dtype, tuple(value.shape)
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            return type(value), value
        if isinstance(value, (tuple, list)):
            return type(value), tuple(self.key(each, depth) for each in value)
        if isinstance(value, functools.partial):
            rest = [(name, self.key(each, depth)) for name, each in sorted(value.keywords.items())]
            return "partial", self.key(value.func, depth), self.key(value.args, depth), tuple(rest)
        if isinstance(value, types.FunctionType):
            return self.function(value, depth + 1)
        if isinstance(value, types.MethodType):
            return "method", self.function(value.__func__, depth + 1), self.attributes(value.__self__, value.__func__)
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) or _of_torch(value):
            return "fixed", id(value)
        call = getattr(type(value), "__call__", None)
        if isinstance(call, types.FunctionType) and depth < 4:
            return "object", id(type(value)), self.function(call, depth + 1), self.attributes(value, call)
        self.sure = False
        return None

    def function(self, function: types.FunctionType, depth: int) -> Any:
        code = function.__code__
        if id(function) in self.seen:
            return "again", id(code)
        if depth > 4:
            self.sure = False
            return None
        self.seen.add(id(function))
        cells = function.__closure__ or ()
        try:
            closed = tuple(self.key(cell.cell_contents, depth) for cell in cells)
        except ValueError:  # a cell without a value
            self.sure = False
            return None
        names = tuple(_names(code))
        read = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
        known = tuple((name, self.key(value, depth)) for name, value in read)
        inside = tuple(
            (name, self.key(vars(value)[name], depth))
            for _, value in read
            if isinstance(value, types.ModuleType) and not _of_torch(value)
            for name in names
            if isinstance(vars(value).get(name), (bool, int, float, str, torch.Tensor, types.FunctionType))
        )
        return id(code), code, closed, self.key(function.__defaults__, depth), known, inside

    def attributes(self, owner: Any, function: types.FunctionType) -> Any:
        values = getattr(owner, "__dict__", None)
        if values is None:
            self.sure = False
            return None
        parts = [values, getattr(owner, "_buffers", {}), getattr(owner, "_parameters", {})]
        names = _names(function.__code__)
        return tuple((name, self.key(part[name], 3)) for part in parts for name in names if name in part)


def _of_torch(value: Any) -> bool:
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in ("torch", "math", "builtins", "_operator")


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


_lock = threading.Lock()
_traces: OrderedDict[Any, tuple[Program, tuple[int, ...]]] = OrderedDict()


def cached_trace(op: str, name: str, function: Any) -> Trace:
    """Return `trace`'s result; a function that is known by its code and values is not traced again."""
    if not callable(function):
        return trace(op, name, function)
    reading = _Reading()
    key = (name, reading.key(function))
    with _lock:
        known = _traces.get(key) if reading.sure else None
    if known is not None:
        return known[0], [reading.tensors[place] for place in known[1]]
    program, captured = trace(op, name, function)
    places = [next((i for i, each in enumerate(reading.tensors) if each is tensor), -1) for tensor in captured]
    if reading.sure and -1 not in places:
        with _lock:
            _traces[key] = program, tuple(places)
            while len(_traces) > _MOST_TRACES:
                _traces.popitem(last=False)
    return program, captured


def _with_captured(
    op: str, name: str, program: Program, own: list[torch.Tensor], before: Captured, q: torch.Tensor
) -> tuple[str, *Captured]:  # type: ignore[misc]
    """Return a program's text and the call's captured tensors, of which `before` are other programs'."""
    every = [tensor for tensor in before if tensor is not None]
    numbers = []
    for tensor in own:
        if isinstance(q, torch.Tensor) and tensor.ndim == 0 and tensor.device.type == "cpu":
            tensor = tensor.to(q.device)
        place = next((i for i, known in enumerate(every) if known is tensor), len(every))
        if place == len(every):
            every.append(tensor)
        numbers.append(place)
    axes = sum(tensor.ndim for tensor in every)
    if len(every) > CAPTURES or axes > SIZES:
        limit = f"must read, with the other function, at most {CAPTURES} tensors of {SIZES} axes together"
        raise ArgumentError(op, name, f"{len(every)} tensors of {axes} axes", limit)
    firsts = [sum(tensor.ndim for tensor in every[:place]) for place in range(len(every))]
    captures = {numbers[n]: (kind, rank, firsts[numbers[n]]) for n, (kind, rank, _) in program.captures.items()}
    nodes = tuple(
        Node(node.name, node.kind, node.op, (f"c{numbers[int(node.operands[0][1:])]}", *node.operands[1:]))
        if node.op == "load" else node
        for node in program.nodes
    )  # fmt: skip
    widened = [_storable(tensor) for tensor in every]
    text = str(Program(captures, nodes, program.result))
    return text, *widened, *[None] * (CAPTURES - len(widened))


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a captured tensor in a dtype that every compiler loads."""
    return tensor.to(torch.int32) if tensor.dtype in (torch.uint8, torch.int16) else tensor


def traced_score(score_mod: Any, q: Any) -> Any:
    """Return the program's text of score_mod, and the tensors that it reads."""
    if isinstance(score_mod, str):
        return score_mod, *[None] * CAPTURES
    return left_out["score functions"]("score_mod", score_mod, (None,) * CAPTURES, q)


def traced_mask(
    mask_mod: Any, q: Any, captured_0: Any, captured_1: Any, captured_2: Any, captured_3: Any
) -> Any:  # fmt: skip
    """Return the program's text of mask_mod, and the tensors that it and score_mod read."""
    before = (captured_0, captured_1, captured_2, captured_3)
    if isinstance(mask_mod, str):
        return mask_mod, *before
    return left_out["score functions"]("mask_mod", mask_mod, before, q)


def _traced(name: str, function: Any, before: Captured, q: Any) -> Any:
    program, own = cached_trace("attention", name, function)
    return _with_captured("attention", name, program, own, before, q)


leave_out("score functions", _traced, "portattn traces score_mod and mask_mod itself, outside the graph")

_marks: OrderedDict[Any, tuple[list[Any], torch.Tensor]] = OrderedDict()


def block_marks(
    mask_mod: str, q: Any, k: Any, layout: Any, block_mask: Any, block_size: Any, leftpad_q: Any, leftpad_k: Any,
    captured_0: Any, captured_1: Any, captured_2: Any, captured_3: Any,
) -> Any:  # fmt: skip
    """Return the marks of blocks of a mask function and the size of a block, cached by function, sizes and tensors.

    Nothing for calls that have lists of blocks, left padding (blocks count from row 0), or few scores."""
    if block_mask is not None or leftpad_q is not None or leftpad_k is not None:
        return block_mask, block_size
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.ndim == 4 and k.ndim == 4):
        return None, None  # validation raises
    axis = 1 if layout == "bshd" else 2
    sizes = (q.shape[0], q.shape[3 - axis], q.shape[axis], k.shape[axis])
    if min(sizes) == 0 or max(sizes[2:]) <= BLOCK:
        return None, None
    captured = dict(zip(CAPTURED, (captured_0, captured_1, captured_2, captured_3), strict=True))
    return left_out["block marks"](mask_mod, captured, sizes, q.device), (BLOCK, BLOCK)


def _cached_marks(text: str, captured: dict[str, Any], sizes: tuple[int, int, int, int], device: Any) -> torch.Tensor:
    tensors = [tensor for tensor in captured.values() if tensor is not None]
    program = score_program.parse(text)
    batch, heads = sizes[0] if program.uses("b") else 1, sizes[1] if program.uses("h") else 1
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_inference() for t in tensors)
    key = (text, (batch, heads, *sizes[2:]), device, tuple((id(t), t._version) for t in tensors)) if plain else None
    with _lock:
        known = _marks.get(key)
    if key is not None and known is not None and all(ref() is t for ref, t in zip(known[0], tensors, strict=True)):
        return known[1]
    with torch.no_grad():
        made = marks_of(text, captured, sizes, (BLOCK, BLOCK), device)
    if key is not None:
        with _lock:
            _marks[key] = [weakref.ref(t) for t in tensors], made
            while len(_marks) > _MOST_MARKS:
                _marks.popitem(last=False)
    return made


leave_out("block marks", _cached_marks, "portattn looks which blocks mask_mod hides outside the graph")
