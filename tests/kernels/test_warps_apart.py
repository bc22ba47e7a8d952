"""decode_split and dense_forward with each warp at keys of its own (kernels/warp_split.py)."""

import importlib
from typing import Any

import msgspec
import pytest
import torch
from gradient_cases import DENSE as DENSE_GRADIENTS
from gradient_cases import PACKED, check, random
from kernel_cases import with_lengths
from support import Device, assert_right, core_plan, problem, random_call, run_core

from portattn import Launch, Lowering
from portattn.launch import cached_launch, kernel_calls
from portattn.planning.kernel_specs import CORES

APART = {"warps": "apart"}
SMALL = {"batch": 2, "heads_q": 4, "heads_k": 2, "seq_q": 1, "head_dim": 16, "dtype": "bf16"}
DECODE = SMALL | {"op": "decode_attention", "seq_k": 150, "seqlens_k": True}
PAGES = SMALL | {"op": "paged_attention", "seq_k": 128, "seqlens_k": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "a ragged end": (DECODE | {"seqlens_k": False}, {"block_n": 64, "num_warps": 4}),
    "lengths and padding": (DECODE | {"leftpad_k": True, "dtype": "fp16"}, {"block_n": 32, "num_warps": 2}),
    "eight warps": (DECODE | {"head_dim": 40, "head_dim_v": 24}, {"block_n": 128, "num_warps": 8}),
    "one warp": (DECODE, {"block_n": 16, "num_warps": 1}),
    "more rows than a tile": (
        DECODE | {"seq_q": 9, "causal": "bottom_right", "leftpad_k": True}, {"block_n": 32, "num_warps": 2},
    ),
    "top left behind padding": (
        DECODE | {"seq_q": 3, "causal": "top_left", "leftpad_k": True}, {"block_n": 64, "num_warps": 4},
    ),
    "top left": (DECODE | {"seq_q": 3, "causal": "top_left"}, {"block_n": 64, "num_warps": 4}),
    "sinks": (DECODE | {"sinks": True}, {"block_n": 64, "num_warps": 4}),
    "a negative scale": (DECODE | {"negative_scale": True}, {"block_n": 32, "num_warps": 2}),
    "pages of a tile": (PAGES | {"page_size": 64}, {"block_n": 64, "num_warps": 4}),
    "small pages": (PAGES | {"page_size": 16, "causal": "bottom_right", "seq_q": 2}, {"block_n": 64, "num_warps": 4}),
    "pages of no tile": (PAGES | {"page_size": 24, "seq_k": 144}, {"block_n": 64, "num_warps": 4}),
    "packed queries": (PAGES | {"page_size": 8, "seq_q": 5, "total_q": 7, "causal": "bottom_right", "batch": 3},
                       {"block_n": 32, "num_warps": 2}),
    "packed queries, rows of no sequence, sinks": (
        PAGES | {"page_size": 8, "seq_q": 5, "total_q": 12, "batch": 3, "sinks": True}, {"block_n": 32, "num_warps": 2},
    ),
}  # fmt: skip

DENSE = {
    "op": "attention", "batch": 2, "heads_q": 2, "heads_k": 2, "seq_q": 40, "seq_k": 150, "head_dim": 16,
    "dtype": "fp32", "seqlens_k": True, "return_lse": True,
}  # fmt: skip
ROWS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "a ragged end": (DENSE | {"seqlens_k": False}, {"block_n": 64, "num_warps": 4}),
    "lengths and padding": (DENSE | {"leftpad_k": True}, {"block_n": 32, "num_warps": 2}),
    "eight warps": (DENSE | {"head_dim": 40, "head_dim_v": 24}, {"block_n": 128, "num_warps": 8}),
    "one warp": (DENSE | {"causal": "bottom_right"}, {"block_n": 16, "num_warps": 1}),
    "rows without keys": (
        DENSE | {"seq_q": 90, "seq_k": 20, "causal": "bottom_right"}, {"block_n": 32, "num_warps": 2},
    ),
    "top left": (DENSE | {"causal": "top_left", "leftpad_k": True}, {"block_n": 64, "num_warps": 4}),
    "sinks": (DENSE | {"sinks": True, "causal": "bottom_right"}, {"block_n": 64, "num_warps": 4}),
    "a negative scale": (DENSE | {"negative_scale": True}, {"block_n": 32, "num_warps": 2}),
    "one tile": (DENSE, {"block_n": 256, "num_warps": 8}),
    "one tile, causal, behind padding": (
        DENSE | {"causal": "bottom_right", "leftpad_k": True, "sinks": True}, {"block_n": 256, "num_warps": 8},
    ),
}  # fmt: skip


