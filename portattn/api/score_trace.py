"""Traces of score_mod and mask_mod: programs (kernels/score_program.py) of functions of FlexAttention's signatures.

A function is called once with tensors without data; the operations that it runs are the program.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portattn.errors import ArgumentError
from portattn.kernels import score_program
from portattn.kernels.score_program import INPUTS, Node, ScoreProgram
from portattn.reference.score_functions import MADE_OF, divide_to_zero, evaluate, on_rows, power

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
_KEPT = frozenset({"alias", "detach", "clone", "lift_fresh"})  # of a captured tensor these keep every element's place
_SHARED = _VIEWS - {"clone", "lift_fresh"} | {"select"}
_SAME_NUMBERS = _VIEWS | {"index", "select"}
_NARROW = frozenset({torch.int8, torch.uint8, torch.int16})
_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal")
_ROUNDED = {torch.float16: "half", torch.bfloat16: "bfloat16"}
MOST_ELEMENTS = 16  # of a row, each of which is a load
_FILLED = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0, "zeros": 0.0, "ones": 1.0}
_INTEGERS = {"i": 32, "l": 64}  # bits of kinds
_DTYPES = {"f": torch.float32, "i": torch.int32, "l": torch.int64, "b": torch.bool}


class _Refusal(Exception):
    """A function that cannot be traced: why, and the line of its source."""


class _Indexed:
    """A captured tensor with its first indices."""

    def __init__(self, number: int, indices: tuple[str, ...], detached: bool = False) -> None:
        self.number, self.indices, self.detached = number, indices, detached


_Word = str | _Indexed | tuple[str, ...]  # the last of a row of numbers


class _Recorder(TorchDispatchMode):
    """Records the operations that a function runs on tensors without data."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.code = code
        self.nodes: list[Node] = []
        self.words: dict[int, _Word] = {}  # of tensors by their id
        self.kinds: dict[str, str] = {}
        self.alive: list[torch.Tensor] = []  # so that no id is used twice
        self.captured: list[torch.Tensor] = []
        self.nonnegative = {"b", "h", "q_idx", "kv_idx"}
        self.views: set[int] = set()  # tensors that share another's memory

    def place(self) -> str:
        """Return file and line of the traced function that is being executed."""
        frame, found = sys._getframe(1), None
        while frame is not None and frame.f_code is not trace.__code__:
            if frame.f_code is self.code or (found is None and not frame.f_code.co_filename.startswith((_TORCH, _OWN))):
                found = frame
            frame = frame.f_back  # type: ignore[assignment]
        code = self.code if found is None else found.f_code
        line = getattr(code, "co_firstlineno", 0) if found is None else found.f_lineno
        return f"{os.path.basename(getattr(code, 'co_filename', '?'))}:{line}"

    def refuse(self, why: str) -> _Refusal:
        return _Refusal(f"{self.place()}: {why}")

    def emit(self, op: str, kind: str, *operands: str) -> str:
        name = f"t{len(self.nodes)}"
        if all(score_program.literal(word) is not None for word in operands):  # Triton's functions take no number
            with torch._C._DisableTorchDispatch():
                inputs = {"score": torch.zeros((), dtype=torch.float64), "q_idx": torch.zeros((), dtype=torch.int32)}
                text = str(ScoreProgram({}, (Node("t0", kind, op, operands),), "t0"))
                return _number(evaluate(text, inputs, {}).item())
        self.nodes.append(Node(name, kind, op, operands))
        self.kinds[name] = kind
        return name

    def bind(self, tensor: torch.Tensor, word: _Word) -> torch.Tensor:
        self.words[id(tensor)] = word
        self.alive.append(tensor)
        return tensor

    def word(self, value: Any, kind: str | None = None) -> str:
        """Return the operand for a tensor or a number, cast to a kind."""
        found: Any = None
        if isinstance(value, torch.Tensor):
            found = self.words.get(id(value)) or self.capture(value)
            if isinstance(found, _Indexed):
                found = self.load(found)
        elif isinstance(value, (bool, int, float)):
            found = _number(value)
        if not isinstance(found, str):
            raise self.refuse(f"a {type(value).__name__} is no operand of a score")
        return found if kind is None else self.cast(found, kind)

    def kind_of(self, word: str, value: Any = None) -> str:
        """Return the kind of an operand. value: its tensor, whose dtype is a constant's kind."""
        number = score_program.literal(word)
        if number is not None:
            if isinstance(value, torch.Tensor):
                return self._kind_of_dtype(value.dtype)
            return score_program.KINDS_OF_NUMBERS[type(number)]
        return "f" if word == "score" else self.kinds.get(word, "i")

    def cast(self, word: str, kind: str) -> str:
        own, number = self.kind_of(word), score_program.literal(word)
        if own == kind and (number is None or kind not in _INTEGERS):
            return word
        if number is not None:
            return self.constant({"f": float, "i": int, "l": int, "b": bool}[kind](number), kind)
        return self.emit(f"to_{kind}", kind, word)

    def constant(self, number: float, kind: str) -> str:
        """Return the operand of a number. Raise _Refusal if the kernel's integers do not hold it: torch's wrap."""
        if kind in _INTEGERS and not -(2 ** (_INTEGERS[kind] - 1)) <= number < 2 ** (_INTEGERS[kind] - 1):
            hint = " (hint: q_idx.long())" if kind == "i" else ""
            raise self.refuse(f"the constant {number} does not fit int{_INTEGERS[kind]}{hint}")
        return _number(number)

    def capture(self, tensor: torch.Tensor) -> _Indexed:
        if tensor.ndim == 0 and tensor.is_meta:  # made of a score, as by new_tensor
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
        word = self.emit("load", kind, f"c{found.number}", *found.indices)
        return self.emit("detach", kind, word) if found.detached and kind == "f" else word

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        name, kwargs = name.partition(".")[0], kwargs or {}
        if space not in ("aten", "prims") and name != "tanh":  # attention-gym has a tanh of its own
            raise self.refuse(f"{func} is no operation of torch's own")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or func._schema.is_mutable:
            if not in_place or not isinstance(self.words.get(id(args[0])), str) or id(args[0]) in self.views:
                raise self.refuse(f"{name} writes to a tensor that the function has not made")
            name = name[:-1]
        found = self.plain(name, func, args, kwargs)
        if found is None and any(isinstance(each, torch.Tensor) and each.ndim for each in args):
            indexed = name in _VIEWS or name in ("index", "select")
            if not indexed or isinstance(self.words.get(id(args[0])), tuple):
                return self.unrolled(name, func, args, kwargs)
        if found is None:
            found = self.record(name, func, args, kwargs)
        if isinstance(found, torch.Tensor) or not isinstance(found[0], str):
            return found
        word, dtype = self.wrapped(name, func, args, kwargs, *found)
        if in_place:
            self.words[id(args[0])] = word
            return args[0]
        made = self.fresh(word, dtype)
        if name in _SHARED:
            self.views.add(id(made))
        return made

    def wrapped(
        self, name: str, func: Any, args: Any, kwargs: Any, word: str, kind: str
    ) -> tuple[str, torch.dtype]:  # fmt: skip
        """Return an operand and its dtype in torch; numbers of 8 or 16 bits wrap, as torch's do."""
        given = [each.dtype for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        if kind != "i" or not _NARROW & {kwargs.get("dtype"), *given}:
            return word, _DTYPES[kind]
        if name in _SAME_NUMBERS:
            return word, given[0]
        with torch._C._DisableTorchDispatch():
            dtype = given[0] if func._schema.is_mutable else func(*args, **kwargs).dtype
        if dtype in _NARROW and name not in ("where", "minimum", "maximum"):
            least, bits = str(torch.iinfo(dtype).min), str((1 << 8 * dtype.itemsize) - 1)
            word = self.emit("add", kind, self.emit("and", kind, self.emit("sub", kind, word, least), bits), least)
        return word, dtype

    def fresh(self, word: _Word, dtype: torch.dtype, shape: Sequence[int] = ()) -> torch.Tensor:
        """Return a tensor without data that stands for an operand."""
        with torch._C._DisableTorchDispatch():
            return self.bind(torch.empty(shape, dtype=dtype, device="meta"), word)

    def elements(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return a row's numbers, tensors without axes."""
        found = self.words.get(id(row))
        if isinstance(found, tuple):
            return [self.fresh(word, row.dtype) for word in found]
        if row.ndim > 1 or row.numel() > MOST_ELEMENTS:
            shape = self.captured[found.number].shape if isinstance(found, _Indexed) else row.shape
            limit = f"needs an index for each axis, but for a last one of at most {MOST_ELEMENTS}"
            raise self.refuse(f"a captured tensor {tuple(shape)} {limit}")
        loads = [self.index(row, [place]) for place in range(row.numel())]
        return [self.fresh(word, row.dtype if kind == "i" else _DTYPES[kind]) for word, kind in loads]

    def unrolled(self, name: str, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the result of an operation on rows, element by element: a row, or the number it is reduced to."""
        rows = {id(each): self.elements(each) for each in args if isinstance(each, torch.Tensor) and each.ndim}
        count = min(map(len, rows.values()), default=0)
        if not count or any(len(row) != count for row in rows.values()):
            raise self.refuse(f"{name} of rows of {' and '.join(str(len(row)) for row in rows.values())} elements")
        with self:
            made = on_rows(name, func, args, kwargs, rows)
        if made is None:
            raise self.refuse(f"{func} is no operation on single scores, nor a sum of a row's numbers")
        if isinstance(made, torch.Tensor):
            return made
        return self.fresh(tuple(map(self.word, made)), made[0].dtype, (count,))

    def plain(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that reads no score or index, and tensors with axes; None of any other."""
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(id(each) in self.words or each.is_meta for each in given):
            return None
        if name in _READS or name in _KEPT - {"detach"} or (name == "select" and args[1] == 0):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.refuse(f"{name} draws random numbers")
        if name != "detach" and any(each.requires_grad and each.ndim for each in given):
            why = "a captured tensor with gradients is used before it has an index for each axis"
            raise self.refuse(f"{why} ({name}): compute with it outside of the function")
        if given and not any(each.ndim for each in given):
            return None
        made = func(*args, **kwargs)
        return made if given or made.ndim else None

    def record(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return (operand, kind) of an operation's result, or a tensor if it needs no node."""
        if name in _READS:
            raise self.refuse("the value of a tensor decides what is computed (hint: torch.where)")
        if name in _VIEWS:
            if name == "lift_fresh":  # torch.tensor(number)
                value = args[0]
                return (_number(value.item()), self._kind_of_dtype(value.dtype)) if value.ndim == 0 else value
            word: Any = self.words.get(id(args[0])) or self.capture(args[0])
            if isinstance(word, _Indexed):
                if name not in _KEPT:
                    raise self.refuse(f"{name} of a captured tensor that has an index for some axes alone")
                word = _Indexed(word.number, word.indices, word.detached or name == "detach")
                return self.fresh(word, args[0].dtype, args[0].shape)
            kind = self.kind_of(word, args[0])
            return self.emit("detach", kind, word) if name == "detach" and kind == "f" else word, kind
        if name in _FILLED or name in ("full", "full_like", "new_full", "scalar_tensor"):
            value = _FILLED.get(name, args[0] if name == "scalar_tensor" else args[-1])
            like = args[0] if args and isinstance(args[0], torch.Tensor) else None
            dtype = kwargs.get("dtype") or (like.dtype if like is not None else None)
            kind = self._kind_of_dtype(dtype) if dtype else {bool: "b", int: "l", float: "f"}[type(value)]
            return self.cast(_number(value), kind), kind
        if name == "index":
            return self.index(args[0], args[1])
        if name == "select":
            if args[1] != 0:
                raise self.refuse("an axis other than the first is indexed")
            return self.index(args[0], [args[2]])
        if name in ("_to_copy", "to"):
            given = [each for each in args[1:] if isinstance(each, torch.dtype)]
            dtype = kwargs.get("dtype") or (given[0] if given else None)
            word = self.word(args[0])
            kind = self._kind_of_dtype(dtype) if dtype else self.kind_of(word, args[0])
            word = self.cast(word, kind)
            return self.emit(_ROUNDED[dtype], kind, word) if dtype in _ROUNDED else word, kind
        if name in ("copy", "fill"):
            kind = self.kind_of(self.word(args[0]), args[0])
            return self.word(args[1], kind), kind
        if name == "pow":
            number = score_program.literal(self.word(args[1]))
            with self:
                made = power(args[0], args[1] if number is None else number)
            if made is None:
                raise self.refuse("a power needs a number as its exponent, or a number above 0 as its base")
            return made
        if name in ("reciprocal", "rsub"):
            words = (1.0 if name == "reciprocal" else args[1], args[0])
            return self.operation("div" if name == "reciprocal" else "sub", words, kwargs)
        op = name if name in _SAME else _OTHER.get(name)
        if op in (*_BITS, "not"):
            return self.bits(name, op, args)
        if op is not None:
            return self.operation(op, args, kwargs)
        decomposed = MADE_OF.get(name) or _decompositions().get(func)
        if decomposed is None:
            raise self.refuse(f"{func} is no operation on single scores")
        with self:
            return decomposed(*args, **kwargs)

    def _kind_of_dtype(self, dtype: torch.dtype) -> str:
        kind = "f" if dtype.is_floating_point else _KINDS.get(dtype)
        if kind is None:
            raise self.refuse(f"{dtype} is no dtype of scores, indices or masks")
        return kind

    def operation(self, op: str, args: Any, kwargs: Any) -> tuple[str, str]:
        if kwargs.get("rounding_mode") == "floor":
            op = "floordiv"
        elif kwargs.get("rounding_mode") == "trunc":
            with self:
                return (word := self.word(made := divide_to_zero(*args))), self.kind_of(word, made)
        if op in ("add", "sub") and kwargs.get("alpha", 1) != 1:
            args = (args[0], self.tensor("mul", args[1], kwargs["alpha"]))
        words = [self.word(value) for value in args]
        if op == "where":
            kind = self.promoted(args[1:], words[1:])
            return self.emit(op, kind, self.cast(words[0], "b"), *(self.cast(word, kind) for word in words[1:])), kind
        kind = self.promoted(args, words)
        if op in _FLOATING:
            kind = "f"
        words = [self.cast(word, kind) for word in words]
        if op in ("floordiv", "mod"):
            return self.division(op, kind, words), kind
        kind = "b" if op in _BOOLS else kind
        name = self.emit(op, kind, *words)
        if op in ("add", "mul", "minimum", "maximum") and all(map(self.is_nonnegative, words)):
            self.nonnegative.add(name)
        return name, kind

    def bits(self, name: str, op: str, args: Any) -> tuple[str, str]:
        """Return the result of a logical operation, which takes any numbers as bools, or one on each bit."""
        words = [self.word(value) for value in args]
        kind = "b" if name.startswith("logical") else self.promoted(args, words)
        if kind == "f":
            raise self.refuse(f"{name} takes no floating-point number")
        if op == "not" and kind != "b":
            op, words = "xor", [*words, "-1"]
        return self.emit(op, kind, *(self.cast(word, kind) for word in words)), kind

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

    def promoted(self, values: Sequence[Any], words: Sequence[str]) -> str:
        """Return the kind of an operation's result: torch's rule, by which a number changes no wider tensor."""
        pairs = [(value, self.kind_of(word, value)) for value, word in zip(values, words, strict=True)]
        kinds, tensors = {kind for _, kind in pairs}, {kind for value, kind in pairs if isinstance(value, torch.Tensor)}
        if "f" in kinds:
            return "f"
        if "l" in tensors or not tensors:
            return "l" if "l" in tensors else max(kinds, key="bil".index)
        return "i" if "i" in kinds else "b"

    def tensor(self, op: str, *args: Any) -> torch.Tensor:
        """Return the result of an operation as a tensor that later operations take."""
        word, kind = self.operation(op, args, {})
        return self.fresh(word, _DTYPES[kind])

    def index(self, tensor: torch.Tensor, indices: Any) -> Any:
        found = self.words.get(id(tensor))
        if found is None:
            found = self.capture(tensor)
        if not isinstance(found, _Indexed):
            raise self.refuse("a score is indexed")
        words = []
        for index in indices:
            if index is None or index is Ellipsis or isinstance(index, slice):
                raise self.refuse("a captured tensor is sliced: give an index for each axis")
            word = self.word(index)
            if self.kind_of(word) in ("f", "b"):
                raise self.refuse("an index is no integer")
            words.append(word)
        whole = _Indexed(found.number, (*found.indices, *words), found.detached)
        captured = self.captured[found.number]
        if len(whole.indices) == captured.ndim:
            word = self.load(whole)
            return word, self.kind_of(word)
        if len(whole.indices) > captured.ndim:
            raise self.refuse(f"a captured tensor {tuple(captured.shape)} has {len(whole.indices)} indices")
        return self.fresh(whole, captured.dtype, captured.shape[len(whole.indices) :])


class _Indexing(TorchFunctionMode):
    """Takes tensors as indices: torch would read a single integer's value."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):  # of no trace that is cached
            raise self.recorder.refuse("the value of a tensor decides what is computed (hint: torch.where)")
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            indices = list(index) if isinstance(index, tuple) else [index]
            if any(isinstance(each, torch.Tensor) for each in indices):
                found = self.recorder.index(tensor, indices)
                if isinstance(found, torch.Tensor):
                    return found
                return self.recorder.fresh(found[0], tensor.dtype if found[1] == "i" else _DTYPES[found[1]])
        if func is torch._C._set_grad_enabled:  # torch.export would put it into its graph
            with torch._C.DisableTorchFunction():
                return func(*args)
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())


def _number(value: Any) -> str:
    return repr(float(value)) if isinstance(value, float) else repr(value)


_EXPORTED = DispatchKeySet(DispatchKey.PreDispatch)  # where torch.export records operations
_TORCH = os.path.dirname(torch.__file__)
_OWN = os.path.abspath(__file__)


def trace(op: str, name: str, function: Any) -> tuple[ScoreProgram, list[torch.Tensor]]:
    """Return the program of a function, and the tensors that it captures, numbered from 0.

    Raise ArgumentError if it has no program."""
    scores = name == "score_mod"
    inputs = INPUTS if scores else INPUTS[1:]
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    recorder = _Recorder(getattr(inner, "__code__", getattr(type(inner).__dict__.get("__call__"), "__code__", None)))
    shown = getattr(inner, "__qualname__", type(inner).__name__)
    try:
        outside = temporarily_clear_interpreter_stack(), _ExcludeDispatchKeyGuard(_EXPORTED)
        with outside[0], outside[1], _Indexing(recorder), torch.no_grad(), recorder:
            given = [recorder.fresh(word, torch.float32 if word == "score" else torch.int32) for word in inputs]
            result = function(*given)
        if isinstance(result, (list, tuple, dict, str)) or result is None:
            raise _Refusal(f"{recorder.place()}: it returns a {type(result).__name__}")
        if isinstance(result, torch.Tensor) and result.ndim:
            raise _Refusal(f"{recorder.place()}: it returns a tensor {tuple(result.shape)}, and no single score")
        word = recorder.word(result)
    except _Refusal as error:
        raise ArgumentError(op, name, shown, f"must be made of operations on single scores; {error}") from None
    except (RuntimeError, IndexError) as error:
        if "meta" not in str(error) and "0-dim" not in str(error):
            raise
        limit = f"must not decide by a tensor's value; {recorder.place()}: {str(error).splitlines()[0]}"
        raise ArgumentError(op, name, shown, limit + " (hint: torch.where)") from error
    kind = recorder.kind_of(word, result)
    wanted = "f" if scores else "b"
    if kind != wanted:
        returned = {"f": "a float", "i": "an int32", "l": "an int64", "b": "a bool"}
        limit = f"must return {'a floating-point score' if wanted == 'f' else 'a bool'}; it returns {returned[kind]}"
        raise ArgumentError(op, name, shown, f"{limit} ({recorder.place()})")
    first, captures = 0, {}
    for number, tensor in enumerate(recorder.captured):
        captures[number] = ("f" if tensor.is_floating_point() else _KINDS[tensor.dtype], tensor.ndim, first)
        first += tensor.ndim
    return ScoreProgram(captures, tuple(recorder.nodes), word), recorder.captured
