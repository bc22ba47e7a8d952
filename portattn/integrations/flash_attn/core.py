"""Core of flash_attn's functions: their arguments and errors in portattn's terms, and dense, packed and paged calls.

Three modules have the signatures: flash_attn_interface.py (generation 2), hub.py (generation 2 with attention sinks)
and ../flash_attn_interface.py (generation 3). kvcache.py has flash_attn_with_kvcache of all three.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, SupportsIndex, TypeVar, cast

import msgspec
import torch

from portattn.api import ops
from portattn.api.call import new_seed
from portattn.api.masks import dropout_mask
from portattn.api.transform_checks import leave_out, left_out
from portattn.config import Settings, current, using
from portattn.errors import ArgumentError
from portattn.schema.problem_limits import MAX_SIZE
from portattn.schema.tensors import INT32_MAX, KV_FORMAT
from portattn.validate import wants_gradients
from portattn.validate.checks import (
    DTYPES,
    Number,
    as_int32,
    as_plain,
    check_dense,
    check_number,
    check_share,
    check_size,
    is_array,
    other_dtype,
)
from portattn.validate.dense import without_layout
from portattn.validate.values import cu_seqlens, reads

Window = tuple[int | None, int | None]


class _Array(Protocol):
    def tolist(self) -> Any: ...


WindowSize = tuple[SupportsIndex | None, SupportsIndex | None] | list[Any] | _Array
Function = TypeVar("Function", bound=Callable[..., object])
_WORD = re.compile(r"[A-Za-z_]\w*")
# By operation's name -> flash_attn's. Functions with other names pass them to rename_errors.
NAMES = {
    "scale": "softmax_scale", "window": "window_size", "num_splits": "num_splits", "seqlens_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad", "cos": "rotary_cos", "sin": "rotary_sin", "q_scale": "q_descale",
    "k_scale": "k_descale", "v_scale": "v_descale",
}  # fmt: skip
# FlashAttention-3's functions take float8, too.
FLOATS = (*DTYPES, *(dtype for dtype in KV_FORMAT if dtype.is_floating_point))


class FlashAttnError(ArgumentError, RuntimeError):
    """An ArgumentError of a flash_attn function; also a RuntimeError, as flash_attn's own checks raise."""


def rename_errors(**others: str) -> Callable[[Function], Function]:
    """Return a decorator that turns ArgumentError into FlashAttnError with the caller's names, by NAMES and `others`.

    dynamo breaks its graph at a call with arguments that no graph can have, and runs the call eagerly."""
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
    sides = window_size if isinstance(window_size, (tuple, list)) else (window_size,)
    return any(isinstance(side, torch.Tensor) or is_array(side) for side in sides)


def _needs_a_setting(given: dict[str, Any]) -> bool:
    if given.get("deterministic") not in (True, 1) or torch.are_deterministic_algorithms_enabled():
        return False
    return wants_gradients(*[value for value in given.values() if isinstance(value, torch.Tensor)])


