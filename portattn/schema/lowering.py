"""Lowering: the choices that a kernel's source leaves open. Launch: its block sizes and compiler options.
A quirk file can pick a choice's value; only a code change can add a choice (docs/lowering.md).
Step: one kernel launch of a variant as data. StepLauncher: a launcher that describes its launches as Steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec

if TYPE_CHECKING:
    import torch

DotPrecision = Literal["ieee", "tf32", "tf32x3", "bf16x6", "hf32"]


class Lowering(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Named choices of a kernel specialisation; every field becomes a `tl.constexpr` of the same name in capitals.

    Attributes:
        load: access to K and V tiles: pointer arithmetic, block pointers, or tensor descriptors (TMA)
        k_tile: a K tile is read as (D, N), or as (N, D) and transposed by `tl.trans`
        block_order: the `order` of a (D, N) block pointer: `column` is (0, 1), `row` is (1, 0)
        exp: base of the softmax: `exp2` with log2(e) folded into the scale, or `exp`
        mask_value: value of a masked score: `-inf`, or `finite` (the lowest float32; zeroed after the exponential)
        dot_precision: precision of an fp32 product; 16-bit operands ignore it
        grid: one program a tile, or `persistent`: as many programs as cores, each looping over tiles
        pipeline: `rotated` issues the next Q·K before this tile's P·V, so that softmax overlaps a product; `single` has
            no loop, for keys that fit one tile; `masked` has one loop, of masked tiles, in place of two
        select: `branch` skips a tile of padding rows by a run-time `if`; `where` lets it take no step of its loops, for
            compilers that mishandle a run-time `if`
        page_loop: `per_page`: a key tile lies in one page, whose id is read once; `flat_masked`: each of its rows looks
            up its own page, for pages smaller than a tile and compilers that cannot loop over pages; `by_page`: words
            and warps apart alone: a tile is two or four pages, whose ids are read once each, a step ahead
        q_operand: `reload` reads the left operand (Q; of an indexer K) again before each product, for compilers that
            overwrite it
        drops: dropout's random numbers: one draw for four scores, in `tiles` that begin at multiples of 16; a draw for
            each of the `scores`, for compilers that spread numbers over registers through shared memory; the same from
            products of 16-bit `halves`, for compilers that compute the signed high half
        reads: `masked`: hidden keys are not read. `inside`: for compilers that read a gathered tile whole and then mask
            it; hidden rows and keys are looked up inside their tensors, and tiles are as wide as the head, which takes
            tiles that are no power of two
        operands: of Q·Kᵀ over quantised queries and keys: `widened` to float16, whose products are exact, or as they
            are `stored`, by the chip's own 8-bit products
        parts: bfloat16 parts of float32 operands (`bf16x6`): made in `registers` from each tile that is read, or once,
            by a kernel of their own, and read from `memory`: 6 bytes a number
        unpack: numbers of a quantised cache: read as `bytes` and widened to queries' dtype, one by one; or read as
            16-bit `words` and widened to float16; or the same by NVIDIA's `ptx` instructions. A kernel that writes a
            cache divides and narrows each number by operations of every chip, or by `ptx`
        warps: of decode's few query rows, and of small problems of float32: `joint`, a program's warps share each
            product; `apart`, each attends keys of its own, and their results are merged once

    Examples:
        >>> import portattn
        >>> portattn.Lowering(load="descriptor").exp
        'exp2'
    """

    load: Literal["pointer", "block_ptr", "descriptor"] = "pointer"
    k_tile: Literal["transposed", "row"] = "transposed"
    block_order: Literal["row", "column"] = "column"
    exp: Literal["exp2", "exp"] = "exp2"
    mask_value: Literal["-inf", "finite"] = "-inf"
    dot_precision: DotPrecision = "ieee"
    grid: Literal["tiles", "persistent"] = "tiles"
    pipeline: Literal["plain", "rotated", "single", "masked"] = "plain"
    select: Literal["where", "branch"] = "where"
    page_loop: Literal["per_page", "flat_masked", "by_page"] = "per_page"
    q_operand: Literal["keep", "reload"] = "keep"
    reads: Literal["masked", "inside"] = "masked"
    drops: Literal["tiles", "scores", "halves"] = "tiles"
    operands: Literal["widened", "stored"] = "widened"
    parts: Literal["registers", "memory"] = "registers"
    unpack: Literal["bytes", "words", "ptx"] = "bytes"
    warps: Literal["joint", "apart"] = "joint"


CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(hint) for name, hint in get_type_hints(Lowering).items() if get_args(hint)
}

OptionValue = bool | int | str

# Options of some backends' compilers: backend -> name -> type. Each backend declares its own
# (planning/data_files.py). A launch passes its options on as they are: quirk and tuning files that give a backend
# another's option are refused when they are read. An absent backend has none.
BackendOptions = Mapping[str, Mapping[str, type]]


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Block sizes and compiler options of one launch, or of the two launches of gradients.

    Attributes:
        block_m: query rows of a program; of gradients the keys, or the rows, that a program holds
        block_n: keys a loop step reads; of gradients the rows, or the keys
        num_warps: warps a program
        num_stages: depth of Triton's load pipeline (1 = none)
        splits: programs that share one row's keys (decode); 1 elsewhere
        rows_m, rows_n, rows_warps, rows_stages: of gradients, the same four for the kernel that holds rows
            (`backward_rows`); the first four then belong to the kernel that holds keys. 0: the same
        options: backend compiler options, (name, value) pairs in name order; the same for both

    Examples:
        >>> import portattn
        >>> portattn.Launch(block_m=128).changed({"num_warps": 8, "maxnreg": 128}).options
        (('maxnreg', 128),)
        >>> apart = portattn.Launch(block_m=128, block_n=32, rows_m=64, rows_n=64)
        >>> apart.of_rows().block_m, apart.changed({"block_m": 32}).of_rows().block_m
        (64, 32)
    """

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    splits: int = 1
    rows_m: int = 0
    rows_n: int = 0
    rows_warps: int = 0
    rows_stages: int = 0
    options: tuple[tuple[str, OptionValue], ...] = ()

    def changed(self, values: dict[str, Any]) -> Launch:
        """Return a copy with values set; names that are no field go to `options`.

        A value is set for both kernels of gradients, unless the rows' own value is set with it."""
        followed = {rows: 0 for name, rows in OF_ROWS.items() if name in values}
        fields = followed | {k: v for k, v in values.items() if k in LAUNCH_FIELDS}
        options = dict(self.options) | {k: v for k, v in values.items() if k not in LAUNCH_FIELDS}
        return msgspec.structs.replace(self, **fields, options=tuple(sorted(options.items())))

    def of_rows(self) -> Launch:
        """Return the launch of the gradients' kernel that holds rows; this one if that has no values of its own."""
        own = {name: getattr(self, rows) for name, rows in OF_ROWS.items() if getattr(self, rows)}
        return msgspec.structs.replace(self, **own, **dict.fromkeys(OF_ROWS.values(), 0)) if own else self

    def kernels(self) -> tuple[Launch, ...]:
        """Return this launch, and that of rows if it has values of its own."""
        of_rows = self.of_rows()
        return (self,) if of_rows is self else (self, of_rows)

    def values(self) -> dict[str, Any]:
        """Return fields and options by name, for people: without rows' values that are not set."""
        fields = {name: getattr(self, name) for name in LAUNCH_FIELDS}
        return {n: v for n, v in fields.items() if v or n not in OF_ROWS.values()} | dict(self.options)

    def get(self, name: str) -> Any:
        """Return a field's or an option's value; None for an option that is not set."""
        return getattr(self, name) if name in LAUNCH_FIELDS else dict(self.options).get(name)


# Default of every launch whose compiler has the option (Backend.options).
# Multiplications and additions are fused explicitly: the default is the user's
# (TRITON_DEFAULT_FP_FUSION), and by Triton 3.9's warning it will be off from 3.10 on. Kernels would be slower, and
# round differently than tested.
FUSED = {"enable_fp_fusion": True}

# Launch values -> the values that the gradients' kernel of rows may have in their place.
OF_ROWS = {"block_m": "rows_m", "block_n": "rows_n", "num_warps": "rows_warps", "num_stages": "rows_stages"}
EVERY_KERNELS = (*OF_ROWS, "splits")  # the fields that any kernel's launch may set, and that quirks may ask about
LAUNCH_FIELDS = (*EVERY_KERNELS, *OF_ROWS.values())
POWERS_OF_TWO = ("block_m", "block_n", "num_warps", "rows_m", "rows_n", "rows_warps")


