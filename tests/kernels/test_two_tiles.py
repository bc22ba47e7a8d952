"""Gradients whose kernel of rows has a tile of its own: the numbers, and that each kernel has the tile meant for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradient_cases import DENSE, PACKED, check, random
from kernel_cases import CAUSAL
from support import TILE, Device, core_plan, run_core

from portattn.launch import kernel_calls
from portattn.schema.call import Call
from portattn.schema.lowering import FUSED, OF_ROWS
from portattn.schema.problem import Problem

# Keys' tile larger and smaller than that of rows, and only one of the rows' values given.
TILES: list[dict[str, int]] = [
    {"block_m": 32, "block_n": 16, "rows_m": 16, "rows_n": 32},
    {"block_m": 16, "block_n": 32, "rows_m": 64, "rows_n": 16, "rows_warps": 8, "rows_stages": 2},
    {"rows_m": 32},
    {"rows_n": 64},
]
BOTH = pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
EACH = pytest.mark.parametrize("tile", TILES, ids=str)


@BOTH
@EACH
@pytest.mark.parametrize("causal", CAUSAL)
def test_masks(device: Device, base: dict[str, Any], tile: dict[str, int], causal: str) -> None:
    check(device, random(device, base=base, causal=causal, heads_q=4), **tile)


@BOTH
@EACH
def test_windows_softcap_and_dropout(device: Device, base: dict[str, Any], tile: dict[str, int]) -> None:
    check(device, random(device, base=base, window_left=9, softcap=True, dropout=True, grad_lse=True), **tile)


@EACH
@pytest.mark.parametrize("rows", [(1, 40), (40, 1), (70, 33)], ids=str)
def test_short_rows_and_keys(device: Device, tile: dict[str, int], rows: tuple[int, int]) -> None:
    check(device, random(device, causal="bottom_right", seq_q=rows[0], seq_k=rows[1]), **tile)


@EACH
def test_padding_holds_nan(device: Device, tile: dict[str, int]) -> None:
    lengths = dict.fromkeys(("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"), True)
    check(device, random(device, 1, batch=3, causal="bottom_right", poison="apart", **lengths), **tile)


@BOTH
@EACH
def test_the_gradient_of_slopes(device: Device, base: dict[str, Any], tile: dict[str, int]) -> None:
    call = random(device, base=base, causal="bottom_right", alibi_slopes=True, grad_slopes=True)
    check(device, call, **tile)


@EACH
@pytest.mark.parametrize("seed", range(2))
def test_the_gradient_of_a_bias(device: Device, tile: dict[str, int], seed: int) -> None:
    check(device, random(device, seed, causal="bottom_right", bias=True, grad_bias=True, mask=True), **tile)


@BOTH
@pytest.mark.parametrize("tile", TILES[:2], ids=str)
@pytest.mark.parametrize("cores", [1, 5, 1000])
def test_a_persistent_grid(device: Device, base: dict[str, Any], tile: dict[str, int], cores: int) -> None:
    call = random(device, base=base, causal="bottom_right", heads_q=3, heads_k=3)
    check(device, call, {"grid": "persistent"}, cores, **tile)


@pytest.mark.parametrize("load", ["descriptor", "block_ptr"])
@BOTH
def test_loads_by_the_sizes_of_each_tile(device: Device, base: dict[str, Any], load: str) -> None:
    check(device, random(device, base=base, causal="bottom_right"), {"load": load}, **TILES[0])


def gradients(device: Device, call: Call, tile: dict[str, int]) -> dict[str, torch.Tensor]:
    names = ("grad_q", "grad_k", "grad_v", "grad_slopes", "grad_bias")
    for name in names:
        getattr(call, name).fill_(float("nan"))
    run_core(device, call, launch=tile)
    return {name: getattr(call, name).clone() for name in names}


@EACH
def test_each_kernel_computes_with_its_own_tile_bit_for_bit(device: Device, tile: dict[str, int]) -> None:
    """The bits of a sum follow from the tile: dK, dV and dBias are those of the keys' tile, the others of the rows'.

    Twice the same bits as well.
    """
    call = random(device, causal="bottom_right", bias=True, grad_bias=True, alibi_slopes=True,
                  grad_slopes=True, dtype="bf16")  # fmt: skip
    found, again = gradients(device, call, tile), gradients(device, call, tile)
    of_keys = {name: tile.get(name, TILE) for name in ("block_m", "block_n")}
    of_rows = of_keys | {name: tile[OF_ROWS[name]] for name in of_keys if OF_ROWS[name] in tile}
    keys_alone, rows_alone = gradients(device, call, of_keys), gradients(device, call, of_rows)
    for name in found:
        expected = rows_alone if name in ("grad_q", "grad_slopes") else keys_alone
        assert torch.equal(found[name], again[name]), name
        assert torch.equal(found[name], expected[name]), name


@BOTH
def test_launches_have_the_values_of_each_kernel(device: Device, base: dict[str, Any]) -> None:
    tile = {"block_m": 64, "block_n": 16, "num_warps": 4, "num_stages": 2} | {
        "rows_m": 16, "rows_n": 32, "rows_warps": 8, "rows_stages": 1, "maxnreg": 128,
    }  # fmt: skip
    call = random(device, base=base, bias=base is DENSE, grad_bias=base is DENSE)
    launches, _, _ = kernel_calls(core_plan(device, call.problem, launch=tile), call, 3)
    found = {one.function: one for one in launches}
    own = {"num_warps": 4, "num_stages": 2, "maxnreg": 128} | (FUSED if device.name == "cuda" else {})
    keys, rows = found["backward_keys"], found["backward_rows"]
    assert (keys.constexprs["BLOCK_M"], keys.constexprs["BLOCK_N"], keys.options()) == (64, 16, own)
    of_rows = own | {"num_warps": 8, "num_stages": 1}
    assert (rows.constexprs["BLOCK_M"], rows.constexprs["BLOCK_N"], rows.options()) == (16, 32, of_rows)
    p: Problem = call.problem
    sizes = (p.total_k, p.total_q) if p.packed else (p.seq_k, p.seq_q)
    per_head = [
        size // block + p.batch + 1 if p.packed else -(-size // block)
        for size, block in zip(sizes, (64, 16), strict=True)
    ]
    assert (keys.arguments["key_tiles"], rows.arguments["row_tiles"]) == tuple(per_head)
    slots = p.heads_q * (1 if p.packed else p.batch)
    assert (keys.grid, rows.grid) == ((per_head[0] * slots,), (per_head[1] * slots,))
    if "backward_bias" in found:
        bias = found["backward_bias"]
        assert (bias.constexprs["BLOCK_M"], bias.constexprs["BLOCK_N"], bias.options()) == (64, 16, own)