def loops(fields: dict[str, Any], launch: dict[str, int]) -> tuple[str, ...]:
    page = fields.get("page_size", 0)
    if page and page % launch["block_n"] == 0:
        return ("per_page", "flat_masked")
    few = page and launch["block_n"] in (2 * page, 4 * page)
    return ("by_page", "flat_masked") if few else ("flat_masked",)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_warps_apart_are_right(device: Device, name: str, splits: int) -> None:
    """NaN is wherever a token is not attended, in keys and values."""
    fields, launch = CASES[name]
    call = random_call(problem(**fields), seed=len(name), device=device.name, extremes=True)
    for loop in loops(fields, launch):
        out, lse = run_core(device, call, APART | {"page_loop": loop}, launch | {"splits": splits})
        assert_right(call, out, lse)


@pytest.mark.parametrize("mask_value", ["-inf", "finite"])
@pytest.mark.parametrize("exp", ["exp2", "exp"])
def test_sequences_of_no_keys_and_of_one(device: Device, exp: str, mask_value: str) -> None:
    call = random_call(problem(**DECODE | {"batch": 4, "sinks": True}), 3, device=device.name)
    call = with_lengths(call, [0, 1, 16, 17])
    lowering = APART | {"exp": exp, "mask_value": mask_value}
    for splits in (1, 2):
        out, lse = run_core(device, call, lowering, {"block_n": 64, "num_warps": 4, "splits": splits})
        assert_right(call, out, lse)
    call.sinks = torch.full_like(call.sinks, float("-inf"))
    out, lse = run_core(device, call, lowering, {"block_n": 64, "num_warps": 4})
    assert_right(call, out, lse)
    assert not out[0].any()
    assert torch.isneginf(lse[0]).all()


def test_a_warps_large_scores_do_not_reach_the_others(device: Device) -> None:
    """Of one warp's keys the scores are above all others by far; of another one's they are far below."""
    call = random_call(problem(**DECODE | {"seqlens_k": False, "seq_k": 64}), 8, device=device.name)
    call.k[:, :, 16:32] *= 60.0
    call.k[:, :, 32:48] -= 50.0
    out, lse = run_core(device, call, APART, {"block_n": 64, "num_warps": 4})
    assert_right(call, out, lse)


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x6"])
@pytest.mark.parametrize("name", ROWS)
def test_dense_rows_are_right(device: Device, name: str, precision: str) -> None:
    """In a loop and, where the keys fit, in one tile without it; NaN is wherever a token is not attended."""
    fields, launch = ROWS[name]
    call = random_call(problem(**fields), seed=len(name), device=device.name, extremes=True)
    for pipeline in ("plain", "single") if "one tile" in name else ("plain",):
        lowering = APART | {"dot_precision": precision, "pipeline": pipeline}
        tile = launch | {"block_m": 32}
        assert not CORES["attention"].limits(call.problem, Lowering(**lowering), Launch().changed(tile))
        assert_right(call, *run_core(device, call, lowering, tile))


@pytest.mark.parametrize("pipeline", ["plain", "single"])
@pytest.mark.parametrize("mask_value", ["-inf", "finite"])
def test_dense_sequences_of_no_keys_and_of_one(device: Device, mask_value: str, pipeline: str) -> None:
    call = with_lengths(
        random_call(problem(**DENSE | {"batch": 4, "seq_k": 64}), 3, device=device.name), [0, 1, 16, 17]
    )
    lowering = APART | {"mask_value": mask_value, "dot_precision": "bf16x6", "pipeline": pipeline}
    assert_right(call, *run_core(device, call, lowering, {"block_m": 16, "block_n": 64, "num_warps": 4}))


