"""Running one plan's path on a small random problem and comparing it with the float64 oracle. Child process only.

Under TRITON_INTERPRET=1 the core kernels run as numpy (path "interpreter"); otherwise on this machine's device. Needs
portattn itself in the child's Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch

from portattn.call import Call
from portattn.launch import run_core
from portattn.lowering import Launch, Lowering
from portattn.planner import Plan
from portattn.problem import Problem
from portattn.reference import blockwise
from portattn.reference.oracle import allowed, oracle
from portattn.registry import Registry

TORCH_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
BUDGET_FACTOR = 2.0  # our error may be twice that of the same mathematics in torch, in the same dtype
# Bits of an fp32 operand's fraction that a product on a device uses; the interpreter and `ieee` use all 23. The two
# tf32 parts of an operand hold 10 bits each, and one more by the second part's sign.
FRACTION_BITS = {"tf32": 10, "hf32": 10, "tf32x3": 21}
LSE_TINY = 1e-5  # an LSE is computed in float32, and a few units in the last place of values around 10 are this


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Run `path` of `target` on random tensors: {"facts": {error, budget, wrong, lse_error, lse_budget}}.

    error, budget  largest |ours − oracle| over the finite elements of out, and what it may be:
                   2 · max|same-dtype torch − oracle| + half a unit in the last place of the largest value
    wrong          elements of out and LSE that are NaN or infinite where the oracle is not, or finite where it is

    The request holds problem, path, target and device, for a core path also kernel, lowering and launch, and a seed.
    Outputs and partial results start as NaN, and so does all padding, which no result may depend on. Raises what
    the kernels raise.
    """
    problem = msgspec.convert(request["problem"], Problem)
    call = random_call(problem, request["device"], request.get("seed", 0))
    target = Registry.load().target(request["target"])
    with nan_filled_memory(), torch.no_grad():
        if request["path"] == "reference":
            out, lse = blockwise.run(call)
        elif "lowering" in request:
            plan = Plan(
                problem=problem,
                target=target.name,
                toolchain=str(target.toolchain),
                requested=request["path"],
                path=request["path"],
                kernel=request["kernel"],
                lowering=msgspec.convert(request["lowering"], Lowering),
                launch=msgspec.convert(request["launch"], Launch),
                env=request.get("env", {}),
            )
            out, lse = run_core(plan, call, target.arch.cores)
        else:
            vendors = Registry.load().backends[target.backend].vendor
            out, lse = next(v for v in vendors if v.name == request["path"]).run(call)
    out, lse = out.cpu(), None if lse is None else lse.cpu()
    precision = request.get("lowering", {}).get("dot_precision", "ieee") if request["path"] == "triton" else "ieee"
    return {"facts": judge(_on_cpu(call), out, lse, precision)}


def judge(call: Call, out: torch.Tensor, lse: torch.Tensor | None, precision: str = "ieee") -> dict[str, int | float]:
    """Errors and budgets of a result; everything on the CPU. precision: of fp32 products (Lowering.dot_precision)."""
    expected, expected_lse = oracle(call)
    same, same_lse = same_dtype(call, precision)
    tiny = 0.5 * torch.finfo(out.dtype).eps * _largest(expected)
    facts: dict[str, int | float] = {
        "error": _largest(out.double() - expected),
        "budget": BUDGET_FACTOR * _largest(same.double() - expected) + tiny,
        "wrong": int((~torch.isfinite(out)).sum()),
    }
    if lse is not None:
        facts["lse_error"] = _largest(lse.double() - expected_lse)
        facts["lse_budget"] = BUDGET_FACTOR * _largest(same_lse.double() - expected_lse) + LSE_TINY
        facts["wrong"] += int((torch.isneginf(lse) != torch.isneginf(expected_lse)).sum() + lse.isnan().sum())
    return facts


