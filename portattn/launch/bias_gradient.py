"""The launch of backward_bias."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from portattn.launch.arguments import alibi_stride, score_strides, strides, window
from portattn.launch.dropping import dropping
from portattn.launch.kernelcall import KernelCall
from portattn.planning.kernel_specs import ceil_div
from portattn.schema.call import Call
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.plan import Plan
from portattn.schema.symbolic_int import least

MODULE = "portattn.kernels.bias_gradient"
UNSPECIALISED = frozenset(
    {
        "heads_q", "group", "seq_q", "seq_k", "row_tiles", "key_tiles", "own_heads", "own_rows", "own_keys", "tiles",
        "batches", "left", "right", "chunk", "threshold", "own_batches",
    }
)  # fmt: skip
LARGEST_TILE = 64  # rows, and keys: beside a tile of scores it holds one of sums
_NOT_READ = ("LOAD", "SEARCH", "Q_OPERAND", "PARTS")


def bias_call(
    plan: Plan, call: Call, delta: torch.Tensor, constants: dict[str, Any], lowering: Lowering, launch: Launch,
    cores: int,
) -> KernelCall:  # fmt: skip
    """Fills call.grad_bias, whose size is 1 along every axis that the bias is broadcast over.

    launch  of the kernel that holds keys, warps and stages too: a program has a tile of block_m rows and block_n keys
    """
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
    return KernelCall(MODULE, "backward_bias", grid, arguments, constexprs, tile, UNSPECIALISED)
