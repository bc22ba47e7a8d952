"""Make cells: plan, compile in child processes, check, interpret, and run if there is a device."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from portattn.compile.ensure_compiled import compile_in, first_line
from portattn.compile.variants import variant_of
from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.launch import kernel_calls, meta_call
from portattn.planning.backend import Variant
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import bundle, findings, kernel_cases
from portattn.testing.executor import COMPARE, Executor, Interpreter, executors, on_device, request_of
from portattn.testing.findings import KernelFacts, Lint, Numerics, numerics
from portattn.testing.kernel_cases import KernelCase, NamedKernel
from portattn.tools.lab import LabError
from portattn.tools.lab import worker as lab_worker
from portattn.tools.matrix.cells import RED, Cell, Footnote, PlanSummary, footnote
from portattn.tools.matrix.problems import NamedProblem
from portattn.tools.matrix.select import CellSpec
from portattn.worker.client import Reply, Worker


def summary(made: Plan, core: Plan | None) -> PlanSummary:
    rejected = tuple(msgspec.structs.replace(no, choice=None) for no in made.rejected)
    fields: dict[str, Any] = {"path": made.path, "rejected": rejected, "schedule": made.schedule}
    if core is None:
        return PlanSummary(core_taken=False, notes=made.notes, **fields)
    lowering, chosen = core.specialised
    launch = msgspec.structs.asdict(chosen)
    options = dict(launch.pop("options"))
    return PlanSummary(
        core_taken=core is made, kernel=core.kernel, form=core.form, env=core.env, notes=core.notes,
        lowering={name: getattr(lowering, name) for name in CORES[made.problem.op].choices}, launch=launch | options,
        **fields,
    )  # fmt: skip


def footnotes(made: Plan, registry: Registry) -> tuple[Footnote, ...]:
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
    seconds: float = 120.0  # time limit of each request to a child
    jobs: int = 2  # cells made at a time
    # toolchain -> the interpreter that compiles with it; any other is the installed one, or the lab's
    pythons: Mapping[str, str] = {}
    here: tuple[Target, ...] = ()  # targets that are devices of this machine
    left_out: tuple[str, ...] = ()  # names of skipped executors (portattn/testing/executor.py)
    registry: Registry | None = None  # plans the cells; None: portattn's and installed packages'
    timed: bool = False  # cells of this machine's devices are also timed, and then `measured`


class Workers:
    def __init__(self, options: Options) -> None:
        self.options = options
        self._open: dict[str, Worker] = {}
        self._closed = False

    def get(self, kind: str) -> Worker:
        """Return a child for kernels, `interpreter`, `device` or an executor. Raises CancelledError if closed."""
        return self._opened(kind, lambda: Worker(runs="interpreter" if kind == "interpreter" else "kernels"))

    def compiler(self, toolchain: str) -> Worker:
        """Return the toolchain's child, one at a time as it holds a compiler. Raises CancelledError or LabError."""
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
    """Checkers of compiled kernels' numbers without the chip, shared by all threads; executors by backend and name."""

    interpreter: Interpreter
    executors: Mapping[str, Mapping[str, Executor]]

    @classmethod
    def of(cls, specs: Sequence[CellSpec], options: Options) -> Checkers:
        backends = dict.fromkeys(spec.target.backend for spec in specs)
        own = {backend: executors(backend, options.seconds, options.here) for backend in backends}
        return cls(Interpreter(options.seconds), own)


def execute(specs: Sequence[CellSpec], options: Options, done: Callable[[Cell], None]) -> None:
    """Make every cell, a toolchain's in turn, so that a compiler is loaded once; `done` is called in this thread.

    KeyboardInterrupt, and any error of `done`, ends the run: children are killed, and unfinished cells are dropped."""
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


def export(
    cells: Sequence[Cell], options: Options, step: Callable[[str], None]
) -> tuple[tuple[bundle.BundleCell, ...], dict[str, bytes], dict[str, str], Path | None]:
    """Compile core kernels of cells for a bundle: return its cells, files, other cells' reasons, and the runner."""
    registry, workers = options.registry or Registry.load(), Workers(options)
    found, files, left_out, runner = list[bundle.BundleCell](), dict[str, bytes](), dict[str, str](), None

    def made_of(cell: Cell, executor: Executor | None) -> tuple[bundle.BundleCell, dict[str, bytes]] | str:
        if executor is None or cell.status not in ("PASS", "NOTE"):
            return f"its status is {cell.status}" if executor else f"no program runs launches on {cell.backend}"
        if cell.problem is None:
            return "it is another package's kernel"
        target = registry.target(cell.target, cell.toolchain)
        core = core_of(plan(cell.problem, target, registry), target, registry)
        if core is None:
            return "its path launches no core kernel"
        return bundle.export(executor, core, target, workers.compiler(cell.toolchain), cell.id)

    with contextlib.closing(workers):
        for cell in cells:
            own = executors(cell.backend, options.seconds).values()
            executor = next((one for one in own if one.runner), None)
            made = made_of(cell, executor)
            if isinstance(made, str):
                left_out[cell.id] = made
            elif executor is not None:
                found, files, runner = [*found, made[0]], files | made[1], executor.runner
            step(f"{'left out' if isinstance(made, str) else 'exported'}  {'  '.join(cell.place)}")
    return tuple(found), files, left_out, runner


