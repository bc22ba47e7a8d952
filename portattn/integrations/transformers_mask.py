"""Masks of Hugging Face transformers in few numbers: CompactMask, and the function that makes one for each forward.

transformers calls a mask function once for each forward and mask kind, and hands what it returns to every layer. The
usual mask function writes out (B, 1, Sq, Sk) booleans. This one says causality and windows by two integers, padding by
four (B,) int32 tensors or none at all, holes in a 2-D mask by (B, 1, 1, Sk) booleans, and writes out the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import masking_utils

from portattn.api.transform_checks import shapes_alone
from portattn.config import current
from portattn.errors import ArgumentError
from portattn.integrations.transformers_pattern import read_pattern, traced_pattern

WHO = "portattn in transformers"
ELSEWHERE = "use attn_implementation='eager' or 'sdpa' for this model"

# Configurations by id() whose read masks had holes, or right padding, which holes become once decoding goes on. Their
# decoding steps, whose masks are not read back, go by the mask itself. An id that is used again costs speed only.
_with_holes: set[int | None] = set()
# Queries a sequence up to which a call over a longer cache counts as decoding, which splits the keys over programs.
DECODE_QUERIES = 16


def refuse(feature: str, value: object, reason: str) -> ArgumentError:
    """The error for what portattn does not do here: feature, value, and what to do instead."""
    shown = f"tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
    return ArgumentError(WHO, feature, shown, reason)


@dataclass(slots=True, eq=False)
class CompactMask:
    """The mask of one forward: which keys each query sees.

    batch, q_length, kv_length   the mask's sizes; kv_length is the rows that the cache hands to the op
    kv_used      number of first rows that are filled; less than kv_length in a static cache
    left, right  keys that a query sees before and after its own position; None for all. A right of 0 is a causal mask.
                 If either is given, a sequence's last query and last key have one position
    chunk        keys of a chunk, counted from the first valid key; a query sees its own chunk. None for no chunks
    seqlens_q/k  (B,) int32: valid rows; None for all (of kv_used)
    leftpad_q/k  (B,) int32: padding rows before the first valid one; None for none
    mask         bool, broadcast to (B, 1, Sq, kv_used): hides further keys; None for none
    packed       (B, Sq): a query sees keys of its own number only. None for one sequence a row; never beside `mask`
    flaw         (B, 1, 1, 1) float32: NaN if a row of the 2-D mask turned out not to be one run of ones, else 0.
                 The first layer adds it to its output. None if the mask has been read back
    written_out  `mask` is the whole mask; left and right repeat known bounds of it, for speed
    windowed     the mask was made with a window, which `left` and `right` omit if it hides nothing

    Models, generate() and accelerate treat a mask as a 4-D tensor that is already prepared: they ask for ndim and
    shape, and call to() and contiguous(). The class has nothing else: a model that computes with its mask is refused.
    """

    batch: int
    q_length: int
    kv_length: int
    kv_used: int
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    seqlens_q: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    leftpad_q: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    flaw: torch.Tensor | None = None
    written_out: bool = False
    windowed: bool = False
    _sequences: tuple[torch.Tensor, int, torch.Tensor, int] | None = None
    _dense: tuple[bool, dict[str, Any]] | None = None

    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """The shape of the boolean mask that this stands for."""
        return torch.Size((self.batch, 1, self.q_length, self.kv_length))

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """What a causal mask leaves to say, as the ops take it."""
        right = None if self.causal else self.right
        return None if self.left is None and right is None else (self.left, right)

    @property
    def padded(self) -> bool:
        """Whether any length or padding is given."""
        return any(t is not None for t in (self.seqlens_q, self.seqlens_k, self.leftpad_q, self.leftpad_k))

    @property
    def written(self) -> torch.Tensor | None:
        """`mask`, or `packed` written out; None where there is neither."""
        return self.mask if self.packed is None else self.packed[:, None, :, None] == self.packed[:, None, None, :]

    def sequences(self) -> tuple[torch.Tensor, int, torch.Tensor, int] | None:
        """The packed sequences of all rows, one row after the other: (number + 1,) int32 beginnings and the longest,
        of queries and of keys. Read back once, as transformers itself does to find out that rows are packed. None in
        a graph, where their number is not known: `written` says it there."""
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
        """Whether a dense call is one of decoding (with dropout none is), and what the mask says to the operation. The
        same for all layers, so it is put together once; not in a graph, which would have to put it back into the
        mask."""
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
        """The mask on another device, for models whose layers lie on several. Takes what Tensor.to takes, of which
        only the device matters: lengths keep their dtype."""
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
) -> CompactMask:
    """transformers' mask interface: the CompactMask of one forward.

    q_length, kv_length   query rows, and key rows that the cache will hand over
    q_offset, kv_offset   position of the first query and the first key; static caches give q_offset as a tensor
    mask_function         (batch, head, query position, key position) -> whether to attend
    attention_mask        (B, T) bool by position, True for valid tokens; None for all. Or a CompactMask that generate()
                          had made before it called the model, which is returned as it is
    kwargs                `config`, and what masks of other implementations need

    Reads back whether each row of the mask is one run of ones when `reads_back` says so. A graph has nothing to read:
    there masks are as they are without.
    """
    if isinstance(attention_mask, CompactMask):
        return attention_mask
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size):
        shape = tuple(attention_mask.shape)
        raise refuse("attention_mask.shape", shape, f"must be ({batch_size}, tokens so far); {ELSEWHERE}")
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
    if pattern.packed is not None:
        whole &= attention_mask is None and q_length == kv_length
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
        mask.mask = masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=mask.kv_used, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, device=device,
            **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
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
    """Whether a mask function compares positions alone, by what transformers tells SDPA's mask function: it may leave
    out masks that are causal, or go both ways, but for a window or chunks. Chunks are a configuration's."""
    plain = (allow_is_causal_skip or allow_is_bidirectional_skip) and not use_vmap
    return plain and getattr(config, "attention_chunk_size", None) is None


