"""The explicitly scheduled backward for Hopper as a path: problems, schedules (repeatable ones derived), launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from portattn.backends.cuda import schedules
from portattn.backends.cuda.hopper_backward import STATISTICS_ROWS
from portattn.backends.cuda.hopper_forward import FLAGS
from portattn.backends.cuda.launch_parts import (
    finding,
    flat,
    function_arguments,
    make_descriptor,
    multiprocessors,
    shown_shape,
    with_copies,
)
from portattn.backends.cuda.schedules import BACKWARD, NEEDS, TIMED_WITH, described_by, find_schedule, foreign
from portattn.planning.backend import Variant
from portattn.planning.kernel_specs import ceil_div, heads_together
from portattn.schema.lowering import FUSED, Buffers, Step, StepLauncher
from portattn.schema.ops import CAPTURED
from portattn.schema.plan import Rejection
from portattn.schema.problem_limits import UNLIMITED
from portattn.schema.symbolic_int import least, most

if TYPE_CHECKING:
    from portattn.schema.call import Call
    from portattn.schema.problem import Problem
    from portattn.schema.target import Arch, Target
    from portattn.schema.toolchain import Toolchain

MOST_TOGETHER = 32  # heads that are worked on side by side
FEW = 8  # blocks a multiprocessor
# The same in turns under a causal mask: fewer heads have more blocks at work at a time, and the later ones, which have
# little to do, wait for each other (H200, S = 16,384: 1.06 of the time in any order by 2 heads, 1.03 by 8).
LEAST_IN_TURNS = 8
# Under a causal mask no fewer heads are worked on at a time than have a block for each multiprocessor, and than these.
FEWEST = 4
# In turns, blocks of a head that start together follow each other at a distance of some tiles. A launch may wait so for
# at most this part of its time; else a kernel of its own for dQ is faster.
LAG = 2
PART = 3


def arch() -> Arch:
    from portattn.planning.registry import Registry  # which imports the backends

    return Registry.load().arch("cuda:sm_90")


def slots(p: Problem) -> int:
    return 1 if p.packed else p.batch


def tiles_of(rows: int, total: int | None, p: Problem, size: int) -> int:
    """Return a head's tiles of so many rows; for packed rows the numbers that look sequences up (tile_scheduler.py)."""
    return ceil_div(rows, size) if total is None else total // size + p.batch + 1


def limited_right(p: Problem) -> bool:
    """Return whether queries do not see all keys after their own position."""
    return p.causal != "none" or p.window_right != UNLIMITED


