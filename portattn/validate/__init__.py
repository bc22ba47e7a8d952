"""From a caller's arguments to a Call with its Problem; errors name the argument, the value and the limit."""

from collections.abc import Mapping
from typing import Any

import msgspec

from portattn.config import Settings
from portattn.schema.call import Call
from portattn.schema.ops import ROWS
from portattn.validate.checks import wants_gradients
from portattn.validate.dense import attention_call
from portattn.validate.sparse import sparse_call

__all__ = ["attention_call", "sparse_call", "wants_gradients"]


def build_call(op: str, settings: Settings, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> Call:
    """Check an operation's arguments and build the Call; `tensors` has a Request's names, `values` the caller's."""
    row = ROWS[op]
    arguments = {row.tensors[name]: tensor for name, tensor in tensors.items()}
    call: Call = row.load("validate")(**arguments, **values, settings=settings)
    if settings.invariant and call.problem.sums:
        call.problem = msgspec.structs.replace(call.problem, invariant=True)
    return call
