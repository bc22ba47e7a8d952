"""The explicitly scheduled forward for Hopper as a path: what it takes, and how it is launched."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from portattn.backends.cuda import schedules
from portattn.backends.cuda.hopper_forward import FLAGS, GROUP_ROWS
from portattn.backends.cuda.launch_parts import (
    finding,
    function_arguments,
    make_descriptor,
    merging,
    multiprocessors,
    shown_shape,
    with_copies,
)
from portattn.backends.cuda.schedules import (
    FORWARD,
    LEGEND,
    NEEDS,
    TIMED_WITH,
    Schedule,
    described_by,
    find_schedule,
    foreign,
    tuning,
)
from portattn.planning.backend import Variant
from portattn.planning.kernel_specs import ceil_div, heads_together, occupied_tiles
from portattn.planning.kernel_specs.base import split_cheapest
from portattn.schema.lowering import FUSED, Buffers, Step, StepLauncher
from portattn.schema.ops import BACKWARD, CAPTURED
from portattn.schema.plan import Rejection
from portattn.schema.problem_limits import UNLIMITED
from portattn.schema.symbolic_int import least, most
from portattn.schema.tuning import SPLIT_THRESHOLD

if TYPE_CHECKING:
    from portattn.schema.call import Call
    from portattn.schema.problem import Problem
    from portattn.schema.target import Arch, Target
    from portattn.schema.toolchain import Toolchain

WIDTHS = (64, 128, 256)  # head dimensions that the kernel has; others are padded by what TMA reads as zeros
PAGE_STEP = 16  # tokens of a page: a multiple of so many
WHOLE_TILES = 128  # keys: any schedule's tile divides them
SWIZZLED = 128  # bytes of columns of one swizzled block of shared memory


def width(head_dim: int) -> int:
    return next((w for w in WIDTHS if w >= head_dim), head_dim)


def page_of(p: Problem) -> int:
    """Return the tokens of a page of a cache, 0 for keys that are no cache. A contiguous cache is read as one page."""
    return p.page_size or (WHOLE_TILES if p.op == "decode_attention" else 0)


def heads_of(p: Problem) -> int:
    """Return the query heads that share tiles: of a cache the largest power of two up to 64 that divides a group."""
    if not page_of(p):
        return 1
    return math.gcd(operator.index(p.group), GROUP_ROWS)


def pieces(p: Problem, most: int) -> tuple[int, int]:
    """Return the keys and columns of one load, of a tile of `most` keys, a power of two.

    A load never crosses a page's end; of a tile over several pages it has one block of columns, an array of its own."""
    keys = math.gcd(operator.index(page_of(p)), most)
    block = SWIZZLED // (1 if dequantizes(p) else 2)
    return keys, width(p.head_dim) if keys == most else min(width(p.head_dim), block)


def row_tiles(p: Problem, rows: int) -> int:
    """Return a head's tiles of so many rows; for packed rows the tile numbers that tile_scheduler.py looks up."""
    rows //= heads_of(p)
    return ceil_div(p.seq_q, rows) if p.total_q is None else p.total_q // rows + p.batch + 1


