"""Making the cells: plan, compile in child processes, check, interpret, and run where there is a device."""

from __future__ import annotations

import contextvars
import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import msgspec

from portattn.compile.compile_check import compile_in, first_line
from portattn.compile.variants import variant_of
from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.launch import kernel_calls, meta_call
from portattn.planning.backend import Variant
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.target import Target
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import gates
from portattn.testing.executor import Executor, executors
from portattn.testing.findings import KernelFacts, Lint, Numerics
from portattn.testing.numerics import COMPARE, Interpreter, numerics, on_device, request_of
from portattn.tools.lab import LabError
from portattn.tools.lab import worker as lab_worker
from portattn.tools.matrix import variants
from portattn.tools.matrix.cells import RED, Cell, Footnote, PlanSummary, footnote
from portattn.tools.matrix.select import CellSpec
from portattn.worker.client import Reply, Worker


def summary(made: Plan, core: Plan | None) -> PlanSummary:
    """What a cell keeps of its plan."""
    rejected = tuple(msgspec.structs.replace(no, choice=None) for no in made.rejected)
    if core is None:
        return PlanSummary(
            path=made.path, core_taken=False, rejected=rejected, notes=made.notes, schedule=made.schedule
        )
    lowering, chosen = core.specialised
    launch = msgspec.structs.asdict(chosen)
    options = dict(launch.pop("options"))
    return PlanSummary(
        path=made.path,
        core_taken=core is made,
        kernel=core.kernel,
        form=core.form,
        lowering={name: getattr(lowering, name) for name in CORES[made.problem.op].choices},
        launch=launch | options,
        env=core.env,
        rejected=rejected,
        notes=core.notes,
        schedule=made.schedule,
    )


def footnotes(made: Plan, registry: Registry) -> tuple[Footnote, ...]:
    """The quirks that changed the plan or caution about it, and those that ruled a path out."""
    out = dict.fromkeys(no.quirk for no in made.rejected if no.quirk in registry.quirks)
    applied = {quirk.id: quirk for quirk in made.quirks}
    applied |= {quirk.id: quirk for no in made.rejected if no.choice for quirk in no.choice.quirks}
    changes = (
        footnote(quirk.id, "applied", registry, sentence=quirk.sentence, sets=quirk.sets, note=quirk.note)
        for quirk in applied.values()
        if quirk.id not in out
    )
    return (*changes, *(footnote(quirk, "rejected", registry) for quirk in out))


STATUS_OF_OUTCOME = {"error": "ERROR", "crash": "CRASH", "hang": "TIMEOUT"}
STATUS_OF_NUMERICS = {"fail": "FAIL", "error": "FAIL", "crash": "CRASH", "hang": "TIMEOUT"}
TAIL = 4000  # characters of a failed compile's output that a cell keeps
LOWERED = "lowers to {}; not run here"
PLANNED = "planned, not compiled"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How cells are made.

    seconds        time limit of each request to a child
    jobs           cells made at a time
    pythons        toolchain -> the interpreter that compiles with it; any other is the installed one, or the lab's
    here           targets that are devices of this machine
    left_out       names of executors (portattn/testing/executor.py) that are not asked
    registry       what cells are planned by; None: what comes with portattn and with installed packages
    """

    seconds: float = 120.0
    jobs: int = 2
    pythons: Mapping[str, str] = {}
    here: tuple[Target, ...] = ()
    left_out: tuple[str, ...] = ()
    registry: Registry | None = None


class Workers:
    """One thread's children, each started at its first request."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._open: dict[str, Worker] = {}
        self._closed = False

    def get(self, kind: str) -> Worker:
        """A child of this Python that runs kernels: under the `interpreter`, on a `device`, or for the executor of that
        name. Raises CancelledError once closed."""
        return self._opened(kind, lambda: Worker(runs="interpreter" if kind == "interpreter" else "kernels"))

    def compiler(self, toolchain: str) -> Worker:
        """The child that compiles with a toolchain: one at a time, each holds a compiler in memory.

        Raises CancelledError once closed, LabError where there is no environment of the toolchain.
        """
        for name in [name for name in self._open if "==" in name and name != toolchain]:
            self._open.pop(name).close()
        python = self.options.pythons.get(toolchain)
        return self._opened(toolchain, lambda: Worker(python=python) if python else lab_worker(toolchain))

    def _opened(self, name: str, make: Callable[[], Worker]) -> Worker:
        if self._closed:
            raise CancelledError("the run has ended")
        if name not in self._open:
            self._open[name] = make()
        return self._open[name]

    def close(self) -> None:
        """End the children; a request under way in this thread is answered as a crash."""
        self._closed = True
        for worker in list(self._open.values()):
            worker.close()


