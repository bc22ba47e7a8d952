"""Shared by the tests: random calls with NaN in their padding, running a core plan, and what a right result is."""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import importlib.util
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from places import tables

from portattn import config
from portattn.launch import native
from portattn.planning.kernel_specs import CORES
from portattn.schema.call import Call
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import tolerance
from portattn.testing.tolerance import DTYPES, largest, random_call
from portattn.worker.client import Worker

TABLES = tables(__file__)

__all__ = ["DTYPES", "largest", "random_call"]  # the library's own, for the tests beside the names below
TILE = 16  # the smallest tile: small problems still have several


def _triton() -> Version | None:
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return Version(metadata.version("triton"))
    except metadata.PackageNotFoundError:  # a fork, which owns the folder under a name of its own
        return Version("0")


TRITON = _triton()


def no_interpreter() -> str:
    """Why Triton's interpreter cannot run here; empty when it can."""
    if TRITON is None:
        return "Triton is not installed"
    numpy = Version(metadata.version("numpy")) if importlib.util.find_spec("numpy") else None
    if numpy is None:
        return "Triton's interpreter needs NumPy, which is not installed"
    if numpy >= Version("2.4") and Version("3.7") > TRITON:
        return f"Triton {TRITON}'s interpreter needs numpy<2.4, and this is {numpy} (triton issue 9171)"
    return ""


@contextmanager
def compiler_of(release: str) -> Iterator[Worker]:
    """A Worker of a Triton such as triton==3.9.0: this Python's, or the lab's. Skips the test where neither has it."""
    from portattn.tools import lab  # whose dependencies an engine's environment has not

    own = release == str(installed_toolchain())
    if not own and lab.find(release) is None:
        pytest.skip(f"the lab has no {release}: `portattn lab create {release}` makes it")
    with Worker() if own else lab.worker(release) as worker:
        yield worker


def native_module() -> Any:
    """native.c's functions. Skips the test where they cannot be built."""
    module, why = native.load(config.current().cache_dir)
    if module is None:
        pytest.skip(why)
    return module


@contextmanager
def overflow_raises() -> Iterator[None]:
    """Inside the block the interpreter raises where an int32 sum, difference or product of a kernel overflows."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    before, builder.options = builder.options, interpreter.InterpreterOptions(debug=True)
    try:
        yield
    finally:
        builder.options = before


@dataclass(frozen=True)
class Device:
    """Where kernels run: torch's device name, and the path that a plan calls it."""

    name: str
    path: str

    @property
    def target(self) -> str:
        return "cpu:generic" if self.name == "cpu" else "cuda:sm_90"


CPU = Device("cpu", "reference")


def problem(**fields: Any) -> Problem:
    small = {"batch": 2, "heads_q": 2, "heads_k": 2, "seq_q": 19, "seq_k": 37, "head_dim": 16, "dtype": "fp32"}
    return Problem(**(small | {"return_lse": True} | fields))


def key_tile(device: Device, p: Problem) -> int:
    """Keys of the small tiles of core_plan: on a chip, at least as many as its compiler multiplies rightly."""
    return 32 if device.name == "cuda" and p.kv_format in ("int4", "nvfp4") else TILE  # quirk cuda-0030


@functools.lru_cache(maxsize=1)
def lacking() -> frozenset[str]:
    """Ways to load a tile that this Triton does not have. From 3.9 on make_block_ptr is there, and only raises."""
    import triton.language as tl

    known = {"block_ptr": "make_block_ptr", "descriptor": "make_tensor_descriptor"}
    gone = {"block_ptr"} if TRITON is not None and Version("3.9") <= TRITON else set()  # quirk any-0001
    return frozenset(gone | {load for load, name in known.items() if not hasattr(tl, name)})


