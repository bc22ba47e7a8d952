"""flash_attn's arguments as portattn's operations have them, and portattn's errors in flash_attn's names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, SupportsIndex, TypeVar, cast

import msgspec
import torch

from portattn.api.dynamo_disabled import leave_out, left_out
from portattn.config import Settings, current, using
from portattn.errors import ArgumentError
from portattn.schema.tensors import KV_FORMAT
from portattn.validate import wants_gradients
from portattn.validate.checks import DTYPES, as_plain, check_dense, check_number, is_array, other_dtype
from portattn.validate.layouts import without_layout

Window = tuple[int | None, int | None]


class _Array(Protocol):
    """A tensor or a NumPy array: calls read it back."""

    def tolist(self) -> Any: ...


WindowSize = tuple[SupportsIndex | None, SupportsIndex | None] | list[Any] | _Array
Function = TypeVar("Function", bound=Callable[..., object])
_WORD = re.compile(r"[A-Za-z_]\w*")
# By operation's name -> flash_attn's. Functions that call an argument otherwise say so (`named`).
NAMES = {
    "scale": "softmax_scale", "window": "window_size", "num_splits": "num_splits", "seqlens_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad", "cos": "rotary_cos", "sin": "rotary_sin", "q_scale": "q_descale",
    "k_scale": "k_descale", "v_scale": "v_descale",
}  # fmt: skip


# FlashAttention-3's functions take float8, too.
FLOATS = (*DTYPES, *(dtype for dtype in KV_FORMAT if dtype.is_floating_point))


class FlashAttnError(ArgumentError, RuntimeError):
    """An ArgumentError of a flash_attn function: a RuntimeError too, which flash_attn's own checks raise."""


def rename_errors(**others: str) -> Callable[[Function], Function]:
    """Return a decorator: an ArgumentError of the function is a FlashAttnError with the caller's names.

    dynamo ends its graph at a call whose arguments no graph can have, and runs the call eagerly.

    others  the names of arguments in portattn -> in the function, beside NAMES
    """
    names = NAMES | others

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        order = list(signature.parameters)

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if torch.compiler.is_dynamo_compiling():
                given: dict[str, Any] = {**dict(zip(order, args, strict=False)), **kwargs}
                if _is_read_back(given.get("window_size")):
                    return left_out["window_size"](call, args, kwargs)
                if _needs_a_setting(given):
                    return left_out["deterministic"](call, args, kwargs)
            try:
                return function(*args, **kwargs)
            except ArgumentError as error:
                if torch.compiler.is_dynamo_compiling():  # it shows the first error alone
                    raise
                raise in_their_names(error, function.__name__, names) from None

        call.__signature__ = signature  # type: ignore[attr-defined]  # inspect.getfullargspec follows no __wrapped__
        return cast("Function", call)

    return decorate