# What warps_apart does not take of dense problems.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "query lengths": ({"seqlens_q": True}, {}, "seqlens_q"), "a window": ({"window_left": 3}, {}, "window"),
    "a mask": ({"mask": True}, {}, "mask"), "dropout": ({"dropout": True}, {}, "dropout"),
    "groups": ({"heads_q": 4}, {}, "as many key heads"),
    "plain products": ({}, {"dot_precision": "ieee"}, "one of bf16x6, tf32x3"),
    "two parts of a head": ({"head_dim": 576, "head_dim_v": 512}, {}, "at most 512 columns"),
    "16-bit numbers": ({"dtype": "bf16"}, {}, "float32"), "small shares": ({}, {"num_warps": 8}, "at least 16 keys"),
    "three warps": ({}, {"num_warps": 3}, "1, 2, 4 or 8"),
    "sixteen warps": ({}, {"num_warps": 16, "block_n": 256}, "1, 2, 4 or 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_dense_rows_do_not_have_runs_joint(name: str) -> None:
    fields, choices, why = REFUSED[name]
    lowering = Lowering(warps="apart", dot_precision=choices.get("dot_precision", "bf16x6"))
    launch = Launch(block_m=16, block_n=choices.get("block_n", 64), num_warps=choices.get("num_warps", 4))
    limits = CORES["attention"].limits(problem(**DENSE | fields), lowering, launch)
    assert [limit for limit in limits if limit[:2] == ("warps", "joint") and why in limit[2]]


# What it has one way of: the choice that is asked for, and what the limits make of it.
ONE_WAY: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    "more keys than a tile": ({"seq_k": 65}, {"pipeline": "single"}, ("pipeline", "plain")),
    "a rotated loop": ({"seq_k": 64}, {"pipeline": "rotated"}, ("pipeline", "plain")),
    "a masked loop": ({"seq_k": 64}, {"pipeline": "masked"}, ("pipeline", "plain")),
    "descriptors": ({"seq_k": 64}, {"load": "descriptor"}, ("load", "pointer")),
    "a persistent grid": ({"seq_k": 64}, {"grid": "persistent"}, ("grid", "tiles")),
}


@pytest.mark.parametrize("name", ONE_WAY)
def test_dense_rows_have_one_way_of(name: str) -> None:
    fields, choices, limit = ONE_WAY[name]
    launch = Launch(block_m=16, block_n=64, num_warps=4)
    plain = Lowering(warps="apart", dot_precision="bf16x6")
    assert not CORES["attention"].limits(problem(**DENSE | fields), plain, launch)
    asked = msgspec.structs.replace(plain, **choices)
    assert [found[:2] for found in CORES["attention"].limits(problem(**DENSE | fields), asked, launch)] == [limit]


def test_one_tile_of_exactly_its_keys_has_no_loop() -> None:
    lowering = Lowering(warps="apart", dot_precision="bf16x6", pipeline="single")
    assert not CORES["attention"].limits(problem(**DENSE | {"seq_k": 64}), lowering, Launch(block_n=64, num_warps=4))


def test_decodes_of_float32_run_joint() -> None:
    limits = CORES["decode_attention"].limits(
        problem(**DECODE | {"dtype": "fp32"}), Lowering(**APART), Launch(block_n=64, num_warps=4)
    )
    assert [limit[:2] for limit in limits] == [("warps", "joint")]


@pytest.mark.parametrize("share", [slice(0, 16), slice(16, 32), slice(48, 64), slice(0, 64)], ids=str)
@pytest.mark.parametrize("pipeline", ["plain", "single"])
@pytest.mark.parametrize("mask_value", ["-inf", "finite"])
def test_scores_of_minus_infinity(device: Device, mask_value: str, pipeline: str, share: slice) -> None:
    """All of a warp's scores may be -inf without being masked: they weigh nothing. Of a row, they leave nothing."""
    call = random_call(problem(**DENSE | {"seq_q": 16, "seq_k": 64, "seqlens_k": False}), 1, device=device.name)
    call.q.fill_(1.0)
    call.k.fill_(0.0)
    call.k[:, :, share] = float("-inf")
    lowering = APART | {"mask_value": mask_value, "dot_precision": "bf16x6", "pipeline": pipeline}
    out, lse = run_core(device, call, lowering, {"block_m": 16, "block_n": 64, "num_warps": 4})
    left = 64 - (share.stop - share.start)
    kept = torch.ones(64, dtype=torch.bool)
    kept[share] = False
    expected = call.v[:, :, kept].mean(2, keepdim=True).expand_as(out) if left else torch.zeros_like(out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.full_like(lse, left).log())


@pytest.mark.parametrize("name", ["lengths and padding", "rows without keys", "sinks"])
def test_gradients_take_what_it_stores(device: Device, name: str) -> None:
    """Its LSE is that of dense_forward: of rows without keys -inf."""
    fields, launch = ROWS[name]
    call = random_call(problem(**fields | {"needs_grad": True}), seed=2, device=device.name)
    lowering = APART | {"dot_precision": "bf16x6"}
    assert not CORES["attention"].limits(call.problem, Lowering(**lowering), Launch().changed(launch))
    assert_right(call, *run_core(device, call, lowering, launch))


