"""When the scheduled forward of sm_90 is planned, and with which schedule."""

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from gluon_forward_cases import BASE, CAUSAL, PACKED, SIZES, VARIANT, problem
from planted_records import record
from support import Device, random_call
from variantchip import assert_variant_right, device_for

import portattn
from portattn.backends.cuda.hopper_forward.variant import REGISTERS, ForwardVariant, choice, launcher, width
from portattn.backends.cuda.schedules import ALIBI, LISTED, PREFIX, Schedule
from portattn.config import Settings
from portattn.launch import meta_call
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.call import TENSORS, Call
from portattn.schema.problem import Problem
from portattn.testing.tolerance import judge, nan_filled_memory

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
                    s, wide = choice(p).schedule, width(head_dim)
                    assert s.groups in REGISTERS
                    assert 8 + 2 * s.stages <= 16
                    assert s.own_out or (not s.reg_q and s.parts == 1)
                    rows = s.groups * 64 * (s.queries + s.own_out / s.parts) + 2 * s.stages * s.keys
                    assert rows * wide * 2 + 1024 <= 227 * 1024


def test_many_short_packed_sequences_are_not_too_many_tiles() -> None:
    short = {"batch": 4096, "heads_q": 64, "heads_k": 8, "total_q": 524_288, "total_k": 524_288}
    assert VARIANT.rejects(problem(PACKED, **short), SM_90) is None
    many = problem(batch=2**16, heads_q=2**10, heads_k=1, seq_q=2**13, seq_k=64)
    assert "too many tiles" in VARIANT.rejects(many, SM_90).reason


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
    failed = record(core.key, target=core.target, toolchain=core.toolchain, reason="signal 11")
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


TABLE = "c0 f 2 0\nt0 i sub q_idx kv_idx\nt1 f load c0 h t0\nt2 f add score t1\nout t2"
SPIRAL = "t0 f sin score\nout t0"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no lists": ({"mask_mod": PREFIX}, "takes a mask_mod beside lists of blocks alone"),
    "small blocks": (LISTED | {"block_k": 64}, "takes lists of blocks of a multiple of 128, not (128, 64)"),
    "causal": (LISTED | {"causal": "bottom_right"}, "without causal, window and lengths of sequences"),
    "lengths": (LISTED | {"seqlens_k": True}, "without causal, window and lengths of sequences"),
    "invariant": (LISTED | {"mask_mod": PREFIX, "invariant": True}, "nor invariant beside functions"),
    "a table": (LISTED | {"score_mod": TABLE}, "takes functions that read tensors by query or by key, not by both"),
    "sines": (LISTED | {"score_mod": SPIRAL}, "takes functions without sin"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_functions_and_lists_that_it_does_not_take(name: str) -> None:
    fields, reason = REFUSED[name]
    rejected = VARIANT.rejects(problem(**fields), SM_90)
    assert rejected is not None
    assert reason in rejected.reason
    assert VARIANT.rejects(problem(**LISTED, mask_mod=PREFIX, score_mod=ALIBI), SM_90) is None


@pytest.mark.parametrize(("text", "sequences", "heads"), [(PREFIX, 1, 1), ("t0 b lt h b\nout t0", 2, 4)])
def test_hidden_keys_are_sought_before_a_masked_forward(text: str, sequences: int, heads: int) -> None:
    """Of one sequence and head where all have one mask and the same lists."""
    pytest.importorskip("triton.experimental.gluon")
    p = problem(**LISTED, mask_mod=text, seq_k=1000)
    call = meta_call(p)
    assert call.block_mask is not None
    for lists, expected in ((call.block_mask[:1, :1], (sequences, heads)), (call.block_mask, (2, 4))):
        call.block_mask = lists.expand(call.block_mask.shape)
        launch = VARIANT.described(call)
        tensors = {name: getattr(call, name) for name in TENSORS} | {"out": call.new_out(), "lse": call.new_lse()}
        finding, forward = launch.steps({**VARIANT.views(p, tensors), **launch.fresh(call.q)})
        assert finding.grid == (8, expected[0] * expected[1])
        steps = forward.arguments["shown_b"], forward.arguments["shown_h"]
        assert steps == (expected[1] * (expected[0] > 1), int(expected[1] > 1))
        assert (forward.arguments["LISTED_Q"], forward.arguments["SPLIT"]) == (128, False)


@pytest.fixture
def chip(device: Device) -> Device:
    return device_for(VARIANT, BASE, device)


def assert_schedule_right(schedule: Schedule, call: Call) -> None:
    """As assert_variant_right, of a schedule that may not be the tuning data's."""
    with nan_filled_memory():
        out, lse = call.new_out(), call.new_lse()
    launcher(call, schedule)({name: getattr(call, name) for name in TENSORS} | {"out": out, "lse": lse})
    facts = judge(call, out, lse)
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]
    assert facts["lse_error"] <= facts["lse_budget"]


STAGED = [
    (64, True, 1, 1), (64, True, 2, 2), (64, False, 1, 1), (64, False, 2, 1), (128, True, 1, 2), (128, True, 2, 1),
    (128, False, 1, 1), (128, False, 2, 1), (256, True, 1, 2), (256, False, 1, 1), (200, True, 1, 2), (120, True, 1, 2),
]  # fmt: skip
# The output in shared memory of its own, whole or by parts, or where the very queries were, of one or two buffers; and
# queries in registers, whose shared memory is the next tile's as soon as they have been read from it.
CHANGES: list[tuple[int, str, dict[str, Any]]] = [
    (head_dim, "bottom_right", {"stages": 2, "own_out": own_out, "queries": queries, "reg_q": False, "parts": parts})
    for head_dim, own_out, queries, parts in STAGED
] + [
    (head_dim, causal, {"groups": 2, "own_out": True, "queries": queries, "reg_q": True})
    for head_dim in (64, 128) for causal in CAUSAL for queries in (1, 2)
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "causal", "changes"), CHANGES, ids=str)
def test_where_the_output_and_the_queries_are(chip, head_dim, causal, changes):
    for base in (problem(**SIZES["many tiles"]), problem(PACKED, total_q=2000, total_k=2000, heads_q=40, heads_k=8)):
        p = msgspec.structs.replace(base, head_dim=head_dim, head_dim_v=head_dim, causal=causal)
        schedule = msgspec.structs.replace(choice(p).schedule, **changes)
        assert_schedule_right(schedule, random_call(p, 3, device=chip.name))


