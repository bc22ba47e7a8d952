"""Masks of transformers in few numbers: CompactMask, the function that makes one for each forward, and patterns.

Causality and windows are two integers, padding up to four (B,) int32 tensors, holes (B, 1, 1, Sk) booleans. Closures of
masking_utils are recognised by their makers; dynamo, which cannot look into them, calls with symbols."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import masking_utils

from portattn.api.transform_checks import shapes_alone
from portattn.config import current
from portattn.errors import ArgumentError


@dataclass(slots=True)
class Pattern:
    """The keys that a query may see at most, by position."""

    left: int | None = None  # keys before its own position; None for all
    right: int | None = None  # keys after it; 0 is a causal mask
    chunk: tuple[int, torch.Tensor] | None = None  # keys of a chunk, and (B,) the first position of a sequence's chunks
    packed: torch.Tensor | None = None  # (B, T): a query sees keys of its own number only
    whole: bool = True  # the mask function hides no further keys

    def narrow(self, left: int | None, right: int | None) -> None:
        self.left, self.right = _least(self.left, left), _least(self.right, right)


def read_pattern(mask_function: Callable[..., Any], positions: int) -> Pattern:
    """Return the Pattern of a mask function over `positions` positions; unknown parts, hiding more, clear `whole`."""
    pattern = Pattern()
    parts = list(_intersected(mask_function))
    packings = [part for part, _ in parts if _maker(part) == "packed_sequence_mask_function"]
    if len(packings) == 1:
        pattern.packed = _captured(packings[0])["packed_sequence_mask"]
    for part, remapped in parts:
        maker = _maker(part)
        if part in packings:
            pattern.whole &= len(packings) == 1
        elif remapped and pattern.packed is None:
            pattern.whole = False
        # Inside a packed sequence positions run on by ones: distances in it are distances in the row.
        elif part is masking_utils.causal_mask_function:
            pattern.narrow(None, 0)
        elif part is masking_utils.bidirectional_mask_function:
            pass
        elif maker == "sliding_window_overlay":
            # transformers counts the query's own position: a window of W keys reaches W - 1 back.
            pattern.narrow(_captured(part)["sliding_window"] - 1, None)
        elif maker == "sliding_window_bidirectional_overlay":
            window = _captured(part)["sliding_window"]
            pattern.narrow(window, window)
        elif maker == "chunked_overlay":
            size = _captured(part)["chunk_size"]
            pattern.narrow(size - 1, size - 1)
            # Chunks are counted from each sequence's start: one that holds every position hides nothing.
            if positions > size or remapped:
                pattern.whole &= pattern.chunk is None and not remapped
                pattern.chunk = size, _captured(part)["left_padding"]
        else:
            pattern.whole = False
    return pattern


def traced_pattern(mask_function: Callable[..., Any], plain: bool) -> Pattern:
    """Return the Pattern of a mask function that dynamo traces; functions that are not `plain` look positions up."""
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(right=0)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if not plain:
        return Pattern(whole=False)
    found = mask_function(0, 0, _Position(1, 0), _Position(0, 1))
    pattern = Pattern(whole=found.known)
    for left, right in found.bounds:
        pattern.narrow(left, right)
    return pattern


class _Condition:
    """Result of a mask function for symbols: bounds (left, right) that hold together; not `known` if there is more."""

    device = None

    def __init__(self, bounds: tuple[tuple[int | None, int | None], ...] = (), known: bool = True) -> None:
        self.bounds, self.known = bounds, known

    def __and__(self, other: Any) -> _Condition:
        if isinstance(other, _Condition):
            return _Condition(self.bounds + other.bounds, self.known and other.known)
        return _Condition(self.bounds, False)

    def __or__(self, other: Any) -> _Condition:
        return _Condition(known=False)

    def to(self, device: Any) -> _Condition:
        return self


class _Position:
    """Symbol query · the query's position + key · the key's + plus; results of another form have query None."""

    def __init__(self, query: int | None, key: int, plus: int = 0) -> None:
        self.query, self.key, self.plus = query, key, plus

    def new_ones(self, *args: Any, **kwargs: Any) -> _Condition:
        return _Condition()

    def new_zeros(self, *args: Any, **kwargs: Any) -> _Condition:
        return _Condition(known=False)

    def __add__(self, other: Any) -> _Position:
        return self - -other if isinstance(other, int) else _Position(None, 0)

    def __sub__(self, other: Any) -> _Position:
        if self.query is None:
            return self
        if isinstance(other, int):
            return _Position(self.query, self.key, self.plus - other)
        if isinstance(other, _Position) and other.query is not None:
            return _Position(self.query - other.query, self.key - other.key, self.plus - other.plus)
        return _Position(None, 0)

    def __floordiv__(self, other: Any) -> _Position:
        return _Position(None, 0)

    def __abs__(self) -> _Distance | _Position:
        return _Distance() if (self.query, self.key, self.plus) in ((1, -1, 0), (-1, 1, 0)) else _Position(None, 0)

    def __eq__(self, other: object) -> Any:
        return _Condition(known=False)

    __hash__ = None  # type: ignore[assignment]

    def __ge__(self, other: Any) -> _Condition:
        # No position is negative.
        return _Condition(known=isinstance(other, int) and other == 0 and self.query is not None and self.plus == 0)

    def __le__(self, other: Any) -> _Condition:
        rest = self - other
        if (rest.query, rest.key) == (-1, 1):  # the key's is at most the query's and -plus
            return _Condition(((None, -rest.plus),))
        return _Condition(known=False)

    def __gt__(self, other: Any) -> _Condition:
        rest = self - other
        if (rest.query, rest.key) == (-1, 1):  # the query's is less than the key's and plus
            return _Condition(((rest.plus - 1, None),))
        return _Condition(known=False)


class _Distance:
    def __le__(self, other: Any) -> _Condition:
        return _Condition(((other, other),)) if isinstance(other, int) else _Condition(known=False)


def _least(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def _maker(part: Any) -> str:
    inside = getattr(part, "__module__", "") == masking_utils.__name__
    return getattr(part, "__qualname__", "").partition(".")[0] if inside else ""


def _intersected(mask_function: Callable[..., Any], remapped: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the intersected mask functions, nested ones too, and whether positions are those in packed sequences."""
    maker = _maker(mask_function)
    if maker == "and_masks":
        for part in _captured(mask_function)["mask_functions"]:
            yield from _intersected(part, remapped)
    elif maker == "remap_positions_for_packed_sequence":
        yield from _intersected(_captured(mask_function)["mask_function"], True)
    else:
        yield mask_function, remapped


