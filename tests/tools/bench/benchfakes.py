"""A clock that needs no device, results made of known figures, and a run of the CPU."""

from typing import Any

import msgspec
import torch

from portattn.tools.bench import run
from portattn.tools.bench.cases import SETS, Case
from portattn.tools.bench.results import BenchRun, Figures, Result, Row, row
from portattn.tools.bench.rounds import Ceilings, Spread

LIMITS = Ceilings(gemm_tflops=800.0, copy_tbs=4.0)


class FakeClock:
    """Every call takes as long as `ms` says of its contender's turn; turns are counted."""

    def __init__(self, ms: float = 1.0) -> None:
        self.ms, self.turns, self.gone = ms, [], ""
        self.graphs: Any = None

    def turn_ms(self, run, timing, calls, expected_ms):
        self.turns.append((run, timing, calls))
        run()
        return self.ms

    def host_us(self, run, expected_ms=0.0):
        run()
        return Spread(median=5.0, low=4.0, high=7.0, count=9)

    def graphed(self, contender):
        if self.graphs is not None:
            raise self.graphs
        return contender.run

    def peak_extra_bytes(self, run):
        return 64

    def ceilings(self):
        return LIMITS

    def lost(self):
        return self.gone


def host(us: float) -> Spread:
    return Spread(median=us, low=us, high=us, count=5)


def figures(name: str, *ms: float, **others: Any) -> Figures:
    return Figures(name=name, rounds_ms=ms, error=1e-4, **others)


def made(set_: str, case: Case, *contenders: Figures, limits: Ceilings | None = LIMITS, **others: Any) -> Row:
    return row(set_, case, 0, limits, 1e-3, {f.name: f for f in contenders}, **others)


def run_case(set_: str, case: Case, clock: FakeClock, limits: Ceilings | None, options: run.BenchOptions) -> Row:
    return run.run_case(set_, case, {"": 0}, torch.device("cpu"), clock, limits, options)[""]


def a_run(**fields: Any) -> BenchRun:
    base = BenchRun(
        date="2026-01-02T03:04:05+00:00", command="portattn bench", commit="abc", portattn="0", kernels="k",
        chip="a chip", target="cuda:sm_90", toolchain="triton==3.6.0", device={"multi_processors": 132},
        versions={"torch": "2.11"}, peers={"fa3": "here", "flex": "no package"}, libraries={"x.so": "loaded"},
        sets=tuple(SETS), cells=2, rounds=3, backend="auto", core=False, only_host=False, ceilings=LIMITS,
    )  # fmt: skip
    return msgspec.structs.replace(base, **fields)


def a_result(*rows: Row, first_calls: Any = (), **fields: Any) -> Result:
    return Result(runs=[a_run(**fields)], rows=list(rows), first_calls=list(first_calls))
