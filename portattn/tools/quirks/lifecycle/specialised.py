"""Specialisation: one failed specialisation of our own kernels; and compiling it again in a worker.

Logs and incidents come from other people. A compile here takes from them only values that choose among compilations:
`permitted_env` and `permitted_signature` drop values that would import, read or execute a file or name from a log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from portattn.compile.compile_check import compile_in, over_limit
from portattn.launch import KernelCall, Signature, kernel_calls, meta_call
from portattn.planning import compiler_options
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.compile_record import Incident
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.worker.client import Reply, Worker

# Triton's variables that switch something on or off. None names a file, a folder or a program.
SWITCHES = (
    "AMDGCN_ANALYZE_SMALL_TENSOR_RANGE", "AMDGCN_SCALARIZE_PACKED_FOPS", "AMDGCN_USE_BUFFER_ATOMICS",
    "AMDGCN_USE_BUFFER_OPS", "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "TRITON_ALLOW_NON_CONSTEXPR_GLOBALS",
    "TRITON_ALWAYS_COMPILE", "TRITON_DEBUG", "TRITON_DEFAULT_FP_FUSION", "TRITON_DISABLE_LINE_INFO",
    "TRITON_ENABLE_ASAN", "TRITON_HIP_USE_ASYNC_COPY", "TRITON_HIP_USE_BLOCK_PINGPONG",
    "TRITON_HIP_USE_IN_THREAD_TRANSPOSE",
)  # fmt: skip
_SWITCH = re.compile(r"0|1|y|n|on|off|yes|no|true|false", re.IGNORECASE)
_WORDS = re.compile(r"[\w-]*(,[\w-]+)*", re.ASCII)  # what an option's text may be: no path, no program
_KERNELS = ("portattn.kernels.", "portattn.backends.")
# Triton evaluates the layout of a descriptor's type as Python: no text with calls in it gets there.
_TYPE = re.compile(
    r"\*{0,2}k?[a-z]\w*"
    r"|tensordesc<[a-z]\w*\[[\d, ]+\](, ?(NVMMA|Padded|Swizzled)SharedLayout\([\w=, \[\]-]*\))?>"
)


def permitted_env(env: Mapping[str, Any], registry: Registry) -> tuple[dict[str, str], list[str]]:
    """Split variables that a log or an incident sets: those that a compile here may see, and a line on each other one.

    Permitted are SWITCHES with a switch's value, and exactly what the effect of a quirk sets.
    """
    effects = [quirk.effect.env or {} for quirk in (*registry.quirks.values(), *registry.retired.values())]
    kept, left_out = {}, []
    for name, value in env.items():
        switch = name in SWITCHES and isinstance(value, str) and _SWITCH.fullmatch(value)
        if switch or any(name in effect and effect[name] == value for effect in effects):
            kept[name] = value
        else:
            why = "no switch of the compiler's, and no quirk sets it so; to have it set, add it to ENV of the program"
            left_out.append(f"variable {name}={value!r}: {why}")
    return kept, left_out


def permitted_signature(given: Mapping[str, Any] | None, registry: Registry) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the signature that a log quotes as a compile here takes it, and a line on each part that is left out.

    The signature is None if it is no Signature, or if its kernel is neither portattn's nor an installed backend's: to
    import a module is to run it. Compiler options are kept if a backend declares them and their values have the
    declared type; texts must be plain words, since some options name files.
    """
    if given is None:
        return None, []
    known = {name: given[name] for name in Signature.__struct_fields__ if name in given}
    try:
        signature = msgspec.convert({"small": (), **known}, Signature)
    except msgspec.ValidationError as error:
        return None, [f"the quoted request: this release cannot read its signature ({error})"]
    kernel = f"{signature.module}:{signature.function}"
    brought = {type(backend).__module__.partition(".")[0] for backend in registry.backends.values()} - {"portattn"}
    parts = [*signature.module.split("."), signature.function]
    ours = signature.module.startswith(_KERNELS) or parts[0] in brought
    if not ours or not all(part.isidentifier() for part in parts):
        by_hand = "to try it, write its compile into the program"
        return None, [f"kernel {kernel}: neither portattn's nor an installed backend's, so not imported; {by_hand}"]
    for name, kind in signature.types.items():
        if not _TYPE.fullmatch(kind):
            limit = "must be a scalar, a pointer or a descriptor, such as i32, *fp16 or tensordesc<fp16[64, 128]>"
            return None, [f"kernel {kernel}: the type of argument {name} is {kind!r}, but {limit}"]
    declared = {"num_warps": int, "num_stages": int, **compiler_options.options()}
    kept: dict[str, bool | int | str] = {}
    left_out = []
    for name, value in signature.options.items():
        if name not in declared:
            why = "no backend declares it"
        elif type(value) is not declared[name]:
            why = f"must be of type {declared[name].__name__}"
        elif isinstance(value, str) and not _WORDS.fullmatch(value):
            why = "must be words of letters, digits, - and _, with commas between them"
        else:
            kept[name] = value
            continue
        by_hand = "to have it set, add it to OPTIONS of the program"
        left_out.append(f"compiler option {name}={value!r}: {why}; {by_hand}")
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(signature, options=kept))
    return found, left_out


