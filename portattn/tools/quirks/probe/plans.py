"""An arm of a planned probe: the plan of a stated problem with the quirk switched off or on, all its kernels compiled.

"plan: attention --target rocm:gfx950 --q 2,8,1024,128 --kv 2,8,1024,128 --dtype bf16 --start num_stages=4" states the
problem as `portattn plan` does. `--start NAME=VALUE` (a launch value, a compiler option or a lowering choice; repeat
it, or use commas) replaces the arch's tuning as the start of the plan; Launch and Lowering have defaults for the rest.
"""

from __future__ import annotations

import datetime
import fnmatch
import shlex
from typing import Any

import click
import msgspec

from portattn.compile.compile_check import compile_fields, over_limit
from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.launch import KernelCall, kernel_calls, meta_call
from portattn.planning.backend import Variant
from portattn.planning.compiler_options import check_launch_values, options
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.lowering import CHOICES, LAUNCH_FIELDS
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import OPS
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.tuning import Entry, Provenance, Tuning
from portattn.testing import gates
from portattn.testing.executor import Executor, executors
from portattn.testing.findings import KernelFacts
from portattn.tools.matrix import variants
from portattn.tools.problem_text import CausalCommand, problem_from, problem_options
from portattn.tools.quirks import examples
from portattn.tools.quirks.probe.results import MISSING, PASSED, SEEN, Arm, ArmName, Outcome, arm_of_reply, matches
from portattn.worker.client import Reply, Worker

PREFIX = "plan:"
# A kernel without products, which every working compiler compiles: it merges a split.
_CONTROL = Problem(op="decode_attention", batch=1, heads_q=8, heads_k=8, seq_q=1, seq_k=8192, head_dim=64, num_splits=4)
_UNTIMED = Provenance(chip="none", toolchain="none", date=datetime.date(2026, 1, 1), measured=False)


class PlanProbe(msgspec.Struct, frozen=True, kw_only=True):
    """What a "plan:" probe states. `start`: launch values, options and choices by name."""

    problem: Problem
    target: str
    start: dict[str, bool | int | str]


@click.command(cls=CausalCommand, add_help_option=False)
@click.argument("op")
@click.option("--target", required=True)
@click.option("--start", multiple=True)
@problem_options
def _options(**_: Any) -> None:
    """Never called: only its parser is of use."""


