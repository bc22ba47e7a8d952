"""Checks of one tensor or one number."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from portattn.errors import ArgumentError
from portattn.schema.ops import ROWS
from portattn.schema.problem_limits import MAX_HEAD_DIM, MAX_SPLITS, WORD_ALIGNMENT
from portattn.schema.symbolic_int import is_size, most, next_power_of_two
from portattn.schema.tensors import INT32_MAX, KV_FORMAT, PACKED, POINTER_ALIGNMENT, TORCH_DTYPE, TWO_GIB, spans

DTYPES = {dtype: name for name, dtype in TORCH_DTYPE.items() if name in ("fp16", "bf16", "fp32")}
FLOAT32_MAX, FLOAT32_TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_CORNERS = {"lower_right": "bottom_right", "upper_left": "top_left"}  # torch.nn.attention.bias's words
_PYTHONS = (type(None), bool, int, float, str)
_REAL = ("scale", "softcap", "dropout_p")
WIDEST_TILE = 256  # rows: inside a tile, kernels reach rows by 32-bit multiples of the row stride


def check_dense(op: str, name: str, value: Any) -> None:
    """Raise ArgumentError on a nested or sparse tensor, before all else: strided nested tensors have no shape."""
    if not isinstance(value, torch.Tensor):
        return
    limit = "must be a dense, strided torch.Tensor"
    if value.is_nested and value.layout is torch.jagged:
        hint = "attention takes q, k and v that are all jagged; varlen_attention takes packed rows: values(), and "
        hint += "offsets() as int32 cu_seqlens"
        raise ArgumentError(op, name, "a jagged nested tensor", f"{limit} (hint: {hint})")
    if value.is_nested:
        hint = "torch.nested.to_padded_tensor, and the lengths beside it"
        raise ArgumentError(op, name, "a nested tensor", f"{limit} (hint: {hint})")
    if value.layout is not torch.strided:
        raise ArgumentError(op, name, f"a {value.layout} tensor", f"{limit} (hint: tensor.to_dense())")


def check_tensor(
    op: str, name: str, tensor: Any, axes: tuple[str, ...], dtypes: Collection[torch.dtype] = DTYPES
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(op, name, type(tensor).__name__, f"must be a torch.Tensor{as_tensor(name, tensor)}")
    if tensor.ndim != len(axes):
        limit = f"must be {len(axes)}: ({', '.join(axes)})"
        raise ArgumentError(op, f"{name}.ndim", tensor.ndim, limit + other_rank(op, name, tensor.ndim))
    if tensor.dtype not in dtypes:
        taken = list(dict.fromkeys(map(str, dtypes)))  # where k is float32, it is both k's dtype and the other one
        limit = f"must be one of {', '.join(taken)}" if len(taken) > 1 else f"must be {taken[0]}"
        raise ArgumentError(op, f"{name}.dtype", tensor.dtype, limit + other_dtype(tensor.dtype, dtypes))


def as_tensor(name: str, value: Any, more: str = "") -> str:
    """Return the hint for a list or array that should be a tensor, or ''; `more`: further arguments of torch.tensor."""
    listed = isinstance(value, (int, list, tuple)) and not isinstance(value, bool)
    if not name.isidentifier() or not (listed or is_array(value)):
        return ""
    if is_array(value) and not more:
        return f" (hint: torch.from_numpy({name}))"
    whole = f"[{name}]" if isinstance(value, int) else name
    place = "" if name == "q" else ", device=q.device"
    return f" (hint: torch.tensor({whole}{more}{place}))"


def as_int32(name: str, dtype: torch.dtype) -> str:
    """Return the hint for an int64 tensor that should be int32; empty for other dtypes."""
    return f" (hint: {name}.int())" if dtype is torch.int64 and name.isidentifier() else ""


def other_dtype(dtype: torch.dtype, taken: Collection[torch.dtype]) -> str:
    """Return the end of an error about a dtype: a cast, or the operations that take it."""
    if dtype is torch.float64:
        return " (hint: float())"
    if dtype in KV_FORMAT and dtype not in taken:
        return "; the operations that read a cache take caches of it"
    if dtype is PACKED and dtype not in taken:
        return "; the operations that read a cache take int4 numbers, two to a byte, as it"
    return ""


def other_rank(op: str, name: str, ndim: int) -> str:
    """Return the end of an error about a rank: the operation or the view that takes it."""
    if ndim == 3 and op in ("attention", "decode_attention"):
        return f"; packed rows (tokens, heads, head_dim) are varlen_attention's; of one sequence give {name}[None]"
    if ndim == 2 and op in ("attention", "decode_attention"):
        return f"; of one sequence and head give {name}[None, None]"
    if ndim == 4 and op == "varlen_attention":
        return "; batches (batch, heads, seq, head_dim) are attention's"
    return ""


def check_like(op: str, name: str, tensor: torch.Tensor, whose: str, like: torch.Tensor) -> None:
    if tensor.dtype != like.dtype:
        kept = ROWS[op].writes and torch._C._is_any_autocast_enabled()
        limit = f"must be {whose}'s, {like.dtype}{': torch.autocast casts no argument of ' + op if kept else ''}"
        raise ArgumentError(op, f"{name}.dtype", tensor.dtype, limit)
    if tensor.device != like.device:
        raise ArgumentError(op, f"{name}.device", str(tensor.device), f"must be {whose}'s, {like.device}")


def check_equal(op: str, what: str, value: int, whose: str, limit: int) -> None:
    if value != limit:
        raise ArgumentError(op, what, value, f"must be {whose}, {limit}")


def check_width(op: str, name: str, width: int) -> None:
    if not 1 <= width <= MAX_HEAD_DIM:
        raise ArgumentError(op, f"{name}'s head_dim", width, f"must be in 1..{MAX_HEAD_DIM}")


def is_array(value: Any) -> bool:
    """Return whether the value is a NumPy array, without importing NumPy: a program with an array has imported it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