OPERANDS = ("q", "k", "v", "grad_out")
PARTS = {"dot_precision": "bf16x6"}
FIELDS: dict[str, dict[str, Any]] = {
    "causal, groups": {"causal": "bottom_right", "heads_q": 4, "grad_lse": True},
    "odd heads": {"head_dim": 20, "head_dim_v": 36, "causal": "top_left"},
    "a window": {"window_left": 5, "window_right": 3, "seq_q": 40, "seq_k": 45},
    "padding that holds NaN": {"seqlens_q": True, "leftpad_k": True, "batch": 3, "poison": "apart"},
    "a mask that hides NaN": {"heads_q": 4, "mask": True, "causal": "bottom_right", "poison": "k"},
    "a bias that hides NaN": {"bias": True, "grad_bias": True, "poison": "v"},
    "dropout, cap, slopes": {"dropout": True, "softcap": True, "alibi_slopes": True, "grad_slopes": True},
    "other strides": {"strides": "sliced"},
}


@pytest.mark.parametrize("parts", ["registers", "memory"])
@pytest.mark.parametrize("fields", FIELDS)
def test_gradients(device: Device, fields: str, parts: str) -> None:
    check(device, random(device, 1, **FIELDS[fields]), PARTS | {"parts": parts})


@pytest.mark.parametrize("load", ["pointer", "descriptor"])
def test_parts_in_memory_of_packed_rows(device: Device, load: str) -> None:
    fields = {"head_dim": 32, "head_dim_v": 32, "causal": "bottom_right", "heads_q": 4}
    call = random(device, base=PACKED, **fields)
    check(device, call, PARTS | {"parts": "memory", "load": load, "grid": "persistent"}, block_n=32)


def test_a_kernel_of_their_own_stores_them_once(device: Device) -> None:
    call = random(device, base=DENSE_GRADIENTS, head_dim=20)
    launches, _, _ = kernel_calls(core_plan(device, call.problem, PARTS | {"parts": "memory"}), call, 3)
    made = [launch for launch in launches if launch.function == "store_parts"]
    sources = [next(x for name in OPERANDS if (x := launch.arguments[name]) is not None) for launch in made]
    assert list(map(id, sources)) == [id(getattr(call, name)) for name in OPERANDS]
    assert made[0].arguments["parts"].shape == (2, 2, 3, 19, 24)  # rows are a multiple of 16 bytes
    for others in (PARTS, {"dot_precision": "ieee", "parts": "memory"}):
        launches, _, _ = kernel_calls(core_plan(device, call.problem, others), call, 3)
        assert [launch.function for launch in launches] == ["backward_delta", "backward_keys", "backward_rows"]


