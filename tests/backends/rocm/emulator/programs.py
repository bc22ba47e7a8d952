"""Kernels in Triton's language for the tests, and their runs in the model. A program by itself:

    python programs.py ARCH [NAME …]      runs them and prints one JSON line each: name, error, budget, seconds

In a process of its own because the test session sets TRITON_INTERPRET, which kernels must be defined without."""

# ruff: noqa: E741 - kernels name tensors and running sums as the literature does
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

NAN = float("nan")


@triton.jit
def add(X, Y, O, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(O + i, tl.load(X + i, i < N) + tl.load(Y + i, i < N), i < N)


@triton.jit
def softmax(X, O, S, N, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * S + i, i < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(O + row * S + i, (e / tl.sum(e, 0)).to(O.dtype.element_ty), i < N)


@triton.jit
def dot(A, B, C, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a, b = tl.load(A + m[:, None] * K + k[None, :]), tl.load(B + k[:, None] * N + n[None, :])
    tl.store(C + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision=P, out_dtype=T))


@triton.jit
def sort(X, O, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(O + i, tl.sort(tl.load(X + i)))


@triton.jit
def cumsum(X, O, B: tl.constexpr, R: tl.constexpr):
    p = tl.arange(0, R)[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(O + p, tl.cumsum(tl.load(X + p), 1))


@triton.jit
def histogram(X, O, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(O + tl.load(X + i, i < N, other=0), 1, i < N)


@triton.jit
def spin(L, O):
    while tl.atomic_cas(L, 0, 1) == 1:
        pass
    tl.store(O, tl.load(O) + 1)
    tl.atomic_xchg(L, 0)


Result = list[tuple[torch.Tensor, torch.Tensor, float]]  # ours, float64 reference, budget


def run_add(dtype: torch.dtype) -> Result:
    x, y = (torch.randn(1000).mul(10).to(dtype) for _ in range(2))
    o = torch.full((1000,), 77).to(dtype)
    add[(2,)](x, y, o, 1000, B=512)
    return [(o, x + y, 0.0)]


def run_softmax(dtype: torch.dtype) -> Result:
    x = torch.randn(3, 1000).to(dtype)
    o = torch.full_like(x, NAN)
    softmax[(3,)](x, o, 1000, 1000, B=1024)
    reference = torch.softmax(x.double(), 1)
    return [(o, reference, 2 * (torch.softmax(x, 1) - reference).abs().max().item() + 1e-8)]


def run_dot(dtype: torch.dtype, size: int = 64, nonkdim: int = 0, precision: str = "ieee") -> Result:
    if dtype == torch.int8:
        a, b = (torch.randint(-128, 128, (size, 64), dtype=dtype) for _ in range(2))
        o, kind, budget = torch.full((size, size), 7, dtype=torch.int32), tl.int32, 0.0
    else:
        a, b = (torch.randn(size, 64).to(dtype) for _ in range(2))
        o, kind = torch.full((size, size), NAN), tl.float32
        budget = 0.05 if precision == "tf32" else 2e-5
    b = b.T.contiguous()
    options = {"matrix_instr_nonkdim": nonkdim} if nonkdim else {}
    dot[(1,)](a, b, o, M=size, N=size, K=64, T=kind, P=precision, **options)
    return [(o, a.double() @ b.double(), budget)]


def run_sort(dtype: torch.dtype) -> Result:
    x = torch.randn(256).mul(1000).to(dtype)
    o = torch.zeros_like(x)
    sort[(1,)](x, o, B=256)
    return [(o, x.sort()[0], 0.0)]


def run_cumsum(dtype: torch.dtype) -> Result:
    x = torch.randint(-9, 9, (8, 128)).to(dtype)
    o = torch.zeros_like(x)
    cumsum[(1,)](x, o, B=128, R=8)
    return [(o, x.cumsum(1), 0.0)]


def run_atomics() -> Result:
    x, o = torch.randint(0, 10, (500,), dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    histogram[(2,)](x, o, 500, B=256)
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    spin[(5,)](lock, count)
    return [(o, torch.bincount(x, minlength=10), 0.0), (count, torch.tensor([5]), 0.0)]


def programs(arch: str) -> dict[str, Callable[[], Result]]:
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    found: dict[str, Callable[[], Result]] = {
        "add fp32": lambda: run_add(single), "add bf16": lambda: run_add(brain),
        "add int64": lambda: run_add(torch.int64),
        "softmax fp32": lambda: run_softmax(single), "softmax fp16": lambda: run_softmax(half),
        "dot fp16": lambda: run_dot(half), "dot fp16 16": lambda: run_dot(half, 32, 16),
        "dot bf16": lambda: run_dot(brain), "dot fp32": lambda: run_dot(single),
        "dot int8": lambda: run_dot(torch.int8),
        "sort int32": lambda: run_sort(torch.int32), "sort fp16": lambda: run_sort(half),
        "cumsum fp32": lambda: run_cumsum(single), "cumsum int64": lambda: run_cumsum(torch.int64),
        "atomics": run_atomics,
    }  # fmt: skip
    if arch == "gfx942":
        found["dot xf32"] = lambda: run_dot(single, precision="tf32")
        found["dot fp8 fnuz"] = lambda: run_dot(torch.float8_e4m3fnuz)
        found["dot bf8 fnuz"] = lambda: run_dot(torch.float8_e5m2fnuz)
    if arch in ("gfx950", "gfx1201"):
        found["dot fp8"] = lambda: run_dot(torch.float8_e4m3fn)
        found["dot bf8"] = lambda: run_dot(torch.float8_e5m2)
    return found


def main(arch: str, names: list[str]) -> None:
    import portattn.backends.rocm.emulator
    from portattn.backends.rocm.emulator.amdgpu.triton_driver import emulate

    assert portattn.backends.rocm.emulator.amdgpu.Program
    torch.set_num_threads(1)
    with emulate(arch) as gpu:
        for name, run in programs(arch).items():
            if names and name not in names:
                continue
            torch.manual_seed(0)
            begin, line = time.perf_counter(), {"name": name}
            try:
                worst = [((ours.double() - ref.double()).abs().max().item(), budget) for ours, ref, budget in run()]
                line["results"] = [[error if error == error else "nan", budget] for error, budget in worst]
                line["executed"] = sorted({m for launch in gpu.launches for m in launch.report.coverage})
            except Exception as error:  # noqa: BLE001 - the test that reads this line fails with it
                line["failed"] = f"{type(error).__name__}: {error}"
            gpu.launches.clear()
            line["seconds"] = round(time.perf_counter() - begin, 2)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
