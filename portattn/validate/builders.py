"""What makes a Call of an operation's tensors and other arguments, by its row in the table of operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portattn.config import Settings
from portattn.schema.call import Call
from portattn.schema.ops import ROWS


def build_call(op: str, settings: Settings, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> Call:
    """Check the arguments of an operation, and build the Call. Raises ArgumentError.

    tensors  by the names that a Request has them under, None where they are not given
    values   the other arguments, by the caller's names
    """
    row = ROWS[op]
    arguments = {row.tensors[name]: tensor for name, tensor in tensors.items()}
    call: Call = row.load("validate")(**arguments, **values, settings=settings)
    return call
