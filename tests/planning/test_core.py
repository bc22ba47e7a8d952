"""What the planner computes of core kernels: numbers of tiles and splits, keys in a window, constants of the launch."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest
import triton.language as tl
from support import problem

from portattn.launch import kernel_calls, meta_call
from portattn.launch.run import load_kernels
from portattn.planning.kernel_specs import CORES, heads_together, packed_tiles
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.lowering import Launch, Lowering

PAGES = {"page_size": 48, "seq_k": 96, "seqlens_k": True}
FIELDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "varlen_attention": {"total_q": 30, "total_k": 70},
    "attention_backward": {"return_lse": False},
    "varlen_attention_backward": {"total_q": 30, "total_k": 70, "return_lse": False},
    "decode_attention": {"heads_q": 6, "seq_q": 2},
    "paged_attention": {"op": "paged_attention", "heads_q": 6, "seq_q": 2} | PAGES,
    "sparse_attention": {"seq_q": 1, "tokens": 20, "softcap": True} | PAGES,
    "mla_attention": {"heads_q": 6, "heads_k": 1, "head_dim": 24, "head_dim_v": 16, "seq_q": 2} | PAGES,
    "append_kv": {"seqlens_k": True, "rotary": "neox", "rotary_dim": 8, "return_lse": False},
    "write_pages": {
        "batch": 1,
        "page_size": 48,
        "seq_k": 96,
        "kv_format": "e4m3",
        "kv_scales": "token",
        "return_lse": False,
    },
}


def of(op: str, **fields: Any):
    return problem(**{"op": op} | FIELDS[op] | fields)


@pytest.mark.parametrize("op", CORES)
def test_constants_are_named_as_the_kernels_parameters(op: str) -> None:
    """Every constant parameter is given, under its own name: of the launch, and so of what a record is about."""
    made = plan(of(op), parse_target("cuda:sm_80", "triton==3.6.0"))
    assert made.path == "triton"
    launches = kernel_calls(made, meta_call(made.problem), 132)[0]
    launch = next(one for one in launches if one.function == CORES[op].function)
    kernel = getattr(load_kernels(launch.module, interpreted=True), launch.function)
    parameters = inspect.signature(inspect.unwrap(kernel.fn)).parameters.values()
    assert set(launch.constexprs) == {p.name for p in parameters if p.annotation in (tl.constexpr, "tl.constexpr")}


def test_constants_of_the_dense_kernel() -> None:
    """Of a head that is read in two parts, in its own words; a window's right end is a causal one, aligned below."""
    p = problem(
        head_dim=530, head_dim_v=40, window_left=3, window_right=2, softcap=True, mask=True, mask_by_key=True,
        negative_scale=True,
    )  # fmt: skip
    lowering = Lowering(exp="exp", load="pointer")
    choices = [name for name in CORES["attention"].choices if name != "warps"]  # it decides which kernel runs
    expected = {name.upper(): getattr(lowering, name) for name in choices} | {
        "HEAD_DIM": 530, "HEAD_DIM_V": 40, "MAIN": 512, "BLOCK_D": 512, "BLOCK_TAIL": 32, "BLOCK_DV": 64,
        "BLOCK_M": 32, "BLOCK_N": 64, "CAUSAL": "bottom_right", "WINDOW": True, "SOFTCAP": True, "BIAS_BY_KEY": False,
        "MASK_BY_KEY": True, "NEGATED": True, "SEARCH": 256, "KV_FORMAT": "as_q", "KV_SCALES": "none",
        "Q_FORMAT": "as_q", "V_FORMAT": "as_q", "P_TERMS": 1, "LISTED_Q": 0, "LISTED_K": 0,
        "DROPS": "scores",  # without dropout there is one form
    }  # fmt: skip
    assert CORES["attention"].constexprs(p, lowering, Launch(block_m=32, block_n=64)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"head_dim": 512}, {"MAIN": 512, "BLOCK_D": 512, "BLOCK_TAIL": 0}),
        ({"head_dim": 513}, {"MAIN": 512, "BLOCK_D": 512, "BLOCK_TAIL": 16}),
        ({"head_dim": 8}, {"MAIN": 8, "BLOCK_D": 16, "BLOCK_DV": 16, "BLOCK_TAIL": 0}),
        ({"causal": "top_left"}, {"CAUSAL": "top_left", "WINDOW": False}),
        ({"window_left": 0}, {"CAUSAL": "none", "WINDOW": True}),
        ({"window_right": 0}, {"CAUSAL": "bottom_right", "WINDOW": False}),
    ],
    ids=str,
)
def test_constants_that_follow_from_widths_and_limits(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = CORES["attention"].constexprs(problem(**{"head_dim_v": 8} | fields), Lowering(reads="inside"), Launch())
    assert {name: found[name] for name in expected} == expected, "reads is no choice of this kernel"


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("decode_attention", {"GROUP": 3, "SPLIT": False, "LATENT": False, "PAGE_SIZE": 0, "PIPELINE": "rotated"}),
        ("paged_attention", {"GROUP": 3, "SPLIT": False, "LATENT": False, "PAGE_SIZE": 48, "PIPELINE": "plain"}),
        ("mla_attention", {"GROUP": 6, "LATENT": True, "MAIN": 16, "BLOCK_D": 16, "BLOCK_TAIL": 16, "BLOCK_DV": 16}),
        ("sparse_attention", {"SPLIT": False, "PAGE_SIZE": 48, "SOFTCAP": True, "NEGATED": False, "STAGES": 3}),
    ],
)
def test_constants_of_kernels_over_caches(op: str, expected: dict[str, Any]) -> None:
    """Over pages there is no rotated loop, whatever was chosen."""
    found = CORES[op].constexprs(of(op), Lowering(pipeline="rotated"), Launch(num_stages=3))
    assert {name: found[name] for name in expected} == expected
    split = CORES[op].constexprs(of(op), Lowering(), Launch(splits=2))
    assert split["SPLIT"] is True