def together(p: Problem, tiles: int, cores: int, turns: bool = False) -> int:
    """Return the number of key heads whose blocks run side by side, the longest first.

    Few or causal blocks: about as many heads as keep the chip busy; else as many as have their queries and the queries'
    gradients in the cache's share. Causal times of four heads of 4,096 keys at a time, over all side by side: 0.82
    with 32/8 heads (4 sequences), 0.91 with 16/4, 0.95 with 16/16 (one sequence); eight of 2,048 keys 0.96, four 1.25
    (H200, bf16, D = 128)."""
    heads = p.heads_k * slots(p)
    if tiles * heads < FEW * cores:
        causal = limited_right(p) and p.window_left == UNLIMITED
        return least(most(cores // most(tiles, 1), FEWEST), heads) if causal and not turns else heads
    of_head = 2 * _rows(p) * (p.head_dim + p.head_dim_v) * p.group
    fewest = LEAST_IN_TURNS if turns and limited_right(p) else 1
    return least(most(least(arch().cache_share // most(of_head, 1), MOST_TOGETHER), fewest), heads)


def in_turns(p: Problem, keys: int) -> bool:
    """Return whether blocks of so many keys should add to dQ in turns: a launch's wait against its work."""
    cores, causal = arch().cores, limited_right(p) and p.window_left == UNLIMITED
    tiles = tiles_of(p.seq_k, p.total_k, p, keys)
    blocks = tiles * p.heads_k * slots(p)
    if causal and blocks <= cores and p.seq_q >= p.seq_k:
        return True  # all run at once, and each has less to do than the one that it waits for
    beside = most(together(p, tiles, cores, turns=True), 1)
    following, seen = least(ceil_div(p.seq_k, keys), ceil_div(cores, beside)), _rows(p)
    if p.window_left != UNLIMITED:  # so many blocks see a tile; so many rows see a block
        following = least(following, ceil_div(p.window_left, keys) + 2)
        seen = least(seen, p.window_left + keys)
    of_block = ceil_div(seen, STATISTICS_ROWS) * p.group
    if causal:
        of_block = ceil_div(of_block, 2)
    work = most(of_block, blocks * of_block // cores)
    # Where blocks are not a multiple of the multiprocessors, it waits while others would have nothing to do.
    idle = 0 if causal else ceil_div(blocks, cores) * of_block - work
    return bool(PART * (LAG * following - idle) <= work)


def _rows(p: Problem) -> int:
    """Return the mean number of query rows of a sequence."""
    return p.seq_q if p.total_q is None else ceil_div(p.total_q, most(p.batch, 1))


LISTED_WIDTH = 128  # of heads whose blocks are listed: wider ones' dQ comes from a kernel that goes by queries
WIDTHS = (64, 128, 256)  # head dimensions that the kernels have; others are padded by what TMA reads as zeros


class BackwardSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of tile_scheduler.BackwardForm; with `messages` = 0 another kernel computes dQ. Raises ValueError."""

    keys: int
    stages: int
    messages: int
    late: bool = False
    after: bool = False
    stagger: int = 0
    turns: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        halves = self.messages and self.messages % 2 == 0
        if self.apart and not (halves and self.stages == 2 and not self.late and not self.turns and not self.stagger):
            raise ValueError(
                "groups apart add half a tile of dQ each in any order: even messages, 2 stages, no stagger"
            )
        if self.late and not self.messages:
            raise ValueError("late is about dQ that is added: messages must not be 0")
        if self.messages and self.keys != 128:
            raise ValueError("dQ is added by blocks of 128 keys")
        if self.turns and (not self.messages or self.stagger):
            raise ValueError("turns are about dQ that is added: messages must not be 0, and stagger must be")


class TimedBackwardSchedule(NamedTuple):
    schedule: BackwardSchedule
    timed_with: str


# Of the kernel of dQ: keys of a tile, buffers of K, buffers of V. With 128 columns a second buffer of V made it 1.10
# to 1.12 times as long (H200, bf16, Triton 3.6.0, B·S = 16k, H·D = 2,048: full 1,233 µs for 1,108, causal 660 for 601
# at S = 4,096; causal 2,447 for 2,199 at 16,384).
QUERIES = {64: (128, 2, 2), 128: (128, 2, 1), 256: (64, 2, 1)}


def width(head_dim: int) -> int:
    return next((w for w in WIDTHS if w >= head_dim), head_dim)


def choice(problem: Problem, toolchain: Toolchain) -> TimedBackwardSchedule:
    """Return a problem's schedule, for heads up to the widest of WIDTHS. Raises LookupError without an entry."""
    found = find_schedule("gluon_backward", problem, toolchain)
    if found is None:
        raise LookupError(f"gluon_backward has no schedule for {problem}: backends/cuda/tuning/sm_90.toml")
    schedule, timed_with = msgspec.convert(found[0], BackwardSchedule), found[1]
    if schedules.gradient_source(problem) and schedule.keys == 128 and not schedule.late:
        # Scores, what the derivative shares with the function, and dP do not fit beside the sums of dK and dV.
        schedule, timed_with = msgspec.structs.replace(schedule, after=True), ""
    if problem.block_mask and schedule.stagger:  # tiles come in the lists' order
        schedule, timed_with = msgspec.structs.replace(schedule, stagger=0), ""
    if problem.deterministic and schedule.messages:
        # Repeatable bit by bit: added in turns, or dK and dV with two buffers and dQ by its own kernel, whose sums have
        # other bits: under invariant=True sizes decide nothing.
        if problem.invariant or in_turns(problem, schedule.keys):
            repeatable = msgspec.structs.replace(schedule, apart=False, stagger=0, turns=True)
            return TimedBackwardSchedule(repeatable, "")
        alone = BackwardSchedule(keys=schedule.keys, stages=2, messages=0, after=schedule.after)
        return TimedBackwardSchedule(alone, "")
    return TimedBackwardSchedule(schedule, timed_with)


MOST_TILES = 2**30
LOG2E = math.log2(math.e)
QUERY_ROWS = 128  # of a block of the kernel of dQ
WIDE_ROWS = 128  # of a tile of two groups apart with 64 columns: two groups that share 64 rows read dS and K too slowly
# Registers of a thread: what the launches ask for, and what warps get that only move memory; the consumer has the rest.
REGISTERS, WORKER = 168, 24
# A program of the kernels before and after the products has a tile of 64 rows.
ROW_WARPS = {64: 4, 128: 8, 256: 8}


class BackwardVariant(Variant):
    """Gradients of attention and varlen_attention on sm_90: heads up to 256 wide, fp16 and bf16."""

    name = "gluon_backward"
    ops = ("attention_backward", "varlen_attention_backward")
    # No sinks: rows that attend nothing are told by an LSE of -inf, and with a sink theirs is the sink.
    legend = MappingProxyType(
        {
            "width": "columns that heads are padded to",
            "keys": "keys of a block",
            "stages": "buffers of what a loop reads",
            "messages": "parts in which a tile of dQ is added to memory, 0 where dQ has a kernel of its own",
            "late": "dQ of a tile is computed during the next one's exponentials",
            "after": "dP is begun after the probabilities",
            "stagger": "query tiles by which neighbouring blocks begin apart",
            "turns": "blocks add to dQ in the order of their keys",
            "apart": "two groups of 64 keys, half a step apart",
        }
    )
    takes = frozenset(
        {
            "causal", "causal_top_left", "window", "seqlens_q", "seqlens_k", "gqa", "head_dim_v", "grad_lse",
            "deterministic", "negative_scale", "invariant", "softcap", "score_mod", "mask_mod", "block_mask",
        }
    )  # fmt: skip
    arches = ("sm_90",)
    needs = f"sm_90, {NEEDS}, 16-bit heads of at most {WIDTHS[-1]} columns, rows and strides of 16 bytes"
    canaries = BACKWARD

    def __init__(self, toolchain: Toolchain = TIMED_WITH) -> None:
        self.toolchain = toolchain

    def for_toolchain(self, toolchain: Toolchain) -> BackwardVariant:
        return self if toolchain == self.toolchain else type(self)(toolchain)

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p, found = problem, target.toolchain
        asked = [name for name in p.demands() if name not in self.takes]
        empty = [name for name in ("batch", "seq_q", "seq_k", "total_q", "total_k") if getattr(p, name) == 0]
        widest = most(p.head_dim, p.head_dim_v)
        reasons = {
            f"is for {', '.join(self.arches)}, and this is {target.arch.name}": target.arch.name not in self.arches,
            f"needs {NEEDS}, and this is {found}": foreign(found),
            f"is for {' and '.join(self.ops)}": p.op not in self.ops,
            f"takes fp16 and bf16, not {p.dtype}": p.dtype == "fp32",
            f"takes heads of at most {WIDTHS[-1]} columns, not {widest}": widest > WIDTHS[-1],
            f"takes K and V of one width, not {p.head_dim} and {p.head_dim_v}": width(p.head_dim)
            != width(p.head_dim_v),
            f"takes no {', '.join(asked)}": bool(asked),
            "reads through descriptors: contiguous rows, bases and strides of 16 bytes": not p.aligned,
            "writes through descriptors: heads of a multiple of 8 columns": p.head_dim % 8 != 0
            or p.head_dim_v % 8 != 0,
            f"{', '.join(empty)} is 0: there is nothing to read through a descriptor": bool(empty),
            **(schedules.function_reasons(p) if p.score_mod or p.mask_mod or p.block_mask else {}),
            "adds to dQ in any order where blocks are listed": p.block_mask and p.deterministic,
            f"takes lists of blocks of heads of at most {LISTED_WIDTH} columns, not {widest}": p.block_mask
            and widest > LISTED_WIDTH,
            "has too many tiles of rows": slots(p) * p.heads_q * tiles_of(p.seq_q, p.total_q, p, STATISTICS_ROWS)
            > MOST_TILES,
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        return None if reason is None else Rejection(path=self.name, reason=reason)

    def owns_invariant_rows(self, problem: Problem, target: Target) -> bool:
        """Return whether it takes the problem in some layout of the tensors, of some batch."""
        compiles = problem.invariant and described_by(target.toolchain)
        fit = msgspec.structs.replace(problem, aligned=True, batch=least(problem.batch, 1))
        return compiles and self.rejects(fit, target) is None

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that runs calls like this one, given the tensors by name; it fills `out` with delta."""
        return launcher(call, choice(call.problem, self.toolchain).schedule)

    def describe(self, problem: Problem) -> dict[str, Any]:
        """Return the schedule, and the width that heads are padded to."""
        return {"width": width(problem.head_dim), **msgspec.structs.asdict(choice(problem, self.toolchain).schedule)}

    def timed_with(self, problem: Problem) -> str:
        """Return the tuning data's compiler of the schedule; repeatable dQ of narrow heads was never timed."""
        return choice(problem, self.toolchain).timed_with

    def described(self, call: Call) -> StepLauncher:
        return steps_of(call, choice(call.problem, self.toolchain).schedule)

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        seen = dict(tensors)
        for name in ("q", "k", "v", "forward_out", "grad_out", "grad_q", "grad_k", "grad_v"):
            if problem.packed:
                seen[name] = tensors[name].transpose(0, 1)[None]
            elif problem.layout == "bshd":
                seen[name] = tensors[name].transpose(1, 2)
        if problem.packed:
            for name in ("forward_lse", "grad_lse", "out"):
                seen[name] = None if tensors.get(name) is None else tensors[name][None]
        return seen


def launcher(call: Call, schedule: BackwardSchedule) -> Callable[[Mapping[str, Any]], None]:
    steps = steps_of(call, schedule)
    return steps if call.scale == 0.0 else with_copies(steps, call, ("q", "k", "v", "grad_out"), ())


def steps_of(call: Call, schedule: BackwardSchedule) -> StepLauncher:
    return _BackwardLauncher(call, schedule)


def _edges(p: Problem) -> bool:
    """Return whether valid and invalid rows may share a tile of queries, except behind the tensor's end."""
    if p.packed or p.seqlens_q:
        return True
    right = 0 if p.causal != "none" else p.window_right
    before = right != UNLIMITED and p.causal != "top_left" and (p.seqlens_k or p.seq_q > p.seq_k + right)
    after = p.window_left != UNLIMITED and p.causal == "top_left" and (p.seqlens_k or p.seq_q > p.seq_k + p.window_left)
    return before or after


class _BackwardLauncher(StepLauncher):
    """Launches of row statistics; of dK, dV and sums of dQ; of dQ from its sums, or by a kernel of its own."""

    def __init__(self, call: Call, schedule: BackwardSchedule) -> None:
        import torch

        p = self._problem = call.problem
        s = self._schedule = schedule
        self._dim = dim = width(p.head_dim)
        self._scale, self._cores = float(call.scale), multiprocessors(call.q.device)
        self._cap = min(call.softcap, schedules.LARGEST_CAP) if p.softcap else 0.0
        self._rows = WIDE_ROWS if s.apart and dim == WIDTHS[0] else STATISTICS_ROWS
        self._query_tiles = tiles_of(p.seq_q, p.total_q, p, self._rows)
        if p.block_mask:  # whole blocks
            self._query_tiles = ceil_div(p.seq_q, p.block_q) * (p.block_q // self._rows)
        tiles = self._tiles = self._query_tiles * p.heads_q * slots(p)
        varying = {(True, True): "padded", (True, False): "padded_q", (False, True): "padded_k", (False, False): "none"}
        self._varying = "packed" if p.packed else varying[p.seqlens_q, p.seqlens_k]
        buffers: Buffers = {"statistics": ((2 * tiles, self._rows), torch.float32)}
        if s.messages:
            buffers["sums"] = ((tiles * self._rows * dim // 256, 256), torch.float32)
        if p.mask_mod:
            buffers["shown"] = (shown_shape(call, s.keys, FLAGS), torch.int32)
        if s.turns or s.apart or p.mask_mod:
            buffers["turns"] = ((1 + tiles,), torch.int32)
        self._edges = _edges(p)
        if self._edges:
            rows = (2 * p.batch, p.heads_q, self._rows)
            buffers["edge_q"] = ((*rows, p.head_dim), call.q.dtype)
            buffers["edge_do"] = ((*rows, p.head_dim_v), call.q.dtype)
        super().__init__(buffers)

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        last = self._gradients(tensors) if self._schedule.messages else self._queries(tensors)
        found = [self._statistics(tensors), self._keys(tensors), last]
        if not self._problem.mask_mod:
            return found
        from portattn.backends.cuda.hopper_forward.block_lists import find_hidden_keys

        p, shown = self._problem, self.buffers["shown"][0]
        lists = function_arguments(p, shown, tensors)
        return [finding(find_hidden_keys, p, shown, self._schedule.keys, tensors, lists), *found]

    def _lists(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments about lists of blocks, which are a gradient's by keys."""
        p, lists = self._problem, tensors.get("block_queries")
        found = function_arguments(p, self.buffers["shown"][0] if p.mask_mod else None, tensors, "kq")
        names = {f"list_{axis}": None if lists is None else lists.stride(n) for n, axis in enumerate("bhk")}
        return {name: value for name, value in found.items() if name not in ("list_q", "SCORE_MOD")} | names

    def _lengths(self) -> dict[str, str]:
        kind = "cu_seqlens" if self._problem.packed else "seqlens"
        return {"lengths_q": f"{kind}_q", "lengths_k": f"{kind}_k"}

    def _statistics(self, tensors: Mapping[str, Any]) -> Step:
        from portattn.backends.cuda.auxiliary_kernels import row_statistics
        from portattn.launch.arguments import outer_strides

        p, dim = self._problem, self._dim
        names = (
            "forward_out", "forward_lse", "grad_out", "grad_lse", "q", "statistics", "sums", "turns", "edge_q",
            "edge_do",
        )  # fmt: skip
        roles = {name: name for name in names} | {"delta": "out", "lengths_q": self._lengths()["lengths_q"]}
        arguments = {name: tensors.get(role) for name, role in roles.items()}
        for name, role in {"o": "forward_out", "do": "grad_out", "q": "q"}.items():
            arguments |= outer_strides(name, tensors[role], "bhs")
        for name, role in {"lse": "forward_lse", "grad_lse": "grad_lse", "delta": "out"}.items():
            arguments |= outer_strides(name, tensors.get(role), "bh")
        arguments |= {
            "heads": p.heads_q, "seq_q": p.query_rows[1], "batches": p.batch, "tiles": self._query_tiles,
            "D": p.head_dim, "D_V": p.head_dim_v, "ROWS": self._rows, "DIM": dim, "VARYING": self._varying,
            "IDLE": bool(p.mask_mod),
        }  # fmt: skip
        return Step(row_statistics, (self._tiles,), arguments, {"num_warps": ROW_WARPS[dim], **FUSED}, roles)

    def _keys(self, tensors: Mapping[str, Any]) -> Step:
        from portattn.backends.cuda.hopper_backward.kernel import scheduled_backward

        p, s, dim = self._problem, self._schedule, self._dim
        tiles = tiles_of(p.seq_k, p.total_k, p, s.keys)
        roles = {
            "q_desc": "q", "do_desc": "grad_out", "k_desc": "k", "v_desc": "v", "dk_desc": "grad_k",
            "dv_desc": "grad_v", "edge_q_desc": "edge_q", "edge_do_desc": "edge_do", "statistics_desc": "statistics",
            "dq_desc": "sums", "turns": "turns", "grad_k": "grad_k", "grad_v": "grad_v", **self._lengths(),
            "lists": "block_queries", "shown": "shown", **{name: name for name in CAPTURED},
        }  # fmt: skip
        rows = dict.fromkeys(("q_desc", "do_desc", "edge_q_desc", "edge_do_desc"), self._rows)
        arguments = {
            name: _maybe(tensors.get(role), rows.get(name, s.keys) if name.endswith("_desc") else 0, dim)
            for name, role in roles.items()
            if name not in ("statistics_desc", "dq_desc")
        } | {
            "statistics_desc": flat(tensors["statistics"], 2),
            "dq_desc": flat(tensors["sums"], self._rows * dim // 256 // s.messages) if s.messages else None,
            **_steps_of_8("dk_", tensors["grad_k"]), **_steps_of_8("dv_", tensors["grad_v"]),
            **self._numbers(p.heads_k, tiles, together(p, tiles, self._cores, s.turns)), **self._constants(s.keys),
            "ROWS": self._rows, "STAGES": s.stages, "MESSAGES": s.messages, "LATE": s.late, "AFTER": s.after,
            **self._lists(tensors), "APART": s.apart, "STAGGER": s.stagger, "TURNS": s.turns, "GROUPED": p.group > 1,
        }  # fmt: skip
        blocks = tiles * p.heads_k * slots(p)
        grid = (least(blocks, self._cores) if s.apart else blocks,)
        warps = 4 if s.apart else 8  # of the first group that computes
        return Step(scheduled_backward, grid, arguments, {"num_warps": warps, "maxnreg": REGISTERS, **FUSED}, roles)

    def _queries(self, tensors: Mapping[str, Any]) -> Step:
        from portattn.backends.cuda.hopper_backward.queries import scheduled_queries

        p, dim = self._problem, self._dim
        keys, k_stages, v_stages = QUERIES[dim]
        tiles = tiles_of(p.seq_q, p.total_q, p, QUERY_ROWS)
        roles = {
            "q_desc": "q", "do_desc": "grad_out", "k_desc": "k", "v_desc": "v", "dq_desc": "grad_q", "out": "grad_q",
            "statistics": "statistics", **self._lengths(),
        }  # fmt: skip
        rows = {"k_desc": keys, "v_desc": keys}
        arguments = {
            name: make_descriptor(tensors[role], rows.get(name, QUERY_ROWS), dim)
            if name.endswith("_desc")
            else tensors.get(role)
            for name, role in roles.items()
        } | {
            **_steps_of_8("", tensors["grad_q"]), **self._numbers(p.heads_q, tiles, heads_together(p, arch())),
            **self._constants(keys), "ROWS": QUERY_ROWS, "K_STAGES": k_stages, "V_STAGES": v_stages,
        }  # fmt: skip
        grid = (tiles * p.heads_q * slots(p),)
        return Step(scheduled_queries, grid, arguments, {"num_warps": 8, "maxnreg": REGISTERS, **FUSED}, roles)

    def _gradients(self, tensors: Mapping[str, Any]) -> Step:
        from portattn.backends.cuda.auxiliary_kernels import query_gradients
        from portattn.launch.arguments import outer_strides

        p, dim = self._problem, self._dim
        roles = {"sums": "sums", "out": "grad_q", "lengths_q": self._lengths()["lengths_q"]}
        arguments = {name: tensors.get(role) for name, role in roles.items()} | {
            **outer_strides("out", tensors["grad_q"], "bhs"), "scale": self._scale, "heads": p.heads_q,
            "seq_q": p.query_rows[1], "batches": p.batch, "tiles": self._query_tiles, "D": p.head_dim,
            "ROWS": self._rows, "DIM": dim, "VARYING": self._varying,
        }  # fmt: skip
        return Step(query_gradients, (self._tiles,), arguments, {"num_warps": ROW_WARPS[dim], **FUSED}, roles)

    def _numbers(self, heads: int, tiles: int, together: int) -> dict[str, Any]:
        p = self._problem
        cap = self._cap
        scale = self._scale / cap if p.softcap else self._scale * (1.0 if p.score_mod else LOG2E)
        return {
            "scale": scale, "softcap": LOG2E * cap, "factor": self._scale, "batches": p.batch, "heads": heads,
            "share": p.group,
            "seq_q": p.query_rows[1], "seq_k": p.seq_k if p.total_k is None else p.total_k,
            "left": max(p.window_left, 0), "right": 0 if p.causal != "none" else max(p.window_right, 0),
            "tiles": tiles, "query_tiles": self._query_tiles, "together": together,
        }  # fmt: skip

    def _constants(self, keys: int) -> dict[str, Any]:
        p = self._problem
        left = p.window_left != UNLIMITED
        return {
            "KEYS": keys, "DIM": self._dim, "RIGHT": limited_right(p), "LEFT": left,
            "TOP_LEFT": p.causal == "top_left",
            "RAGGED": self._varying == "none" and p.seq_k % keys != 0, "VARYING": self._varying,
            "EDGES": self._edges, "UNSEEN": self._varying != "none" or p.causal == "top_left" or left, "WORKER": WORKER,
            "SOFTCAP": p.softcap, "SCORE_MOD": schedules.function_source(p),
            "SCORE_GRADIENT": schedules.gradient_source(p),
        }  # fmt: skip


def _steps_of_8(name: str, x: Any) -> dict[str, int]:
    return {f"{name}stride_h": x.stride(1) // 8, f"{name}stride_s": x.stride(2) // 8}


def _maybe(x: Any, rows: int, dim: int) -> Any:
    """Return a tensor's descriptor by blocks of so many rows, or itself if rows is 0; None if it is absent."""
    return make_descriptor(x, rows, dim) if x is not None and rows else x
