"""Code of a probe, executed on this machine's CPU: the other half of Bench.execute. Child process only.

The child that compiles has a toolchain and neither torch nor MLIR; this one has both. Linalg runs through MLIR, AMD's
machine code in the model of its chip. One request as JSON on standard input, one answer on standard output:

    {"linalg": "…", "grid": [1], "outputs": ["out"], "arguments": {"out": {"type": "fp32", "values": […]}, "n": 3}}
    {"amdgcn": "…", "lds": 8192, "waves": 4, "types": {"out": "*fp32", "n": "i32"}, "unchecked": ["barriers"], …}
    {"outputs": {"out": […]}}   or   {"strays": ["reads k past its end"]}   or   {"missing": "no mlir-opt here"}
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from portattn.backends.ascend.linalg.program import Programs
from portattn.backends.ascend.linalg.tools import missing
from portattn.backends.rocm.emulator.amdgpu import Checks, Finding, Memory, Program, UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.tensors import value_of
from portattn.launch.kernelcall import TORCH_DTYPE

_TYPES = TORCH_DTYPE | {"i32": torch.int32, "i64": torch.int64, "i8": torch.int8}
# A kernel of a probe is small; the code of a broken compiler may never end.
STEPS = 2_000_000


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """Run the code; values are flat lists. Raises LinalgError or EmulationError on a text that cannot be executed."""
    arguments = {
        name: torch.tensor(value["values"], dtype=_TYPES[value["type"]]) if isinstance(value, dict) else value
        for name, value in request["arguments"].items()
    }
    answer = _emulated(request, arguments) if "amdgcn" in request else _lowered(request, arguments)
    if "missing" in answer or answer["strays"]:
        return answer
    return {"outputs": {name: arguments[name].tolist() for name in request["outputs"]}}


def _lowered(request: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Linalg on this machine's CPU."""
    lacking = missing()
    if lacking:
        return {"missing": lacking}
    seen = Programs().launch(request["linalg"], tuple(request["grid"]), arguments, tuple(request["outputs"]))
    return {"strays": [*map(str, seen.strays), *(f"writes its input {name}" for name in seen.wrote_inputs)]}


def _emulated(request: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """AMD's machine code in the model of its chip. What the model does not know is missing, and no verdict."""
    checks = Checks(**dict.fromkeys(request["unchecked"], False))
    memory = Memory()
    values = [value_of(kind, arguments[name], memory) for name, kind in request["types"].items()]
    sizes = {"lds_bytes": request["lds"], "waves": request["waves"]}
    try:
        program = Program.parse(request["amdgcn"])
        program.launch(request["grid"], values, memory, checks=checks, step_limit=STEPS, **sizes)
    except Finding as finding:
        return {"strays": [f"{type(finding).__name__}: {finding}"]}
    except (UnknownInstruction, UnknownOperand) as error:
        return {"missing": f"the model does not know: {error}"}
    return {"strays": []}


def main() -> None:
    """Answer one request."""
    json.dump(execute(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
