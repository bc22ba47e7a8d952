"""The launches of the gradients' kernels, for dense and for packed tensors, and of a bias's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from portattn.launch.arguments import (
    CAPTURED_SIZES,
    alibi_stride,
    block_strides,
    captured_sizes,
    captured_tensors,
    dropping,
    features,
    list_strides,
    outer_strides,
    score_strides,
    strides,
    window,
)
from portattn.launch.kernelcall import KernelCall
from portattn.planning.kernel_specs import (
    CORES,
    DenseBackward,
    ceil_div,
    chunks_of,
    heads_together,
    packed_keys,
    packed_tiles,
    tile_width,
)
from portattn.planning.registry import Registry
from portattn.schema.call import Call
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.ops import CAPTURED_GRADIENTS
from portattn.schema.plan import Plan
from portattn.schema.symbolic_int import least, most
from portattn.schema.tensors import POINTER_ALIGNMENT

BY_ROWS, BY_KEYS = "portattn.kernels.row_gradients", "portattn.kernels.key_gradients"
UNSPECIALISED = frozenset(
    {
        "heads_q", "heads_k", "group", "seq_q", "seq_k", "key_tiles", "row_tiles", "together", "tiles", "batches",
        "left", "right", "chunk", "threshold", *CAPTURED_SIZES,
    }
)  # fmt: skip
DELTA_ROWS = 32  # a program of backward_delta
# Constants that backward_delta has.
_DELTA = ("HEAD_DIM_V", "BLOCK_DV", "GRID")
_ALIGNED = POINTER_ALIGNMENT // 4  # float32
_BUFFERED = 128 // 4
_PART_COLUMNS = POINTER_ALIGNMENT // 2  # bfloat16
_OPERANDS = {"q": "q", "k": "k", "v": "v", "do": "grad_out"}  # as their strides are named, and as they are
PART_ROWS = 32  # of a program of store_parts


def calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    """Return the launches of one backward, with delta (B,Hq,Sq) float32.

    With `parts = memory` the parts of Q, K, V and dO are allocated too, 6 bytes a number."""
    problem, kernel = plan.problem, CORES[plan.problem.op]
    assert isinstance(kernel, DenseBackward)
    lowering, launch = plan.specialised
    assert call.grad_q is not None
    assert call.grad_k is not None
    assert call.grad_v is not None
    delta = call.new_out()
    _, rows = problem.query_rows
    of_rows = launch.of_rows()
    constants = kernel.constexprs(problem, lowering, launch)
    together = heads_together(problem, Registry.load().arch(plan.target))

    def grid(tiles: int) -> tuple[int, ...]:
        return (least(tiles, cores) if lowering.grid == "persistent" else tiles,)

    first = _delta_call(call, delta, constants, launch, grid)
    operands = {name: getattr(call, field) for name, field in _OPERANDS.items()}
    inputs: dict[str, int] = {}
    made: list[KernelCall] = []
    for name, tensor in operands.items():
        if lowering.parts == "memory" and lowering.dot_precision == "bf16x6":
            one, operands[name], own = _in_parts(name, call, tensor, launch, grid, lowering)
            made.append(one)
            inputs |= own
        else:
            inputs |= strides(name, tensor, "bhsd")
    tensors = {field: operands[name] for name, field in _OPERANDS.items()}
    tensors |= {"forward_lse": call.forward_lse, "delta": delta}
    options = {
        "seqlens_q": call.seqlens_q, "seqlens_k": call.seqlens_k, "leftpad_q": call.leftpad_q,
        "leftpad_k": call.leftpad_k, "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k,
        "alibi_slopes": None, "bias": None, "mask": None, "block_mask": None, **_given(call), **captured_tensors(call),
        "dropout_seed": call.dropout_seed,
        "scale": float(call.scale), "softcap": float(call.softcap),
    }  # fmt: skip
    threshold, keep_scale = dropping(call)
    options["keep_scale"] = keep_scale
    absent = strides("bias", None, "bhqk") | strides("mask", None, "bhqk")  # packed rows have neither
    scores: dict[str, Any] = {**alibi_stride(call), **absent, **score_strides(call)}
    sizes = {
        "group": problem.group, "seq_q": rows,
        "seq_k": problem.seq_k if problem.total_k is None else problem.total_k,
    }  # fmt: skip
    rest = {"batches": problem.batch, **window(problem), "threshold": threshold, **captured_sizes(call)}

    # A cached launch finds a tensor by its name in the call.
    of_keys = {
        "block_queries" if name == "block_mask" else name: value
        for name, value in (options | {"block_mask": call.block_queries}).items()
    }
    tiles = kernel.key_tiles(problem, launch)
    key_tiles = packed_keys(problem, launch) if problem.packed else ceil_div(problem.seq_k, launch.block_m)
    by_keys = KernelCall(
        BY_KEYS, "backward_keys", grid(tiles),
        {
            **tensors, "grad_k": call.grad_k, "grad_v": call.grad_v, **of_keys, **inputs,
            **outer_strides("dk", call.grad_k, "bhs"), **outer_strides("dv", call.grad_v, "bhs"), **scores,
            **block_strides(call, "block_queries", "bhk"),
            "heads_q": problem.heads_q, "heads_k": problem.heads_k, **sizes, "key_tiles": key_tiles,
            "together": together, "tiles": tiles, **rest,
        },
        constants
        | {
            "NUMBERS": _numbers_by(call, lowering, launch, constants["CAUSAL"]),
            "DROPS": kernel.drops_by_keys(problem, lowering),
        },
        launch, UNSPECIALISED,
    )  # fmt: skip

    tiles = kernel.row_tiles(problem, launch)
    row_tiles = packed_tiles(problem, of_rows, 1) if problem.packed else ceil_div(problem.seq_q, of_rows.block_m)
    by_rows = KernelCall(
        BY_ROWS, "backward_rows", grid(tiles),
        {
            **tensors, "grad_q": call.grad_q, "grad_slopes": call.grad_slopes,
            **{name: getattr(call, name) for name in CAPTURED_GRADIENTS}, **options, **inputs,
            **outer_strides("dq", call.grad_q, "bhs"), **scores, **block_strides(call),
            "heads_q": problem.heads_q, **sizes, "row_tiles": row_tiles, "together": together, "tiles": tiles, **rest,
        },
        {name: value for name, value in kernel.constexprs(problem, lowering, of_rows).items() if name != "SINKS"}
        | {"CAPTURED_GRADIENT": (problem.grad_captured and problem.score_mod) or None},
        of_rows, UNSPECIALISED,
    )  # fmt: skip
    launches = [first, *made, by_keys, by_rows]
    if call.grad_bias is not None:
        launches.append(bias_call(plan, call, delta, constants, lowering, launch, cores))
    return launches, delta, None


def _delta_call(
    call: Call, delta: torch.Tensor, constants: dict[str, Any], launch: Launch, grid: Callable[[Any], tuple[int, ...]]
) -> KernelCall:
    batch, rows = call.problem.query_rows
    row_tiles = ceil_div(rows, DELTA_ROWS)
    tiles = batch * call.problem.heads_q * row_tiles
    return KernelCall(
        BY_ROWS, "backward_delta", grid(tiles),
        {
            "forward_out": call.forward_out, "grad_out": call.grad_out, "forward_lse": call.forward_lse,
            "grad_lse": call.grad_lse, "delta": delta,
            **strides("o", call.forward_out, "bhsd"), **strides("do", call.grad_out, "bhsd"),
            "heads_q": call.problem.heads_q, "seq_q": rows, "row_tiles": row_tiles, "tiles": tiles,
        },
        {name: constants[name] for name in _DELTA} | {"BLOCK_M": DELTA_ROWS}, launch, UNSPECIALISED,
    )  # fmt: skip


def _in_parts(
    name: str, call: Call, tensor: Any, launch: Launch, grid: Callable[[Any], tuple[int, ...]], lowering: Lowering
) -> tuple[KernelCall, torch.Tensor, dict[str, int]]:
    """Return the launch that stores a tensor's bf16 parts (rows padded for TMA), the parts and their strides."""
    batch, heads, rows, columns = tensor.shape
    width = ceil_div(columns, _PART_COLUMNS) * _PART_COLUMNS
    parts = call.empty(batch, heads, 3, rows, width, dtype=torch.bfloat16)
    row_tiles = ceil_div(rows, PART_ROWS)
    tiles = batch * heads * row_tiles
    stored = KernelCall(
        "portattn.kernels.split_bf16", "store_parts", grid(tiles),
        {
            **dict.fromkeys(_OPERANDS.values()), _OPERANDS[name]: tensor, "parts": parts,
            **_without_name(strides(name, tensor, "bhsd")), "heads": heads,
            "rows": rows, "row_tiles": row_tiles, "tiles": tiles,
        },
        {
            "COLS": columns, "WIDTH": width, "BLOCK_COLS": tile_width(width, False), "BLOCK_M": PART_ROWS,
            "GRID": lowering.grid,
        },
        launch, frozenset({"heads", "rows", "row_tiles", "tiles"}),
    )  # fmt: skip
    apart = rows * width
    own = {f"{name}_stride_b": 3 * heads * apart, f"{name}_stride_h": 3 * apart, f"{name}_stride_s": width}
    return stored, parts, own | {f"{name}_stride_d": 1}


