"""Executors: a plan's code run without its chip, or its kernels under Triton's interpreter, against the oracle.

The request that a child gets to run a plan's path (verdict.py) is of a problem scaled down for its executor."""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import json
import pkgutil
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from packaging.version import Version

from portattn.compile.ensure_compiled import compile_in, first_line
from portattn.errors import PluginWarning, warn_caller
from portattn.launch import KernelCall, kernel_calls
from portattn.planning.kernel_specs import CORES, DecodeSplit, ceil_div
from portattn.planning.registry import Registry, own_backends
from portattn.schema.lowering import Launch
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.quirk import Level
from portattn.schema.target import Target
from portattn.schema.tensors import TORCH_DTYPE
from portattn.schema.toolchain import Toolchain, installed_toolchain
from portattn.source_tree import install_extra
from portattn.testing.findings import Facts, Lint, Numerics, numerics
from portattn.worker.client import Reply, Worker

# Under the interpreter: one full tile of rows and a rest, two full tiles of keys and a rest, three sequences (one of
# them without rows when lengths are given), and no more heads than a group and its neighbour need.
SMALL_BATCH = 3
RAGGED = 5  # rows or keys beyond the last full tile
SPARSITY = 2  # keys for each place of a chosen token
# On a device: large enough for every tile and split to be used, small enough for a float64 oracle.
DEVICE_SEQ, DEVICE_BATCH, DEVICE_HEADS_K = 1024, 3, 2
COMPARE = "portattn.testing.verdict:compare"  # the task of a child that runs a plan's path
CPU_SEQ = 256  # a CPU runs the reference, which has no tiles to fill
_TYPES = TORCH_DTYPE | {"i32": torch.int32, "i64": torch.int64, "i8": torch.int8}  # of a probe's arguments


