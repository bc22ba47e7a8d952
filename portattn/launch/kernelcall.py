"""KernelCall: a kernel launch as data. Signature: the part that its compiler sees, as plain data.

`signature` is of a KernelCall, `signatures` of a variant's launches without the chip, specialised as in Triton 3.6.
`meta_call` makes a problem's call of tensors without data.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from portattn.kernels.score_program import parse
from portattn.planning.kernel_specs.backward import chunks_of
from portattn.schema.call import TENSORS, Call
from portattn.schema.lowering import FUSED, Launch, Step
from portattn.schema.ops import CAPTURED, FEATURES, ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import WORD_ALIGNMENT, ds_row_bytes
from portattn.schema.tensors import INT32_MAX, KV_STORED, POINTER_ALIGNMENT, TORCH_DTYPE, TRITON_DTYPE, TWO_GIB, spans

if TYPE_CHECKING:
    from portattn.schema.lowering import StepLauncher


@dataclass(slots=True)
class KernelCall:
    """One launch: `module.function[grid](**arguments, **constexprs)` with the compiler options of `launch`."""

    module: str
    function: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # in the kernel's order: tensors (or meta tensors), numbers, None
    constexprs: dict[str, Any]
    launch: Launch
    unspecialised: frozenset[str] = field(default_factory=frozenset)  # integers that the kernel does not specialise on
    fusible: bool = True  # whether the compiler has the option `enable_fp_fusion`

    def options(self) -> dict[str, Any]:
        named = {"num_warps": self.launch.num_warps, "num_stages": self.launch.num_stages}
        found = named | FUSED | dict(self.launch.options)
        return found if self.fusible else {name: value for name, value in found.items() if name not in FUSED}


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a compiler sees of a KernelCall, as plain data for a child process."""

    module: str
    function: str
    types: dict[str, str]  # run-time argument -> Triton type (`*fp16`, `i32`, `fp32`)
    constants: dict[str, bool | int | float | str | None]  # tl.constexpr, absent, or equal to 1
    divisible: tuple[str, ...]  # multiples of 16
    small: tuple[str, ...]  # tensors that span less than 2 GiB, for AMD's buffer instructions
    options: dict[str, bool | int | str]


def signature(call: KernelCall) -> Signature:
    """Return the call as Triton specialises it at run time: 1 is constant, multiples of 16 are marked."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = dict(call.constexprs)
    divisible, small = [], []
    for name, value in call.arguments.items():
        if value is None:
            constants[name] = None
        elif isinstance(value, torch.Tensor):
            types[name] = "*" + TRITON_DTYPE[value.dtype]
            if value.is_meta or value.data_ptr() % POINTER_ALIGNMENT == 0:
                divisible.append(name)
            if spans(value) < TWO_GIB:
                small.append(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1 and name not in call.unspecialised:
            constants[name] = 1
        else:
            types[name] = "i32" if -INT32_MAX - 1 <= value <= INT32_MAX else "i64"
            if value % POINTER_ALIGNMENT == 0 and name not in call.unspecialised:
                divisible.append(name)
    return Signature(
        module=call.module,
        function=call.function,
        types=types,
        constants=constants,
        divisible=tuple(divisible),
        small=tuple(small),
        options=call.options(),
    )


class LaunchSource(Protocol):
    """A variant, or a variant with its own schedule."""

    def described(self, call: Call) -> StepLauncher: ...


def signatures(variant: LaunchSource, call: Call) -> list[Signature]:
    """Return the signatures of a variant's launches; raise ImportError or AttributeError on an unsuitable Triton."""
    twin, tensors = without_data(call), {name: getattr(call, name) for name in TENSORS}
    launcher = variant.described(twin)
    named = {name: getattr(twin, name) for name in TENSORS}
    named |= {"out": twin.new_out(), "lse": twin.new_lse() if call.problem.return_lse else None}
    steps = launcher.steps({**named, **launcher.fresh(twin.q)})
    return [step_signature(step, tensors) for step in steps if 0 not in step.grid]


