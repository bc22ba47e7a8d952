"""Compiling by running: candidates that no child can compile without the chip are first run in children on its device.

What they compile lands in Triton's cache, from which this process then loads it. A candidate that ends its child ends
no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from portattn.launch.device_api import synchronize
from portattn.planning.registry import parse_target
from portattn.tools.bench.cases import Case
from portattn.tools.bench.gate import reason
from portattn.tools.bench.tensors import Tensors
from portattn.tools.pool import in_children
from portattn.tools.tune.choice import Choice
from portattn.tools.tune.gradients import call_of
from portattn.tools.tune.search import compilers_error
from portattn.tools.tune.tunables import tunables
from portattn.tools.tune.workloads import workload


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate to run: everything a child needs to build it. code: what its result is kept under."""

    code: str
    target: str
    kernel: str
    case: Case
    choice: Choice
    device: str


def warm(asked: Asked) -> str:
    """Run a candidate once, in a child. Why it does not compile or fit; empty where it does, or fails otherwise.

    What else a device raises is found again, and said, where the candidate is checked.
    """
    target, device = parse_target(asked.target), torch.device(asked.device)
    tunable = next(one for one in tunables(target) if one.name == asked.kernel)
    call = call_of(asked.case, Tensors.random(asked.case, device))
    try:
        tunable.build(workload(asked.case).problem, asked.choice, target).start(call).run()
        synchronize(device)
    except Exception as error:  # noqa: BLE001 - as above
        return f"{type(error).__name__}: {reason(error)}" if compilers_error(error) else ""
    return ""


def warm_all(
    jobs: Sequence[Asked],
    processes: int,
    done: Callable[[str, str], None],
    out_of_time: Callable[[], bool],
    work: Callable[[Asked], str] = warm,
) -> None:
    """Run every candidate in a child; `done(code, failure)` is called in this thread. It is over when time is.

    Where a child dies the rest is left to be compiled where it is checked.
    """
    in_children(jobs, work, processes, lambda asked, failure: done(asked.code, failure), out_of_time)
