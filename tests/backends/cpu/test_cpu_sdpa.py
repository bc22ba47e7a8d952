"""SDPA on the CPU against the float64 oracle: every op and feature that it takes, and what its plans say."""

from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from cpu_calls import CPU, INF, LEFT, PATH, TAKEN, run
from reference_cases import OPS, problem
from support import assert_right
from threads import run_threads
from torch.utils._python_dispatch import TorchDispatchMode

import portattn
from portattn.backends.cpu import flash
from portattn.config import Settings
from portattn.errors import PathUnavailable
from portattn.planning.planner import plan
from portattn.schema.problem import Problem
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import random_call


@pytest.mark.parametrize(("op", "feature"), TAKEN)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_it_takes_is_right(op: str, feature: str, dtype: str, seed: int) -> None:
    """Padding, and keys that nobody sees, hold NaN in K and V; lengths of zero are among the extremes."""
    for with_lse in (True, False):
        call = random_call(problem(op, feature, dtype=dtype, return_lse=with_lse), seed, extremes=seed == 1)
        assert plan(call.problem, CPU).path == "sdpa"
        assert_right(call, *run(call))


@pytest.mark.parametrize(("op", "feature"), LEFT)
def test_what_it_leaves_is_the_references(op: str, feature: str) -> None:
    made = plan(problem(op, feature), CPU)
    assert (made.path, made.fell_back) == ("reference", False)
    assert any(note.startswith("not sdpa: ") for note in made.notes)


@pytest.mark.parametrize(("op", "changes"), [("decode", {"num_splits": 1}), ("dense", {"dropout": True})], ids=str)
def test_promises_that_the_kernel_does_not_give_are_the_references(op: str, changes: dict[str, Any]) -> None:
    assert plan(problem(op, **changes), CPU).path == "reference"


