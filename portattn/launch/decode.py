"""The launches of decode_split and, where keys are split, decode_combine."""

from __future__ import annotations

import msgspec
import torch

from portattn.call import Call
from portattn.core import CORES, MIN_DOT, ceil_div, next_power_of_two
from portattn.launch.kernelcall import KernelCall
from portattn.lowering import Launch
from portattn.planner import Plan

MODULE = "portattn.kernels.decode"
SPLIT_UNSPECIALISED = frozenset({"heads_k", "group", "seq_k", "row_tiles", "splits", "tiles"})
COMBINE_UNSPECIALISED = frozenset({"heads_q", "seq_q", "rows", "splits"})
COMBINE_CHUNK = 16  # partial rows that the merging kernel holds at a time: 16 × 256 fp32 is 32 registers a thread


def calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    """Launches of one decode, with its outputs (B,Hq,Sq,Dv) and LSE (B,Hq,Sq).

    Beyond the outputs a split allocates splits·B·Hq·Sq·(Dv + 1) float32 for the partial results.
    """
    problem, kernel = plan.problem, CORES[plan.problem.op]
    lowering, launch = plan.specialised
    out = call.new_out()
    lse = call.new_lse() if problem.return_lse else None
    split = launch.splits > 1
    rows = problem.batch * problem.heads_q * problem.seq_q
    target, target_lse = out, lse
    if split:
        shape = (launch.splits, problem.batch, problem.heads_q, problem.seq_q)
        target = call.empty(*shape, problem.head_dim_v, dtype=torch.float32)
        target_lse = call.empty(*shape, dtype=torch.float32)
    tiles = kernel.tiles(problem, launch)
    arguments = {
        "q": call.q, "k": call.k, "v": call.v, "out": target, "lse": target_lse,
        "seqlens_k": call.seqlens_k, "leftpad_k": call.leftpad_k,
        "scale": abs(float(call.scale)),
    }  # fmt: skip
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        arguments |= {f"{name}_stride_{axis}": s for axis, s in zip("bhsd", tensor.stride(), strict=True)}
    strides = target.stride()[:4] if split else (0, *target.stride()[:3])
    arguments |= {f"o_stride_{axis}": s for axis, s in zip("pbhs", strides, strict=True)}
    arguments |= {
        "heads_k": problem.heads_k, "group": problem.group, "seq_k": problem.seq_k,
        "row_tiles": ceil_div(problem.seq_q * problem.group, launch.block_m), "splits": launch.splits, "tiles": tiles,
    }  # fmt: skip
    constexprs = kernel.constexprs(problem, lowering, launch)
    persistent = lowering.grid == "persistent"
    grid = (min(tiles, cores) if persistent else tiles,)
    launches = [KernelCall(MODULE, "decode_split", grid, arguments, constexprs, launch, SPLIT_UNSPECIALISED)]
    if split:
        combine = {
            "partial": target, "partial_lse": target_lse, "out": out, "lse": lse,
            **{f"o_stride_{axis}": s for axis, s in zip("bhs", out.stride(), strict=False)},
            "heads_q": problem.heads_q, "seq_q": problem.seq_q, "rows": rows, "splits": launch.splits,
        }  # fmt: skip
        launches.append(
            KernelCall(
                MODULE,
                "decode_combine",
                (min(rows, cores) if persistent else rows,),
                combine,
                {
                    "HEAD_DIM_V": problem.head_dim_v,
                    "BLOCK_DV": max(next_power_of_two(problem.head_dim_v), MIN_DOT),
                    "BLOCK_SPLITS": next_power_of_two(launch.splits),
                    "CHUNK": min(COMBINE_CHUNK, next_power_of_two(launch.splits)),
                    "GRID": lowering.grid,
                },
                # A row of partials is a few KiB: four warps read it, nothing is pipelined.
                msgspec.structs.replace(Launch(), num_warps=4, num_stages=1),
                COMBINE_UNSPECIALISED,
            )
        )
    return launches, out, lse