def make_cell(spec: CellSpec, options: Options, workers: Workers, checkers: Checkers) -> Cell:
    begun = time.monotonic()
    registry = options.registry or Registry.load()
    if isinstance(spec.named, NamedKernel):
        case = spec.named.problem.on_target(spec.target.name, spec.target.arch)
        named = msgspec.structs.replace(spec.named, problem=case)
        kernel = _KernelMaker(spec.target, options, workers, checkers, registry, named)
        return _cell(spec, begun, kernel.look())
    fields, made, core = _planned(spec, registry)
    if made is not None:
        fields |= _Maker(spec.target, options, workers, checkers, registry, made, core).look()
        seen = (*fields.get("gates", ()), *fields.get("lints", ()))
        causes = dict.fromkeys(one.explained_by for one in seen if one.explained_by)
        explained = (footnote(quirk, "explains", registry) for quirk in causes)
        fields["footnotes"] = (*fields["footnotes"], *explained)
    return _cell(spec, begun, fields)


def planned_cell(spec: CellSpec, registry: Registry) -> Cell:
    begun = time.monotonic()
    fields, made, _ = _planned(spec, registry)
    if made is not None:
        fields |= {"status": "NOT_RUN", "level": "declared", "reason": PLANNED}
    return _cell(spec, begun, fields)


def _planned(spec: CellSpec, registry: Registry) -> tuple[dict[str, Any], Plan | None, Plan | None]:
    assert isinstance(spec.named, NamedProblem), "kernels have no plan"
    try:
        made = plan(spec.named.problem, spec.target, registry)
    except PortattnError as error:
        return {"status": "ERROR", "level": "declared", "reason": f"no plan: {error}", "stage": "plan"}, None, None
    core = core_of(made, spec.target, registry)
    return {"plan": summary(made, core), "footnotes": footnotes(made, registry)}, made, core


def _cell(spec: CellSpec, begun: float, fields: dict[str, Any]) -> Cell:
    now, subject = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0), spec.named.problem
    return Cell(
        id=spec.id, index=spec.index, name=spec.named.name, target=spec.target.name,
        **{"case" if isinstance(subject, KernelCase) else "problem": subject},  # type: ignore[arg-type]
        toolchain=str(spec.target.toolchain), seconds=round(time.monotonic() - begun, 3), date=now, **fields,
    )  # fmt: skip


def core_of(made: Plan, target: Target, registry: Registry, settings: Settings | None = None) -> Plan | None:
    """Return the core kernel's plan: the plan itself, or the core that was rejected only for being slow."""
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


class _Means(msgspec.Struct, frozen=True):
    """The means to look at a cell; methods of subclasses return fields of the cell."""

    target: Target
    options: Options
    workers: Workers
    checkers: Checkers
    registry: Registry


