"""Three more paths of the Hopper forward: e4m3 q, k, v and probabilities; int8 q and k, a scale a token; heads of 257
to 512 columns."""

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
    ForwardLauncher,
    ForwardVariant,
    choice,
    row_tiles,
    tiles_of,
    uneven,
    width,
)
from portattn.backends.cuda.launch_parts import counter, make_descriptor, multiprocessors, with_copies
from portattn.backends.cuda.schedules import (
    FP8_FORWARD,
    INT8_FORWARD,
    NEEDS,
    TIMED_WITH,
    WIDE,
    Schedule,
    foreign,
)
from portattn.planning.backend import Variant
from portattn.planning.kernel_specs import ceil_div, heads_together
from portattn.schema.lowering import FUSED, Step, StepLauncher
from portattn.schema.plan import Rejection
from portattn.schema.symbolic_int import least

if TYPE_CHECKING:
    from portattn.schema.call import Call
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target

E4M3 = "e4m3"
WIDEST_E4M3 = 256
COLUMN_STEP = 16  # columns of a head: a multiple of so many, 16 bytes
TRANSPOSED_COLUMNS = 128  # of values that a program transposes at a time
MOST_BATCHES = 65_535  # blocks of a grid along its third axis: batches of the values, by parts of their columns
SCALES = ("q_scale", "k_scale", "v_scale")
FUNCTIONS = ("score_mod", "mask_mod", "block_mask")  # of operands of 16 bits alone


class Fp8Variant(ForwardVariant):
    """attention and varlen_attention of e4m3 tensors on sm_90: products of 8 bits, results in fp16 or bf16."""

    name = "gluon_forward_fp8"
    entries = name
    ops = ("attention", "varlen_attention")
    takes = (ForwardVariant.takes - {"needs_grad", *FUNCTIONS}) | {"kv_format"}
    needs = f"sm_90, {NEEDS}, e4m3 heads of at most {WIDEST_E4M3} columns, rows and strides of {COLUMN_STEP} bytes"
    canaries = FP8_FORWARD
    formats = (E4M3,)
    probabilities = E4M3

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p = problem
        if p.q_format != E4M3:
            return Rejection(path=self.name, reason=f"is for q, k and v of {E4M3}, not {format_words(p.q_format)}")
        for name in ("head_dim", "head_dim_v"):
            if getattr(p, name) > WIDEST_E4M3:
                reason = f"takes heads of at most {WIDEST_E4M3} columns, not {getattr(p, name)}"
                return Rejection(path=self.name, reason=reason)
            if getattr(p, name) % COLUMN_STEP:
                reason = f"takes heads of a multiple of {COLUMN_STEP} columns, not {getattr(p, name)}"
                return Rejection(path=self.name, reason=reason)
        most = MOST_BATCHES // ceil_div(p.head_dim_v, TRANSPOSED_COLUMNS)
        if not p.packed and p.batch > most:
            return Rejection(path=self.name, reason=f"takes at most {most} sequences that are not packed")
        return super().rejects(problem, target)

    def defers_to_core(self, problem: Problem) -> str:
        """Return a reason: a request for attention over float8 tensors does not ask for float8 probabilities."""
        return (
            "its probabilities are e4m3 and its sums of Q·Kᵀ have 14 bits, as FlashAttention-3's: "
            f"backend={self.name!r} asks for that"
        )

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        return with_copies(self.described(call), call, ("q", "k"), ("q",))

    def described(self, call: Call) -> StepLauncher:
        chosen = choice(call.problem, self.toolchain, self.entries)
        assert chosen is not None
        return Fp8Launcher(call, chosen.schedule)

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        from portattn.schema.tensors import KV_STORED  # torch: not where backends are only imported

        seen, p = super().views(problem, tensors), problem
        for name in ("q", "k", "v"):
            seen[name] = seen[name].view(KV_STORED)
        for name in SCALES:
            if seen.get(name) is not None:
                seen[name] = seen[name].expand(p.batch, p.heads_k)
        return seen


def format_words(kind: str) -> str:
    return "of 16 or 32 bits" if kind == "as_q" else kind


