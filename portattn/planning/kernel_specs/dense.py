"""Dense forward kernels, for sequences of one length and packed ones."""

from __future__ import annotations

from typing import Any

import msgspec

from portattn.planning.kernel_specs.base import (
    MIN_NARROW_DEPTH,
    SCORED,
    TAKES,
    WARPS_APART,
    WIDEST_TILE,
    CoreKernel,
    block_sides,
    cannot_list,
    ceil_div,
    drops,
    function_constants,
    head_columns,
    packed_tiles,
    score_tensors,
    tile_width,
    warp_split_constants,
    warp_split_limits,
    warp_split_unread,
)
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem


class DenseForward(CoreKernel):
    name = "dense_forward"
    function = "dense_forward"
    op = "attention"
    takes = TAKES | SCORED | score_tensors(op) | {
        "seqlens_q", "leftpad_q", "leftpad_k", "needs_grad", "dropout", "kv_format", "score_mod", "mask_mod",
    }  # fmt: skip
    choices: tuple[str, ...] = (
        "load", "k_tile", "block_order", "exp", "mask_value", "dot_precision", "grid", "pipeline", "select",
        "q_operand", "drops", "operands", "warps",
    )  # fmt: skip
    forms: tuple[str, ...] = (WARPS_APART,)

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        found = super().limits(problem, lowering, launch)
        if self.form(lowering):
            found = warp_split_limits(found, problem, lowering, launch, ("plain", "single"))
        if problem.block_mask and lowering.pipeline == "rotated":
            found = (*found, ("pipeline", "plain", "a rotated loop's last tile is masked, of whichever block it is"))
        if lowering.operands == "stored" and problem.q_format == "as_q":
            return (*found, ("operands", "widened", "queries and keys are not quantised"))
        main, tail = head_columns(problem)
        if lowering.operands == "stored" and (tail or tile_width(main, False) < MIN_NARROW_DEPTH):
            why = f"8-bit operands are {MIN_NARROW_DEPTH} to {WIDEST_TILE} columns wide"
            return (*found, ("operands", "widened", why))
        return found

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        found = super().constexprs(problem, lowering, launch)
        found.pop("WARPS", None)
        if self.form(lowering):
            # decode_split's names: a program's rows are of one head, its keys are not split, and lie in no pages.
            own = {"GROUP": 1, "SPLIT": False, "PAGE_SIZE": 0, "PAGE_LOOP": "per_page", "FOLLOWED": False}
            return warp_split_constants(found | own, problem, lowering, launch)
        return (
            found
            | {
                "DROPS": drops(problem, lowering),
                "KV_FORMAT": problem.kv_format,
                "KV_SCALES": problem.kv_scales,
                "Q_FORMAT": problem.q_format,
                "V_FORMAT": problem.v_format,
                # One float16 probability loses as much as a float16 result does, and nothing beside a bfloat16 one.
                "P_TERMS": 2 if problem.v_format != "as_q" and problem.dtype == "fp16" else 1,
            }
            | function_constants(problem)
        )

    def read(self, problem: Problem, lowering: Lowering) -> tuple[str, ...]:
        unread = (*warp_split_unread(problem), "select", "operands") if self.form(lowering) else ()
        return tuple(name for name in super().read(problem, lowering) if name not in unread)

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        return cannot_list(problem) or super().cannot(problem)

    def in_blocks(self, problem: Problem, launch: Launch) -> Launch:
        rows, keys = block_sides(problem)
        return msgspec.structs.replace(launch, block_m=min(launch.block_m, rows), block_n=min(launch.block_n, keys))

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.batch * problem.heads_q * ceil_div(problem.seq_q, launch.block_m)

    def in_one_tile(self, problem: Problem, launch: Launch) -> bool:
        return not (problem.packed or problem.block_mask) and problem.seq_k <= launch.block_n


class VarlenForward(DenseForward):
    """Packed sequences, by dense_forward: a program finds its sequence by its number."""

    name = "varlen_forward"
    op = "varlen_attention"
    takes = TAKES | SCORED | score_tensors(op) | {
        "needs_grad", "dropout", "kv_format", "score_mod", "mask_mod",
    }  # fmt: skip
    choices: tuple[str, ...] = tuple(name for name in DenseForward.choices if name != "warps")
    forms = ()

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.heads_q * packed_tiles(problem, launch, 1)
