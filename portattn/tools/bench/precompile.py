"""Filling the compilers' caches before anything is timed: portattn's kernels, compiled in child processes side by side.

A kernel takes seconds to compile, on one core; a benchmark of many cases would leave the device and the other cores
idle for most of its time. What the children compile lands in Triton's cache, and what they find out of isolated
compiles in portattn's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from portattn.tools.bench.backward import own_builds
from portattn.tools.bench.cases import Case
from portattn.tools.bench.gate import FAILURES, reason
from portattn.tools.bench.schedule import spread
from portattn.tools.bench.tensors import Tensors
from portattn.tools.pool import in_children


class PrecompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to run, once each: portattn's own contenders of a case."""

    case: Case
    backend: str
    core: bool
    device: str


def prime(asked: PrecompileJob) -> str:
    """Run them; why one of them does not run, or an empty text. It is found again where the case is measured.

    The children share the device's memory: what does not fit now may fit when it is alone.
    """
    device = torch.device(asked.device)
    try:
        failed = _run(asked, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next case may be another child's
    except FAILURES as failure:  # torch's errors of a device, out of memory among them, are RuntimeErrors
        return reason(failure)
    return failed


def _run(asked: PrecompileJob, device: torch.device) -> str:
    failed = ""
    t = Tensors.random(asked.case, device)
    for name, build in own_builds(asked.case, t, asked.backend, asked.core).items():
        try:
            build().run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except FAILURES as failure:
            failed = f"{name}: {reason(failure)}"
    return failed


def prime_all(
    cases: Sequence[Case],
    backend: str,
    core: bool,
    device: torch.device,
    processes: int,
    done: Callable[[Case, str], None],
    work: Callable[[PrecompileJob], str] = prime,
    seconds: float = math.inf,
) -> bool:
    """Run every case in a child, for so many seconds; `done(case, failure)` is called here as each is finished.

    Returns whether all were run; where a child dies, or time is over, the rest is compiled where it is measured.
    """
    # Neighbours often need the same kernel, which two children would compile at the same time.
    asked = [PrecompileJob(case=case, backend=backend, core=core, device=str(device)) for case in spread(cases)]
    end = time.monotonic() + seconds
    return in_children(
        asked, work, processes, lambda one, failure: done(one.case, failure), lambda: time.monotonic() >= end
    )
