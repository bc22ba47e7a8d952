"""The numbers that dropout is of, as kernels take them."""

from __future__ import annotations

from portattn.reference.dropout import threshold
from portattn.schema.call import Call


def dropping(call: Call) -> tuple[int, float]:
    """Return (threshold, factor) for kernels/dropout.py: round(p·2¹⁶), and 1 / (1 - p)."""
    if not call.dropout_p:
        return 0, 1.0
    return threshold(call.dropout_p), 1.0 / (1.0 - call.dropout_p)