def tiles_of(p: Problem, rows: int) -> int:
    """Return the tiles of so many rows of all heads, and of all sequences."""
    return row_tiles(p, rows) * (p.heads_q // heads_of(p)) * (1 if p.packed else p.batch)


MOST_TILES = 2**30
LOG2E = math.log2(math.e)
# Registers of a thread. By the number of consumers: what the launch asks for, and what it is shared out to (one warp of
# a producer counts as four, and 65,536 is what there is).
REGISTERS = {2: (168, 240, 24), 3: (128, 160, 32)}
PACKED_REGISTERS = REGISTERS | {2: (168, 232, 40)}  # its producer looks for sequences
DEQUANTIZING_REGISTERS = (128, 208, 32, 64)  # of two consumers, and of the dequantizer
DEQUANTIZED_WIDTHS = (64, 128)  # and widths of their heads: wider ones leave the consumers too few registers
DEQUANTIZED_FORMATS = ("e4m3", "e5m2")  # formats of caches that the kernel dequantizes

MOST_SPLITS = 32
# Few rows (of a sequence and key head) over few keys (of all sequences and key heads, as far as a row sees) are faster
# on the core, whose blocks are smaller. An H200, bf16, 32/8 heads of 128, 4 queries, µs here and there: 16 sequences of
# 1,024 keys 25 and 26, 4 of 1,024 14.4 and 14.2, 1 of 4,096 17 and 15, 16 of 256 11 and 9; a window of 128, D = 64, 20
# and 9. More rows than CORE_ROWS and wider heads count as so many more keys: there the core is slower by more.
FEW_ROWS, FEW_KEYS, FEW_SEEN = 64, 100_000, 512
# Over a contiguous cache, without a window or a tree, the core is as fast: 8 × 8,192 keys, 4 queries 72 µs here and 69
# there, e4m3 56 and 48; but 64 × 4,096 keys and 16 queries 246 and 592.
CORE_ROWS = 16
FEW_TILES = 45  # tiles by cores, in per cent: with fewer the core, which splits keys, is faster than unsplit keys here


class TimedSchedule(NamedTuple):
    schedule: Schedule
    timed_with: str


class ForwardVariant(Variant):
    """Attention of sm_90 over dense keys, packed keys and caches: fp16, bf16, heads up to 256 wide; e4m3, e5m2 caches.

    entries: the kernel's name in tuning/sm_90.toml"""

    name = "gluon_forward"
    entries = "gluon_forward"
    ops: tuple[str, ...] = ("attention", "varlen_attention", "decode_attention", "paged_attention")
    takes = frozenset(
        {
            "causal", "causal_top_left", "window", "seqlens_q", "seqlens_k", "softcap", "sinks", "return_lse", "gqa",
            "head_dim_v", "needs_grad", "packed", "kv_format", "tree_mask", "invariant", "score_mod", "mask_mod",
            "block_mask",
        }
    )  # fmt: skip
    arches = ("sm_90",)
    needs = f"sm_90, {NEEDS}, 16-bit queries of at most {WIDTHS[-1]} columns, rows and strides of 16 bytes"
    legend = LEGEND
    canaries: tuple[Problem, ...] = FORWARD
    formats: tuple[str, ...] = ("as_q",)

    def __init__(self, toolchain: Toolchain = TIMED_WITH) -> None:
        self.toolchain = toolchain

    def for_toolchain(self, toolchain: Toolchain) -> ForwardVariant:
        return self if toolchain == self.toolchain else type(self)(toolchain)

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p, found = problem, target.toolchain
        taken = self.takes if p.op in BACKWARD else self.takes - {"needs_grad"}
        asked = [name for name in p.demands() if name not in taken]
        empty = [name for name in ("batch", "seq_q", "seq_k", "total_q", "total_k") if getattr(p, name) == 0]
        reasons = {
            f"is for {', '.join(self.arches)}, and this is {target.arch.name}": target.arch.name not in self.arches,
            f"needs {NEEDS}, and this is {found}": foreign(found),
            f"is for {' and '.join(self.ops)}": p.op not in self.ops,
            f"takes fp16 and bf16, not {p.dtype}": p.dtype == "fp32",
            f"takes heads of at most {WIDTHS[-1]} columns, not {p.head_dim}": p.head_dim > WIDTHS[-1],
            f"takes K and V of one width, not {p.head_dim} and {p.head_dim_v}": width(p.head_dim)
            != width(p.head_dim_v),
            f"takes no {', '.join(asked)}": bool(asked),
            f"takes q of 16 bits, not {p.q_format}": p.q_format not in self.formats,
            "reads through descriptors: contiguous rows, bases and strides of 16 bytes": not p.aligned,
            "writes through a descriptor: heads of a multiple of 8 columns": p.head_dim_v % 8 != 0,
            **(_page_reasons(p) if dequantizes(p) else {}),
            f"{', '.join(empty)} is 0: there is nothing to read through a descriptor": bool(empty),
            f"takes pages of a multiple of {PAGE_STEP} tokens, not {p.page_size}": p.page_size % PAGE_STEP != 0,
            "takes no tree mask with a window": p.tree_mask and p.window,
            "takes neither tree masks nor quantised caches with invariant": p.invariant
            and (p.tree_mask or p.kv_format != "as_q"),
            **(schedules.function_reasons(p) if p.score_mod or p.mask_mod or p.block_mask else {}),
            "has too many tiles of rows": tiles_of(p, 2 * GROUP_ROWS) > MOST_TILES,
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        chosen = choice(p, found, self.entries) if reason is None else None
        if reason is None and chosen is None:
            reason = "has no schedule for such sizes: backends/cuda/tuning/sm_90.toml"
        elif chosen is not None and dequantizes(p) and chosen.schedule.groups != 2:
            reason = f"dequantizes caches for 2 consumers, not for the schedule's {chosen.schedule.groups}"
        elif chosen is not None and p.block_mask and chosen.schedule.groups != 2:
            reason = f"takes lists of blocks with 2 consumers, not with the schedule's {chosen.schedule.groups}"
        return None if reason is None else Rejection(path=self.name, reason=reason)

    def owns_invariant_rows(self, problem: Problem, target: Target) -> bool:
        """Return whether it takes the problem in some layout, of some batch; a size of 0 leaves no rows."""
        fit = {"aligned": True, "page_size": PAGE_STEP if problem.page_size else 0, "batch": least(problem.batch, 1)}
        compiles = problem.invariant and described_by(target.toolchain)
        return compiles and self.rejects(msgspec.structs.replace(problem, **fit), target) is None

    def defers_to_core(self, problem: Problem) -> str:
        """Return the reason: few tiles or rows, or the tuning data's."""
        if problem.invariant:
            return ""
        p, rows = problem, problem.features()["rows"]
        whole = page_of(p) and p.head_dim_v not in WIDTHS
        if whole and 100 * _with_rows(p, 2 * GROUP_ROWS) < FEW_TILES * _arch().cores:
            return f"tiles for less than {FEW_TILES} % of the cores, and keys of {p.head_dim_v} columns are not split"
        few = bool(page_of(p)) and rows < FEW_ROWS
        if few and not p.page_size and rows <= CORE_ROWS and not (p.window or p.tree_mask) and width(p.head_dim) <= 128:
            return f"over a contiguous cache the core is as fast with up to {CORE_ROWS} rows of a sequence and key head"
        said = tuning().left_to_core(self.entries, _timed_as(p).features(), self.toolchain)
        if said or not few:
            return said
        if heads_of(p) < least(p.group, GROUP_ROWS):
            return f"a tile has few rows: of {p.group} heads of a key head it takes {heads_of(p)} together"
        seen = _seen(p, least(p.seq_q, ceil_div(FEW_ROWS, heads_of(p))))
        work = p.batch * p.heads_k * seen * most(rows, CORE_ROWS) // CORE_ROWS * width(p.head_dim) // 128
        if seen >= FEW_SEEN and work >= FEW_KEYS:
            return ""
        limits = f"{FEW_SEEN} keys of a sequence, and {FEW_KEYS:,} of all sequences and key heads, on"
        return f"with few rows it is faster than the core from {limits}, counted by a table's room"

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        chosen = choice(call.problem, self.toolchain, self.entries)
        assert chosen is not None
        return launcher(call, chosen.schedule)

    def describe(self, problem: Problem) -> dict[str, Any]:
        """Return the schedule, and the width that heads are padded to."""
        chosen = choice(problem, self.toolchain, self.entries)
        assert chosen is not None
        return {"width": width(problem.head_dim), **msgspec.structs.asdict(chosen.schedule)}

    def sizes(self, problem: Problem) -> dict[str, Any]:
        """Return the number of key splits on a chip of the arch's number of cores, and of heads side by side."""
        chosen = choice(problem, self.toolchain, self.entries)
        assert chosen is not None
        splits = _splits(problem, chosen.schedule, _arch().cores)
        return {"splits": splits, "heads_together": _together(problem, chosen.schedule)}

    def timed_with(self, problem: Problem) -> str:
        chosen = choice(problem, self.toolchain, self.entries)
        return "" if chosen is None else chosen.timed_with

    def described(self, call: Call) -> StepLauncher:
        chosen = choice(call.problem, self.toolchain, self.entries)
        assert chosen is not None
        return steps_of(call, chosen.schedule)

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        swapped = problem.layout == "bshd"
        seen = dict(tensors)
        for name in ("q", "k", "v", "out"):
            if problem.page_size and name in ("k", "v"):
                seen[name] = tensors[name].transpose(1, 2) if problem.page_layout == "phd" else tensors[name]
            elif problem.packed:
                seen[name] = tensors[name].transpose(0, 1)[None]
            elif swapped:
                seen[name] = tensors[name].transpose(1, 2)
        return seen | quantised_views(problem, seen) if dequantizes(problem) else seen


def dequantizes(p: Problem) -> bool:
    return page_of(p) > 0 and p.kv_format != "as_q"


def _page_reasons(p: Problem) -> dict[str, bool]:
    kind = p.kv_format
    return {
        f"takes caches of {' or '.join(DEQUANTIZED_FORMATS)} numbers, not {kind}": kind not in DEQUANTIZED_FORMATS,
        f"takes {kind} caches with scales of a head, not of a token": p.kv_scales == "token",
        f"takes {kind} heads of {' or '.join(map(str, DEQUANTIZED_WIDTHS))} columns, not {p.head_dim}": p.head_dim
        not in DEQUANTIZED_WIDTHS,
    }


def quantised_views(p: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return quantised keys and values as bytes, and their scales, if there are any, for each sequence and head."""
    from portattn.schema.tensors import KV_STORED  # torch: not where backends are only imported

    scales = [name for name in ("k_scale", "v_scale") if tensors.get(name) is not None]
    return {name: tensors[name].view(KV_STORED) for name in ("k", "v")} | {
        name: tensors[name].expand(p.batch, p.heads_k) for name in scales
    }


def _arch() -> Arch:
    from portattn.planning.registry import Registry  # which imports the backends

    return Registry.load().arch(f"cuda:{ForwardVariant.arches[0]}")


def choice(
    problem: Problem, toolchain: Toolchain = TIMED_WITH, variant: str = ForwardVariant.name
) -> TimedSchedule | None:
    """Return the first entry of the tuning data for this compiler with a schedule whose conditions hold.

    Under invariant=True it has what decides a row's bits from the head's width alone: keys of a tile, and `lazy`."""
    found = find_schedule(variant, _timed_as(problem), toolchain)
    if found is None:
        return None
    schedule = msgspec.convert(found[0], Schedule)
    if problem.invariant:
        keys = WHOLE_TILES if width(problem.head_dim) < WIDTHS[-1] else WHOLE_TILES // 2
        schedule = msgspec.structs.replace(schedule, keys=keys, lazy=False)
    return TimedSchedule(schedule=schedule, timed_with=found[1])


def _timed_as(p: Problem) -> Problem:
    """Return the problem whose tuning data holds: a contiguous cache has the data of pages."""
    if p.op != "decode_attention":
        return p
    return msgspec.structs.replace(p, op="paged_attention", page_size=WHOLE_TILES)


def launcher(call: Call, schedule: Schedule) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that runs calls like this one with a schedule, given tensors by name, `out` and `lse`."""
    return with_copies(steps_of(call, schedule), call, ("q", "k", "v"), ("q",))


def steps_of(call: Call, schedule: Schedule) -> StepLauncher:
    return ForwardLauncher(call, schedule)


def _splits(p: Problem, s: Schedule, cores: int) -> int:
    if p.invariant or p.block_mask or (p.packed and not page_of(p)) or p.head_dim_v not in WIDTHS:
        return 1  # partial results have the kernel's width
    rows = GROUP_ROWS * s.groups
    tiles = _with_rows(p, rows)
    return split_count(tiles, ceil_div(_seen(p, rows // heads_of(p)), s.keys), cores)


def _with_rows(p: Problem, rows: int) -> int:
    """Return the tiles that hold rows, about the most that packed queries can fill."""
    if not p.packed:
        return tiles_of(p, rows)
    return occupied_tiles(p, rows, heads_of(p)) * (p.heads_q // heads_of(p))


def _seen(p: Problem, queries: int) -> int:
    """Return the most keys that so many neighbouring queries see."""
    if p.causal == "top_left":
        return least(p.seq_k, p.seq_q)
    if p.window_left == UNLIMITED or not _limited_right(p):
        return p.seq_k
    return least(p.seq_k, p.window_left + max(p.window_right, 0) + queries)


def _together(p: Problem, s: Schedule) -> int:
    """Return the heads whose tiles are drawn side by side: 1 if tiles are equally long, or the schedule says so."""
    return heads_together(p, _arch()) if s.in_turn and uneven(p) else 1


def uneven(p: Problem) -> bool:
    """Return whether tiles of rows may see different numbers of keys, so that their order matters."""
    return p.packed or p.block_mask or _limited_right(p)


def _limited_right(p: Problem) -> bool:
    return p.causal != "none" or p.window_right != UNLIMITED


def split_count(tiles: int, key_tiles: int, cores: int) -> int:
    """Return the number of blocks for a tile's keys, one block a core at a time: least time, in key tiles."""
    if tiles >= SPLIT_THRESHOLD * cores:
        return 1
    ends, merge = 3, 4  # a block's start and end, and the way of a partial result through memory, in key tiles
    return split_cheapest(tiles, key_tiles, cores, least(key_tiles, MOST_SPLITS), ends, merge, 0)


class ForwardLauncher(StepLauncher):
    """One launch; with split keys a second one, which merges."""

    def __init__(self, call: Call, schedule: Schedule) -> None:
        import torch

        from portattn.backends.cuda.launch_parts import counter

        p, s, device = call.problem, schedule, call.q.device
        self.problem, self.schedule = p, s
        rows = GROUP_ROWS * s.groups
        cores = multiprocessors(device)
        self._row_tiles = row_tiles(p, rows)
        tiles = tiles_of(p, rows)
        self._splits = _splits(p, s, cores)
        self._grid = least(cores, tiles * self._splits)
        self._scale, self._softcap = (call.scale or 1.0) * (1.0 if p.score_mod else LOG2E), 0.0
        if p.softcap:
            cap = min(call.softcap, schedules.LARGEST_CAP)
            self._scale, self._softcap = (call.scale or 1.0) / cap, LOG2E * cap
        buffers: Buffers = {}
        if self._splits > 1:
            shape = (self._splits, p.query_rows[0], p.heads_q, p.query_rows[1])
            buffers = {"partial": ((*shape, p.head_dim_v), torch.float32), "partial_lse": (shape, torch.float32)}
        if p.mask_mod:
            buffers["shown"] = (shown_shape(call, s.keys, FLAGS), torch.int32)
        super().__init__(buffers, {"counter": functools.partial(counter, device)})

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        from portattn.backends.cuda.hopper_forward.block_lists import find_hidden_keys
        from portattn.backends.cuda.hopper_forward.kernel import scheduled_forward

        p = self.problem
        split = self._splits > 1
        kind = (
            "cu_seqlens_q" if p.packed else "seqlens_q",
            "cu_seqlens_k" if p.total_k is not None else "seqlens_k",
        )
        filled = ("partial", "partial_lse") if split else ("out", "lse")
        roles = {
            "q_desc": "q", "k_desc": "k", "v_desc": "v", "o_desc": "out", "out": filled[0], "lse": filled[1],
            "sinks": "sinks", "lengths_q": kind[0], "lengths_k": kind[1], "page_table": "page_table",
            "counter": "counter",
        }  # fmt: skip
        if dequantizes(p):
            roles |= {name: name for name in ("k_scale", "v_scale") if p.kv_scales != "none"}
        if p.tree_mask:
            roles["tree_mask"] = "tree_mask"
        roles |= {"lists": "block_mask", "shown": "shown", **{name: name for name in CAPTURED}}
        shown = self.buffers["shown"][0] if p.mask_mod else None
        lists = function_arguments(p, shown, tensors)
        out = tensors["out"]
        registers, consumer, producer, dequantizer = self._registers()
        arguments = {
            name: tensors.get(role) for name, role in roles.items() if not name.endswith("_desc")
        } | {
            **self.descriptors(tensors), **self._scales(tensors),
            "scale": self._scale, "softcap": self._softcap, "stride_h": out.stride(1) // 8,
            "stride_s": out.stride(2) // 8,
            "table_stride": tensors["page_table"].stride(0) if p.page_size else None,
            "tree_mask": tensors.get("tree_mask"),
            "tree_stride": tensors["tree_mask"].stride(0) if p.tree_mask else None,
            **self.numbers(), **self.constants(), **lists,
            "CONSUMER": consumer, "PRODUCER": producer, "DEQUANTIZER": dequantizer,
        }  # fmt: skip
        forward = Step(
            scheduled_forward, (self._grid,), arguments, {"num_warps": 4, "maxnreg": registers, **FUSED}, roles
        )
        if shown is not None:
            return [finding(find_hidden_keys, p, shown, self.schedule.keys, tensors, lists), forward]
        return [forward, merging(p, self._splits, tensors)] if split else [forward]

    def _registers(self) -> tuple[int, ...]:
        p = self.problem
        if dequantizes(p):
            return DEQUANTIZING_REGISTERS
        return (*(PACKED_REGISTERS if p.packed or page_of(p) or p.block_mask else REGISTERS)[self.schedule.groups], 0)

    def _scales(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return scales and their strides, None for those that are not given."""
        found: dict[str, Any] = dict.fromkeys(f"{name}_scale{end}" for name in "qkv" for end in ("", "_b", "_h"))
        found |= {"q_scale_s": None, "k_scale_s": None}
        if dequantizes(self.problem) and self.problem.kv_scales != "none":
            for name in ("k_scale", "v_scale"):
                b, h = tensors[name].stride()
                found |= {name: tensors[name], f"{name}_b": b, f"{name}_h": h}
        return found

    def descriptors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        p, s = self.problem, self.schedule
        dim, q, out = width(p.head_dim), tensors["q"], tensors["out"]
        found = {f"{name}_desc": make_descriptor(tensors[name], *pieces(p, s.keys)) for name in ("k", "v")}
        if page_of(p):
            heads = heads_of(p)
            rows = functools.partial(make_descriptor, rows=heads, before=GROUP_ROWS // heads)
            q, out = q.transpose(1, 2), out.transpose(1, 2)
        else:
            rows = functools.partial(make_descriptor, rows=GROUP_ROWS)
        return {"q_desc": rows(q, dim=dim), "o_desc": rows(out, dim=dim // s.parts), **found}

    def numbers(self) -> dict[str, int]:
        p = self.problem
        return {
            "batches": p.batch, "heads": p.heads_q // heads_of(p), "share": p.group // heads_of(p),
            "seq_q": p.query_rows[1], "seq_k": p.seq_k if p.total_k is None else p.total_k,
            "left": max(p.window_left, 0), "right": 0 if p.causal != "none" else max(p.window_right, 0),
            "row_tiles": self._row_tiles, "together": _together(p, self.schedule),
            "splits": self._splits,
        }  # fmt: skip

    def constants(self) -> dict[str, Any]:
        p, s = self.problem, self.schedule
        varying = {(True, True): "padded", (True, False): "padded_q", (False, True): "padded_k", (False, False): "none"}
        packed = "packed_q" if p.page_size else "packed"
        lengths = packed if p.packed else varying[p.seqlens_q, p.seqlens_k]
        return {
            "GROUPS": s.groups, "KEYS": s.keys, "DIM": width(p.head_dim), "STAGES": s.stages,
            "RIGHT": _limited_right(p), "LEFT": p.window_left != UNLIMITED,
            "TOP_LEFT": p.causal == "top_left", "RAGGED": p.seq_k % s.keys != 0, "VARYING": lengths,
            "UNSEEN": lengths != "none" or p.causal == "top_left" or p.tree_mask,
            "SOFTCAP": p.softcap, "SPLIT": self._splits > 1,
            "TURNS": s.turns, "LATE": s.late, "EARLY": s.early, "PAIRS": s.pairs, "OWN_OUT": s.own_out,
            "QUERIES": s.queries, "REG_Q": s.reg_q, "PARTS": s.parts,
            "PAGE": operator.index(page_of(p)), "HEADS": heads_of(p),
            "FP8": False, "COLUMNS": width(p.head_dim), "USED": width(p.head_dim),
            "KEPT": False, "HALVED": False, "INT8": False, "SIDE": False, "LAZY": s.lazy,
            "FORMAT": p.kv_format if dequantizes(p) else "as_q", "TREE": p.tree_mask,
        }  # fmt: skip
