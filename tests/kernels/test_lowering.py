"""Every Lowering value means the same numbers: each alone, every way to load a tile, and random combinations of all."""

import functools
import itertools
import zlib
from typing import Any

import msgspec
import pytest
import torch
import triton
import triton.language as tl
from support import TILE, Device, assert_right, core_plan, key_tile, lacking, largest, problem, random_call, run_core

from portattn.kernels.softmax import apply_softcap
from portattn.planning.kernel_specs import CORES
from portattn.reference import write
from portattn.schema.call import Call
from portattn.schema.lowering import CHOICES, Launch, Lowering
from portattn.schema.ops import PUBLIC, ROWS, WRITERS
from portattn.schema.problem import Problem

CUDA_PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16x6")  # hf32 is Ascend's alone
DEFAULTS = msgspec.structs.asdict(Lowering())
# Of Ascend; instructions of NVIDIA's, and pages of words: test_quantised_words.py has these. Tiles of more keys than
# these are: test_warps_apart.py.
NOT_HERE = ("hf32", "ptx", "by_page", "apart")
# tf32 keeps 10 bits of the mantissa: a product of depth 16 of normal values, through the softmax, is this far off.
TF32_ERROR = 2e-2

# What a problem of the op needs beyond support.problem(): packed rows, pages, tokens.
PAGES = {"seq_k": 48, "page_size": 16, "seqlens_k": True, "pages_in_line": True}
BASE: dict[str, dict[str, Any]] = {
    "attention": {}, "varlen_attention": {"batch": 3, "total_q": 33, "total_k": 70}, "decode_attention": {"seq_q": 1},
    "paged_attention": {"seq_q": 1} | PAGES, "sparse_attention": {"seq_q": 1, "tokens": 24},
    "block_sparse_attention": {"seq_q": 5, "tokens": 2, "block_k": 16},
    "mla_attention": {"seq_q": 1, "heads_q": 4, "heads_k": 1, "head_dim": 48, "head_dim_v": 32} | PAGES,
}  # fmt: skip
DENSE = {
    "dense": {"causal": "none"}, "causal_gqa": {"causal": "bottom_right", "heads_q": 4, "heads_k": 2, "head_dim_v": 32},
    "padded_fp16": {
        "causal": "top_left", "dtype": "fp16", "seqlens_q": True, "seqlens_k": True, "leftpad_q": True,
        "leftpad_k": True, "layout": "bshd",
    },
    "lengths_bf16_mqa_no_lse": {
        "causal": "bottom_right", "dtype": "bf16", "heads_k": 1, "seqlens_k": True, "return_lse": False,
    },
    "every_feature": {
        "window_left": 9, "window_right": 3, "softcap": True, "alibi_slopes": True, "sinks": True, "bias": True,
        "mask": True,
    },
    "int8_bf16": {"dtype": "bf16", "head_dim": 32, "kv_format": "int8", "kv_scales": "token", "causal": "top_left"},
    "one_tile_fp16": {"seq_k": 13, "causal": "bottom_right", "dtype": "fp16", "seqlens_k": True},
}  # fmt: skip
VARLEN = {
    "full": {}, "causal_gqa_fp16": {"causal": "bottom_right", "heads_q": 4, "heads_k": 2, "dtype": "fp16"},
    "every_feature_bf16": {
        "causal": "top_left", "window_left": 9, "softcap": True, "alibi_slopes": True, "sinks": True, "dtype": "bf16",
        "return_lse": False,
    },
    "int8_fp16": {"dtype": "fp16", "head_dim": 32, "kv_format": "int8", "kv_scales": "head"},
}  # fmt: skip
DECODE = {
    "full": {"seq_q": 1}, "lengths_fp16": {"seq_q": 1, "dtype": "fp16", "seqlens_k": True, "leftpad_k": True},
    "causal_bf16_bshd": {"seq_q": 3, "dtype": "bf16", "causal": "bottom_right", "seqlens_k": True, "layout": "bshd"},
    "top_left": {"seq_q": 3, "causal": "top_left", "leftpad_k": True, "return_lse": False},
    "every_feature": {
        "seq_q": 3, "window_left": 9, "softcap": True, "alibi_slopes": True, "sinks": True, "bias": True, "mask": True,
    },
    "e4m3_bf16": {"dtype": "bf16", "kv_format": "e4m3", "kv_scales": "token", "seqlens_k": True},
}  # fmt: skip
PAGED = {
    "a_page_a_tile": {"seq_q": 2, "bias": True, "mask": True},
    "pages_of_two_tiles_hpd_fp16": {
        "page_size": 32, "seq_k": 64, "page_layout": "hpd", "pages_in_line": False, "dtype": "fp16", "seq_q": 3,
        "causal": "bottom_right",
    },
    "small_pages_bf16": {"page_size": 6, "seq_k": 42, "dtype": "bf16", "sinks": True},
    "packed_window": {
        "batch": 3, "seq_q": 7, "total_q": 12, "causal": "bottom_right", "window_left": 9, "softcap": True,
        "alibi_slopes": True, "return_lse": False,
    },
    "int4_fp16": {"dtype": "fp16", "kv_format": "int4", "kv_scales": "token", "window_left": 9, "head_dim": 32},
}  # fmt: skip
SPARSE = {
    "cache": {},
    "pages_weights_fp16": {
        "page_size": 6, "seq_k": 42, "log_weights": True, "dtype": "fp16", "softcap": True, "alibi_slopes": True,
        "sinks": True, "seqlens_k": True,
    },
    "magicpig_bf16": {"magicpig": True, "dtype": "bf16", "head_dim": 32},
}  # fmt: skip
BLOCKS = {"causal": {"causal": "bottom_right"}, "lengths_bf16": {"dtype": "bf16", "seqlens_k": True}}
ATTENTION = tuple(op for op in PUBLIC if op not in WRITERS)  # the others: test_cache_writes.py
MLA = {
    "one_query": {}, "causal_fp16": {"seq_q": 3, "causal": "bottom_right", "dtype": "fp16", "layout": "bshd"},
    "packed_small_pages_bf16": {
        "batch": 3, "seq_q": 7, "total_q": 12, "page_size": 6, "seq_k": 42, "dtype": "bf16", "sinks": True,
        "window_left": 9,
    },
    "listed_bf16": {"batch": 3, "seq_q": 2, "tokens": 40, "page_size": 6, "dtype": "bf16", "sinks": True},
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{op.removesuffix('_attention')}-{name}": (op, BASE[op] | ({"heads_q": 4} if op != "attention" else {}) | fields)
    for op, cases in zip(ATTENTION, (DENSE, VARLEN, DECODE, PAGED, SPARSE, BLOCKS, MLA), strict=True)
    for name, fields in cases.items()
}
TILES = [
    {"load": load, "k_tile": k_tile, "block_order": order}
    for load, k_tile, order in itertools.product(CHOICES["load"], CHOICES["k_tile"], CHOICES["block_order"])
    if order == "column" or (load, k_tile) == ("block_ptr", "transposed")  # elsewhere block_order is not read
]


