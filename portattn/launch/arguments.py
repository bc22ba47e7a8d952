"""Arguments that several kernels take under the same names."""

from __future__ import annotations

import functools
from typing import Any

import torch

from portattn.schema.call import Call
from portattn.schema.features import COMMON, FEATURES
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import MAX_LENGTH, UNLIMITED

BLOCK_SCALES = ("k_block_scale", "v_block_scale")  # of caches of nvfp4


def strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, int]:
    """`name_stride_axis` of each axis; 0 for a tensor that is absent, where nothing is read."""
    given = (0,) * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, given, strict=True)}


def outer_strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, int]:
    """As `strides`, of the tensor's first axes alone: kernels count on the others."""
    given = (0,) * len(axes) if tensor is None else tensor.stride()[: len(axes)]
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, given, strict=True)}


def window(problem: Problem) -> dict[str, Any]:
    """Keys that a row sees before (`left`) and after (`right`) its own position, as far as they are limited, and keys
    of a chunk. None where there are no chunks: no argument is passed at a launch.

    A chunk is masked by the code of a window, whose left side is then no limit if the caller gave none.
    """
    unlimited = MAX_LENGTH if problem.chunk else 0
    return {
        "left": unlimited if problem.window_left == UNLIMITED else problem.window_left,
        "right": 0 if problem.window_right == UNLIMITED else problem.window_right,
        "chunk": problem.chunk or None,
    }


def numbers(call: Call) -> dict[str, float]:
    """The factor on the scores without its sign, which NEGATED carries, and the cap."""
    return {"scale": abs(float(call.scale)), "softcap": float(call.softcap)}


@functools.cache
def _tensors(launches: str) -> tuple[str, ...]:
    """Return the features whose tensors a kernel takes, of any op that it serves (schema/ops.py)."""
    rows = [row for row in ROWS.values() if row.launches == launches]
    return tuple(name for name in COMMON if any(name in row.tensors for row in rows))


def features(call: Call) -> dict[str, Any]:
    """Tensors of the features that the op's kernel takes, by their names in kernels."""
    return {name: getattr(call, name) for name in _tensors(ROWS[call.problem.op].launches)}


def tree_stride(call: Call) -> dict[str, int | None]:
    """Between the rows of a tree mask. None where there is no mask: no argument is passed at a launch."""
    return {"tree_mask_stride_b": None if call.tree_mask is None else call.tree_mask.stride(0)}


def block_strides(call: Call) -> dict[str, int | None]:
    """Return strides of block_mask; without one they are None, and a launch passes no argument."""
    given = (None,) * 3 if call.block_mask is None else call.block_mask.stride()[:3]
    return {f"block_mask_stride_{axis}": stride for axis, stride in zip("bhq", given, strict=True)}


def score_strides(call: Call) -> dict[str, int]:
    """Strides of the features that have an element for each score."""
    found: dict[str, int] = {}
    for name in _tensors(ROWS[call.problem.op].launches):
        if "k" in FEATURES[name].axes:
            found |= strides(name, getattr(call, name), FEATURES[name].axes)
    return found


def scale_strides(call: Call, names: tuple[str, ...] = ("k_scale", "v_scale")) -> dict[str, int | None]:
    """Strides of a cache's scales, or those named; 0 where one scale is all tokens'. None where there are none: no
    argument is passed at a launch."""
    found: dict[str, int | None] = {}
    for name in names:
        scale = getattr(call, name)
        given = (None,) * 3 if scale is None else (*scale.stride(), 0)[:3]
        found |= {f"{name}_stride_{axis}": stride for axis, stride in zip("bhs", given, strict=True)}
    return found


def alibi_stride(call: Call) -> dict[str, int]:
    return {"alibi_stride_b": 0 if call.alibi_slopes is None else call.alibi_slopes.stride(0)}
