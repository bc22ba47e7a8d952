"""What a variant's launcher is given where its kernel cannot read the caller's tensors, or the scale is 0."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from portattn import Problem
from portattn.backends.cuda.copies import with_copies
from portattn.schema.call import Call

PROBLEM = Problem(batch=2, heads_q=3, heads_k=3, seq_q=4, seq_k=4, head_dim=8)


def launched(scale: float, broadcast: str = "") -> tuple[bool, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Whether the launch is kept as it is, what the caller brings, and what reaches the kernel."""
    given = {name: torch.randn(2, 3, 4, 8) for name in ("q", "k", "v")}
    if broadcast:
        given[broadcast] = given[broadcast][:1].expand(2, 3, 4, 8)
    seen: dict[str, Any] = {}
    call = Call(problem=PROBLEM, scale=scale, **given)
    launch = with_copies(seen.update, call, ("q", "k", "v"), ("q",))
    launch(given)
    return launch == seen.update, given, seen


def test_tensors_that_can_be_read_reach_the_kernel_themselves() -> None:
    kept, given, seen = launched(0.5)
    assert kept
    assert all(seen[name] is given[name] for name in given)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_broadcast_tensor_is_copied_for_each_launch(name: str) -> None:
    kept, given, seen = launched(0.5, name)
    assert not kept
    assert 0 not in seen[name].stride()
    assert torch.equal(seen[name], given[name])
    assert all(seen[other] is given[other] for other in given if other != name)


def test_a_scale_of_nothing_is_applied_to_the_queries() -> None:
    kept, given, seen = launched(0.0, "q")
    assert not kept
    assert torch.equal(seen["q"], torch.zeros(2, 3, 4, 8))
    assert seen["k"] is given["k"]


def test_of_bytes_a_scale_of_nothing_leaves_what_is_no_number() -> None:
    """Bytes are of e4m3, in which 0x7f and 0xff are NaN: 0 times that is NaN."""
    seen: dict[str, Any] = {}
    given = {name: torch.tensor([5, -3, 127, -1, 0], dtype=torch.int8) for name in ("q", "k", "v")}
    narrow = msgspec.structs.replace(PROBLEM, kv_format="e4m3", kv_scales="head")
    call = Call(problem=narrow, scale=0.0, **given)
    with_copies(seen.update, call, ("q", "k"), ("q",))(given)
    assert seen["q"].tolist() == [0, 0, 127, -1, 0]
    assert seen["k"] is given["k"]


def test_whole_numbers_times_nothing_are_nothing() -> None:
    seen: dict[str, Any] = {}
    given = {name: torch.tensor([5, -3, 127, -1, 0], dtype=torch.int8) for name in ("q", "k", "v")}
    call = Call(problem=msgspec.structs.replace(PROBLEM, kv_format="int8", kv_scales="token"), scale=0.0, **given)
    with_copies(seen.update, call, ("q", "k"), ("q",))(given)
    assert seen["q"].tolist() == [0, 0, 0, 0, 0]