def choices(op: str) -> tuple[str, ...]:
    """Return the choices that an op's code depends on: of chosen blocks fewer than tuning may name."""
    p = problem(op=op, **BASE[ROWS[op].gradient_of or op])
    return CORES[op].read(p, Lowering()) if p.has_blocks else CORES[op].choices


def possible(op: str, p: Problem, lowering: dict[str, str], keys: int = TILE) -> dict[str, str]:
    kernel = CORES[op]
    limits = kernel.limits(p, Lowering(**lowering), Launch(block_m=TILE, block_n=keys))
    lowering = lowering | {choice: value for choice, value, _ in limits}
    return {name: value for name, value in lowering.items() if name in kernel.choices}


def check(device: Device, case: str, lowering: dict[str, str], seed: int = 0) -> None:
    op, features = CASES[case]
    call = random_call(problem(op=op, **features), seed, device=device.name)
    lowering = possible(op, call.problem, lowering, key_tile(device, call.problem))
    launch = {"splits": 3} if CORES[op].splits_keys and seed % 2 else {}
    rounded = device.name != "cpu" and call.q.dtype is torch.float32 and lowering.get("dot_precision") == "tf32"
    assert_right(call, *run_core(device, call, lowering, launch), extra=TF32_ERROR if rounded else 0.0)