class Fp8Launcher(ForwardLauncher):
    """Launches of the forward after one that transposes the values."""

    def __init__(self, call: Call, schedule: Schedule) -> None:
        super().__init__(call, schedule)
        import torch

        p, keys = self.problem, schedule.keys
        rows = p.seq_k if p.total_k is None else p.total_k
        # Packed sequences begin at a tile's edge each.
        self._key_tiles = ceil_div(rows, keys) if p.total_k is None else rows // keys + p.batch + 1
        shape = (1 if p.packed else p.batch, p.heads_k, p.head_dim_v, self._key_tiles * keys)
        self.buffers = {**self.buffers, "transposed": (shape, torch.int8)}

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        forward, *merging = super().steps(tensors)
        return [self._transposing(tensors), self._narrow(forward, tensors), *merging]

    def _narrow(self, forward: Step, tensors: Mapping[str, Any]) -> Step:
        """Return the forward's step with transposed values, and scales."""
        roles, arguments = {**forward.roles, "v_desc": "transposed"}, dict(forward.arguments)
        if self.problem.kv_scales != "none":
            for name in SCALES:
                b, h = tensors[name].stride()
                roles[name] = name
                arguments |= {name: tensors[name], f"{name}_b": b, f"{name}_h": h}
        return Step(forward.kernel, forward.grid, arguments, forward.options, roles)

    def _transposing(self, tensors: Mapping[str, Any]) -> Step:
        from portattn.backends.cuda.auxiliary_kernels import transpose_values

        p, s, v, numbers = self.problem, self.schedule, tensors["v"], self.numbers()
        constants = self.constants()
        block = min(width(p.head_dim_v), TRANSPOSED_COLUMNS)
        roles = {
            "v": "v", "out": "transposed",
            "lengths_q": "cu_seqlens_q" if p.packed else "seqlens_q",
            "lengths_k": "cu_seqlens_k" if p.packed else "seqlens_k",
        }  # fmt: skip
        arguments = {
            **{name: tensors.get(role) for name, role in roles.items()},
            "stride_b": v.stride(0), "stride_h": v.stride(1), "stride_s": v.stride(2),
            "heads": p.heads_k, "columns": p.head_dim_v, "key_tiles": self._key_tiles,
            **{name: numbers[name] for name in ("seq_q", "seq_k", "batches", "left", "right")},
            "KEYS": s.keys, "BLOCK": block, "PACKED": p.packed,
            **{name: constants[name] for name in ("RIGHT", "LEFT", "TOP_LEFT")},
        }  # fmt: skip
        grid = (self._key_tiles, p.heads_k, ceil_div(p.head_dim_v, block) * (1 if p.packed else p.batch))
        return Step(transpose_values, grid, arguments, {"num_warps": 4, **FUSED}, roles)

    def descriptors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        s, dim = self.schedule, width(self.problem.head_dim)
        rows = functools.partial(make_descriptor, rows=GROUP_ROWS)
        return {
            "q_desc": rows(tensors["q"], dim=dim),
            "k_desc": make_descriptor(tensors["k"], s.keys, dim),
            "v_desc": make_descriptor(tensors["transposed"], dim, s.keys),
            "o_desc": rows(tensors["out"], dim=dim // s.parts),
        }

    def constants(self) -> dict[str, Any]:
        p, dim, columns = self.problem, width(self.problem.head_dim), self.schedule.columns
        return super().constants() | {
            "FP8": True, "KEPT": self.schedule.kept, "HALVED": self.schedule.halved, "COLUMNS": columns or dim,
            "USED": ceil_div(max(p.head_dim, p.head_dim_v), columns) * columns if columns else dim,
        }  # fmt: skip


INT8 = "int8"
WIDEST_INT8 = 128


class Int8Variant(ForwardVariant):
    """attention and varlen_attention on sm_90 of int8 q and k, whose product is exact, and v in fp16 or bf16."""

    name = "gluon_forward_int8"
    entries = name
    ops = ("attention", "varlen_attention")
    takes = (ForwardVariant.takes - {"needs_grad", "softcap", *FUNCTIONS}) | {"kv_format"}
    needs = f"sm_90, {NEEDS}, int8 q and k of at most {WIDEST_INT8} columns, rows and strides of {COLUMN_STEP} bytes"
    canaries = INT8_FORWARD
    formats = (INT8,)

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p = problem
        reasons = {
            f"is for q and k of {INT8}": p.q_format != INT8,
            f"takes a scale for each token, not {p.kv_scales}": p.kv_scales != "token",
            f"takes heads of at most {WIDEST_INT8} columns, not {p.head_dim}": p.head_dim > WIDEST_INT8,
            f"takes heads of a multiple of {COLUMN_STEP} columns, not {p.head_dim}": p.head_dim % COLUMN_STEP != 0,
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        return super().rejects(problem, target) if reason is None else Rejection(path=self.name, reason=reason)

    def defers_to_core(self, problem: Problem) -> str:
        """Return a reason: probabilities are rounded as in 16-bit attention, unlike the core's."""
        return (
            f"it rounds probabilities to {problem.dtype}, where the core rounds to float16, or to two numbers of it: "
            f"backend={self.name!r} asks for that"
        )

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        seen = super().views(problem, tensors)
        for name in ("q_scale", "k_scale"):
            if problem.packed:
                seen[name] = tensors[name].transpose(0, 1)[None]
            elif problem.layout == "bshd":
                seen[name] = tensors[name].transpose(1, 2)
        return seen

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        return with_copies(self.described(call), call, ("q", "k", "v"), ("q",))

    def described(self, call: Call) -> StepLauncher:
        chosen = choice(call.problem, self.toolchain, self.entries)
        assert chosen is not None
        return Int8Launcher(call, chosen.schedule)


class Int8Launcher(ForwardLauncher):
    """Launches of a forward, with scales of rows and keys."""

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        forward, *merging = super().steps(tensors)
        roles, arguments = dict(forward.roles), dict(forward.arguments)
        for name in ("q_scale", "k_scale"):
            b, h, s = tensors[name].stride()
            roles[name] = name
            arguments |= {name: tensors[name], f"{name}_b": b, f"{name}_h": h, f"{name}_s": s}
        arguments["SIDE"] = arguments["k_scale_s"] == 1
        return [Step(forward.kernel, forward.grid, arguments, forward.options, roles), *merging]

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"INT8": True}


NARROWEST, WIDEST = WIDTHS[-1] + 1, 512  # columns of a head
WIDE_ROWS = 2 * GROUP_ROWS
# Registers of a thread: of the launch, a consumer's and the producer's, which looks for packed sequences.
WIDE_REGISTERS, PACKED_WIDE_REGISTERS = (168, 232, 40), (168, 224, 56)


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
            "has too many tiles of rows": tiles_of(p, WIDE_ROWS) > MOST_TILES,
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
        self._row_tiles = row_tiles(p, WIDE_ROWS)
        self._grid = least(multiprocessors(device), tiles_of(p, WIDE_ROWS) * parts_of(p))
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
        registers, consumer, producer = PACKED_WIDE_REGISTERS if p.packed else WIDE_REGISTERS
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
