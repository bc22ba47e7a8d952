"""The explicitly scheduled indexer for Hopper as a path: what it takes, and how it is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from portattn.backends.cuda.hopper_indexer import CONSUMERS, DIM, KEYS
from portattn.backends.cuda.launch_parts import describe, multiprocessors, with_copies
from portattn.backends.cuda.schedules import INDEXER, NEEDS, TIMED_WITH, foreign
from portattn.planning.backend import Variant
from portattn.planning.kernel_specs import ceil_div
from portattn.schema.lowering import FUSED, Step, StepLauncher
from portattn.schema.plan import Rejection
from portattn.schema.symbolic_int import least, pin_sizes

if TYPE_CHECKING:
    from portattn.schema.call import Call
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target

HEADS = (32, 64)  # a row of fewer weights is no 128 bytes of shared memory, on which TMA writes begin
PAGE = 64  # keys of a page that are loaded at a time; of packed keys KEYS
# Rows of a tile. A core takes several tiles of few rows, and loads their keys ahead.
FEW_ROWS, MANY_ROWS = 4, 64
# 4 × 128 threads (one warp counts as four) with 128 registers each, which the kernel's roles then share out anew.
REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 128, 160, 32


class IndexerVariant(Variant):
    """indexer_logits on sm_90: e4m3 queries and keys of 32 or 64 heads of 128 columns, packed or in pages."""

    name = "gluon_indexer"
    ops = ("indexer_logits",)
    takes = frozenset({"seqlens_k", "kv_format", "gqa", "paged"})
    arches = ("sm_90",)
    needs = f"sm_90, {NEEDS}, e4m3 queries and keys of {DIM} columns, {' or '.join(map(str, HEADS))} heads"
    needs += f", pages of a multiple of {PAGE} rows"
    legend = MappingProxyType({"rows": "query rows of a tile", "keys": "keys of a tile", "heads": "heads of a row"})
    canaries = INDEXER

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p, found = problem, target.toolchain
        empty = [name for name in ("batch", "seq_q", "seq_k") if getattr(p, name) == 0]
        reasons = {
            f"is for {', '.join(self.arches)}, and this is {target.arch.name}": target.arch.name not in self.arches,
            f"needs {NEEDS}, and this is {found}": foreign(found),
            f"takes e4m3 queries and keys, not {p.kv_format}": p.kv_format != "e4m3",
            f"takes heads of {DIM} columns, not {p.head_dim}": p.head_dim != DIM,
            f"takes {' or '.join(map(str, HEADS))} heads, not {p.heads_q}": p.heads_q not in HEADS,
            f"takes pages of a multiple of {PAGE} rows, not {p.page_size}": p.page_size % PAGE != 0,
            "reads through descriptors: contiguous rows, bases and strides of 16 bytes": not p.aligned,
            f"{', '.join(empty)} is 0: there is nothing to read through a descriptor": bool(empty),
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        return None if reason is None else Rejection(path=self.name, reason=reason)

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        return with_copies(self.described(call), call, ("q", "k", "weights"), ())

    def described(self, call: Call) -> StepLauncher:
        return _IndexerLauncher(call)

    def describe(self, problem: Problem) -> dict[str, Any]:
        return {"rows": rows_of(problem.seq_q), "keys": CONSUMERS * KEYS, "heads": problem.heads_q}

    def timed_with(self, problem: Problem) -> str:
        return str(TIMED_WITH)

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        from portattn.validate.quantized import as_stored  # torch: not where backends are only imported

        found = {name: tensors[name] for name in ("row_starts", "row_ends", "page_table", "seqlens_k")}
        paged = problem.page_size > 0
        for name in ("weights", "result"):
            found[name] = tensors[name] if paged else tensors[name][None]
        for name in ("k", "k_scale"):
            tensor = tensors[name]
            found[name] = None if tensor is None else tensor[:, None] if paged else tensor[None, None]
        q = tensors["q"].transpose(1, 2) if paged else tensors["q"].transpose(0, 1)[None]
        return found | {"q": as_stored(q, problem.kv_format), "k": as_stored(found["k"], problem.kv_format)}


def rows_of(seq_q: int) -> int:
    """Return the rows of a tile: one of two numbers, since each is a kernel of its own."""
    return FEW_ROWS if seq_q <= FEW_ROWS else MANY_ROWS


class _IndexerLauncher(StepLauncher):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self._problem = call.problem
        self._cores = multiprocessors(call.q.device)

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        from portattn.backends.cuda.hopper_indexer.kernel import scheduled_index_scores

        p, k, scale, table = self._problem, tensors["k"][:, 0], tensors["k_scale"], tensors["page_table"]
        rows, heads = pin_sizes(rows_of(p.seq_q)), pin_sizes(p.heads_q)
        row_tiles, key_tiles = ceil_div(p.seq_q, rows), ceil_div(p.seq_k, CONSUMERS * KEYS)
        tiles = p.batch * row_tiles * key_tiles
        result = tensors["result"]
        roles = {
            "q_desc": "q", "weights_desc": "weights", "k_desc": "k", "k_scale": "k_scale", "page_table": "page_table",
            "row_starts": "row_starts", "row_ends": "row_ends", "seqlens_k": "seqlens_k", "result": "result",
        }  # fmt: skip
        page = p.page_size or k.shape[1]
        arguments = {
            "q_desc": describe(tensors["q"].transpose(1, 2), 1, 1, heads, DIM),
            "weights_desc": describe(tensors["weights"], 1, 1, heads),
            "k_desc": describe(k, 1, PAGE if p.page_size % KEYS else KEYS, DIM),
            **{name: tensors[role] for name, role in roles.items() if not name.endswith("_desc")},
            "scale_stride_b": None if scale is None else scale.stride(0),
            "scale_stride_s": None if scale is None else scale.stride(2),
            "result_stride_b": result.stride(0), "result_stride_s": result.stride(1),
            "seq_q": p.seq_q, "seq_k": p.seq_k, "row_tiles": row_tiles, "key_tiles": key_tiles, "tiles": tiles,
            "pages": k.shape[0], "page_size": page, "table_stride": 0 if table is None else table.stride(0),
            "HEADS": heads, "ROWS": rows, "CONSUMER": CONSUMER_REGISTERS, "PRODUCER": PRODUCER_REGISTERS,
        }  # fmt: skip
        options = {"num_warps": 4, "maxnreg": REGISTERS, **FUSED}
        blocks = tiles if rows > FEW_ROWS else least(tiles, self._cores)
        return [Step(scheduled_index_scores, (blocks,), arguments, options, roles)]
