"""The planner's data about each core kernel, a module per family on `base`; without torch."""

from __future__ import annotations

import fnmatch

from portattn.planning.kernel_specs.backward import BlockBackward, DenseBackward, VarlenBackward, chunks_of, packed_keys
from portattn.planning.kernel_specs.base import (
    MIN_DOT,
    CoreKernel,
    ceil_div,
    head_columns,
    heads_together,
    occupied_tiles,
    packed_tiles,
    tile_width,
)
from portattn.planning.kernel_specs.decode import BlockForward, DecodeSplit, MlaSplit, PagedSplit, SparseSplit
from portattn.planning.kernel_specs.dense import DenseForward, VarlenForward
from portattn.planning.kernel_specs.write import CacheWrite, IndexScores, PagedWrite, TopkRows

__all__ = [
    "CORES",
    "KERNEL_NAMES",
    "MIN_DOT",
    "CacheWrite",
    "CoreKernel",
    "DecodeSplit",
    "DenseBackward",
    "ceil_div",
    "chunks_of",
    "head_columns",
    "heads_together",
    "occupied_tiles",
    "of_gradients",
    "packed_keys",
    "packed_tiles",
    "tile_width",
]

CORES: dict[str, CoreKernel] = {
    k.op: k
    for k in (
        DenseForward(),
        VarlenForward(),
        DenseBackward(),
        VarlenBackward(),
        DecodeSplit(),
        PagedSplit(),
        SparseSplit(),
        BlockForward(),
        BlockBackward(),
        MlaSplit(),
        CacheWrite(),
        PagedWrite(),
        IndexScores(),
        TopkRows(),
    )
}
KERNEL_NAMES = tuple(k.name for k in CORES.values())


def of_gradients(pattern: str) -> bool:
    """Return whether a glob matches gradient kernels and no other core kernels."""
    matched = [kernel for kernel in CORES.values() if fnmatch.fnmatchcase(kernel.name, pattern)]
    return bool(matched) and all(kernel.of_rows for kernel in matched)
