"""Masks of Hugging Face transformers as lengths: LengthMask, and the mask function that makes one for each forward.

transformers calls a mask function once for each forward and mask kind, and hands what it returns to every layer. The
usual mask function writes out (B, 1, Sq, Sk) booleans. This one gives four (B,) int32 tensors, or none at all where
nothing is padded, and refuses, with its name, everything that lengths cannot say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import masking_utils

from portattn.config import current
from portattn.errors import ArgumentError

WHO = "portattn in transformers"
ELSEWHERE = "use attn_implementation='eager' or 'sdpa' for this model"

# What masking_utils' inner functions mean, by the function that makes them.
_REFUSED = {
    "packed_sequence_mask_function": "packed sequences (position_ids that start again inside a row)",
    "or_masks": "a union of masks (or_mask_function, or blocks that attend both ways: prefixes, images)",
    "bidirectional_mask_function": "attention in both directions",
    "sliding_window_bidirectional_overlay": "attention in both directions",
}


def refuse(feature: str, value: object, reason: str) -> ArgumentError:
    """The error for what portattn does not do here: feature, value, and what to do instead."""
    return ArgumentError(WHO, feature, value, reason)


@dataclass(slots=True, eq=False)
class LengthMask:
    """A causal, possibly padded mask of one forward: query row i of sequence b attends valid keys up to its own.

    batch, q_length, kv_length   what the mask was made for; kv_length is the rows that the cache hands to the op
    kv_used      rows of the cache that hold anything; less than kv_length in a static cache
    seqlens_q/k  (B,) int32: valid rows; None for all (of kv_used)
    leftpad_q/k  (B,) int32: padding rows before the first valid one; None for none
    flaw         (B, 1, 1, 1) float32: NaN where a row of the 2-D mask turned out not to be one run of ones, else 0.
                 The first layer adds it to its output. None where the mask has been read back and is sound

    Models, generate() and accelerate treat a mask as a 4-D tensor that is already prepared: they ask for ndim and
    shape, and call to() and contiguous(). Nothing else is offered, so that a model that computes with its mask fails.
    """

    batch: int
    q_length: int
    kv_length: int
    kv_used: int
    seqlens_q: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    leftpad_q: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    flaw: torch.Tensor | None = None

    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """The shape of the boolean mask that this stands for."""
        return torch.Size((self.batch, 1, self.q_length, self.kv_length))

    @property
    def padded(self) -> bool:
        """Whether any length or padding is given."""
        return any(t is not None for t in (self.seqlens_q, self.seqlens_k, self.leftpad_q, self.leftpad_k))

    def contiguous(self) -> LengthMask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> LengthMask:
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
        return replace(self, **moved)


# Dynamo would trace into closures and read values; the lengths are a handful of small eager operations.
@torch.compiler.disable
def length_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | LengthMask | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> LengthMask:
    """transformers' mask interface: the LengthMask of one forward.

    q_length, kv_length   query rows, and key rows that the cache will hand over
    q_offset, kv_offset   position of the first query and the first key; static caches give q_offset as a tensor
    mask_function         (batch, head, query position, key position) -> whether to attend
    attention_mask        (B, T) bool by position, True for valid tokens; None for all. Or a LengthMask that generate()
                          had made before it called the model, which is returned as it is
    kwargs                what masks of other implementations need

    Reads back whether each row of the mask is one run of ones when `reads_back` says so. Raises ArgumentError, naming
    the feature and the value, for what lengths cannot say.
    """
    if isinstance(attention_mask, LengthMask):
        return attention_mask
    _check_pattern(mask_function, kv_length, kv_offset)
    read_back = reads_back(torch.device(device), q_length)
    if read_back:
        q_offset = int(q_offset)
    stop: int | torch.Tensor = q_offset + q_length  # one past the last query's position
    mask = LengthMask(batch_size, q_length, kv_length, kv_used=kv_length)
    if isinstance(stop, int):
        mask.kv_used = min(stop - kv_offset, kv_length)

    if attention_mask is not None:
        if attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size:
            shape = tuple(attention_mask.shape)
            raise refuse("attention_mask.shape", shape, f"must be ({batch_size}, tokens so far); {ELSEWHERE}")
        first, end, sound = _runs(attention_mask)
        columns = attention_mask.shape[1]
        if isinstance(stop, int) and columns < stop:
            raise refuse(
                "attention_mask.shape[1]", columns, f"the cache and this input hold {stop} tokens: give one column each"
            )
        if read_back:
            runs, unpadded = torch.stack([sound.all(), (first.eq(0) & end.ge(stop)).all()]).tolist()
            if not runs:
                raise _not_a_run(attention_mask, sound)
            if unpadded:
                return mask
        else:
            broken = sound.logical_not() | (columns < stop)
            mask.flaw = torch.where(broken, torch.nan, 0.0).to(torch.float32)[:, None, None, None]
        end = end.clamp(max=stop)  # later positions are not there yet; causal queries do not look at them
        first = torch.minimum(first, end)
        mask.leftpad_q, mask.seqlens_q = _rows(first, end, q_offset, q_length)
        mask.leftpad_k, mask.seqlens_k = _rows(first, end, kv_offset, kv_length)
    elif isinstance(stop, torch.Tensor):
        mask.seqlens_k = (stop - kv_offset).to(torch.int32).expand(batch_size).contiguous()
    return mask


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


def _runs(valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First valid column, one past the last, and whether all between are valid, of each row of (B, T) bool."""
    columns = torch.arange(valid.shape[1], device=valid.device)
    end = torch.where(valid, columns + 1, 0).amax(dim=1)
    first = torch.where(valid, columns, valid.shape[1]).amin(dim=1).minimum(end)
    return first, end, valid.sum(dim=1) == end - first


