"""capped, the softcap's tanh, against float64 for scores of any size: what cancels near zero is lost by no cap."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support import Device, largest

from portattn.kernels.tiles import apply_softcap

SCORES = 1024
STEPS = 8.0  # units in the last place of float32: two exponentials, a quotient and products


@triton.jit
def cap_scores(scores, caps, out, SCORES: tl.constexpr):
    at = tl.arange(0, SCORES)
    tl.store(out + at, apply_softcap(tl.load(scores + at), tl.load(caps + at)))


@pytest.mark.parametrize("cap", [0.5, 30.0, 1e4])
def test_the_relative_error_is_small_for_scores_of_any_size(device: Device, cap: float) -> None:
    """From scores a millionth of the cap to twenty times the cap, of both signs: a scale-free bound, not one of the
    largest value, below which a wrong small score would hide."""
    sizes = torch.logspace(-6, 1.3, SCORES // 2, dtype=torch.float64)
    scores = (torch.cat([-sizes, sizes]) * cap).float().to(device.name)
    caps, out = torch.full_like(scores, cap), torch.full_like(scores, float("nan"))
    cap_scores[(1,)](scores, caps, out, SCORES)
    expected = cap * torch.tanh(scores.double() / cap)
    assert out.isfinite().all()
    assert largest(out.double() / expected - 1.0) <= STEPS * torch.finfo(torch.float32).eps


def test_zero_stays_zero_and_a_large_score_becomes_the_cap(device: Device) -> None:
    scores = torch.zeros(SCORES, device=device.name)
    scores[1], scores[2] = 1e30, -1e30
    caps, out = torch.full_like(scores, 30.0), torch.full_like(scores, float("nan"))
    cap_scores[(1,)](scores, caps, out, SCORES)
    assert out[:3].tolist() == [0.0, 30.0, -30.0]
    assert not out[3:].any()
