"""The kernel of chosen tokens: a gather, without products of tiles."""

from __future__ import annotations

from typing import Any

from portattn.planning.kernel_specs.base import TAKES
from portattn.planning.kernel_specs.decode import DecodeSplit
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.symbolic_int import next_power_of_two


class SparseSplit(DecodeSplit):
    """Token-sparse decode: chosen rows are gathered, and each head has its own."""

    name = "sparse_split"
    function = "sparse_split"
    op = "sparse_attention"
    takes = TAKES | {"num_splits", "paged", "log_weights", "magicpig", "kv_format"}
    choices: tuple[str, ...] = ("exp", "mask_value", "grid", "reads")
    max_head_dim_v = 576  # no accumulator of a product holds its columns

    def cannot(self, problem: Problem) -> tuple[str, str] | None:
        if problem.seq_q != 1:
            return f"seq_q is {problem.seq_q}, and a chosen token is one query's", "pass one query a sequence"
        return super().cannot(problem)

    def limits(self, problem: Problem, lowering: Lowering, launch: Launch) -> tuple[tuple[str, str, str], ...]:
        return ()

    def natural_scores(self, problem: Problem) -> bool:
        return True

    def row_tiles(self, problem: Problem, launch: Launch) -> int:
        return problem.group

    def rows(self, problem: Problem) -> int:
        return 1

    def keys(self, problem: Problem) -> int:
        return problem.tokens

    def constexprs(self, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        # No product is computed from these tiles: their width needs no least.
        exact = lowering.reads == "inside"
        return {
            **{name.upper(): getattr(lowering, name) for name in self.choices if name != "reads"},
            "SPLIT": launch.splits > 1,
            "PAGE_SIZE": problem.page_size,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_D": problem.head_dim if exact else next_power_of_two(problem.head_dim),
            "BLOCK_DV": problem.head_dim_v if exact else next_power_of_two(problem.head_dim_v),
            "BLOCK_N": launch.block_n,
            # Only loads that feed a product are fetched ahead by themselves: here the loop says it.
            "STAGES": launch.num_stages,
            "SOFTCAP": problem.softcap,
            "NEGATED": problem.negative_scale,
            "KV_FORMAT": problem.kv_format,
            "KV_SCALES": problem.kv_scales,
        }
