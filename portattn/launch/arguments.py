"""Arguments that several kernels take under the same names, and the launch of warps_apart."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch

from portattn.kernels import score_program
from portattn.launch.kernelcall import KernelCall
from portattn.planning.kernel_specs.base import WARPS_APART
from portattn.reference.dropout import threshold
from portattn.schema.call import Call
from portattn.schema.lowering import Launch
from portattn.schema.ops import CAPTURED, COMMON, FEATURES, ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import MAX_LENGTH, UNLIMITED

BLOCK_SCALES = ("k_block_scale", "v_block_scale")  # of caches of nvfp4


def strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, int]:
    """Return `name_stride_axis` for each axis; 0 for an absent tensor, which no kernel reads."""
    given = (0,) * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, given, strict=True)}


def outer_strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, int]:
    """Like `strides`, only for the tensor's first axes: kernels assume the strides of the others."""
    given = (0,) * len(axes) if tensor is None else tensor.stride()[: len(axes)]
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, given, strict=True)}


def window(problem: Problem) -> dict[str, Any]:
    """Return the window's arguments; a chunk uses the window's mask, so a missing left limit becomes MAX_LENGTH."""
    unlimited = MAX_LENGTH if problem.chunk else 0
    return {
        "left": unlimited if problem.window_left == UNLIMITED else problem.window_left,
        "right": 0 if problem.window_right == UNLIMITED else problem.window_right,
        "chunk": problem.chunk or None,
    }


def numbers(call: Call) -> dict[str, float]:
    """Return the softcap and the scale's magnitude; the constant NEGATED carries its sign."""
    return {"scale": abs(float(call.scale)), "softcap": float(call.softcap)}


@functools.cache
def _tensors(launches: str) -> tuple[str, ...]:
    """Return the features whose tensors a kernel takes, for any op that it serves (schema/ops.py)."""
    rows = [row for row in ROWS.values() if row.launches == launches]
    return tuple(name for name in COMMON if any(name in row.tensors for row in rows))


def features(call: Call) -> dict[str, Any]:
    return {name: getattr(call, name) for name in _tensors(ROWS[call.problem.op].launches)}


def tree_stride(call: Call) -> dict[str, int | None]:
    return {"tree_mask_stride_b": None if call.tree_mask is None else call.tree_mask.stride(0)}


def block_strides(call: Call, name: str = "block_mask", axes: str = "bhq") -> dict[str, int | None]:
    """Return the strides of a block mask's lists; of those by key `name` is block_queries and `axes` bhk."""
    lists = getattr(call, name)
    given = (None,) * 3 if lists is None else lists.stride()[:3]
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, given, strict=True)}


def list_strides(call: Call) -> dict[str, int]:
    """Return the strides of lists of blocks and of their counts; rows of lists are contiguous."""
    return outer_strides("list", call.indices, "bhs") | strides("count", call.counts, "bhs")


def score_strides(call: Call) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in _tensors(ROWS[call.problem.op].launches):
        if "k" in FEATURES[name].axes:
            found |= strides(name, getattr(call, name), FEATURES[name].axes)
    return found


def scale_strides(call: Call, names: tuple[str, ...] = ("k_scale", "v_scale")) -> dict[str, int | None]:
    """Return the strides of a cache's scales: 0 along tokens that share one, None (no argument) without scales."""
    found: dict[str, int | None] = {}
    for name in names:
        scale = getattr(call, name)
        given = (None,) * 3 if scale is None else (*scale.stride(), 0)[:3]
        found |= {f"{name}_stride_{axis}": stride for axis, stride in zip("bhs", given, strict=True)}
    return found


CAPTURED_SIZES = tuple(f"size_{place}" for place in range(score_program.SIZES))


def captured_tensors(call: Call) -> dict[str, torch.Tensor | None]:
    """Return the tensors that the call's score and mask functions read."""
    return {name: getattr(call, name) for name in CAPTURED}


def captured_sizes(call: Call) -> dict[str, int | None]:
    sizes = [size for tensor in captured_tensors(call).values() if tensor is not None for size in tensor.shape]
    return dict(zip_longest(CAPTURED_SIZES, sizes))


def alibi_stride(call: Call) -> dict[str, int]:
    return {"alibi_stride_b": 0 if call.alibi_slopes is None else call.alibi_slopes.stride(0)}


def dropping(call: Call) -> tuple[int, float]:
    """Return (threshold, factor) for kernels/dropout.py: round(p·2¹⁶), and 1 / (1 - p)."""
    if not call.dropout_p:
        return 0, 1.0
    return threshold(call.dropout_p), 1.0 / (1.0 - call.dropout_p)


WARP_SPLIT = "portattn.kernels.warp_split"
# In its order.
WARP_SPLIT_ARGUMENTS = (
    "q", "k", "v", "out", "lse", "seqlens_k", "leftpad_k", "cu_seqlens_q", "page_table", "sinks", "scale",
    *(f"{name}_stride_{axis}" for name in "qkv" for axis in "bhsd"), *(f"o_stride_{axis}" for axis in "pbhs"),
    "table_stride_b", "heads_k", "seq_q", "seq_k", "pages", "row_tiles", "splits", "batches",
)  # fmt: skip
WARP_SPLIT_UNSPECIALISED = frozenset({"heads_k", "seq_q", "seq_k", "pages", "row_tiles", "splits", "batches"})


def warp_split_call(
    arguments: Mapping[str, Any], constexprs: dict[str, Any], launch: Launch, grid: tuple[int, ...]
) -> KernelCall:
    """Return the launch for the arguments of decode_split, or of dense_forward, which has no pages or splits."""
    absent = {"page_table": None, "cu_seqlens_q": None, "table_stride_b": 0, "o_stride_p": 0, "pages": 0, "splits": 1}
    given = absent | dict(arguments)
    return KernelCall(
        WARP_SPLIT,
        WARPS_APART,
        grid,
        {name: given[name] for name in WARP_SPLIT_ARGUMENTS},
        constexprs,
        launch,
        WARP_SPLIT_UNSPECIALISED,
    )