class Scalar(Protocol):
    """A 0-d tensor, or a NumPy number, which calls read back."""

    @property
    def ndim(self) -> int: ...
    def item(self) -> Any: ...
    def __float__(self) -> float: ...


Number = float | Scalar


def as_plain(value: Any) -> Any:
    """Return a NumPy scalar or another class's integer or real number as Python's, and any other value unchanged."""
    if type(value) in _PYTHONS:
        return value
    if isinstance(value, numbers.Integral):  # not `__index__`, which tensors and symbolic sizes have too
        return operator.index(value)
    if isinstance(value, numbers.Real):
        return float(value)
    numpy = sys.modules.get("numpy")
    return bool(value) if numpy is not None and isinstance(value, numpy.bool_) else value


def as_number(op: str, name: str, value: Any) -> Any:
    """Return a 0-d tensor or array as a Python number (an accelerator is waited for), others like `as_plain`."""
    number = as_plain(value)
    if type(number) in _PYTHONS:
        return number
    cure = "multiply q by it, with scale=1.0" if name == "scale" else "a Python number"
    if hasattr(number, "ndim"):
        single = math.prod(number.shape) == 1
        if single and getattr(number, "requires_grad", False):
            trained = ", or multiply q by a scale that is trained" if name == "scale" else ""
            limit = f"{name} has no gradient: give {name}.item(){trained}"
            raise ArgumentError(op, f"{name}.requires_grad", True, limit)
        if number.ndim:
            return number
        if isinstance(number, torch.Tensor) and has_no_data(number):
            limit = f"must be a number, or a 0-d tensor that can be read (hint: {cure})"
            raise ArgumentError(op, name, "a tensor without data", limit)
        number = number.item()
    if isinstance(number, torch.SymFloat):  # read from a tensor when the graph runs
        raise ArgumentError(op, name, number, f"must be a number that is known while tracing (hint: {cure})")
    return number


