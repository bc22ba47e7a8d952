"""Launches of gradients whose two kernels have values of their own: where they come from, and who sees both."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quirk_files import active, plant, registry

from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning.kernel_specs import CORES, of_gradients
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.lowering import OF_ROWS, Launch
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.tuning import Entry, Provenance, Tuning

SIZES = {"batch": 2, "heads_q": 8, "heads_k": 2, "seq_q": 1024, "seq_k": 2048, "head_dim": 64}
DENSE = Problem(op="attention_backward", **SIZES)
PACKED = Problem(op="varlen_attention_backward", **SIZES, total_q=2048, total_k=4096)
APART = {
    "block_m": 128, "block_n": 32, "num_warps": 4, "num_stages": 2,
    "rows_m": 64, "rows_n": 64, "rows_warps": 8, "rows_stages": 3,
}  # fmt: skip
NOBODY = Provenance(chip="none", toolchain="none", date=datetime.date(2026, 1, 1), measured=False)


def planned(known: Registry, problem: Problem = DENSE, launch: dict[str, Any] = APART, **settings: Any) -> Plan:
    """On sm_90, from a tuning that has this launch for gradients."""
    tuning = Tuning(provenance=NOBODY, entry=(Entry(kernel="*_backward", launch=launch),))
    known = msgspec.structs.replace(known, tunings={**known.tunings, "cuda": {"sm_90": tuning}})
    target = known.target("cuda:sm_90", "triton==3.6.0")
    return plan(problem, target, known, settings=Settings(backend="triton", **settings))


def values(launch: Launch | None) -> tuple[int, ...]:
    assert launch is not None
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
        launches = kernel_calls(plan_, meta_call(problem), 132)[0]
        grids = {one.function: one.grid[0] for one in launches}
        assert kernel.tiles(problem, launch) == max(grids["backward_keys"], grids["backward_rows"])
    assert kernel.tiles(problem, Launch(block_m=128, rows_m=16)) > kernel.tiles(problem, Launch(block_m=128))


def test_short_sequences_make_both_tiles_smaller() -> None:
    short = msgspec.structs.replace(DENSE, seq_q=20, seq_k=30)
    assert values(planned(Registry.load(), short).launch) == (32, 32, 4, 2)
    made = planned(Registry.load(), short).launch
    assert made is not None
    assert made.of_rows().block_m == 32
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
    assert made.launch is not None
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
@pytest.mark.parametrize(
    ("fields", "keys", "rows"),
    [
        ({"head_dim": 64}, (128, 32, 4, 3), (64, 64, 4, 2)),
        ({"head_dim": 64, "dropout": True}, (64, 64, 4, 2), (64, 64, 4, 2)),
        ({"head_dim": 64, "aligned": False}, (64, 64, 4, 1), (64, 64, 4, 1)),
        ({"head_dim": 128}, (64, 64, 4, 2), (128, 64, 8, 3)),
        ({"head_dim": 128, "dropout": True}, (64, 32, 4, 3), (64, 64, 4, 2)),
        ({"head_dim": 256}, (64, 64, 8, 2), (128, 32, 8, 3)),
        ({"head_dim": 256, "softcap": True}, (32, 16, 4, 1), (32, 16, 4, 1)),
    ],
    ids=str,
)
def test_the_shipped_tiles_of_sm_90(problem: Problem, fields: Any, keys: Any, rows: Any) -> None:
    asked = msgspec.structs.replace(problem, dtype="bf16", head_dim_v=fields["head_dim"], **fields)
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    made = plan(asked, target, Registry.load(), settings=Settings(backend="triton"))
    assert made.launch is not None
    assert (values(made.launch), values(made.launch.of_rows())) == (keys, rows)


@pytest.mark.parametrize(
    ("fields", "keys", "rows", "parts"),
    [
        ({"head_dim": 64, "seq": 2048}, (128, 64, 8, 2), (128, 64, 8, 2), "memory"),
        ({"head_dim": 128, "seq": 2048}, (64, 32, 4, 2), (64, 32, 4, 2), "memory"),
        ({"head_dim": 64, "seq": 512}, (64, 64, 4, 1), (128, 64, 8, 2), "registers"),
        ({"head_dim": 128, "seq": 512}, (64, 64, 4, 1), (64, 64, 4, 1), "registers"),
    ],
    ids=str,
)
def test_the_shipped_products_of_float32(fields: Any, keys: Any, rows: Any, parts: str) -> None:
    """Tensors without a feature have six products of bfloat16 parts, which long sequences store once; others three of
    TF32.
    """
    width, seq = fields["head_dim"], fields["seq"]
    asked = msgspec.structs.replace(DENSE, dtype="fp32", head_dim=width, head_dim_v=width, seq_q=seq, seq_k=seq)
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    made, featured = (
        plan(p, target, Registry.load(), settings=Settings(backend="triton"))
        for p in (asked, msgspec.structs.replace(asked, softcap=True))
    )
    assert made.launch is not None
    assert (values(made.launch), values(made.launch.of_rows())) == (keys, rows)
    assert made.lowering is not None
    assert (made.lowering.dot_precision, made.lowering.parts) == ("bf16x6", parts)
    assert featured.lowering is not None
    assert (featured.lowering.dot_precision, featured.lowering.parts) == ("tf32x3", "registers")
