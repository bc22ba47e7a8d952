"""What the driver must get right around a launch, as functions that assert. A program by itself:

    python driver_cases.py [NAME …]      runs them and prints one JSON line each: name, error

In a process of its own because the test session sets TRITON_INTERPRET, which kernels must be defined without; and so
that another Triton can stand first in its path."""

# ruff: noqa: E741, PT017 - kernels name tensors as the literature does; this is no test module, and runs without pytest
from __future__ import annotations

import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from packaging.version import Version
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

import portattn.backends.rocm.emulator
from portattn.backends.rocm.emulator.amdgpu import (
    BadLaunch,
    Checks,
    EmulationError,
    GlobalRace,
    OutOfBounds,
    StepLimit,
    WrongArch,
)

NAN = float("nan")
SLOT = "_active" if hasattr(driver, "_active") else "active"
emulated = portattn.backends.rocm.emulator.amdgpu


@triton.jit
def scale(X, O, N, F, SX, SO, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(O + i * SO, tl.load(X + i * SX, i < N) * F, i < N)


@triton.jit
def optional(X, M, O, N, B: tl.constexpr, PLUS: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(X + i, i < N)
    if M is not None:
        x *= tl.load(M + i, i < N)
    if KIND == "minus":
        x = -x
    tl.store(O + i, x + PLUS, i < N)


@triton.autotune([triton.Config({"B": 64}), triton.Config({"B": 256}, num_warps=8)], key=["N"])
@triton.heuristics({"EVEN": lambda arguments: arguments["N"] % arguments["B"] == 0})
@triton.jit
def tuned(X, O, N, B: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if EVEN:
        tl.store(O + i, tl.load(X + i) + 1)
    else:
        tl.store(O + i, tl.load(X + i, i < N) + 1, i < N)


@triton.jit
def forever(X):
    while tl.atomic_add(X, 0) == 0:
        pass


@triton.jit
def reverse(X, O, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(O + i, tl.load(X - i, i < N), i < N)


@triton.jit
def shared(X, O, B: tl.constexpr):
    tl.store(O, tl.program_id(0))


def scaled(x: torch.Tensor, out: torch.Tensor, factor: float = 2.0) -> None:
    scale[(triton.cdiv(len(x), 64),)](x, out, len(x), factor, x.stride(0), out.stride(0), B=64)


def right(factor: float = 2.0, n: int = 200) -> None:
    x = torch.randn(n)
    out = torch.full_like(x, NAN)
    scaled(x, out, factor)
    assert torch.equal(out, x * factor)


def untouched() -> tuple[object, object]:
    """What a block must leave as it was."""
    return vars(driver).get(SLOT, getattr(driver, SLOT)), CompiledKernel._init_handles


def chips_one_after_the_other() -> None:
    for arch, store in (("gfx942", "dword"), ("gfx1100", "b32"), ("gfx942", "dword")):
        with emulated(arch) as gpu:
            right()
        (launch,) = gpu.launches
        assert launch.name == "scale"
        assert any(name.endswith(f"store_{store}") for name in launch.report.coverage), (arch, launch.report.coverage)


def nested() -> None:
    before = untouched()
    with emulated("gfx942") as outer:
        right()
        with emulated("gfx1201") as inner:
            right()
            right()
        right()
    assert [len(gpu.launches) for gpu in (outer, inner)] == [2, 2]
    assert untouched() == before


def launches_again_and_again() -> None:
    with emulated("gfx950") as gpu:
        for n in (1, 63, 64, 65, 1000, 3):
            right(n=n)
        x = torch.ones(100)
        for _ in range(3):
            scaled(x, x, 2.0)  # in place, each on the result before
    assert torch.equal(x, torch.full((100,), 8.0))
    assert len(gpu.launches) == 9


def autotune_and_heuristics() -> None:
    with emulated("gfx90a") as gpu:
        for n in (512, 300):
            x = torch.randn(n)
            out = torch.full_like(x, NAN)
            tuned[lambda meta, n=n: (triton.cdiv(n, meta["B"]),)](x, out, n)
            assert torch.equal(out, x + 1)
    assert {launch.grid for launch in gpu.launches} >= {(8, 1, 1), (2, 1, 1), (5, 1, 1)}, "both configurations ran"


def views() -> None:
    with emulated("gfx1100"):
        storage = torch.randn(300)
        before = storage.clone()
        out = torch.full((600,), NAN)
        scaled(storage[20:280:2], out[5:][: 3 * 130 : 3])
        assert torch.equal(out[5:][: 3 * 130 : 3], before[20:280:2] * 2)
        assert torch.equal(storage, before)
        assert out.isnan().sum() == 600 - 130, "nothing beside the view was written"
        matrix = torch.randn(30, 40)
        column = torch.full((30,), NAN)
        scaled(matrix.T[7], column)
        assert torch.equal(column, matrix[:, 7] * 2)
        expanded = torch.tensor([3.0]).expand(50)
        scaled(expanded, column[:0])  # nothing to write: N is 50, so that it must not be taken for a zero-size launch


def views_() -> None:
    """`views`, whose last line must be an error."""
    try:
        views()
    except OutOfBounds:
        return
    raise AssertionError("50 elements stored into none")


def negative_strides() -> None:
    """Since 3.6 Triton takes 32-bit offsets to be positive, for tensors below 2 GiB: a chip would read zeros."""
    x, out = torch.arange(100.0), torch.full((100,), NAN)
    with emulated("gfx942"):
        try:
            scale[(2,)](x[99:], out, 100, 1.0, -1, 1, B=64)
        except OutOfBounds as error:
            assert "a buffer offset of -4 " in str(error)
            assert Version(triton.__version__) >= Version("3.6")
        else:
            assert torch.equal(out, x.flip(0))
        os.environ["AMDGCN_USE_BUFFER_OPS"] = "0"
        try:
            out.fill_(NAN)
            reverse[(2,)](x[99:], out, 100, B=64)
        finally:
            del os.environ["AMDGCN_USE_BUFFER_OPS"]
    assert torch.equal(out, x.flip(0))


def zero_size() -> None:
    empty = torch.empty(0)
    with emulated("gfx1201") as gpu:
        scale[(1,)](empty, empty, 0, 1.0, 1, 1, B=64)
        scale[(0,)](empty, empty, 0, 1.0, 1, 1, B=64)  # Triton launches nothing
    assert len(gpu.launches) == 1


def overlapping_storages() -> None:
    array = np.arange(100, dtype=np.float32)
    low, high = torch.from_numpy(array[:60]), torch.from_numpy(array[40:])
    with emulated("gfx942"):
        scaled(low, high[:60])
    assert np.array_equal(array[40:100], np.arange(60) * 2)
    assert np.array_equal(array[:40], np.arange(40))


def optional_arguments() -> None:
    x, m = torch.randn(50), torch.randn(50)
    with emulated("gfx942"):
        for mask, plus, kind in ((None, 1, "plus"), (m, 2, "minus"), (None, 0, "minus")):
            out = torch.full_like(x, NAN)
            optional[(1,)](x, mask, out, 50, B=64, PLUS=plus, KIND=kind)
            expected = (x if mask is None else x * mask) * (-1 if kind == "minus" else 1) + plus
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)  # some versions fuse product and sum


def errors_leave_triton_as_it_was() -> None:
    before = untouched()
    x = torch.zeros(100)
    for wrong, kind in (
        (lambda: scaled(x, torch.zeros(10)), OutOfBounds),
        (lambda: scale[(1,)](x.to("meta"), x, 100, 1.0, 1, 1, B=64), BadLaunch),
        (lambda: right(n="many"), TypeError),  # type: ignore[arg-type]
        (lambda: forever[(1,)](torch.zeros(1, dtype=torch.int32)), StepLimit),
    ):
        try:
            with emulated("gfx942", step_limit=10_000):
                wrong()
        except kind:
            assert untouched() == before, kind
        else:
            raise AssertionError(f"no {kind.__name__}")
    try:
        emulated("gfx906").__enter__()
    except WrongArch as error:
        assert "gfx942" in str(error)
    assert untouched() == before
    with emulated("gfx942"):
        right()  # the kernel that failed runs


def checks_of_a_block() -> None:
    out = torch.zeros(10)
    with emulated("gfx942", checks=Checks(stop=False)) as gpu:
        scaled(torch.ones(100), out)
        assert [type(found) for found in gpu.launches[-1].report.findings] == [OutOfBounds]
        scaled(torch.ones(10), out)
        assert gpu.launches[-1].report.findings == [], "findings are those of one launch"
        gpu.checks = Checks(groups=True)
        shared[(1,)](out, torch.zeros(1, dtype=torch.int32), B=64)
        try:
            shared[(2,)](out, torch.zeros(1, dtype=torch.int32), B=64)
        except GlobalRace as error:
            assert "driver_cases.py" in str(error)
        else:
            raise AssertionError("two work-groups stored different values at one place")


def threads_launch() -> None:
    """Eight threads, one block: each into its own part of one tensor."""
    out = torch.full((8, 300), NAN)
    x = torch.randn(8, 300)
    failed: list[str] = []

    def work(n: int) -> None:
        try:
            scaled(x[n], out[n], float(n))
            optional[(1,)](x[n], None, x[n], 300, B=512, PLUS=n, KIND="plus")
        except Exception:  # noqa: BLE001 - told to the test's thread
            failed.append(traceback.format_exc())

    before = x.clone()
    with emulated("gfx942") as gpu:
        workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not failed, failed[0]
    assert len(gpu.launches) == 16
    factors = torch.arange(8.0)[:, None]
    assert torch.equal(out, before * factors)
    assert torch.equal(x, before + factors)


def threads_take_turns() -> None:
    seen: list[object] = []

    def enter() -> None:
        try:
            with emulated("gfx1100"):
                right()
            seen.append("ran")
        except EmulationError as error:
            seen.append(str(error))

    with emulated("gfx942"):
        worker = threading.Thread(target=enter)
        worker.start()
        worker.join()
        right()
    worker = threading.Thread(target=enter)
    worker.start()
    worker.join()
    assert "another thread" in str(seen[0])
    assert seen[1] == "ran"


def interpreted_kernels_are_told() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with emulated("gfx942"):
                pass
    finally:
        del os.environ["TRITON_INTERPRET"]
    assert any("nothing was emulated" in str(warning.message) for warning in told)


CASES: dict[str, Callable[[], None]] = {
    case.__name__.rstrip("_"): case
    for case in (
        chips_one_after_the_other, nested, launches_again_and_again, autotune_and_heuristics, views_, negative_strides,
        zero_size, overlapping_storages, optional_arguments, errors_leave_triton_as_it_was, checks_of_a_block,
        threads_launch, threads_take_turns, interpreted_kernels_are_told,
    )
}  # fmt: skip


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        if names and name not in names:
            continue
        line = {"name": name, "triton": triton.__version__}
        torch.manual_seed(0)
        try:
            case()
        except Exception:  # noqa: BLE001 - the test that reads this line fails with it
            line["failed"] = traceback.format_exc()
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