def as_value(op: str, name: str, value: Any) -> Any:
    """Return a number or flag as operations take it: by `as_number` if a 0-d tensor may be given, else `as_plain`."""
    return as_number(op, name, value) if name in _REAL else as_plain(value)


def check_number(op: str, name: str, value: Any) -> float:
    number = as_number(op, name, value)
    # Kernels take it as a float32. The comparison is false for NaN too, and defined for an integer of any size.
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= FLOAT32_MAX:
        one = getattr(value, "ndim", 0) and math.prod(value.shape) == 1
        hint = f"; a 0-d tensor counts (hint: {name}.item())" if one else ""
        limit = f"must be one finite number, in float32's range of ±{FLOAT32_MAX:.4g}{hint}"
        raise ArgumentError(op, name, value, limit)
    return float(number)


def check_scale(op: str, value: Any) -> float:
    """Return the factor on the scores, or 0 for one below float32's smallest normal number."""
    scale = check_number(op, "scale", value)
    # Chips round such a number to 0, and Triton's interpreter has no type for it.
    return scale if abs(scale) >= FLOAT32_TINY else 0.0


def check_flag(op: str, name: str, value: Any) -> None:
    if not isinstance(as_plain(value), bool):
        raise ArgumentError(op, name, value, "must be True or False")


def check_causal(op: str, causal: Any) -> str:
    if not isinstance(causal, (bool, int, str)) or causal not in (True, False, "top_left", "bottom_right"):
        word = causal.lower().removeprefix("causal_") if isinstance(causal, str) else ""
        hint = f" (hint: {_CORNERS[word]!r})" if word in _CORNERS else ""
        limit = f"must be True (bottom_right), False, 'bottom_right' or 'top_left'{hint}"
        raise ArgumentError(op, "causal", causal, limit)
    return causal if isinstance(causal, str) else "bottom_right" if causal else "none"


def check_splits(op: str, num_splits: Any) -> int:
    """Return the programs that share a row's keys; 0 leaves it to planning."""
    if num_splits is None:
        return 0
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or not 1 <= num_splits <= MAX_SPLITS:
        raise ArgumentError(op, "num_splits", num_splits, f"must be None or an integer in 1..{MAX_SPLITS}")
    return num_splits


def check_size(op: str, name: str, value: Any) -> int:
    value = as_plain(value)
    if not is_size(value) or not 0 <= value <= INT32_MAX:
        hint = f" (hint: int({name}), which reads it back)" if isinstance(value, torch.Tensor) else ""
        raise ArgumentError(op, name, value, f"must be an integer in 0..{INT32_MAX}{hint}")
    return value


def check_int32(
    op: str, name: str, tensor: Any, shape: tuple[int, ...], axes: str, device: torch.device, contiguous: bool = True
) -> None:
    """Check for an int32 tensor of this shape on q's device; `axes` is the shape in words."""
    if not isinstance(tensor, torch.Tensor):
        hint = "" if isinstance(tensor, int) else as_tensor(name, tensor, ", dtype=torch.int32")
        raise ArgumentError(op, name, type(tensor).__name__, f"must be an int32 torch.Tensor of shape {axes}{hint}")
    if tensor.dtype != torch.int32:
        raise ArgumentError(op, f"{name}.dtype", tensor.dtype, f"must be torch.int32{as_int32(name, tensor.dtype)}")
    if tuple(tensor.shape) != shape:
        sums = axes == "(batch,)" and tuple(tensor.shape) == (shape[0] + 1,) and name.isidentifier()
        hint = f" (hint: {name}.diff(), if it holds cumulative lengths)" if sums else ""
        raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), f"must be {axes}, {shape}{hint}")
    check_place(op, name, tensor, device, contiguous)