def parse(text: str) -> PlanProbe:
    """Read a "plan:" probe. Raises ArgumentError naming what is wrong with it."""
    try:
        given = _options.make_context("plan", shlex.split(text.removeprefix(PREFIX))).params
    except (click.UsageError, ValueError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise ArgumentError("probe", "plan", text, f"must be the options of `portattn plan`: {message}") from None
    op, target, start = given.pop("op"), given.pop("target"), given.pop("start")
    if op not in OPS:
        raise ArgumentError("probe", "OP", op, f"must be one of {', '.join(OPS)}")
    values = dict(_start(part.strip()) for text in start for part in text.split(","))
    try:
        launch = {name: value for name, value in values.items() if name not in CHOICES}
        check_launch_values(launch, target.partition(":")[0], rows=bool(CORES[op].of_rows))
    except ValueError as error:
        raise ArgumentError("probe", "--start", ", ".join(start), str(error)) from None
    return PlanProbe(problem=problem_from(op, **given), target=target, start=values)


def _start(text: str) -> tuple[str, bool | int | str]:
    name, equals, value = text.partition("=")
    kind = int if name in LAUNCH_FIELDS else options().get(name)
    known = [*LAUNCH_FIELDS, *options(), *CHOICES]
    if not equals or name not in known:
        raise ArgumentError("probe", "--start", text, f"must be NAME=VALUE, with one of {', '.join(known)}")
    if name in CHOICES and value not in CHOICES[name]:
        raise ArgumentError("probe", "--start", text, f"must be one of {', '.join(CHOICES[name])}")
    if (kind is int and not value.isdigit()) or (kind is bool and value not in ("true", "false")):
        raise ArgumentError("probe", "--start", text, f"must be {'a whole number' if kind is int else 'true or false'}")
    return name, int(value) if kind is int else value == "true" if kind is bool else value


def run_arm(
    quirk: Quirk, arm: ArmName, target: Target, registry: Registry, worker: Worker, seconds: float, passes: str = ""
) -> Arm:
    """Plan and compile one arm. Whatever the compiler does is the Arm."""
    stated = parse(quirk.evidence.probe)
    if arm == "control":
        return _control(quirk, target, registry, worker, seconds, passes)
    begun = with_start_values(registry, stated, target)
    variant = variant_in(quirk, stated, registry)
    if variant is not None:
        return _of_variant(quirk, variant, arm, stated, target, begun, worker, seconds)
    try:
        made = plan_arm(quirk, arm, stated, target, begun)
    except PortattnError as error:
        return Arm(outcome="fail", kind="NoPlan", stage="plan", text=str(error))
    if quirk.effect.kind == "path" and arm == "on":
        return (
            PASSED if made is None else Arm(outcome="fail", kind="NoPlan", text="the core path is taken all the same")
        )
    if made is None:
        return Arm(
            outcome="fail", kind="NoPlan", stage="plan", text="no core kernel is planned for the probe's problem"
        )
    return _compiled(quirk, made, target, begun, worker, seconds, passes)


def plan_arm(quirk: Quirk, arm: ArmName, stated: PlanProbe, target: Target, registry: Registry) -> Plan | None:
    """The core plan of an arm; None when the core path is not taken.

    Raises PortattnError where no plan can be made, and where the quirk leaves the plan of its own probe alone.
    """
    core = registry.backends[target.backend].core_path
    overrides = ["-" if arm == "off" else "+", quirk.id, *(f",-{other}" for other in rivals(quirk, registry))]
    settings = Settings(quirks="".join(overrides), backend=core)
    if arm == "on" and quirk.effect.kind == "path":
        settings = msgspec.structs.replace(settings, backend="auto")
    made = plan(stated.problem, target, registry, settings=settings)
    if arm == "on" and quirk.id not in _mentioned(made):
        raise PortattnError(f"{quirk.id} changes nothing in the plan of its probe: the probe states another problem")
    return made if made.lowering is not None else None


def variant_in(quirk: Quirk, stated: PlanProbe, registry: Registry) -> Variant | None:
    """The variant that an entry is about: one that its patterns match, of the stated op; None for an entry about the
    core's kernels."""
    if examples.kernels_of(quirk):
        return None
    own = registry.backends[stated.target.partition(":")[0]].variants
    named = [v for v in own if any(fnmatch.fnmatchcase(v.name, pattern) for pattern in quirk.when.kernels)]
    return next((v for v in named if stated.problem.op in v.ops), None)


def _of_variant(
    quirk: Quirk,
    variant: Variant,
    arm: ArmName,
    stated: PlanProbe,
    target: Target,
    registry: Registry,
    worker: Worker,
    seconds: float,
) -> Arm:
    """The variant, compiled whatever the entry says; and what is planned where the entry rejects it."""
    if arm == "on":
        try:
            made = plan(stated.problem, target, registry, settings=Settings(quirks=f"+{quirk.id}"))
        except PortattnError as error:
            return Arm(outcome="fail", kind="NoPlan", stage="plan", text=str(error))
        if made.path == variant.name or quirk.id not in _mentioned(made) or made.lowering is None:
            return Arm(outcome="fail", kind="NoPlan", stage="plan", text=f"the {made.path} path is taken")
        return _compiled(quirk, made, target, registry, worker, seconds, "")
    # Not planned: on other toolchains other entries and the variant itself would reject it.
    made = Plan(
        problem=stated.problem, target=target.name, toolchain=str(target.toolchain), requested=variant.name,
        path=variant.name,
    )  # fmt: skip
    try:
        kernels, failed, _ = variants.compile_variant(variant, made, target, worker, seconds)
    except variants.LaunchDescriptionError as error:
        return Arm(outcome="fail", kind=MISSING, stage="plan", text=f"{MISSING}: {error}")
    if failed is not None:
        return arm_of_reply(failed, quirk)
    broken = variants.broken(variants.check(variant, stated.problem, target, kernels))
    text = "\n".join(broken)
    if not broken:
        return PASSED
    return Arm(outcome="fail", kind="Gates", stage="read", text=text, matched=matches(quirk, "fail", "Gates", text))


def rivals(quirk: Quirk, registry: Registry) -> list[str]:
    """Ids of the other quirks that set what this one asks about or sets: they would hide it, or its absence."""
    mine = {*quirk.when.launch, *quirk.when.lowering, *quirk.effect.sets}
    return [other.id for other in registry.quirks.values() if other.id != quirk.id and mine & other.effect.sets.keys()]


def _mentioned(made: Plan) -> set[str]:
    """Quirks that had a part in a plan."""
    return {a.id for a in made.quirks} | {no.quirk for no in made.rejected}


def with_start_values(registry: Registry, stated: PlanProbe, target: Target) -> Registry:
    """The registry with a tuning that makes a plan of the problem start from the stated values, if there are any."""
    if not stated.start:
        return registry
    kernel = CORES[stated.problem.op].name
    launch = {name: value for name, value in stated.start.items() if name not in CHOICES}
    lowering = {name: str(value) for name, value in stated.start.items() if name in CHOICES}
    entry = Entry(kernel=kernel, launch=launch, lowering=lowering)
    own = {target.arch.tuning or target.arch.name: Tuning(provenance=_UNTIMED, entry=(entry,))}
    return msgspec.structs.replace(registry, tunings={**registry.tunings, target.backend: own})


def _control(quirk: Quirk, target: Target, registry: Registry, worker: Worker, seconds: float, passes: str) -> Arm:
    """Whether the compiler works at all: the kernel that merges a split, planned without any quirk or tuning."""
    bare = msgspec.structs.replace(registry, quirks={}, tunings={name: {} for name in registry.tunings})
    made = plan(_CONTROL, target, bare, settings=Settings(backend=bare.backends[target.backend].core_path))
    launches, _, _ = kernel_calls(made, meta_call(made.problem), target.arch.cores)
    return arm_of_reply(_compile(worker, launches[-1], made, target, seconds, passes), quirk)


def _compile(worker: Worker, launch: KernelCall, made: Plan, target: Target, seconds: float, passes: str) -> Reply:
    """Once, whatever comes of it: a compiler that dies is what may be looked for."""
    return worker.request("compile", seconds, **compile_fields(launch, made, target), facts="full", passes=passes)


def executes(quirk: Quirk, target: Target) -> bool:
    """Whether the launches of a planned probe are also run: numbers alone say that a result is wrong."""
    return quirk.symptom == "wrong-result" and _executor(target) is not None


def _executor(target: Target, seconds: float = 0.0) -> Executor | None:
    """What runs a target's code on any machine; None where nothing does."""
    return next((one for one in executors(target.backend, seconds).values() if one.runs_on == "cpu"), None)


def _executed(executor: Executor, quirk: Quirk, made: Plan, target: Target, worker: Worker) -> Arm:
    """The plan on small random problems."""
    level = executor.level
    with Worker(runs="kernels") as runner:
        seen = executor.check(made, target, worker, runner)
    if seen.outcome == "pass":
        return Arm(outcome="pass", level=level)
    if seen.outcome == "not_run":
        return Arm(outcome="fail", kind=MISSING, stage="execute", text=f"{MISSING}: {seen.reason}")
    outcome: Outcome = seen.outcome if seen.outcome in ("crash", "hang") else "fail"
    # What a model does not know, and what no small problem can be made of, says nothing of the numbers.
    found = seen.outcome == "fail" or seen.reason.removeprefix("error: ").partition(":")[0] in executor.findings
    name = SEEN if found else "Execution"
    text = f"{name}: {seen.reason}"
    return Arm(
        outcome=outcome, kind=name, stage="execute", text=text, matched=matches(quirk, outcome, name, text), level=level
    )


def _compiled(
    quirk: Quirk, made: Plan, target: Target, registry: Registry, worker: Worker, seconds: float, passes: str
) -> Arm:
    launches, _, _ = kernel_calls(made, meta_call(made.problem), target.arch.cores)
    found: list[KernelFacts] = []
    broken: list[str] = []
    for launch in launches:
        reply = _compile(worker, launch, made, target, seconds, passes)
        if reply.outcome != "ok":
            return arm_of_reply(reply, quirk)
        found.append(KernelFacts(function=launch.function, facts=dict(reply.facts)))
        broken += [text for text in (over_limit(reply, target),) if text]
        if reply.facts.get("leftover_tt"):
            broken.append(f"{launch.function}: {reply.facts['leftover_tt']} leftover tt. operations after lowering")
        if reply.facts.get("serialized_wgmma") and quirk.symptom == "slow":
            broken.append(f"{launch.function}: wgmma serialized {reply.facts['serialized_wgmma']} times (ptxas C7511)")
    # Spills are no matter of those quirks that are about compiling at all, or about fitting the chip.
    if quirk.symptom == "slow":
        checked = gates.check(made, target, tuple(found), registry)
        broken += [str(gate) for gate in checked if not gate.passed]
    if not broken:
        executor = _executor(target, seconds) if executes(quirk, target) else None
        return _executed(executor, quirk, made, target, worker) if executor is not None else PASSED
    text = "\n".join(broken)
    return Arm(outcome="fail", kind="Gates", stage="read", text=text, matched=matches(quirk, "fail", "Gates", text))
