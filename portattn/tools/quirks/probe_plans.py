"""An arm of a planned probe: the plan of a stated problem with the quirk switched off or on, all its kernels compiled.

"plan: attention --target rocm:gfx950 --q 2,8,1024,128 --kv 2,8,1024,128 --dtype bf16 --start num_stages=4" states the
problem as `portattn plan` does; `--start NAME=VALUE` replaces the arch's tuning as the start of the plan."""

import fnmatch
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import click
import msgspec

from portattn.compile.ensure_compiled import compile_fields, compile_in, over_limit
from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.launch import KernelCall, kernel_calls, meta_call
from portattn.planning.backend import Variant
from portattn.planning.data_files import check_launch_values, options
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.lowering import CHOICES, LAUNCH_FIELDS, Launch, Lowering
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import ASKED, OPS
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.tuning import Entry
from portattn.testing import findings
from portattn.testing.executor import Executor, executors
from portattn.testing.findings import KernelFacts
from portattn.tools.problem_options import CausalCommand, problem_from, problem_options
from portattn.tools.quirks import examples
from portattn.tools.quirks.probe_results import BUG_FOUND, MISSING, PASSED, Arm, ArmName, Outcome, arm_of_reply, matches
from portattn.worker.client import Reply, Worker

PREFIX = "plan:"
# A kernel without products, which every working compiler compiles: it merges a split.
_CONTROL = Problem(op="decode_attention", batch=1, heads_q=8, heads_k=8, seq_q=1, seq_k=8192, head_dim=64, num_splits=4)


class PlanProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a "plan:" probe. `start`: launch values, options and choices by name."""

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
    """Read a "plan:" probe. Raises ArgumentError naming the fault."""
    try:
        given = _options.make_context("plan", shlex.split(text.removeprefix(PREFIX))).params
    except (click.UsageError, ValueError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise ArgumentError("probe", "plan", text, f"must be the options of `portattn plan`: {message}") from None
    op, target, start = given.pop("op"), given.pop("target"), given.pop("start")
    if op not in OPS:
        raise ArgumentError("probe", "OP", op, f"must be one of {', '.join(OPS)}")
    values = start_values("probe", start, op, target.partition(":")[0])
    return PlanProbe(problem=problem_from(op, **given), target=target, start=values)


def start_values(command: str, start: Sequence[str], op: str, backend: str) -> dict[str, bool | int | str]:
    """Return launch values, options and choices by name from texts NAME=VALUE,…; raise ArgumentError on a bad one."""
    values = dict(_start(command, part.strip()) for text in start for part in text.split(","))
    try:
        launch = {name: value for name, value in values.items() if name not in CHOICES}
        check_launch_values(launch, backend, rows=bool(CORES[op].of_rows))
    except ValueError as error:
        raise ArgumentError(command, "--start", ", ".join(start), str(error)) from None
    return values


def _start(command: str, text: str) -> tuple[str, bool | int | str]:
    name, equals, value = text.partition("=")
    kind = int if name in LAUNCH_FIELDS else options().get(name)
    known = [*LAUNCH_FIELDS, *options(), *CHOICES]
    if not equals or name not in known:
        raise ArgumentError(command, "--start", text, f"must be NAME=VALUE, with one of {', '.join(known)}")
    if name in CHOICES and value not in CHOICES[name]:
        raise ArgumentError(command, "--start", text, f"must be one of {', '.join(CHOICES[name])}")
    if (kind is int and not value.isdigit()) or (kind is bool and value not in ("true", "false")):
        raise ArgumentError(command, "--start", text, f"must be {'a whole number' if kind is int else 'true or false'}")
    return name, int(value) if kind is int else value == "true" if kind is bool else value


def run_arm(
    quirk: Quirk, arm: ArmName, target: Target, registry: Registry, worker: Worker, seconds: float, passes: str = ""
) -> Arm:
    """Plan and compile one arm; the compiler's outcome becomes the Arm."""
    stated = parse(quirk.evidence.probe)
    if arm == "control":
        return _control(quirk, target, registry, worker, seconds, passes)
    begun = with_start_values(registry, stated, target)
    if (variant := variant_in(quirk, stated, registry)) is not None:
        return _of_variant(quirk, variant, arm, stated, target, begun, worker, seconds)
    try:
        made = plan_arm(quirk, arm, stated, target, begun)
    except PortattnError as error:
        return _no_plan(str(error))
    if quirk.effect.kind == "path" and arm == "on":
        return PASSED if made is None else _no_plan("the core path is taken all the same")
    if made is None:
        return _no_plan("no core kernel is planned for the probe's problem")
    return _compiled(quirk, made, target, begun, worker, seconds, passes)