@pytest.mark.parametrize("op", [op for op in OPS if not op.startswith("sparse")])
@pytest.mark.parametrize("strides", ["spare", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("feature", ["plain", "causal", "causal_window"])
def test_strides_and_scales(op: str, strides: str, feature: str) -> None:
    for scale in (-0.3, 0.0, 4.0):
        call = random_call(problem(op, feature), seed=6, strides=strides, scale=scale)
        assert_right(call, *run(call))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("feature", ["plain", "causal", "causal_window", "mask"])
def test_large_scores_pick_one_key(feature: str, dtype: str) -> None:
    """Scores of some thousands: each row is the value of the key with the largest one, and nothing overflows."""
    call = random_call(problem("dense", feature, dtype=dtype), seed=8, scale=300.0)
    assert_right(call, *run(call))


SIZES = [(5, 5), (3, 70), (70, 3), (1, 9), (130, 300), (300, 130)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [(-1, -1), (7, 0), (7, 3), (0, 0), (-1, 5), (5, -1), (400, 0)], ids=str)
@pytest.mark.parametrize("blocks", ["as set", "small"])
def test_ranges_of_keys(monkeypatch, sizes, causal, window, blocks):
    """Small blocks: several row blocks, causal masks over more keys than rows in two parts."""
    if causal != "none" and window[1] > 0:
        window = window[0], -1
    if blocks == "small":
        for name, value in (("WINDOW_ROWS", 16), ("MASK_ELEMENTS", 64), ("LEAST_ROWS", 4)):
            monkeypatch.setattr(flash, name, value)
    fields = {"seq_q": sizes[0], "seq_k": sizes[1], "window_left": window[0], "window_right": window[1]}
    for dtype in ("fp32", "bf16"):
        call = random_call(problem("dense", causal=causal, dtype=dtype, **fields), seed=2)
        assert_right(call, *run(call))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("chunk", [1, 50, 1000])
@pytest.mark.parametrize("feature", ["mask", "sinks", "window_before"])
def test_chunks_of_keys(sizes: tuple[int, int], causal: str, chunk: int, feature: str) -> None:
    for op in ("dense", "padded", "decode"):
        p = problem(op, feature, seq_q=sizes[0], seq_k=sizes[1], causal=causal, chunk=chunk)
        assert_right(random_call(p, seed=2), *run(random_call(p, seed=2)))


def test_a_chunk_costs_what_is_in_it() -> None:
    call = random_call(problem("dense", batch=1, seq_q=2048, seq_k=2048, causal="bottom_right", chunk=128), seed=0)
    with torch.no_grad():
        PATH.run(call)  # the first call of a process probes the kernel
        with Products() as watch:
            PATH.run(call)
    assert watch.scores == 2048 * 128


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_heads_in_turns(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """16-bit tensors are converted some heads at a time."""
    monkeypatch.setattr(flash, "WIDE_PRODUCTS", 0)
    for elements in (1, 29 * 24 * 2, 29 * 24 * 3 * 2):
        monkeypatch.setattr(flash, "WIDE_ELEMENTS", elements)
        for feature in ("plain", "causal", "mask", "bias"):
            call = random_call(problem("dense", feature, dtype=dtype, heads_q=6, heads_k=3), seed=3)
            assert_right(call, *run(call))


@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "fields",
    [
        {"causal": "top_left", "seq_q": 5, "seq_k": 9},
        {"causal": "bottom_right", "window_left": 1, "seq_q": 3, "seq_k": 9}, {"mask": True}, {"bias": True},
        {"seqlens_k": True, "leftpad_k": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_key_that_nobody_sees_can_hold_anything(fields: dict[str, Any], tensor: str, value: float) -> None:
    """In K alone, and in V alone, bit for bit."""
    call = random_call(problem("dense", **fields), seed=4)
    call.k, call.v = call.k.nan_to_num(0.5), call.v.nan_to_num(0.5)
    if call.mask is not None:
        call.mask = call.mask.clone()
        call.mask[..., 3] = False
    if call.bias is not None:
        call.bias = call.bias.clone()
        call.bias[..., 3] = -float("inf")
    hidden = {"top_left": -1, "bottom_right": 0}.get(call.problem.causal, 3)
    if call.seqlens_k is not None:
        call.leftpad_k, call.seqlens_k = torch.full_like(call.leftpad_k, 4), torch.full_like(call.seqlens_k, 9)
    expected = run(call)
    setattr(call, tensor, getattr(call, tensor).clone())
    getattr(call, tensor)[:, :, hidden] = value
    torch.testing.assert_close(run(call), expected, rtol=0, atol=0)


@pytest.mark.parametrize("changes", [{"seq_q": 0}, {"seq_k": 0}, {"batch": 0}], ids=str)
@pytest.mark.parametrize("op", ["dense", "padded", "decode", "paged", "mla"])
def test_empty_tensors(op: str, changes: dict[str, int]) -> None:
    for feature in ("plain", "sinks", "causal_window"):
        call = random_call(problem(op, feature, **changes), seed=0)
        assert_right(call, *run(call))


GRADIENTS: list[dict[str, Any]] = [
    {}, {"causal": "top_left"}, {"causal": "bottom_right", "seq_k": 13}, {"causal": "bottom_right", "seq_q": 1},
    {"causal": "top_left", "seq_q": 31}, {"head_dim_v": 8}, {"layout": "bshd"},
]  # fmt: skip


@pytest.mark.parametrize("fields", GRADIENTS, ids=str)
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_gradients_are_the_references(fields: dict[str, Any], scale: float) -> None:
    from portattn.reference import blockwise

    p = problem("dense", return_lse=False, needs_grad=True, **fields)
    assert plan(p, CPU).path == "sdpa"
    call = random_call(p, seed=7, scale=scale)
    weight = torch.randn(call.new_out().shape)
    found = []
    for one in (PATH.run, blockwise.run):
        for name in "qkv":
            setattr(call, name, getattr(call, name).detach().requires_grad_())
        out, _ = one(call)
        found.append(torch.autograd.grad((out * weight).sum(), (call.q, call.k, call.v)))
    torch.testing.assert_close(*found, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"return_lse": True}, {"causal": "bottom_right"}, {"window_left": 3}, {"sinks": True}, {"mask": True},
        {"seqlens_k": True}, {"seq_q": 0},
    ],
    ids=str,
)  # fmt: skip
def test_other_gradients_are_the_references(fields: dict[str, Any]) -> None:
    p = msgspec.structs.replace(problem("dense", return_lse=False, needs_grad=True), **fields)
    assert plan(p, CPU).path == "reference"


def test_decoding_has_no_gradient_unless_the_reference_is_asked_for() -> None:
    p = msgspec.structs.replace(problem("decode", return_lse=False, needs_grad=True), num_splits=0)
    with pytest.raises(PathUnavailable, match="decode_attention has no gradient"):
        plan(p, CPU)
    assert plan(p, CPU, settings=Settings(backend="reference")).path == "reference"


class Products(TorchDispatchMode):
    """Scores that the kernel computes, a head, and calls of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "flash_attention_for_cpu" in str(function):
            self.scores += args[0].shape[2] * args[1].shape[2]
            self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", ["dense", "varlen"])
def test_a_window_costs_what_is_in_it(op: str) -> None:
    """Twice the keys are twice the scores, and at most a block more than the window to each row."""
    seen = {}
    for size in (2048, 4096):
        fields = {"total_q": size, "total_k": size} if op == "varlen" else {}
        p = problem(op, batch=1, seq_q=size, seq_k=size, causal="bottom_right", window_left=255, **fields)
        call = random_call(p, seed=0)
        if op == "varlen":
            call.cu_seqlens_q = call.cu_seqlens_k = torch.tensor([0, size], dtype=torch.int32)
        with Products() as watch, torch.no_grad():
            PATH.run(call)
        seen[size] = watch.scores
    assert seen[4096] <= 2.1 * seen[2048]
    assert seen[4096] <= 4096 * (256 + flash.WINDOW_ROWS)


def test_heads_that_share_keys_are_rows_of_one_product() -> None:
    call = random_call(problem("dense", heads_q=8, heads_k=2, seq_q=1), seed=0)
    with Products() as watch, torch.no_grad():
        PATH.run(call)
    assert (watch.calls, watch.scores) == (1, 4 * 29)


def test_a_device_of_no_backend_is_not_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from portattn.api import dispatch

    monkeypatch.setattr(dispatch, "detect_target", lambda device_type, index: (CPU, "no backend knows it"))
    q = torch.randn(1, 2, 8, 16)
    made = portattn.plan("attention", q, q, q)
    assert (made.path, made.requested) == ("reference", "auto")
    assert made.rejected


class Decided(Exception):
    pass


def test_a_repeated_call_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from portattn.api import request

    q, k, v = torch.randn(3, 2, 4, 9, 16).unbind()
    wide = torch.randn(2, 4, 10, 16)
    for arguments in (
        {},
        {"causal": True},
        {"return_lse": True, "layout": "bshd"},
        {"window": (3, 0)},
        {"scale": -0.2},
    ):
        expected, made = portattn.attention(q, k, v, **arguments), portattn.last_plan()
        with monkeypatch.context() as patch:
            patch.setattr(request, "build_call", Mock(side_effect=Decided))
            again = portattn.attention(q, k, v, **arguments)
            assert portattn.last_plan() == made
            for ours, same in zip(*((r if isinstance(r, tuple) else (r,)) for r in (again, expected)), strict=True):
                assert torch.equal(ours, same)
                assert ours.stride() == same.stride()
            for other in (
                lambda: portattn.attention(wide, k, v, **arguments),  # noqa: B023
                lambda: portattn.attention(q.half(), k.half(), v.half(), **arguments),  # noqa: B023
                lambda: portattn.attention(q.clone().requires_grad_(), k, v, **arguments),  # noqa: B023
                lambda: portattn.attention(q, k, v, backend="reference", **arguments),  # noqa: B023
                lambda: portattn.attention(q.mT.contiguous().mT, k, v, **arguments),  # noqa: B023
            ):
                with pytest.raises(Decided):
                    other()


def test_what_is_checked_at_each_call_is_not_kept() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 16).unbind()
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    portattn.attention(q, k, v, seqlens_k=lengths)
    lengths[0] = 10
    with pytest.raises(portattn.ArgumentError, match="seqlens_k"):
        portattn.attention(q, k, v, seqlens_k=lengths)


def test_under_autocast_what_is_kept_is_of_the_cast_tensors() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 16).unbind()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [portattn.attention(q, k, v).dtype for _ in range(3)] == [torch.bfloat16] * 3
    assert [portattn.attention(q, k, v).dtype for _ in range(3)] == [torch.float32] * 3


def test_a_problem_is_taken_by_what_is_declared() -> None:
    """A flag that comes later is denied."""
    taken = {field for field in PATH.takes if field in Problem.__struct_fields__}
    assert not {"dropout", "softcap", "alibi_slopes", "log_weights", "magicpig", "num_splits"} & taken
    assert PATH.rejects(msgspec.structs.replace(problem("dense"), softcap=True), CPU).path == "sdpa"


def test_a_sink_that_hides_beside_a_row_that_sees_nothing() -> None:
    """-inf less -inf is NaN."""
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 2, 16)
    sinks = torch.tensor([-torch.inf, 0.5])
    out = portattn.attention(q, k, k, causal=True, sinks=sinks)
    assert portattn.last_plan().path == "sdpa"
    torch.testing.assert_close(out, portattn.attention(q, k, k, causal=True, sinks=sinks, backend="reference"))


@pytest.mark.parametrize("op", [op for op in OPS if not op.startswith("sparse")])
def test_infinite_sinks(op: str) -> None:
    """+inf: 0, and an LSE of +inf; -inf: no sink."""
    call = random_call(problem(op, "sinks"), seed=2, extremes=True)
    call.sinks = torch.tensor([INF, -INF, 0.5, 3e38])
    out, lse = run(call)
    assert_right(call, out, lse)
    assert torch.equal(lse.isposinf(), oracle(call)[1].isposinf())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 13, 16)
    mask = torch.rand(9, 13) > 0.3
    cases: list[dict[str, Any]] = [{"causal": True}, {"window": (3, 2)}, {"mask": mask}]
    expected = [portattn.attention(q, k, k, return_lse=True, **case) for case in cases]
    half = portattn.attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), return_lse=True)
    torch.set_default_dtype(dtype)
    try:
        found = [portattn.attention(q, k, k, return_lse=True, **case) for case in cases]
        found_half = portattn.attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close([*found, found_half], [*expected, half])


def test_training_in_threads_leaves_torchs_choice_of_kernels_alone() -> None:

    def flags() -> tuple[bool, ...]:
        cuda = torch.backends.cuda
        return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()

    before, seen = flags(), set()

    def train() -> None:
        q = torch.randn(1, 2, 4, 16, requires_grad=True)
        for _ in range(50):
            portattn.attention(q, q, q).sum().backward()
            seen.add(flags())

    run_threads(*[train] * 3)
    assert seen == {before}