def check_share(op: str, dropout_p: Any) -> float:
    if dropout_p is None:
        raise ArgumentError(op, "dropout_p", dropout_p, "must be in [0, 1); 0.0 drops nothing")
    share = check_number(op, "dropout_p", dropout_p)
    if not 0.0 <= share < 1.0:
        raise ArgumentError(op, "dropout_p", dropout_p, "must be in [0, 1)")
    return share


def check_seed(op: str, seed: Any, device: torch.device) -> None:
    """Check dropout's seed: a (1,) int64 tensor on q's device."""
    if not isinstance(seed, torch.Tensor):
        limit = f"must be an int64 torch.Tensor of shape (1,){as_tensor('dropout_seed', seed, ', dtype=torch.int64')}"
        raise ArgumentError(op, "dropout_seed", type(seed).__name__, limit)
    if seed.dtype != torch.int64:
        raise ArgumentError(op, "dropout_seed.dtype", seed.dtype, "must be torch.int64")
    if tuple(seed.shape) != (1,):
        raise ArgumentError(op, "dropout_seed.shape", tuple(seed.shape), "must be (1,)")
    check_place(op, "dropout_seed", seed, device, contiguous=True)


def check_place(op: str, name: str, tensor: torch.Tensor, device: torch.device, contiguous: bool) -> None:
    """Check that a tensor lies on q's device, and is contiguous, or at least along the last axis."""
    check_done(op, name, tensor)
    if tensor.device != device:
        raise ArgumentError(op, f"{name}.device", str(tensor.device), f"must be q's, {device}")
    if contiguous and not tensor.is_contiguous():
        raise ArgumentError(op, f"{name}.stride()", tensor.stride(), "must be contiguous")
    if not contiguous and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(op, f"{name}.stride(-1)", tensor.stride(-1), "must be 1: its last axis is contiguous")