def _no_plan(text: str) -> Arm:
    return Arm(outcome="fail", kind="NoPlan", stage="plan", text=text)


def _gates(quirk: Quirk, broken: Iterable[object]) -> Arm:
    text = "\n".join(map(str, broken))
    return Arm(outcome="fail", kind="Gates", stage="read", text=text, matched=matches(quirk, "fail", "Gates", text))


def plan_arm(quirk: Quirk, arm: ArmName, stated: PlanProbe, target: Target, registry: Registry) -> Plan | None:
    """Return an arm's core plan, or None. Raises PortattnError if none can be made or the quirk does not change it."""
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
    """Return the variant of the stated op that an entry's patterns match; None for an entry about core kernels."""
    if examples.kernels_of(quirk):
        return None
    own = registry.backends[stated.target.partition(":")[0]].variants
    named = [v for v in own if any(fnmatch.fnmatchcase(v.name, pattern) for pattern in quirk.when.kernels)]
    return next((v for v in named if stated.problem.op in v.ops), None)


def _of_variant(
    quirk: Quirk, variant: Variant, arm: ArmName, stated: PlanProbe, target: Target, registry: Registry, worker: Worker,
    seconds: float,
) -> Arm:  # fmt: skip
    """Compile the variant whatever the entry says; in the arm "on", the plan that the entry's rejection leaves."""
    if arm == "on":
        try:
            made = plan(stated.problem, target, registry, settings=Settings(quirks=f"+{quirk.id}"))
        except PortattnError as error:
            return _no_plan(str(error))
        if made.path == variant.name or quirk.id not in _mentioned(made) or made.lowering is None:
            return _no_plan(f"the {made.path} path is taken")
        return _compiled(quirk, made, target, registry, worker, seconds, "")
    # Not planned: on other toolchains other entries and the variant itself would reject it.
    made = Plan(
        problem=stated.problem, target=target.name, toolchain=str(target.toolchain), requested=variant.name,
        path=variant.name,
    )  # fmt: skip
    try:
        kernels, failed, _ = findings.compile_variant(variant, made, target, worker, seconds)
    except findings.LaunchDescriptionError as error:
        return Arm(outcome="fail", kind=MISSING, stage="plan", text=f"{MISSING}: {error}")
    if failed is not None:
        return arm_of_reply(failed, quirk)
    broken = findings.broken_gates(findings.check_variant(variant, stated.problem, target, kernels))
    return _gates(quirk, broken) if broken else PASSED


def rivals(quirk: Quirk, registry: Registry) -> list[str]:
    """Return ids of other quirks that set this one's conditions or effects: they would hide it, or its absence."""
    mine = {*quirk.when.launch, *quirk.when.lowering, *quirk.effect.sets}
    return [other.id for other in registry.quirks.values() if other.id != quirk.id and mine & other.effect.sets.keys()]


def _mentioned(made: Plan) -> set[str]:
    return {a.id for a in made.quirks} | {no.quirk for no in made.rejected}


def with_start_values(registry: Registry, stated: PlanProbe, target: Target) -> Registry:
    if not stated.start:
        return registry
    kernel = CORES[stated.problem.op].name
    launch = {name: value for name, value in stated.start.items() if name not in CHOICES}
    lowering = {name: str(value) for name, value in stated.start.items() if name in CHOICES}
    return examples.tuned_by(registry, target, Entry(kernel=kernel, launch=launch, lowering=lowering))


