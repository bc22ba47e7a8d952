"""Time the first call of a tuned problem in new processes: with empty caches, with its caches, and after a warm-up.

`python -m portattn.tools.bench.firstcall CASE [warm]` prints {"first_s", "second_s", "path", "warmup_s"} as JSON."""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from portattn.tools.bench.cases import SETS, Case

COLD_START = "cold-start"  # the set's name
SECONDS = 300.0  # limit of a process
CASES = tuple(SETS[COLD_START])
# Where compiled kernels and verdicts are kept; torch's own caches have no part in a call of ours.
_CACHES = ("PORTATTN_CACHE_DIR", "TRITON_CACHE_DIR")


class FirstCall(msgspec.Struct, frozen=True, kw_only=True, tag="first-call"):
    set: str = COLD_START
    case: str
    run: int  # index of the run among the result's runs
    empty_s: float | None = None  # the first call of a process, until its result is there, with empty caches
    kept_s: float | None = None  # the first call of a later process with the caches that the first one left
    second_s: float | None = None  # that process's second call
    warmup_s: float | None = None  # `portattn.warmup` in a third process, with the same caches
    warmed_s: float | None = None  # that process's first call
    path: str = ""
    failed: str = ""  # why there are no figures


def measure(case: Case, run: int, seconds: float = SECONDS, variables: Mapping[str, str] | None = None) -> FirstCall:
    """Time the first calls of a case in three processes that share new caches; variables: of their environment."""
    with tempfile.TemporaryDirectory(prefix="portattn-bench-") as folder:
        caches = {name: os.path.join(folder, name) for name in _CACHES}
        path = os.pathsep.join(map(os.path.abspath, sys.path))  # of this folder, in which the children do not start
        environment = {**os.environ, "PYTHONPATH": path, **(variables or {}), **caches}
        found = []
        for warm in (False, False, True):
            try:
                found.append(_child(case, environment, seconds, warm, folder))
            except (subprocess.SubprocessError, ValueError) as failure:
                return FirstCall(case=case.name, run=run, failed=_why(failure))
    empty, kept, warmed = found
    return FirstCall(
        case=case.name, run=run, empty_s=empty["first_s"], kept_s=kept["first_s"], second_s=kept["second_s"],
        warmup_s=warmed["warmup_s"], warmed_s=warmed["first_s"], path=empty["path"],
    )  # fmt: skip


def _child(case: Case, environment: dict[str, str], seconds: float, warm: bool, folder: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", __name__, case.name, *(["warm"] if warm else [])],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=seconds, check=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1] if done.stdout else "")
    return answer


def _why(failure: Exception) -> str:
    if isinstance(failure, subprocess.TimeoutExpired):
        return f"no result after {failure.timeout:g} s"
    said = getattr(failure, "stderr", "") or str(failure)
    return str(said).strip().splitlines()[-1][:200]


def time_calls(case: Case, device: str, warm: bool = False) -> dict[str, Any]:
    """Run the child's calls: tensors first, so that the device is up before the clock starts."""
    import torch

    import portattn
    from portattn.launch.torch_compat import synchronize
    from portattn.tools.bench.contenders import arguments, ours, plan_of
    from portattn.tools.bench.tensors import Tensors

    tensors = Tensors.random(case, torch.device(device))
    run = ours(case, tensors).run

    def once() -> float:
        begun = time.perf_counter()
        out = run()
        synchronize(out.device)
        return time.perf_counter() - begun

    warmup_s = None
    if warm:
        placed, named = arguments(case, tensors)
        bound = inspect.signature(getattr(portattn, case.op)).bind(*placed, **named)
        warmup_s = portattn.warmup([{"op": case.op, **bound.arguments}]).seconds
    return {"first_s": once(), "second_s": once(), "path": plan_of(case, tensors).path, "warmup_s": warmup_s}


def main(name: str, *warm: str) -> None:
    from portattn.launch.torch_compat import timed_device

    case = next(case for case in CASES if case.name == name)
    print(json.dumps(time_calls(case, str(timed_device() or "cpu"), bool(warm))))


if __name__ == "__main__":
    main(*sys.argv[1:])
