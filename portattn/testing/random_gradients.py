"""Random calls of the gradients' operations: random calls of the forward, with what the forward gives by the oracle."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from portattn.schema.call import Call
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.testing.oracle import oracle


def random_gradients(problem: Problem, forward: Any, seed: int, device: str) -> Call:
    """A call of the problem's gradients.

    forward  makes the forward's random call, given its problem

    Results and gradients are normal numbers; the gradients of rows that attend nothing are NaN in every second row. The
    memory of dQ, dK and dV is NaN.
    """
    p = problem
    without = msgspec.structs.replace(
        p, op=ROWS[p.op].gradient_of, grad_lse=False, grad_bias=False, grad_slopes=False, deterministic=False
    )
    call: Call = forward(without)
    generator = torch.Generator().manual_seed(seed + 1)
    out, lse = oracle(call)
    like = call.new_out()
    call.forward_out = like.copy_(out)
    call.forward_lse = lse.float().contiguous()
    grad = torch.randn(out.shape, generator=generator).to(device)
    nothing = torch.isneginf(lse)
    nothing[..., 1::2] = False
    call.grad_out = torch.empty_like(like).copy_(grad.masked_fill(nothing[..., None], float("nan")))
    if p.grad_lse:
        call.grad_lse = torch.randn(lse.shape, generator=generator).to(device)
    for name in ("q", "k", "v"):
        setattr(call, f"grad_{name}", _memory(getattr(call, name)))
    if p.grad_bias and call.bias is not None:
        own = [1 if stride == 0 else size for size, stride in zip(call.bias.shape, call.bias.stride(), strict=True)]
        call.grad_bias = torch.full(own, float("nan"), device=device)
    if p.grad_slopes:
        call.grad_slopes = torch.full(lse.shape, float("nan"), device=device)
    # As the forward's own call has it: NaN where nothing is attended, scores that all rows share.
    shared = {name: getattr(call.problem, name) for name in ("bias_by_key", "mask_by_key", "negative_scale")}
    call.problem = msgspec.structs.replace(p, **shared)
    return call


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty_like(tensor)
    if memory.stride(3) != 1:
        memory = tensor.new_empty(tensor.shape)
    return memory.fill_(float("nan"))