# Without quirks or tuning: the kernel that merges a split tells if the compiler works.
def _control(quirk: Quirk, target: Target, registry: Registry, worker: Worker, seconds: float, passes: str) -> Arm:
    bare = msgspec.structs.replace(registry, quirks={}, tunings={name: {} for name in registry.tunings})
    made = plan(_CONTROL, target, bare, settings=Settings(backend=bare.backends[target.backend].core_path))
    launches, _, _ = kernel_calls(made, meta_call(made.problem), target.arch.cores)
    return arm_of_reply(_compile(worker, launches[-1], made, target, seconds, passes), quirk)


# Once, without a retry: a compiler's death may be the bug.
def _compile(worker: Worker, launch: KernelCall, made: Plan, target: Target, seconds: float, passes: str) -> Reply:
    return worker.request("compile", seconds, **compile_fields(launch, made, target), facts="full", passes=passes)


def executes(quirk: Quirk, target: Target) -> bool:
    """Return whether the launches of a planned probe also run: only numbers show a wrong result."""
    return quirk.symptom == "wrong-result" and _executor(target) is not None


def _executor(target: Target, seconds: float = 0.0) -> Executor | None:
    return next((one for one in executors(target.backend, seconds).values() if one.runs_on == "cpu"), None)


def _executed(executor: Executor, quirk: Quirk, made: Plan, target: Target, worker: Worker) -> Arm:
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
    name = BUG_FOUND if found else "Execution"
    text = f"{name}: {seen.reason}"
    matched = matches(quirk, outcome, name, text)
    return Arm(outcome=outcome, kind=name, stage="execute", text=text, matched=matched, level=level)


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
        checked = findings.check_gates(made, target, tuple(found), registry)
        broken += [str(gate) for gate in checked if not gate.passed]
    if broken:
        return _gates(quirk, broken)
    executor = _executor(target, seconds) if executes(quirk, target) else None
    return _executed(executor, quirk, made, target, worker) if executor is not None else PASSED


class Specialisation(msgspec.Struct, frozen=True, kw_only=True):
    """A problem, and exactly how the core kernel runs it. env: additions to the compiler's usual environment."""

    problem: Problem
    lowering: Lowering
    launch: Launch
    env: dict[str, str] = {}

    @property
    def kernel(self) -> str:
        return CORES[self.problem.op].name

    def plan(self, target: Target, registry: Registry) -> Plan:
        """Return a plan that runs this, regardless of tuning and quirks."""
        path = registry.backends[target.backend].core_path
        return Plan(
            problem=self.problem, target=target.name, toolchain=str(target.toolchain), requested=path, path=path,
            kernel=self.kernel, lowering=self.lowering, launch=self.launch, env=self.env,
        )  # fmt: skip

    def launches(self, target: Target, registry: Registry) -> list[KernelCall]:
        made = self.plan(target, registry)
        return kernel_calls(made, meta_call(self.problem), target.arch.cores)[0]

    def values(self) -> dict[str, Any]:
        choices = CORES[self.problem.op].choices
        return {**self.launch.values(), **{name: getattr(self.lowering, name) for name in choices}}

    def cannot(self, target: Target) -> str:
        kernel = CORES[self.problem.op]
        if refused := kernel.cannot(self.problem):
            return refused[0]
        for choice, value, why in kernel.limits(self.problem, self.lowering, self.launch):
            if getattr(self.lowering, choice) != value:
                return f"{choice} must be {value}: {why}"
        return ""


# Flags whose option has another name, or says more than yes.
_OTHERWISE = frozenset({"alibi_slopes", "return_lse", "bias", "mask", "seqlens_k"})


