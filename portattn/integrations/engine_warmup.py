"""Compile every call that an engine's adapter can make, before the engine's first request."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portattn.api.warmup import TensorSpec, Warmup, warmup
from portattn.errors import PortattnError
from portattn.schema.tensors import POINTER_ALIGNMENT

SAY_SECONDS = 5.0  # between two lines about progress
# Sizes among which plans can differ one by one, and the ratio of further ones. Splits over keys change with programs
# per core, by halves; tuning's conditions are at powers of two and next to them.
DENSE, RATIO = 32, 1.05
ROWS = (*range(1, 18), *(size for power in range(5, 24) for size in (2**power - 1, 2**power, 2**power + 1)))


def sizes_to(most: int) -> list[int]:
    """Return numbers in 1..most, denser at the beginning; `most` is one of them."""
    found = list(range(1, min(most, DENSE) + 1))
    while found[-1] < most:
        found.append(min(int(found[-1] * RATIO) + 1, most))
    return found


@functools.cache
def packed_sizes(
    sequences: int, tokens: int, rows: int, single: bool = False, columns: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Return "sizes" and "only" of a spec of packed queries: B sequences, T rows in all, M of the longest sequence.

    Each sequence has a row. single: batches of one row for each sequence are among them. columns: sizes named C.
    """

    def only(B: torch.Tensor, T: torch.Tensor, M: torch.Tensor, **other: torch.Tensor) -> torch.Tensor:
        return (B + M - 1 <= T) & (T <= B * M) & ((M > 1) | single)

    return _sizes(sequences, tokens, rows, columns) | {"only": only}


@functools.cache
def divided_sizes(sequences: int, tokens: int, rows: int, columns: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the same of requests that are divided into several sequences, with M of the longest request."""

    def only(B: torch.Tensor, T: torch.Tensor, M: torch.Tensor, **other: torch.Tensor) -> torch.Tensor:
        return (B <= T) & (M <= T) & (M > 1)

    return _sizes(sequences, tokens, rows, columns) | {"only": only}


def _sizes(sequences: int, tokens: int, rows: int, columns: tuple[int, ...]) -> dict[str, Any]:
    longest = [size for size in ROWS if size < min(tokens, rows)] + [min(tokens, rows)]
    named = {"B": sizes_to(sequences), "T": sizes_to(tokens), "M": longest}
    return {"sizes": named | ({"C": columns} if columns else {})}


def _whole(*shape: int | str, dtype: torch.dtype = torch.int32, kept: bool = True) -> TensorSpec:
    """Return the spec of a contiguous tensor, by default of one of the engine's own buffers of int32."""
    return TensorSpec(shape, None, dtype, kept=kept)


@dataclass
class Engine:
    """The limits of an engine's batches, and descriptions of their tensors. Rows are given by their strides."""

    sequences: int
    tokens: int
    rows: int  # of one sequence
    columns: list[int]  # widths that a block table may have
    dtype: torch.dtype
    device: torch.device
    non_causal: bool = False
    ranges: bool = False  # of multimodal tokens

    def strides(self, heads: int, kv_heads: int, width: int, fused: bool = True) -> list[tuple[int, int, int]]:
        """Return heads, width and row strides of queries: by themselves, and beside keys and values."""
        rows = [heads * width, (heads + 2 * kv_heads) * width][: 1 + fused]
        return [(heads, width, row) for row in rows]

    def table(self, kept: bool = True) -> dict[str, Any]:
        return {"page_table": _whole("B", "C", kept=kept), "seqlens_k": _whole("B", kept=kept)}

    def single(self, queries: tuple[int, int, int], **named: Any) -> dict[str, Any]:
        heads, width, row = queries
        q = TensorSpec(("B", 1, heads, width), (row, heads * width, width, 1), self.dtype)
        sizes = {"B": range(1, self.sequences + 1), "C": self.columns}
        return {"q": q, "layout": "bshd", "sizes": sizes, **self.table(), **named}

    def packed(self, queries: tuple[int, int, int], single: bool) -> dict[str, Any]:
        sizes = packed_sizes(self.sequences, self.tokens, self.rows, single, tuple(self.columns))
        return self._ragged(queries, sizes) | {"cu_seqlens_q": _whole("B+1"), **self.table()}

    def divided(self, queries: tuple[int, int, int]) -> dict[str, Any]:
        """Return arguments of a batch whose requests are divided at ranges of multimodal tokens."""
        sizes = divided_sizes(4 * self.sequences, self.tokens, self.rows, tuple(self.columns))
        return self._ragged(queries, sizes) | {"cu_seqlens_q": _whole("B+1", kept=False), **self.table(kept=False)}

    def _ragged(self, queries: tuple[int, int, int], sizes: dict[str, Any]) -> dict[str, Any]:
        heads, width, row = queries
        return {"q": TensorSpec(("T", heads, width), (row, width, 1), self.dtype), "max_seqlen_q": "M", **sizes}

    def new_tokens(self, heads: int, kv_heads: int, width: int) -> Iterable[dict[str, Any]]:
        """Yield keys and values of new tokens: each by itself, or a part of one projection's rows."""
        slots = {"slot_mapping": _whole("T", dtype=torch.int64), "sizes": {"T": range(1, self.tokens + 1)}}
        k, v = (self._part(heads + place, kv_heads, heads + 2 * kv_heads, width) for place in (0, kv_heads))
        yield from ({"k": key, "v": value, **slots} for key in k for value in v)

    def self_attention(self, heads: int, kv_heads: int, width: int) -> Iterable[dict[str, Any]]:
        sizes = packed_sizes(self.sequences, self.tokens, self.rows, True)
        starts = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), _whole("B+1"))
        starts |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "M")
        parts = ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads))
        each = [self._part(first, count, heads + 2 * kv_heads, width) for first, count in parts]
        for q, k, v in [*zip(*each, strict=True), (each[0][0], each[1][0], each[2][1])]:
            yield {"op": "varlen_attention", "q": q, "k": k, "v": v, **starts, **sizes}

    def _part(self, first: int, heads: int, every: int, width: int) -> list[TensorSpec]:
        fused = TensorSpec(("T", heads, width), (every * width, width, 1), self.dtype, first * width)
        return [TensorSpec(("T", heads, width), None, self.dtype), fused]


def needs_warmup(device: torch.device) -> bool:
    """Return whether calls on a device compile kernels: on a CPU they do not."""
    return device.type != "cpu"


def compile_calls(specs: Sequence[Mapping[str, Any]], device: torch.device, log: logging.Logger) -> Warmup | None:
    """Warm specs up by one `warmup`, with progress in the log.

    A failure is a warning there and None is returned if it is of all: start-up goes on, and such calls take the next
    path.
    """
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
    try:
        report = warmup(unique, device=device, say=say)
    except PortattnError as error:
        log.warning("portattn: nothing was compiled before the first request: %s", error)
        return None
    for one in report.failed:
        log.warning("portattn: %s: %s", one.call, one.failed)
    compiled = len({one.key for one in report.specs if one.compiled})
    log.info(
        "portattn: %d kinds of calls ready in %.1f s; %d were compiled", len(report.specs), report.seconds, compiled
    )
    return report


def _kind(value: Any) -> Any:
    """Return an argument's part of a call's class: of a tensor all but its data."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.dtype, value.data_ptr() % POINTER_ALIGNMENT, value.is_inference()