class Checkers(NamedTuple):
    """How the numbers of compiled kernels are looked at without the chip; shared by all threads of a run.

    executors  of each backend that the run has targets of, by name
    """

    interpreter: Interpreter
    executors: Mapping[str, Mapping[str, Executor]]

    @classmethod
    def of(cls, specs: Sequence[CellSpec], options: Options) -> Checkers:
        """Those that the cells of a run need."""
        backends = dict.fromkeys(spec.target.backend for spec in specs)
        own = {backend: executors(backend, options.seconds, options.here) for backend in backends}
        return cls(Interpreter(options.seconds), own)


def execute(specs: Sequence[CellSpec], options: Options, done: Callable[[Cell], None]) -> None:
    """Make every cell; `done` is called in this thread with each one as it is finished.

    Cells of one toolchain follow each other, whatever the order of the specs: a compiler is then loaded once.
    What a compiler does ends in its cell. KeyboardInterrupt, and whatever `done` raises, ends the run: children are
    killed, and cells under way are dropped.
    """
    checkers = Checkers.of(specs, options)
    local = threading.local()
    opened: list[Workers] = []

    def make(spec: CellSpec) -> Cell:
        if not hasattr(local, "workers"):
            local.workers = Workers(options)
            opened.append(local.workers)
        return make_cell(spec, options, local.workers, checkers)

    pool = ThreadPoolExecutor(options.jobs, thread_name_prefix="matrix")
    try:
        # A few at a time: an interrupt then finds little under way.
        toolchains = list(dict.fromkeys(str(spec.target.toolchain) for spec in specs))
        ordered = sorted(specs, key=lambda spec: toolchains.index(str(spec.target.toolchain)))
        waiting, running = list(reversed(ordered)), set[Future[Cell]]()
        while waiting or running:
            while waiting and len(running) < options.jobs:
                here = contextvars.copy_context()  # this thread's `settings(...)`: where the lab lies, for one
                running.add(pool.submit(here.run, make, waiting.pop()))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                done(future.result())
    finally:
        for workers in opened:
            workers.close()
        pool.shutdown(cancel_futures=True)
        for workers in opened:  # a thread can have started a child between the two
            workers.close()


def make_cell(spec: CellSpec, options: Options, workers: Workers, checkers: Checkers) -> Cell:
    """Make one cell. What goes wrong in planning or compiling is what the cell says."""
    begun = time.monotonic()
    registry = options.registry or Registry.load()
    fields, made, core = _planned(spec, registry)
    if made is not None:
        fields |= _look(made, core, spec.target, options, workers, checkers, registry)
        seen = (*fields.get("gates", ()), *fields.get("lints", ()))
        causes = dict.fromkeys(one.explained_by for one in seen if one.explained_by)
        explained = (footnote(quirk, "explains", registry) for quirk in causes)
        fields["footnotes"] = (*fields["footnotes"], *explained)
    return _cell(spec, begun, fields)


def planned_cell(spec: CellSpec, registry: Registry) -> Cell:
    """A cell that is planned alone: nothing is compiled, and it says so."""
    begun = time.monotonic()
    fields, made, _ = _planned(spec, registry)
    if made is not None:
        fields |= {"status": "NOT_RUN", "level": "declared", "reason": PLANNED}
    return _cell(spec, begun, fields)


def _planned(spec: CellSpec, registry: Registry) -> tuple[dict[str, Any], Plan | None, Plan | None]:
    """What planning says of a cell; the plan, and the core's beside it. Without a plan, the fields are all there is."""
    try:
        made = plan(spec.named.problem, spec.target, registry)
    except PortattnError as error:
        return _no_plan(error), None, None
    core = core_of(made, spec.target, registry)
    return {"plan": summary(made, core), "footnotes": footnotes(made, registry)}, made, core


def _no_plan(error: PortattnError) -> dict[str, Any]:
    return {"status": "ERROR", "level": "declared", "reason": f"no plan: {error}", "stage": "plan"}


def _cell(spec: CellSpec, begun: float, fields: dict[str, Any]) -> Cell:
    return Cell(
        id=spec.id,
        index=spec.index,
        name=spec.named.name,
        problem=spec.named.problem,
        target=spec.target.name,
        toolchain=str(spec.target.toolchain),
        seconds=round(time.monotonic() - begun, 3),
        date=datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0),
        **fields,
    )