def _rows(
    first: torch.Tensor, end: torch.Tensor, offset: int | torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [first, end) as left padding and count, (B,) int32, of the stored rows [offset, offset + length)."""
    first, end = (first - offset).clamp(0, length), (end - offset).clamp(0, length)
    return first.to(torch.int32), (end - first).to(torch.int32)


def _not_a_run(attention_mask: torch.Tensor, sound: torch.Tensor) -> ArgumentError:
    row = sound.tolist().index(False)
    values = "".join(str(int(v)) for v in attention_mask[row].tolist())
    shown = values if len(values) <= 64 else values[:61] + "..."
    return refuse(
        f"attention_mask[{row}]",
        shown,
        "must be one run of ones (left or right padding; a right-padded prompt cannot be generated from, pad it left); "
        + ELSEWHERE,
    )


def _check_pattern(mask_function: Callable[..., Any], kv_length: int, kv_offset: int) -> None:
    """Raise unless the mask function is causal, perhaps with a window or chunk so wide that it hides none of the keys.

    transformers passes closures, so they are recognised by what made them. What is not recognised is refused.
    """
    causal = False
    for part in _intersected(mask_function):
        maker, name = _origin(part)
        if part is masking_utils.causal_mask_function:
            causal = True
        elif maker == "sliding_window_overlay":
            # The last query sees the last `window` positions, and the first key is kv_length - 1 before it.
            check_window("sliding_window", _captured(part)["sliding_window"], kv_length)
        elif maker == "chunked_overlay":
            # Chunks are counted from each sequence's start, so a cache that has dropped keys can straddle two.
            check_window("attention_chunk_size", _captured(part)["chunk_size"], kv_length + kv_offset)
        else:
            raise refuse("mask", _REFUSED.get(maker, name), f"only causal masks are supported; {ELSEWHERE}")
    if not causal:
        raise refuse("mask", _origin(mask_function)[1], f"only causal masks are supported; {ELSEWHERE}")


def _origin(part: Any) -> tuple[str, str]:
    """The function of masking_utils that made a mask function, "" for another module's, and its full name."""
    module, name = getattr(part, "__module__", ""), getattr(part, "__qualname__", repr(part))
    return name.partition(".")[0] if module == masking_utils.__name__ else "", f"{module}.{name}"


def check_window(feature: str, window: int, keys: int) -> None:
    """Raise if a window of so many keys, the query's own among them, hides any of the keys there are."""
    if keys > window:
        raise refuse(
            feature, window, f"there are {keys} keys, and a window that hides some is not supported; {ELSEWHERE}"
        )


def _intersected(mask_function: Callable[..., Any]) -> Iterator[Any]:
    """The mask functions that masking_utils.and_masks has joined, nested ones taken apart."""
    if _origin(mask_function)[0] == "and_masks":
        for part in _captured(mask_function)["mask_functions"]:
            yield from _intersected(part)
    else:
        yield mask_function


def _captured(closure: Any) -> dict[str, Any]:
    cells = (cell.cell_contents for cell in closure.__closure__ or ())
    return dict(zip(closure.__code__.co_freevars, cells, strict=True))