def _without_name(values: dict[str, int]) -> dict[str, int]:
    return {name.partition("_")[2]: value for name, value in values.items()}


def _numbers_by(call: Call, lowering: Lowering, launch: Launch, causal: str) -> str:
    """Return how backward_keys reads the LSE and delta of a full tile of rows: "descriptor" or "pointer".

    A descriptor's memory and each tile read through it begin at a multiple of 16 bytes. A bias or mask leaves no tile
    full. Each buffer of a pipeline must begin at a multiple of 128 bytes: tiles of 16 rows ended in "misaligned
    address" on an H200."""
    problem = call.problem
    if call.bias is not None or call.mask is not None:
        return "pointer"
    lengths = (call.seqlens_q, call.seqlens_k, call.leftpad_q, call.leftpad_k)
    if lowering.load != "descriptor" or launch.block_n < _BUFFERED:
        return "pointer"
    if not problem.aligned or problem.packed or lengths != (None,) * 4:
        return "pointer"
    first = 0  # row that sees a key, which the first tile begins at
    if causal == "bottom_right" or (problem.chunk and causal == "none"):
        right = 0 if problem.chunk else window(problem)["right"]  # a row before the first key is in no chunk of it
        first = most(0, problem.seq_q - problem.seq_k - right)
    return "descriptor" if problem.seq_q % _ALIGNED == 0 and first % _ALIGNED == 0 else "pointer"


