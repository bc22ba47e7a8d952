"""What compiling rules out, before a device is asked: code that does not fit, spills, or leaves no room for itself."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait

from portattn.schema.lowering import Launch
from portattn.schema.target import Target
from portattn.tools import lab
from portattn.tools.tune.choice import Choice
from portattn.tools.tune.tunable import BuiltCandidate, CompileResult, Facts
from portattn.worker.client import Worker

# A multiprocessor's registers are in so many parts, each of which holds whole warps. Source: NVIDIA's occupancy
# calculator, whose number of warps by registers is rounded down to multiples of four (compute capability 5.0 and on).
PARTS = 4


def programs_a_core(facts: Facts, target: Target) -> int | None:
    """Programs of this code that one compute unit has room for; None where that is not known."""
    warps, arch = int(facts.get("num_warps", 4)), target.arch
    if not arch.core_threads or "registers" not in facts:
        return None
    unit, reserved = arch.register_unit, arch.reserved_memory
    a_warp = -(-int(facts["registers"]) * arch.warp_size // unit) * unit
    by_registers = PARTS * (arch.core_registers // PARTS // a_warp) // warps if a_warp else arch.core_registers
    by_memory = (arch.scratchpad_bytes + reserved) // (int(facts.get("scratchpad_bytes", 0)) + reserved)
    by_threads = arch.core_threads // (warps * arch.warp_size)
    return min(by_registers, by_memory, by_threads)


def verdict(compiled: CompileResult, choice: Choice, target: Target, most_spilled: int) -> str:
    """Why a compiled candidate is ruled out; empty when it is not.

    most_spilled  bytes of spills that are allowed
    """
    if compiled.failure:
        return compiled.failure
    facts, arch = compiled.facts or {}, target.arch
    used = int(facts.get("scratchpad_bytes", 0))
    if used > arch.scratchpad_bytes:
        return f"{used} bytes of {arch.scratchpad_kind}, {arch.name} has {arch.scratchpad_bytes}"
    if arch.registers and int(facts.get("registers", 0)) > arch.registers:
        return f"{facts['registers']} registers, {arch.name} has {arch.registers}"
    if int(facts.get("spills", 0)) > most_spilled:
        return f"{facts['spills']} bytes spilled, {most_spilled} allowed"
    if facts.get("serialized_wgmma"):
        return "ptxas serialised its wgmma instructions"
    programs = programs_a_core(facts, target)
    if programs is not None and programs < max(choice.occupancy, 1):
        return f"over-subscribed: {choice.occupancy} programs a core are asked for, {programs} fit"
    if programs is not None and Launch().changed(choice.launch).get("maxnreg") and programs < 2:
        return "over-subscribed: maxnreg is for several programs a core, and one fits"
    return ""


def compile_all(
    jobs: Iterable[tuple[str, BuiltCandidate]],
    toolchain: str,
    workers: int,
    seconds: float,
    done: Callable[[str, CompileResult], None],
    known: Mapping[str, CompileResult],
    make: Callable[[str], Worker] | None = None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> None:
    """Compile every (code, candidate) that is not known yet, several at a time; `done` is called in this thread.

    toolchain  what compiles: the installed one, or the lab's
    make       makes a worker for a toolchain; the lab's own when None
    out_of_time  asked before each: what is not begun by then is left

    Whatever `done` raises, and KeyboardInterrupt, ends it: children are killed. Raises LabError where there is no
    environment of the toolchain.
    """
    waiting = list({code: built for code, built in jobs if code not in known and built.compile is not None}.items())
    if not waiting:
        return
    local, opened, closed = threading.local(), list[Worker](), threading.Event()
    make = make or lab.worker
    first: list[Worker] = [make(toolchain)]  # an environment that is missing is said here, not in a thread

    def compile_one(built: BuiltCandidate) -> CompileResult:
        if closed.is_set():
            raise CancelledError("the run has ended")
        if not hasattr(local, "worker"):
            try:
                local.worker = first.pop()
            except IndexError:
                local.worker = make(toolchain)
            opened.append(local.worker)
        assert built.compile is not None
        return built.compile(local.worker, seconds)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="tune")
    try:
        running: dict[Future[CompileResult], str] = {}
        waiting.reverse()
        while waiting or running:
            if out_of_time():
                waiting.clear()
            while waiting and len(running) < workers:
                code, built = waiting.pop()
                running[pool.submit(contextvars.copy_context().run, compile_one, built)] = code
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running.pop(future), future.result())
    finally:
        closed.set()
        for worker in (*opened, *first):
            worker.close()
        pool.shutdown(cancel_futures=True)
        for worker in opened:  # a thread can have started a child between the two
            worker.close()
