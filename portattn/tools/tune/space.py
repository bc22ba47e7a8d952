"""What is tried: a table of axes for each kernel, and rules for what is left out without being compiled.

To extend a search add an axis, or values to one. An axis is a field of Launch, a compiler option, a choice of Lowering,
or `occupancy`; what no axis names stays as the incumbent has it. Of axes with one name the first that applies counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator

import msgspec

from portattn.planning.compiler_options import backend_options, options
from portattn.planning.kernel_specs import head_columns
from portattn.schema import conditions
from portattn.schema.lowering import CHOICES, LAUNCH_FIELDS, OF_ROWS, Launch
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import PAIRED
from portattn.schema.symbolic_int import next_power_of_two
from portattn.schema.target import TRAITS, Arch, Target
from portattn.schema.tensors import KV_STORED, TORCH_DTYPE
from portattn.tools.tune.choice import Choice, Setting, apply_settings


class Axis(msgspec.Struct, frozen=True):
    """One setting and the values to try. chip: what the chip must have; when: conditions on the problem.

    An option of a compiler is tried where the target's compiler has it, and a dot precision where the chip has it.
    """

    name: str
    values: tuple[Setting, ...]
    chip: tuple[str, ...] = ()
    when: tuple[str, ...] = ()

    def applies(self, problem: Problem, target: Target) -> bool:
        arch = target.arch
        if self.name == "dot_precision" and not set(self.values) <= set(arch.dot_precisions):
            return False
        if self.name in options() and self.name not in backend_options().get(target.backend, {}):
            return False
        return set(self.chip) <= traits_of(arch) and conditions.all_hold(
            map(conditions.parse, self.when), problem.features()
        )


def traits_of(arch: Arch) -> set[str]:
    """An arch's traits, and whether it has warps."""
    return {*arch.traits, *(WARPS if arch.warp_size else NO_WARPS)}


WARPS, NO_WARPS = ("warps",), ("no_warps",)
DEEP, SMALL = ("deep_pipeline",), ("small_tiles",)
HALF, WIDE, FLOAT, NARROW = "dtype!=fp32", "widest>256", "dtype=fp32", "kv_format!=as_q"
# Where a launch is short, and waiting is most of it; and where warps can have keys of their own.
SMALL_FLOAT = (FLOAT, "widest<=128", "seq_k<=256", "!featured", "!dropout", "!block_mask")
PLAIN_ROWS = (*SMALL_FLOAT, "!gqa", "!packed", "!seqlens_q", "!leftpad_q", "kv_format=as_q")

# Options of the compilers, for every kernel that has products.
_OPTIONS = (
    Axis("waves_per_eu", (None, 1, 2)),
    Axis("matrix_instr_nonkdim", (None, 16), ("matrix_shapes",), (HALF,)),
)
_LOADS = (
    Axis("load", ("pointer", "descriptor"), ("descriptors",), ("aligned",)),
    Axis("dot_precision", ("ieee", "tf32x3", "bf16x6"), when=(FLOAT,)),
    Axis("dot_precision", ("ieee", "tf32x3"), when=(FLOAT,)),
)

