"""What the planner computes of core kernels: numbers of tiles and splits, keys in a window, constants of the launch."""

import datetime
import inspect
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import triton.language as tl
from places import tables
from quirk_files import active, plant, registry
from support import problem

from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.launch.run import load_kernels
from portattn.planning.kernel_specs import CORES, heads_together, occupied_tiles, of_gradients, packed_tiles
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.schema.lowering import OF_ROWS, Launch, Lowering
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.tuning import Entry, Provenance, Tuning

TABLES = tables(__file__)

PAGES = {"page_size": 48, "seq_k": 96, "seqlens_k": True}
FIELDS: dict[str, dict[str, Any]] = {
    "attention": {}, "varlen_attention": {"total_q": 30, "total_k": 70}, "attention_backward": {"return_lse": False},
    "varlen_attention_backward": {"total_q": 30, "total_k": 70, "return_lse": False},
    "decode_attention": {"heads_q": 6, "seq_q": 2},
    "paged_attention": {"op": "paged_attention", "heads_q": 6, "seq_q": 2} | PAGES,
    "sparse_attention": {"seq_q": 1, "tokens": 20, "softcap": True} | PAGES,
    "block_sparse_attention": {"tokens": 2}, "block_sparse_attention_backward": {"tokens": 2, "return_lse": False},
    "mla_attention": {"heads_q": 6, "heads_k": 1, "head_dim": 24, "head_dim_v": 16, "seq_q": 2} | PAGES,
    "append_kv": {"seqlens_k": True, "rotary": "neox", "rotary_dim": 8, "return_lse": False},
    "write_pages": {
        "batch": 1, "page_size": 48, "seq_k": 96, "kv_format": "e4m3", "kv_scales": "token", "return_lse": False,
    },
    "indexer_logits": {"heads_k": 1, "kv_format": "e4m3", "kv_scales": "token", "return_lse": False} | PAGES,
    "topk_indices": {"heads_q": 1, "heads_k": 1, "head_dim": 1, "tokens": 20, "return_lse": False},
}  # fmt: skip


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
        "SCORE_MOD": None, "MASK_MOD": None,
        "DROPS": "scores",  # without dropout there is one form
    }  # fmt: skip
    assert CORES["attention"].constexprs(p, lowering, Launch(block_m=32, block_n=64)) == expected


