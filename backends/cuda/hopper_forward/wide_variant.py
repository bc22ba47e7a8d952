"""The Hopper forward of heads of 257 to 512 columns as a path: what it takes, and how it is launched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from portattn.backends.cuda.hopper_forward import GROUP_ROWS, WIDE_CHUNK, WIDE_KEYS, WIDE_PART
from portattn.backends.cuda.hopper_forward.variant import (
    LOG2E,
    MOST_TILES,
    WIDTHS,
    ForwardVariant,
    row_tiles,
    tiles_of,
    uneven,
)
from portattn.backends.cuda.launch_parts import counter, make_descriptor, multiprocessors, with_copies
from portattn.backends.cuda.schedules import NEEDS, TIMED_WITH, WIDE, foreign
from portattn.planning.backend import Variant
from portattn.planning.kernel_specs import ceil_div, heads_together
from portattn.schema.lowering import FUSED, Step, StepLauncher
from portattn.schema.plan import Rejection
from portattn.schema.symbolic_int import least

if TYPE_CHECKING:
    from portattn.schema.call import Call
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target

NARROWEST, WIDEST = WIDTHS[-1] + 1, 512  # columns of a head
ROWS = 2 * GROUP_ROWS
# Registers of a thread: of the launch, a consumer's and the producer's, which looks for packed sequences.
REGISTERS, PACKED_REGISTERS = (168, 232, 40), (168, 224, 56)


class WideVariant(Variant):
    """attention and varlen_attention of fp16 and bf16 heads of 257 to 512 columns on sm_90."""

    name = "gluon_wide"
    ops = ("attention", "varlen_attention")
    takes = frozenset({"causal", "causal_top_left", "seqlens_q", "seqlens_k", "return_lse", "gqa", "packed"})
    arches = ForwardVariant.arches
    needs = f"sm_90, {NEEDS}, 16-bit heads of {NARROWEST} to {WIDEST} columns, rows and strides of 16 bytes"
    legend = MappingProxyType(
        {
            "parts": "tiles that share a row's output columns",
            "chunks": f"chunks of {WIDE_CHUNK} columns of queries and keys",
        }
    )
    canaries = WIDE
    formats = ("as_q",)

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p, found = problem, target.toolchain
        asked = [name for name in p.demands() if name not in self.takes]
        empty = [name for name in ("batch", "seq_q", "seq_k", "total_q", "total_k") if getattr(p, name) == 0]
        reasons = {
            f"is for {', '.join(self.arches)}, and this is {target.arch.name}": target.arch.name not in self.arches,
            f"needs {NEEDS}, and this is {found}": foreign(found),
            f"is for {' and '.join(self.ops)}": p.op not in self.ops,
            f"takes fp16 and bf16, not {p.dtype}": p.dtype == "fp32",
            f"takes heads of {NARROWEST} to {WIDEST} columns, not {p.head_dim}": not (
                NARROWEST <= p.head_dim <= WIDEST
            ),
            f"takes K and V of one width, not {p.head_dim} and {p.head_dim_v}": p.head_dim != p.head_dim_v,
            f"takes no {', '.join(asked)}": bool(asked),
            f"takes heads of a multiple of 8 columns, not {p.head_dim_v}": p.head_dim_v % 8 != 0,
            "reads through descriptors: contiguous rows, bases and strides of 16 bytes": not p.aligned,
            f"{', '.join(empty)} is 0: there is nothing to read through a descriptor": bool(empty),
            "has too many tiles of rows": tiles_of(p, ROWS) > MOST_TILES,
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        return None if reason is None else Rejection(path=self.name, reason=reason)

    def describe(self, problem: Problem) -> dict[str, Any]:
        """Return the parts of the output's columns, and the chunks of Q's and K's."""
        return {"parts": parts_of(problem), "chunks": ceil_div(problem.head_dim, WIDE_CHUNK)}

    def timed_with(self, problem: Problem) -> str:
        return str(TIMED_WITH)

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        return with_copies(self.described(call), call, ("q", "k", "v"), ("q",))

    def described(self, call: Call) -> StepLauncher:
        return _WideLauncher(call)

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return ForwardVariant().views(problem, tensors)


def parts_of(p: Problem) -> int:
    """Return the tiles that share a row's output columns."""
    return ceil_div(p.head_dim_v, WIDE_PART)


class _WideLauncher(StepLauncher):
    def __init__(self, call: Call) -> None:
        p, device = call.problem, call.q.device
        self._problem = p
        self._row_tiles = row_tiles(p, ROWS)
        self._grid = least(multiprocessors(device), tiles_of(p, ROWS) * parts_of(p))
        self._scale = (call.scale or 1.0) * LOG2E
        super().__init__({}, {"counter": functools.partial(counter, device)})

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        from portattn.backends.cuda.hopper_forward.wide_kernel import wide_forward
        from portattn.planning.registry import Registry

        p, out = self._problem, tensors["out"]
        parts = parts_of(p)
        arch = Registry.load().arch(f"cuda:{WideVariant.arches[0]}")
        roles = {
            "q_desc": "q", "k_desc": "k", "v_desc": "v", "o_desc": "out", "out": "out", "lse": "lse",
            "lengths_q": "cu_seqlens_q" if p.packed else "seqlens_q",
            "lengths_k": "cu_seqlens_k" if p.packed else "seqlens_k", "counter": "counter",
        }  # fmt: skip
        lengths = {(True, True): "padded", (True, False): "padded_q", (False, True): "padded_k", (False, False): "none"}
        varying = "packed" if p.packed else lengths[p.seqlens_q, p.seqlens_k]
        registers, consumer, producer = PACKED_REGISTERS if p.packed else REGISTERS
        arguments = {
            **{name: tensors.get(role) for name, role in roles.items() if not name.endswith("_desc")},
            "q_desc": make_descriptor(tensors["q"], GROUP_ROWS, WIDE_CHUNK),
            "k_desc": make_descriptor(tensors["k"], WIDE_KEYS, WIDE_CHUNK),
            "v_desc": make_descriptor(tensors["v"], WIDE_KEYS, WIDE_PART),
            "o_desc": make_descriptor(out, GROUP_ROWS, WIDE_CHUNK),
            "scale": self._scale, "stride_h": out.stride(1) // 8, "stride_s": out.stride(2) // 8,
            "batches": p.batch, "heads": p.heads_q, "share": p.group, "seq_q": p.query_rows[1],
            "seq_k": p.seq_k if p.total_k is None else p.total_k, "row_tiles": self._row_tiles,
            "together": parts * (heads_together(p, arch) if uneven(p) else 1),
            "CHUNKS": ceil_div(p.head_dim, WIDE_CHUNK), "PARTS": parts, "RIGHT": p.causal != "none",
            "TOP_LEFT": p.causal == "top_left",
            "VARYING": varying, "CONSUMER": consumer, "PRODUCER": producer,
        }  # fmt: skip
        return [Step(wide_forward, (self._grid,), arguments, {"num_warps": 4, "maxnreg": registers, **FUSED}, roles)]
