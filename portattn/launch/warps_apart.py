"""The launch of warps_apart in the place of another kernel, from what that one would be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portattn.launch.kernelcall import KernelCall
from portattn.planning.kernel_specs.apart import FORM
from portattn.schema.lowering import Launch

MODULE = "portattn.kernels.warp_split"
# In its order.
ARGUMENTS = (
    "q", "k", "v", "out", "lse", "seqlens_k", "leftpad_k", "cu_seqlens_q", "page_table", "sinks", "scale",
    *(f"{name}_stride_{axis}" for name in "qkv" for axis in "bhsd"), *(f"o_stride_{axis}" for axis in "pbhs"),
    "table_stride_b", "heads_k", "seq_q", "seq_k", "pages", "row_tiles", "splits", "batches",
)  # fmt: skip
UNSPECIALISED = frozenset({"heads_k", "seq_q", "seq_k", "pages", "row_tiles", "splits", "batches"})


def apart_call(
    arguments: Mapping[str, Any], constexprs: dict[str, Any], launch: Launch, grid: tuple[int, ...]
) -> KernelCall:
    """arguments: by name, of decode_split or of dense_forward, which has no pages and no splits."""
    absent = {"page_table": None, "cu_seqlens_q": None, "table_stride_b": 0, "o_stride_p": 0, "pages": 0, "splits": 1}
    given = absent | dict(arguments)
    return KernelCall(MODULE, FORM, grid, {name: given[name] for name in ARGUMENTS}, constexprs, launch, UNSPECIALISED)
