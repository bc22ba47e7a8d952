"""A call as one node of a graph: the call of its torch operator, which compilers, exporters and modes see."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import operators
from portattn.api.autocast import cast
from portattn.api.left_out import leave_out, left_out
from portattn.api.operators import RETURNS_LSE, SIGNATURES, arguments_of
from portattn.errors import TracingError

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_DROPOUT = {op: s.values.index("dropout_p") for op, s in SIGNATURES.items() if "dropout_p" in s.values}


def in_graph(op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any]) -> Result:
    """Call the operator, with what a Request is made of (request_from). Traced by dynamo: plain Python alone.

    Dropout is no operator: its mask would be drawn anew in the backward pass. It breaks dynamo's graph, and elsewhere
    it raises TracingError.
    """
    if op in _DROPOUT and values[_DROPOUT[op]]:
        if torch.compiler.is_dynamo_compiling():
            return left_out["perform"](op, tensors, values, lengths)
        raise TracingError(
            f"{op}: dropout_p={values[_DROPOUT[op]]} cannot be exported, traced or transformed. Call it eagerly, or "
            "use torch.nn.functional.scaled_dot_product_attention for the layers that drop out"
        )
    arguments = arguments_of(op, cast(op, tensors), values, lengths)
    out, lse = getattr(torch.ops.portattn, op)(*arguments)
    return (out, lse) if values[RETURNS_LSE[op]] else out


def _perform(*arguments: Any) -> Any:
    request = importlib.import_module("portattn.api.request").request_from(*arguments)
    return importlib.import_module("portattn.api.perform").perform(request)


leave_out("perform", _perform, "dropout_p is not 0, and portattn's operators have no dropout")
operators.define()  # where torch was imported in a way that after_import.py does not see
