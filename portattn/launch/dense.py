"""The launch of dense_forward."""

from __future__ import annotations

import torch

from portattn.call import Call
from portattn.core import CORES, ceil_div
from portattn.launch.kernelcall import KernelCall
from portattn.planner import Plan

MODULE = "portattn.kernels.dense"
UNSPECIALISED = frozenset({"heads_q", "group", "seq_q", "seq_k", "row_tiles", "tiles"})


def calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    """Launches of one dense forward, with its outputs (B,Hq,Sq,Dv) and LSE (B,Hq,Sq). Nothing else is allocated."""
    problem, kernel = plan.problem, CORES[plan.problem.op]
    lowering, launch = plan.specialised
    out = call.new_out()
    lse = call.new_lse() if problem.return_lse else None
    tiles = kernel.tiles(problem, launch)
    arguments = {
        "q": call.q, "k": call.k, "v": call.v, "out": out, "lse": lse,
        "seqlens_q": call.seqlens_q, "seqlens_k": call.seqlens_k,
        "leftpad_q": call.leftpad_q, "leftpad_k": call.leftpad_k,
        "scale": abs(float(call.scale)),
    }  # fmt: skip
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        arguments |= {f"{name}_stride_{axis}": s for axis, s in zip("bhsd", tensor.stride(), strict=True)}
    arguments |= {f"o_stride_{axis}": s for axis, s in zip("bhs", out.stride(), strict=False)}
    arguments |= {
        "heads_q": problem.heads_q, "group": problem.group, "seq_q": problem.seq_q, "seq_k": problem.seq_k,
        "row_tiles": ceil_div(problem.seq_q, launch.block_m), "tiles": tiles,
    }  # fmt: skip
    constexprs = kernel.constexprs(problem, lowering, launch)
    grid = (min(tiles, cores) if lowering.grid == "persistent" else tiles,)
    return [KernelCall(MODULE, "dense_forward", grid, arguments, constexprs, launch, UNSPECIALISED)], out, lse
