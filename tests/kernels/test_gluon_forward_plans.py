"""When the scheduled forward of sm_90 is planned, and with which schedule."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from gluon_forward_cases import BASE, CAUSAL, PACKED, VARIANT, problem

from portattn.backends.cuda.hopper_forward.variant import REGISTERS, choice, width
from portattn.config import Settings
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.compile_record import CompileRecord

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")


def test_every_problem_that_it_takes_has_a_schedule_that_fits() -> None:
    """Buffers' barriers are 8 to 15, warp groups 2 or 3, and 227 KiB of shared memory all that a block can have."""
    for head_dim in (8, 64, 72, 128, 136, 256):
        for causal in CAUSAL:
            for sizes in (
                {"seq_q": 1},
                {"seq_q": 256},
                {"seq_q": 1000},
                {"seq_q": 9000},
                {"seq_q": 100, "seq_k": 9000},
            ):
                for base in (BASE, PACKED):
                    p = problem(base, head_dim=head_dim, head_dim_v=head_dim, causal=causal, **sizes)
                    assert VARIANT.rejects(p, SM_90) is None
                    found = choice(p)
                    assert found is not None
                    s, wide = found.schedule, width(head_dim)
                    assert s.groups in REGISTERS
                    assert 8 + 2 * s.stages <= 16
                    assert s.own_out or (not s.reg_q and s.parts == 1)
                    rows = s.groups * 64 * (s.queries + s.own_out / s.parts) + 2 * s.stages * s.keys
                    assert rows * wide * 2 + 1024 <= 227 * 1024


def test_many_short_packed_sequences_are_not_too_many_tiles() -> None:
    short = {"batch": 4096, "heads_q": 64, "heads_k": 8, "total_q": 524_288, "total_k": 524_288}
    assert VARIANT.rejects(problem(PACKED, **short), SM_90) is None
    many = problem(batch=2**16, heads_q=2**10, heads_k=1, seq_q=2**13, seq_k=64)
    no = VARIANT.rejects(many, SM_90)
    assert no is not None
    assert "too many tiles" in no.reason


LEFT = {
    "few tiles": {"head_dim": 64, "head_dim_v": 64, "seq_q": 512, "seq_k": 512},
    "padded": {
        "head_dim": 64, "head_dim_v": 64, "batch": 8, "heads_q": 64, "seq_q": 1024, "seq_k": 1024, "seqlens_q": True,
        "causal": "bottom_right",
    },
}  # fmt: skip


@pytest.mark.parametrize("fields", LEFT.values(), ids=LEFT)
def test_what_the_core_is_faster_at_is_left_to_it(fields: dict[str, Any]) -> None:
    made = plan(problem(**fields), SM_90)
    assert made.path == "triton"
    assert any("not gluon_forward: it leaves such problems to the core: H200" in note for note in made.notes)
    assert plan(problem(**fields), SM_90, settings=Settings(backend="gluon_forward")).path == "gluon_forward"
    for larger in ({"seq_k": 2048}, {"heads_q": 512}, {"head_dim": 128, "head_dim_v": 128}):
        for more in ({}, {"seqlens_q": False}):
            made = plan(problem(**fields | larger | more), SM_90)
            assert made.path == "gluon_forward" or (more == {} and larger == {"heads_q": 512})


def test_what_the_core_cannot_do_is_not_left_to_it() -> None:
    """A record against the core's kernels: the variant, which had left the problem to them, runs it after all."""
    p = problem(**LEFT["few tiles"])
    core = plan(p, SM_90)
    failed = CompileRecord(
        key=core.key, kernel="dense_forward", target=core.target, toolchain=core.toolchain, level="compiles",
        passed=False, date=datetime.date(2026, 1, 2), reason="signal 11",
    )  # fmt: skip
    made = plan(p, SM_90, records={core.key: failed})
    assert made.path == "gluon_forward"
    assert not made.fell_back
    assert any("not triton" in note for note in made.notes)


def test_it_is_planned_where_it_can_run_and_only_there() -> None:
    assert plan(BASE, SM_90).path == "gluon_forward"
    assert plan(PACKED, SM_90).path == "gluon_forward"
    assert plan(BASE, SM_90, settings=Settings(backend="triton")).path == "triton"
    for target in ("cuda:sm_80", "cuda:sm_100", "rocm:gfx942"):
        made = plan(BASE, parse_target(target, "triton==3.6.0"))
        assert (made.path, [n for n in made.notes if "gluon" in n]) == ("triton", [])
