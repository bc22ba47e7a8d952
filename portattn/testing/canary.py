"""Canaries: small adversarial calls of a kernel family, run once for each target and toolchain against the oracle.

A mismatch quarantines the family there. A child process runs them, since a kernel may crash the context or never end.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from portattn.compile import record_store
from portattn.compile.ensure_compiled import incident_of
from portattn.compile.record_store import CompileStore, store
from portattn.compile.variants import variant_of
from portattn.config import Settings, available_cores
from portattn.errors import PathUnavailable, PortattnError, warn_caller
from portattn.planning.core_path import canaries_wanted, kernel_source_digest
from portattn.planning.planner import plan, source_digest
from portattn.planning.registry import Registry
from portattn.schema.compile_record import CompileRecord, Incident
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import OPS, formats_of
from portattn.schema.quirk import Symptom
from portattn.schema.target import Target
from portattn.testing.executor import COMPARE, request_of
from portattn.testing.findings import numerics
from portattn.version import __version__
from portattn.worker.child import RUNS
from portattn.worker.client import Reply, Worker, death

if TYPE_CHECKING:
    import torch

    from portattn.schema.call import Call

# Child processes that run canaries of a family at the same time: compiling takes nearly all of their time, and each has
# some hundred MiB of the device for its context while it lasts. Four took 66 to 82 s for the 30 of gluon_forward.
MOST_AT_ONCE = 8
VERSION = 4  # of the set: a family is looked at again when it changes
# A device's words for what a kernel did, whose process goes on by an exception.
_KERNELS = re.compile(
    r"illegal (memory access|instruction|address)|misaligned|invalid (program counter|address space)"
    r"|hardware stack error|unspecified launch failure|device-side assert|memory access fault|aicore|vector core",
    re.IGNORECASE,
)

# Random calls add large scores, rows that attend nothing, and NaN where nothing is attended (random_calls.py).
CASES: Mapping[str, tuple[Problem, ...]] = {
    op: tuple(Problem(op=op, **fields) for fields in row.canaries)  # type: ignore[arg-type]
    for op, row in ROWS.items()
}
# What `portattn verify` runs beside them over quantised caches: each format, and every kind of scales.
STORED = {
    op: tuple((name, row.canary) for name, row in formats_of(op).items())
    for op in ("decode_attention", "paged_attention")
}


def check(made: Plan, target: Target, settings: Settings, device: torch.device) -> CompileRecord | None:
    """Return the CompileRecord that quarantines the plan's kernel family here, or None; run the canaries once."""
    if not canaries_wanted(target, settings, problem=made.problem):
        return None
    records = store(settings)
    key = key_of(family(made), target, stored_as(made))
    seconds = settings.compile_seconds
    found = records.get(key, seconds)
    if found is None:
        with records.lock(key, seconds * (len(cases(made)) + 1)):
            found = records.get(key, seconds) or run(made, target, settings, records, device)
    return None if found.passed else found


def known_failure(made: Plan, target: Target, settings: Settings) -> CompileRecord | None:
    """Return the record that quarantines the plan's kernel family here, or None, without running anything."""
    if not made.key or not canaries_wanted(target, settings, problem=made.problem):
        return None
    key = key_of(family(made), target, stored_as(made))
    found = store(settings).get(key, settings.compile_seconds)
    return found if found is not None and not found.passed else None


def family(made: Plan) -> str:
    return made.kernel or made.path


def cases(made: Plan) -> tuple[Problem, ...]:
    """Return the canary problems of a plan's family: a variant's own set, otherwise that of its op.

    They have the plan's cache format: a miscompiled dequantization of one format says nothing of the others."""
    variant, p = variant_of(made), made.problem
    found = (variant.canaries if variant else ()) or CASES[p.op]
    stored = tuple(problem for problem in found if problem.kv_format == p.kv_format)
    return stored or tuple(over(problem, p.kv_format, p.kv_scales) for problem in found)


def over(problem: Problem, kv_format: str, kv_scales: str) -> Problem:
    if kv_format == "as_q":
        return problem
    return msgspec.structs.replace(problem, kv_format=kv_format, kv_scales=kv_scales)