def check_done(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError on a view to be negated: kernels read memory. Validators copy such q, k and v."""
    if tensor.is_neg():
        raise ArgumentError(op, name, "a view to be negated", "must be what lies in memory: tensor.resolve_neg()")


def has_no_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is only a shape: a meta tensor, or a fake one under tracing."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def rows_aligned(tensor: torch.Tensor, multiple: int = POINTER_ALIGNMENT) -> bool:
    """Return whether rows are contiguous, and base and outer strides multiples of so many bytes."""
    size = tensor.element_size()
    # The row stride counts even for one row: a descriptor is encoded with it.
    outer = [tensor.stride(axis) for axis in range(3) if tensor.shape[axis] > 1 or axis == 2]
    return (
        (tensor.stride(3) == 1 or tensor.shape[3] == 1)
        and starts_aligned(tensor, multiple)
        and all(stride * size % multiple == 0 for stride in outer)
    )


def words_aligned(rows: Iterable[torch.Tensor], block_scales: Iterable[torch.Tensor | None] = ()) -> bool:
    """Return Problem.word_aligned for a quantized cache's rows and its blocks' scales."""
    for scales in block_scales:
        if scales is not None:
            whole = next(size for size in (WORD_ALIGNMENT, 2, 1) if scales.shape[3] % size == 0)
            if not rows_aligned(scales, whole):
                return False
    return all(rows_aligned(row, WORD_ALIGNMENT) for row in rows)


def starts_aligned(tensor: torch.Tensor, multiple: int = POINTER_ALIGNMENT) -> bool:
    """Return whether the base is a multiple of so many bytes; a tensor without data counts as aligned."""
    return has_no_data(tensor) or tensor.data_ptr() % multiple == 0


def in_line(pages: torch.Tensor) -> bool:
    """Return whether the rows of (P, H, page, D) pages are, head by head, the rows of one matrix."""
    return pages.shape[0] <= 1 or pages.stride(0) == pages.shape[2] * pages.stride(2)


def reachable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy if a tile spans more elements than 32-bit offsets reach."""
    columns = next_power_of_two(tensor.shape[3])
    spanned = tensor.stride(2) * WIDEST_TILE + tensor.stride(3) * columns
    return tensor.contiguous() if spanned > INT32_MAX else tensor


def is_large(*tensors: torch.Tensor) -> bool:
    """Return whether 32-bit byte offsets do not reach all of one of the tensors."""
    return most(*map(spans, tensors)) >= TWO_GIB


def wants_gradients(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd will ask for gradients, or forward-mode differentiation is under way."""
    some = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in some):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in some)


def refuse_gradients(op: str, tensors: Mapping[str, Any], backend: str) -> None:
    """Raise ArgumentError if autograd would ask an operation without gradients for them.

    The reference path differentiates every operation, but only if `backend` names it: a forgotten torch.no_grad() must
    not cost the kernels' speed."""
    instead = ROWS[op].trained_by
    if not instead or backend == "reference" or not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            limit = (
                f"{op} has no gradient. For inference call it under torch.no_grad() or torch.inference_mode(); to "
                f"train, call {instead} (backend='reference' is slow, and differentiates {op} too)"
            )
            raise ArgumentError(op, f"{name}.requires_grad", True, limit)


def refuse_gradients_of_writes(op: str, *tensors: torch.Tensor | None) -> None:
    """Raise ArgumentError if autograd would ask an operation that fills tensors for gradients."""
    if wants_gradients(*tensors):
        limit = f"{op} writes in place and has no gradient: call it under torch.no_grad(), or detach what it takes"
        raise ArgumentError(op, "requires_grad", True, limit)


def shape_or_value(value: Any) -> Any:
    """Return a tensor's shape, or any other value unchanged, for an error."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def check_apart(op: str, names: Sequence[str], memory: Sequence[torch.Tensor]) -> None:
    """Raise ArgumentError if two tensors share a byte, and the second one is written."""
    # Views of one buffer that share no element are legal, such as the halves of (…, 2·D) or of (2, …).
    first, second = memory
    # Subclasses may have no address: a trace over sizes has none.
    plain = (torch.Tensor, torch.nn.Parameter)
    if any(type(each) not in plain or has_no_data(each) or not each.numel() for each in memory):
        return
    distance = second.data_ptr() - first.data_ptr()
    if first.device == second.device and _meet(distance, _axes(first, second), _axes(second, first)):
        limit = f"must share no element with {names[0]}, whose numbers it would overwrite"
        raise ArgumentError(op, f"{names[1]}.data_ptr()", second.data_ptr(), limit)


def _axes(tensor: torch.Tensor, other: torch.Tensor) -> list[tuple[int, int]]:
    """Return (stride in bytes, size) pairs, the largest stride first, an element's bytes last; an axis of one element
    takes the stride of the other tensor, if that has as many axes."""
    like = other if other.ndim == tensor.ndim else tensor
    found = zip(tensor.stride(), tensor.shape, like.stride(), like.shape, strict=True)
    size_of, other_size_of = tensor.element_size(), like.element_size()
    axes = [(far * other_size_of if n == 1 else own * size_of, n) for own, n, far, many in found if n * many > 1]
    return [*sorted(axes, reverse=True), (1, size_of)]


def _meet(distance: int, first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> bool:
    """Return whether two tensors share an element; the second begins `distance` bytes after the first."""
    # Axes that differ in stride, or are longer than the stride of the axis around them, are compared by their ends.
    tangled = not first or not second or first[0][0] <= max(_reach(first[1:]), _reach(second[1:]))
    if tangled or first[0][0] != second[0][0]:
        return -_reach(second) <= distance <= _reach(first)
    (stride, size), (_, other_size) = first[0], second[0]
    steps = {distance // stride, -(-distance // stride)}
    return any(-other_size < step < size and _meet(distance - step * stride, first[1:], second[1:]) for step in steps)


def _reach(axes: Sequence[tuple[int, int]]) -> int:
    return sum(stride * (size - 1) for stride, size in axes)