def _given(call: Call) -> dict[str, Any]:
    """Return the features' tensors except sinks: the LSE counts them, and their own gradient needs no kernel."""
    return {name: tensor for name, tensor in features(call).items() if name != "sinks"}


UNSPECIALISED_BLOCKS = frozenset(
    {"heads_k", "seq_q", "seq_k", "places", "blocks", "entries", "chunks", "chunk_rows", "tiles"}
)
SUM_ROWS = 16  # keys of a program of backward_block_sum


def rows_by_block(
    indices: torch.Tensor, counts: torch.Tensor | None, blocks: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a Call's block_rows, block_starts and block_chunks for lists (B, Hk, Sq, T); keys have so many blocks.

    Rows of a block keep their order, so that sums over them repeat bit by bit."""
    places = indices.shape[-1]
    counted = (indices >= 0) & (indices < blocks)
    if counts is not None:
        counted &= torch.arange(places, device=indices.device) < counts[..., None]
    # Contiguous: the kernels read rows of it, and a permuted list of one place stays permuted through all of these.
    ordered, order = torch.where(counted, indices, blocks).flatten(2).contiguous().sort(dim=-1, stable=True)
    bounds = torch.arange(blocks + 1, dtype=torch.int32, device=indices.device).expand(*ordered.shape[:2], blocks + 1)
    starts = torch.searchsorted(ordered, bounds.contiguous(), out_int32=True)
    chunks, rows = chunks_of(ordered.shape[2], blocks, group)
    needed = (starts.diff(dim=-1) + (rows - 1)).div(rows, rounding_mode="floor").clamp(min=1)  # an empty block has one
    firsts = torch.nn.functional.pad(needed.cumsum(-1, dtype=torch.int32), (1, 0))
    numbers = torch.arange(chunks, dtype=torch.int32, device=indices.device).expand(*ordered.shape[:2], chunks)
    owners = torch.searchsorted(firsts, numbers.contiguous(), out_int32=True, right=True) - 1
    return (order // places).int(), starts, torch.cat([firsts, owners], dim=-1)


def block_calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    """Return the launches of the gradients over chosen blocks, with delta (B,Hq,Sq) float32."""
    problem, kernel = plan.problem, CORES[plan.problem.op]
    assert isinstance(kernel, DenseBackward)
    lowering, launch = plan.specialised
    delta = call.new_out()

    def grid(tiles: int) -> tuple[int, ...]:
        return (least(tiles, cores) if lowering.grid == "persistent" else tiles,)

    constants, of_rows = kernel.constexprs(problem, lowering, launch), launch.of_rows()
    tensors = {
        "q": call.q, "k": call.k, "v": call.v, "grad_out": call.grad_out, "forward_lse": call.forward_lse,
        "delta": delta,
    }  # fmt: skip
    inputs = {
        "scale": float(call.scale), **strides("q", call.q, "bhsd"), **strides("k", call.k, "bhsd"),
        **strides("v", call.v, "bhsd"), **strides("do", call.grad_out, "bhsd"),
    }  # fmt: skip
    sizes = {"heads_k": problem.heads_k, "seq_q": problem.seq_q, "seq_k": problem.seq_k}
    blocks, entries = ceil_div(problem.seq_k, problem.block_k), problem.seq_q * problem.tokens
    chunks, chunk_rows = chunks_of(entries, blocks, problem.group)
    width = problem.head_dim + problem.head_dim_v
    parts = call.empty(problem.batch, problem.heads_k, chunks, problem.block_k, width, dtype=torch.float32)
    tiles = kernel.key_tiles(problem, launch)
    by_keys = KernelCall(
        BY_KEYS, kernel.function, grid(tiles),
        {
            **tensors, "grad_parts": parts, "seqlens_k": call.seqlens_k, "block_rows": call.block_rows,
            "block_starts": call.block_starts, "block_chunks": call.block_chunks, **inputs, **sizes, "blocks": blocks,
            "entries": entries, "chunks": chunks, "chunk_rows": chunk_rows, "tiles": tiles,
        },
        constants, launch, UNSPECIALISED_BLOCKS,
    )  # fmt: skip
    tiles = problem.batch * problem.heads_k * blocks * (problem.block_k // SUM_ROWS)
    summed = KernelCall(
        BY_KEYS, "backward_block_sum", grid(tiles),
        {
            "grad_parts": parts, "grad_k": call.grad_k, "grad_v": call.grad_v, "block_chunks": call.block_chunks,
            "scale": float(call.scale), **outer_strides("dk", call.grad_k, "bhs"),
            **outer_strides("dv", call.grad_v, "bhs"), "heads_k": problem.heads_k, "seq_k": problem.seq_k,
            "blocks": blocks, "chunks": chunks, "tiles": tiles,
        },
        {name: constants[name] for name in (*_DELTA, "BLOCK_KEYS", "HEAD_DIM", "BLOCK_D")} | {"BLOCK_M": SUM_ROWS},
        Launch(num_warps=launch.num_warps, num_stages=1, options=launch.options), UNSPECIALISED_BLOCKS,
    )  # fmt: skip
    tiles = kernel.row_tiles(problem, launch)
    by_rows = KernelCall(
        BY_ROWS, kernel.of_rows, grid(tiles),
        {
            **tensors, "grad_q": call.grad_q, "seqlens_k": call.seqlens_k, "indices": call.indices,
            "counts": call.counts, **inputs, **outer_strides("dq", call.grad_q, "bhs"), **list_strides(call), **sizes,
            "places": problem.tokens, "tiles": tiles,
        },
        kernel.constexprs(problem, lowering, of_rows), of_rows, UNSPECIALISED_BLOCKS,
    )  # fmt: skip
    return [_delta_call(call, delta, constants, launch, grid), by_keys, summed, by_rows], delta, None


MODULE = "portattn.kernels.gradients"
UNSPECIALISED_BIAS = frozenset(
    {
        "heads_q", "group", "seq_q", "seq_k", "row_tiles", "key_tiles", "own_heads", "own_rows", "own_keys", "tiles",
        "batches", "left", "right", "chunk", "threshold", "own_batches",
    }
)  # fmt: skip
LARGEST_TILE = 64  # rows, and keys: beside a tile of scores it holds one of sums
_NOT_READ = (
    "LOAD", "SEARCH", "Q_OPERAND", "PARTS", "LISTED_Q", "LISTED_K", "SCORE_MOD", "MASK_MOD", "SCORE_GRADIENT",
)  # fmt: skip


def bias_call(
    plan: Plan, call: Call, delta: torch.Tensor, constants: dict[str, Any], lowering: Lowering, launch: Launch,
    cores: int,
) -> KernelCall:  # fmt: skip
    """Return the launch that fills call.grad_bias, whose size is 1 along every axis that the bias is broadcast over."""
    p, own = plan.problem, call.grad_bias
    assert own is not None
    batches, heads, rows, keys = own.shape
    tile = msgspec.structs.replace(
        launch, block_m=min(launch.block_m, LARGEST_TILE), block_n=min(launch.block_n, LARGEST_TILE)
    )
    row_tiles, key_tiles = ceil_div(p.seq_q, tile.block_m), ceil_div(p.seq_k, tile.block_n)
    by_row, by_key = rows == p.seq_q, keys == p.seq_k
    tiles = batches * heads * (row_tiles if by_row else 1) * (key_tiles if by_key else 1)
    threshold, keep_scale = dropping(call)
    arguments = {
        "q": call.q, "k": call.k, "v": call.v, "grad_out": call.grad_out, "forward_lse": call.forward_lse,
        "delta": delta, "grad_bias": own,
        "seqlens_q": call.seqlens_q, "seqlens_k": call.seqlens_k, "leftpad_q": call.leftpad_q,
        "leftpad_k": call.leftpad_k, "alibi_slopes": call.alibi_slopes, "bias": call.bias, "mask": call.mask,
        "dropout_seed": call.dropout_seed, "scale": float(call.scale), "softcap": float(call.softcap),
        "keep_scale": keep_scale,
        **strides("q", call.q, "bhsd"), **strides("k", call.k, "bhsd"), **strides("v", call.v, "bhsd"),
        **strides("do", call.grad_out, "bhsd"), **alibi_stride(call), **score_strides(call),
        "heads_q": p.heads_q, "group": p.group, "seq_q": p.seq_q, "seq_k": p.seq_k, "row_tiles": row_tiles,
        "key_tiles": key_tiles, "own_batches": batches, "own_heads": heads, "own_rows": rows, "own_keys": keys,
        "tiles": tiles, "batches": p.batch, **window(p), "threshold": threshold,
    }  # fmt: skip
    constexprs = {name: value for name, value in constants.items() if name not in _NOT_READ} | {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BY_ROW": by_row, "BY_KEY": by_key,
    }  # fmt: skip
    grid = (least(tiles, cores) if lowering.grid == "persistent" else tiles,)
    return KernelCall(MODULE, "backward_bias", grid, arguments, constexprs, tile, UNSPECIALISED_BIAS)
