"""Numbers of a cell: its kernels on a small problem, in a child, under the interpreter or on this machine's device.

The interpreter runs a program at a time as numpy, so the problem is scaled down; what decides the code that is run
(head_dim, dtype, masks, lengths, lowering, block sizes, whether keys are split) is kept.
"""

from __future__ import annotations

import importlib.metadata as metadata
import math
import threading
from concurrent.futures import Future
from typing import Any

import msgspec
from packaging.version import Version

from portattn.planning.kernel_specs import CORES, DecodeSplit, ceil_div
from portattn.schema.lowering import Launch
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.toolchain import Toolchain, installed_toolchain
from portattn.testing.findings import Numerics
from portattn.worker.client import Reply, Worker

# Under the interpreter: one full tile of rows and a rest, two full tiles of keys and a rest, three sequences (one of
# them without rows when lengths are given), and no more heads than a group and its neighbour need.
SMALL_BATCH = 3
RAGGED = 5  # rows or keys beyond the last full tile
SPARSITY = 2  # keys for each place of a chosen token
# From NumPy 2.4 on a one-element array is no index; Triton's interpreter uses it as one before 3.7 (triton #9171).
FIRST_BAD_NUMPY, FIRST_GOOD_TRITON = Version("2.4"), Version("3.7")
# Ways to load a tile, and the releases of Triton that have them: quirks any-0001 and any-0002. A cell's plan heeds its
# own compiler's quirks, which is not always the Triton whose interpreter runs it.
LOADS = {"block_ptr": ("block pointers", "<3.9"), "descriptor": ("tensor descriptors", ">=3.4")}
# On a device: large enough for every tile and split to be used, small enough for a float64 oracle.
DEVICE_SEQ, DEVICE_BATCH, DEVICE_HEADS_K = 1024, 3, 2
COMPARE = "portattn.testing.run_plan:compare"  # the task of a child that runs a plan's path
CPU_SEQ = 256  # a CPU runs the reference, which has no tiles to fill


def interpreter_missing() -> str:
    """Why kernels cannot be interpreted here; empty when they can."""
    toolchain = installed_toolchain()
    if toolchain.distribution != "triton":
        return f"the interpreter needs community Triton, and this Python has {toolchain}"
    numpy = metadata.version("numpy")
    if Version(numpy) >= FIRST_BAD_NUMPY and Version(toolchain.version) < FIRST_GOOD_TRITON:
        return f"the interpreter of {toolchain} needs NumPy before {FIRST_BAD_NUMPY}, and this Python has {numpy}"
    return ""


def lacking(load: str, toolchain: Toolchain) -> str:
    """Return the feature that a load needs and this Triton lacks, in words, or an empty text."""
    name, releases = LOADS.get(load, ("", ""))
    return name if name and toolchain.within("triton", releases) is False else ""


def scale_down(problem: Problem, launch: Launch) -> Problem:
    """The problem with batch, heads and lengths scaled down for the interpreter."""
    group = problem.group if ROWS[problem.op].packs_heads else 1
    block_m, block_n = (max(getattr(one, name) for one in launch.kernels()) for name in ("block_m", "block_n"))
    keys = 2 * block_n + RAGGED
    if launch.splits > 1:
        keys = max(keys, 3 * block_n + RAGGED)
    return _scaled(
        problem,
        batch=SMALL_BATCH if problem.padded or problem.packed else 1,
        heads_k=2 if problem.group == 1 else 1,
        rows=ceil_div(block_m, group) + RAGGED,
        keys=keys,
        # A window that hides the first tile of the last rows, and no more than that.
        left=keys - block_n,
    )


