"""Check that a plan's kernels compile here before a launch: in a child process unless a record says so.

A compiler's error, crash or hang becomes an Incident and a negative CompileRecord; the caller's process lives on.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any

import msgspec
import torch

from portattn.compile import record_store
from portattn.compile.record_store import CompileStore, store
from portattn.config import Settings
from portattn.kernels.score_program import with_functions
from portattn.launch import KernelCall, Signature, has_rows, load_kernels, preload, signature
from portattn.launch.run import device_guard
from portattn.planning.registry import Registry
from portattn.schema.compile_record import CompileRecord, Incident
from portattn.schema.plan import Plan
from portattn.schema.quirk import Symptom
from portattn.schema.target import Target
from portattn.worker.client import PROTOCOL, SERVE, Reply, Worker, compile_environment, death, is_crash

_ready: set[tuple[str, str]] = set()  # keys of code, and devices that it is loaded on
_worker: Worker | None = None
_started_in: weakref.WeakKeyDictionary[Worker, Hashable] = weakref.WeakKeyDictionary()
_worker_lock = threading.Lock()
_own_worker: ContextVar[Worker | None] = ContextVar("portattn_own_worker", default=None)

# A core launch, or any launch as a compiler sees it.
Compiled = KernelCall | Signature


def signature_of(launch: Compiled) -> Signature:
    return launch if isinstance(launch, Signature) else signature(launch)


def code_key(plan: Plan, launches: Sequence[Compiled]) -> str:
    """Return a record's key, of the plan's key and every launch's signature (types, divisibility, constants)."""
    signatures = msgspec.json.encode([signature_of(launch) for launch in launches], order="deterministic")
    return hashlib.sha256(plan.key.encode() + signatures).hexdigest()[:32]


def known_failure(plan: Plan, launches: Sequence[Compiled], settings: Settings) -> CompileRecord | None:
    """Return this machine's negative record on these launches, or None."""
    seen = store(settings).get(code_key(plan, launches), settings.compile_seconds)
    return seen if seen is not None and not seen.passed else None


def ensure(
    plan: Plan, launches: list[KernelCall], q: torch.Tensor, target: Target, settings: Settings
) -> CompileRecord | None:
    """Return None if a core plan's launches compile for this target and fit it, else the negative record."""

    def load(launch: Compiled) -> None:
        assert isinstance(launch, KernelCall)
        kernel = getattr(load_kernels(launch.module, interpreted=False), launch.function)
        constants = with_functions(launch.constexprs)
        compiled = kernel.warmup(*launch.arguments.values(), grid=launch.grid, **constants, **launch.options())
        preload.load(compiled, settings.cache_dir)

    return ensure_all(plan, launches, load, q, target, settings) if has_rows(plan) else None


def ensure_all(
    plan: Plan,
    launches: Sequence[Compiled],
    load: Callable[[Compiled], None],
    q: torch.Tensor,
    target: Target,
    settings: Settings,
) -> CompileRecord | None:
    """Return None if the launches compile for this target and fit it, else the negative record.

    `load` compiles a launch in this process and loads it on q's device. Launches that this process or a valid record
    (record_store.py) has seen are not compiled again. With isolate="never" the first compile runs in this process, so
    a crash of the compiler ends it. Errors of memory and the device pass through."""
    key = code_key(plan, launches)
    ready = (key, str(q.device))
    if ready in _ready:
        return None
    records, seconds = store(settings), settings.compile_seconds
    always = settings.isolate == "always"
    if settings.isolate != "never" and (always or records.get(key, seconds) is None):
        with records.lock(key, _longest(launches, settings)):
            # Another process may have tried it while this one waited for the lock.
            tried = None if always else records.get(key, seconds)
            failed = _in_child(key, plan, launches, target, settings, records) if tried is None else None
        if failed is not None:
            return failed
    # The record may be another process's: a compile that failed there must not run in this one.
    seen = records.get(key, seconds)
    if seen is not None and not seen.passed:
        return seen
    failed = _in_this_process(key, plan, launches, load, q, target, records)
    if failed is None:
        _ready.add(ready)
    return failed