def _captured(closure: Any) -> dict[str, Any]:
    cells = (cell.cell_contents for cell in closure.__closure__ or ())
    return dict(zip(closure.__code__.co_freevars, cells, strict=True))


WHO = "portattn in transformers"
ELSEWHERE = "use attn_implementation='eager' or 'sdpa' for this model"

# Configurations by id() whose read masks had holes, or right padding, which holes become once decoding goes on. Their
# decoding steps, whose masks are not read back, go by the mask itself. An id that is used again costs speed only.
_with_holes: set[int | None] = set()
# Queries a sequence up to which a call over a longer cache counts as decoding, which splits the keys over programs.
DECODE_QUERIES = 16


def refuse(feature: str, value: object, reason: str) -> ArgumentError:
    shown = f"tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
    return ArgumentError(WHO, feature, shown, reason)


@dataclass(slots=True, eq=False)
class CompactMask:
    """The mask of one forward.

    Models, generate() and accelerate treat it as a prepared 4-D tensor: they read ndim and shape, and call to() and
    contiguous(); a model that computes with its mask is refused."""

    batch: int
    q_length: int
    kv_length: int  # rows that the cache hands to the op
    kv_used: int  # filled first rows; less than kv_length in a static cache
    # Keys that a query sees before and after its position; with either, last query and last key share one position.
    left: int | None = None
    right: int | None = None  # keys after it; 0 is a causal mask
    chunk: int | None = None  # keys of a chunk, counted from the first valid key; a query sees its own chunk
    seqlens_q: torch.Tensor | None = None  # (B,) int32: valid rows; None for all
    seqlens_k: torch.Tensor | None = None  # (B,) int32; None for all of kv_used
    leftpad_q: torch.Tensor | None = None  # (B,) int32: padding rows before the first valid one
    leftpad_k: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # bool, broadcast to (B, 1, Sq, kv_used): hides further keys
    packed: torch.Tensor | None = None  # (B, Sq): a query sees keys of its own number only; never beside `mask`
    # (B, 1, 1, 1): NaN if a row of the 2-D mask is not one run of ones, else 0; None if read back.
    # The first layer adds it to its output.
    flaw: torch.Tensor | None = None
    written_out: bool = False  # `mask` is the whole mask; left and right repeat known bounds of it, for speed
    windowed: bool = False  # made with a window, which `left` and `right` omit if it hides nothing
    _sequences: tuple[torch.Tensor, int, torch.Tensor, int] | None = None
    _dense: tuple[bool, dict[str, Any]] | None = None

    ndim = 4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, self.q_length, self.kv_length))

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """The window beside a causal mask, as the ops take it."""
        right = None if self.causal else self.right
        return None if self.left is None and right is None else (self.left, right)

    @property
    def padded(self) -> bool:
        return any(t is not None for t in (self.seqlens_q, self.seqlens_k, self.leftpad_q, self.leftpad_k))

    @property
    def written(self) -> torch.Tensor | None:
        """`mask`, or `packed` written out; None without either."""
        return self.mask if self.packed is None else self.packed[:, None, :, None] == self.packed[:, None, None, :]

    def sequences(self) -> tuple[torch.Tensor, int, torch.Tensor, int] | None:
        """Return the packed sequences' beginnings and the longest, read back once; None in a graph, see `written`."""
        if self._sequences is None:
            assert self.packed is not None
            if _is_traced(self.packed):
                return None
            begins = torch.ones_like(self.packed, dtype=torch.bool)
            begins[:, 1:] = self.packed[:, 1:] != self.packed[:, :-1]
            begins = torch.cat([begins.flatten(), begins.new_ones(1)]).nonzero().flatten().to(torch.int32)
            longest = int(begins.diff().max())
            self._sequences = begins, longest, begins, longest
        return self._sequences

    def dense(self) -> tuple[bool, dict[str, Any]]:
        """Return whether a dense call is one of decoding, and the mask as arguments; stored only outside graphs."""
        if self._dense is not None:
            return self._dense
        decodes, causal = False, self.causal
        if self.q_length == 1:  # it sees every valid key before it: it needs no bounds and no causality of its own
            decodes, causal = True, False
        elif self.seqlens_q is None and self.q_length < self.kv_used and self.q_length <= DECODE_QUERIES:
            decodes = True
        found: dict[str, Any] = {
            "causal": causal, "window": self.window, "chunk": self.chunk, "mask": self.written,
            "seqlens_k": self.seqlens_k,
            "leftpad_k": self.leftpad_k,
        }  # fmt: skip
        if not decodes:
            found["seqlens_q"], found["leftpad_q"] = self.seqlens_q, self.leftpad_q
        if not torch.compiler.is_compiling():
            self._dense = decodes, found
        return decodes, found

    def contiguous(self) -> CompactMask:
        return self

    def __getitem__(self, index: Any) -> CompactMask:
        raise refuse("attention_mask", self, f"this model takes slices of its mask; {ELSEWHERE}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = getattr(function, "__name__", function)
        raise refuse("attention_mask", cls.__name__, f"this model computes with its mask ({what}); {ELSEWHERE}")

    def to(self, *args: Any, **kwargs: Any) -> CompactMask:
        """Return the mask on another device, for models with layers on several; lengths keep their dtype."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, torch.Tensor):
            device = device.device
        if device is None or isinstance(device, torch.dtype):
            return self
        copy = kwargs.get("non_blocking", False)
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=copy)
            for f in fields(self)
            if isinstance(getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **moved, _sequences=None, _dense=None)


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | CompactMask | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> CompactMask | torch.Tensor:
    """Return the CompactMask of one forward, as transformers' mask interface; for models with an indexer a whole mask.

    attention_mask is (B, T) bool by position, or a CompactMask that generate() made before, returned unchanged. Static
    caches give q_offset as a tensor. A graph never reads a mask back."""
    if isinstance(attention_mask, CompactMask):
        return attention_mask
    whole_mask = functools.partial(
        masking_utils.sdpa_mask, batch_size=batch_size, q_length=q_length, kv_offset=kv_offset, device=device,
        mask_function=mask_function, attention_mask=attention_mask,
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )  # fmt: skip
    if getattr(kwargs.get("config"), "index_topk", None) is not None:  # an indexer adds the mask to its scores
        return whole_mask(kv_length=kv_length, q_offset=q_offset)
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size):
        limit = f"must be ({batch_size}, tokens so far); {ELSEWHERE}"
        raise refuse("attention_mask.shape", tuple(attention_mask.shape), limit)
    traced = _is_traced(q_offset, attention_mask)
    read_back = not traced and reads_back(torch.device(device), q_length)
    # A step's number would have a static cache's graph compiled for each step.
    if read_back and (q_length > 1 or current().validate == "always"):
        q_offset = int(q_offset)
    if torch.compiler.is_dynamo_compiling():
        pattern = traced_pattern(mask_function, _looks_nothing_up(**kwargs))
    else:
        pattern = read_pattern(mask_function, kv_length + kv_offset)
    causal = pattern.right == 0
    stop = q_offset + q_length - kv_offset  # the key row after the last query's own
    mask = CompactMask(batch_size, q_length, kv_length, kv_length, pattern.left, pattern.right)
    mask.windowed = mask.left is not None
    if causal and isinstance(stop, int):
        mask.kv_used = min(stop, kv_length)
    # Where queries are placed by counting from the last key, it must be the last query's. A static cache does not say
    # how far it is filled; the lengths say it then.
    by_position = mask.left is not None or mask.right is not None
    aligned = not by_position or (stop == mask.kv_used if isinstance(stop, int) else causal)
    whole = pattern.whole and aligned
    whole &= pattern.packed is None or (attention_mask is None and q_length == kv_length)
    if pattern.chunk is not None:
        begins = pattern.chunk[1]
        whole &= pattern.packed is None and kv_offset == 0 and read_back and _are_first(begins, attention_mask)
        mask.chunk = pattern.chunk[0] if whole else None
    if not aligned:
        mask.left = mask.right = None
    if not traced:  # lengths can be symbolic there, and a comparison would fix them
        _drop_what_hides_nothing(mask)

    if not whole:
        mask.written_out = True
        mask.mask = whole_mask(kv_length=mask.kv_used, q_offset=q_offset)
    elif pattern.packed is not None:
        mask.packed = pattern.packed.expand(batch_size, -1)
    if attention_mask is not None and whole:
        model = None if traced else id(kwargs.get("config"))
        _pad(mask, attention_mask, stop, kv_offset, read_back, model)
    if isinstance(stop, torch.Tensor) and mask.causal and mask.seqlens_k is None:
        mask.seqlens_k = stop.to(torch.int32).expand(batch_size).contiguous()
    return mask


def _are_first(begins: torch.Tensor, valid: torch.Tensor | None) -> bool:
    """Return whether positions (B,) point at the first valid tokens, and no row has holes behind its own."""
    if valid is None:
        return not bool(begins.any())
    first, _, sound = _runs(valid)
    return bool((sound & (first == begins.to(first.device))).all())


def _looks_nothing_up(
    config: Any = None,
    use_vmap: bool = True,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> bool:
    """Return whether a mask function compares positions alone: transformers lets SDPA omit such masks."""
    plain = (allow_is_causal_skip or allow_is_bidirectional_skip) and not use_vmap
    return plain and getattr(config, "attention_chunk_size", None) is None


def _is_traced(*tensors: Any) -> bool:
    """Return whether a graph is being made, so that tensors have no values to read."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or shapes_alone(tensors)


def reads_back(device: torch.device, q_length: int) -> bool:
    """Return whether a mask's values are read on the host, once for the whole forward.

    An accelerator waits for it, so only with validate="always" or several queries a sequence: a small wait beside the
    work, and a batch without padding may take faster paths."""
    validate = current().validate
    if validate == "auto":
        return device.type == "cpu" or q_length > 1
    return validate == "always"


def check_window(window: int | None, mask: CompactMask) -> None:
    """Raise if a layer asks for a window (keys, its own included) and its mask has none; else the mask's counts."""
    if window is None or mask.windowed or mask.written_out or mask.kv_used <= window:
        return
    raise refuse(
        "sliding_window",
        window,
        f"this layer's mask was made without it and shows {mask.kv_used} keys; {ELSEWHERE}",
    )


def _drop_what_hides_nothing(mask: CompactMask) -> None:
    if mask.left is not None and mask.left >= mask.kv_used - 1:
        mask.left = None
    if mask.right is not None and mask.q_length <= mask.kv_used <= mask.right + 1:
        mask.right = None


def _pad(
    mask: CompactMask,
    valid: torch.Tensor,
    stop: int | torch.Tensor,
    kv_offset: int,
    read_back: bool,
    model: int | None,
) -> None:
    """Put a 2-D mask by position, (B, T) bool, into `mask`; `model` has it, or None if that cannot matter."""
    columns = valid.shape[1]
    short: torch.Tensor | None = None
    if mask.causal and isinstance(stop, torch.Tensor) and not read_back:
        short = columns < stop + kv_offset
    elif mask.causal and columns < stop + kv_offset:
        needed = int(stop + kv_offset)
        limit = f"the cache and this input hold {needed} tokens: give one column each"
        raise refuse("attention_mask.shape[1]", columns, limit)
    valid = valid[:, kv_offset : kv_offset + mask.kv_used]
    if valid.shape[1] < mask.kv_used:
        valid = torch.nn.functional.pad(valid, (0, mask.kv_used - valid.shape[1]))
    first, end, sound = _runs(valid)
    if read_back:
        early = end.gt(0) & end.lt(mask.kv_used)
        facts = [sound.all(), (first.eq(0) & end.eq(mask.kv_used)).all(), early.any()]
        runs, unpadded, right_padded = torch.stack(facts).tolist()
        if not runs or (right_padded and mask.causal and not torch.is_grad_enabled()):  # training does not go on
            _with_holes.add(model)
        if not runs:
            mask.mask = valid[:, None, None, :]
        if unpadded or not runs:
            return
    elif model in _with_holes:
        mask.mask = valid[:, None, None, :]
    else:
        broken = sound.logical_not() if short is None else sound.logical_not() | short
        mask.flaw = torch.where(broken, torch.nan, 0.0).to(torch.float32)[:, None, None, None]
    if mask.causal:
        end = end.clamp(max=stop)  # later positions are not there yet; causal queries do not look at them
        first = torch.minimum(first, end)
    mask.leftpad_k, mask.seqlens_k = _rows(first, end, 0, mask.kv_used)
    # A single query sees every valid key before it. Of several, each needs its place among the keys.
    if mask.q_length > 1 and (mask.left is not None or mask.right is not None):
        mask.leftpad_q, mask.seqlens_q = _rows(first, end, stop - mask.q_length, mask.q_length)


def _runs(valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return first valid column, end, and whether all between are valid, of each row of (B, T) bool."""
    columns = torch.arange(valid.shape[1], device=valid.device)
    end = torch.where(valid, columns + 1, 0).amax(dim=1)
    first = torch.where(valid, columns, valid.shape[1]).amin(dim=1).minimum(end)
    return first, end, valid.sum(dim=1) == end - first


def _rows(
    first: torch.Tensor, end: torch.Tensor, offset: int | torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key rows [first, end) as left padding and count, (B,) int32, among `length` rows from `offset` on."""
    first, end = (first - offset).clamp(0, length), (end - offset).clamp(0, length)
    return first.to(torch.int32), (end - first).to(torch.int32)
