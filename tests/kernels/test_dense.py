"""dense_forward against the float64 oracle: features, shapes and memory layouts, and what it drops; block masks."""

from typing import Any

import msgspec
import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import CAUSAL, check, picker
from kernel_cases import problem as named_problem
from reference_cases import run as run_reference
from support import Device, assert_right, problem, random_call, run_core

from portattn import Problem
from portattn.kernels.tiles import heads_in_turn
from portattn.planning.kernel_specs import heads_together
from portattn.planning.registry import parse_target

FEATURES = {
    "dense": {}, "no_lse": {"return_lse": False}, "gqa": {"heads_q": 4, "heads_k": 2},
    "mqa": {"heads_q": 3, "heads_k": 1}, "seqlens_k": {"seqlens_k": True},
    "seqlens": {"seqlens_q": True, "seqlens_k": True}, "leftpad_k": {"leftpad_k": True},
    "padded": {"seqlens_q": True, "seqlens_k": True, "leftpad_q": True, "leftpad_k": True, "batch": 3},
    "bshd_gqa_padded": {"layout": "bshd", "heads_q": 4, "seqlens_k": True, "leftpad_k": True, "leftpad_q": True},
}  # fmt: skip


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features_are_right(device: Device, causal: str, features: dict) -> None:
    call = random_call(problem(causal=causal, **features), seed=1, device=device.name)
    assert_right(call, *run_core(device, call))


@pytest.mark.parametrize(
    "sizes",
    [
        {"seq_q": 0},
        {"seq_k": 0},
        {"batch": 0},
        {"seq_q": 0, "seq_k": 0},
        {"seq_q": 1, "seq_k": 1},
        {"seq_q": 1, "seq_k": 16},
        {"seq_q": 16, "seq_k": 16},
        {"seq_q": 15, "seq_k": 17},
        {"seq_q": 17, "seq_k": 15},
        {"seq_q": 40, "seq_k": 3},
        {"seq_q": 3, "seq_k": 40},
        {"seq_q": 32, "seq_k": 48},
        {"seq_q": 2, "seq_k": 31},  # the first bottom-right row ends one key before, at, and after a tile's end
        {"seq_q": 2, "seq_k": 32},
        {"seq_q": 2, "seq_k": 33},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", CAUSAL)
def test_lengths_at_the_edges_of_tiles(device: Device, sizes: dict, causal: str) -> None:
    call = random_call(problem(causal=causal, batch=sizes.get("batch", 1), **_less(sizes, "batch")), device=device.name)
    assert_right(call, *run_core(device, call))


@pytest.mark.parametrize("scale", [-0.7, 0.0, -0.0, 1.0, 4.0, 200.0])
def test_any_scale(device: Device, scale: float) -> None:
    """Scores under a scale of 200 are too large for an exponential."""
    fields = {} if scale == 200.0 else {"causal": "bottom_right", "seqlens_k": True}
    call = random_call(problem(**fields), seed=3, device=device.name, scale=scale)
    assert_right(call, *run_core(device, call))


@pytest.mark.parametrize("seed", range(16))
def test_random_problems(device: Device, seed: int) -> None:
    pick = picker(1000 + seed)
    heads_k = pick(1, 2, 3)
    p = problem(
        batch=pick(1, 2, 3), heads_k=heads_k, heads_q=heads_k * pick(1, 2, 3), seq_q=pick(*range(1, 35)),
        seq_k=pick(*range(1, 41)), head_dim=pick(8, 16, 24, 33), head_dim_v=pick(8, 16, 40),
        dtype=pick("fp32", "fp16", "bf16"), causal=pick(*CAUSAL), seqlens_q=pick(True, False),
        seqlens_k=pick(True, False), leftpad_q=pick(True, False), leftpad_k=pick(True, False),
        layout=pick("bhsd", "bshd"),
    )  # fmt: skip
    call = random_call(p, seed, device=device.name, scale=pick(None, -0.3, 0.8), strides=pick("plain", "spare"))
    assert_right(call, *run_core(device, call, launch={"block_m": pick(16, 32), "block_n": pick(16, 32)}))


def _less(fields: dict, *names: str) -> dict:
    return {k: v for k, v in fields.items() if k not in names}


PHD, HPD, BSHD = {"page_layout": "phd"}, {"page_layout": "hpd"}, {"layout": "bshd"}
# The layouts in which each op can be called.
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "dense": [{}, BSHD], "varlen": [{}], "decode": [{}, BSHD], "paged": [PHD, HPD | BSHD], "whole pages": [PHD, HPD],
    "ragged": [PHD, HPD], "sparse": [{}, BSHD], "sparse paged": [PHD, HPD | BSHD], "mla": [{}, BSHD],
}  # fmt: skip
STRIDES = ("spare", "transposed", "sliced", "expanded")
CASES = [(name, strides) for name in LAYOUTS for strides in STRIDES]
CASES += [(name, "combined") for name in ("paged", "whole pages", "ragged", "sparse paged")]


@pytest.mark.parametrize(("name", "strides"), CASES)
def test_any_strides(device: Device, name: str, strides: str) -> None:
    fields = {"head_dim": 20, "head_dim_v": 20 if strides == "combined" else 12, "aligned": False}
    for seed, layout in enumerate(LAYOUTS[name]):
        call = random_call(named_problem(name, **fields, **layout), seed, device=device.name, strides=strides)
        check(device, call, 2 if name == "decode" else 1)  # the same merging follows them all


SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
PROBLEM = Problem(batch=16, heads_q=8, heads_k=8, seq_q=4096, seq_k=4096, head_dim=128, dtype="bf16", causal="top_left")


@triton.jit
def order(out, row_tiles, together, tiles):
    tile = tl.program_id(0)
    row_tile, head = heads_in_turn(tile, row_tiles, together, tiles)
    tl.store(out + tile * 2, row_tile)
    tl.store(out + tile * 2 + 1, head)


@pytest.mark.parametrize(("row_tiles", "heads", "together"), [(1, 1, 4), (3, 5, 4), (7, 4, 4), (5, 9, 2), (2, 64, 64)])
def test_every_tile_once_and_some_heads_at_a_time(device: Device, row_tiles: int, heads: int, together: int) -> None:
    tiles = row_tiles * heads
    out = torch.full((tiles, 2), -1, dtype=torch.int32, device=device.name)
    order[(tiles,)](out, row_tiles, together, tiles)
    found = [tuple(pair) for pair in out.tolist()]
    assert sorted(found) == [(row, head) for row in range(row_tiles) for head in range(heads)]
    groups = [range(first, min(first + together, heads)) for first in range(0, heads, together)]
    assert found == [(row, head) for group in groups for row in range(row_tiles) for head in group]


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({}, 8),  # 2 MiB a head
        ({"dtype": "fp32"}, 4),
        ({"heads_k": 2}, 32),  # four heads share their keys
        ({"seq_k": 1 << 20}, 1),
        ({"seq_k": 0}, 64),
        ({"head_dim": 80, "head_dim_v": 80}, 12),  # 1.25 MiB
        ({"batch": 1, "heads_q": 3, "heads_k": 3, "seq_k": 64}, 3),  # no more than there are
        (
            {"op": "varlen_attention", "batch": 4, "heads_q": 32, "heads_k": 32, "total_q": 8192, "total_k": 8192},
            16,
        ),  # 1 MiB a head on average
    ],
)
def test_how_many_heads(fields: dict[str, int | str], heads: int) -> None:
    arch = msgspec.structs.replace(SM_90.arch, cache_share=16 << 20)
    problem = msgspec.structs.replace(PROBLEM, **fields)
    assert heads_together(problem, arch) == heads
    assert heads_together(problem, msgspec.structs.replace(arch, cache_share=0)) == 1  # untimed


