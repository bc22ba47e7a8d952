"""score_mod and mask_mod as arguments of operations: programs' texts, the tensors that they read, and lists of blocks.

A trace is cached by the function's code, the values that it reads, and the shapes of its tensors: the next call with
other tensors of these shapes traces nothing, and neither does a new lambda with the same code.
"""

from __future__ import annotations

import dis
import functools
import inspect
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from portattn.api.score_trace import trace
from portattn.api.transform_checks import are_dispatched, called_while_traced, leave_out, left_out
from portattn.config import current
from portattn.errors import ArgumentError
from portattn.kernels import score_program
from portattn.kernels.score_program import CAPTURES, INPUTS, SIZES, Node, ScoreProgram, fits
from portattn.launch.torch_compat import in_mode, runtime
from portattn.reference.score_functions import block_lists, block_marks
from portattn.schema.ops import CAPTURED
from portattn.validate.features import as_window

Captured = tuple[torch.Tensor | None, ...]
BLOCK = 128  # queries, and keys, of a block whose mask is looked at
_MOST_TRACES, _MOST_LISTS = 512, 32


class _Reading:
    """The values that a function reads, as a key, and its tensors in the order in which they were found."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.tensors: list[torch.Tensor] = []
        self.sure = True  # whether the key has all that the function may read
        self.seen: dict[int, int] = {}  # numbers of functions and objects
        self.names = set(names)  # of all attributes and globals that these functions read
        self.fewest: int | None = None  # names at the first object or module, of which these attributes were read
        # The places of those values, and the values: a cell, or a namespace or a function's reference and a
        # name. None for values that can change in place.
        self.guards: list[tuple[Any, str | None, Any]] | None = []

    def key(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            first = next((i for i, known in enumerate(self.tensors) if known is value), len(self.tensors))
            self.tensors.append(value)
            return "tensor", first, value.dtype, tuple(value.shape)
        if isinstance(value, float):
            return type(value), repr(value)  # tells -0.0 from 0.0
        if value is None or isinstance(value, (bool, int, str, torch.dtype)):
            return type(value), value
        if isinstance(value, (tuple, list)):
            self.guards = None
            return type(value), tuple(self.key(each, depth) for each in value)
        if isinstance(value, functools.partial):
            self.guards = None
            rest = [(name, self.key(each, depth)) for name, each in sorted(value.keywords.items())]
            return "partial", self.key(value.func, depth), self.key(value.args, depth), tuple(rest)
        if isinstance(value, types.FunctionType):
            return self.function(value, depth + 1)
        if isinstance(value, types.MethodType) and not isinstance(value.__self__, type):
            inner: Any = value.__func__
            return "method", self.function(inner, depth + 1), self.attributes(value.__self__)
        if isinstance(value, types.ModuleType):
            return "module", id(value), () if _of_torch(value) else self.of_module(value, depth + 1)
        own = getattr(value, "__self__", None)
        # A list's or a dict's method reads what changes.
        free = isinstance(value, types.BuiltinFunctionType) and (
            own is None or isinstance(own, (type, types.ModuleType))
        )
        if free or (isinstance(value, _FIXED) and _of_torch(value)):
            return "fixed", id(value)
        call: Any = type(value).__dict__.get("__call__")
        if isinstance(call, types.FunctionType) and depth < 4:
            return "object", id(type(value)), self.function(call, depth + 1), self.attributes(value)
        self.sure = False
        return None

    def function(self, function: types.FunctionType, depth: int) -> Any:
        code = function.__code__
        if id(function) in self.seen:
            return "again", self.seen[id(function)]
        if depth > 4 or _reads_elsewhere(code):
            self.sure = False
            return None
        self.seen[id(function)] = len(self.seen)
        cells = function.__closure__ or ()
        try:
            contents = [cell.cell_contents for cell in cells]
        except ValueError:  # a cell without a value
            self.sure = False
            return None
        names = tuple(_names(code))
        self.names.update(names)
        closed = tuple(self._guarded(cell, None, value, depth) for cell, value in zip(cells, contents, strict=True))
        read = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
        known = tuple((name, self._guarded(function.__globals__, name, value, depth)) for name, value in read)
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items(), *vars(function).items())
        defaults = tuple(self.key(value, depth) for value in given)  # a pair of name and value has no guard
        if self.guards is not None:
            owner = weakref.ref(function)  # by which _known would keep it alive
            self.guards += [(owner, name, getattr(function, name)) for name in ("__code__", "__defaults__")]
        return id(code), code, closed, defaults, known

    def of_module(self, module: types.ModuleType, depth: int) -> Any:
        """Return the key of the names that functions read of a module of the caller's."""
        self.fewest = len(self.names) if self.fewest is None else self.fewest
        if depth > 4:
            self.sure = False
            return None
        found = [(name, vars(module)[name]) for name in sorted(self.names) if name in vars(module)]
        return tuple((name, self._guarded(vars(module), name, value, depth)) for name, value in found)

    def _guarded(self, where: Any, name: str | None, value: Any, depth: int) -> Any:
        if self.guards is not None:
            self.guards.append((where, name, value))
        return self.key(value, depth)

    def attributes(self, owner: Any) -> Any:
        """Return the key of the attributes that functions read of an object: its own, or methods of its class."""
        self.guards = None
        if id(owner) in self.seen:
            return "again", self.seen[id(owner)]
        values, kind = getattr(owner, "__dict__", None), type(owner)
        computed = inspect.getattr_static(kind, "__getattr__", None)
        if values is None or not (computed is None or _of_torch(computed)):
            self.sure = False
            return None
        self.seen[id(owner)] = len(self.seen)
        self.fewest = len(self.names) if self.fewest is None else self.fewest
        parts = [values, *(values.get(part, {}) for part in ("_buffers", "_parameters", "_modules"))]
        found: list[Any] = []
        seen: set[str] = set()
        while rest := sorted(self.names - seen):  # a method reads further names
            seen.update(rest)
            found += [(name, self.key(part[name], 3)) for name in rest for part in parts if name in part]
            for name in rest:
                inherited = None if name in values else inspect.getattr_static(kind, name, None)
                if inherited is not None and not _of_torch(inherited):
                    found.append((name, self.key(inherited, 2)))  # of a property: not sure
        return tuple(found)


