"""What warps_apart (kernels/warp_split.py) takes of the problems of decode_split and dense_forward."""

from __future__ import annotations

from typing import Any

from portattn.planning.kernel_specs.base import MIN_DOT, WIDEST_TILE, head_columns
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem

FORM = "warps_apart"  # of the kernels that have the choice
# What its loop can do.
TAKES_APART = frozenset(
    {"seqlens_k", "leftpad_k", "causal", "causal_top_left", "sinks", "return_lse", "negative_scale", "gqa",
     "head_dim_v", "num_splits", "packed"}
)  # fmt: skip
MOST_APART = 8
PRECISIONS = ("bf16x6", "tf32x3")  # of float32; products as they are have no matrix instructions
# Its constants that decode_split has too.
CONSTANTS = (
    "GROUP", "SPLIT", "PAGE_SIZE", "HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "BLOCK_M", "BLOCK_N", "CAUSAL",
    "NEGATED", "SEARCH", "EXP", "MASK_VALUE", "PAGE_LOOP", "FOLLOWED", "PIPELINE",
)  # fmt: skip
Limits = tuple[tuple[str, str, str], ...]


def not_apart(problem: Problem, lowering: Lowering, launch: Launch) -> str:
    """Why warps cannot attend keys of their own; empty where they can."""
    asked = sorted(set(problem.demands()) - TAKES_APART - {"needs_grad"})
    dense, warps = problem.op == "attention", launch.num_warps
    reasons = {
        f"their loop takes no {', '.join(asked)}": bool(asked),
        "decodes have 16-bit numbers": not dense and (problem.dtype == "fp32" or problem.kv_format != "as_q"),
        "tensors have float32 numbers": dense and (problem.dtype != "fp32" or problem.kv_format != "as_q"),
        f"dot_precision is one of {', '.join(PRECISIONS)}": dense and lowering.dot_precision not in PRECISIONS,
        "tensors have as many key heads as query heads": dense and problem.group > 1,
        f"their loop has rows of at most {WIDEST_TILE} columns": head_columns(problem)[1] != 0,
        "their tiles are powers of two": lowering.reads == "inside",
        f"a warp has at least {MIN_DOT} keys of a tile": launch.block_n < MIN_DOT * warps,
        f"1, 2, 4 or {MOST_APART} warps' results are merged": warps > MOST_APART or warps & (warps - 1) != 0,
    }
    return next((text for text, holds in reasons.items() if holds), "")


def limits(found: Limits, problem: Problem, lowering: Lowering, launch: Launch, pipelines: tuple[str, ...]) -> Limits:
    """What limits a problem whose lowering asks for warps apart: their own limits, or that it cannot have them.

    found      the kernel's limits
    pipelines  those that its problems can have with warps apart
    """
    why = not_apart(problem, lowering, launch)
    if why:
        return (*found, ("warps", "joint", why))
    single = [limit for limit in found if limit[0] == "pipeline" and lowering.pipeline == "single"]
    found = tuple(limit for limit in found if limit[0] not in ("load", "pipeline"))
    if lowering.grid != "tiles":
        found = (*found, ("grid", "tiles", "warps apart have a program for each tile"))
    if lowering.load != "pointer":
        found = (*found, ("load", "pointer", "warps apart read by pointers"))
    if lowering.pipeline not in pipelines:
        return (*found, ("pipeline", "plain", "the loop of warps apart has no other"))
    return (*found, *single)


def constants(found: dict[str, Any], problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
    """Return warps_apart's constants, from its kernel's."""
    precision = lowering.dot_precision if problem.dtype == "fp32" else "ieee"  # products of 16-bit numbers have one
    return {name: found[name] for name in CONSTANTS} | {"PARTS": launch.num_warps, "DOT_PRECISION": precision}


def unread(problem: Problem) -> tuple[str, ...]:
    """Choices that it does not read."""
    return ("k_tile", "block_order", "q_operand", *(() if problem.dtype == "fp32" else ("dot_precision",)))