def same_dtype(call: Call, precision: str = "ieee") -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition with every step in the call's dtype; LSE in float32 of its scores.

    fp32 operands of products have as many bits as the precision leaves them.
    """
    keep = allowed(call)[:, None]
    group = call.problem.group
    used, rows = keep.any(dim=2)[..., None], keep.any(dim=3)[..., None]
    q = call.q.masked_fill(~rows, 0.0)
    k = call.k.repeat_interleave(group, dim=1).masked_fill(~used, 0.0)
    v = call.v.repeat_interleave(group, dim=1).masked_fill(~used, 0.0)
    if call.q.dtype == torch.float32 and precision in FRACTION_BITS:
        q, k, v = (rounded(operand, FRACTION_BITS[precision]) for operand in (q, k, v))
    scores = (q @ k.transpose(-1, -2) * call.scale).masked_fill(~keep, float("-inf"))
    probabilities = torch.softmax(scores, dim=-1).masked_fill(~rows, 0.0)
    if call.q.dtype == torch.float32 and precision in FRACTION_BITS:
        probabilities = rounded(probabilities, FRACTION_BITS[precision])
    return probabilities @ v, torch.logsumexp(scores.float(), dim=-1)


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 values with only so many bits of their 23-bit fraction, rounded to the nearest."""
    dropped = 23 - bits
    half = 1 << (dropped - 1)
    return ((values.contiguous().view(torch.int32) + half) & ~((1 << dropped) - 1)).view(torch.float32)


def random_call(problem: Problem, device: str, seed: int) -> Call:
    """A call of this problem with normal random values, random lengths and paddings, and NaN in all padding."""
    generator = torch.Generator().manual_seed(seed)
    dtype, spare = TORCH_DTYPE[problem.dtype], 0 if problem.aligned else 1

    def lengths(size: int, padded: bool, sized: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        pad = torch.randint(0, size // 3 + 1, (problem.batch,), generator=generator, dtype=torch.int32)
        room = size - pad if padded else torch.full_like(pad, size)
        length = (torch.rand(problem.batch, generator=generator) * (room + 1)).int()
        length[:1] = room[:1]  # one sequence is as long as it can be, and of three the last has no rows
        length[2::3] = 0
        return length if sized else None, pad if padded else None

    def tensor(heads: int, seq: int, dim: int, length: torch.Tensor | None, pad: torch.Tensor | None) -> torch.Tensor:
        shape = (problem.batch, seq, heads) if problem.layout == "bshd" else (problem.batch, heads, seq)
        view = torch.full((*shape, dim + spare), float("nan"), dtype=dtype)[..., :dim]
        view = view.transpose(1, 2) if problem.layout == "bshd" else view
        view.copy_(torch.randn(problem.batch, heads, seq, dim, generator=generator))
        first = torch.zeros(problem.batch, dtype=torch.int32) if pad is None else pad
        end = torch.full_like(first, seq) if length is None else first + length
        row = torch.arange(seq)[None]
        outside = (row < first[:, None]) | (row >= end[:, None])  # (B, S)
        view.masked_fill_(outside[:, None, :, None], float("nan"))
        return view

    length_q, pad_q = lengths(problem.seq_q, problem.leftpad_q, problem.seqlens_q)
    length_k, pad_k = lengths(problem.seq_k, problem.leftpad_k, problem.seqlens_k)
    tensors = {
        "q": tensor(problem.heads_q, problem.seq_q, problem.head_dim, length_q, pad_q),
        "k": tensor(problem.heads_k, problem.seq_k, problem.head_dim, length_k, pad_k),
        "v": tensor(problem.heads_k, problem.seq_k, problem.head_dim_v, length_k, pad_k),
        "seqlens_q": length_q, "leftpad_q": pad_q, "seqlens_k": length_k, "leftpad_k": pad_k,
    }  # fmt: skip
    placed = {name: _place(value, device) for name, value in tensors.items()}
    return Call(
        problem=problem, scale=-(problem.head_dim**-0.5) if problem.negative_scale else problem.head_dim**-0.5, **placed
    )  # type: ignore[arg-type]


def _place(tensor: torch.Tensor | None, device: str) -> torch.Tensor | None:
    """The tensor on a device with the strides it has here (`.to` keeps the order of axes, but drops spare columns)."""
    if tensor is None or device == "cpu":
        return tensor
    storage = tensor.as_strided((tensor.untyped_storage().size() // tensor.element_size(),), (1,), 0)
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _on_cpu(call: Call) -> Call:
    names = ("q", "k", "v", "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")
    return replace(call, **{name: tensor.cpu() for name in names if (tensor := getattr(call, name)) is not None})


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Inside the block, torch fills new float tensors with NaN, so that what a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _largest(values: torch.Tensor) -> float:
    """Largest magnitude of the finite elements; 0 where there are none."""
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 0.0
