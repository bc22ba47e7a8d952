"""Verifying a kernel: the same plan, kernel and lowering by every means that this machine has, and which one differs.

Each means is compared with the float64 oracle under the tests' budget. Triton's interpreter runs the kernel's source;
the device, and the executors of the target's backend (a model of the chip, a newer chip), what a compiler made of it.
Where only the interpreter is right, the compiler or the chip is wrong; where all are wrong, the kernel is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from portattn.compile.compile_check import first_line
from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.planning.backend import Variant
from portattn.planning.detect_target import devices
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import OPS
from portattn.schema.quirk import LEVELS, Level
from portattn.schema.target import Target
from portattn.testing import canary
from portattn.testing.executor import executors, lacks
from portattn.testing.findings import Numerics
from portattn.testing.numerics import COMPARE, Interpreter, numerics, request_of
from portattn.tools import lab
from portattn.tools.matrix import variants
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
    """One problem, what each means gave, and what that says.

    form   the kernel's, as in Plan
    level  evidence that this row is; `declared` where something differs, or nothing but the interpreter ran
    label  what a level of `runs` rests on where that is not the chip itself: "sm_80 code on sm_90"
    """

    op: str
    problem: str
    target: str
    toolchain: str
    kernel: str
    form: str = ""
    path: str
    verdict: Conclusion
    sentence: str
    level: Level = "declared"
    label: str = ""
    seen: dict[str, Numerics] = {}


def verify(
    ops: Sequence[str],
    target: Target,
    settings: Settings,
    seconds: float,
    say: Callable[[str], None],
    emulate: bool = False,
    run_ptx_compat: bool | None = None,
) -> Iterator[VerificationRow]:
    """Verify the canaries of these ops (all when empty) on a target; a row as each is finished.

    seconds    time limit of each means
    say        told what is being run
    emulate    also run the machine code in a model of the chip
    run_ptx_compat  also run the target's code on a newer chip of its family that is here; None: where there is one

    Raises ArgumentError for a chip that no kernel is planned for, and when there is no model of the chip, or
    run_ptx_compat is True and no newer chip; LabError when the target's compiler is neither installed nor in the lab.
    """
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
                    yield _row(problem, target, None, "refused", core, {})
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
                yield _row(problem, target, core, verdict, SENTENCES[verdict], seen, levels)
            yield from _variants(op, target, settings, seconds, say, running if here else None)


def _variants(
    op: str, target: Target, settings: Settings, seconds: float, say: Callable[[str], None], running: Worker | None
) -> Iterator[VerificationRow]:
    """The canaries of the op's variants on this chip: compiled, and run where the target is here (`running`)."""
    with _Compilers(target) as compilers:
        yield from _variant_rows(op, target, settings, seconds, say, running, compilers)


class _Compilers:
    """The target's compiler, started at its first use."""

    def __init__(self, target: Target) -> None:
        self._name = str(target.toolchain)
        self._worker: Worker | None = None

    def get(self) -> Worker:
        """Return the compiler's worker. Raises LabError or ArgumentError if no such compiler is here."""
        self._worker = self._worker or lab.worker(self._name)
        return self._worker

    def __enter__(self) -> _Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()


def _variant_rows(
    op: str,
    target: Target,
    settings: Settings,
    seconds: float,
    say: Callable[[str], None],
    running: Worker | None,
    compilers: _Compilers,
) -> Iterator[VerificationRow]:
    for variant in Registry.load().backends[target.backend].variants:
        if op not in variant.ops or target.arch.name not in variant.arches:
            continue
        for problem in (p for p in variant.canaries or canary.CASES[op] if p.op == op):
            made = canary.plan_case(problem, target, settings, variant.name)
            if made is None:
                continue
            say(f"{problem} by {variant.name}")
            seen = {"compiled": _compiled(variant, made, target, compilers, seconds)}
            if running is not None:
                seen["device"] = _on_device(made, problem, target, running, seconds)
            verdict = variant_conclusion({name: found.outcome for name, found in seen.items()})
            yield _row(problem, target, made, verdict, SENTENCES[verdict], seen)


def _compiled(variant: Variant, made: Plan, target: Target, compilers: _Compilers, seconds: float) -> Numerics:
    """Whether a variant compiles to code that fits the chip and is clean; no number is compared."""
    where, problem = str(target), made.problem
    try:
        kernels, failed, function = variants.compile_variant(variant, made, target, compilers.get(), seconds)
    except (lab.LabError, ArgumentError, variants.LaunchDescriptionError) as error:
        return Numerics(outcome="not_run", where=where, problem=problem, reason=str(error))
    if failed is not None:
        reason = f"{function}: {failed.kind} at {failed.stage}: {first_line(failed.message)}"
        assert failed.outcome != "ok"
        return Numerics(outcome=failed.outcome, where=where, problem=problem, reason=reason)
    broken = variants.broken(variants.check(variant, problem, target, kernels))
    return Numerics(outcome="fail" if broken else "pass", where=where, problem=problem, reason="; ".join(broken))


def variant_conclusion(outcomes: Mapping[str, str]) -> Conclusion:
    """What compiling a variant, and running it where that could be done, together say."""
    on_device, compiled = outcomes.get("device", "not_run"), outcomes["compiled"]
    if on_device != "not_run":
        return "agree" if on_device == "pass" else "unclear"
    if compiled == "not_run":
        return "unseen"
    return "compiled" if compiled == "pass" else "compiler"


def conclusion(outcomes: Mapping[str, str]) -> Conclusion:
    """What the outcomes of the means together say; `not_run` says nothing."""
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
    """The plan of the core kernel, also where it is passed over only for being slow; or why there is none."""
    registry = Registry.load()
    named = registry.backends[target.backend].core_path == "interpreter"
    asked = msgspec.structs.replace(settings, backend="interpreter" if named else "auto", fallback="silent")
    try:
        made = plan(problem, target, registry, settings=asked)
    except PortattnError as error:
        return str(error)
    core = core_of(made, target, registry, settings)
    return (
        core if core is not None else (made.rejected[0].reason if made.rejected else f"the {made.path} path is taken")
    )


def _on_device(core: Plan, problem: Problem, target: Target, worker: Worker, seconds: float) -> Numerics:
    kind = Registry.load().backends[target.backend].device_type
    reply = worker.request(COMPARE, seconds, **request_of(core, problem, core.path, target.name, kind))
    return numerics(reply, str(target), problem)


def _row(
    problem: Problem,
    target: Target,
    core: Plan | None,
    verdict: Conclusion,
    sentence: str,
    seen: dict[str, Numerics],
    levels: Mapping[str, Level] | None = None,
) -> VerificationRow:
    """levels: what a right result by each means is evidence for; the interpreter's is none."""
    levels = levels or {DEVICE: "runs"}
    passed = {name: levels[name] for name, found in seen.items() if name in levels and found.outcome == "pass"}
    reached: list[Level] = ["compiles" if verdict == "compiled" else "declared"]
    if verdict == "agree":
        reached += passed.values()
    level = max(reached, key=LEVELS.index)
    elsewhere = [seen[name].where for name, of in passed.items() if of == "runs"] if DEVICE not in passed else []
    return VerificationRow(
        op=problem.op,
        problem=str(problem),
        target=target.name,
        toolchain=str(target.toolchain),
        kernel=canary.family(core) if core else "",
        form=core.form if core else "",
        path=core.path if core else "",
        verdict=verdict,
        sentence=sentence,
        level=level,
        label=elsewhere[0] if level == "runs" and elsewhere else "",
        seen=seen,
    )