def core_of(made: Plan, target: Target, registry: Registry, settings: Settings | None = None) -> Plan | None:
    """The plan of the core kernel to look at: the plan itself, or what was passed over only for being slow."""
    if made.lowering is not None:
        return made
    backend = registry.backends[target.backend]
    if any(variant.name == made.path for variant in backend.variants):
        asked = msgspec.structs.replace(settings or Settings(), backend=backend.core_path)
        try:
            return plan(made.problem, target, registry, settings=asked)
        except PortattnError:
            return None  # the core does not take what the variant does
    for no in made.rejected:
        quirk = registry.quirks.get(no.quirk)
        if no.choice is not None and quirk is not None and quirk.symptom == "slow":
            chosen = {name: getattr(no.choice, name) for name in no.choice.__struct_fields__}
            return msgspec.structs.replace(made, path=registry.backends[target.backend].core_path, **chosen)
    return None


def _look(
    made: Plan,
    core: Plan | None,
    target: Target,
    options: Options,
    workers: Workers,
    checkers: Checkers,
    registry: Registry,
) -> dict[str, Any]:
    """Status, level and what they rest on."""
    fields: dict[str, Any] = {"status": "PASS", "level": "declared"}
    variant = variant_of(made)
    if core is not None:
        fields |= _core(core, target, options, workers, checkers, registry)
    if variant is not None:
        fields = _beside(_variant(variant, made, target, options, workers), fields)
    elif core is not None and core is not made and fields["status"] != "NOT_RUN":
        # What the core kernel does here is worth knowing, and no evidence about the path that is taken.
        seen = fields["reason"] or f"{fields['level']}"
        seen += f" ({fields['label']})" if fields.get("label") else ""
        reason = f"the core kernel, not taken: {seen}"
        fields |= {"status": "NOTE", "level": "declared", "reason": reason, "label": ""}
    here = any(t.name == target.name and str(t.toolchain) == str(target.toolchain) for t in options.here)
    if here and fields["status"] in ("PASS", "NOTE"):
        fields |= _native(made, target, options, workers)
    return fields


def _beside(own: dict[str, Any], core: dict[str, Any]) -> dict[str, Any]:
    """A cell whose path is a variant: it says what the variant's kernels are, and is red where the core's are.

    The core runs wherever the variant does not, and its interpreted numbers are the only ones without the chip.
    """
    merged = core | own
    for name in ("kernels", "gates"):
        merged[name] = (*own.get(name, ()), *core.get(name, ()))
    if own["status"] not in RED and core["status"] in RED:
        merged |= {
            "status": core["status"],
            "level": "declared",
            "reason": f"the core kernel beside it: {core['reason']}",
        }
    return merged | {"label": ""}


def _variant(variant: Variant, made: Plan, target: Target, options: Options, workers: Workers) -> dict[str, Any]:
    """What a variant's kernels are: compiled where there is a compiler for them."""
    try:
        worker = workers.compiler(str(target.toolchain))
        kernels, failed, function = variants.compile_variant(variant, made, target, worker, options.seconds)
    except (LabError, variants.LaunchDescriptionError) as error:
        return {"status": "NOT_RUN", "level": "declared", "reason": f"not compiled here: {error}"}
    if failed is not None:
        return _failure(failed, function) | {"level": "declared", "kernels": kernels}
    return dict(variants.fields(kernels, variants.check(variant, made.problem, target, kernels)))


def _core(
    core: Plan,
    target: Target,
    options: Options,
    workers: Workers,
    checkers: Checkers,
    registry: Registry,
) -> dict[str, Any]:
    """What the core kernel does: compiled where there is a compiler for it, run by its backend's executors, and
    interpreted."""
    own = checkers.executors[target.backend].values()
    fields: dict[str, Any] = {"reason": "", "level": "declared"}
    fields |= _compiled(core, target, options, workers, registry, next((one for one in own if one.lowers_to), None))
    if fields["status"] in RED:
        return fields
    seen: dict[str, Numerics] = {}
    if fields["status"] != "NOT_RUN":
        for executor in own:
            if executor.name in options.left_out or (executor.runs_on == "device" and executor.lacks(target)):
                continue
            numbers = _executed(executor, core, target, workers)
            fields |= {executor.name: numbers, **_reached(executor, numbers, fields["status"])}
            word = numbers.where if executor.runs_on == "device" else executor.name
            seen[word] = numbers
    fields["interpreter"] = checkers.interpreter.check(core, workers.get("interpreter"))
    for word, numbers in {"interpreted": fields["interpreter"], **seen}.items():
        if numbers.outcome in STATUS_OF_NUMERICS:
            status = STATUS_OF_NUMERICS[numbers.outcome]
            reason = f"{word} numerics: {numbers.reason}"
            fields |= {"status": status, "level": "declared", "reason": reason, "label": ""}
    return fields


