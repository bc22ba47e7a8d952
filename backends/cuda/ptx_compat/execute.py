"""A plan's launches as code of an older chip on this machine's newer one, on a random problem. Child process only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from portattn.backends.cuda.ptx_compat.driver import Driver, library
from portattn.backends.cuda.ptx_compat.launch import Code, run
from portattn.launch import has_rows, kernel_calls
from portattn.planning.registry import Registry
from portattn.testing.run_plan import call_of, plan_of
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import judge
from portattn.worker.stages import RUNS

JUDGES = "oracle"  # the stage after the kernels have run


def compare(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Run compiled launches on the current device: {"facts": …} as testing/verdict.judge says.

    The request is that of testing/run_plan.py with `texts`, of each launch in order its Code. Outputs, partial results
    and all padding start as NaN. Raises BadPtx and CudaError.
    """
    target = Registry.load().target(request["target"])
    codes = [msgspec.convert(code, Code) for code in request["texts"]]
    device = Registry.load().backends[target.backend].device_type
    _, capability, _ = Registry.load().backends[target.backend].triton_target(target.arch)
    enter(RUNS)
    with _one_thread():
        with nan_filled_memory(), torch.no_grad():
            plan, call = plan_of(request, target), call_of(request | {"device": device})
            driver = Driver(library())  # in the context that torch made for the call's tensors
            launches, out, lse = kernel_calls(plan, call, target.arch.cores)
            if has_rows(plan):
                for launch, code in zip(launches, codes, strict=True):
                    enter(f"{RUNS} {launch.function}")
                    stream = torch.cuda.current_stream().cuda_stream
                    run(launch, code, driver, int(capability), stream)
        enter(JUDGES)
        precision = request.get("lowering", {}).get("dot_precision", "ieee")
        return {"facts": judge(call, out, lse, precision)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """The oracle is torch's, on the CPU, and children run side by side: with a thread for every core each, they would
    hinder one another for longer than one thread takes (two seconds for the largest problem)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
