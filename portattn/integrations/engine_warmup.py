"""Compile every call that an engine's adapter can make, before the engine's first request."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from portattn.api.warmup import MOST_JOBS, Warmup, warmup
from portattn.config import Settings, available_cores, settings
from portattn.schema.tensors import POINTER_ALIGNMENT, TensorSpec

SAY_SECONDS = 5.0  # between two lines about progress
# Sizes among which plans can differ one by one, and the ratio of further ones. Splits over keys change with programs
# per core, by halves; tuning's conditions are at powers of two and next to them.
DENSE, RATIOS = 32, (1.05, 1.1, 1.25, 1.5, 2.0)
LONGEST = (*range(1, 18), *(size for power in range(5, 24) for size in (2**power - 1, 2**power, 2**power + 1)))
PARTS = 4  # of a request, on average, where it is divided
MOST_POINTS = 1 << 18  # of which the densest sizes are taken
BETWEEN = 1 << 13  # sizes that are drawn from all


def sizes_to(most: int, ratio: float = RATIOS[0]) -> list[int]:
    """Return numbers in 1..most, denser at the beginning; `most` is one of them."""
    found = list(range(1, min(most, DENSE) + 1))
    while found[-1] < most:
        found.append(min(int(found[-1] * ratio) + 1, most))
    return found


@functools.cache
def packed_sizes(
    sequences: int, tokens: int, rows: int, single: bool = True, divided: bool = False, columns: tuple[int, ...] = (1,)
) -> dict[str, torch.Tensor]:
    """Return sizes of packed queries: B sequences, T rows in all, M of the longest one, C columns of a page table.

    Args:
        rows: most of a sequence
        single: batches of one row for each sequence are among them
        divided: M is of the longest request, each of which may be several sequences
    """
    most = min(tokens, rows)
    longest = [size for size in LONGEST if size < most] + [most]
    for ratio in RATIOS:
        lists = sizes_to(sequences, ratio), sizes_to(tokens, ratio), longest
        if math.prod(map(len, lists)) * len(columns) <= MOST_POINTS:
            break
    drawn = torch.Generator().manual_seed(0)
    # As many at each scale; and single sequences, and batches of as many rows for each, which are on no lattice.
    limits = torch.tensor([sequences, tokens, most])
    between = (limits ** torch.rand(BETWEEN, 3, generator=drawn, dtype=torch.float64)).round().long()
    alone = torch.tensor(sizes_to(most, 1.01))
    even = torch.cartesian_prod(torch.tensor(lists[0]), torch.tensor(longest))
    parts = [
        torch.cartesian_prod(*map(torch.tensor, lists)), between, torch.stack([alone**0, alone, alone], 1),
        torch.stack([even[:, 0], even[:, 0] * even[:, 1], even[:, 1]], 1),
    ]  # fmt: skip
    b, t, m = torch.cat(parts).unbind(1)
    fits = (b <= t) & (m <= t) if divided else (b + m - 1 <= t) & (t <= b * m)
    points = torch.cat(parts)[fits & (t <= tokens) & ((m > 1) | single)]
    wide = torch.tensor(columns).repeat_interleave(len(points))
    points = torch.cat([points.repeat(len(columns), 1), wide[:, None]], 1)
    return dict(zip("BTMC", points[points[:, :3].prod(1).argsort(stable=True)].unbind(1), strict=True))


def _whole(*shape: int | str, dtype: torch.dtype = torch.int32, kept: bool = True) -> TensorSpec:
    """Return the spec of a contiguous tensor, by default of one of the engine's own buffers of int32."""
    return TensorSpec(shape, None, dtype, kept=kept)


class RowLayout(NamedTuple):
    """Rows of one tensor of a batch: contiguous, or a part of wider ones. Strides and offset are in elements."""

    heads: int
    width: int
    stride: int = 0  # from a row to the next; 0: contiguous rows
    head_stride: int = 0  # 0: the width
    offset: int = 0

    def spec(self, name: str, dtype: torch.dtype, each: int = 0) -> TensorSpec:
        """Return the spec of (name, heads, width), or of (name, each, heads, width) with `each` rows of a sequence."""
        step = self.head_stride or self.width
        stride = self.stride or self.heads * step
        if not each:
            return TensorSpec((name, self.heads, self.width), (stride, step, 1), dtype, self.offset)
        strides = each * stride, self.heads * step if each == 1 else stride, step, 1  # a new axis of 1: as x[:, None]
        return TensorSpec((name, each, self.heads, self.width), strides, dtype, self.offset)


def projection_layouts(
    heads: int, kv_heads: int, width: int, width_v: int
) -> list[tuple[RowLayout, RowLayout, RowLayout]]:
    """Return rows of q, k and v: tensors of their own, and parts of one projection's rows, all or k and v alone."""
    row = (heads + kv_heads) * width + kv_heads * width_v
    own = RowLayout(heads, width), RowLayout(kv_heads, width), RowLayout(kv_heads, width_v)
    part = RowLayout(heads, width, row), RowLayout(kv_heads, width, row, 0, heads * width)
    value = RowLayout(kv_heads, width_v, row, 0, (heads + kv_heads) * width)
    return [own, (*part, value), (own[0], own[1], value), (*part, own[2])]