LAZY: dict[str, dict[str, Any]] = {
    "many keys": {"seq_k": 1111}, "fp16": {"seq_k": 1111, "dtype": "fp16"},
    "lengths": {"seq_k": 1111, "seqlens_q": True, "seqlens_k": True, "batch": 5},
    "window": {"seq_k": 1111, "window_left": 300},
    "cap and sinks": {"seq_k": 1111, "softcap": True, "sinks": True, "seqlens_k": True},
    "split": {"batch": 1, "heads_q": 2, "heads_k": 1, "seq_q": 100, "seq_k": 5000},
}  # fmt: skip


def grown(call: Call, growth: float) -> None:
    """Let maxima grow by so many powers of 2 from a tile of 128 keys to the next, which is before it: of some rows. Of
    others they fall, grow slowly, or stay."""
    dim, keys = call.q.shape[-1], call.k.shape[2]
    kinds = torch.tensor([8.0, -8.0, 2.0, 0.0], device=call.q.device)
    of_rows = kinds[torch.arange(call.q.shape[2], device=call.q.device) * 7 // 3 % 4]
    call.q[..., 0] = call.q[..., 0] * 0 + of_rows  # padding that is NaN stays so
    steps = growth / 128 * torch.arange(keys - 1, -1, -1, device=call.q.device)
    call.k[..., 0] = call.k[..., 0] * 0 + steps * dim**0.5 / 8 * math.log(2)


@pytest.mark.parametrize("growth", [0.0, 0.7, 3.0, 12.0])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_accumulator_is_rescaled_where_it_must_be(chip, head_dim, name, late, growth):
    for causal in ("none", "bottom_right"):
        p = problem(head_dim=head_dim, head_dim_v=head_dim, causal=causal, **LAZY[name])
        chosen = choice(p)
        call = random_call(p, 2, device=chip.name, extremes=True)
        if growth:
            grown(call, growth)
        assert_schedule_right(msgspec.structs.replace(chosen.schedule, lazy=True, late=late), call)


VARIANT_SOAK = ForwardVariant()
CALLS = 12  # of other lengths and other data each, drawn from at random
STREAMS = 2
HEADS = {"heads_q": 16, "heads_k": 4, "dtype": "bf16"}


def padded(head_dim: int, causal: str, seed: int) -> Problem:
    draw = random.Random(seed)
    rows, keys = draw.randint(1, 900), draw.randint(1, 1500)
    return Problem(
        batch=draw.randint(1, 4), seq_q=rows, seq_k=keys, head_dim=head_dim, causal=causal, seqlens_q=seed % 2 == 0,
        seqlens_k=seed % 3 == 0, **HEADS,
    )  # fmt: skip


def packed(head_dim: int, causal: str, seed: int) -> Problem:
    draw = random.Random(seed)
    total_q, total_k, batch = draw.randint(1, 3000), draw.randint(1, 3000), draw.randint(1, 9)
    return Problem(
        op="varlen_attention", batch=batch, seq_q=total_q, seq_k=total_k, total_q=total_q, total_k=total_k,
        head_dim=head_dim, causal=causal, **HEADS,
    )  # fmt: skip


def public(call: Call) -> Callable[[], torch.Tensor]:
    """The same call by the public operation, which keeps it after its first time."""
    more = {"causal": call.problem.causal != "none", "backend": VARIANT_SOAK.name}
    if not call.problem.packed:
        lengths = {"seqlens_q": call.seqlens_q, "seqlens_k": call.seqlens_k}
        return lambda: portattn.attention(call.q, call.k, call.v, **lengths, **more)
    q, k, v = (t[0].transpose(0, 1) for t in (call.q, call.k, call.v))
    starts = call.cu_seqlens_q, call.cu_seqlens_k
    longest = call.problem.seq_q, call.problem.seq_k
    return lambda: portattn.varlen_attention(q, k, v, *starts, *longest, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [padded, packed])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_stay(device, request, head_dim, causal, make):
    """Calls take turns on streams that overlap; each has the bits of its first time, which are right."""
    problems = [make(head_dim, causal, seed) for seed in range(CALLS)]
    chip = device_for(VARIANT_SOAK, problems[0], device)
    calls = [random_call(problem, seed, device=chip.name) for seed, problem in enumerate(problems)]
    for call in calls:
        assert_variant_right(VARIANT_SOAK, call)
    runs = [public(call) for call in calls]
    with portattn.settings(canary="never"):
        expected = [run().clone().view(torch.int16) for run in runs]
        torch.cuda.synchronize()
        different = torch.zeros(STREAMS, CALLS, dtype=torch.int64, device=chip.name)
        draw, streams = random.Random(1), [torch.cuda.Stream() for _ in range(STREAMS)]
        for turn in range(request.config.getoption("soak")):
            which = draw.randrange(CALLS)
            with torch.cuda.stream(streams[turn % STREAMS]):
                out = runs[which]()
                different[turn % STREAMS, which].add_((out.view(torch.int16) != expected[which]).any())
        torch.cuda.synchronize()
    assert different.tolist() == [[0] * CALLS] * STREAMS