def _longest(launches: Sequence[Compiled], settings: Settings) -> float:
    """Return the seconds that another process may take over these launches: each may be asked for twice."""
    return settings.compile_seconds * (2 * len(launches) + 1)


def unseen(plan: Plan, launches: Sequence[Compiled], settings: Settings) -> bool:
    """Return whether the first call with these launches would compile them in a child process."""
    key = code_key(plan, launches)
    loaded = any(key == other for other, _ in _ready)
    return settings.isolate != "never" and not loaded and store(settings).get(key, settings.compile_seconds) is None


def ahead(plan: Plan, launches: Sequence[Compiled], target: Target, settings: Settings, worker: Worker) -> None:
    """Compile launches in this worker, like `ensure_all` in its child process, and keep any record."""
    key, records = code_key(plan, launches), store(settings)
    token = _own_worker.set(worker)
    try:
        with records.lock(key, _longest(launches, settings)):
            if records.get(key, settings.compile_seconds) is None:
                _in_child(key, plan, launches, target, settings, records)
    finally:
        _own_worker.reset(token)


def new_worker() -> Worker:
    """Return a worker with the very Triton that this process would import, however it came to be on the path."""
    return Worker(environment={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}, ahead=True)


def expect(settings: Settings) -> None:
    """Start the child process of the first compile early: it imports its compiler while launches are described.

    Only if nothing was ever compiled here. Elsewhere an unneeded child would cost more than is gained."""
    if settings.isolate != "never" and _worker is None and store(settings).empty():
        _shared_worker().start()


def compile_in(
    worker: Worker,
    launch: Compiled,
    plan: Plan,
    target: Target,
    seconds: float,
    facts: str,
    again: bool = True,
) -> Reply:
    """Compile one launch for a target in a worker; `facts` is "basic" or "full" (registers, spills, instructions).

    With `again`, a compiler that dies is retried once, for `seconds` again: some die now and then
    (ascend-0109-adapter-dies), and a record would keep it. The facts then count `deaths`, or the log begins with the
    first."""
    fields = compile_fields(launch, plan, target)

    def ask() -> Reply:
        return worker.request("compile", seconds, **fields, facts=facts)

    return _twice(ask) if again else ask()


def compile_fields(launch: Compiled, plan: Plan, target: Target) -> dict[str, Any]:
    """Return the fields of a request to compile a launch for a target (protocol: worker/serve.py)."""
    backend = Registry.load().backends[target.backend]
    fields = {
        "signature": msgspec.to_builtins(signature_of(launch)),
        "target": list(backend.triton_target(target.arch)),
        "env": plan.env,
    }
    adapter = backend.compile_adapter()
    return fields | ({"adapter": adapter} if adapter else {})


def _twice(ask: Callable[[], Reply]) -> Reply:
    """Return the reply, or a second one if a compiler died over the first."""
    first = ask()
    if not is_crash(first):
        return first
    second = ask()
    if second.outcome == "ok":
        return msgspec.structs.replace(second, facts={**second.facts, "deaths": 1})
    before = f"the first time: {death(first)} at {first.stage}: {first_line(first.message)}"
    return msgspec.structs.replace(second, log=f"{before}\n{second.log or second.message}")


def over_limit(reply: Reply, target: Target) -> str:
    """Return why compiled code does not fit the chip, or an empty string."""
    used = int(reply.facts.get("scratchpad_bytes", 0))
    if used > target.arch.scratchpad_bytes:
        kind = target.arch.scratchpad_kind
        return f"out of resource: {kind}, required {used} bytes, {target.arch.name} has {target.arch.scratchpad_bytes}"
    return ""