def alone() -> list[tuple[str, str, str]]:
    """Each value that is no default, for each case whose kernel reads the choice, where nothing forbids it."""
    return [
        (case, name, value) for case, (op, fields) in CASES.items() for name in choices(op)
        for value in (CUDA_PRECISIONS if name == "dot_precision" else CHOICES[name])
        if value not in (DEFAULTS[name], *NOT_HERE)
        and possible(op, problem(op=op, **fields), {name: value})[name] == value
    ]  # fmt: skip


def test_every_value_that_a_kernel_reads_is_among_them() -> None:
    """Of those that its limits allow: only dense keys are known to fit one tile."""
    for op in ATTENTION:
        never = {("pipeline", "single")} if op != "attention" else set()
        seen = {(name, value) for case, name, value in alone() if CASES[case][0] == op}
        wanted = {(name, v) for name in choices(op) for v in CHOICES[name] if v not in (DEFAULTS[name], *NOT_HERE)}
        assert seen == wanted - never


@pytest.mark.parametrize(("case", "name", "value"), alone())
def test_each_value_alone(device: Device, case: str, name: str, value: str) -> None:
    check(device, case, {name: value}, seed=1)


@pytest.mark.parametrize("case", [case for case, (op, _) in CASES.items() if "load" in CORES[op].choices])
@pytest.mark.parametrize("tile", TILES, ids=lambda t: "-".join(t.values()))
def test_every_way_to_load_a_tile(device: Device, case: str, tile: dict[str, str]) -> None:
    check(device, case, tile, seed=2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(6))
def test_random_combinations(device: Device, case: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case} {seed}".encode()))
    lowering = {}
    for name, values in CHOICES.items():
        known = [v for v in values if v not in NOT_HERE]
        lowering[name] = known[int(torch.randint(len(known), (1,), generator=generator))]
    if lowering["load"] in lacking():
        lowering["load"] = "pointer"
    check(device, case, lowering, seed)


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize("cores", [1, 2, 1000])
def test_a_persistent_grid_of_any_width(device: Device, op: str, cores: int) -> None:
    """One program for all tiles, a number that divides nothing evenly, and more programs than tiles."""
    causal = {} if op == "sparse_attention" else {"causal": "bottom_right"}
    p = problem(op=op, **BASE[op] | {"heads_q": 3, "heads_k": 3 if op != "mla_attention" else 1} | causal)
    call = random_call(p, device=device.name)
    launch = {"splits": 2} if CORES[op].splits_keys else {}
    assert_right(call, *run_core(device, call, {"grid": "persistent"}, launch, cores=cores))


STEPS: dict[str, dict[str, Any]] = {  # which tiles are whole, which are at an edge, and in which order they come
    "whole tiles and no edge": {"seq_q": 20, "seq_k": 96}, "a last tile that is not whole": {"seq_q": 20, "seq_k": 100},
    "one tile": {"seq_q": 20, "seq_k": 9}, "a diagonal": {"seq_q": 90, "seq_k": 90, "causal": "bottom_right"},
    "rows without keys": {"seq_q": 90, "seq_k": 20, "causal": "bottom_right"},
    "a window with whole tiles inside": {"seq_q": 90, "seq_k": 200, "causal": "bottom_right", "window_left": 70},
    "a window of edges alone": {"seq_q": 40, "seq_k": 150, "window_left": 9, "window_right": 9},
    "a window past the keys": {"seq_q": 150, "seq_k": 40, "causal": "top_left", "window_left": 20},
    "chunks with whole tiles inside": {"seq_q": 90, "seq_k": 200, "chunk": 75},
    "lengths of 0": {"seq_q": 20, "seq_k": 60, "batch": 4, "seqlens_q": True, "seqlens_k": True},
}  # fmt: skip


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("select", CHOICES["select"])
@pytest.mark.parametrize("load", ["pointer", "descriptor"])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_rotated_loop(device: Device, sinks: bool, load: str, select: str, steps: str) -> None:
    """Rows that see no key have a sum where there are sinks, and the first step reads a tile even if nobody sees it."""
    call = random_call(problem(**STEPS[steps], sinks=sinks), 4, device=device.name)
    for name in ("seqlens_q", "seqlens_k"):
        if STEPS[steps].get(name):
            getattr(call, name)[:2] = 0
    operand = "reload" if sinks else "keep"
    lowering = {"pipeline": "rotated", "select": select, "load": load, "q_operand": operand}
    check_rows(device, call, lowering, blind=steps == "rows without keys")


