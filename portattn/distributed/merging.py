"""Partial results merged by their log-sum-exps, and parts of gradients added up, on one rank.

On a device for which Triton compiles, one kernel reads both parts and writes their sum (portattn/kernels/merge.py);
elsewhere torch's operations do the same, in more passes over memory. Parts are in the dtype of q, as local calls return
them. Of at most two parts the sum is rounded to that dtype at once, which is what rounding a float32 sum gives; of more
it is kept in float32.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from portattn.distributed.partials import merge_partials, unpack_rows
from portattn.errors import FallbackWarning
from portattn.launch.run import device_guard, load_kernels
from portattn.schema.lowering import FUSED

Rows = tuple[int, int]  # from the first on, up to the last, exclusive
BLOCK = 16  # rows of a program of merge_rows
OLDEST = (8, 0)  # compute capability from which on Triton compiles for NVIDIA's GPUs
PARTS = 2  # of a row, whose sum needs no float32 memory


@functools.cache
def can_fuse(device: torch.device) -> bool:
    """Whether the kernels run on tensors of this device: tried once, since a host may have no C compiler, say. Where
    they do not, there is a warning, and torch's operations do the same."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        memory = torch.zeros(1, device=device)
        kernels: Any = load_kernels("portattn.kernels.pause", False)
        with device_guard(memory):
            kernels.pause[(1,)](memory, 0.0, 1, num_warps=1, **FUSED)
    except Exception as error:  # noqa: BLE001 whatever a compiler or a driver raises: the call goes on without
        text = f"partial results are merged by torch's operations: kernels do not run on {device}: {error}"
        warnings.warn(text, FallbackWarning, stacklevel=2)
        return False
    return True


def most_parts(rows: Iterable[Rows]) -> int:
    """How many of these ranges the row has that is in most of them."""
    edges = sorted((place, step) for start, stop in rows if start < stop for place, step in ((start, 1), (stop, -1)))
    most = now = 0
    for _, step in edges:  # at one place ends come before beginnings
        now += step
        most = max(most, now)
    return most


