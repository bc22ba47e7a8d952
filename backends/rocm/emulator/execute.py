"""A plan's launches as machine code in a model of the chip, on a small random problem. Child process only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version

from portattn.backends.rocm.emulator.amdgpu.checks import Checks
from portattn.backends.rocm.emulator.amdgpu.errors import Finding, UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.memory import Memory
from portattn.backends.rocm.emulator.amdgpu.program import Program
from portattn.backends.rocm.emulator.amdgpu.tensors import share, value_of
from portattn.backends.rocm.emulator.executor import OLDEST
from portattn.launch import KernelCall, has_rows, kernel_calls, load_kernels, signature
from portattn.planning.registry import Registry
from portattn.testing.run_plan import call_of, plan_of
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import judge

# A kernel of a probe is small; the code of a broken compiler may never end.
PROBE_STEPS = 2_000_000


def compare(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Run compiled launches in the model: {"facts": …} as verdict.judge says, and `steps`, what the model did.

    The request is that of testing/run_plan.py with `texts`: of each launch in order its assembly (`text`), bytes of LDS
    (`lds`) and waves of a work-group (`waves`). Outputs, partial results and all padding start as NaN. Raises what the
    model's checks find (portattn.backends.rocm.emulator.amdgpu.errors).
    """
    target = Registry.load().target(request["target"])
    steps = 0
    with nan_filled_memory(), torch.no_grad():
        plan, call = plan_of(request, target), call_of(request)
        launches, out, lse = kernel_calls(plan, call, target.arch.cores)
        if has_rows(plan):
            for launch, code in zip(launches, request["texts"], strict=True):
                enter(f"emulate {launch.function}")
                steps += run(launch, code["text"], code["lds"], code["waves"])
    enter("judge")
    precision = request.get("lowering", {}).get("dot_precision", "ieee")
    return {"facts": judge(call, out, lse, precision) | {"steps": steps}}


def run(launch: KernelCall, text: str, lds: int, waves: int) -> int:
    """Run one launch; the model's steps. The caller's tensors hold the results."""
    types = signature(launch).types
    kernel = getattr(load_kernels(launch.module, interpreted=False), launch.function)
    memory, names = Memory(), [name for name in kernel.arg_names if name in types]
    share((launch.arguments[name] for name in names), memory)
    values = [value_of(types[name], launch.arguments[name], memory) for name in names]
    # portattn's programs never exchange anything through memory within a launch.
    report = Program.parse(text).launch(
        launch.grid, values, memory, lds_bytes=lds, waves=waves, checks=Checks(groups=True)
    )
    return report.steps


def run_code(request: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a probe's kernel in the model; see tools/quirks/probe/executing.py.

    What the model does not know is missing, and is no finding. Raises EmulationError on a text that cannot be run.
    """
    if Version(request["triton"]) < OLDEST:
        return {"missing": f"the model was tried with the code of Triton {OLDEST} and newer"}
    checks = Checks(**dict.fromkeys(request["unchecked"], False))
    memory, facts = Memory(), request["facts"]
    values = [value_of(kind, arguments[name], memory) for name, kind in request["types"].items()]
    sizes = {"lds_bytes": facts["scratchpad_bytes"], "waves": facts["num_warps"]}
    try:
        program = Program.parse(request["texts"]["amdgcn"])
        program.launch(request["grid"], values, memory, checks=checks, step_limit=PROBE_STEPS, **sizes)
    except Finding as finding:
        return {"strays": [f"{type(finding).__name__}: {finding}"]}
    except (UnknownInstruction, UnknownOperand) as error:
        return {"missing": f"the model does not know: {error}"}
    return {"strays": []}