def _in_child(
    key: str, plan: Plan, launches: Sequence[Compiled], target: Target, settings: Settings, records: CompileStore
) -> CompileRecord | None:
    facts: dict[str, int | str] = {}
    named = [(one.module, one.function) for one in launches]
    with preload.meanwhile(target.backend, settings.cache_dir, named):
        for launch in launches:
            reply = compile_in(_shared_worker(), launch, plan, target, settings.compile_seconds, "basic")
            problem = over_limit(reply, target) if reply.outcome == "ok" else ""
            if problem:
                reply = Reply(outcome="error", stage="load", kind="OutOfResources", message=problem)
            if reply.outcome != "ok":
                return _record_failure(key, reply, launch, plan, target, records, settings.compile_seconds)
            facts |= {k: v for k, v in reply.facts.items() if not isinstance(v, float)}
    records.put(_record(key, plan, passed=True, facts=facts))
    return None


def _in_this_process(
    key: str,
    plan: Plan,
    launches: Sequence[Compiled],
    load: Callable[[Compiled], None],
    q: torch.Tensor,
    target: Target,
    records: CompileStore,
) -> CompileRecord | None:
    """Load the launches, from a child's entries in Triton's cache; for Ascend a child only lowers: compile here."""
    for launch in launches:
        with device_guard(q), compile_environment(plan.env):
            reply = _twice(functools.partial(_loaded, load, launch))
        if reply.outcome != "ok":
            return _record_failure(key, reply, launch, plan, target, records)
        seen = records.get(key)
        if reply.facts and seen is not None:
            records.put(msgspec.structs.replace(seen, facts={**seen.facts, **reply.facts}))
    return None


def _loaded(load: Callable[[Compiled], None], launch: Compiled) -> Reply:
    """Return how compiling and loading here ended; errors of memory and the device pass through."""
    try:
        load(launch)
    except Exception as error:
        if not is_compilers(error):
            raise
        # triton-ascend raises another error, with what the adapter printed, from the one that says how it ended.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, subprocess.CalledProcessError):
            cause = cause.__cause__ or cause.__context__
        message = str(error) if cause is None or cause is error else f"{cause}\n{error}"
        return Reply(outcome="error", stage="load", kind=type(error).__name__, message=message)
    return Reply(outcome="ok")


def is_compilers(error: Exception) -> bool:
    """Return whether an error while compiling or loading is the compiler's, and not memory's or the device's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return False
    return not re.search(r"CUDA error|HIP error|Triton Error \[(CUDA|HIP)\]|out of memory", str(error))


def _record(key: str, plan: Plan, passed: bool, **fields: Any) -> CompileRecord:
    return CompileRecord(
        key=key,
        kernel=plan.kernel or plan.path,
        target=plan.target,
        toolchain=plan.toolchain,
        level="compiles" if passed else "declared",
        passed=passed,
        date=datetime.date.today(),
        **fields,
    )


def _record_failure(
    key: str,
    reply: Reply,
    launch: Compiled,
    plan: Plan,
    target: Target,
    records: CompileStore,
    limit: float = 0.0,
) -> CompileRecord:
    """Classify a failure, and keep its Incident and record for as long as it counts; a child had `limit` seconds."""
    incident = incident_of(
        plan,
        target,
        plan.kernel or plan.path,
        key=key,
        kernel=launch.function,
        symptom=symptom_of(reply),
        stage=reply.stage,
        message=f"{reply.kind} at {reply.stage}: {first_line(reply.message)}",
        log=reply.log or reply.message,
        command=reproducer(launch, plan, target),
        specialisation=msgspec.to_builtins(signature_of(launch)),
    )
    stands = record_store.standing(reply, room=record_store.has_room())
    before = records.happened(key) if stands == "passing" else None
    if before is not None and before.reason == incident.message:
        name = before.incident  # once a process: a server meets it again every some minutes
    else:
        name = incident.id if records.add_incident(incident) else ""
    record = _record(
        key, plan, passed=False, reason=incident.message, incident=name, standing=stands,
        limit=limit if stands == "timeout" else 0.0,
    )  # fmt: skip
    if stands == "passing":
        return records.remember(record)
    return records.put(record)


def missing_feature_record(plan: Plan, error: Exception, target: Target, settings: Settings) -> CompileRecord:
    """Return the record, kept by this process alone, that its Triton lacks something that a variant's launches need."""
    key, records = code_key(plan, ()), store(settings)
    seen = records.get(key)
    if seen is not None:
        return seen
    reason = f"{type(error).__name__} as its launches were described: {first_line(str(error))}"
    incident = incident_of(
        plan, target, plan.path, key=key, kernel=plan.path, symptom="compile-error", stage="parse", message=reason,
        log="".join(traceback.format_exception(error))[-16_000:],
        command=f"{shlex.quote(sys.executable or 'python3')} -m portattn doctor",
    )  # fmt: skip
    kept = records.add_incident(incident)
    failed = _record(key, plan, passed=False, reason=reason, incident=incident.id if kept else "")
    return records.remember(failed, passing=False)


