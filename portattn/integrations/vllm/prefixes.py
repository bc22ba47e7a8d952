"""Prefix-LM: ranges of multimodal tokens that attend to one another in both directions.

vLLM gives, for each request, ranges [first, last] of positions that do not overlap. A row inside one sees the keys of
its range besides those that causality and the layer's window show it. So the rows of one range all see keys up to the
range's last one, or to the last one that there is: they are attention without a mask over keys that end with them.

The batch is therefore taken apart: the rows before, in and after each range are sequences of their own, over the
request's pages. A range's rows are a sequence with attention in both directions, the others causal ones. No kernel
knows of ranges, none looks at a mask, and no key is read that nobody sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from portattn.errors import ArgumentError
from portattn.integrations.vllm import NAME

CLAMP = "mm_prefix_clamp_sliding_window"  # of a configuration, a model's class and a layer
Ranges = Mapping[int, Sequence[tuple[int, int]]]  # request -> first and last position of each range


@dataclass
class Cut:
    """One sequence of a batch that was taken apart.

    first, behind  rows of its request before its first row, and behind its last one
    both           its rows are a range's, and attend in both directions
    """

    request: int
    first: int
    behind: int
    both: bool


@dataclass
class Segments:
    """A batch that was taken apart: what vLLM says of requests, for each sequence. On the batch's device.

    requests  (sequences,) int64: the request of each
    first, behind  (sequences,) int32, and both (sequences,) bool: of Cut
    longest   tokens of the longest range up to the last of its rows here: as far back as a row of it sees
    """

    requests: torch.Tensor
    first: torch.Tensor
    behind: torch.Tensor
    both: torch.Tensor
    longest: int

    def starts(self, query_start_loc: torch.Tensor) -> torch.Tensor:
        """(sequences + 1,) int32: their rows. The device alone may know requests' boundaries."""
        begin = query_start_loc.index_select(0, self.requests) + self.first
        return torch.cat((begin, query_start_loc[-1:]))

    def lengths(self, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sequences,) int32 each: keys of the causal sequences, and of the others; 0 elsewhere."""
        keys = seq_lens.index_select(0, self.requests) - self.behind
        causal = keys.masked_fill(self.both, 0)
        return causal, keys - causal


def cuts(ranges: Ranges, starts: Sequence[int], keys: Sequence[int]) -> tuple[list[Cut], int]:
    """Take a batch apart.

    ranges  of requests, by positions
    starts  (requests + 1) first rows of the requests
    keys    (requests) keys of each, its new rows included; exact where a range has rows

    Returns the sequences in the order of rows, every request in at least one, and as `longest` 0 where no range has a
    row here.

    Raises ArgumentError for ranges of one request that overlap.
    """
    made: list[Cut] = []
    longest = 0
    for request, begin in enumerate(starts[:-1]):
        rows = starts[request + 1] - begin
        past, at = keys[request] - rows, 0
        previous = -1
        for first, last in sorted(ranges.get(request) or ()):
            if first >= last:  # of one token, or vLLM's padding
                continue
            if first <= previous:
                limit = f"must not overlap, and another one of request {request} ends at {previous}"
                raise ArgumentError(NAME, "mm_req_doc_ranges", (first, last), limit)
            previous = last
            low, high = max(first - past, 0), min(last - past, rows - 1)  # rows of this batch
            if low > high:
                continue
            if low > at:
                made.append(Cut(request, at, rows - low, False))
            made.append(Cut(request, low, rows - high - 1, True))
            longest, at = max(longest, past + high - first + 1), high + 1
        if at < rows or not at:
            made.append(Cut(request, at, 0, False))
    return made, longest


def segments(common: Any) -> Segments | None:
    """A batch's sequences, of vLLM's CommonAttentionMetadata; None where no row is in a range with another row.

    Raises ArgumentError for ranges that overlap, and where lengths are not known on the host or the batch is not
    causal.
    """
    ranges: Ranges | None = getattr(common, "mm_req_doc_ranges", None)
    # A single row is the last one, and sees all keys up to itself as it is.
    if not ranges or common.max_query_len <= 1 or not any(ranges.values()):
        return None
    if common.seq_lens_cpu_upper_bound is None:
        limit = "must be given with mm_req_doc_ranges: positions are compared on the host"
        raise ArgumentError(NAME, "seq_lens_cpu_upper_bound", None, limit)
    made, longest = cuts(ranges, common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist())
    if not longest:
        return None
    if common.causal is not True:
        limit = "must be True where rows are in a range of multimodal tokens"
        raise ArgumentError(NAME, "causal", common.causal, limit)
    device = common.query_start_loc.device
    numbers = async_tensor_h2d(
        [[cut.first for cut in made], [cut.behind for cut in made], [cut.request for cut in made],
         [cut.both for cut in made]], dtype=torch.int32, device=device,
    )  # fmt: skip
    return Segments(numbers[2].long(), numbers[0], numbers[1], numbers[3].bool(), longest)


def refuse_short_windows(names: Iterable[str], layers: Mapping[str, Any], model: Any) -> None:
    """Refuse layers whose window may be shorter than a range that it does not clamp.

    vLLM gives no range longer than the model's window, so that a layer with this window shows a row all of its range.
    With a shorter one the row's keys would begin with the range, not with the window. But vLLM keeps longer ranges
    where the configuration or the model's class says that windows clamp them; of the class, its layers tell.

    names   the layers in question
    layers  all of the model's, by name

    Raises ArgumentError with the layer's name.
    """
    if model is None or not getattr(model, "is_mm_prefix_lm", False):
        return
    kept = any(getattr(one, CLAMP, False) for one in (model.hf_text_config, *layers.values()))
    most = None if kept else model.get_sliding_window()
    for name in names:
        layer = layers.get(name)  # None: layers that are not vLLM's own class
        window = getattr(layer, "sliding_window", None)
        if window is None or getattr(layer, CLAMP, False):
            continue
        if most is None or window < most:
            whole = "ranges of multimodal tokens of any length" if most is None else f"the model's window, {most}"
            limit = f"must be no shorter than {whole}, or {CLAMP} must be True"
            raise ArgumentError(NAME, f"sliding_window of {name}", window, limit)