def on_device(problem: Problem, backend: str) -> Problem:
    """The problem scaled down for a device of this machine and an oracle."""
    seq = (CPU_SEQ if backend == "cpu" else DEVICE_SEQ) + RAGGED
    return _scaled(problem, batch=DEVICE_BATCH, heads_k=DEVICE_HEADS_K, rows=seq, keys=seq, left=seq // 2)


def _scaled(problem: Problem, batch: int, heads_k: int, rows: int, keys: int, left: int) -> Problem:
    """The problem with no more than these sizes; `keys` are what one row attends, in whole pages."""
    p = problem
    heads_k = min(p.heads_k, heads_k)
    rows, tokens = min(p.seq_q, rows), min(p.tokens, keys)
    keys = min(p.seq_k, keys * SPARSITY if p.op == "sparse_attention" else keys)
    if p.page_size:
        keys = ceil_div(keys, p.page_size) * p.page_size

    def packed(total: int | None, longest: int) -> int | None:
        # Of three sequences the first is the longest and the last is empty.
        return None if total is None else min(total, max(2 * longest - RAGGED, 1))

    return msgspec.structs.replace(
        p,
        batch=min(p.batch, batch),
        heads_k=heads_k,
        heads_q=heads_k * p.group,
        seq_q=rows,
        seq_k=keys,
        total_q=packed(p.total_q, rows),
        total_k=packed(p.total_k, keys),
        tokens=tokens,
        window_left=min(p.window_left, left),
        window_right=min(p.window_right, RAGGED),
        chunk=min(p.chunk, left),
    )


def request_of(plan: Plan, problem: Problem, path: str, target: str, device: str) -> dict[str, Any]:
    """What a worker is asked (run_plan.py) to run a plan's path on another size of its problem."""
    fields: dict[str, Any] = {"problem": msgspec.to_builtins(problem), "path": path, "target": target, "device": device}
    fields["seed"] = _seed(problem)
    if plan.lowering is not None:
        kernel = CORES[plan.problem.op]
        lowering, launch = plan.specialised
        # Keys stay split where they were, over as many programs as the fewer keys have tiles for.
        splits = min(launch.splits, ceil_div(_attended(problem), launch.block_n))
        choices = {name: getattr(lowering, name) for name in kernel.choices}
        fields |= {
            "kernel": kernel.name,
            "lowering": choices,
            "launch": msgspec.to_builtins(msgspec.structs.replace(launch, splits=splits)),
            "env": plan.env,
        }
    return fields


def _attended(problem: Problem) -> int:
    """Most keys that one row can attend."""
    kernel = CORES[problem.op]
    return kernel.keys(problem) if isinstance(kernel, DecodeSplit) else problem.seq_k


def _seed(problem: Problem) -> int:
    """A seed whose random mask and bias have the problem's shapes (testing/random_calls.py: another one for each)."""
    if problem.mask_by_key and problem.bias_by_key:
        raise ValueError("random calls have no bias and mask that are both the same for all heads and queries")
    return 1 if problem.mask_by_key else 2 if problem.bias_by_key else 0


class Interpreter:
    """Interpreted numerics, each distinct specialisation once, however many cells and threads ask."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.missing = interpreter_missing()
        self._found: dict[bytes, Future[Numerics]] = {}
        self._lock = threading.Lock()

    def check(self, plan: Plan, worker: Worker) -> Numerics:
        """Numerics of a core plan's kernels; a second asker waits for the first one's answer."""
        problem = scale_down(plan.problem, plan.specialised[1])
        where = f"interpreter, {installed_toolchain()}"
        if self.missing:
            return Numerics(outcome="not_run", where=where, reason=self.missing)
        fields = request_of(plan, problem, "interpreter", "cpu:generic", "cpu")
        # What only a compiler reads does not change what the interpreter computes.
        fields["launch"] |= {"num_warps": 1, "num_stages": 1, "rows_warps": 0, "rows_stages": 0, "options": []}
        if "dot_precision" in fields["lowering"]:
            fields["lowering"]["dot_precision"] = "ieee"  # as exact as numpy whatever it is; hf32 it does not know
        if fields["lowering"].get("unpack") == "ptx":  # the same numbers without PTX, which it does not know
            fields["lowering"]["unpack"] = "bytes" if ROWS[problem.op].writes else "words"
        if "reads" in fields["lowering"]:
            fields["lowering"]["reads"] = "masked"  # its tiles are powers of two, and it reads what a mask lets it
        if lacks := lacking(fields["lowering"].get("load", ""), installed_toolchain()):
            # The same elements by other code of the kernel: all else of it is shown, and that this is not is said.
            fields["lowering"]["load"] = "pointer"
            where += f", which has no {lacks}: tiles are loaded by pointers instead"
        fields["env"] = {}
        key = msgspec.json.encode(fields, order="deterministic")
        with self._lock:
            mine = key not in self._found
            future = self._found.setdefault(key, Future())
        if mine:
            try:
                future.set_result(numerics(worker.request(COMPARE, self.seconds, **fields), where, problem))
            except BaseException as error:
                future.set_exception(error)  # a waiting thread must not wait for ever
                raise
        return msgspec.structs.replace(future.result(), where=where)  # the first asker's plan may load otherwise


def numerics(reply: Reply, where: str, problem: Problem) -> Numerics:
    """A worker's answer as Numerics."""
    if reply.outcome != "ok":
        cause = next((line.strip() for line in reply.message.splitlines() if line.strip()), "no message")
        return Numerics(
            outcome=reply.outcome, where=where, problem=problem, reason=f"{reply.outcome}: {reply.kind}: {cause}"[:500]
        )
    facts = {name: float(value) for name, value in reply.facts.items()}
    reasons = []
    if facts["wrong"]:
        reasons.append(f"{facts['wrong']:.0f} elements are NaN or infinite where they must not be, or the reverse")
    for name, error, budget in (("out", "error", "budget"), ("LSE", "lse_error", "lse_budget")):
        if facts.get(error, 0.0) > facts.get(budget, math.inf):
            reasons.append(f"{name}'s error {facts[error]:.3g} is over its budget {facts[budget]:.3g}")
    return Numerics(
        outcome="fail" if reasons else "pass",
        where=where,
        problem=problem,
        error=facts["error"],
        budget=facts["budget"],
        lse_error=facts.get("lse_error"),
        lse_budget=facts.get("lse_budget"),
        reason="; ".join(reasons),
    )


def figure(numerics: Numerics) -> str:
    """An outcome with its errors and budgets, in one line."""
    if numerics.outcome == "not_run":
        return f"not run: {numerics.reason}"
    if numerics.error is None or numerics.budget is None:
        return f"FAIL: {numerics.reason}"
    parts = [f"max error {numerics.error:.2e} of {numerics.budget:.2e} allowed"]
    if numerics.lse_error is not None:
        parts.append(f"LSE {numerics.lse_error:.2e} of {numerics.lse_budget:.2e}")
    return ("" if numerics.outcome == "pass" else "FAIL: ") + ", ".join(parts)