def incident_of(plan: Plan, target: Target, label: str, **seen: Any) -> Incident:
    """Return an Incident of a kernel, now: its plan, its environment and `seen`; `label` goes into the id."""
    now = datetime.datetime.now(datetime.timezone.utc)
    digest = hashlib.sha256(f"{seen['key']}{now.isoformat()}".encode()).hexdigest()[:6]
    return Incident(
        id=f"{now:%Y%m%d}-{label.replace('_', '-')}-{digest}",
        target=plan.target,
        toolchain=plan.toolchain,
        environment={name: os.environ[name] for name in sorted(os.environ) if name.startswith(("TRITON_", "AMDGCN_"))}
        | plan.env
        | dict(target.toolchain.components),
        date=now,
        quirks=tuple(q.id for q in plan.quirks),
        problem=plan.problem,
        lowering=plan.lowering,
        launch=plan.launch,
        environment_set=plan.env,
        **seen,
    )


def symptom_of(reply: Reply) -> Symptom:
    if reply.outcome == "hang":
        return "hang"
    if reply.outcome == "crash" or death(reply):
        return "compiler-crash"
    over = re.search(
        r"out of resource|OutOfResources|ub overflow|uses too much shared data", f"{reply.kind} {reply.message}"
    )
    return "resource-limit" if over else "compile-error"


def first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # A place in the source alone is no reason, which Triton puts last.
    told = [*lines[:1], *(lines[-1:] if lines and lines[0].endswith(":") and len(lines) > 1 else ())]
    return " ".join(told)[:300] or "no message"


def reproducer(launch: Compiled, plan: Plan, target: Target, python: str = "") -> str:
    """Return a shell command that sends the same request to a worker under a Python, by default this process's."""
    python = python or sys.executable or "python3"
    request = {"version": PROTOCOL, "id": 1, "task": "compile", **compile_fields(launch, plan, target)}
    return f"echo {shlex.quote(json.dumps(request))} | {shlex.quote(python)} {shlex.quote(str(SERVE))}"


def _forked() -> None:
    global _worker_lock
    _worker_lock = threading.Lock()  # a thread that held it is the parent's


os.register_at_fork(after_in_child=_forked)


def _shared_worker() -> Worker:
    """Return the worker of this process's first compiles, or of `ahead`; a new one if compilers' variables changed."""
    global _worker
    own = _own_worker.get()
    if own is not None:
        return own
    with _worker_lock:
        now = record_store.surroundings()
        if _worker is None or _started_in.get(_worker, now) != now:
            _worker = new_worker()
            _started_in[_worker] = now
            atexit.register(_close, weakref.ref(_worker))
        return _worker


def _close(worker: weakref.ref[Worker]) -> None:
    alive = worker()
    if alive is not None:
        alive.close()