@pytest.mark.parametrize(("fields", "expected"), TABLES["constants_that_follow_from_widths_and_limits"], ids=str)
def test_constants_that_follow_from_widths_and_limits(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = CORES["attention"].constexprs(problem(**{"head_dim_v": 8} | fields), Lowering(reads="inside"), Launch())
    assert {name: found[name] for name in expected} == expected, "reads is no choice of this kernel"


@pytest.mark.parametrize(("op", "expected"), TABLES["constants_of_kernels_over_caches"])
def test_constants_of_kernels_over_caches(op: str, expected: dict[str, Any]) -> None:
    found = CORES[op].constexprs(of(op), Lowering(pipeline="rotated"), Launch(num_stages=3))
    assert {name: found[name] for name in expected} == expected
    assert CORES[op].constexprs(of(op), Lowering(), Launch(splits=2))["SPLIT"] is True


CASES = [("triton==3.6.0", 32), ("triton==3.7.1", 32), ("triton==3.8.0", 16)]


@pytest.mark.parametrize(("toolchain", "keys"), CASES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_products_of_int4_numbers_are_32_deep(arch: str, toolchain: str, keys: int) -> None:
    """cuda-0030: of 16 they are wrong, where rows are read as bytes."""
    p = of("paged_attention", head_dim=16, head_dim_v=16, dtype="bf16", kv_format="int4", kv_scales="token")
    made = plan(p, parse_target(f"cuda:{arch}", toolchain))
    assert made.lowering.unpack == "bytes"
    assert made.launch.block_n >= keys
    found = CORES["paged_attention"].constexprs(made.problem, made.lowering, made.launch)
    assert min(found["BLOCK_D"], found["BLOCK_DV"]) == 32
    wide = msgspec.structs.replace(p, head_dim=528, head_dim_v=512)
    assert CORES["paged_attention"].constexprs(wide, made.lowering, made.launch)["BLOCK_TAIL"] == 32


@pytest.mark.parametrize("op", ["decode_attention", "sparse_attention", "mla_attention"])
def test_tiles_are_as_wide_as_rows_where_nothing_outside_may_be_read(op: str) -> None:
    """reads = inside: no power of two, and no least width of a product's operand."""
    kernel, p = CORES[op], of(op, **{"head_dim": 40, "head_dim_v": 20})
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
    assert CORES["decode_attention"].keys(problem(op="decode_attention", seq_q=5, seq_k=1000, **fields)) == keys


@pytest.mark.parametrize(
    ("total", "per_row", "block_m", "batch", "tiles"),
    [(33, 2, 16, 3, 4 + 3 + 1), (32, 1, 16, 1, 2 + 1 + 1), (0, 4, 16, 5, 0 + 5 + 1), (31, 1, 32, 2, 0 + 2 + 1)],
)
def test_tiles_of_packed_rows(total: int, per_row: int, block_m: int, batch: int, tiles: int) -> None:
    """The rows' own, a ragged one for each sequence, and one for what follows the last."""
    p = problem(op="varlen_attention", batch=batch, total_q=total, total_k=9)
    assert packed_tiles(p, Launch(block_m=block_m), per_row) == tiles


def test_tiles_that_hold_rows_are_counted_for_any_lengths() -> None:
    drawn = random.Random(3)
    for _ in range(300):
        lengths, per_row, rows = [drawn.randint(1, 40) for _ in range(drawn.randint(1, 6))], drawn.randint(1, 80), 16
        p = of("paged_attention", batch=len(lengths), total_q=sum(lengths), seq_q=max(lengths))
        real = sum(-(-length * per_row // rows) for length in lengths)
        assert real <= occupied_tiles(p, rows, per_row) + len(lengths)
        alike = msgspec.structs.replace(p, total_q=len(lengths) * max(lengths))
        assert occupied_tiles(alike, rows, per_row) <= len(lengths) * -(-max(lengths) * per_row // rows)


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


# Launches of gradients whose two kernels have values of their own: where they come from, and who sees both.
SIZES = {"batch": 2, "heads_q": 8, "heads_k": 2, "seq_q": 1024, "seq_k": 2048, "head_dim": 64}
DENSE = Problem(op="attention_backward", **SIZES)
PACKED = Problem(op="varlen_attention_backward", **SIZES, total_q=2048, total_k=4096)
APART = {
    "block_m": 128, "block_n": 32, "num_warps": 4, "num_stages": 2,
    "rows_m": 64, "rows_n": 64, "rows_warps": 8, "rows_stages": 3,
}  # fmt: skip
NOBODY = Provenance(chip="none", toolchain="none", date=datetime.date(2026, 1, 1), measured=False)


def planned(known: Registry, problem: Problem = DENSE, launch: dict[str, Any] = APART, **settings: Any) -> Plan:
    tuning = Tuning(provenance=NOBODY, entry=(Entry(kernel="*_backward", launch=launch),))
    known = msgspec.structs.replace(known, tunings={**known.tunings, "cuda": {"sm_90": tuning}})
    target = known.target("cuda:sm_90", "triton==3.6.0")
    return plan(problem, target, known, settings=Settings(backend="triton", **settings))


def values(launch: Launch | None) -> tuple[int, ...]:
    return tuple(launch.get(name) for name in OF_ROWS)


def test_the_launch_of_rows() -> None:
    launch = Launch().changed(APART | {"maxnreg": 128})
    assert values(launch) == (128, 32, 4, 2)
    assert launch.of_rows() == Launch(block_m=64, block_n=64, num_warps=8, num_stages=3, options=(("maxnreg", 128),))
    assert launch.kernels() == (launch, launch.of_rows())
    one = Launch(rows_n=16)
    assert values(one.of_rows()) == (64, 16, 4, 2)
    assert Launch().of_rows() == Launch()
    assert Launch().kernels() == (Launch(),)
    assert one.of_rows().kernels() == (one.of_rows(),)


@pytest.mark.parametrize(("name", "rows"), OF_ROWS.items())
def test_a_value_is_set_for_both_kernels(name: str, rows: str) -> None:
    launch = Launch().changed(APART)
    both = launch.changed({name: 16})
    assert (both.get(name), both.of_rows().get(name)) == (16, 16)
    others = [other for other in OF_ROWS if other != name]
    assert [both.of_rows().get(other) for other in others] == [launch.of_rows().get(other) for other in others]
    each = launch.changed({name: 16, rows: 32})
    assert (each.get(name), each.of_rows().get(name)) == (16, 32)
    assert launch.changed({"maxnreg": 128}).of_rows().get(name) == launch.get(rows)


@pytest.mark.parametrize("problem", [DENSE, PACKED], ids=["dense", "packed"])
def test_a_plan_has_both_and_says_so(problem: Problem) -> None:
    made = planned(Registry.load(), problem)
    assert made.launch == Launch(**APART)
    assert (
        "launch   block_m=128 block_n=32 num_warps=4 num_stages=2 splits=1 "
        "rows_m=64 rows_n=64 rows_warps=8 rows_stages=3" in made.explain()
    )
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made
    one = planned(Registry.load(), problem, {"block_m": 32})
    assert "rows_" not in one.explain()
    assert msgspec.json.decode(msgspec.json.encode(one), type=Plan) == one


@pytest.mark.parametrize("problem", [DENSE, PACKED], ids=["dense", "packed"])
def test_the_number_of_programs_is_that_of_the_launch_with_the_most(problem: Problem) -> None:
    kernel = CORES[problem.op]
    for launch in (Launch(block_m=16, rows_m=128), Launch(block_m=128, rows_m=16), Launch(block_m=128)):
        plan_ = Plan(
            problem=problem, target="cuda:sm_90", toolchain="none", requested="triton", path="triton",
            kernel=kernel.name, lowering=planned(Registry.load()).lowering, launch=launch,
        )  # fmt: skip
        grids = {one.function: one.grid[0] for one in kernel_calls(plan_, meta_call(problem), 132)[0]}
        assert kernel.tiles(problem, launch) == max(grids["backward_keys"], grids["backward_rows"])
    assert kernel.tiles(problem, Launch(block_m=128, rows_m=16)) > kernel.tiles(problem, Launch(block_m=128))


def test_short_sequences_make_both_tiles_smaller() -> None:
    short = msgspec.structs.replace(DENSE, seq_q=20, seq_k=30)
    assert values(planned(Registry.load(), short).launch) == (32, 32, 4, 2)
    assert planned(Registry.load(), short).launch.of_rows().block_m == 32
    assert planned(Registry.load(), short, {"block_m": 128}).launch == Launch(block_m=32)


@pytest.mark.parametrize(
    ("when", "applies"),
    [
        ('{ num_stages = ">=3" }', True),  # the rows' alone
        ('{ num_stages = "<=2" }', True),  # the keys' alone
        ('{ block_m = ">=128", num_warps = 4 }', True),
        ('{ block_m = 64, block_n = ">=64", num_warps = 8 }', True),
        ('{ block_m = ">=128", block_n = ">=64" }', False),  # each holds for one kernel, both for none
        ('{ num_stages = ">=4" }', False),
    ],
)
def test_a_quirk_holds_where_it_holds_for_either_kernel(tmp_path: Path, when: str, applies: bool) -> None:
    plant(tmp_path, "cuda-0900-planted", 'env = { DISABLE_PTXAS_OPT = "1" }', f"launch = {when}")
    assert (active(planned(registry(tmp_path))) == {"cuda-0900-planted"}) is applies


@pytest.mark.parametrize(
    ("effect", "expected"),
    [
        ("{ num_stages = 1 }", ((128, 32, 4, 1), (64, 64, 8, 1))),
        ("{ block_m = 32, block_n = 16 }", ((32, 16, 4, 2), (32, 16, 8, 3))),
    ],
)
def test_what_a_quirk_sets_reaches_both_kernels(tmp_path: Path, effect: str, expected: Any) -> None:
    plant(tmp_path, "cuda-0900-planted", f"launch = {effect}", 'launch = { num_stages = ">=3" }')
    made = planned(registry(tmp_path))
    assert (values(made.launch), values(made.launch.of_rows())) == expected
    launches = kernel_calls(made, meta_call(DENSE), 132)[0]
    seen = {
        one.function: (one.constexprs["BLOCK_M"], one.constexprs["BLOCK_N"], *list(one.options().values())[:2])
        for one in launches
        if one.function != "backward_delta"
    }
    assert (seen["backward_keys"], seen["backward_rows"]) == expected
    assert planned(registry(tmp_path), quirks="-cuda-0900-planted").launch == Launch(**APART)


def test_the_key_holds_the_values_of_both_kernels() -> None:
    known = Registry.load()
    base = planned(known).key
    others = {planned(known, launch=APART | {name: 16 if name != "rows_warps" else 2}).key for name in OF_ROWS.values()}
    assert len(others | {base}) == 5
    said = {"block_m": 32, "rows_m": 32, "rows_stages": 2}
    assert planned(known, launch=said).key == planned(known, launch={"block_m": 32}).key


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("*_backward", True), ("dense_backward", True), ("varlen_backward", True), ("dense_*", False), ("*", False),
     ("dense_forward", False), ("gluon_backward", False), ("nothing", False)],
)  # fmt: skip
def test_which_entries_may_have_values_for_rows(pattern: str, expected: bool) -> None:
    assert of_gradients(pattern) is expected


@pytest.mark.parametrize("problem", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize(("fields", "keys", "rows"), TABLES["the_shipped_tiles_of_sm_90"], ids=str)
def test_the_shipped_tiles_of_sm_90(problem: Problem, fields: Any, keys: Any, rows: Any) -> None:
    asked = msgspec.structs.replace(problem, dtype="bf16", head_dim_v=fields["head_dim"], **fields)
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    made = plan(asked, target, Registry.load(), settings=Settings(backend="triton"))
    assert [[*values(made.launch)], [*values(made.launch.of_rows())]] == [keys, rows]


@pytest.mark.parametrize(("fields", "keys", "rows", "parts"), TABLES["the_shipped_products_of_float32"], ids=str)
def test_the_shipped_products_of_float32(fields: Any, keys: Any, rows: Any, parts: str) -> None:
    """Tensors without a feature have six products of bfloat16 parts, which long sequences store once; others three of
    TF32."""
    width, seq = fields["head_dim"], fields["seq"]
    asked = msgspec.structs.replace(DENSE, dtype="fp32", head_dim=width, head_dim_v=width, seq_q=seq, seq_k=seq)
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    made, featured = (
        plan(p, target, Registry.load(), settings=Settings(backend="triton"))
        for p in (asked, msgspec.structs.replace(asked, softcap=True))
    )
    assert [[*values(made.launch)], [*values(made.launch.of_rows())]] == [keys, rows]
    assert (made.lowering.dot_precision, made.lowering.parts) == ("bf16x6", parts)
    assert (featured.lowering.dot_precision, featured.lowering.parts) == ("tf32x3", "registers")