def of_op(op: str) -> tuple[Problem, ...]:
    stored = STORED.get(op, ())
    return (*CASES[op], *(over(p, *one) for p, one in zip(itertools.cycle(CASES[op]), stored, strict=False)))


def results(
    ops: Sequence[str], device: torch.device, run: Callable[[Call], tuple[torch.Tensor, torch.Tensor | None]]
) -> dict[str, torch.Tensor]:
    """Return out and LSE of the ops' canaries, with the bounds of their rows; `run` runs a call on a device.

    Dropout, gradients and products of 8-bit operands have no bound of their rows, and are left out."""
    from portattn.testing import tolerance

    found: dict[str, torch.Tensor] = {}
    for problem in (problem for op in ops or OPS for problem in of_op(op)):
        if problem.writes or problem.backward or problem.dropout or problem.magicpig or problem.q_format != "as_q":
            continue
        call = tolerance.random_call(problem, device=device.type)
        out, lse = run(call)
        for name, bound in tolerance.bounds_of_rows(call).items():
            if (result := out if name == "out" else lse) is not None:
                found |= {f"{problem} {name}": result.cpu().contiguous(), f"{problem} {name}.bound": bound}
    return found


def stored_as(made: Plan) -> str:
    """Return a quantized cache's format, scales and reading for a record's key: each has code of its own."""
    p = made.problem
    if p.kv_format == "as_q":
        return ""
    return f"{p.kv_format} scales {p.kv_scales}" + (", in words" if _in_words(made) else "")


def _in_words(made: Plan) -> bool:
    return made.lowering is not None and made.lowering.unpack != "bytes"


def _as_read(made: Plan, problem: Problem, target: Target, settings: Settings) -> tuple[Problem, Plan | None]:
    case = plan_case(problem, target, settings, made.path)
    # Rows that are not aligned are not read in words, nor is what new rows of float32 are stored as.
    for other in ({"aligned": False, "word_aligned": False}, {"dtype": made.problem.dtype}):
        if case is not None and _in_words(case) and not _in_words(made):
            problem = msgspec.structs.replace(problem, **other)
            case = plan_case(problem, target, settings, made.path)
    return problem, case if case is None or _in_words(case) == _in_words(made) else None


def key_of(kernel: str, target: Target, stored: str = "") -> str:
    found, backend = target.toolchain, Registry.load().backends[target.backend]
    variant = next((variant for variant in backend.variants if variant.name == kernel), None)
    source = source_digest(variant) if variant else kernel_source_digest()
    about = (kernel, target.name, str(found), found.components, *((stored,) if stored else ()))
    parts = ("canary", VERSION, __version__, source, *about)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def run(made: Plan, target: Target, settings: Settings, records: CompileStore, device: torch.device) -> CompileRecord:
    """Run the canaries of the plan's family on a device of this machine, and store the record.

    Inconclusive cases (no room on the device, a killed child) leave no record: the next process tries again. Until then
    a core still runs, since slower paths or none follow it; a variant does not."""
    worst, ran, kernel, silent = 0.0, 0, family(made), "the path takes none of them here"
    stored = stored_as(made)
    asked = _asked(made, target, settings)
    count = min(max(available_cores() // 2, 1), MOST_AT_ONCE, len(asked))
    # What says nothing is asked again, alone: several contexts may be more than the device has room for.
    for at_once in dict.fromkeys((count, 1)):
        unclear: list[tuple[Problem, Plan]] = []
        with contextlib.closing(_answers(asked, at_once, target, settings, device)) as answers:
            for problem, case, reply in answers:
                symptom, cause = judge_reply(reply, target, problem)
                if symptom:
                    incident = _incident(case, target, symptom, cause, reply)
                    kept = records.add_incident(incident)
                    return records.put(
                        _record(
                            kernel, target, stored, passed=False, level="declared", reason=incident.message,
                            incident=incident.id if kept else "",
                            **{"standing": "timeout", "limit": settings.compile_seconds} if symptom == "hang" else {},
                        )
                    )  # fmt: skip
                if cause:
                    silent = cause
                    unclear.append((problem, case))
                    if at_once == 1:
                        where = f" over a cache {stored}" if stored else ""
                        warn_caller(f"canary of {kernel}{where} on {target}: inconclusive: {cause}")
                    continue
                ran += 1
                worst = max(worst, float(reply.facts["error"]))
        asked = unclear
    if ran:
        passed = _record(kernel, target, stored, passed=True, level="runs", error=worst)
        records.put(passed)
    else:
        core = variant_of(made) is None
        reason = "" if core else f"no canary of it could say whether it is right here: {silent}"
        passed = _record(kernel, target, stored, passed=core, level="declared", reason=reason)
        records.remember(passed, passing=False)
    return passed


def _asked(made: Plan, target: Target, settings: Settings) -> list[tuple[Problem, Plan]]:
    found = (_as_read(made, problem, target, settings) for problem in cases(made))
    return [(problem, case) for problem, case in found if case is not None]


def _answers(
    asked: list[tuple[Problem, Plan]], count: int, target: Target, settings: Settings, device: torch.device
) -> Generator[tuple[Problem, Plan, Reply]]:
    """Yield each case's reply in order, `count` cases at a time; end the running ones when the caller stops."""
    if not asked:
        return
    free: SimpleQueue[Worker] = SimpleQueue()
    over = threading.Event()

    def ask(one: tuple[Problem, Plan]) -> Reply:
        problem, case = one
        worker = free.get()
        try:
            if over.is_set():  # a closed worker would start another child
                return Reply(outcome="crash", kind="closed")
            return worker.request(
                COMPARE, settings.compile_seconds, **request_of(case, problem, case.path, target.name, str(device))
            )
        finally:
            free.put(worker)

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix="canary"))
        for _ in range(count):  # closed before the pool, whose threads then end
            free.put(stack.enter_context(Worker(runs="kernels")))
        stack.callback(over.set)
        answers = deque(pool.submit(ask, one) for one in asked[:count])
        for place, one in enumerate(asked):
            yield (*one, answers.popleft().result())
            if place + count < len(asked):
                answers.append(pool.submit(ask, asked[place + count]))


