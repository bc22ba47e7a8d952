"""The explicitly scheduled latent (MLA) kernel for Hopper as a path: what it takes, and how it is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from portattn.backends.cuda.hopper_latent import CHUNKS, KEYS, RANK, ROPE, ROWS
from portattn.backends.cuda.launch_parts import describe, merging, multiprocessors, with_copies
from portattn.backends.cuda.schedules import LATENT, NEEDS, TIMED_WITH, foreign
from portattn.planning.backend import Variant
from portattn.planning.kernel_specs import ceil_div
from portattn.planning.kernel_specs.base import split_cheapest
from portattn.schema.lowering import FUSED, Buffers, Step, StepLauncher
from portattn.schema.plan import Rejection
from portattn.schema.symbolic_int import least, most, next_power_of_two, pin_sizes

if TYPE_CHECKING:
    from portattn.schema.call import Call
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target

ALIGNED = 16  # bytes, as in Problem.aligned
MOST_BLOCKS = 65_535  # of a grid's second and third axis
REGISTERS = 168  # of 3 × 128 threads (one warp counts as four), which the kernel's roles share out anew:
# a consumer's and the producer's, which is one warp, or for lists a warp group that gathers rows of this format.
REGISTERS_OF = {"": (240, 24), "as_q": (208, 88), "fp8_ds_mla": (208, 88)}


class LatentVariant(Variant):
    """mla_attention on sm_90: fp16 and bf16 queries, rows of 512 + 64 in pages of a multiple of 64, or in lists."""

    name = "gluon_mla"
    ops = ("mla_attention",)
    takes = frozenset(
        {"causal", "seqlens_k", "return_lse", "gqa", "head_dim_v", "num_splits", "tokens", "packed", "kv_format"}
    )
    arches = ("sm_90",)
    needs = f"sm_90, {NEEDS}, 16-bit rows of {RANK} + {ROPE} columns, pages of a multiple of {KEYS} rows in line"
    needs += "; or lists of slots, of fp8_ds_mla rows too"
    legend = MappingProxyType(
        {
            "heads": "query heads of a block",
            "queries": "queries of a head in a block",
            "keys": "keys of a tile",
            "splits": "blocks that share a row's keys",
        }
    )
    canaries = LATENT

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p, found = problem, target.toolchain
        takes = self.takes if p.has_lists else self.takes - {"packed"}
        asked = [name for name in p.demands() if name not in takes]
        empty = [name for name in ("batch", "seq_q", "seq_k") if getattr(p, name) == 0]
        reasons = {
            f"is for {', '.join(self.arches)}, and this is {target.arch.name}": target.arch.name not in self.arches,
            f"needs {NEEDS}, and this is {found}": foreign(found),
            f"is for {self.ops[0]}": p.op not in self.ops,
            f"takes rows of {RANK} + {ROPE} columns, not {p.head_dim_v} + {p.head_dim - p.head_dim_v}": (
                (p.head_dim_v, p.head_dim) != (RANK, RANK + ROPE)
            ),
            f"takes no rows of {p.kv_format}" + " without lists" * (p.kv_format in REGISTERS_OF): (
                p.kv_format not in (REGISTERS_OF if p.has_lists else ("as_q",))
            ),
            f"takes fp16 and bf16, not {p.dtype}": p.dtype == "fp32",
            f"takes pages of a multiple of {KEYS} rows, not {p.page_size}": p.page_size % KEYS > 0 and not p.has_lists,
            f"aligns causal masks at the bottom right, not {p.causal}": p.causal == "top_left",
            f"takes no {', '.join(asked)}": bool(asked),
            "reads through descriptors: contiguous rows, bases and strides of 16 bytes": not p.aligned,
            "takes pages that follow each other in memory": not p.pages_in_line,
            f"takes at most {MOST_BLOCKS} sequences": p.batch > MOST_BLOCKS,
            f"{', '.join(empty)} is 0: there is nothing to read through a descriptor": bool(empty),
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        return None if reason is None else Rejection(path=self.name, reason=reason)

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        """Return a function for calls like this one, of q, q_rope, k (P, 1, page, 576) and other tensors by name."""
        rows = ("q", "q_rope")
        return with_copies(self.described(call), call, rows, rows)

    def describe(self, problem: Problem) -> dict[str, Any]:
        """Return heads and queries of a block; the number of key splits depends on the chip's number of cores."""
        heads, queries = (ROWS, 1) if problem.has_lists else row_tile(problem.seq_q)
        return {"heads": heads, "queries": queries, "keys": KEYS, "splits": problem.num_splits or "by the chip"}

    def timed_with(self, problem: Problem) -> str:
        return str(TIMED_WITH)

    def described(self, call: Call) -> StepLauncher:
        return _LatentLauncher(call)

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        rows = {name: tensors[name] for name in ("q", "q_rope", "out")}
        if problem.packed:
            rows = {name: tensor.transpose(0, 1)[None] for name, tensor in rows.items()}
        elif problem.layout == "bshd":
            rows = {name: tensor.transpose(1, 2) for name, tensor in rows.items()}
        others = {name: tensors[name] for name in ("page_table", "seqlens_k", "indices", "counts", "lse")}
        return {**rows, "k": tensors["k"][:, None], **others}


