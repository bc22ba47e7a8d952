"""A call as one node of a graph: the call of its torch operator, which compilers, exporters and modes see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import operators
from portattn.api.autocast import cast
from portattn.api.operators import RETURNS_LSE, SIGNATURES, arguments_of
from portattn.schema.ops import ROWS

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# Of operations that can drop: the places of dropout_p among the values, and of the seed among the tensors.
_DROPOUT = {
    op: (ROWS[op].fixed.index("dropout_p"), tuple(ROWS[op].tensors).index("dropout_seed"))
    for op in SIGNATURES
    if "dropout_p" in ROWS[op].fixed
}


def in_graph(op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any]) -> Result:
    """Call the operator, with what a Request is made of (request_from). Traced by dynamo: plain Python alone."""
    # The operator takes numbers: a 0-d scale is read, which breaks a graph.
    values = [v.item() if isinstance(v, torch.Tensor) and not v.requires_grad else v for v in values]
    if op in _DROPOUT:
        share, seed = _DROPOUT[op]
        if values[share] and tensors[seed] is None:
            tensors = [*tensors[:seed], new_seed(tensors[0]), *tensors[seed + 1 :]]
    arguments = arguments_of(op, cast(op, tensors), values, lengths)
    out, lse = getattr(torch.ops.portattn, op)(*arguments)
    return (out, lse) if values[RETURNS_LSE[op]] else out


def new_seed(q: torch.Tensor) -> torch.Tensor:
    """A seed for dropout, drawn on q's device: torch.manual_seed decides it, and nothing is read back."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


operators.define()  # where torch was imported in a way that after_import.py does not see