class _Maker(_Means, frozen=True):
    """A planned cell."""

    made: Plan
    core: Plan | None

    def look(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"status": "PASS", "level": "declared"}
        variant = variant_of(self.made)
        if self.core is not None:
            fields |= self.look_at_core(self.core)
        if variant is not None:
            fields = _beside(self.compile_variant(variant), fields)
        elif self.core is not None and self.core is not self.made and fields["status"] != "NOT_RUN":
            # What the core kernel does here is worth knowing, and no evidence about the path that is taken.
            seen = (fields["reason"] or fields["level"]) + (f" ({fields['label']})" if fields.get("label") else "")
            reason = f"the core kernel, not taken: {seen}"
            fields |= {"status": "NOTE", "level": "declared", "reason": reason, "label": ""}
        toolchain = str(self.target.toolchain)
        here = any(t.name == self.target.name and str(t.toolchain) == toolchain for t in self.options.here)
        if here and fields["status"] in ("PASS", "NOTE"):
            fields |= self.run_natively()
        return fields

    def compiler(self) -> Worker:
        return self.workers.compiler(str(self.target.toolchain))

    def compile_variant(self, variant: Variant) -> dict[str, Any]:
        try:
            kernels, failed, function = findings.compile_variant(
                variant, self.made, self.target, self.compiler(), self.options.seconds
            )
        except (LabError, findings.LaunchDescriptionError) as error:
            return {"status": "NOT_RUN", "level": "declared", "reason": f"not compiled here: {error}"}
        if failed is not None:
            return _failure(failed, function) | {"level": "declared", "kernels": kernels}
        gates = findings.check_variant(variant, self.made.problem, self.target, kernels)
        return findings.gate_fields(kernels, gates)

    def look_at_core(self, core: Plan) -> dict[str, Any]:
        own = self.checkers.executors[self.target.backend].values()
        fields: dict[str, Any] = {"reason": "", "level": "declared"}
        fields |= self.compile_core(core, next((one for one in own if one.lowers_to), None))
        if fields["status"] in RED:
            return fields
        seen: dict[str, Numerics] = {}
        for executor in own if fields["status"] != "NOT_RUN" else ():
            on_device = executor.runs_on == "device"
            if executor.name in self.options.left_out or (on_device and executor.lacks(self.target)):
                continue
            runner = self.workers.get(
                "device" if on_device else "interpreter" if executor.interprets else executor.name
            )
            numbers = executor.check(core, self.target, self.compiler(), runner)
            fields |= {executor.name: numbers, **_reached(executor, numbers, fields["status"])}
            seen[numbers.where if on_device else executor.name] = numbers
        fields["interpreter"] = self.checkers.interpreter.check(core, self.workers.get("interpreter"))
        for word, numbers in {"interpreted": fields["interpreter"], **seen}.items():
            if status := STATUS_OF_NUMERICS.get(numbers.outcome):
                reason = f"{word} numerics: {numbers.reason}"
                fields |= {"status": status, "level": "declared", "reason": reason, "label": ""}
        return fields

    def compile_core(self, core: Plan, reader: Executor | None) -> dict[str, Any]:
        target = self.target
        launches, _, _ = kernel_calls(core, meta_call(core.problem), target.arch.cores)
        worker = _compiler(self.workers, target)
        if isinstance(worker, str):
            return {"status": "NOT_RUN", "reason": worker}
        found: list[KernelFacts] = []
        lints: list[Lint] = []
        for launch in launches:
            reply = compile_in(worker, launch, core, target, self.options.seconds, reader.asks if reader else "full")
            if reply.outcome != "ok":
                return _failure(reply, launch.function) | {"kernels": tuple(found)}
            facts, fired = reader.analyze(reply, launch, target) if reader else (dict(reply.facts), [])
            found.append(KernelFacts(function=launch.function, facts=facts))
            lints += fired
        kernels = tuple(found)
        if reader is None:
            return findings.gate_fields(kernels, findings.check_gates(core, target, kernels, self.registry))
        explained = findings.explain_lints(lints, core, target, self.registry)
        red = "; ".join(str(lint) for lint in explained if lint.red)
        seen = {"kernels": kernels, "lints": explained}
        return {"status": "FAIL" if red else "NOTE", "reason": red or LOWERED.format(reader.lowers_to), **seen}

    def run_natively(self) -> dict[str, Any]:
        made, name = self.made, self.target.name
        problem = on_device(made.problem, self.target.backend)
        device = Registry.load().backends[self.target.backend].device_type
        request = request_of(made, problem, made.path, name, device)
        request["timed"] = self.options.timed
        reply = self.workers.get("device").request(COMPARE, self.options.seconds, **request)
        if reply.outcome != "ok":
            return _failure(reply, f"{made.path} path on {name}")
        seen: Numerics = numerics(reply, f"{self.target}", problem)
        if seen.outcome == "fail":
            return {"status": "FAIL", "reason": f"on {name}: {seen.reason}", "native": seen}
        level = "runs" if seen.microseconds is None else "measured"
        return {"status": "PASS", "reason": "", "level": level, "native": seen}


