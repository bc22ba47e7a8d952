"""Cells measured with several releases: each in its own process, all of them and the peers in the same rounds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from portattn.tools.bench import firstcall, peers, results
from portattn.tools.bench.cases import Case
from portattn.tools.bench.clock import Ceilings, Clock
from portattn.tools.bench.contenders import CORE, MINE, OURS
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.gate import Admission, DeviceLost, admit, reason
from portattn.tools.bench.releases.child import PreparedCase
from portattn.tools.bench.releases.process import ReleaseProcess, TurnsClock
from portattn.tools.bench.results import DeviceState, Figures, Row
from portattn.tools.bench.run import BenchOptions, each_cell, time_contenders
from portattn.tools.bench.schedule import Cell
from portattn.tools.bench.tensors import Tensors

Item = Row | FirstCall
Done = Callable[[Mapping[str, Item]], None]


def run_cells(
    cells: Sequence[Cell], indices: Mapping[str, int], processes: Mapping[str, ReleaseProcess], clock: Clock,
    limits: Ceilings | None, options: BenchOptions, done: Done, budget: float | None = None,
    device: torch.device | None = None,
) -> int:  # fmt: skip
    """Measure cells with every release as long as run.each_cell does; how many were done.

    indices    by release, of the run that its rows belong to
    processes  by release
    done       gets each cell's rows, or first calls, by release

    Raises DeviceLost, after `done` was given the rows that say so.
    """
    where = device or torch.device("cuda", torch.cuda.current_device())

    def measure(set_: str, case: Case) -> None:
        if set_ == firstcall.COLD_START:
            done({name: _first_call(case, indices[name], process) for name, process in processes.items()})
            return
        try:
            done(run_case(set_, case, indices, where, clock, limits, options, processes))
        except DeviceLost as lost:
            who = {lost.name: Figures(name=lost.name, refused=str(lost))}
            done({name: results.row(set_, case, index, limits, None, who) for name, index in indices.items()})
            raise
        finally:
            for process in processes.values():
                process.drop()
            if where.type == "cuda":
                with contextlib.suppress(RuntimeError):  # of a lost device, which the DeviceLost under way tells
                    torch.cuda.empty_cache()

    return each_cell(cells, measure, budget)


def run_case(
    set_: str, case: Case, indices: Mapping[str, int], device: torch.device, clock: Clock, limits: Ceilings | None,
    options: BenchOptions, processes: Mapping[str, ReleaseProcess],
) -> dict[str, Row]:  # fmt: skip
    """One case's rows by release. Every row has the peers' figures, of the same rounds as its own.

    Raises DeviceLost when the device takes no more work from this process.
    """
    begun = time.monotonic()
    everyone = _peers(case, device, clock, options)
    prepared: dict[str, PreparedCase] = {}
    mine: dict[str, tuple[str, str]] = {}  # name among all -> release and name among its own
    budgets: dict[str, float] = {}
    for release, process in processes.items():
        own, prepared[release] = process.prepare(case, options.backend, options.core)
        budgets[release] = own.budget
        for name in (*own.contenders, *own.refused):
            mine[_among_all(name, release)] = release, name
        everyone.contenders |= {_among_all(name, release): one for name, one in own.contenders.items()}
        everyone.errors |= {_among_all(name, release): error for name, error in own.errors.items()}
        everyone.refused |= {_among_all(name, release): why for name, why in own.refused.items()}
    measured, probe = time_contenders(case, everyone, TurnsClock(clock), options, mine)
    state, seconds = probe.read()[0], time.monotonic() - begun
    theirs = {name: figures for name, figures in measured.items() if name not in mine}
    rows = {}
    for release in processes:
        ours = {
            name: msgspec.structs.replace(measured[whole], name=name)
            for whole, (of, name) in mine.items()
            if of == release
        }
        if prepared[release].same:  # the plan takes the core anyway
            ours[CORE] = msgspec.structs.replace(ours[OURS], name=CORE)
        ordered = {name: ours[name] for name in MINE if name in ours}
        rows[release] = _row(
            set_, case, indices[release], limits, budgets[release], ordered | theirs, prepared[release], state, seconds
        )
    return rows


def _row(
    set_: str, case: Case, index: int, limits: Ceilings | None, budget: float, measured: dict[str, Figures],
    prepared: PreparedCase, state: DeviceState | None, seconds: float,
) -> Row:  # fmt: skip
    known = budget if math.isfinite(budget) else None
    return results.row(set_, case, index, limits, known, measured, plan=prepared.plan, state=state, seconds=seconds)


def _among_all(name: str, release: str) -> str:
    return f"{name} @{release}"


def _peers(case: Case, device: torch.device, clock: Clock, options: BenchOptions) -> Admission:
    """The peers that are right, of this process. Without any that is wanted there are no tensors here."""
    if not options.wanted and not options.others:
        return Admission(math.nan)
    try:
        t = Tensors.random(case, device)
        return admit(case, t, peers.contenders(case, t, options.wanted, options.others), clock.lost)
    except torch.OutOfMemoryError as failure:
        return Admission(math.nan, refused={name: reason(failure) for name in options.wanted})


def _first_call(case: Case, index: int, process: ReleaseProcess) -> FirstCall:
    if process.given_up:
        return FirstCall(case=case.name, run=index, failed=process.given_up)
    return firstcall.measure(case, index, variables=process.release.variables)
