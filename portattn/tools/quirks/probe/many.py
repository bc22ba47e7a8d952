"""Many probes, several at a time: which quirks go with which toolchains, and the children that compile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import msgspec

from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.schema.toolchain import installed_beside, installed_toolchain, is_installed
from portattn.tools import lab
from portattn.tools.quirks.probe import ranges, running
from portattn.tools.quirks.probe.results import SIGNATURE, ProbeResult
from portattn.worker.client import Worker


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One quirk to probe on one toolchain; `target` None is the probe's own."""

    quirk: Quirk
    toolchain: str
    target: str | None = None


def toolchains(registry: Registry) -> tuple[list[str], list[str]]:
    """(toolchains that can be probed here: installed, made, and stand-ins; those of the lab's list that cannot)."""
    here = [str(one) for one in (installed_toolchain(), *installed_beside()) if one]
    made = {environment.toolchain for environment in lab.environments()}
    there = [name for name in lab.toolchains() if name in made or name in here]
    named = {quirk.evidence.stand_in for quirk in registry.quirks.values()}
    stand_ins = [name for name, (real, _) in running.STAND_INS.items() if name in named and real in there]
    found = [*there, *(name for name in (*here, *sorted(made)) if name not in there), *stand_ins]
    return list(dict.fromkeys(found)), [name for name in lab.toolchains() if name not in found]


def jobs(quirks: Iterable[Quirk], names: Sequence[str], target: str | None, registry: Registry) -> list[Job]:
    """A job for each quirk and each toolchain that compiles for its backend; one alone where no toolchain matters."""
    found = []
    for quirk in quirks:
        fitting = [name for name in names if _fits(quirk, name, target, registry)]
        if quirk.evidence.needs:  # a device is used by what is installed here
            fitting = [name for name in fitting if is_installed(name)] or fitting[:1]
        elif not running.has_probe(quirk):
            fitting = fitting[:1] or list(names[:1])
        found += [Job(quirk=quirk, toolchain=name, target=target) for name in fitting]
    return found


def _fits(quirk: Quirk, name: str, target: str | None, registry: Registry) -> bool:
    where = running.place(quirk, name, target, registry)
    compiler = Registry.load().backends[where.backend].compiler
    return where.toolchain.distribution == compiler and (
        name not in running.STAND_INS or quirk.evidence.stand_in == name
    )


class _Children:
    """One thread's children, one for each Python and kind."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, bool], Worker] = {}

    def get(self, quirk: Quirk, name: str) -> Worker:
        real = running.STAND_INS[name][0] if name in running.STAND_INS else name
        key = (real, bool(quirk.evidence.needs))
        if key not in self._open:
            runs = {"runs": "kernels"} if quirk.evidence.needs else {}
            self._open[key] = lab.worker(real, environment=running.FRESH, **runs)
        return self._open[key]

    def close(self) -> None:
        for worker in list(self._open.values()):
            worker.close()


def execute(
    wanted: Sequence[Job], registry: Registry, seconds: float, parallel: int, done: Callable[[Job, ProbeResult], None]
) -> None:
    """Run every job; `done` is called in this thread with each result as it comes.

    KeyboardInterrupt, and whatever `done` raises, ends the run: children are killed, and probes under way are dropped.
    """
    local = threading.local()
    opened: list[_Children] = []

    def one(job: Job) -> tuple[Job, ProbeResult]:
        if not hasattr(local, "children"):
            local.children = _Children()
            opened.append(local.children)
        where = running.place(job.quirk, job.toolchain, job.target, registry)
        worker = None if running.cannot(job.quirk, where) else local.children.get(job.quirk, job.toolchain)
        given = {"seconds": seconds, "worker": worker, "registry": registry}
        return job, running.run(job.quirk, job.toolchain, job.target, **given)  # type: ignore[arg-type]

    pool = ThreadPoolExecutor(parallel, thread_name_prefix="probe")
    try:
        # A few at a time: an interrupt then finds little under way.
        waiting, under_way = list(reversed(wanted)), set[Future[tuple[Job, ProbeResult]]]()
        while waiting or under_way:
            while waiting and len(under_way) < parallel:
                under_way.add(pool.submit(one, waiting.pop()))
            finished, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in finished:
                done(*future.result())
    finally:
        for children in opened:
            children.close()
        pool.shutdown(cancel_futures=True)
        for children in opened:  # a thread can have started a child between the two
            children.close()


def with_diffs(pairs: Sequence[tuple[Job, ProbeResult]], registry: Registry) -> list[ProbeResult]:
    """The results, each with the diff that it and the others of its quirk ask for."""
    found = []
    for job, result in pairs:
        name = ranges.component(job.quirk)
        others = [
            other.toolchain.partition("==")[2]
            for known, other in pairs
            if known.quirk.id == job.quirk.id
            and other.off.word == SIGNATURE
            and other.toolchain.startswith(f"{name}==")
        ]
        where = registry.target(result.target, result.toolchain)
        text = ranges.diff(job.quirk, where, result.verdict, [*running.affected_versions(job.quirk), *others])
        found.append(msgspec.structs.replace(result, diff=text))
    return found
