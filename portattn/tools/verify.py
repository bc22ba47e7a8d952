"""Verify a kernel by every means of this machine (interpreter, device, executors) against the float64 oracle."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from portattn.compile.ensure_compiled import first_line
from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.planning.backend import Variant
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, devices
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import OPS
from portattn.schema.quirk import LEVELS, Level
from portattn.schema.target import Target
from portattn.testing import canary, findings
from portattn.testing.executor import COMPARE, Interpreter, executors, lacks, request_of
from portattn.testing.findings import Numerics, numerics
from portattn.tools import lab
from portattn.tools.matrix.run import core_of
from portattn.worker.client import Worker

Conclusion = Literal["agree", "device", "kernel", "interpreter", "unclear", "unseen", "refused", "compiled", "compiler"]
SENTENCES: Mapping[Conclusion, str] = {
    "agree": "right by every means that ran",
    "device": "right under the interpreter and wrong as machine code: what the compiler made of it, or the chip",
    "kernel": "wrong by every means that ran: the kernel itself, or this lowering of it",
    "interpreter": "wrong under the interpreter only: the interpreter, or what it does not do as a device does",
    "unclear": "wrong, and what ran cannot tell whether the kernel or what a compiler made of it is",
    "unseen": "nothing could run it here",
    "refused": "the core kernel does not take it",
    "compiled": "it compiles to clean code, and nothing here could run it",
    "compiler": "it does not compile to clean code",
}
DEVICE = "device"  # the means that is the chip itself, whose right result is evidence of level `runs`
UNVERIFIED: frozenset[str] = frozenset({"unseen", "refused"})
RED: frozenset[str] = frozenset({"device", "kernel", "interpreter", "unclear", "compiler"})


class VerificationRow(msgspec.Struct, frozen=True, kw_only=True):
    op: str
    problem: str
    target: str
    toolchain: str
    kernel: str
    form: str = ""  # the kernel's, as in Plan
    path: str
    verdict: Conclusion
    sentence: str
    level: Level = "declared"  # evidence of this row; `declared` if something differs, or only the interpreter ran
    label: str = ""  # the evidence of a level `runs` that was not reached on the chip itself: "sm_80 code on sm_90"
    seen: dict[str, Numerics] = {}


def verify(
    ops: Sequence[str], target: Target, settings: Settings, seconds: float, say: Callable[[str], None],
    emulate: bool = False, run_ptx_compat: bool | None = None,
) -> Iterator[VerificationRow]:  # fmt: skip
    """Verify the canaries of these ops (all when empty) on a target; yield a row as each is finished.

    `emulate`: in a model too; `run_ptx_compat`: on a newer chip (None: if here). Raises ArgumentError or LabError."""
    if target.arch.refused:
        limit = f"must be a chip that kernels are planned for: {target.arch.refused}"
        raise ArgumentError("verify", "target", target.name, limit)
    interpreter = Interpreter(seconds)
    here = any(t.name == target.name and str(t.toolchain) == str(target.toolchain) for t in devices())
    for name, asked in (("emulated", emulate), ("older", run_ptx_compat)):
        if asked and (missing := lacks(name, target, devices())):
            raise ArgumentError("verify", "target", target.name, missing)
    own = executors(target.backend, seconds, devices())
    # Where an older chip's code is not run the row says why, unless that was asked for.
    wanted = {"older": not here and run_ptx_compat is not False, "emulated": emulate}
    means = [own[name] for name, runs in wanted.items() if runs and name in own]
    compiles = any(not one.lacks(target) for one in means)
    levels: dict[str, Level] = {DEVICE: "runs", **{one.name: one.level for one in means}}
    with (
        Worker(runs="interpreter") as interpreting,
        Worker(runs="kernels") as running,
        lab.worker(str(target.toolchain)) if compiles else contextlib.nullcontext(running) as compiling,
    ):
        for op in ops or OPS:
            for problem in canary.of_op(op):
                say(f"{problem}")
                core = _core(problem, target, settings)
                if isinstance(core, str):
                    yield _row(problem, target, None, "refused", {}, sentence=core)
                    continue
                seen = {"interpreter": interpreter.check(core, interpreting)}
                if here and core.path != "interpreter":
                    seen["device"] = _on_device(core, problem, target, running, seconds)
                for executor in means:
                    problems = [problem] if executor.runs_on == "device" else []  # a device takes it at its own size
                    seen[executor.name] = executor.check(
                        core, target, compiling, interpreting if executor.interprets else running, problems
                    )
                verdict = conclusion({name: found.outcome for name, found in seen.items()})
                yield _row(problem, target, core, verdict, seen, levels)
            with contextlib.ExitStack() as opened:

                @functools.lru_cache(maxsize=1)
                def compiler(opened: contextlib.ExitStack = opened) -> Worker:
                    return opened.enter_context(lab.worker(str(target.toolchain)))

                yield from _variants(op, target, settings, seconds, say, running if here else None, compiler)


def _variants(
    op: str, target: Target, settings: Settings, seconds: float, say: Callable[[str], None], running: Worker | None,
    compiler: Callable[[], Worker],
) -> Iterator[VerificationRow]:  # fmt: skip
    for variant in Registry.load().backends[target.backend].variants:
        if op not in variant.ops or target.arch.name not in variant.arches:
            continue
        for problem in (p for p in variant.canaries or canary.CASES[op] if p.op == op):
            made = canary.plan_case(problem, target, settings, variant.name)
            if made is None:
                continue
            say(f"{problem} by {variant.name}")
            seen = {"compiled": _compiled(variant, made, target, compiler, seconds)}
            if running is not None:
                seen["device"] = _on_device(made, problem, target, running, seconds)
            verdict = variant_conclusion({name: found.outcome for name, found in seen.items()})
            yield _row(problem, target, made, verdict, seen)


def _compiled(variant: Variant, made: Plan, target: Target, compiler: Callable[[], Worker], seconds: float) -> Numerics:
    where, problem = str(target), made.problem
    try:
        kernels, failed, function = findings.compile_variant(variant, made, target, compiler(), seconds)
    except (lab.LabError, ArgumentError, findings.LaunchDescriptionError) as error:
        return Numerics(outcome="not_run", where=where, problem=problem, reason=str(error))
    if failed is not None:
        reason = f"{function}: {failed.kind} at {failed.stage}: {first_line(failed.message)}"
        assert failed.outcome != "ok"
        return Numerics(outcome=failed.outcome, where=where, problem=problem, reason=reason)
    broken = findings.broken_gates(findings.check_variant(variant, problem, target, kernels))
    return Numerics(outcome="fail" if broken else "pass", where=where, problem=problem, reason="; ".join(broken))


def variant_conclusion(outcomes: Mapping[str, str]) -> Conclusion:
    on_device, compiled = outcomes.get("device", "not_run"), outcomes["compiled"]
    if on_device != "not_run":
        return "agree" if on_device == "pass" else "unclear"
    if compiled == "not_run":
        return "unseen"
    return "compiled" if compiled == "pass" else "compiler"


def conclusion(outcomes: Mapping[str, str]) -> Conclusion:
    ran = {name: outcome == "pass" for name, outcome in outcomes.items() if outcome != "not_run"}
    if not ran:
        return "unseen"
    if all(ran.values()):
        return "agree"
    if "interpreter" not in ran:
        return "unclear"
    if not any(ran.values()):
        return "kernel" if len(ran) > 1 else "unclear"
    if ran["interpreter"]:
        return "device"
    return "interpreter" if sum(ran.values()) == len(ran) - 1 else "unclear"


def _core(problem: Problem, target: Target, settings: Settings) -> Plan | str:
    """Return the core kernel's plan, also if it was rejected only for being slow; or why there is none."""
    registry = Registry.load()
    named = registry.backends[target.backend].core_path == "interpreter"
    asked = msgspec.structs.replace(settings, backend="interpreter" if named else "auto", fallback="silent")
    try:
        made = plan(problem, target, registry, settings=asked)
    except PortattnError as error:
        return str(error)
    core = core_of(made, target, registry, settings)
    return core or (made.rejected[0].reason if made.rejected else f"the {made.path} path is taken")