_FORWARD = (
    Axis("block_m", (16, 32, 64), when=(WIDE,)),
    Axis("block_m", (16, 32, 64, 128), when=(FLOAT,)),
    Axis("block_m", (16, 32, 64, 128), NO_WARPS),
    Axis("block_m", (16, 32, 64), SMALL),
    Axis("block_m", (64, 128)),
    Axis("block_n", (16, 32, 64), SMALL),
    Axis("block_n", (16, 32, 64), when=(WIDE,)),
    Axis("block_n", (32, 64, 128, 256), WARPS, PLAIN_ROWS),
    Axis("block_n", (16, 32, 64), when=(FLOAT,)),
    Axis("block_n", (32, 64, 128)),
    Axis("num_warps", (1,), NO_WARPS),
    Axis("num_warps", (4, 8)),
    Axis("num_stages", (1,), NO_WARPS),
    Axis("num_stages", (1, 2), when=(WIDE,)),
    Axis("num_stages", (1, 2, 3), DEEP, SMALL_FLOAT),
    Axis("num_stages", (2, 3, 4), DEEP),
    Axis("num_stages", (1, 2)),
    Axis("pipeline", ("plain", "single", "masked"), WARPS, SMALL_FLOAT),
    Axis("pipeline", ("plain", "rotated", "single"), WARPS, ("seq_k<=128",)),
    Axis("pipeline", ("plain", "rotated", "masked"), WARPS, (FLOAT, "seq_k<=1024")),
    Axis("pipeline", ("plain", "rotated"), WARPS),
    Axis("warps", ("joint", "apart"), WARPS, PLAIN_ROWS),
    # 128 registers let four programs of four warps share an SM, 168 three: 65,536 / (4 · 128) and / (3 · 128).
    Axis("maxnreg", (None, 128, 168), when=(HALF, "widest<=64")),
    *_LOADS,
    *_OPTIONS,
)
_SPLIT = (
    Axis("block_m", (16, 32, 64), when=("rows>16", WIDE)),
    Axis("block_m", (16, 32, 64, 128), when=("rows>16",)),
    Axis("block_m", (16,)),
    Axis("block_n", (16, 32, 64), when=(WIDE,)),
    Axis("block_n", (16, 32, 64), when=(FLOAT,)),
    Axis("block_n", (16, 32, 64, 128), when=(NARROW,)),  # the wide form of a tile is held beside its bytes
    Axis("block_n", (32, 64, 128)),
    Axis("num_warps", (1,), NO_WARPS),
    Axis("num_warps", (4, 8), when=(WIDE,)),
    Axis("num_warps", (2, 4, 8)),
    Axis("num_stages", (1,), NO_WARPS),
    Axis("num_stages", (1, 2), when=(WIDE,)),
    Axis("num_stages", (1, 2, 3, 4, 6), DEEP, (NARROW,)),
    Axis("num_stages", (2, 3, 4, 6), DEEP),
    Axis("num_stages", (1, 2)),
    Axis("launch_pdl", (True,), ("dependent_launch",)),
    Axis("occupancy", (1, 2), WARPS),
    Axis("warps", ("joint", "apart"), WARPS, (HALF, "kv_format=as_q", "!featured", "rows<=16", "widest<=256")),
    *_LOADS,
    *_OPTIONS,
)
_PAGED = (
    *_SPLIT,
    Axis("page_loop", ("per_page", "flat_masked", "by_page"), WARPS, (HALF, "kv_format=as_q", "!featured", "rows<=16")),
)
# Of gradients: the kernel that holds keys, and, by names of their own, the kernel that holds rows.
_HOLDS = (
    Axis("block_m", (16, 32, 64), SMALL),
    Axis("block_m", (16, 32, 64, 128), when=(FLOAT,)),
    Axis("block_m", (32, 64, 128)),
    Axis("block_n", (16, 32, 64)),
    Axis("num_warps", (1,), NO_WARPS),
    Axis("num_warps", (4, 8)),
    Axis("num_stages", (1,), NO_WARPS),
    Axis("num_stages", (1, 2, 3), DEEP),
    Axis("num_stages", (1, 2)),
)
_BACKWARD = (
    *_HOLDS,
    *(msgspec.structs.replace(axis, name=OF_ROWS[axis.name]) for axis in _HOLDS),
    *_LOADS,
    *_OPTIONS,
)
_SPARSE = (
    Axis("block_n", (16, 32, 64, 128)),
    Axis("num_warps", (1,), NO_WARPS),
    Axis("num_warps", (1, 2, 4, 8)),
    Axis("num_stages", (1,), NO_WARPS),
    Axis("num_stages", (1, 2)),
    Axis("launch_pdl", (True,), ("dependent_launch",)),
    Axis("occupancy", (1, 2, 4, 8), WARPS),
)
SPACES: dict[str, tuple[Axis, ...]] = {
    "dense_forward": _FORWARD,
    "varlen_forward": _FORWARD,
    "dense_backward": _BACKWARD,
    "varlen_backward": _BACKWARD,
    "decode_split": _SPLIT,
    "paged_split": _PAGED,
    "mla_split": _SPLIT,
    "sparse_split": _SPARSE,
}


def check_space(axes: tuple[Axis, ...]) -> None:
    """Raise ValueError where an axis names no setting, no value of it, or something that no chip has."""
    for axis in axes:
        unknown_traits = set(axis.chip) - {*TRAITS, *WARPS, *NO_WARPS}
        if unknown_traits:
            known = ", ".join((*TRAITS, *WARPS, *NO_WARPS))
            raise ValueError(f"axis {axis.name}: chip names {sorted(unknown_traits)[0]!r}; known: {known}")
        for condition in axis.when:
            conditions.parse(condition)
        if axis.name in CHOICES:
            unknown = [value for value in axis.values if value not in CHOICES[axis.name]]
            if unknown:
                raise ValueError(f"axis {axis.name}: {unknown[0]!r} is outside {CHOICES[axis.name]}")
        elif axis.name not in (*LAUNCH_FIELDS, *options(), "occupancy") or axis.name == "splits":
            raise ValueError(f"axis {axis.name!r} is no field of Launch, no compiler option and no Lowering choice")


Rule = Callable[[Choice, Problem, Target], "str | None"]