CASES = [("triton==3.6.0", 32), ("triton==3.7.1", 32), ("triton==3.8.0", 16)]


@pytest.mark.parametrize(("toolchain", "keys"), CASES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_products_of_int4_numbers_are_32_deep(arch: str, toolchain: str, keys: int) -> None:
    """cuda-0030: of 16 they are wrong, where rows are read as bytes."""
    p = of("paged_attention", head_dim=16, head_dim_v=16, dtype="bf16", kv_format="int4", kv_scales="token")
    made = plan(p, parse_target(f"cuda:{arch}", toolchain))
    assert made.lowering is not None
    assert made.launch is not None
    assert made.lowering.unpack == "bytes"
    assert made.launch.block_n >= keys
    found = CORES["paged_attention"].constexprs(made.problem, made.lowering, made.launch)
    assert min(found["BLOCK_D"], found["BLOCK_DV"]) == 32
    wide = msgspec.structs.replace(p, head_dim=528, head_dim_v=512)
    assert CORES["paged_attention"].constexprs(wide, made.lowering, made.launch)["BLOCK_TAIL"] == 32


@pytest.mark.parametrize("op", ["decode_attention", "sparse_attention", "mla_attention"])
def test_tiles_are_as_wide_as_rows_where_nothing_outside_may_be_read(op: str) -> None:
    """reads = inside: no power of two, and no least width of a product's operand."""
    widths = {"head_dim": 40, "head_dim_v": 20}
    kernel, p = CORES[op], of(op, **widths)
    inside = kernel.constexprs(p, Lowering(reads="inside"), Launch())
    masked = kernel.constexprs(p, Lowering(reads="masked"), Launch())
    latent = op == "mla_attention"
    assert (inside["BLOCK_D"], inside["BLOCK_DV"]) == (20 if latent else 40, 20)
    assert (masked["BLOCK_D"], masked["BLOCK_DV"]) == (32 if latent else 64, 32)


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({}, 1000),
        ({"window_right": 0}, 1000),
        ({"window_left": 99}, 1000),  # everything after the query
        ({"window_left": 99, "window_right": 7}, 99 + 5 + 7),
        ({"window_left": 99, "window_right": 0}, 99 + 5),
        ({"window_left": 99, "causal": "bottom_right"}, 99 + 5),
        ({"window_left": 99, "window_right": 7, "causal": "none"}, 99 + 5 + 7),
        ({"window_left": 2000, "causal": "top_left"}, 1000),
        ({"window_left": 998, "window_right": 1}, 1000),
    ],
    ids=str,
)
def test_most_keys_of_one_tile_of_rows(fields: dict[str, Any], keys: int) -> None:
    """Five queries see what the first one's window begins with, up to what the last one's ends with."""
    p = problem(op="decode_attention", seq_q=5, seq_k=1000, **fields)
    assert CORES["decode_attention"].keys(p) == keys