def _on_device(core: Plan, problem: Problem, target: Target, worker: Worker, seconds: float) -> Numerics:
    kind = Registry.load().backends[target.backend].device_type
    reply = worker.request(COMPARE, seconds, **request_of(core, problem, core.path, target.name, kind))
    return numerics(reply, str(target), problem)


def _row(
    problem: Problem, target: Target, core: Plan | None, verdict: Conclusion, seen: dict[str, Numerics],
    levels: Mapping[str, Level] | None = None, sentence: str = "",
) -> VerificationRow:  # fmt: skip
    levels = levels or {DEVICE: "runs"}
    passed = {name: levels[name] for name, found in seen.items() if name in levels and found.outcome == "pass"}
    reached: list[Level] = ["compiles" if verdict == "compiled" else "declared"]
    if verdict == "agree":
        reached += passed.values()
    level = max(reached, key=LEVELS.index)
    elsewhere = [seen[name].where for name, of in passed.items() if of == "runs"] if DEVICE not in passed else []
    return VerificationRow(
        op=problem.op, problem=str(problem), target=target.name, toolchain=str(target.toolchain),
        kernel=canary.family(core) if core else "", form=core.form if core else "", path=core.path if core else "",
        verdict=verdict, sentence=sentence or SENTENCES[verdict], level=level,
        label=elsewhere[0] if level == "runs" and elsewhere else "", seen=seen,
    )  # fmt: skip