@dataclass
class Engine:
    """The limits of an engine's batches, and descriptions of their tensors."""

    sequences: int
    tokens: int  # of a batch's queries
    new: int  # tokens that a batch writes
    rows: int  # of one sequence
    columns: Sequence[int]  # widths that a page table may have
    dtype: torch.dtype
    device: torch.device
    non_causal: bool = False
    ranges: bool = False  # of multimodal tokens

    def uniform(self, queries: Mapping[str, RowLayout], each: int = 1) -> dict[str, Any]:
        """Return arguments of as many rows for each sequence."""
        made = {name: rows.spec("B", self.dtype, each) for name, rows in queries.items()}
        sizes = {"B": range(1, self.sequences + 1), "C": self.columns}
        return {**made, "layout": "bshd", "sizes": sizes, **self._table()}

    def packed(
        self, queries: Mapping[str, RowLayout], single: bool = True, divided: bool = False, longest: bool = True
    ) -> dict[str, Any]:
        """Return arguments of packed rows.

        Args:
            single: there are batches of one row for each sequence
            divided: requests are divided, as at ranges of multimodal tokens
            longest: the host knows the rows of the longest sequence
        """
        sequences = self.sequences * (PARTS if divided else 1)
        sizes = packed_sizes(sequences, self.tokens, self.rows, single, divided, tuple(self.columns))
        if not longest:
            sizes = {name: size for name, size in sizes.items() if name != "M"}
        made = self._ragged(queries, kept=not divided) | self._table(kept=not divided) | {"sizes": sizes}
        return made if longest else made | {"max_seqlen_q": None}

    def _ragged(self, queries: Mapping[str, RowLayout], kept: bool = True) -> dict[str, Any]:
        made = {name: rows.spec("T", self.dtype) for name, rows in queries.items()}
        return {**made, "cu_seqlens_q": _whole("B+1", kept=kept), "max_seqlen_q": "M"}

    def _table(self, kept: bool = True) -> dict[str, Any]:
        return {"page_table": _whole("B", "C", kept=kept), "seqlens_k": _whole("B", kept=kept)}

    def new_tokens(self, k: RowLayout, v: RowLayout) -> dict[str, Any]:
        """Return arguments of `write_pages` about new tokens."""
        made = {"op": "write_pages", "k": k.spec("T", self.dtype), "v": v.spec("T", self.dtype)}
        return made | {"slot_mapping": _whole("T", dtype=torch.int64), "sizes": {"T": range(1, self.new + 1)}}

    def self_attention(self, q: RowLayout, k: RowLayout, v: RowLayout) -> dict[str, Any]:
        """Return arguments of `varlen_attention` of sequences to themselves."""
        made = {"k": k.spec("T", self.dtype), "v": v.spec("T", self.dtype), "op": "varlen_attention"}
        made |= {"cu_seqlens_k": _whole("B+1"), "max_seqlen_k": "M"}
        sizes = packed_sizes(self.sequences, self.tokens, self.rows)
        return self._ragged({"q": q}) | made | {"sizes": {name: sizes[name] for name in "BTM"}}


def contract(invariant: Any) -> contextlib.AbstractContextManager[Settings | None]:
    """Return a block whose calls keep the order of each row's keys, if an engine was started so."""
    return settings(invariant=True) if invariant else contextlib.nullcontext()


def needs_warmup(device: torch.device) -> bool:
    """Return whether calls on a device compile kernels: on a CPU they do not."""
    return device.type != "cpu"


def compile_calls(
    specs: Callable[[], Sequence[Mapping[str, Any]]], device: torch.device, log: logging.Logger, ranks: int = 1
) -> Warmup | None:
    """Make specs and warm them up by one `warmup`, with progress in the log.

    A failure is a warning there, and None is returned if nothing was warmed up: start-up goes on, and a call that was
    not warmed up is planned when it comes.

    Args:
        ranks: processes of this host that warm up at the same time
    """
    try:
        return _compile(specs(), device, log, max(1, min(MOST_JOBS, available_cores() // 2) // ranks))
    except Exception as error:  # an engine starts without what it was to be spared
        log.warning("portattn: nothing was compiled before the first request: %s", error, exc_info=True)
        return None


def _compile(specs: Sequence[Mapping[str, Any]], device: torch.device, log: logging.Logger, jobs: int) -> Warmup:
    said = time.monotonic()

    def say(text: str) -> None:
        nonlocal said
        if text.startswith("compiling") or time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            log.info("portattn: %s", text)

    unique: list[Mapping[str, Any]] = []
    seen: list[list[Any]] = []
    for spec in specs:
        kind = [(name, _kind(value)) for name, value in spec.items()]
        if kind not in seen:
            seen.append(kind)
            unique.append(spec)
    with _frozen_objects():
        report = warmup(unique, device=device, jobs=jobs, say=say)
    for one in report.specs:
        if one.failed or not one.key:  # of a failed compile there is an Incident
            log.warning("portattn: %s: %s", one.call, one.failed or f"no kernel of portattn's runs, but {one.path}")
    compiled = len({one.key for one in report.specs if one.compiled})
    log.info(
        "portattn: %d kinds of calls ready in %.1f s; %d were compiled", len(report.specs), report.seconds, compiled
    )
    return report


@contextlib.contextmanager
def _frozen_objects() -> Iterator[None]:
    """Spare an engine's objects from the block's garbage collections, of which each would take half a second.

    An engine that has frozen objects itself keeps them frozen."""
    frozen = gc.get_freeze_count() > 0
    if not frozen:
        gc.collect()  # garbage that stays would keep its memory of the device
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def _kind(value: Any) -> Any:
    """Return an argument's part of a call's class: of a tensor all but its data."""
    if isinstance(value, dict):
        return [(name, id(sizes) if isinstance(sizes, torch.Tensor) else sizes) for name, sizes in value.items()]
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.dtype, value.data_ptr() % POINTER_ALIGNMENT, value.is_inference()
