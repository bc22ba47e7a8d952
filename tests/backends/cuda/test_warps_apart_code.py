"""warps_apart for sm_90 as each release of Triton that this machine has compiles it, and how it is launched."""

from typing import Any

import msgspec
import pytest

from portattn import Problem
from portattn.compile.ensure_compiled import compile_in
from portattn.launch.kernelcall import meta_call
from portattn.launch.run import kernel_calls
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target

CORES = 132
MOST_SPILLED = 32  # bytes a thread: tiles of 128 keys have 255 registers; 3.7.1 and 3.8.0 spill 24, the others nothing
ONE: dict[str, Any] = {
    "op": "decode_attention", "batch": 1, "heads_q": 32, "heads_k": 8, "seq_q": 1, "head_dim": 128, "dtype": "bf16",
}  # fmt: skip
FORMS = {
    "split": Problem(**ONE, seq_k=4096),
    "not split": Problem(**ONE | {"batch": 16}, seq_k=2048, seqlens_k=True, return_lse=True),
    "narrow": Problem(**ONE | {"batch": 8, "heads_q": 64, "heads_k": 16, "head_dim": 64}, seq_k=1024),
    "short": Problem(**ONE, seq_k=256),
    "pages": Problem(**ONE | {"op": "paged_attention", "batch": 64}, seq_k=8192, page_size=64, seqlens_k=True),
}


def launches(problem, target):
    made = plan(problem, target)
    assert made.path == "triton"
    assert made.lowering.warps == "apart"
    return made, kernel_calls(made, meta_call(problem), CORES)[0]


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_a_release_compiles_it(release_compiler, release_target, form):
    """Into asynchronous copies and whole matrices from shared memory; a split lets the merging begin."""
    made, (first, *merging) = launches(FORMS[form], release_target)
    assert bool(merging) == (form in ("split", "short"))
    reply = compile_in(release_compiler, first, made, release_target, 240.0, "all")
    assert reply.outcome == "ok", reply.message
    assert reply.facts["spills"] <= MOST_SPILLED
    ptx = str(reply.facts["ptx"])
    assert ("griddepcontrol.launch_dependents" in ptx) == bool(merging)
    assert "griddepcontrol.wait" not in ptx
    assert "cp.async" in ptx
    assert "ldmatrix" in ptx


def test_the_merging_kernel_has_programs_for_parts_of_a_row():
    _, (first, merging) = launches(FORMS["split"], parse_target("cuda:sm_90", "triton==3.6.0"))
    assert (first.function, first.constexprs["FOLLOWED"]) == ("warps_apart", True)
    assert (merging.function, merging.constexprs["DEPENDENT"]) == ("combine", True)
    assert merging.grid == (32, 4)
    assert merging.constexprs["BLOCK_DV"] * merging.grid[1] == 128
    assert dict(merging.launch.options) == {"launch_pdl": True}
    assert "launch_pdl" not in dict(first.launch.options)


@pytest.mark.parametrize(
    "fields", [{"softcap": True}, {"window_left": 100}, {"mask": True}, {"dtype": "fp32"}], ids=str
)
def test_what_it_does_not_take_runs_joint(fields):
    made = plan(Problem(**ONE | fields, seq_k=4096), parse_target("cuda:sm_90", "triton==3.6.0"))
    assert made.lowering.warps == "joint"


SMALL: dict[str, Any] = {"op": "attention", "batch": 2, "heads_q": 8, "heads_k": 8, "head_dim": 64, "dtype": "fp32"}
DENSE = {
    "16 rows, 64 keys": Problem(**SMALL, seq_q=64, seq_k=64),
    "16 rows, 128 keys": Problem(**SMALL, seq_q=128, seq_k=128, causal="bottom_right"),
    "16 rows of 128 columns": Problem(**SMALL | {"head_dim": 128}, seq_q=128, seq_k=128, return_lse=True),
    "16 rows, 256 keys": Problem(**SMALL | {"batch": 1}, seq_q=256, seq_k=256),
    "32 rows, 256 keys": Problem(**SMALL, seq_q=256, seq_k=256, seqlens_k=True),
}
NARROW = "32 rows, 256 keys, 32 columns"
DENSE[NARROW] = Problem(**SMALL | {"head_dim": 32}, seq_q=256, seq_k=256)
# Bytes a thread, a multiple of 256: all of a tile's keys and products are in registers. 3.8.0 spills most.
SPILLED = {"16 rows of 128 columns": 512, "32 rows, 256 keys": 256, "16 rows, 256 keys": 256}
SPILLED_380 = {"16 rows of 128 columns": 1280, "16 rows, 256 keys": 768}
# At 32 rows and 64 columns it spills 2 KB, which is slow.
JOINT_380 = "32 rows, 256 keys"


@pytest.mark.compiles
@pytest.mark.parametrize("form", DENSE)
def test_a_release_compiles_small_float32(release_compiler, release_target, form):
    """Into products of bfloat16 parts, without a loop: six for the scores, and six for the values."""
    release = str(release_target.toolchain)
    if form == JOINT_380 and "3.8" in release:
        made = plan(DENSE[form], release_target)
        assert made.lowering.warps == "joint"
        return
    made, (only,) = launches(DENSE[form], release_target)
    assert (made.form, made.lowering.pipeline, made.lowering.dot_precision) == ("warps_apart", "single", "bf16x6")
    reply = compile_in(release_compiler, only, made, release_target, 240.0, "all")
    assert reply.outcome == "ok", reply.message
    assert reply.facts["spills"] <= (SPILLED_380 if "3.8" in release else SPILLED).get(form, 32)
    # A warp's products in instructions of 16 x 8 x 16.
    columns, each = DENSE[form].head_dim, made.launch.block_n // made.launch.num_warps
    products = 2 * 6 * (made.launch.block_m // 16) * (columns // 16) * (each // 8)
    assert str(reply.facts["ptx"]).count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == products


# What each problem of float32 may be asked for beside its sizes.
ASKED: dict[str, dict[str, Any]] = {
    **{name: {name: True} for name in ("seqlens_q", "leftpad_q", "softcap", "alibi_slopes", "bias", "mask", "dropout")},
    "a window": {"window_left": 5}, "a right window": {"window_right": 5}, "groups": {"heads_k": 4},
    "block_mask": {"block_mask": True, "block_q": 64, "block_k": 64},
    "packed": {"op": "varlen_attention", "total_q": 200, "total_k": 200, "seqlens_k": False},
    "unaligned": {"aligned": False},
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("form", DENSE)
def test_what_it_does_not_take_has_no_schedule_of_it(form, asked):
    """Its tiles are none for warps that share products: the plan has another entry, and no limit has to step in."""
    made = plan(msgspec.structs.replace(DENSE[form], **ASKED[asked]), parse_target("cuda:sm_90", "triton==3.6.0"))
    assert made.lowering.warps == "joint"
    assert made.launch.block_n <= 64
    assert not [note for note in made.notes if note.startswith("warps = ")]


@pytest.mark.parametrize(
    "fields", [{"leftpad_k": True}, {"sinks": True}, {"needs_grad": True, "return_lse": True}], ids=str
)
@pytest.mark.parametrize("form", DENSE)
def test_what_it_takes_beside_sizes(form, fields):
    launches(msgspec.structs.replace(DENSE[form], **fields), parse_target("cuda:sm_90", "triton==3.9.0"))
