"""Runs Triton's machine code in a functional model of the chip: EmulatorExecutor in the parent, the rest in a child."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from portattn.backends.rocm.emulator.amdgpu import ARCHES, Finding
from portattn.backends.rocm.emulator.amdgpu.errors import Checks, UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.machine import Program
from portattn.backends.rocm.emulator.amdgpu.memory import Memory, share, value_of
from portattn.launch import KernelCall, has_rows, kernel_calls, load_kernels, signature
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing.executor import Executor, small_problems
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import call_of, judge, plan_of
from portattn.worker.client import Reply

OLDEST = Version("3.4")  # Triton whose code the model was tried with


class EmulatorExecutor(Executor):
    """Launches in the model. Compiles in the toolchain's own child, runs in one of this Python."""

    name = "emulated"
    level = "emulated"
    task = "portattn.backends.rocm.emulator.executor:compare"
    code_task = "portattn.backends.rocm.emulator.executor:run_code"
    arches = tuple(ARCHES)
    findings = tuple(kind.__name__ for kind in Finding.__subclasses__())
    evidence = "AMD model"
    runner = Path(__file__).parents[1] / "run_bundle.cpp"

    def lacks(self, target: Target) -> str:
        """Return why this target's code cannot run in a model; empty if it can."""
        if declined := self.declines(target):
            return declined
        if target.arch.name not in ARCHES:
            return f"{target.arch.name} has no model here; modelled are {', '.join(ARCHES)}"
        found = target.toolchain
        if found.distribution != "triton" or Version(found.version) < OLDEST:
            return f"the model was tried with the code of Triton {OLDEST} and newer, and this is {found}"
        return ""

    def where(self, target: Target) -> str:
        return f"a model of {target.arch.name}, code of {target.toolchain}"

    def problems(self, plan: Plan) -> list[Problem]:
        return small_problems(plan)[:1]

    def piece(self, launch: KernelCall, reply: Reply) -> dict[str, Any]:
        facts, text = reply.facts, str(reply.facts.get("amdgcn", ""))
        piece = {"text": text, "lds": int(facts["scratchpad_bytes"]), "waves": int(facts["num_warps"])}
        if "object" not in facts:
            return piece
        symbol = re.search(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
        assert symbol, "an AMD kernel's text has its descriptor"
        return piece | {"object": facts["object"], "symbol": symbol[1]}


# A kernel of a probe is small; the code of a broken compiler may never end.
PROBE_STEPS = 2_000_000


def compare(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Run `texts` (each launch's text, lds, waves) in the model: verdict.judge's facts, `steps`. Raises findings."""
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
    """Run one launch into the caller's tensors; return the model's steps."""
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
    """Run a probe's kernel; an unknown instruction is "missing", not a finding. Raises EmulationError."""
    if Version(request["triton"]) < OLDEST:
        return {"missing": f"the model was tried with the code of Triton {OLDEST} and newer"}
    checks = Checks(**{"groups": request.get("groups", False)} | dict.fromkeys(request["unchecked"], False))
    memory, facts = Memory(), request["facts"]
    values = [value_of(kind, arguments[name], memory) for name, kind in request["types"].items()]
    sizes = {"lds_bytes": facts["scratchpad_bytes"], "waves": facts["num_warps"]}
    try:
        program = Program.parse(request["texts"]["amdgcn"])
        steps = request.get("steps", PROBE_STEPS)
        report = program.launch(request["grid"], values, memory, checks=checks, step_limit=steps, **sizes)
    except Finding as finding:
        names = [name for name, kind in request["types"].items() if kind.startswith("*")]
        told = re.sub(r"\btensor (\d+)\b", lambda found: names[int(found[1])], str(finding))
        return {"strays": [f"{type(finding).__name__}: {told}"]}
    except (UnknownInstruction, UnknownOperand) as error:
        return {"missing": f"the model does not know: {error}"}
    return {"strays": [], "executed": dict(report.coverage)}
