"""Lowered code of a probe, executed on this machine's CPU: the other half of Bench.execute. Child process only.

The child that lowers has triton-ascend and neither torch nor MLIR; this one has both. One request as JSON on standard
input, one answer on standard output:

    {"text": "…", "grid": [1], "outputs": ["out"], "arguments": {"out": {"type": "fp32", "values": […]}, "n": 3}}
    {"outputs": {"out": […]}, "strays": ["reads k 32 bytes after its end"]}   or   {"missing": "no mlir-opt here"}
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from portattn.launch.kernelcall import TORCH_DTYPE
from portattn.linalg.program import Programs
from portattn.linalg.tools import missing

_TYPES = TORCH_DTYPE | {"i32": torch.int32}


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """Run the lowered kernel; values are flat lists. Raises LinalgError on a text that cannot be executed."""
    lacking = missing()
    if lacking:
        return {"missing": lacking}
    arguments = {
        name: torch.tensor(value["values"], dtype=_TYPES[value["type"]]) if isinstance(value, dict) else value
        for name, value in request["arguments"].items()
    }
    outputs = tuple(request["outputs"])
    seen = Programs().launch(request["text"], tuple(request["grid"]), arguments, outputs)
    strays = [*map(str, seen.strays), *(f"writes its input {name}" for name in seen.wrote_inputs)]
    return {"outputs": {name: arguments[name].tolist() for name in outputs}, "strays": strays}


def main() -> None:
    """Answer one request."""
    json.dump(execute(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