_BY_TEXT = frozenset({"getattr", "globals", "vars", "eval", "__dict__"})  # they take a name as a text
_FIXED = (type, types.ModuleType, type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor), torch.device)


def _of_torch(value: Any) -> bool:
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in ("torch", "math", "builtins", "_operator")


@functools.lru_cache(maxsize=_MOST_TRACES)
def _reads_elsewhere(code: types.CodeType) -> bool:
    """Return whether a function imports modules other than torch and math, or reads names that its code lacks."""
    names = (step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    others = any(name.partition(".")[0] not in ("torch", "math") for name in names)
    return others or not _BY_TEXT.isdisjoint(code.co_names) or any(map(_reads_elsewhere, inner))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


_lock = threading.Lock()
_traces: OrderedDict[Any, tuple[str, tuple[int, ...]]] = OrderedDict()


class _Known(NamedTuple):
    """A function's trace, which holds as long as its guards do."""

    guards: list[tuple[Any, str | None, Any]]
    shapes: list[tuple[torch.Tensor, torch.Size, torch.dtype]]
    text: str
    captured: list[torch.Tensor]

    def holds(self) -> bool:
        for where, name, value in self.guards:
            if name is None:
                found = where.cell_contents
            else:
                found = where.get(name) if type(where) is dict else getattr(where(), name, None)
            if found is not value:
                return False
        return all(tensor.shape == shape and tensor.dtype == dtype for tensor, shape, dtype in self.shapes)


# By the function; then by the argument that it is given as.
_known: weakref.WeakKeyDictionary[Any, dict[str, _Known]] = weakref.WeakKeyDictionary()


def cached_trace(op: str, name: str, function: Any) -> tuple[str, list[torch.Tensor]]:
    """Return the text of `trace`'s program, and the captured tensors.

    A function is not traced again if its values are what they were; nor is one with the same code and equal values."""
    if type(function) is types.FunctionType:
        known = _known.get(function, {}).get(name)
        if known is not None and known.holds():
            return known.text, known.captured
    reading, key = _read(function)
    text, captured = _by_values(op, name, function, reading, key)
    # A tensor that the function computes has other numbers as soon as its own tensors have.
    read = all(any(tensor is each for each in reading.tensors) for tensor in captured)
    if type(function) is types.FunctionType and reading.sure and reading.guards is not None and read:
        shapes = [(tensor, tensor.shape, tensor.dtype) for tensor in reading.tensors]
        _known.setdefault(function, {})[name] = _Known(reading.guards, shapes, text, captured)
    return text, captured


def _read(function: Any) -> tuple[_Reading, Any]:
    """Return the reading of a function, whose objects were read by the names of all functions, and the key."""
    names: set[str] = set()
    while True:
        reading = _Reading(names)
        key, names = reading.key(function), reading.names
        if reading.fewest in (None, len(names)):
            return reading, key


def _by_values(op: str, name: str, function: Any, reading: _Reading, key: Any) -> tuple[str, list[torch.Tensor]]:
    key = (name, key)
    with _lock:
        known = _traces.get(key) if reading.sure else None
    if known is not None:
        return known[0], [reading.tensors[place] for place in known[1]]
    _check_arguments(op, name, function)
    program, captured = trace(op, name, function)
    places = [next((i for i, each in enumerate(reading.tensors) if each is tensor), -1) for tensor in captured]
    if reading.sure and -1 not in places:
        with _lock:
            _traces[key] = str(program), tuple(places)
            while len(_traces) > _MOST_TRACES:
                _traces.popitem(last=False)
    return str(program), captured


def _check_arguments(op: str, name: str, function: Any) -> None:
    inputs = INPUTS if name == "score_mod" else INPUTS[1:]
    if not callable(function):
        limit = f"must be a function of ({', '.join(inputs)})"
        raise ArgumentError(op, name, type(function).__name__, limit)
    try:
        inspect.signature(function).bind(*inputs)
    except TypeError:
        signature = f"({', '.join(inspect.signature(function).parameters)})"
        raise ArgumentError(op, name, signature, f"must take {len(inputs)} arguments, ({', '.join(inputs)})") from None
    except ValueError:  # no signature: a function in C
        return


def _with_captured(
    op: str, name: str, text: str, own: list[torch.Tensor], before: Captured, q: torch.Tensor
) -> tuple[Any, ...]:
    """Return a program's text and the call's captured tensors, of which `before` are other programs'."""
    if not own:
        return text, *before
    every = [tensor for tensor in before if tensor is not None]
    numbers = []
    for tensor in own:
        if isinstance(q, torch.Tensor) and tensor.ndim == 0 and tensor.device.type == "cpu":
            tensor = tensor.to(q.device)
        if isinstance(q, torch.Tensor) and tensor.device != q.device:
            read = f"a function that reads a tensor {tuple(tensor.shape)} on {tensor.device}"
            raise ArgumentError(op, name, read, f"must read tensors on q's device, {q.device}")
        place = next((i for i, known in enumerate(every) if known is tensor), len(every))
        if place == len(every):
            every.append(tensor)
        numbers.append(place)
    axes = [tensor.ndim for tensor in every]
    if not fits(axes):
        limit = f"must read, with the other function, at most {CAPTURES} tensors of {SIZES} axes together"
        raise ArgumentError(op, name, f"{len(every)} tensors of {sum(axes)} axes", limit)
    widened = [_storable(tensor) for tensor in every]
    text = _renumbered(text, tuple(numbers), tuple(axes))
    return text, *widened, *[None] * (CAPTURES - len(widened))


@functools.lru_cache(maxsize=_MOST_TRACES)
def _renumbered(text: str, numbers: tuple[int, ...], ranks: tuple[int, ...]) -> str:
    """Return a program's text with these numbers for its captured tensors, of a call's with these ranks."""
    program = score_program.parse(text)
    captures = {numbers[n]: (kind, rank, sum(ranks[: numbers[n]])) for n, (kind, rank, _) in program.captures.items()}
    nodes = tuple(
        Node(node.name, node.kind, node.op, (f"c{numbers[int(node.operands[0][1:])]}", *node.operands[1:]))
        if node.op == "load" else node
        for node in program.nodes
    )  # fmt: skip
    return str(ScoreProgram(captures, nodes, program.result))


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a captured tensor in a dtype that every compiler loads."""
    return tensor.to(torch.int32) if tensor.dtype in (torch.uint8, torch.int16) else tensor


def traced_score_mod(op: str, score_mod: Any, q: Any) -> Any:
    """Return the program's text of score_mod, and the tensors that it reads."""
    if isinstance(score_mod, str):
        return score_mod, *[None] * CAPTURES
    text, *captured = _traced_outside(op, "score_mod", score_mod, (None,) * CAPTURES, q)
    return None if text == "out score" else text, *captured


def traced_mask_mod(
    op: str, mask_mod: Any, q: Any, captured_0: Any, captured_1: Any, captured_2: Any, captured_3: Any
) -> Any:  # fmt: skip
    """Return the program's text of mask_mod, and the tensors that it and score_mod read."""
    before = (captured_0, captured_1, captured_2, captured_3)
    if isinstance(mask_mod, str):
        return mask_mod, *before
    return _traced_outside(op, "mask_mod", mask_mod, before, q)


def _traced_outside(op: str, name: str, function: Any, before: Captured, q: Any) -> Any:
    """Return `_traced`, outside dynamo's graph unless the function's code alone decides its program."""
    if not torch.compiler.is_dynamo_compiling():  # what dynamo leaves out costs a call 2 µs
        return _traced(op, name, function, before, q)
    # Dynamo knows no closure's cells here, and guards a function by its code.
    alone = isinstance(function, types.FunctionType) and not function.__code__.co_freevars
    if alone and (text := _text_of_code(op, name, function)):
        return text, *before
    return left_out["score functions"](op, name, function, before, q)


def _traced(op: str, name: str, function: Any, before: Captured, q: Any) -> Any:
    text, own = cached_trace(op, name, function)
    return _with_captured(op, name, text, own, before, q)


@called_while_traced
def _text_of_code(op: str, name: str, function: types.FunctionType) -> str:
    """Return the text of a function that its code alone decides; "" if data decide it too, or it is refused."""
    code, kinds = function.__code__, (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    own = function.__defaults__ or function.__kwdefaults__ or vars(function) or _reads_elsewhere(code)
    read = [function.__globals__[each] for each in _names(code) if each in function.__globals__]
    if own or any(not (isinstance(value, kinds) and _of_torch(value)) for value in read):  # a tensor is torch's, too
        return ""
    try:
        return cached_trace(op, name, function)[0]
    except ArgumentError:  # raised where the graph breaks
        return ""


leave_out("score functions", _traced, "portattn traces score_mod and mask_mod itself, outside the graph")


class KeptLists(NamedTuple):
    """Lists of blocks, the tensors that they were made of, and the streams that may read them."""

    of: list[Any]  # weak references
    lists: torch.Tensor
    streams: set[int]  # handles: the stream that made them, and those that waited for it; none on a CPU
    made: Any  # that stream's event

    def wait(self) -> None:
        """Have the current stream wait for the stream that made the lists, before it reads them the first time."""
        device = self.lists.device
        if not self.streams or (own := runtime(device.type).stream(device.index)) in self.streams:
            return
        stream = getattr(torch, device.type).current_stream(device)
        stream.wait_event(self.made)
        self.lists.record_stream(stream)  # or their memory may go to another tensor while this stream reads it
        self.streams.add(own)


_lists: OrderedDict[Any, KeptLists] = OrderedDict()  # the last one that was read is the last
# By id: the key of a list comes again, of a new tensor in a dead one's place, while a graph still reads the old list.
_held_for_graphs: dict[int, torch.Tensor] = {}


def mask_blocks(
    mask_mod: str, q: Any, k: Any, layout: Any, block_mask: Any, block_size: Any, leftpad_q: Any, leftpad_k: Any,
    causal: Any, window: Any, chunk: Any, alibi_slopes: Any, seqlens_q: Any, seqlens_k: Any,
    captured_0: Any, captured_1: Any, captured_2: Any, captured_3: Any,
) -> Any:  # fmt: skip
    """Return the lists of blocks of a mask function and the size of a block, cached by function, sizes and tensors.

    Nothing for calls that have lists of blocks, left padding (blocks count from row 0), or few scores, nor for a
    function in whose place validation sets built-in options."""
    if block_mask is not None or leftpad_q is not None or leftpad_k is not None:
        return block_mask, block_size
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.ndim == 4 and k.ndim == 4):
        return None, None  # validation raises
    if torch.compiler.is_dynamo_compiling() or are_dispatched((q,)):  # the operator makes them, of each run's sizes
        return None, None
    axis = 1 if layout == "bshd" else 2
    sizes = (q.shape[0], q.shape[3 - axis], q.shape[axis], k.shape[axis])
    if min(sizes) == 0 or max(sizes[2:]) <= BLOCK or current().invariant:
        return None, None
    captured = dict(zip(CAPTURED, (captured_0, captured_1, captured_2, captured_3), strict=True))
    if any(t is not None and torch._C._functorch.is_functorch_wrapped_tensor(t) for t in captured.values()):
        return None, None  # of vmap's tensors each has its own blocks
    free = not causal and window is None and chunk is None and alibi_slopes is None
    made = _cached_lists(mask_mod, captured, sizes, q.device, free, seqlens_q is None and seqlens_k is None)
    return made, None if made is None else (BLOCK, BLOCK)


def _cached_lists(
    text: str, captured: dict[str, Any], sizes: tuple[int, int, int, int], device: Any, free: bool, whole: bool
) -> torch.Tensor | None:
    key = _lists_of(text, sizes, free, whole)
    if key is None:
        return None
    tensors = [captured[name] for name in key[0]]  # score_mod's may be written at each step

    def make() -> torch.Tensor:
        return block_lists(block_marks(text, captured, sizes, (BLOCK, BLOCK), device), sizes[2:], (BLOCK, BLOCK))

    return made_once((text, key[1], device), tensors, make)


@functools.lru_cache(maxsize=_MOST_TRACES)
def _lists_of(
    text: str, sizes: tuple[int, int, int, int], free: bool, whole: bool
) -> tuple[list[str], tuple[int, int, int, int]] | None:
    """Return names of the tensors that lists of blocks depend on, and the lists' sizes; None for built-in options."""
    if free and as_window(text, "attention", *sizes[2:], whole) is not None:
        return None
    program = score_program.parse(text)
    batch, heads = sizes[0] if program.uses("b") else 1, sizes[1] if program.uses("h") else 1
    return [CAPTURED[number] for number in program.captures], (batch, heads, *sizes[2:])


def made_once(key: Any, tensors: Sequence[torch.Tensor], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return `make()`, made once for a key until one of the tensors is written to.

    It is made anew of tensors without versions, under a dispatch mode, where it may be a FakeTensor, and in a capture:
    the tensors may be written to before a replay. A list of no tensors is kept for good once a graph has its address.
    A stream that did not make it waits for the one that did. Of the tensors themselves only weak references are held:
    a list goes with them."""
    if torch.compiler.is_compiling() or in_mode() or not all(map(_has_version, tensors)):
        return make()
    if tensors and is_capturing(tensors[0].device):
        return make()
    key = (key, tuple((id(t), *state_of(t)) for t in tensors))
    with _lock:
        known = _lists.pop(key, None)
        if known is not None and all(ref() is t for ref, t in zip(known.of, tensors, strict=True)):
            _lists[key] = known
        else:
            known = None
    if known is not None:
        if is_capturing(known.lists.device):  # it may wait for no event before it; torch.cuda.graph has synchronized
            _held_for_graphs[id(known.lists)] = known.lists
        else:
            known.wait()
        return known.lists
    with torch.no_grad():
        made = make()

    def forget(_: Any, lists: Any = _lists) -> None:  # no lock: any thread may collect a tensor, and hold it
        lists.pop(key, None)

    if not is_capturing(made.device):
        kept = KeptLists([weakref.ref(t, forget) for t in tensors], made, *_made_by(made.device))
        with _lock:
            _lists[key] = kept
            while len(_lists) > _MOST_LISTS:
                _lists.popitem(last=False)
    return made


def state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return all of a tensor that tells of writes: `t.data = other` changes no version, nor does a graph's replay."""
    return tensor._version, tensor.data_ptr(), tensor.shape


def kept_lists(lists: torch.Tensor) -> KeptLists | None:
    """Return the record of lists that made_once returned, or None if it keeps none."""
    with _lock:
        return next((kept for kept in reversed(_lists.values()) if kept.lists is lists), None)


def _made_by(device: torch.device) -> tuple[set[int], Any]:
    """Return the current stream's handle, in a set, and an event that it records; neither for a device without."""
    module: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(module, "current_stream"):
        return set(), None
    return {runtime(device.type).stream(device.index)}, module.current_stream(device).record_event()


def _has_version(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_inference()
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_capturing(device: torch.device) -> bool:
    asked = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", bool)
    return bool(asked())