def _buffers(choice: Choice, problem: Problem, target: Target) -> str | None:
    """The pipeline's tiles of K and V, or Q and dO, alone: Triton keeps at least one fewer than num_stages of them."""
    width = problem.head_dim if problem.op == "mla_attention" else problem.head_dim + problem.head_dim_v
    item = float((KV_STORED if problem.kv_format != "as_q" else TORCH_DTYPE[problem.dtype]).itemsize)
    if problem.kv_format in PAIRED:  # two numbers a byte
        item /= 2
    launches = Launch().changed(choice.launch).kernels()
    least = int(max((launch.num_stages - 1) * launch.block_n for launch in launches) * width * item)
    if problem.op == "sparse_attention" or least <= target.arch.scratchpad_bytes:
        return None
    return f"its K and V tiles alone take {least} bytes, {target.arch.name} has {target.arch.scratchpad_bytes}"


def _accumulators(choice: Choice, problem: Problem, target: Target) -> str | None:
    """Scores and result of a tile are float32 in registers."""
    launch, arch = Launch().changed(choice.launch), target.arch
    if problem.backward:
        return _gradient_accumulators(launch, problem, arch)
    threads = launch.num_warps * arch.warp_size
    if not arch.registers or not threads or problem.op == "sparse_attention":
        return None
    columns = next_power_of_two(problem.head_dim_v) + launch.block_n
    if choice.lowering.get("warps") == "apart":  # each warp has a result of its own
        columns, threads = next_power_of_two(problem.head_dim_v) + launch.block_n // launch.num_warps, arch.warp_size
    most = min(arch.registers, int(launch.get("maxnreg") or arch.registers))
    least = launch.block_m * columns // threads
    return f"scores and result take {least} registers a thread, of {most}" if least > most else None


def _gradient_accumulators(launch: Launch, problem: Problem, arch: Arch) -> str | None:
    """dK and dV, or dQ, and two tiles of scores, P and dS, are float32 in registers."""
    width, width_v = (next_power_of_two(dim) for dim in (problem.head_dim, problem.head_dim_v))
    for kernel, one, columns in (("keys", launch, width + width_v), ("rows", launch.of_rows(), width)):
        threads = one.num_warps * arch.warp_size
        if not arch.registers or not threads:
            return None
        least = one.block_m * (columns + 2 * one.block_n) // threads
        if least > arch.registers:
            return f"gradients and scores of {kernel} take {least} registers a thread, of {arch.registers}"
    return None


def _rows_a_warp(choice: Choice, problem: Problem, target: Target) -> str | None:
    """Of narrow heads a warp computes 16 rows or more; wide ones need the registers of more warps."""
    launch = Launch().changed(choice.launch)
    if max(head_columns(problem)[0], problem.head_dim_v) > 128 or problem.op not in ("attention", "varlen_attention"):
        return None
    few = launch.block_m < 16 * launch.num_warps and launch.num_warps > 4
    return f"{launch.num_warps} warps share {launch.block_m} rows" if few else None


def _capped_registers(choice: Choice, problem: Problem, target: Target) -> str | None:
    """maxnreg is for more programs of four warps a core: more warps have no use for it."""
    launch = Launch().changed(choice.launch)
    if launch.get("maxnreg") and launch.num_warps != 4:
        return f"maxnreg with {launch.num_warps} warps"
    return None


RULES: tuple[Rule, ...] = (_buffers, _accumulators, _rows_a_warp, _capped_registers)


def axes_of(kernel: str, problem: Problem, target: Target) -> list[Axis]:
    """The axes that apply, one for each name."""
    found: dict[str, Axis] = {}
    for axis in SPACES[kernel]:
        if axis.applies(problem, target):
            found.setdefault(axis.name, axis)
    return list(found.values())


def candidates(
    kernel: str, reads: tuple[str, ...], problem: Problem, target: Target, base: Choice,
    without: Collection[str] = (), among: Collection[str] = (),
) -> Iterator[Choice]:  # fmt: skip
    """Every combination of the kernel's axes on the base, nearest to it first. reads: Lowering choices that it has;
    without: axes that stay as the base has them; among: those that alone do not, unless it is empty.
    """
    axes = [axis for axis in axes_of(kernel, problem, target) if axis.name not in CHOICES or axis.name in reads]
    axes = [axis for axis in axes if axis.name not in without and (not among or axis.name in among)]
    found: dict[str, Choice] = {}
    for values in itertools.product(*(axis.values for axis in axes)):
        choice = apply_settings(
            base, {axis.name: value for axis, value in zip(axes, values, strict=True)}, tuple(CHOICES)
        )
        found.setdefault(choice.key, choice)
    yield from sorted(found.values(), key=lambda choice: (choice.differs(base), str(choice)))


def left_out(choice: Choice, problem: Problem, target: Target) -> str:
    """Why a candidate cannot be any good whatever the compiler does; empty where it may be."""
    return next((why for rule in RULES if (why := rule(choice, problem, target))), "")