def _call_eagerly(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return function(*args, **kwargs)


leave_out("window_size", _call_eagerly, "flash_attn: window_size must be two integers in a graph, and holds a tensor")
leave_out(
    "deterministic", _call_eagerly,
    "flash_attn: deterministic=True goes with torch.use_deterministic_algorithms(True) in a graph, and it is off",
)  # fmt: skip


def _is_read_back(window_size: Any) -> bool:
    """Return whether a window, or a side of it, is a tensor or an array."""
    sides = window_size if isinstance(window_size, (tuple, list)) else (window_size,)
    return any(isinstance(side, torch.Tensor) or is_array(side) for side in sides)


def _needs_a_setting(given: dict[str, Any]) -> bool:
    """Return whether a call's gradients must repeat their bits otherwise than by torch's setting, which a graph has."""
    if given.get("deterministic") not in (True, 1) or torch.are_deterministic_algorithms_enabled():
        return False
    return wants_gradients(*[value for value in given.values() if isinstance(value, torch.Tensor)])


def in_their_names(error: ArgumentError, function: str, names: dict[str, str]) -> FlashAttnError:
    """Return the same error with the names of a flash_attn function and its arguments."""
    if error.op == function:
        return FlashAttnError(error.op, error.argument, error.value, error.limit)
    limit = without_layout(error.limit, ("q", "k", "v"))
    if "kvpacked" in function:
        limit = limit.replace("k.transpose(1, 2), v.transpose(1, 2)", "kv.transpose(1, 3)")

    def other(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    return FlashAttnError(function, _WORD.sub(other, error.argument), error.value, _WORD.sub(other, limit))


def check_bool(op: str, name: str, value: Any) -> bool:
    """A flag. An integer counts, as in flash_attn; a word such as "top_left" would be taken for True there."""
    value = as_plain(value)
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise ArgumentError(op, name, value, "must be True or False")
    return bool(value)


def window_of(op: str, window_size: Any, causal: bool) -> Window | None:
    """Return (left, right) with None for no limit, which every negative number is; None if neither side has a limit.

    Tensors and NumPy arrays are read back, as flash_attn does: a pair of them, or one of two elements.
    """
    sides = window_size.tolist() if hasattr(window_size, "tolist") else window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise ArgumentError(op, "window_size", window_size, "must be two integers (left, right); negative for no limit")
    left, right = (_side(op, window_size, side) for side in sides)
    if causal:
        right = None  # the mask has that side
    return None if left is None and right is None else (left, right)


def _side(op: str, window_size: Any, side: Any) -> int | None:
    if side is None:
        return None
    if not isinstance(side, int) and hasattr(side, "tolist"):  # dynamo asks no symbolic integer for attributes
        side = side.tolist()
    if isinstance(side, (bool, float)) or not (isinstance(side, int) or hasattr(side, "__index__")):
        raise ArgumentError(op, "window_size", window_size, "must be two integers (left, right); negative for no limit")
    return None if side < 0 else side


def softcap_of(op: str, softcap: Any) -> float | None:
    """None for no cap, which every number up to 0 is."""
    value = 0.0 if softcap is None else check_number(op, "softcap", softcap)
    return value if value > 0.0 else None


def splits_of(op: str, num_splits: Any) -> int | None:
    """None for what the plan chooses, which every number up to 0 is."""
    num_splits = as_plain(num_splits)
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise ArgumentError(op, "num_splits", num_splits, "must be an integer; up to 0 for what fits the chip best")
    return num_splits if num_splits > 0 else None


def repeated_bits(op: str, deterministic: Any) -> AbstractContextManager[Any]:
    """Return the block in which the kernels of a call's gradients repeat their bits, if the call asks for it.

    A graph has one setting for all calls, torch's own: `named` keeps other calls out of it.
    """
    asked = check_bool(op, "deterministic", deterministic)
    if not asked or torch.are_deterministic_algorithms_enabled() or torch.compiler.is_dynamo_compiling():
        return nullcontext()
    return using(_deterministic(current()))


@functools.lru_cache
def _deterministic(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, deterministic=True)


def forward_only(about: tuple[str, str, Any], run: Callable[[], Any], *tensors: torch.Tensor | None) -> Any:
    """Run a call that has no gradient: its forward pass runs, and a backward pass through its results raises.

    about    (function, argument, value) that the error names
    tensors  the call's, some of which may require gradients. A graph refuses them before it runs
    """
    if torch.compiler.is_dynamo_compiling() or not wants_gradients(*tensors):
        return run()
    with torch.no_grad():
        found = run()
    if isinstance(found, tuple):
        return tuple(_ForwardOnly.apply(about, result, *tensors) for result in found)
    return _ForwardOnly.apply(about, found, *tensors)


class _ForwardOnly(torch.autograd.Function):
    """(about, result, tensors) -> the result, as a node whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, about: tuple[str, str, Any], result: torch.Tensor, *tensors: torch.Tensor | None) -> Any:
        ctx.about = about
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, argument, value = ctx.about
        raise FlashAttnError(
            op, argument, value, "has no gradient: call it under torch.no_grad(), or detach the result"
        )


def check_tensors(op: str, **tensors: Any) -> None:
    """What must be tensors, before they are asked for their device or gradients."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(op, name, type(tensor).__name__, "must be a torch.Tensor")


def check_dtypes(op: str, taken: Collection[torch.dtype] = DTYPES, **tensors: torch.Tensor) -> None:
    """Raise ArgumentError unless each argument is a tensor of a dtype that the function takes."""
    check_tensors(op, **tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in taken:
            limit = f"must be one of {', '.join(map(str, taken))}"
            raise ArgumentError(op, f"{name}.dtype", tensor.dtype, limit + other_dtype(tensor.dtype, FLOATS))


def check_memory(op: str, name: str, memory: Any, whose: str, like: torch.Tensor) -> None:
    """Raise ArgumentError unless the caller's memory has the shape, the dtype and the device of the result."""
    check_dense(op, name, memory)
    check_tensors(op, **{name: memory})
    given, must = ((tuple(t.shape), t.dtype, str(t.device)) for t in (memory, like))
    if given != must:
        raise ArgumentError(op, name, given, f"must have the shape, dtype and device of {whose}, {must}")


def check_packed(op: str, name: str, tensor: Any, axis: int, size: int, axes: str) -> None:
    """One tensor that holds several, along an axis."""
    check_dense(op, name, tensor)
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(op, name, type(tensor).__name__, "must be a torch.Tensor")
    if tensor.ndim != axes.count(",") + 1 or tensor.shape[axis] != size:
        raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), f"must be ({axes})")


def infinite(lse: torch.Tensor) -> torch.Tensor:
    """FlashAttention-2's LSE: +inf, not -inf, where a row has nothing to attend."""
    return torch.where(torch.isneginf(lse), torch.inf, lse)
