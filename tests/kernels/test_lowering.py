"""Every Lowering value means the same numbers: each alone, every way to load a tile, and random combinations of all."""

from __future__ import annotations

import functools
import itertools
import zlib

import msgspec
import pytest
import torch
from support import Device, assert_right, problem, random_call, run_core

from portattn.core import CORES
from portattn.lowering import CHOICES, Lowering

CUDA_PRECISIONS = ("ieee", "tf32", "tf32x3")  # Triton's interpreter knows the same three; hf32 is Ascend's alone
DEFAULTS = msgspec.structs.asdict(Lowering())
# tf32 keeps 10 bits of the mantissa: a product of depth 16 of normal values, through the softmax, is this far off.
TF32_ERROR = 2e-2

DENSE = {
    "dense": {"causal": "none"},
    "causal_gqa": {"causal": "bottom_right", "heads_q": 4, "heads_k": 2, "head_dim_v": 32},
    "padded_fp16": {
        "causal": "top_left", "dtype": "fp16", "seqlens_q": True, "seqlens_k": True, "leftpad_q": True,
        "leftpad_k": True, "layout": "bshd",
    },
    "lengths_bf16_mqa_no_lse": {
        "causal": "bottom_right", "dtype": "bf16", "heads_k": 1, "seqlens_k": True, "return_lse": False,
    },
}  # fmt: skip
DECODE = {
    "full": {"seq_q": 1},
    "lengths_fp16": {"seq_q": 1, "dtype": "fp16", "seqlens_k": True, "leftpad_k": True},
    "causal_bf16_bshd": {"seq_q": 3, "dtype": "bf16", "causal": "bottom_right", "seqlens_k": True, "layout": "bshd"},
    "top_left": {"seq_q": 3, "causal": "top_left", "leftpad_k": True, "return_lse": False},
}
CASES = {f"attention-{n}": ("attention", f) for n, f in DENSE.items()}
CASES |= {f"decode-{n}": ("decode_attention", {"heads_q": 4} | f) for n, f in DECODE.items()}
TILES = [
    {"load": load, "k_tile": k_tile, "block_order": order}
    for load, k_tile, order in itertools.product(CHOICES["load"], CHOICES["k_tile"], CHOICES["block_order"])
    if order == "column" or (load, k_tile) == ("block_ptr", "transposed")  # elsewhere block_order is not read
]


@functools.lru_cache(maxsize=1)
def lacking() -> set[str]:
    """Ways to load that this Triton does not have."""
    import triton.language as tl

    known = {"block_ptr": "make_block_ptr", "descriptor": "make_tensor_descriptor"}
    return {load for load, name in known.items() if not hasattr(tl, name)}


def check(device: Device, case: str, lowering: dict[str, str], seed: int = 0) -> None:
    if lowering.get("load") in lacking():
        pytest.skip(f"this Triton has no {lowering['load']} loads")
    op, features = CASES[case]
    lowering = {k: v for k, v in lowering.items() if k in CORES[op].choices}
    call = random_call(problem(op=op, **features), seed, device=device.name)
    launch = {"splits": 3} if op == "decode_attention" and seed % 2 else {}
    rounded = device.name != "cpu" and call.q.dtype is torch.float32 and lowering.get("dot_precision") == "tf32"
    assert_right(call, *run_core(device, call, lowering, launch), extra=TF32_ERROR if rounded else 0.0)


def alone() -> list[tuple[str, str, str]]:
    """Each value that is no default, for each case whose kernel reads the choice."""
    return [
        (case, name, value)
        for case, (op, _) in CASES.items()
        for name in CORES[op].choices
        for value in (CUDA_PRECISIONS if name == "dot_precision" else CHOICES[name])
        if value != DEFAULTS[name]
    ]


@pytest.mark.parametrize(("case", "name", "value"), alone())
def test_each_value_alone(device: Device, case: str, name: str, value: str) -> None:
    check(device, case, {name: value}, seed=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tile", TILES, ids=lambda t: "-".join(t.values()))
def test_every_way_to_load_a_tile(device: Device, case: str, tile: dict[str, str]) -> None:
    check(device, case, tile, seed=2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(6))
def test_random_combinations(device: Device, case: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case} {seed}".encode()))
    lowering = {}
    for name, values in CHOICES.items():
        known = [v for v in values if v != "hf32"]
        lowering[name] = known[int(torch.randint(len(known), (1,), generator=generator))]
    if lowering["load"] in lacking():
        lowering["load"] = "pointer"
    check(device, case, lowering, seed)


@pytest.mark.parametrize("op", CORES)
@pytest.mark.parametrize("cores", [1, 2, 1000])
def test_a_persistent_grid_of_any_width(device: Device, op: str, cores: int) -> None:
    """One program for all tiles, a number that divides nothing evenly, and more programs than tiles."""
    p = problem(op=op, heads_q=3, heads_k=3, batch=1, seq_q=20 if op == "attention" else 1, causal="bottom_right")
    call = random_call(p, device=device.name)
    launch = {"splits": 2} if op == "decode_attention" else {}
    assert_right(call, *run_core(device, call, {"grid": "persistent"}, launch, cores=cores))


def test_a_finite_mask_value_survives_scores_below_it(device: Device) -> None:
    """Rows with nothing to attend stay 0 and -inf, and large negative scores are no masked ones."""
    p = problem(causal="bottom_right", seq_q=24, seq_k=5)
    for scale in (None, -300.0):
        call = random_call(p, device=device.name, scale=scale)
        assert_right(call, *run_core(device, call, {"mask_value": "finite"}))


def test_choices_are_read(device: Device) -> None:
    """A kernel is compiled with every choice that the planner says it reads, and with no other."""
    from support import core_plan

    from portattn.launch import kernel_calls

    for op, kernel in CORES.items():
        call = random_call(problem(op=op, seq_q=2), device=device.name)
        launches, _, _ = kernel_calls(core_plan(device, call.problem), call, 3)
        given = {name.lower() for name in launches[0].constexprs} & set(CHOICES)
        assert given == set(kernel.choices)