def scale_down(problem: Problem, launch: Launch) -> Problem:
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
    seq = (CPU_SEQ if backend == "cpu" else DEVICE_SEQ) + RAGGED
    keys = problem.seq_k if problem.op == "topk_indices" else seq  # longer than a tile, or not
    return _scaled(problem, batch=DEVICE_BATCH, heads_k=DEVICE_HEADS_K, rows=seq, keys=keys, left=seq // 2)


def _scaled(problem: Problem, batch: int, heads_k: int, rows: int, keys: int, left: int) -> Problem:
    """Return the problem cut to these sizes, in whole pages; `keys` counts the keys that one row attends."""
    p = problem
    heads_k = min(p.heads_k, heads_k)
    rows, tokens = min(p.seq_q, rows), min(p.tokens, ceil_div(keys, p.block_k) if p.has_blocks else keys)
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
    """Return a worker's request (verdict.py) to run a plan's path on another size of its problem."""
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
    kernel = CORES[problem.op]
    return kernel.keys(problem) if isinstance(kernel, DecodeSplit) else problem.seq_k


def _seed(problem: Problem) -> int:
    """Return a seed whose random mask and bias have the problem's shapes (random_calls.py varies shapes by seed)."""
    if problem.mask_by_key and problem.bias_by_key:
        raise ValueError("random calls have no bias and mask that are both the same for all heads and queries")
    return 1 if problem.mask_by_key else 2 if problem.bias_by_key else 0


class Executor:
    """Runs of a backend's code (Backend.executors), each distinct one once for all threads."""

    name: Literal["lowered", "emulated", "older"]  # field of a matrix cell that the executor fills
    level: Level  # evidence level of right numbers
    task: str  # task of the running child (portattn/worker/serve.py)
    code_task: str = ""  # function that runs one kernel of a probe in a child, or empty
    runs_on: Literal["cpu", "device"] = "cpu"  # device: another chip of the family is needed; `where` names both
    interprets: bool = False  # the task runs under Triton's interpreter, in a child of its own
    asks: Literal["text", "full"] = "full"  # of the real problem: facts of machine code, or text for `analyze`
    lowers_to: str = ""  # language of that text; empty for machine code
    arches: tuple[str, ...] = ()  # chips whose code it runs; empty: all of its backend
    evidence: str = ""  # words for the source of its level in reports
    runner: Path | None = None  # source of a program that runs exported launches on the chip (testing/bundle.py)
    findings: tuple[str, ...] = ()  # kinds of errors of the running child that prove the code wrong

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._found: dict[str, Future[Numerics]] = {}
        self._lock = threading.Lock()

    def lacks(self, target: Target) -> str:
        raise NotImplementedError

    def declines(self, target: Target) -> str:
        """Return the reason from the chip's own file why this executor cannot run its code, or an empty text."""
        return str(target.arch.executors.get(self.name, {}).get("lacks", ""))

    def where(self, target: Target) -> str:
        """Return the label of a run for reports and the level `runs`: the code and the machine."""
        raise NotImplementedError

    def problems(self, plan: Plan) -> list[Problem]:
        return small_problems(plan)

    def piece(self, launch: KernelCall, reply: Reply) -> Any:
        raise NotImplementedError

    def exceeds(self, reply: Reply, target: Target) -> str:
        """Return why compiled code does not fit its chip, if a run elsewhere would not show it, or an empty text."""
        return ""

    def refusal(self, function: str, reply: Reply) -> str:
        return f"on a small problem, {function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}"

    def analyze(self, reply: Reply, launch: KernelCall, target: Target) -> tuple[Facts, list[Lint]]:
        return dict(reply.facts), []

    def check(
        self, plan: Plan, target: Target, compiler: Worker, runner: Worker, problems: Sequence[Problem] = ()
    ) -> Numerics:
        """Return the numerics of a core plan's compiled kernels: the first wrong ones, or the worst."""
        where, lacks = self.where(target), self.lacks(target)
        if lacks:
            return Numerics(outcome="not_run", where=where, reason=lacks)
        worst: Numerics | None = None
        for problem in problems or self.problems(plan):
            seen = self._one(plan, problem, target, compiler, runner, where)
            if seen.outcome != "pass":
                return seen
            if worst is None or _share(seen) > _share(worst):
                worst = seen
        assert worst is not None, "a plan has small problems"
        return worst

    def _one(
        self, plan: Plan, problem: Problem, target: Target, compiler: Worker, runner: Worker, where: str
    ) -> Numerics:
        made = self.compiled(plan, problem, target, compiler)
        return made if isinstance(made, Numerics) else self.run(*made, problem, target, runner, where)

    def compiled(
        self, plan: Plan, problem: Problem, target: Target, compiler: Worker, facts: str = "text"
    ) -> tuple[dict[str, Any], list[Any]] | Numerics:
        """Return the request to run a problem by a plan and the piece of each compiled launch, or the failure."""
        from portattn.testing.verdict import call_of, plan_of

        where = self.where(target)
        request, pieces = request_of(plan, problem, plan.path, target.name, "cpu"), []
        small, call = plan_of(request, target), call_of(request)
        for launch in kernel_calls(small, call, target.arch.cores)[0]:
            reply = compile_in(compiler, launch, small, target, self.seconds, facts)
            if reply.outcome != "ok":
                reason = self.refusal(launch.function, reply)
                return Numerics(outcome=reply.outcome, where=where, problem=problem, reason=reason)
            if over := self.exceeds(reply, target):
                reason = f"error: OutOfResources: {launch.function}: {over}"
                return Numerics(outcome="error", where=where, problem=problem, reason=reason)
            pieces.append(self.piece(launch, reply))
        return request, pieces

    def run(
        self,
        request: dict[str, Any],
        pieces: list[Any],
        problem: Problem,
        target: Target,
        runner: Worker,
        where: str,
    ) -> Numerics:
        """Run compiled launches in a child; a second asker waits for the first one's answer."""
        # What the code does depends on the chip only by its number of cores.
        parts: list[Any] = [self.task, request | {"target": ""}, target.arch.cores, pieces]
        key = hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()
        with self._lock:
            mine = key not in self._found
            future = self._found.setdefault(key, Future())
        if mine:
            try:
                reply = runner.request(self.task, self.seconds, **request, texts=pieces)
                future.set_result(reply_numerics(reply, where, problem))
            except BaseException as error:
                future.set_exception(error)  # a waiting thread must not wait for ever
                raise
        return msgspec.structs.replace(future.result(), where=where)


def small_problems(plan: Plan) -> list[Problem]:
    """Return the plan's problem scaled down: a batch with a ragged and an empty sequence, and one full sequence alone.

    The last sequence of a batch ends where memory does: only a last tile in use shows an access past it."""
    small = scale_down(plan.problem, plan.specialised[1])
    totals = {
        name: None if getattr(small, name) is None else longest
        for name, longest in (("total_q", small.seq_q), ("total_k", small.seq_k))
    }
    alone = msgspec.structs.replace(small, batch=1, **totals)
    return [small] if alone == small else [small, alone]


def reply_numerics(reply: Reply, where: str, problem: Problem) -> Numerics:
    """Return a runner's reply as Numerics; an access outside an argument's memory fails, whatever the numbers."""
    strays = str(reply.facts.get("strays", ""))
    facts = {name: value for name, value in reply.facts.items() if name != "strays"}
    found = numerics(msgspec.structs.replace(reply, facts=facts), where, problem)
    if not strays:
        return found
    reason = "; ".join(filter(None, (found.reason, f"outside its memory: {strays}")))
    return msgspec.structs.replace(found, outcome="fail", reason=reason)


def _share(seen: Numerics) -> float:
    pairs = ((seen.error, seen.budget), (seen.lse_error, seen.lse_budget))
    return max((error / budget for error, budget in pairs if error is not None and budget), default=0.0)


def executors(backend: str, seconds: float = 0.0, here: Sequence[Target] = ()) -> dict[str, Executor]:
    """Return a backend's executors by name; another package's error is a warning, since other chips still work."""
    asked = Registry.load().backends[backend]
    try:
        return {found.name: found for found in asked.executors(seconds, here)}
    except Exception as error:
        if backend in own_backends():
            raise
        warn_caller(f"backend {backend}: executors() raised {type(error).__name__}: {error}", PluginWarning)
        return {}


def lacks(name: str, target: Target, here: Sequence[Target] = ()) -> str:
    """Return why no executor of this name runs a target's code here, or an empty text."""
    for backend in dict.fromkeys((target.backend, *Registry.load().backends)):
        found = executors(backend, here=here).get(name)
        if found is not None:
            return found.lacks(target)
    return f"nothing runs the code of {target.name} where it is not"


def analyst(target: Target) -> Executor | None:
    """Return the executor that reads the compiler's output for a target, if that is no machine code."""
    return next((one for one in executors(target.backend).values() if one.lowers_to), None)


def execute_code(request: dict[str, Any]) -> dict[str, Any]:
    """Execute a probe's code on this machine's CPU: the other half of Bench.execute. Child process only.

    The compiling child has the toolchain, this one the packages that execute its code. A backend's `code_task` changes
    the argument tensors in place, and answers {"strays": […]} or {"missing": "…"}; a model adds `executed`, the number
    of times that waves ran each instruction. A request, and the answers:

        {"target": "rocm:gfx942", "grid": [1], "outputs": ["out"],
         "arguments": {"out": {"type": "fp32", "values": […]}, "n": 3}, "types": {"out": "*fp32", "n": "i32"},
         "texts": {"amdgcn": "…"}, "facts": {"scratchpad_bytes": 8192, "num_warps": 4}, "triton": "3.6.0",
         "unchecked": ["barriers"]}
        {"outputs": {"out": […]}, "level": "emulated"}   or   {"strays": ["reads k past its end"], "level": …}
        or   {"missing": "no mlir-opt here"}"""
    arguments = {
        name: torch.tensor(value["values"], dtype=_TYPES[value["type"]]) if isinstance(value, dict) else value
        for name, value in request["arguments"].items()
    }
    answer, level = run_code(request, arguments)
    if "missing" in answer:
        return answer
    if not answer["strays"]:
        answer = {"outputs": {name: arguments[name].tolist() for name in request["outputs"]}}
    return answer | {"level": level}


def run_code(request: dict[str, Any], arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Run one kernel's code on argument tensors, which it changes; return the `code_task`'s answer, and its level."""
    own = executors(request["target"].partition(":")[0]).values()
    executor = next((one for one in own if one.code_task), None)
    if executor is None:
        return {"missing": f"nothing here executes code for {request['target']}"}, ""
    return pkgutil.resolve_name(executor.code_task)(request, arguments), executor.level


def main() -> None:
    """Execute the request of standard input, and print the answer: JSON both."""
    json.dump(execute_code(json.load(sys.stdin)), sys.stdout)


# From NumPy 2.4 on a one-element array is no index; Triton's interpreter uses it as one before 3.7 (triton #9171).
FIRST_BAD_NUMPY, FIRST_GOOD_TRITON = Version("2.4"), Version("3.7")
# Ways to load a tile, and the releases of Triton that have them: quirks any-0001 and any-0002. A cell's plan heeds its
# own compiler's quirks, which is not always the Triton whose interpreter runs it.
LOADS = {"block_ptr": ("block pointers", "<3.9"), "descriptor": ("tensor descriptors", ">=3.4")}


def interpreter_missing() -> str:
    toolchain = installed_toolchain()
    if toolchain.distribution != "triton":
        return f"the interpreter needs community Triton, and this Python has {toolchain}"
    numpy = metadata.version("numpy")
    if Version(numpy) >= FIRST_BAD_NUMPY and Version(toolchain.version) < FIRST_GOOD_TRITON:
        limit = f"needs NumPy before {FIRST_BAD_NUMPY}, and this Python has {numpy} (hint: {install_extra('triton')})"
        return f"the interpreter of {toolchain} {limit}"
    return ""


def lacking(load: str, toolchain: Toolchain) -> str:
    name, releases = LOADS.get(load, ("", ""))
    return name if name and toolchain.within("triton", releases) is False else ""


class Interpreter:
    """Interpreted numerics, each distinct specialisation once, for all cells and threads."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.missing = interpreter_missing()
        self._found: dict[bytes, Future[Numerics]] = {}
        self._lock = threading.Lock()

    def check(self, plan: Plan, worker: Worker) -> Numerics:
        """Return the numerics of a core plan's kernels; a second thread waits for the first one's result."""
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