def _executed(executor: Executor, core: Plan, target: Target, workers: Workers) -> Numerics:
    compiler = workers.compiler(str(target.toolchain))
    kind = "interpreter" if executor.interprets else executor.name
    runner = workers.get("device" if executor.runs_on == "device" else kind)
    return executor.check(core, target, compiler, runner)


def _reached(executor: Executor, numbers: Numerics, status: str) -> dict[str, Any]:
    """What an executor's numbers make of a cell that compiled. Right ones do not take back what a gate said."""
    if numbers.outcome == "pass" and (executor.lowers_to or status == "PASS"):
        label = {"label": numbers.where} if executor.runs_on == "device" else {}
        return {"status": "PASS", "level": executor.level, "reason": "", **label}
    if numbers.outcome == "not_run" and executor.lowers_to:
        return {"reason": f"{LOWERED.format(executor.lowers_to)}: {numbers.reason}"}
    return {}


def _compiled(
    made: Plan, target: Target, options: Options, workers: Workers, registry: Registry, reader: Executor | None
) -> dict[str, Any]:
    """What was compiled, held to the gates; `reader` reads it where it is no machine code."""
    launches, _, _ = kernel_calls(made, meta_call(made.problem), target.arch.cores)
    try:
        worker = workers.compiler(str(target.toolchain))
    except LabError as error:
        return {"status": "NOT_RUN", "reason": f"not compiled here: {error}"}
    except ArgumentError:  # a compiler that the lab cannot install
        return {
            "status": "NOT_RUN",
            "reason": f"not compiled here: this Python has {installed_toolchain() or 'no Triton'}",
        }
    found: list[KernelFacts] = []
    lints: list[Lint] = []
    for launch in launches:
        reply = compile_in(worker, launch, made, target, options.seconds, reader.asks if reader else "full")
        if reply.outcome != "ok":
            return _failure(reply, launch.function) | {"kernels": tuple(found)}
        facts, fired = reader.analyze(reply, launch, target) if reader else (dict(reply.facts), [])
        found.append(KernelFacts(function=launch.function, facts=facts))
        lints += fired
    kernels = tuple(found)
    if reader is not None:
        seen = gates.explain_lints(lints, made, target, registry)
        red = "; ".join(str(lint) for lint in seen if lint.red)
        note = {"status": "NOTE", "reason": LOWERED.format(reader.lowers_to)}
        status = {"status": "FAIL", "reason": red} if red else note
        return status | {"kernels": kernels, "lints": seen}
    checked = gates.check(made, target, kernels, registry)
    unexplained = [gate for gate in checked if not gate.passed and not gate.explained_by]
    broken = [str(gate) for gate in unexplained if not gate.noted]
    if broken:
        return {"status": "FAIL", "reason": "; ".join(broken), "kernels": kernels, "gates": checked}
    noted = "; ".join(str(gate) for gate in unexplained)
    if noted:  # it compiles and fits; `compiles` also promises no spills
        return {"status": "NOTE", "reason": noted, "kernels": kernels, "gates": checked}
    return {"status": "PASS", "level": "compiles", "kernels": kernels, "gates": checked}


def _failure(reply: Reply, function: str) -> dict[str, Any]:
    return {
        "status": STATUS_OF_OUTCOME[reply.outcome],
        "reason": f"{function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}",
        "stage": reply.stage,
        "log": (reply.log or reply.message)[-TAIL:],
    }


def _native(made: Plan, target: Target, options: Options, workers: Workers) -> dict[str, Any]:
    """Run the plan's path on this machine's device; right numbers are level `runs`."""
    problem = on_device(made.problem, target.backend)
    device = Registry.load().backends[target.backend].device_type
    request = request_of(made, problem, made.path, target.name, device)
    reply = workers.get("device").request(COMPARE, options.seconds, **request)
    if reply.outcome != "ok":
        return _failure(reply, f"{made.path} path on {target.name}")
    seen: Numerics = numerics(reply, f"{target}", problem)
    if seen.outcome == "fail":
        return {"status": "FAIL", "reason": f"on {target.name}: {seen.reason}", "native": seen}
    return {"status": "PASS", "reason": "", "level": "runs", "native": seen}