def _is_traced(*tensors: Any) -> bool:
    """Whether a graph is being made, so that no tensor has values to read."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or shapes_alone(tensors)


def reads_back(device: torch.device, q_length: int) -> bool:
    """Whether a mask's values are read on the host, once for the whole forward.

    On the CPU always: it costs nothing. On an accelerator it waits for the device, so only when the setting `validate`
    is "always", or when there are several queries a sequence: there a wait is small beside the work, transformers' own
    masks wait too, and a batch found to have no padding may take faster paths. Single-token steps do not wait.
    """
    validate = current().validate
    if validate == "auto":
        return device.type == "cpu" or q_length > 1
    return validate == "always"


def check_window(window: int | None, mask: CompactMask) -> None:
    """Raise if a layer asks for a window, of so many keys with the query's own, and its mask was made without one.
    Where both have one the mask's counts, as it does for transformers' own functions."""
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
    """Put a 2-D mask by position, (B, T) bool, into `mask`. model: which has it, None where that cannot matter."""
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
    """First valid column, one past the last, and whether all between are valid, of each row of (B, T) bool."""
    columns = torch.arange(valid.shape[1], device=valid.device)
    end = torch.where(valid, columns + 1, 0).amax(dim=1)
    first = torch.where(valid, columns, valid.shape[1]).amin(dim=1).minimum(end)
    return first, end, valid.sum(dim=1) == end - first


def _rows(
    first: torch.Tensor, end: torch.Tensor, offset: int | torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key rows [first, end) as left padding and count, (B,) int32, of the `length` rows that begin at `offset`."""
    first, end = (first - offset).clamp(0, length), (end - offset).clamp(0, length)
    return first.to(torch.int32), (end - first).to(torch.int32)