def row_tile(seq_q: int) -> tuple[int, int]:
    """Return (heads, queries) of a block: 64 rows, the queries of a head side by side."""
    queries = min(next_power_of_two(seq_q), ROWS)
    return ROWS // queries, queries


def split_count(row_tiles: int, batch: int, capacity: int, cores: int) -> int:
    """Return the least-time number of blocks, one a core at a time, for a sequence's keys, at most `capacity`."""
    ends, merge = 4, 4  # a block's start and end, and the way of a partial result through memory, in tiles
    tiles = most(1, ceil_div(capacity, KEYS))
    return split_cheapest(row_tiles * batch, tiles, cores, least(tiles, 2 * cores), ends, 0, merge)


class _LatentLauncher(StepLauncher):
    """One kernel, and with split keys a second one, which merges."""

    def __init__(self, call: Call) -> None:
        import torch

        p = self._problem = call.problem
        batch, rows = p.query_rows
        # Descriptors' blocks: the kernel is compiled for them. A query with a list is a sequence of its own.
        tile: tuple[int, int] = (ROWS, 1) if p.has_lists else pin_sizes(row_tile(rows))
        self._heads, self._queries = tile
        query_tiles, self._sequences = (batch * rows, 1) if p.has_lists else (ceil_div(rows, self._queries), batch)
        self._row_tiles = ceil_div(p.heads_q, self._heads) * query_tiles
        splits = p.num_splits or split_count(self._row_tiles, self._sequences, p.seq_k, multiprocessors(call.q.device))
        self._splits = least(splits, ceil_div(p.seq_k, KEYS))
        self._scale = (call.scale or 1.0) * math.log2(math.e)
        buffers: Buffers = {}
        if self._splits > 1:
            shape = (self._splits, batch, p.heads_q, rows)
            buffers = {"partial": ((*shape, RANK), torch.float32), "partial_lse": (shape, torch.float32)}
        super().__init__(buffers)

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        from portattn.backends.cuda.hopper_latent.kernel import latent_decode
        from portattn.launch.decode import list_rows

        p, split = self._problem, self._splits > 1
        batch, rows = p.query_rows
        roles = {"q_desc": "q", "q_tail_desc": "q_rope", "out_desc": "out", "partial": "partial"}
        roles["lse"] = "partial_lse" if split else "lse"
        numbers, registers = {"page_tiles": 1, "row_units": 0, "slots": 0}, REGISTERS_OF[""]
        if p.has_lists:
            roles |= {"k": "k", "page_table": "indices", "seqlens_k": "counts"}
            table, latent, registers = list_rows(tensors["indices"]), tensors["k"], REGISTERS_OF[p.kv_format]
            numbers |= {"row_units": latent.stride(2) * latent.element_size() // ALIGNED}
            numbers |= {"slots": latent.shape[0] * p.page_size}
        else:
            roles |= {"k_desc": "k", "k_tail_desc": "k", "page_table": "page_table", "seqlens_k": "seqlens_k"}
            table, numbers["page_tiles"] = tensors["page_table"], p.page_size // KEYS
        arguments = {
            "k": None, "k_desc": None, "k_tail_desc": None,
            **_descriptors(tensors, self._heads, self._queries, p.has_lists),
            **{name: tensors.get(role) for name, role in roles.items() if not name.endswith("_desc")},
            "scale": self._scale, "heads": p.heads_q, "seq_q": rows, "batches": batch,
            "head_tiles": ceil_div(p.heads_q, self._heads), "capacity": p.seq_k, "table_stride": table.stride(-2),
            **numbers, "HEADS": self._heads, "QUERIES": self._queries, "CAUSAL": p.causal != "none", "SPLIT": split,
            "LISTED": p.has_lists, "CONSUMER": registers[0], "PRODUCER": registers[1],
        }  # fmt: skip
        grid = (self._row_tiles, self._splits, self._sequences)
        options = {"num_warps": 4, "maxnreg": REGISTERS, **FUSED}
        decode = Step(latent_decode, grid, arguments, options, roles)
        return [decode, merging(p, self._splits, tensors)] if split else [decode]


def _descriptors(tensors: Mapping[str, Any], heads: int, queries: int, listed: bool) -> dict[str, Any]:
    """Return descriptors of q, q_rope and out (64 rows), and of the latent rows, unless they are gathered."""
    found = {
        "q_desc": describe(tensors["q"], 1, heads, queries, RANK // CHUNKS),
        "q_tail_desc": describe(tensors["q_rope"], 1, heads, queries, ROPE),
        "out_desc": describe(tensors["out"], 1, heads, queries, RANK // 2),
    }
    if not listed:
        pages = tensors["k"][:, 0]
        latent = pages.as_strided((pages.shape[0] * pages.shape[1], RANK + ROPE), pages.stride()[1:])
        found |= {"k_desc": describe(latent, KEYS, RANK // CHUNKS), "k_tail_desc": describe(latent, KEYS, ROPE)}
    return found
