"""Execute a probe's code on this machine's CPU: the other half of Bench.execute. Child process only.

The compiling child has the toolchain, this one the packages that execute its code. `code_task` of the backend's
executor (portattn/testing/executor.py) names the function: it changes the argument tensors in place and answers
{"strays": […]} or {"missing": "…"}. One JSON request on standard input, one answer on standard output:

    {"target": "rocm:gfx942", "grid": [1], "outputs": ["out"],
     "arguments": {"out": {"type": "fp32", "values": […]}, "n": 3}, "types": {"out": "*fp32", "n": "i32"},
     "texts": {"amdgcn": "…"}, "facts": {"scratchpad_bytes": 8192, "num_warps": 4}, "triton": "3.6.0",
     "unchecked": ["barriers"]}
    {"outputs": {"out": […]}, "level": "emulated"}   or   {"strays": ["reads k past its end"], "level": …}
    or   {"missing": "no mlir-opt here"}"""

from __future__ import annotations

import json
import pkgutil
import sys
from typing import Any

import torch

from portattn.schema.tensors import TORCH_DTYPE
from portattn.testing.executor import executors

_TYPES = TORCH_DTYPE | {"i32": torch.int32, "i64": torch.int64, "i8": torch.int8}


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """Run the code; values are flat lists. Raises a backend's error on an impossible text."""
    own = executors(request["target"].partition(":")[0]).values()
    executor = next((one for one in own if one.code_task), None)
    if executor is None:
        return {"missing": f"nothing here executes code for {request['target']}"}
    arguments = {
        name: torch.tensor(value["values"], dtype=_TYPES[value["type"]]) if isinstance(value, dict) else value
        for name, value in request["arguments"].items()
    }
    answer: dict[str, Any] = pkgutil.resolve_name(executor.code_task)(request, arguments)
    if "missing" in answer:
        return answer
    if not answer["strays"]:
        answer = {"outputs": {name: arguments[name].tolist() for name in request["outputs"]}}
    return answer | {"level": executor.level}


def main() -> None:
    json.dump(execute(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
