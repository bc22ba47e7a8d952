"""What comes before and after the products of the scheduled backward, interpreted: statistics, copies, dQ."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest
import torch
from support import random_call

from portattn import Problem
from portattn.backends.cuda.hopper_backward import schedule
from portattn.backends.cuda.hopper_backward.variant import BackwardVariant
from portattn.launch.variant import launch_tensors
from portattn.schema.call import Call
from portattn.schema.kernel_step import launch_steps
from portattn.testing.tolerance import nan_filled_memory

VARIANT = BackwardVariant()
SUMMED_WIDTH = 64
# fp16: of bfloat16 the interpreter cuts digits off, where a device rounds.
BASE = Problem(
    op="attention_backward", batch=2, heads_q=4, heads_k=2, seq_q=100, seq_k=333, head_dim=64, dtype="fp16",
)  # fmt: skip


def problem(**fields: Any) -> Problem:
    return msgspec.structs.replace(BASE, **fields)


FORMS: dict[str, Problem] = {
    "ragged": problem(),
    "narrow, a gradient of the LSE": problem(seq_q=70, head_dim=40, head_dim_v=48, grad_lse=True, layout="bshd"),
    "more queries than keys": problem(seq_q=150, seq_k=50, causal="bottom_right"),
    "in turns": problem(seq_q=130, deterministic=True),
    "padded": problem(seq_q=130, batch=3, seqlens_q=True, seqlens_k=True),
    "packed": problem(
        op="varlen_attention_backward", batch=4, seq_q=100, seq_k=100, total_q=230, total_k=200,
    ),
}  # fmt: skip


def spans(call: Call) -> list[tuple[int, int, int, int]]:
    """Of each sequence: its place on the first axis, its first row there and its number of rows, and its number."""
    p = call.problem
    if call.cu_seqlens_q is not None:
        first = call.cu_seqlens_q.tolist()
        return [(0, a, b - a, i) for i, (a, b) in enumerate(itertools.pairwise(first))]
    lengths = [p.seq_q] * p.batch if call.seqlens_q is None else call.seqlens_q.tolist()
    return [(i, 0, length, i) for i, length in enumerate(lengths)]


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
def test_rows_before_and_after_the_products(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The statistics, the copies without rows that do not count, dQ from its sums, and turns that nobody has taken."""
    monkeypatch.setattr(schedule, "in_turns", lambda p, keys: True)
    pytest.importorskip("triton.experimental.gluon")  # which describes the launches
    call = random_call(FORMS[form], 3)
    p, launcher = call.problem, VARIANT.described(call)
    with nan_filled_memory():
        tensors = launch_tensors(call)
        tensors |= launcher.fresh(call.q)
    steps = launcher.steps(tensors)
    launch_steps(steps[:1])
    assert call.forward_out is not None
    assert call.forward_lse is not None
    assert call.grad_out is not None
    assert call.grad_q is not None
    nothing = torch.isneginf(call.forward_lse)
    delta = (call.forward_out.double() * call.grad_out.double()).sum(-1)
    if call.grad_lse is not None:
        delta = delta - call.grad_lse
    delta = delta.masked_fill(nothing, 0.0)
    torch.testing.assert_close(tensors["out"].double(), delta, atol=1e-5, rtol=1e-5)
    assert int((tensors["sums"] != 0).sum()) == 0
    assert ("turns" in tensors) is p.deterministic
    if p.deterministic:
        assert tensors["turns"].tolist() == [0] * (1 + len(tensors["sums"]) * 256 // (64 * SUMMED_WIDTH))

    tiles = steps[0].arguments["tiles"]
    statistics = tensors["statistics"].view(-1, p.heads_q, tiles, 2, 64)
    made = torch.randn(*call.q.shape[:3], SUMMED_WIDTH)  # dQ, in rows; what is not a sequence's must not be read
    sums = torch.full((statistics.shape[0], p.heads_q, tiles, 64, SUMMED_WIDTH), float("nan"))
    for slot, first, rows, number in spans(call):
        before = first // 64 + number if p.packed else 0
        for row in range(0, rows, 64):
            count, tile = min(64, rows - row), before + row // 64
            here = slice(first + row, first + row + count)
            lse = torch.full((p.heads_q, 64), float("inf"))
            lse[:, :count] = call.forward_lse[slot, :, here] / math.log(2)
            lse[torch.isneginf(lse)] = float("inf")
            torch.testing.assert_close(statistics[slot, :, tile, 0], lse)
            torch.testing.assert_close(statistics[slot, :, tile, 1, :count], tensors["out"][slot, :, here])
            sums[slot, :, tile, :count] = made[slot, :, here]
            for head in range(p.heads_q):
                missing = torch.isinf(lse[head])
                if missing.all() or "edge_q" not in tensors:
                    continue
                for side in [i for i, row_of_it in enumerate((0, 63)) if missing[row_of_it]]:
                    for name, whole in (("edge_q", call.q), ("edge_do", call.grad_out)):
                        expected = torch.zeros(64, whole.shape[3], dtype=whole.dtype)
                        expected[:count] = whole[slot, head, here]
                        expected[missing] = 0.0
                        assert torch.equal(tensors[name][2 * number + side, head], expected)

    # The order of consumer.put: warp, half, row of 8, warp group, 16 columns, lane's pair, column of it.
    order = sums.view(*sums.shape[:3], 4, 2, 8, 2, SUMMED_WIDTH // 16, 4, 2).permute(0, 1, 2, 7, 3, 6, 5, 8, 4, 9)
    tensors["sums"].copy_(order.reshape(tensors["sums"].shape))
    launch_steps(steps[2:])
    expected = torch.zeros(call.q.shape)
    for slot, first, rows, _ in spans(call):
        here = slice(first, first + rows)
        expected[slot, :, here] = made[slot, :, here, : p.head_dim] * call.scale
    assert torch.equal(call.grad_q, expected.to(call.q.dtype))