def plan_case(problem: Problem, target: Target, settings: Settings, path: str) -> Plan | None:
    asked = msgspec.structs.replace(settings, backend=path, fallback="silent")
    try:
        return plan(problem, target, settings=asked)
    except PathUnavailable:
        return None
    except PortattnError as error:
        warn_caller(f"canary of {problem.op} on {target}: no plan: {error}")
        return None


def judge_reply(reply: Reply, target: Target, problem: Problem) -> tuple[Symptom | Literal[""], str]:
    """Return (symptom, cause) of a canary's reply: ("", "") if it passed, ("", cause) if it is inconclusive.

    Only a kernel's behaviour on the device rejects it: wrong numbers, a refused access or instruction, a signal while
    kernels ran, a hang. A failed compile is found by that specialisation's own first call."""
    seen = numerics(reply, str(target), problem)
    if seen.outcome == "pass":
        return "", ""
    if seen.outcome == "fail":
        return "wrong-result", seen.reason
    if record_store.machines(reply):
        return "", seen.reason
    if seen.outcome == "hang" and reply.stage == RUNS:
        return "hang", seen.reason
    if seen.outcome == "crash" and reply.stage == RUNS and death(reply) in record_store.LASTING_SIGNALS:
        return "compiler-crash", seen.reason
    # An illegal access ends the context, by an exception or with the process.
    if seen.outcome == "error" and _KERNELS.search(reply.message):
        return "wrong-result", seen.reason
    return "", seen.reason


def _record(kernel: str, target: Target, stored: str, **seen: Any) -> CompileRecord:
    return CompileRecord(
        key=key_of(kernel, target, stored),
        kernel=kernel,
        target=target.name,
        toolchain=str(target.toolchain),
        date=datetime.date.today(),
        **seen,
    )


def _incident(case: Plan, target: Target, symptom: Symptom, cause: str, reply: Reply) -> Incident:
    made = incident_of(
        case,
        target,
        f"canary-{family(case)}",
        key=case.key,
        kernel=family(case),
        symptom=symptom,
        stage=RUNS,
        message="",
        log=reply.log or reply.message or cause,
        command=f"portattn verify {case.problem.op} --target {target.name}",
    )
    hint = f"log it with `portattn quirks new --from-incident {made.id}`"
    return msgspec.structs.replace(made, message=f"canary {case.problem}: {cause}; {hint}")