def without_data(call: Call) -> Call:
    def empty(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    tensors: dict[str, Any] = {name: empty(getattr(call, name)) for name in TENSORS}
    return dataclasses.replace(call, dry=True, **tensors)


def step_signature(step: Step, tensors: Mapping[str, torch.Tensor | None]) -> Signature:
    """Return the Signature of one Step. `tensors` holds the call's own by role: their alignment counts."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible, small = [], []
    fixed, general = constexprs(step.kernel), unspecialised_arguments(step.kernel)
    for name, value in zip(step.kernel.arg_names, step.values, strict=True):
        value = getattr(value, "value", value) if name in fixed else value  # tl.constexpr holds one
        if value is None or name in fixed:
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            types[name] = "*" + TRITON_DTYPE[value.dtype]
            if is_aligned(tensors.get(step.roles.get(name, ""), value)):
                divisible.append(name)
            if spans(value) < TWO_GIB:
                small.append(name)
        elif hasattr(value, "block_shape"):
            types[name] = f"tensordesc<{TRITON_DTYPE[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
        elif isinstance(value, bool):
            types[name] = "u1"
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1 and name not in general:
            constants[name] = 1
        else:
            types[name] = "i32" if -INT32_MAX - 1 <= value <= INT32_MAX else "i64"
            if value % POINTER_ALIGNMENT == 0 and name not in general:
                divisible.append(name)
    return Signature(
        module=step.kernel.fn.__module__,
        function=step.kernel.fn.__name__,
        types=types,
        constants=constants,
        divisible=tuple(divisible),
        small=tuple(small),
        options=dict(step.options),
    )


def is_aligned(tensor: torch.Tensor | None) -> bool:
    """Return whether Triton assumes that a tensor's address is a multiple of 16."""
    return tensor is None or tensor.is_meta or tensor.data_ptr() % POINTER_ALIGNMENT == 0


def constexprs(kernel: Any) -> set[str]:
    """Return the names of a jit function's tl.constexpr arguments, also of an interpreted one."""
    parameters = inspect.signature(kernel.fn).parameters
    return {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}


def unspecialised_arguments(kernel: Any) -> set[str]:
    named: Sequence[int | str]
    named = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()
    return {kernel.arg_names[name] if isinstance(name, int) else name for name in named}


PAGES = 4096  # pages of a cache whose size a problem does not say; nothing compiled depends on it
CAP = 50.0
ANGLES = 4096  # rows of a rotary embedding's tables, likewise
DROPPED = 0.1


def meta_call(problem: Problem) -> Call:
    """Return a call of this problem on the meta device; an unaligned one gets rows an element or word longer."""
    p = problem
    if ROWS[p.op].allocates:
        return _filling(p)
    dtype, pad = TORCH_DTYPE[p.dtype], 0 if p.aligned else 1
    pad_k = WORD_ALIGNMENT if pad and p.word_aligned and p.kv_format != "as_q" else pad
    stored, queries, values = (dtype if f == "as_q" else KV_STORED for f in (p.kv_format, p.q_format, p.v_format))
    batch_q, rows_q = p.query_rows
    queries_first = p.layout == "bshd" or p.packed or (p.writes and p.page_size > 0)

    def view(
        batch: int, heads: int, seq: int, dim: int, heads_last: bool, dtype: torch.dtype = dtype, pad: int = pad
    ) -> torch.Tensor:
        shape = (batch, seq, heads) if heads_last else (batch, heads, seq)
        full = torch.empty(*shape, dim + pad, dtype=dtype, device="meta")[..., :dim]
        return full.transpose(1, 2) if heads_last else full

    def keys(dim: int, dtype: torch.dtype = stored) -> torch.Tensor:
        if p.page_size:
            return view(PAGES, p.heads_k, p.page_size, dim, p.page_layout == "phd", dtype, pad_k)
        if p.total_k is not None:
            return view(1, p.heads_k, p.total_k, dim, True, dtype, pad_k)
        return view(p.batch, p.heads_k, p.seq_k, dim, p.layout == "bshd", dtype, pad_k)

    def scales(of: Callable[[int], torch.Tensor], scaled: bool = True) -> torch.Tensor | None:
        if p.kv_scales == "none" or not scaled:
            return None
        if p.kv_scales == "head":
            return torch.empty(p.batch, p.heads_k, device="meta")
        return of(1)[..., 0].to(torch.float32)

    def rows(dim: int) -> torch.Tensor:
        return view(batch_q, p.heads_q, rows_q, dim, queries_first, queries)

    def integers(given: bool, *shape: int) -> torch.Tensor | None:
        return torch.empty(shape, dtype=torch.int32, device="meta") if given else None

    sizes = p.axis_sizes()
    features: dict[str, Any] = {
        name: torch.empty(
            [sizes[axis] for axis in feature.axes],
            dtype=getattr(torch, feature.dtype) if feature.dtype else dtype,
            device="meta",
        )
        for name, feature in FEATURES.items()
        if feature.axes and getattr(p, name) and not (p.has_lists and name == "seqlens_k")
    }
    latent, kind = p.op == "mla_attention", p.cache_format
    paged, by_head = p.page_size > 0 and not p.writes and not p.has_lists, p.op == "sparse_attention"
    lists = (p.batch, p.heads_q) if by_head else (batch_q, rows_q)[p.packed :]
    if p.has_blocks:
        lists = p.batch, p.heads_k, p.seq_q
    rope = p.head_dim - p.head_dim_v if latent else 0
    k = keys(ds_row_bytes(p.head_dim, p.head_dim_v) if kind.latent else p.head_dim // kind.per_byte)
    if kind.block:
        features["k_block_scale"], features["v_block_scale"] = (
            keys(dim // kind.block, KV_STORED) for dim in (p.head_dim, p.head_dim_v)
        )
    if p.dropout:
        features["dropout_seed"] = torch.empty(1, dtype=torch.int64, device="meta")
        features["dropout_p"] = DROPPED
    if p.writes:
        features |= _new_rows(p, view)
    if p.backward:
        features |= _gradients(p, view, keys)
    features |= _captured(p)
    return Call(
        problem=p,
        q=rows(p.head_dim_v if latent else p.head_dim),
        q_rope=view(batch_q, p.heads_q, rows_q, rope, queries_first) if rope else None,
        k=k,
        v=k[..., : p.head_dim_v] if latent else keys(p.head_dim_v // kind.per_byte, values),
        q_scale=scales(rows, p.q_format != "as_q"),
        k_scale=scales(keys),
        v_scale=scales(keys, p.v_format != "as_q"),
        scale=-(p.head_dim**-0.5) if p.negative_scale else p.head_dim**-0.5,
        softcap=CAP if p.softcap else 0.0,
        cu_seqlens_q=integers(p.packed and not p.has_lists, p.batch + 1),
        cu_seqlens_k=integers(p.total_k is not None, p.batch + 1),
        page_table=integers(paged, p.batch, p.seq_k // p.page_size if p.page_size else 0),
        indices=integers(by_head or p.has_lists or p.has_blocks, *lists, p.tokens),
        counts=integers(by_head or (p.has_lists and p.seqlens_k) or p.has_blocks, *lists),
        magicpig_bits=integers(p.magicpig, p.heads_q),
        magicpig_tables=integers(p.magicpig, p.heads_q),
        **features,
    )


_KINDS = {"f": torch.float32, "i": torch.int32, "l": torch.int64, "b": torch.bool}
READ = 64  # elements along each axis of a captured tensor, likewise


def _captured(p: Problem) -> dict[str, torch.Tensor]:
    """Return the tensors that a problem's score and mask functions read."""
    shapes = {n: shape for text in (p.score_mod, p.mask_mod) if text for n, shape in parse(text).captures.items()}
    found = {
        CAPTURED[number]: torch.empty([READ] * rank, dtype=_KINDS[kind], device="meta")
        for number, (kind, rank, _) in shapes.items()
    }
    wanted = [name for number, name in enumerate(CAPTURED) if p.backward and p.grad_captured >> number & 1]
    return found | {f"grad_{name}": torch.empty(found[name].shape, device="meta") for name in wanted}


def _filling(p: Problem) -> Call:
    """Return the call of an operation that fills `result`, with ranges of rows unless it reads pages."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32, pad: int = 0) -> torch.Tensor:
        return torch.empty(*shape[:-1], shape[-1] + pad, dtype=dtype, device="meta")[..., : shape[-1]]

    numbers, pad = KV_STORED if p.kv_format != "as_q" else TORCH_DTYPE[p.dtype], 0 if p.aligned else 1
    names = () if p.page_size else ("row_starts", "row_ends")
    ranges: dict[str, Any] = {name: empty(p.batch * p.seq_q) for name in names}
    if p.op == "topk_indices":
        q = empty(p.batch, 1, p.seq_q, p.seq_k, dtype=numbers, pad=pad)
        return Call(problem=p, q=q, k=q, v=q, scale=1.0, result=empty(p.batch, p.seq_q, p.tokens), **ranges)
    pages = (PAGES, p.page_size) if p.page_size else (1, p.seq_k)
    k = empty(*pages, p.head_dim, dtype=numbers, pad=pad)[:, None]
    return Call(
        problem=p,
        q=empty(p.batch, p.seq_q, p.heads_q, p.head_dim, dtype=numbers, pad=pad).transpose(1, 2),
        k=k,
        v=k,
        scale=1.0,
        weights=empty(p.batch, p.seq_q, p.heads_q, dtype=torch.float32),
        k_scale=empty(*pages, dtype=torch.float32)[:, None] if p.kv_scales == "token" else None,
        page_table=empty(p.batch, p.seq_k // p.page_size) if p.page_size else None,
        seqlens_k=empty(p.batch) if p.page_size else None,
        result=empty(p.batch, p.seq_q, p.seq_k, dtype=torch.float32),
        **ranges,
    )


def _new_rows(p: Problem, view: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Return a write's tensors beside the new keys; slots and positions are int64, as in engines."""
    found = {"new_v": view(p.batch, p.heads_k, p.seq_q, p.head_dim_v, p.page_size > 0 or p.layout == "bshd")}
    tables = [torch.empty(ANGLES, p.rotary_dim // 2, device="meta") for _ in range(2)]
    whole = torch.empty(p.seq_q, dtype=torch.int64, device="meta")
    found |= {"cos": tables[0], "sin": tables[1]} if p.rotary_dim else {}
    found |= {"slots": whole} if p.page_size else {}
    return found | ({"positions": whole} if p.page_size and p.rotary_dim else {})


def _gradients(p: Problem, view: Callable[..., torch.Tensor], keys: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """Return the gradients' tensors beside the forward's."""
    batch, rows = p.query_rows
    last = p.layout == "bshd" or p.packed

    def numbers(given: bool = True) -> torch.Tensor | None:
        return torch.empty(batch, p.heads_q, rows, device="meta") if given else None

    def queries(dim: int) -> torch.Tensor:
        return view(batch, p.heads_q, rows, dim, last)

    bias = torch.empty(p.batch, p.heads_q, p.seq_q, p.seq_k, device="meta") if p.grad_bias else None
    return {
        "forward_out": queries(p.head_dim_v), "grad_out": queries(p.head_dim_v), "grad_q": queries(p.head_dim),
        "grad_k": keys(p.head_dim), "grad_v": keys(p.head_dim_v), "forward_lse": numbers(),
        "grad_lse": numbers(p.grad_lse), "grad_slopes": numbers(p.grad_slopes), "grad_bias": bias,
        **(_rows_of_blocks(p) if p.has_blocks else {}), **(_queries_of_blocks(p) if p.block_mask else {}),
    }  # fmt: skip


def _queries_of_blocks(p: Problem) -> dict[str, Any]:
    down, across = -(-p.seq_q // p.block_q), -(-p.seq_k // p.block_k)
    return {"block_queries": torch.empty(p.batch, p.heads_q, across, down + 2, dtype=torch.int32, device="meta")}


def _rows_of_blocks(p: Problem) -> dict[str, Any]:
    entries, blocks = p.seq_q * p.tokens, -(-p.seq_k // p.block_k)
    chunks, _ = chunks_of(entries, blocks, p.group)
    sizes = {"block_rows": entries, "block_starts": blocks + 1, "block_chunks": blocks + 1 + chunks}
    return {
        name: torch.empty(p.batch, p.heads_k, size, dtype=torch.int32, device="meta") for name, size in sizes.items()
    }