class Specialisation(msgspec.Struct, frozen=True, kw_only=True):
    """A problem, and exactly how the core kernel runs it. env: what the compiler sees beside its usual environment."""

    problem: Problem
    lowering: Lowering
    launch: Launch
    env: dict[str, str] = {}

    @property
    def kernel(self) -> str:
        return CORES[self.problem.op].name

    def plan(self, target: Target, registry: Registry) -> Plan:
        """A plan that runs this, whatever tuning and quirks would make of the problem."""
        path = registry.backends[target.backend].core_path
        return Plan(
            problem=self.problem, target=target.name, toolchain=str(target.toolchain), requested=path, path=path,
            kernel=self.kernel, lowering=self.lowering, launch=self.launch, env=self.env,
        )  # fmt: skip

    def launches(self, target: Target, registry: Registry) -> list[KernelCall]:
        made = self.plan(target, registry)
        return kernel_calls(made, meta_call(self.problem), target.arch.cores)[0]

    def cannot(self, target: Target) -> str:
        """Why no plan could have these choices, whatever its tuning; empty when one could."""
        kernel = CORES[self.problem.op]
        refused = kernel.cannot(self.problem)
        if refused:
            return refused[0]
        for choice, value, why in kernel.limits(self.problem, self.lowering, self.launch):
            if getattr(self.lowering, choice) != value:
                return f"{choice} must be {value}: {why}"
        return ""


def of_incident(incident: Incident, registry: Registry) -> Specialisation | None:
    """Return what failed in an incident; None for one that an older release kept, without its problem.

    Its variables are those that `permitted_env` permits.
    """
    if incident.problem is None or incident.lowering is None or incident.launch is None:
        return None
    env, _ = permitted_env(incident.environment_set, registry)
    return Specialisation(problem=incident.problem, lowering=incident.lowering, launch=incident.launch, env=env)


class CompileOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How compiling ended. text: what the compiler said, as probes match signatures against it."""

    reply: Reply
    function: str = ""

    @property
    def passed(self) -> bool:
        return self.reply.outcome == "ok"

    @property
    def text(self) -> str:
        reply = self.reply
        return "\n".join(part for part in (f"{reply.kind}: {reply.message}", reply.log) if part)


def compile_all(
    what: Specialisation, target: Target, registry: Registry, worker: Worker, seconds: float
) -> CompileOutcome:
    """Compile every launch until one fails. What does not fit the chip fails as well."""
    made = what.plan(target, registry)
    last = CompileOutcome(reply=Reply(outcome="ok"))
    for launch in what.launches(target, registry):
        reply = compile_in(worker, launch, made, target, seconds, "basic", again=False)
        over = over_limit(reply, target) if reply.outcome == "ok" else ""
        if over:
            reply = Reply(outcome="error", stage="load", kind="OutOfResources", message=over)
        last = CompileOutcome(reply=reply, function=launch.function)
        if not last.passed:
            break
    return last


def is_it(outcome: CompileOutcome, symptom: str, signature: str) -> bool:
    """Whether an outcome is the failure that is looked for: by its signature, or a hang by not ending."""
    if outcome.passed:
        return False
    if symptom == "hang" and outcome.reply.outcome == "hang":
        return True
    return bool(signature) and re.search(signature, outcome.text) is not None


def values_of(what: Specialisation) -> dict[str, Any]:
    """Launch values and the choices that the kernel reads, by name: for reports."""
    return {**what.launch.values(), **{name: getattr(what.lowering, name) for name in CORES[what.problem.op].choices}}
