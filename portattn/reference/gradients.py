"""The gradients' operations on the reference path: from a forward's results, tile by tile (backward.py)."""

from __future__ import annotations

import torch

from portattn.reference.backward import Backward
from portattn.reference.blockwise import tiling_of
from portattn.reference.rowblocks import RowTensor, Statistics
from portattn.schema.call import Call


def run(call: Call) -> tuple[torch.Tensor, None]:
    """(delta, None) as Call.new_out says; dQ, dK, dV and what else is asked for go where the call has memory for them.

    grad_slopes has the sums of all of a sequence's rows in the first one, and 0 in the others.
    """
    assert call.forward_out is not None
    assert call.forward_lse is not None
    assert call.grad_out is not None
    nothing = torch.isneginf(call.forward_lse)
    out = RowTensor.of(call, call.forward_out)
    largest = RowTensor.of(call, call.forward_lse.masked_fill(nothing, 0.0)[..., None])
    total = RowTensor.of(call, (~nothing).float()[..., None])  # P = exp(S - LSE)
    names = {"q": call.grad_q, "k": call.grad_k, "v": call.grad_v, "bias": call.grad_bias}
    wanted = [name for name, memory in names.items() if memory is not None]
    if call.grad_slopes is not None:
        wanted.append("alibi_slopes")
    found = Backward(call, tiling_of(call), Statistics(largest, total, out), wanted).run(call.grad_out, call.grad_lse)
    for name, memory in names.items():
        if memory is None:
            continue
        gradient = found[name]
        axes = [axis for axis in range(4) if memory.shape[axis] != gradient.shape[axis]]  # of a broadcast bias
        memory.copy_(gradient.sum(axes, keepdim=True) if axes else gradient)
    if call.grad_slopes is not None:
        _put_first(call, found["alibi_slopes"], call.grad_slopes)
    delta = (call.forward_out.float() * call.grad_out.float()).masked_fill(nothing[..., None], 0.0).sum(-1)
    if call.grad_lse is not None:
        delta = delta - call.grad_lse
    return call.new_out().copy_(delta.masked_fill(nothing, 0.0)), None


def _put_first(call: Call, sums: torch.Tensor, parts: torch.Tensor) -> None:
    """Sums (B, Hq) into each sequence's first row of parts (B, Hq, Sq), or (1, Hq, Tq)."""
    parts.zero_()
    if call.cu_seqlens_q is None:
        parts[:, :, :1] = sums[..., None]
        return
    rows = parts.shape[2]
    if rows:
        # Sequences without rows have a sum of 0, wherever it is added.
        parts[0].index_add_(1, call.cu_seqlens_q[:-1].long().clamp(0, rows - 1), sums.transpose(0, 1).to(parts.dtype))
