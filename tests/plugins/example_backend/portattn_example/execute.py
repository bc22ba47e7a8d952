"""The model of Example One. Runs in a child of portattn's own Python, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton_example


def compare(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Check each launch's code, run the plan, and compare it with the oracle: {"facts": …} as portattn judges."""
    from portattn.testing.run_plan import compare as run

    enter("check")
    for piece in request["texts"]:
        name = triton_example.check(piece["code"])
        if name != piece["kernel"]:
            raise triton_example.Refused(f"the code is of {name}, and {piece['kernel']} is launched")
    return run(request | {"path": "interpreter"}, enter)