def check_option(name: str, backend: str | None, known: BackendOptions) -> None:
    """Raise ValueError if `name` is an option of other backends (None: all backends must know it)."""
    owners = [owner for owner, options in known.items() if name in options]
    if owners and backend not in owners:
        raise ValueError(f"launch {name} is an option of {', '.join(owners)}, and not of {backend or 'every backend'}")


def check_rows_value(name: str) -> None:
    """Raise ValueError if `name` is a value of the gradients' kernel of rows alone."""
    own = next((own for own, rows in OF_ROWS.items() if rows == name), None)
    if own:
        raise ValueError(f"launch {name} is for tuning of gradients alone; elsewhere {own} is set, for all kernels")


def check_launch_values(values: dict[str, Any], backend: str | None, known: BackendOptions, rows: bool = False) -> None:
    """Raise ValueError on an unknown launch name, another backend's option, or a value of the wrong kind or range.

    Args:
        rows: whether the values are of gradients' kernels, which allows OF_ROWS
    """
    options = {name: kind for own in known.values() for name, kind in own.items()}
    for name, value in values.items():
        check_option(name, backend, known)
        if not rows:
            check_rows_value(name)
        if name in LAUNCH_FIELDS:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"launch {name} is {value!r}, but must be an integer ≥ 1")
            if name in POWERS_OF_TWO and value & (value - 1):
                raise ValueError(f"launch {name} is {value}, but must be a power of two")
        elif name not in options:
            fields = LAUNCH_FIELDS if rows else EVERY_KERNELS
            raise ValueError(f"unknown launch value {name!r}; known: {', '.join([*fields, *options])}")
        elif type(value) is not options[name]:
            raise ValueError(f"launch {name} is {value!r}, but must be of type {options[name].__name__}")


Buffers: TypeAlias = "dict[str, tuple[tuple[int, ...], torch.dtype]]"


@dataclass(slots=True)
class Step:
    kernel: Any  # a `@triton.jit` or `@gluon.jit` function
    grid: tuple[int, ...]  # up to three numbers of programs
    arguments: Mapping[str, Any]  # every argument by name: tensors, descriptors, numbers, None, tl.constexpr
    options: Mapping[str, Any]  # compiler options: num_warps, num_stages, maxnreg, launch_pdl, …
    # argument -> name of its tensor, for tensors that change from call to call
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> list[Any]:
        return [self.arguments[name] for name in self.kernel.arg_names]


def launch_steps(steps: Sequence[Step]) -> None:
    """Launch through Triton, which compiles missing kernels."""
    for step in steps:
        step.kernel[step.grid](*step.values, **step.options)


class StepLauncher:
    """A launcher (`Variant.launcher`) that describes its launches by Steps. Calling it launches through Triton.

    `driver_launch.DriverLauncher` launches later calls and calls `steps` once: `steps` may depend only on the tensors'
    shapes, strides and types, and the roles must name every tensor and descriptor of a Step.

    Args:
        buffers: shapes and dtypes, by name, of tensors that pass between the kernels; allocated for each call
        each: functions, by name, that return one more tensor for a launch (a counter, say), kept as long as the launch
    """

    def __init__(self, buffers: Buffers | None = None, each: Mapping[str, Callable[[], torch.Tensor]] | None = None):
        self.buffers, self.each = buffers or {}, each or {}

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        """Return a call's launches. `tensors` has the Call's tensors by name, out, lse, and the tensors of `fresh`."""
        raise NotImplementedError

    def fresh(self, q: torch.Tensor, given: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """Return the missing buffers and the tensors of `each`."""
        buffers = {
            name: q.new_empty(shape, dtype=dtype)
            for name, (shape, dtype) in self.buffers.items()
            if (given or {}).get(name) is None
        }
        return {**buffers, **{name: give() for name, give in self.each.items()}}

    def __call__(self, tensors: Mapping[str, Any]) -> None:
        launch_steps(self.steps({**tensors, **self.fresh(tensors["q"], tensors)}))
