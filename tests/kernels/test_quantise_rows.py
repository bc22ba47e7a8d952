"""The kernel that makes SAGE's int8 numbers: those of the torch operations, to the bit."""

from __future__ import annotations

import pytest
import torch
from support import Device

from portattn.api import quantize

SHAPES = {
    "whole": (2, 128, 4, 2, 64),
    "ragged": (2, 101, 4, 2, 80),
    "short": (1, 1, 6, 1, 16),
    "odd": (1, 70, 2, 2, 40),
}
NAMES = ("q", "k", "q_scale", "k_scale")


def tensors(name: str, layout: str, device: str) -> list[torch.Tensor]:
    batch, rows, heads_q, heads_k, columns = SHAPES[name]
    torch.manual_seed(3)
    found = []
    for heads in (heads_q, heads_k, heads_k):
        shape = (batch, heads, rows, columns) if layout == "bhsd" else (batch, rows, heads, columns)
        found.append(torch.randn(shape, device=device).mul(3).bfloat16())
    found[1] += 2
    return found


def made_both_ways(
    given: list[torch.Tensor], block: int, smooth: bool, layout: str
) -> tuple[quantize.Quantized, quantize.Quantized]:
    rows_first = layout == "bshd"
    return (
        quantize._sage_by_kernel(*given, block, smooth, rows_first),
        quantize._sage_by_torch(*given, block, smooth, rows_first, (None, None)),
    )


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", SHAPES)
def test_it_makes_what_torch_makes(device: Device, name: str, layout: str, smooth: bool) -> None:
    given = tensors(name, layout, device.name)
    for block in (32, 64) if name == "ragged" else (16,):
        ours, theirs = made_both_ways(given, block, smooth, layout)
        for field in NAMES:
            found, expected = getattr(ours, field), getattr(theirs, field)
            assert found.shape == expected.shape
            assert found.is_contiguous()
            if device.name == "cpu":
                assert torch.equal(found, expected)
            else:  # a quotient half a bit off rounds to the number beside
                torch.testing.assert_close(
                    found.float(), expected.float(), rtol=1e-6, atol=1.0 if "_" not in field else 0
                )
                assert (found != expected).sum() <= max(2, found.numel() // 500) or "_" in field
        assert (ours.lse_shift is None) is (not smooth)
        if smooth:
            torch.testing.assert_close(ours.lse_shift, theirs.lse_shift, rtol=1e-5, atol=1e-4)


def test_views_and_zeros(device: Device) -> None:
    """Rows that lie apart, a head of zeros, and numbers whose scale would be no normal number."""
    q, k, v = tensors("ragged", "bhsd", device.name)
    q, k = q.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([k, k], -1)[..., : k.shape[-1]]
    q[:, 0] = 0
    k[:, 1] = 1e-38
    ours, theirs = made_both_ways([q, k, v], 32, False, "bhsd")
    assert torch.equal(ours.q_scale[:, 0], torch.ones_like(ours.q_scale[:, 0]))
    assert not ours.q[:, 0].any()
    for field in NAMES:
        torch.testing.assert_close(getattr(ours, field).float(), getattr(theirs, field).float(), rtol=1e-6, atol=1.0)
    assert ours.v is v