def check_rows(device: Device, call: Call, lowering: dict[str, str], blind: bool) -> None:
    """Check the result; if the first rows are blind, also that nothing is seen of tiles whose rows see no key."""
    assert_right(call, *run_core(device, call, lowering))
    if blind:
        call.v[:, :, 0] = float("nan")
        out, _ = run_core(device, call, lowering)
        assert not out[:, :, : (call.problem.seq_q - call.problem.seq_k) // TILE * TILE].isnan().any()


ONE_TILE: dict[str, dict[str, Any]] = {  # keys that one tile of TILE holds
    "a whole tile": {"seq_q": 20, "seq_k": TILE}, "a part of it": {"seq_q": 20, "seq_k": 9},
    "a diagonal": {"seq_q": TILE, "seq_k": TILE, "causal": "bottom_right"},
    "rows without keys": {"seq_q": 90, "seq_k": 12, "causal": "bottom_right"},
    "a window": {"seq_q": 14, "seq_k": 14, "causal": "bottom_right", "window_left": 3},
    "a window past the keys": {"seq_q": 90, "seq_k": 12, "causal": "top_left", "window_left": 5},
    "chunks": {"seq_q": 14, "seq_k": 15, "chunk": 4},
    "lengths of 0": {"seq_q": 20, "seq_k": 15, "batch": 4, "seqlens_q": True, "seqlens_k": True},
    "left padding": {"seq_q": 20, "seq_k": 15, "leftpad_k": True, "seqlens_k": True},
    "all scores": {"seq_q": 20, "seq_k": 15, "mask": True, "bias": True, "alibi_slopes": True, "softcap": True},
    "a head in two parts": {"seq_q": 20, "seq_k": 15, "head_dim": 576, "head_dim_v": 512},
}  # fmt: skip


@pytest.mark.parametrize("keys", ONE_TILE)
@pytest.mark.parametrize("select", CHOICES["select"])
@pytest.mark.parametrize("load", ["pointer", "descriptor"])
def test_one_tile_without_a_loop(device: Device, load: str, select: str, keys: str) -> None:
    call = random_call(problem(**ONE_TILE[keys], sinks=True), 4, device=device.name)
    if keys == "lengths of 0":
        call.seqlens_q[:2] = call.seqlens_k[:2] = 0
    lowering = {"pipeline": "single", "select": select, "load": load}
    check_rows(device, call, lowering, blind=keys == "rows without keys")


SEVERAL: dict[str, dict[str, Any]] = {
    name: fields | {"seq_k": fields["seq_k"] + 3 * TILE} for name, fields in ONE_TILE.items()
} | {
    "a wide window": {"seq_q": 70, "seq_k": 70, "causal": "bottom_right", "window_left": 40},
    "rows without keys": {"seq_q": 90, "seq_k": 40, "causal": "bottom_right"},
    "blocks": {"seq_q": 64, "seq_k": 96, "block_mask": True, "block_q": 32, "block_k": 32},
    "dropout": {"seq_q": 40, "seq_k": 60, "dropout": True},
    "packed": {"op": "varlen_attention", "total_q": 61, "total_k": 75, "seq_q": 40, "seq_k": 50, "batch": 3},
    "decode": {"op": "decode_attention", "seq_q": 2, "seq_k": 75, "seqlens_k": True, "causal": "bottom_right"},
}


@pytest.mark.parametrize("keys", SEVERAL)
@pytest.mark.parametrize("load", ["pointer", "descriptor"])
def test_one_loop_of_masked_tiles(device: Device, load: str, keys: str) -> None:
    """Tiles that every row attends whole too, and those on both sides of a window. NaN is where nothing is attended."""
    call = random_call(problem(**SEVERAL[keys], sinks=True), 5, device=device.name)
    if keys == "lengths of 0":
        call.seqlens_q[:2] = call.seqlens_k[:2] = 0
    lowering = {"pipeline": "masked", "load": load}
    assert_right(call, *run_core(device, call, lowering, {"splits": 3} if keys == "decode" else {}))


# As backends/cuda/tuning/sm_90.toml has them.
SHIPPED = {
    "fp16": ({"select": "branch", "load": "pointer"}, {"block_m": 64, "block_n": 64}),
    "fp32": ({"select": "where", "load": "pointer", "dot_precision": "tf32x3"}, {"block_m": 16, "block_n": 64}),
}


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize("dtype", SHIPPED)
def test_shipped_tiles_without_a_loop(device: Device, dtype: str, causal: str) -> None:
    """Wider than the head, many more rows than keys, and lengths down to none."""
    p = problem(
        dtype=dtype, batch=3, heads_q=4, seq_q=150, seq_k=63, head_dim=40, head_dim_v=24, causal=causal,
        seqlens_k=True, sinks=True, return_lse=True,
    )  # fmt: skip
    call = random_call(p, device=device.name)
    call.seqlens_k[0] = 0  # shorter only: keys past a length hold NaN
    call.seqlens_k[1].clamp_(max=1)
    lowering, tile = SHIPPED[dtype]
    assert core_plan(device, p, lowering | {"pipeline": "single"}, tile).lowering.pipeline == "single"
    assert_right(call, *run_core(device, call, lowering | {"pipeline": "single"}, tile))


def test_a_finite_mask_value_survives_scores_below_it(device: Device) -> None:
    """Rows with nothing to attend stay 0 and -inf, and large negative scores are no masked ones."""
    p = problem(causal="bottom_right", seq_q=24, seq_k=5)
    for scale in (None, -300.0):
        call = random_call(p, device=device.name, scale=scale)
        assert_right(call, *run_core(device, call, {"mask_value": "finite"}))


def test_choices_are_read(device: Device) -> None:
    """A kernel is compiled with every choice that the planner says it reads, and with no other that could differ."""
    from portattn.launch import kernel_calls

    for op, kernel in CORES.items():
        if op in WRITERS:  # theirs: test_cache_writes.py
            continue
        call = random_call(problem(op=op, **BASE[ROWS[op].gradient_of or op]), device=device.name)
        launches, _, _ = kernel_calls(core_plan(device, call.problem), call, 3)
        constexprs = {name.lower(): value for launch in launches for name, value in launch.constexprs.items()}
        given = {name: value for name, value in constexprs.items() if name in CHOICES}
        # A function that several ops share has all their choices.
        shared = {name for other in CORES.values() if other.function == kernel.function for name in other.choices}
        # Read by the planner alone: one decides the width of tiles, the other which of two kernels decodes.
        elsewhere = {"reads"} if op == "sparse_attention" else {"warps"}
        assert set(choices(op)) - elsewhere <= given.keys() <= shared
        assert all(given[name] == DEFAULTS[name] for name in given.keys() - set(kernel.choices))


SCORES = 1024
STEPS_CAPPED = 8.0  # units in the last place of float32: two exponentials, a quotient and products


@triton.jit
def cap_scores(scores, caps, out, SCORES: tl.constexpr):
    at = tl.arange(0, SCORES)
    tl.store(out + at, apply_softcap(tl.load(scores + at), tl.load(caps + at)))


@pytest.mark.parametrize("cap", [0.5, 30.0, 1e4])
def test_the_relative_error_is_small_for_scores_of_any_size(device: Device, cap: float) -> None:
    """From scores a millionth of the cap to twenty times the cap, of both signs: a scale-free bound, not one of the
    largest value, below which a wrong small score would hide."""
    sizes = torch.logspace(-6, 1.3, SCORES // 2, dtype=torch.float64)
    scores = (torch.cat([-sizes, sizes]) * cap).float().to(device.name)
    caps, out = torch.full_like(scores, cap), torch.full_like(scores, float("nan"))
    cap_scores[(1,)](scores, caps, out, SCORES)
    expected = cap * torch.tanh(scores.double() / cap)
    assert out.isfinite().all()
    assert largest(out.double() / expected - 1.0) <= STEPS_CAPPED * torch.finfo(torch.float32).eps


def test_zero_stays_zero_and_a_large_score_becomes_the_cap(device: Device) -> None:
    scores = torch.zeros(SCORES, device=device.name)
    scores[1], scores[2] = 1e30, -1e30
    caps, out = torch.full_like(scores, 30.0), torch.full_like(scores, float("nan"))
    cap_scores[(1,)](scores, caps, out, SCORES)
    assert out[:3].tolist() == [0.0, 30.0, -30.0]
    assert not out[3:].any()


KEYS, WIDTH = 65536, 64
PLACES = (0, 1, 777, KEYS // 3, KEYS // 2 + 1, 60000, KEYS - 2, KEYS - 1)
QUERIES = len(PLACES)


@functools.cache
def needles() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (1, 1, 8, D), and keys and values of one head."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, WIDTH, generator=generator) for rows in (QUERIES, KEYS, KEYS))
    wanted = k[:, :, PLACES]
    k[:, :, PLACES] = 2.0 * wanted
    return 1.5 * wanted + 0.3 * q, k, v


def stored(kind: str, scales: str) -> Call:
    """decode_attention of the needles' queries over a cache that the reference has written."""
    q, k, v = needles()
    sizes = {"batch": 1, "heads_k": 1, "seq_k": KEYS, "head_dim": WIDTH, "kv_format": kind, "kv_scales": scales}
    p = problem(op="decode_attention", heads_q=QUERIES, seq_q=1, dtype="bf16", head_dim_v=WIDTH, **sizes)
    call = Call(
        problem=p, q=q.transpose(1, 2).reshape(1, QUERIES, 1, WIDTH).bfloat16(), scale=WIDTH**-0.5,
        **{name: torch.zeros(1, 1, KEYS, WIDTH // 2, dtype=torch.int8) for name in ("k", "v")},
    )  # fmt: skip
    if scales == "token":
        call.k_scale, call.v_scale = torch.zeros(2, 1, 1, KEYS).unbind()
    else:
        call.k_scale, call.v_scale = (x.abs().amax().view(1, 1) / (6.0 * 448.0) for x in (k, v))
    if kind == "nvfp4":
        call.k_block_scale, call.v_block_scale = torch.zeros(2, 1, 1, KEYS, WIDTH // 16, dtype=torch.int8).unbind()
    write.run(Call(
        problem=Problem(op="append_kv", heads_q=1, seq_q=KEYS, dtype="fp32", seqlens_k=True, **sizes), q=k, new_v=v,
        k=call.k, v=call.v, scale=1.0, k_scale=call.k_scale, v_scale=call.v_scale, k_block_scale=call.k_block_scale,
        v_block_scale=call.v_block_scale, seqlens_k=torch.zeros(1, dtype=torch.int32),
    ))  # fmt: skip
    return call


def found(out: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
    """The share of needles that are found, and the least cosine of a result and its needle's value."""
    cosines = torch.nn.functional.normalize(out.float().cpu(), dim=-1) @ torch.nn.functional.normalize(values, dim=-1).T
    recall = (cosines.argmax(-1) == torch.tensor(PLACES)).float().mean()
    return float(recall), float(cosines[range(QUERIES), PLACES].min())


@pytest.mark.parametrize(("kind", "scales", "least"), [("int4", "token", 0.985), ("nvfp4", "head", 0.985)])
def test_needles_among_64k_keys_are_found(device: Device, kind: str, scales: str, least: float) -> None:
    q, k, v = needles()
    wide = torch.nn.functional.scaled_dot_product_attention(*(t.to(device.name, torch.bfloat16) for t in (q, k, v)))
    call = stored(kind, scales)
    for name in ("q", "k", "v", "k_scale", "v_scale", "k_block_scale", "v_block_scale"):
        tensor = getattr(call, name)
        setattr(call, name, None if tensor is None else tensor.to(device.name))
    out, _ = run_core(device, call, launch={"block_n": 2048 if device.path == "interpreter" else 64})
    recall, in_bf16 = found(out[0, :, 0], v[0, 0]), found(wide[0, 0], v[0, 0])
    assert in_bf16[0] == recall[0] == 1.0
    assert in_bf16[1] > 0.999
    assert recall[1] > least  # the value itself is of 4 bits
