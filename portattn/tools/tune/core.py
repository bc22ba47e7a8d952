"""The core kernels as tunables: a candidate is planned as if its entry were the tuning file's."""

from __future__ import annotations

import datetime
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import msgspec

from portattn.compile.compile_check import code_key, compile_in, first_line, over_limit
from portattn.config import Settings
from portattn.errors import PathUnavailable
from portattn.launch import KernelCall, Signature, kernel_calls, launch_all, meta_call
from portattn.planning.kernel_specs import CORES, CoreKernel
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.call import Call
from portattn.schema.lowering import OF_ROWS
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.schema.tuning import Entry, Provenance, Tuning
from portattn.testing.executor import analyst
from portattn.tools.tune import space
from portattn.tools.tune.choice import Choice
from portattn.tools.tune.gradients import combine_sweeps, swept
from portattn.tools.tune.tunable import BuiltCandidate, CompileResult, Facts, NotBuilt, RunnableCandidate
from portattn.worker.client import Worker


class CoreTunable:
    """A kernel of portattn/kernels/ as one op uses it."""

    def __init__(self, kernel: CoreKernel) -> None:
        self.kernel, self.name = kernel, kernel.name
        self.ops: tuple[str, ...] = (kernel.op,)

    def space(self, problem: Problem, target: Target, base: Choice) -> Iterator[Choice]:
        found = space.candidates(self.name, self.kernel.choices, problem, target, base)
        return (choice for choice in found if not space.left_out(choice, problem, target))

    def today(self, problem: Problem, target: Target) -> Choice | None:
        return None

    def build(self, problem: Problem, choice: Choice, target: Target) -> BuiltCandidate:
        made = plan_choice(self.name, problem, choice, target)
        launches, _, _ = kernel_calls(made, meta_call(problem), target.arch.cores)
        code = code_key(made, launches)
        # The split over keys is no part of the code, and so not of its key.
        told = f"{code} {made.specialised[1].splits} {[launch.grid for launch in launches]}"

        def start(call: Call) -> RunnableCandidate:
            calls, out, _ = kernel_calls(made, call, target.arch.cores)
            return RunnableCandidate(lambda: launch_all(calls, made, call.q), out)

        def compile_it(worker: Worker, seconds: float) -> CompileResult:
            return compile_plan(made, launches, target, worker, seconds)

        return BuiltCandidate(hashlib.sha256(told.encode()).hexdigest()[:32], start, code, compile_it)


class CoreBackwardTunable(CoreTunable):
    """The gradients' kernels: those of keys and of rows are swept one after the other, and the best are joined."""

    def space(self, problem: Problem, target: Target, base: Choice) -> Iterator[Choice]:
        whole, names = swept(base), tuple(OF_ROWS.values())
        found = space.candidates(self.name, self.kernel.choices, problem, target, whole, without=names)
        rows = space.candidates(self.name, self.kernel.choices, problem, target, whole, among=names)
        for choice in itertools.chain.from_iterable(itertools.zip_longest(found, rows)):
            if choice is not None and not space.left_out(choice, problem, target):
                yield choice

    def joined(self, base: Choice, ranked: Sequence[Choice]) -> Iterator[Choice]:
        """The best of both sweeps together."""
        return combine_sweeps(base, ranked)


def core_tunable(kernel: CoreKernel) -> CoreTunable:
    return CoreBackwardTunable(kernel) if kernel.of_rows else CoreTunable(kernel)


def plan_choice(kernel: str, problem: Problem, choice: Choice, target: Target) -> Plan:
    """The core plan that this choice as a tuning entry would give, quirks and limits applied. Raises NotBuilt."""
    registry = Registry.load()
    entry = Entry(
        kernel=kernel,
        launch=choice.launch,
        lowering=choice.lowering,
        occupancy=choice.occupancy,
        split_threshold=choice.split_threshold,
    )
    source = Provenance(chip="", toolchain=str(target.toolchain), date=datetime.date.min, measured=False)
    only = Tuning(provenance=source, entry=(entry,))
    name = target.arch.tuning or target.arch.name
    own = msgspec.structs.replace(registry, tunings={target.backend: {name: only}})
    settings = Settings(backend=registry.backends[target.backend].core_path)
    try:
        return plan(problem, target, own, settings=settings)
    except PathUnavailable as error:
        raise NotBuilt(error.rejected[0].reason if error.rejected else first_line(str(error))) from None


def compile_plan(
    made: Plan,
    launches: Sequence[KernelCall | Signature],
    target: Target,
    worker: Worker,
    seconds: float,
    working: tuple[str, ...] = (),
) -> CompileResult:
    """Compile every launch of a plan, the core's or a variant's, in a child. The facts are those of the launch that
    does the work: the first, and of gradients the most that either kernel with products has.

    The facts describe the main launch: the first, or for gradients the maxima over the kernels with products.

    working  a variant's kernels with products, if its first launch has no product
    """
    kernel = CORES[made.problem.op]
    if kernel.of_rows and made.kernel == kernel.name:
        working = kernel.functions
    found: Facts | None = None
    reader = analyst(target)
    for launch in launches:
        reply = compile_in(worker, launch, made, target, seconds, reader.asks if reader else "full")
        if reply.outcome != "ok":
            return CompileResult(
                f"{launch.function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}", found
            )
        facts: Facts = dict(reply.facts)
        if reader is not None and isinstance(launch, KernelCall):
            facts, lints = reader.analyze(reply, launch, target)
            red = "; ".join(str(lint) for lint in lints if lint.red)
            if red:
                return CompileResult(red, facts)
        if working:
            found = _most(found, facts) if launch.function in working else found
        else:
            found = facts if found is None else found
        over = over_limit(reply, target)
        if over:
            return CompileResult(over, found)
    return CompileResult("", found)


def _most(one: Facts | None, other: Facts) -> Facts:
    """Return the larger of every number of two kernels that are launched one after the other."""
    found: Facts = dict(other)
    for name, value in (one or {}).items():
        there = found.get(name)
        found[name] = max(value, there) if isinstance(value, int) and isinstance(there, int) else value
    return found