def test_a_cached_call_has_the_parts_in_its_operands_places(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are read from memory, a launch's `q` is no tensor that the caller brings."""
    monkeypatch.setattr(cached_launch, "load_kernels", lambda module, interpreted: importlib.import_module(module))
    call = random(device, base=DENSE_GRADIENTS)
    launches, delta, _ = kernel_calls(core_plan(device, call.problem, PARTS | {"parts": "memory"}), call, 3)
    steps, buffers = cached_launch.core_steps(launches, delta, None)
    first, *made, keys, rows = (step.roles for step in steps)
    assert first["grad_out"] == "grad_out"
    assert [role for one in made for role in one.values() if not role.startswith("buffer")] == list(OPERANDS)
    stored = [one["parts"] for one in made]
    assert (len(set(stored)), list(buffers)) == (4, stored)
    for one in (keys, rows):
        assert ([one[name] for name in OPERANDS], one["forward_lse"]) == (stored, "forward_lse")


@pytest.mark.parametrize(("dtype", "precision"), [("bf16", "bf16x6"), ("fp32", "tf32x3")])
def test_other_products_have_no_parts(dtype: str, precision: str) -> None:
    kernel, p = CORES["attention_backward"], problem(**DENSE_GRADIENTS | {"dtype": dtype})
    limits = kernel.limits(p, Lowering(dot_precision=precision, parts="memory"), Launch())
    assert [(name, value) for name, value, _ in limits] == [("parts", "registers")]
    asked = Lowering(dot_precision="bf16x6", parts="memory")
    assert not kernel.limits(msgspec.structs.replace(p, dtype="fp32"), asked, Launch())


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_operands_have_one_precision(device: Device, dtype: str) -> None:
    call = random_call(problem(dtype=dtype, causal="bottom_right"), device=device.name)
    ours, _ = run_core(device, call, PARTS)
    plain, _ = run_core(device, call, {})
    assert torch.equal(ours, plain)


def test_an_infinite_number_is_what_float32_makes_of_it(device: Device) -> None:
    """Its second part is NaN. A key that is -inf has no weight where the query is positive."""
    call = random_call(problem(head_dim=16), device=device.name)
    call.q.abs_()
    call.k[:, :, 3] = float("-inf")
    call.k[:, :, 5, 2] = float("inf")
    call.q[:, :, :, 2] = 0.5
    call.q[:, :, 1:] *= -1
    for row in (slice(0, 1), slice(1, None)):
        ours, _ = run_core(device, call, PARTS)
        plain, _ = run_core(device, call, {"dot_precision": "ieee"})
        assert torch.equal(ours[:, :, row].isnan(), plain[:, :, row].isnan())


def test_parts_hold_every_bit() -> None:
    """Numbers whose first part alone, or first two, are far off: their products are those of float32."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, generator=generator) * torch.exp2(
        torch.randint(-60, 60, (4096,), generator=generator).float()
    )
    upper = torch.tensor(-65536, dtype=torch.int32)
    first = (x.view(torch.int32) & upper).view(torch.float32)
    second = ((x - first).view(torch.int32) & upper).view(torch.float32)
    third = x - first - second
    for part in (first, second, third):
        assert torch.equal(part.bfloat16().float(), part)
    assert torch.equal(first.double() + second.double() + third.double(), x.double())


DESCRIPTOR = {"load": "descriptor"}
SQUARE = {"seq_q": 64, "seq_k": 64}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (SQUARE, "descriptor"),
        (SQUARE | {"causal": "bottom_right"}, "descriptor"),
        ({"seq_q": 66, "seq_k": 64}, "pointer"),  # the second head's numbers begin at 264 bytes
        ({"seq_q": 64, "seq_k": 39, "causal": "bottom_right"}, "pointer"),  # the first row that sees a key is 25
        ({"seq_q": 64, "seq_k": 40, "causal": "bottom_right"}, "descriptor"),  # it is 24
        ({"seq_q": 64, "seq_k": 39, "causal": "top_left"}, "descriptor"),
        ({"seq_q": 64, "seq_k": 39, "window_left": 9, "window_right": 1}, "descriptor"),  # 24 again
        (SQUARE | {"seqlens_k": True, "causal": "bottom_right"}, "pointer"),
        (SQUARE | {"leftpad_q": True}, "pointer"),
        (SQUARE | {"bias": True}, "pointer"),
        (SQUARE | {"mask": True}, "pointer"),
        (SQUARE | {"dropout": True}, "descriptor"),
    ],
    ids=str,
)
def test_tiles_that_begin_at_16_bytes(device: Device, fields: dict[str, Any], expected: str) -> None:
    call = random(device, base=DENSE_GRADIENTS, **fields)
    assert _numbers(device, call) == expected
    check(device, call, DESCRIPTOR, block_m=16, block_n=32)


# The second of a pipeline's buffers of 16 numbers would begin at 64 bytes, where no copy by TMA may go; packed rows
# begin anywhere.
@pytest.mark.parametrize(("base", "block_n"), [(DENSE_GRADIENTS | SQUARE, 16), (PACKED, 32)], ids=["small", "packed"])
def test_small_tiles_and_packed_rows_take_pointers(device: Device, base: dict[str, Any], block_n: int) -> None:
    call = random(device, base=base)
    assert _numbers(device, call, block_n) == "pointer"
    check(device, call, DESCRIPTOR, block_m=16, block_n=block_n)


def test_other_loads_take_pointers(device: Device) -> None:
    call = random(device, base=DENSE_GRADIENTS, **SQUARE)
    launches, _, _ = kernel_calls(core_plan(device, call.problem, {"load": "pointer"}), call, 3)
    assert launches[1].constexprs["NUMBERS"] == "pointer"


def test_an_lse_that_begins_off_16_bytes_is_no_aligned_call() -> None:
    from portattn.validate.checks import starts_aligned

    memory = torch.zeros(65)
    assert starts_aligned(memory[:64])
    assert not starts_aligned(memory[1:])
    assert starts_aligned(torch.empty(8, device="meta")[1:])


def _numbers(device: Device, call: Any, block_n: int = 32) -> str:
    launches, _, _ = kernel_calls(core_plan(device, call.problem, DESCRIPTOR, {"block_n": block_n}), call, 3)
    return launches[1].constexprs["NUMBERS"]