def problem_words(problem: Problem) -> list[str]:
    """Return the words of `portattn plan` that describe a problem, its op first."""
    p, row = problem, ROWS[problem.op]
    words = [p.op, "--q", f"{p.batch},{p.heads_q},{p.seq_q},{p.head_dim}"]
    words += ["--kv", f"{p.batch},{p.heads_k},{p.seq_k},{p.head_dim}", "--dtype", p.dtype]
    if p.head_dim_v != p.head_dim or row.latent:
        words += ["--dv", str(p.head_dim_v)]
    if p.causal != "none":
        words.append("--causal" if p.causal == "bottom_right" else f"--causal={p.causal}")
    if p.window:
        right = 0 if p.causal != "none" else p.window_right
        words += ["--window", f"{p.window_left},{right}"]
    words += [f"--{name.replace('_', '-')}" for name in ASKED if getattr(p, name) and name not in _OTHERWISE]
    if p.seqlens_k and (p.has_lists or not row.always_lengths):
        words.append("--seqlens-k")
    usually = {"layout": "bhsd", "page_layout": "phd", "kv_format": "as_q", "kv_scales": "none", "rotary": "none"}
    unaligned = "unaligned" if p.word_aligned or p.kv_format == usually["kv_format"] else "unaligned-words"
    for given, name in ((p.alibi_slopes, "alibi"), (p.return_lse, "lse"), (not p.aligned, unaligned)):
        words += [f"--{name}"] if given else []
    for name in ("bias", "mask"):
        if getattr(p, name):
            words.append(f"--{name}-by-key" if getattr(p, f"{name}_by_key") else f"--{name}")
    for name in ("total_q", "total_k"):
        if getattr(p, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(p, name))]
    for name in ("chunk", "page_size", "tokens", "num_splits", "rotary_dim"):
        if getattr(p, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(p, name))]
    words += ["--block-size", str(p.block_k)] if p.has_blocks else []
    for name, usual in usually.items():
        if getattr(p, name) != usual:
            words += [f"--{name.replace('_', '-')}", getattr(p, name)]
    if p.page_size and not p.pages_in_line and row.always_lengths and (p.page_layout == "phd" or p.heads_k == 1):
        words.append("--pages-apart")
    return words


def plan_line(what: Specialisation, target: Target, registry: Registry, also: tuple[str, ...] = ()) -> str:
    """Return a "plan:" probe, for `parse`, that states this specialisation, or ""; `also`: quirks that are off too.

    No option exists for later gradients, gradients of a bias, slopes or LSE, dropout, tensors over 2 GiB, a negative
    scale, a compile environment."""
    first, *rest = problem_words(what.problem)
    bare = " ".join([PREFIX, first, "--target", target.name, *rest])
    settings = Settings(backend=registry.backends[target.backend].core_path, quirks=",".join(f"-{q}" for q in also))
    try:
        if parse(bare).problem != what.problem or what.env:
            return ""
        for start in _starts(what, plan(what.problem, target, registry, settings=settings)):
            line = " ".join([bare, *(["--start", ",".join(start)] if start else [])])
            begun = with_start_values(registry, parse(line), target)
            made = plan(what.problem, target, begun, settings=settings)
            if _same(made, what):
                return line
    except PortattnError:
        return ""
    return ""


def _starts(what: Specialisation, made: Plan) -> list[list[str]]:
    wanted = what.values()
    wanted.pop("splits")  # follows from the problem, or is its num_splits
    every = [_written(name, value) for name, value in wanted.items()]
    if made.lowering is None or made.launch is None:
        return [every]
    planned = Specialisation(problem=what.problem, lowering=made.lowering, launch=made.launch).values()
    return [[], [_written(name, value) for name, value in wanted.items() if planned.get(name) != value], every]


def _written(name: str, value: object) -> str:
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def _same(made: Plan, what: Specialisation) -> bool:
    if made.lowering is None or made.launch is None:
        return False
    choices = CORES[what.problem.op].choices
    alike = all(getattr(made.lowering, name) == getattr(what.lowering, name) for name in choices)
    return alike and made.launch == what.launch and made.env == what.env


def compile_all(
    what: Specialisation, target: Target, registry: Registry, worker: Worker, seconds: float
) -> tuple[Reply, str]:
    """Compile every launch until one fails, also for code that does not fit the chip; return (reply, function)."""
    made = what.plan(target, registry)
    reply, function = Reply(outcome="ok"), ""
    for launch in what.launches(target, registry):
        reply, function = compile_in(worker, launch, made, target, seconds, "basic", again=False), launch.function
        if over := over_limit(reply, target) if reply.outcome == "ok" else "":
            reply = Reply(outcome="error", stage="load", kind="OutOfResources", message=over)
        if reply.outcome != "ok":
            break
    return reply, function