class _KernelMaker(_Means, frozen=True):
    """A cell of another package's kernel."""

    named: NamedKernel

    def look(self) -> dict[str, Any]:
        quirks = kernel_cases.quirks_of(self.named.problem, self.target, self.registry)
        fields = {"level": "declared"} | self.compile([quirk for quirk in quirks if quirk.changes_foreign])
        notes = [footnote(quirk.id, "applied", self.registry, sets=quirk.effect.sets)
                 for quirk in quirks if quirk.changes_foreign]  # fmt: skip
        if fields["status"] in RED:
            said = f"{fields['reason']}\n{fields.get('log', '')}"
            notes += [footnote(quirk.id, "explains", self.registry)
                      for quirk in quirks if quirk.explains(said)]  # fmt: skip
        return fields | {"footnotes": tuple(notes)}

    def compile(self, quirks: Sequence[Quirk]) -> dict[str, Any]:
        worker, case, target = _compiler(self.workers, self.target), self.named.problem, self.target
        if isinstance(worker, str):
            return {"status": "NOT_RUN", "reason": worker}
        reply = kernel_cases.compile_case(self.named, target, worker, self.options.seconds, quirks)
        if reply.outcome != "ok":
            return _failure(reply, case.kernel)
        executor = next((e for e in self.checkers.executors[target.backend].values() if e.code_task), None)
        figures = {name: value for name, value in reply.facts.items() if name not in kernel_cases.TEXTS}
        kernel = KernelFacts(function=case.kernel, facts=figures)
        if executor is None or not executor.lowers_to:
            fields = findings.gate_fields((kernel,), kernel_cases.gates(case, kernel, target))
        else:
            fields = {"status": "NOTE", "reason": LOWERED.format(executor.lowers_to), "kernels": (kernel,)}
        return fields if fields["status"] in RED else self.run(fields, executor, reply)

    def run(self, fields: dict[str, Any], executor: Executor | None, reply: Reply) -> dict[str, Any]:
        runner, seconds = self.workers.get("interpreter"), self.options.seconds
        where = f"interpreter, {installed_toolchain()}"
        if missing := self.checkers.interpreter.missing:
            seen = {"interpreter": Numerics(outcome="not_run", where=where, reason=missing)}
        else:
            where += "" if self.named.problem.reference else ": itself the reference"
            seen = {"interpreter": kernel_cases.numbers_of(self.named, None, runner, seconds, where)}
        if executor is not None and executor.name not in self.options.left_out:
            where, lacks = executor.where(self.target), executor.lacks(self.target)
            if seen["interpreter"].outcome == "not_run" and not self.named.problem.reference:
                lacks = lacks or f"no reference: {seen['interpreter'].reason}"
            numbers = Numerics(outcome="not_run", where=where, reason=lacks)
            if not lacks:
                numbers = kernel_cases.numbers_of(self.named, self.target, runner, seconds, where, reply)
            seen[executor.name] = numbers
            fields |= _reached(executor, numbers, fields["status"])
        for word, numbers in seen.items():
            if status := STATUS_OF_NUMERICS.get(numbers.outcome):
                fields |= {"status": status, "level": "declared", "reason": f"{word} numerics: {numbers.reason}"}
        return fields | seen


def _compiler(workers: Workers, target: Target) -> Worker | str:
    """Return the child that compiles for a target, or the reason for its absence."""
    try:
        return workers.compiler(str(target.toolchain))
    except LabError as error:
        return f"not compiled here: {error}"
    except ArgumentError:  # a compiler that the lab cannot install
        return f"not compiled here: this Python has {installed_toolchain() or 'no Triton'}"


def _beside(own: dict[str, Any], core: dict[str, Any]) -> dict[str, Any]:
    """Merge a variant's fields with the core's: red if the core is, which runs wherever the variant does not."""
    merged = core | own | {"label": ""}
    merged |= {name: (*own.get(name, ()), *core.get(name, ())) for name in ("kernels", "gates")}
    if own["status"] not in RED and core["status"] in RED:
        reason = f"the core kernel beside it: {core['reason']}"
        merged |= {"status": core["status"], "level": "declared", "reason": reason}
    return merged


def _reached(executor: Executor, numbers: Numerics, status: str) -> dict[str, Any]:
    """Return the effect of an executor's numbers on a compiled cell; right numbers do not override a gate."""
    if numbers.outcome == "pass" and (executor.lowers_to or status == "PASS"):
        label = {"label": numbers.where} if executor.runs_on == "device" else {}
        return {"status": "PASS", "level": executor.level, "reason": "", **label}
    if numbers.outcome == "not_run" and executor.lowers_to:
        return {"reason": f"{LOWERED.format(executor.lowers_to)}: {numbers.reason}"}
    return {}


def _failure(reply: Reply, function: str) -> dict[str, Any]:
    return {
        "status": STATUS_OF_OUTCOME[reply.outcome],
        "reason": f"{function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}",
        "stage": reply.stage,
        "log": (reply.log or reply.message)[-TAIL:],
    }