def core_plan(
    device: Device, p: Problem, lowering: dict[str, str] | None = None, launch: dict[str, int] | None = None
) -> Plan:
    """The plan that runs the core kernel with exactly these choices and small tiles. How it reads pages is what fits
    the tiles, or must be: nothing else stops a tile that reaches beyond its page. A test that asks for loads that this
    Triton does not have is skipped."""
    small = Launch().changed({"block_m": TILE, "block_n": key_tile(device, p), "num_stages": 1} | (launch or {}))
    fitting = "flat_masked" if p.has_lists or p.page_size % small.block_n else "per_page"
    chosen = Lowering(**({"page_loop": fitting} | (lowering or {})))
    if chosen.load in lacking():
        pytest.skip(f"this Triton has no {chosen.load} loads")
    if "page_loop" in CORES[p.op].choices:
        why = [why for choice, _, why in CORES[p.op].limits(p, chosen, small) if choice == "page_loop"]
        assert not why, f"page_loop = {chosen.page_loop}: {why[0]}"
    return Plan(
        problem=p, target=device.target, toolchain="as installed", requested=device.path, path=device.path,
        kernel=CORES[p.op].name, lowering=chosen, launch=small,
    )  # fmt: skip


def run_core(
    device: Device, call: Call, lowering: dict[str, str] | None = None, launch: dict[str, int] | None = None,
    cores: int = 3,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    from portattn import launch as launching

    with poisoned():
        return launching.run_core(core_plan(device, call.problem, lowering, launch), call, cores)


poisoned = tolerance.nan_filled_memory


def assert_right(call: Call, out: torch.Tensor, lse: torch.Tensor | None, extra: float = 0.0) -> None:
    """out and LSE of any op, shaped as the call's own, against the float64 oracle within the library's budget. The
    budget is that of portattn/testing/tolerance.py; `extra` is added to it, for products that are deliberately less
    exact than the dtype."""
    p = call.problem
    assert out.shape == call.new_out().shape
    assert out.transpose(1, 2).is_contiguous() if p.packed or p.layout == "bshd" else out.is_contiguous()
    assert (out.dtype, lse is not None) == (DTYPES[p.dtype], p.return_lse)
    facts = tolerance.judge(call, out, lse)
    assert not facts["wrong"], f"{facts['wrong']} elements are NaN or infinite where they must not be, or the reverse"
    assert facts["error"] <= facts["budget"] + extra, f"error {facts['error']:.3g}, budget {facts['budget']:.3g}"
    if lse is not None:
        assert lse.shape == call.new_lse().shape
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        error, budget = facts["lse_error"], facts["lse_budget"]
        assert error <= budget + extra, f"LSE error {error:.3g}, budget {budget:.3g}"


# What a planted compiler does once it has announced the stage `ttgir`; `say` sends a line of the protocol.
BEHAVIOURS = TABLES["behaviours"]


class PlantedWorker:
    """In the place of a Worker: a context whose requests a subclass answers."""

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> PlantedWorker:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def fake_python(folder: Path, behaviour: str) -> tuple[Path, Path]:
    """A program that stands in for the Python of a worker, and the file in which it notes each request."""
    script, requests = folder / f"compiler-{behaviour.replace(' ', '-')}", folder / "requests.jsonl"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, os, resource, signal, sys, time\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "def say(message):\n"
        "    sent = {'id': number, 'version': 2, **message} if 'ok' in message else {'id': number, **message}\n"
        "    print(json.dumps(sent), flush=True)\n"
        "def first():\n"
        f"    return len(open({str(requests)!r}).readlines()) == 1\n"
        "for line in sys.stdin:\n"
        f"    open({str(requests)!r}, 'a').write(line)\n"
        "    number = json.loads(line)['id']\n"
        "    say({'stage': 'ttgir'})\n"
        f"    {BEHAVIOURS[behaviour]}\n"
    )
    script.chmod(0o755)
    requests.touch()
    return script, requests


def interruptible() -> None:
    """In a child before its program starts: an interrupt ends it. A suite that runs in the background of a shell, as a
    CI's may, ignores interrupts, and its children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