class StateMerger:
    """Partial results of this rank's rows, merged as they come: out (B, H, S, Dv) and lse (B, H, S) float32.

    parts  most partial results of one row
    dtype  of the result; while it is merged out may be float32
    """

    __slots__ = ("_device", "_dtype", "_made", "_sizes", "lse", "out")
    out: torch.Tensor
    lse: torch.Tensor

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, parts: int) -> None:
        self._dtype = dtype if parts <= PARTS else torch.float32
        self._sizes, self._device, self._made = tuple(sizes), device, False

    def add(self, rows: Rows, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result of the rows from rows[0] on; `out` may be kept or overwritten. Its rows with an LSE of
        -inf may hold anything, except in the first part, which must hold 0 there, as calls return it."""
        if not self._made and rows == (0, self._sizes[2]):
            self.out, self.lse, self._made = out.to(self._dtype), lse, True
            return
        self.finish()
        at = slice(*rows)
        merge(self.out[:, :, at], self.lse[:, :, at], out, lse)

    def finish(self) -> None:
        """Set rows without a part to 0 and -inf."""
        if not self._made:
            self.out = torch.zeros(self._sizes, dtype=self._dtype, device=self._device)
            self.lse = torch.full(self._sizes[:3], float("-inf"), dtype=torch.float32, device=self._device)
            self._made = True

    def count_sinks(self, sinks: torch.Tensor, real: Rows | None) -> None:
        """Count the sinks (Hq,), one more score of each row without a value: once, whatever number of ranks.

        real  rows before the padding of packed rows; None for all
        """
        self.finish()
        at = slice(*real) if real is not None else slice(None)
        mine, before = self.out[:, :, at], self.lse[:, :, at]
        with_sink = torch.logaddexp(before, sinks.float()[None, :, None])
        nothing = with_sink == -torch.inf  # a sink of -inf, and no key: the difference of two infinities is NaN
        mine.mul_(torch.where(nothing, 1.0, torch.exp(before - with_sink))[..., None])
        before.copy_(with_sink)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge part (B, H, S, D) into out, in place, and their log-sum-exps (B, H, S) float32; any strides. A part's rows
    at -inf may hold anything, and may be overwritten."""
    if not out.numel():
        return
    if can_fuse(out.device) and out.stride(3) == part.stride(3) == 1:
        _launch(out, lse, part, part_lse)
        return
    largest = torch.maximum(lse, part_lse)
    base = largest.masked_fill(torch.isneginf(largest), 0.0)
    kept, added = torch.exp(lse - base), torch.exp(part_lse - base)
    total = kept + added
    share = 1.0 / total.masked_fill(total == 0.0, 1.0)
    theirs = part.masked_fill_(torch.isneginf(part_lse)[..., None], 0.0).float()
    out.copy_(out.float().mul_((kept * share)[..., None]).addcmul_(theirs, (added * share)[..., None]))
    lse.copy_(base + torch.log(total))


def _launch(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    _, heads, rows, width = out.shape
    count = out.numel() // width
    strides = (stride for tensor in (out, lse, part, part_lse) for stride in tensor.stride()[:3])
    kernels: Any = load_kernels("portattn.kernels.merge", False)
    with device_guard(out):
        kernels.merge_rows[(-(-count // BLOCK),)](
            out, lse, part, part_lse, *strides, heads, rows, count,
            WIDTH=width, BLOCK_WIDTH=_power(width), BLOCK=BLOCK, **FUSED,
        )  # fmt: skip


def merge_words(words: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What ranks sent of their partial results (N, …, words), as partials.packed makes it, merged: out (…, width) of
    this dtype and lse (…) float32, contiguous. Every rank adds in the same order, so that all have the same bits.

    While torch.compile traces, torch's operations, which it fuses itself.
    """
    if torch.compiler.is_compiling() or not can_fuse(words.device):
        found, lse = merge_partials(*unpack_rows(words, width, dtype))
        return found.to(dtype), lse
    words = words.contiguous()
    out = torch.empty(*words.shape[1:-1], width, dtype=dtype, device=words.device)
    lse = torch.empty(words.shape[1:-1], dtype=torch.float32, device=words.device)
    if not lse.numel():
        return out, lse
    kernels: Any = load_kernels("portattn.kernels.merge", False)
    values, states = words.view(dtype), words.view(torch.float32)
    with device_guard(words):
        kernels.merge_parts[(lse.numel(),)](
            values, states, out, lse, lse.numel(),
            PARTS=words.shape[0], WIDTH=width, BLOCK_WIDTH=_power(width), VALUES=values.shape[-1],
            STATES=states.shape[-1], **FUSED,
        )  # fmt: skip
    return out, lse


def _power(width: int) -> int:
    return 1 << max(width - 1, 0).bit_length()


class Sum:
    """Parts of a gradient (B, H, S, D), added up as they come.

    parts  most parts of one row
    """

    __slots__ = ("_dtype", "_found", "_sizes", "_wide")

    def __init__(self, like: torch.Tensor, parts: int) -> None:
        self._dtype, self._sizes = like.dtype, like.shape
        self._wide = like.dtype if parts <= PARTS else torch.float32
        self._found: torch.Tensor | None = None

    def add(self, rows: Rows, part: torch.Tensor) -> None:
        """One more part of the rows from rows[0] on, which is kept or added."""
        if self._found is None and rows == (0, self._sizes[2]):
            self._found = part.to(self._wide)
            return
        if self._found is None:
            self._found = torch.zeros(self._sizes, dtype=self._wide, device=part.device)
        self._found[:, :, slice(*rows)] += part

    def result(self, device: torch.device) -> torch.Tensor:
        """In the tensor's own dtype."""
        if self._found is None:
            return torch.zeros(self._sizes, dtype=self._dtype, device=device)
        return self._found.to(self._dtype)
