"""Many calls of the scheduled forward, of sequences of random lengths: a race shows as a bit that differs.

`pytest --soak 10000 tests/kernels/test_gluon_soak.py` is the long one.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from support import Device, random_call
from variantchip import assert_variant_right, device_for

import portattn
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.schema.call import Call
from portattn.schema.problem import Problem

VARIANT = ForwardVariant()
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
    more = {"causal": call.problem.causal != "none", "backend": VARIANT.name}
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
def test_bits_stay(
    device: Device, request: pytest.FixtureRequest, head_dim: int, causal: str, make: Callable[..., Problem]
) -> None:
    """Calls take turns on streams that overlap; each has the bits of its first time, which are right."""
    problems = [make(head_dim, causal, seed) for seed in range(CALLS)]
    chip = device_for(VARIANT, problems[0], device)
    calls = [random_call(problem, seed, device=chip.name) for seed, problem in enumerate(problems)]
    for call in calls:
        assert_variant_right(VARIANT, call)
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