def in_their_names(error: ArgumentError, function: str, names: dict[str, str]) -> FlashAttnError:
    if error.op == function:
        return FlashAttnError(error.op, error.argument, error.value, error.limit)
    limit = without_layout(error.limit, ("q", "k", "v"))
    if "kvpacked" in function:
        limit = limit.replace("k.transpose(1, 2), v.transpose(1, 2)", "kv.transpose(1, 3)")

    def other(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    return FlashAttnError(function, _WORD.sub(other, error.argument), error.value, _WORD.sub(other, limit))


def check_bool(op: str, name: str, value: Any) -> bool:
    """Return a flag or an integer 0 or 1, as in flash_attn; its truth test would take "top_left" for True."""
    value = as_plain(value)
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise ArgumentError(op, name, value, "must be True or False")
    return bool(value)


def window_of(op: str, window_size: Any, causal: bool) -> Window | None:
    """Return (left, right), None for no limit (any negative number), or None without limits. Reads tensors back."""
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
    value = 0.0 if softcap is None else check_number(op, "softcap", softcap)
    return value if value > 0.0 else None


def splits_of(op: str, num_splits: Any) -> int | None:
    num_splits = as_plain(num_splits)
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise ArgumentError(op, "num_splits", num_splits, "must be an integer; up to 0 for what fits the chip best")
    return num_splits if num_splits > 0 else None


def repeated_bits(op: str, deterministic: Any) -> AbstractContextManager[Any]:
    """Return a context in which gradients' kernels repeat their bits, if asked; a graph has only torch's setting."""
    asked = check_bool(op, "deterministic", deterministic)
    if not asked or torch.are_deterministic_algorithms_enabled() or torch.compiler.is_dynamo_compiling():
        return nullcontext()
    return using(_deterministic(current()))


@functools.lru_cache
def _deterministic(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, deterministic=True)


def forward_only(about: tuple[str, str, Any], run: Callable[[], Any], *tensors: torch.Tensor | None) -> Any:
    """Run a forward; a backward raises an error on `about` (function, argument, value)."""
    # A graph refuses tensors that require gradients before it runs.
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
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(op, name, type(tensor).__name__, "must be a torch.Tensor")


def check_dtypes(op: str, taken: Collection[torch.dtype] = DTYPES, **tensors: torch.Tensor) -> None:
    check_tensors(op, **tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in taken:
            limit = f"must be one of {', '.join(map(str, taken))}"
            raise ArgumentError(op, f"{name}.dtype", tensor.dtype, limit + other_dtype(tensor.dtype, FLOATS))


def check_memory(op: str, name: str, memory: Any, whose: str, like: torch.Tensor) -> None:
    check_dense(op, name, memory)
    check_tensors(op, **{name: memory})
    given, must = ((tuple(t.shape), t.dtype, str(t.device)) for t in (memory, like))
    if given != must:
        raise ArgumentError(op, name, given, f"must have the shape, dtype and device of {whose}, {must}")


def check_packed(op: str, name: str, tensor: Any, axis: int, size: int, axes: str) -> None:
    check_dense(op, name, tensor)
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(op, name, type(tensor).__name__, "must be a torch.Tensor")
    if tensor.ndim != axes.count(",") + 1 or tensor.shape[axis] != size:
        raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), f"must be ({axes})")


def infinite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isneginf(lse), torch.inf, lse)


@dataclass(frozen=True)
class ScoreArguments:
    """portattn's arguments that decide scores: scale None for 1/√D, the causal mask at the bottom right."""

    scale: Number | None
    causal: bool
    window: Window | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    chunk: int | None = None

    def arguments(self) -> dict[str, Any]:
        return {
            "scale": self.scale, "causal": self.causal, "window": self.window, "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes, "chunk": self.chunk,
        }  # fmt: skip


@torch.no_grad()
def signed_probabilities(
    scores: ScoreArguments, q: torch.Tensor, k: torch.Tensor, dropout_p: float, seed: torch.Tensor
) -> torch.Tensor:
    """Return S_dmask (B, Hq, Sq, Sk) in q's dtype, of q (B, Sq, Hq, D) and k (B, Sk, Hk, D)."""
    full = seed.new_full((q.shape[0],), 1)
    return _signed(scores, q, k, dropout_p, seed, full * q.shape[1], full * k.shape[1])


@torch.no_grad()
def signed_packed(
    scores: ScoreArguments,
    q: torch.Tensor,
    k: torch.Tensor,
    dropout_p: float,
    seed: torch.Tensor,
    beginnings: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
) -> torch.Tensor:
    """Return S_dmask (B, Hq, max_seqlen_q, max_seqlen_k) of packed q (Tq, Hq, D) and k (Tk, Hk, D); 0 in padding."""
    padded_q, lengths_q = _padded(q, beginnings[0], longest[0])
    padded_k, lengths_k = _padded(k, beginnings[1], longest[1])
    return _signed(scores, padded_q, padded_k, dropout_p, seed, lengths_q, lengths_k)


