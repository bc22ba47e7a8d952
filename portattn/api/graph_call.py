"""A call as one node of a graph: the call of its torch operator, which compilers, exporters and modes see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import torch_ops
from portattn.api.autocast import cast
from portattn.api.dynamo_disabled import leave_out, left_out
from portattn.api.torch_ops import RETURNS_LSE, SIGNATURES, arguments_of
from portattn.api.transform_checks import is_sure
from portattn.schema.ops import ROWS
from portattn.validate.checks import as_value

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# Of operations that can drop: the places of dropout_p among the values, and of the seed among the tensors.
_DROPOUT = {
    op: (ROWS[op].fixed.index("dropout_p"), tuple(ROWS[op].tensors).index("dropout_seed"))
    for op in SIGNATURES
    if "dropout_p" in ROWS[op].fixed
}


def in_graph(op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any]) -> Result:
    """Call the operator, with what a Request is made of (request_from). Traced by dynamo: plain Python alone."""
    names, fixed = SIGNATURES[op].values, len(values)
    values = [graph_number(op, name, v) for name, v in zip(names[:fixed], values, strict=True)]
    lengths = [graph_number(op, name, v) for name, v in zip(names[fixed:], lengths, strict=True)]
    if op in _DROPOUT:
        share, seed = _DROPOUT[op]
        if values[share] and tensors[seed] is None:
            tensors = [*tensors[:seed], new_seed(tensors[0]), *tensors[seed + 1 :]]
    arguments = arguments_of(op, cast(op, tensors), values, lengths)
    out, lse = getattr(torch.ops.portattn, op)(*arguments)
    return (out, lse) if values[RETURNS_LSE[op]] else out


def graph_number(op: str, name: str, value: Any) -> Any:
    """Return `as_value`'s number. In a function that dynamo traces, the graph is broken to read one that it holds.

    Operators take no symbolic float. dynamo makes one of `.item()` with capture_scalar_outputs.
    """
    if not torch.compiler.is_dynamo_compiling():
        return as_value(op, name, value)
    if isinstance(value, float):
        known = is_sure(value >= 0.0) or is_sure(value <= 0.0)
    else:
        known = value is None or isinstance(value, (bool, int, str, tuple, list, torch.dtype))
    return value if known else left_out["number"](op, name, value)


leave_out(
    "number",
    as_value,
    "portattn reads this number when the graph runs: give a Python number, or multiply q by it, with scale=1.0",
)


def new_seed(q: torch.Tensor) -> torch.Tensor:
    """A seed for dropout, drawn on q's device: torch.manual_seed decides it, and nothing is read back."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


torch_ops.define()  # where torch was imported in a way that after_import.py does not see
