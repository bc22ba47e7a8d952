"""Shared by the tests: random calls with NaN in their padding, running a core plan, and the budget for its errors."""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from packaging.version import Version

from portattn.call import Call
from portattn.core import CORES
from portattn.lowering import Launch, Lowering
from portattn.planner import Plan
from portattn.problem import Problem
from portattn.reference.oracle import allowed, oracle

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TILE = 16  # the smallest tile: small problems still have several
LSE_TINY = 4e-6  # an LSE is float32; values up to 16 have a spacing of 1e-6


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
    """A small problem: two sequences, two query heads, three key tiles with a ragged end."""
    small = {"batch": 2, "heads_q": 2, "heads_k": 2, "seq_q": 19, "seq_k": 37, "head_dim": 16, "dtype": "fp32"}
    return Problem(**(small | {"return_lse": True} | fields))


def random_call(
    problem: Problem, seed: int = 0, *, device: str = "cpu", scale: float | None = None, strides: str = "plain"
) -> Call:
    """Normal random q, k and v, random lengths and left paddings where the problem has them, NaN in all padding.

    strides   plain; spare (rows one element longer than wide, a base off by one element); transposed (the head
              dimension is not the contiguous one); sliced (every second row of a larger tensor); expanded (k and v
              share one batch, stride 0)
    """
    generator = torch.Generator().manual_seed(seed)
    scale = problem.head_dim**-0.5 if scale is None else scale
    p = msgspec.structs.replace(problem, negative_scale=scale < 0.0)
    dtype = DTYPES[p.dtype]

    def bounds(size: int, sized: bool, padded: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        pad = torch.randint(0, size // 2 + 1, (p.batch,), generator=generator, dtype=torch.int32)
        room = size - pad if padded else torch.full_like(pad, size)
        length = (torch.rand(p.batch, generator=generator) * (room + 1)).int()
        return length if sized else None, pad if padded else None

    def tensor(
        heads: int, seq: int, dim: int, length: torch.Tensor | None, pad: torch.Tensor | None, shared: bool
    ) -> torch.Tensor:
        values = torch.randn(p.batch, heads, seq, dim, generator=generator).to(dtype)
        first = torch.zeros(p.batch, dtype=torch.int32) if pad is None else pad
        end = torch.full_like(first, seq) if length is None else first + length
        row = torch.arange(seq)[None]
        outside = (row < first[:, None]) | (row >= end[:, None])
        values.masked_fill_(outside[:, None, :, None], float("nan"))
        return _laid_out(values, p.layout, strides, shared, device)

    seqlens_q, leftpad_q = bounds(p.seq_q, p.seqlens_q, p.leftpad_q)
    seqlens_k, leftpad_k = bounds(p.seq_k, p.seqlens_k, p.leftpad_k)
    call = Call(
        problem=p,
        q=tensor(p.heads_q, p.seq_q, p.head_dim, seqlens_q, leftpad_q, False),
        k=tensor(p.heads_k, p.seq_k, p.head_dim, seqlens_k, leftpad_k, strides == "expanded"),
        v=tensor(p.heads_k, p.seq_k, p.head_dim_v, seqlens_k, leftpad_k, strides == "expanded"),
        scale=scale,
    )
    given = {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "leftpad_q": leftpad_q, "leftpad_k": leftpad_k}
    for name, value in given.items():
        setattr(call, name, None if value is None else value.to(device))
    return call


def _laid_out(values: torch.Tensor, layout: str, strides: str, shared: bool, device: str) -> torch.Tensor:
    """The values as a (B, H, S, D) view with the strides asked for; memory between them holds NaN."""
    b, h, s, d = values.shape
    if shared:
        return values[:1].to(device).expand(b, h, s, d)

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=values.dtype, device=device)

    if strides == "spare":
        view = empty(b * h * s * (d + 1) + 1)[1:].view(b, h, s, d + 1)[..., :d]
    elif strides == "transposed":
        view = empty(b, h, d, s).transpose(2, 3)
    elif strides == "sliced":
        view = empty(b, h, 2 * s, d)[:, :, ::2]
    elif layout == "bshd":
        view = empty(b, s, h, d).transpose(1, 2)
    else:
        view = empty(b, h, s, d)
    view.copy_(values)
    return view


def core_plan(
    device: Device, p: Problem, lowering: dict[str, str] | None = None, launch: dict[str, int] | None = None
) -> Plan:
    """The plan that runs the core kernel with exactly these choices and small tiles."""
    return Plan(
        problem=p,
        target=device.target,
        toolchain="as installed",
        requested=device.path,
        path=device.path,
        kernel=CORES[p.op].name,
        lowering=Lowering(**(lowering or {})),
        launch=Launch().changed({"block_m": TILE, "block_n": TILE, "num_stages": 1} | (launch or {})),
    )


def run_core(
    device: Device,
    call: Call,
    lowering: dict[str, str] | None = None,
    launch: dict[str, int] | None = None,
    cores: int = 3,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the core kernel on a call into outputs (and partial results) that held NaN before."""
    from portattn import launch as launching

    with poisoned():
        return launching.run_core(core_plan(device, call.problem, lowering, launch), call, cores)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block torch fills new memory with NaN (largest value for integers): what is left unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def on_cpu(call: Call) -> Call:
    names = ("q", "k", "v", "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")
    return replace(call, **{n: t.detach().cpu() for n in names if (t := getattr(call, n)) is not None})


def same_dtype(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition in torch, each step in the call's dtype; and the LSE of float32 scores."""
    keep = allowed(call)[:, None]
    group = call.problem.group
    used, rows = keep.any(dim=2)[..., None], keep.any(dim=3)[..., None]
    q = call.q.masked_fill(~rows, 0.0)
    k = call.k.repeat_interleave(group, dim=1).masked_fill(~used, 0.0)
    v = call.v.repeat_interleave(group, dim=1).masked_fill(~used, 0.0)
    scores = (q @ k.transpose(-1, -2) * call.scale).masked_fill(~keep, float("-inf"))
    probabilities = torch.softmax(scores, dim=-1).masked_fill(~rows, 0.0)
    exact = (q.float() @ k.float().transpose(-1, -2) * call.scale).masked_fill(~keep, float("-inf"))
    return probabilities @ v, torch.logsumexp(exact, dim=-1)


def assert_right(call: Call, out: torch.Tensor, lse: torch.Tensor | None, extra: float = 0.0) -> None:
    """out and lse against the float64 oracle: max|ours − ref64| ≤ 2·max|same-dtype torch − ref64| + tiny.

    `tiny` is one unit in the last place of the largest value in the output's dtype, and four in float32, in which the
    kernels compute. `extra` is added to both budgets
    (for products that are deliberately less exact than the dtype).
    """
    call = on_cpu(call)
    p = call.problem
    expected, expected_lse = oracle(call)
    same, same_lse = same_dtype(call)
    assert out.shape == expected.shape
    assert out.dtype == DTYPES[p.dtype]
    out = out.detach().cpu()
    assert torch.isfinite(out).all(), f"{int((~torch.isfinite(out)).sum())} of {out.numel()} elements are not finite"
    tiny = (torch.finfo(out.dtype).eps + 4 * torch.finfo(torch.float32).eps) * largest(expected)
    error, theirs = largest(out.double() - expected), largest(same.double() - expected)
    assert error <= 2 * theirs + tiny + extra, f"error {error:.3g}, same-dtype torch {theirs:.3g}, tiny {tiny:.3g}"
    empty = torch.isneginf(expected_lse)
    assert not out[empty].any(), "a row with nothing to attend must be 0"
    if not p.return_lse:
        assert lse is None
        return
    assert lse is not None
    assert lse.shape == expected_lse.shape
    assert lse.dtype == torch.float32
    lse = lse.detach().cpu()
    assert not lse.isnan().any()
    assert torch.equal(torch.isneginf(lse), empty)
    error, theirs = largest(lse.double() - expected_lse), largest(same_lse.double() - expected_lse)
    assert error <= 2 * theirs + LSE_TINY + extra, f"LSE error {error:.3g}, float32 torch {theirs:.3g}"


def largest(values: torch.Tensor) -> float:
    """Largest magnitude of the finite elements; 0 where there are none."""
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 0.0


# What a planted compiler does once it has announced the stage `ttgir`; `say` sends a line of the protocol.
BEHAVIOURS = {
    "ok": 'say({"ok": True, "facts": {"local_memory": 1024, "num_warps": 4, "spills": 0}})',
    "error": 'say({"ok": False, "stage": "ttgir", "kind": "RuntimeError", "message": "PassManager::run failed\\nmore",'
    ' "log": "Traceback"})',
    "crash": 'sys.stderr.write("python: TypeConverter.cpp:42: Assertion `!repl` failed.\\n"); sys.stderr.flush(); '
    "os.kill(os.getpid(), signal.SIGABRT)",
    "exit": "os._exit(3)",
    "hang": "time.sleep(60)",
    "too large": 'say({"ok": True, "facts": {"local_memory": 10**9, "num_warps": 4}})',
    "no json": 'print("Segmentation fault?", flush=True)',
    "closes its answers": "os.close(1); time.sleep(60)",
}


def fake_python(folder: Path, behaviour: str) -> tuple[Path, Path]:
    """A program that stands in for the Python of a worker, and the file in which it notes each request."""
    script, requests = folder / f"compiler-{behaviour.replace(' ', '-')}", folder / "requests.jsonl"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, os, resource, signal, sys, time\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "def say(message):\n"
        "    print(json.dumps(message), flush=True)\n"
        "for line in sys.stdin:\n"
        f"    open({str(requests)!r}, 'a').write(line)\n"
        "    say({'stage': 'ttgir'})\n"
        f"    {BEHAVIOURS[behaviour]}\n"
    )
    script.chmod(0o755)
    requests.touch()
    return script, requests