def _padded(rows: torch.Tensor, beginnings: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (T, ...) as (B, longest, ...), with any numbers beyond a sequence's rows, and the lengths."""
    at = beginnings[:-1, None].long() + torch.arange(longest, device=rows.device)
    if not rows.shape[0]:
        return rows.new_zeros(*at.shape, *rows.shape[1:]), beginnings.diff()
    return rows[at.clamp(max=rows.shape[0] - 1)], beginnings.diff()


def _signed(
    scores: ScoreArguments,
    q: torch.Tensor,
    k: torch.Tensor,
    dropout_p: float,
    seed: torch.Tensor,
    lengths_q: torch.Tensor,
    lengths_k: torch.Tensor,
) -> torch.Tensor:
    batch, seq_q, heads, width = q.shape
    seq_k, group = k.shape[1], heads // k.shape[2]
    queries = q.float().transpose(1, 2).unflatten(1, (-1, group))  # (B, Hk, group, Sq, D)
    values = queries @ k.float().permute(0, 2, 3, 1)[:, :, None]
    values = values.flatten(1, 2) * (width**-0.5 if scores.scale is None else float(scores.scale))  # (B, Hq, Sq, Sk)
    if scores.softcap is not None:
        values = scores.softcap * torch.tanh(values / scores.softcap)
    row = torch.arange(seq_q, device=q.device)[None, :, None]
    key = torch.arange(seq_k, device=q.device)[None, None, :]
    here = row + (lengths_k - lengths_q)[:, None, None]  # (B, Sq, 1): the key at the row's own position
    seen = (row < lengths_q[:, None, None]) & (key < lengths_k[:, None, None])
    left, right = scores.window or (None, None)
    if scores.causal:
        seen = seen & (key <= here)
    if left is not None:
        seen = seen & (key >= here - min(left, MAX_SIZE))  # no position is further away, and int64 has an end
    if right is not None:
        seen = seen & (key <= here + min(right, MAX_SIZE))
    if scores.alibi_slopes is not None:
        slopes = scores.alibi_slopes.float().expand(batch, heads)
        values = values - slopes[:, :, None, None] * (key - here).abs()[:, None]
    values = values.masked_fill(~seen[:, None], -torch.inf)
    block = _get_block_size_n(q.device, width, True, scores.causal)
    found = torch.where(seen[:, None], torch.exp(values - _running_max(values, block)), 0.0).to(q.dtype)
    kept = dropout_mask(seed, dropout_p, batch, heads, seq_q, seq_k)
    return torch.where(kept, found, -found)


def _running_max(values: torch.Tensor, block: int) -> torch.Tensor:
    keys = values.shape[-1]
    if not keys:
        return values
    padded = torch.nn.functional.pad(values, (0, -keys % block), value=-torch.inf)
    largest = padded.unflatten(-1, (-1, block)).amax(-1)
    return largest.flip(-1).cummax(-1).values.flip(-1).repeat_interleave(block, -1)[..., :keys]


def _get_block_size_n(device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Return the columns of a block of S_dmask that flash_attn's kernels have for this width and chip."""
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    if 96 < head_dim <= 128:
        kind = torch.device(device)
        capability = torch.cuda.get_device_capability(kind) if kind.type == "cuda" else (0, 0)
        if capability[0] == 8 and capability[1] > 0:
            return 64 if is_causal and not is_dropout else 32
        return 32 if is_dropout else 64
    return 64


Returned = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def scores_of(
    op: str, scale: Any, causal: Any, window_size: Any, softcap: Any, alibi_slopes: Any, attention_chunk: int = 0
) -> ScoreArguments:
    is_causal = check_bool(op, "causal", causal)
    window = window_of(op, window_size, is_causal)
    return ScoreArguments(scale, is_causal, window, softcap_of(op, softcap), alibi_slopes, attention_chunk or None)


class Packing(NamedTuple):
    beginnings: tuple[torch.Tensor, torch.Tensor]  # cu_seqlens
    longest: tuple[Any, Any]  # max_seqlen
    block_table: torch.Tensor | None = None  # page ids (B, pages a sequence) if keys and values are pages
    lengths: torch.Tensor | None = None  # (B,) int32 keys in pages; None: the differences of cu_seqlens_k


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing | None,
    block: AbstractContextManager[Any],
    **given: Any,
) -> Any:
    """Run portattn's operation in the block: on dense tensors, or on packed ones if a packing is given."""
    with block:
        if packing is None:
            return ops.attention(q, k, v, layout="bshd", **given)
        return ops.varlen_attention(q, k, v, *packing.beginnings, *_sizes(packing), **given)


def attend(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: Number,
    scores: ScoreArguments,
    packing: Packing | None,
    return_lse: bool,
    return_signed: bool,
    deterministic: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (out, lse, S_dmask, dropout's seed) of a dense call, or of a packed one if a packing is given.

    Unwanted results are None or empty; without dropout the seed is None, and torch's generator unchanged."""
    check_dtypes(op, q=q, k=k, v=v)
    block = repeated_bits(op, deterministic)
    dropout_p = check_share(op, dropout_p)
    seed = new_seed(q) if dropout_p else None
    given = {"sinks": sinks, "return_lse": return_lse, **scores.arguments()}
    found: Any
    if packing is not None and packing.block_table is not None:
        table, beginnings, longest = packing.block_table, packing.beginnings, _sizes(packing)
        if dropout_p:
            limit = "is not taken with block_table: paged_attention has no dropout"
            raise ArgumentError(op, "dropout_p", dropout_p, limit)
        lengths = _paged_lengths(op, beginnings[1], longest[1]) if packing.lengths is None else packing.lengths
        attend_pages = functools.partial(
            ops.paged_attention, q, k, v, table, lengths, cu_seqlens_q=beginnings[0], max_seqlen_q=longest[0], **given
        )
        found = forward_only((op, "block_table", shape_of(table)), attend_pages, q, k, v, scores.alibi_slopes, sinks)
    else:
        found = run(q, k, v, packing, block, dropout_p=dropout_p, dropout_seed=seed, **given)
    if not return_lse:
        return found, None, None, seed
    out, lse = found
    if seed is None or not return_signed:
        return out, infinite(lse), out.detach().new_empty(0), seed
    narrow = q.to(out.dtype), k.to(out.dtype)  # autocast's dtype, in which the scores were computed
    if packing is None:
        signed = signed_probabilities(scores, *narrow, dropout_p, seed)
    else:
        signed = signed_packed(scores, *narrow, dropout_p, seed, packing.beginnings, _sizes(packing))
    return out, infinite(lse), signed, seed


def attention_of(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: Number,
    scores: ScoreArguments,
    packing: Packing | None,
    deterministic: bool,
    return_attn_probs: bool,
    sinks: torch.Tensor | None = None,
) -> Returned:
    wanted = check_bool(op, "return_attn_probs", return_attn_probs)
    found: Any = attend(op, q, k, v, dropout_p, scores, packing, wanted, wanted, deterministic, sinks)
    return found[:3] if wanted else found[0]


def _paged_lengths(op: str, beginnings: Any, longest: Any) -> torch.Tensor:
    """Return lengths (B,) int32 of cu_seqlens_k; no page operation checks its first entry or max_seqlen_k."""
    check_size(op, "max_seqlen_k", longest)
    lengths = lengths_of(op, "cu_seqlens_k", beginnings)
    if not torch.compiler.is_dynamo_compiling() and beginnings.shape[0] and reads(current(), beginnings):
        cu_seqlens(op, "k", beginnings, INT32_MAX, longest)
    return lengths


def _sizes(packing: Packing) -> tuple[Any, Any]:
    return size_of(packing.longest[0]), size_of(packing.longest[1])


def shape_of(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def size_of(size: Any) -> Any:
    """Return a length as an integer; a tensor of one element counts, as in flash_attn, and is read back."""
    return int(size) if isinstance(size, torch.Tensor) and size.numel() == 1 else size


def lengths_of(op: str, name: str, beginnings: Any) -> torch.Tensor:
    check_dense(op, name, beginnings)
    if not isinstance(beginnings, torch.Tensor) or beginnings.ndim != 1 or beginnings.dtype != torch.int32:
        given = (tuple(beginnings.shape), beginnings.dtype) if isinstance(beginnings, torch.Tensor) else beginnings
        hint = as_int32(name, beginnings.dtype) if isinstance(beginnings, torch.Tensor) else ""
        raise ArgumentError(op, name, given, f"must be an int32 torch.Tensor of shape (batch + 1,){hint}")
    return beginnings.diff()