BLOCKS: dict[str, Any] = {"block_mask": True, "block_q": 16, "block_k": 16, "seq_q": 50, "seq_k": 77}
FEATURES_BLOCKS: dict[str, dict[str, Any]] = {
    "alone": {}, "mask": {"mask": True, "causal": "bottom_right", "block_k": 32},
    "more": {"window_left": 20, "sinks": True, "bias": True, "softcap": True, "alibi_slopes": True},
    "lengths": {"seqlens_q": True, "seqlens_k": True, "causal": "top_left", "block_q": 48, "block_k": 48},
    "dropout": {"dropout": True, "dtype": "fp16"},
    "a head in two parts": {"head_dim": 576, "head_dim_v": 16, "seq_q": 20},
}  # fmt: skip
LOWERINGS: dict[str, dict[str, str]] = {
    "finite": {"mask_value": "finite"}, "exp": {"exp": "exp"}, "persistent": {"grid": "persistent"},
    "branch": {"select": "branch"}, "block_ptr": {"load": "block_ptr"}, "transposed": {"k_tile": "transposed"},
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES_BLOCKS)
def test_random_lists_are_right(device: Device, feature: str) -> None:
    for seed, poison in enumerate(("k", "v")):
        call = random_call(
            named_problem("dense", **(BLOCKS | FEATURES_BLOCKS[feature])), seed, device=device.name, poison=poison,
        )  # fmt: skip
        assert_right(call, *run_core(device, call))
        assert_right(call, *run_reference(call))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_way_to_lower_it(device: Device, lowering: str) -> None:
    call = random_call(named_problem("dense", **BLOCKS), 3, device=device.name)
    assert_right(call, *run_core(device, call, LOWERINGS[lowering]))


@pytest.mark.parametrize("name", ["dense", "padded", "varlen"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("pipeline", ["plain", "rotated"])
def test_what_the_mask_drops_is_dropped(device: Device, name: str, causal: str, pipeline: str) -> None:
    check(
        device, random_call(named_problem(name, causal=causal, dropout=True), 1, device=device.name), pipeline=pipeline,
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields", [{"mask": True}, {"bias": True, "softcap": True}, {"window_left": 5, "sinks": True}, {"dtype": "bf16"}],
    ids=str,
)  # fmt: skip
def test_beside_other_features(device: Device, fields: dict[str, Any]) -> None:
    check(
        device,
        random_call(named_problem("dense", dropout=True, heads_q=4, heads_k=2, **fields), 2, device=device.name),
    )


def test_a_single_tile(device: Device) -> None:
    call = random_call(named_problem("dense", dropout=True, seq_k=11), 3, device=device.name)
    check(device, call, pipeline="single")


@pytest.mark.parametrize("drops", ["scores", "halves"])
@pytest.mark.parametrize("name", ["dense", "varlen"])
def test_other_lowerings_give_the_same_numbers(device: Device, name: str, drops: str) -> None:
    check(
        device, random_call(named_problem(name, dropout=True, causal="bottom_right"), 4, device=device.name),
        drops=drops,
    )  # fmt: skip
