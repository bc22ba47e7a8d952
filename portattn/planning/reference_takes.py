"""What the reference path can do for each op: all that the op's core kernel can, gradients, dropout where it is."""

from __future__ import annotations

from portattn.planning.kernel_specs import CORES
from portattn.schema.ops import ROWS

TAKES = {
    op: kernel.takes
    | (set() if ROWS[op].writes else {"needs_grad"})
    | ({"dropout"} if "dropout_p" in ROWS[op].values else set())
    for op, kernel in CORES.items()
}
