"""Gradient kernels, for dense and packed sequences."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from portattn.planning.kernel_specs.base import (
    MIN_DOT,
    SCORED,
    TAKES,
    CoreKernel,
    block_sides,
    cannot_list,
    ceil_div,
    drops,
    function_constants,
    packed_tiles,
    score_tensors,
)
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import UNLIMITED
from portattn.schema.symbolic_int import most, next_power_of_two
from portattn.schema.target import Arch
from portattn.schema.tuning import SPLIT_THRESHOLD


class DenseBackward(CoreKernel):
    """Gradients: backward_keys and backward_rows hold block_m keys or rows, and go through block_n of the others."""

    name = "dense_backward"
    function = "backward_keys"
    of_rows = "backward_rows"
    op = "attention_backward"
    takes = TAKES | SCORED | score_tensors(op) | {
        "seqlens_q", "leftpad_q", "leftpad_k", "dropout", "grad_lse", "grad_bias", "grad_slopes", "deterministic",
        "score_mod", "mask_mod", "grad_captured",
    }  # fmt: skip
    choices: tuple[str, ...] = ("load", "exp", "dot_precision", "grid", "q_operand", "drops", "parts")
    max_head_dim = 256  # both accumulators of a tile of keys stay in registers
    max_head_dim_v = 256

    def tiles(self, problem: Problem, launch: Launch) -> int:
        return most(self.key_tiles(problem, launch), self.row_tiles(problem, launch))

    def key_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.batch * problem.heads_k * ceil_div(problem.seq_k, launch.block_m)

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.batch * problem.heads_q * ceil_div(problem.seq_q, launch.of_rows().block_m)

    def rows(self, problem: Problem) -> int:
        return most(super().rows(problem), problem.seq_k)

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        found = super().limits(problem, lowering, launch)
        if lowering.parts == "memory" and (problem.dtype != "fp32" or lowering.dot_precision != "bf16x6"):
            return (*found, ("parts", "registers", "products are not made of parts"))
        return found

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        common = super().constexprs(problem, lowering, launch)
        found = {name: common[name] for name in common if name not in _FORWARD_ONLY}
        return found | {"DROPS": drops(problem, lowering)} | function_constants(problem) | {
            "SCORE_GRADIENT": problem.score_mod or None,
            "SINKS": problem.sinks and bool(problem.mask_mod or problem.block_mask),  # of backward_keys alone
        }  # fmt: skip

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        if problem.grad_bias and (problem.score_mod or problem.mask_mod or problem.block_mask):
            return "a bias's gradient is asked for beside score_mod, mask_mod or block_mask", "backend='reference'"
        if problem.grad_captured and problem.deterministic:
            return "gradients of tensors that score_mod reads are added in any order", "backend='reference'"
        return cannot_list(problem) or super().cannot(problem)

    def in_blocks(self, problem: Problem, launch: Launch) -> Launch:
        rows, keys = block_sides(problem)
        by_rows = launch.of_rows()
        return msgspec.structs.replace(
            launch, block_m=min(launch.block_m, keys), block_n=min(launch.block_n, rows),
            rows_m=min(by_rows.block_m, rows), rows_n=min(by_rows.block_n, keys),
        )  # fmt: skip

    def drops_by_keys(self, problem: Problem, lowering: Lowering) -> str:
        """Return `drops` of backward_keys, whose row tiles begin at the first row that sees a key."""
        found = drops(problem, lowering)
        if found != "tiles":
            return found
        limited = problem.causal == "bottom_right" or problem.window_right != UNLIMITED
        limited = limited or (problem.chunk > 0 and problem.causal == "none")  # a row before all keys is in no chunk
        if problem.leftpad_q or (limited and (problem.packed or problem.padded)):
            return "scores"
        first = 0
        if limited:
            right = 0 if problem.window_right == UNLIMITED or problem.chunk else problem.window_right
            first = most(0, problem.seq_q - problem.seq_k - right)
        return "tiles" if first % MIN_DOT == 0 else "scores"


# What the gradients' kernels have no place for: a head's second part, a sign, scores that all rows share.
_FORWARD_ONLY = frozenset({"MAIN", "BLOCK_TAIL", "BIAS_BY_KEY", "MASK_BY_KEY", "NEGATED"})


class VarlenBackward(DenseBackward):
    """Gradients of packed sequences by the same kernels: a program finds its sequence by its number."""

    name = "varlen_backward"
    op = "varlen_attention_backward"
    takes = TAKES | SCORED | score_tensors(op) | {
        "dropout", "grad_lse", "grad_slopes", "deterministic", "score_mod", "mask_mod", "grad_captured",
    }  # fmt: skip

    def key_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.heads_k * packed_keys(problem, launch)

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.heads_q * packed_tiles(problem, launch.of_rows(), 1)


class BlockBackward(DenseBackward):
    """Gradients of chosen blocks: a program holds a part of a block of keys, or one query row's heads of a group."""

    name = "block_backward"
    function = "backward_block_keys"
    of_rows = "backward_block_rows"
    op = "block_sparse_attention_backward"
    takes = (TAKES - {"softcap"}) | score_tensors(op) | {"causal", "causal_top_left", "grad_lse", "deterministic"}

    def read(self, problem: Problem, lowering: Lowering) -> tuple[str, ...]:
        return _READ_OF_BLOCKS

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        return ()

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        if problem.group > MOST_GROUP:
            return f"{problem.group} query heads share a key/value head, and a tile holds {MOST_GROUP}", "group them"
        return super().cannot(problem)

    def key_tiles(self, problem: Problem, launch: Launch) -> int:
        blocks = ceil_div(problem.seq_k, problem.block_k)
        chunks, _ = chunks_of(problem.seq_q * problem.tokens, blocks, problem.group)
        return problem.batch * problem.heads_k * chunks * (problem.block_k // launch.block_m)

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.batch * problem.heads_k * problem.seq_q

    def fit(
        self,
        problem: Problem,
        lowering: Lowering,
        launch: Launch,
        arch: Arch,
        occupancy: int,
        pinned: Container[str] = frozenset(),
        split_threshold: float = SPLIT_THRESHOLD,
    ) -> Launch:
        group = max(next_power_of_two(problem.group), MIN_DOT)
        return msgspec.structs.replace(
            launch, splits=1, block_m=min(launch.block_m, problem.block_k), block_n=max(launch.block_n, group),
            rows_m=group, rows_n=min(launch.of_rows().block_n, problem.block_k),
        )  # fmt: skip

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        found = CoreKernel.constexprs(self, problem, lowering, launch)
        found = {name: found[name] for name in (*_OF_BLOCKS, *map(str.upper, _READ_OF_BLOCKS))}
        return found | {"GROUP": problem.group, "BLOCK_KEYS": problem.block_k}


MOST_GROUP = 128
CHUNK = 16384  # pairs of a query row and a head that one program goes through: some blocks are in nearly all lists


def chunks_of(entries: int, blocks: int, group: int) -> tuple[int, int]:
    """Return the most chunks of the query rows that list a key/value head's blocks, and the rows of one."""
    rows = most(CHUNK // group, 1)
    return blocks + entries // rows, rows


_READ_OF_BLOCKS = ("exp", "dot_precision", "grid")
_OF_BLOCKS = ("HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "BLOCK_M", "BLOCK_N", "CAUSAL")


def packed_keys(problem: Problem, launch: Launch) -> int:
    return (problem.total_k or 0) // launch.block_m + problem.batch + 1