@pytest.mark.parametrize(
    ("total", "per_row", "block_m", "batch", "tiles"),
    [(33, 2, 16, 3, 4 + 3 + 1), (32, 1, 16, 1, 2 + 1 + 1), (0, 4, 16, 5, 0 + 5 + 1), (31, 1, 32, 2, 0 + 2 + 1)],
)
def test_tiles_of_packed_rows(total: int, per_row: int, block_m: int, batch: int, tiles: int) -> None:
    """The rows' own, a ragged one for each sequence, and one for what follows the last."""
    p = problem(op="varlen_attention", batch=batch, total_q=total, total_k=9)
    assert packed_tiles(p, Launch(block_m=block_m), per_row) == tiles


def test_heads_together_where_sequences_are_packed_or_not() -> None:
    """As many as there are: of all sequences, but packed sequences have them in common."""
    arch = msgspec.structs.replace(parse_target("cuda:sm_90", "triton==3.6.0").arch, cache_share=1 << 30)
    assert heads_together(problem(batch=5, heads_q=3, heads_k=3), arch) == 15
    assert heads_together(of("varlen_attention", batch=5, heads_q=3, heads_k=3), arch) == 3


@pytest.mark.parametrize(
    ("programs", "key_tiles", "cores", "occupancy", "splits"),
    [
        (1, 8, 4, 1, 4),  # one program a core, two tiles each
        (1, 5, 4, 1, 3),  # four would be no better: one has two tiles, and all wait for it
        (5, 8, 4, 1, 2),  # ten programs fill three waves better than five do two
        (5, 5, 4, 1, 1),  # three splits are never looked at: twice what fills the chip is the most
        (3, 8, 4, 1, 1),
        (3, 5, 4, 2, 2),  # two programs fit a core
        (1, 4, 4, 1, 1),  # too few keys for a second pass
        (0, 100, 4, 1, 1),
        (1, 10_000, 1000, 1, 109),  # 128 is the most; this is within 85 % of it
    ],
)
def test_splits_that_fill_the_last_wave(programs: int, key_tiles: int, cores: int, occupancy: int, splits: int) -> None:
    assert CORES["decode_attention"].splits(programs, key_tiles, cores, occupancy, split_threshold=2.0) == splits


def test_a_full_chip_is_not_split() -> None:
    """Full is so many programs a core, and no more: with room for two, two splits would fit."""
    kernel = CORES["decode_attention"]
    assert kernel.splits(4, 8, 4, 2, split_threshold=1.0) == 1
    assert kernel.splits(4, 8, 4, 2, split_threshold=1.25) == 2


def test_limits_of_page_loops() -> None:
    """A tile in several pages takes an id for each row; a descriptor reads whole pages that lie in line."""
    kernel, per_page = CORES["paged_attention"], Lowering(page_loop="per_page")
    tile = Launch(block_n=32)
    lies = ("page_loop", "flat_masked", "a tile of 32 keys does not lie in one page of 48")
    whole = ("load", "pointer", "a descriptor reads tiles of one matrix: whole pages that lie in line")
    descriptor = msgspec.structs.replace(per_page, load="descriptor")
    for lowering, launch, in_line, expected in (
        (per_page, tile, False, (lies,)),
        (per_page, Launch(block_n=16), False, ()),
        (Lowering(page_loop="flat_masked"), tile, False, ()),
        (descriptor, Launch(block_n=16), True, ()),
        (descriptor, Launch(block_n=16), False, (whole,)),
        (descriptor, tile, True, (lies, whole)),
        (msgspec.structs.replace(descriptor, page_loop="flat_masked"), Launch(block_n=16), True, (whole,)),
    ):
        assert kernel.limits(of("paged_attention", pages_in_line=in_line), lowering, launch) == expected


def test_what_a_kernel_cannot_do_says_what_would_help() -> None:
    assert CORES["sparse_attention"].cannot(of("sparse_attention")) is None
    several = CORES["sparse_attention"].cannot(of("sparse_attention", seq_q=2))
    assert several == ("seq_q is 2, and a chosen token is one query's", "pass one query a sequence")
    wide = "head_dim_v is 513, and the kernel's tiles take up to 512", "backend='reference' takes 576"
    assert CORES["attention"].cannot(problem(head_dim=576, head_dim_v=513)) == wide
    assert CORES["attention"].cannot(problem(head_dim=576, head_dim_v=512)) is None
