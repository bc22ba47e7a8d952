"""Decode and pages over quantised caches whose rows are read as 16-bit words (kernels/words.py)."""

from __future__ import annotations


import pytest
import torch
from support import TILE, Device, assert_right, run_core
from test_quantised_caches import CACHES, SCALED, quantised

from portattn.schema.call import Call

WORDS = [cache for cache in CACHES if cache.startswith(("decode", "paged"))]


def unpackings(device: Device) -> tuple[str, ...]:
    """Triton's interpreter knows no PTX."""
    return ("words",) if device.name == "cpu" else ("words", "ptx")


def on(device: Device, call: Call, unpack: str, **launch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    page_loop = "flat_masked" if call.problem.page_size % TILE else "per_page"
    return run_core(device, call, {"page_loop": page_loop, "unpack": unpack}, launch)


@pytest.mark.parametrize("cache", WORDS)
@pytest.mark.parametrize(("kind", "scales"), SCALED)
def test_words_are_right(device: Device, kind: str, scales: str, cache: str) -> None:
    """NaN, or a scale that is NaN, infinite, negative or 0, is wherever a token is not attended."""
    call = quantised(device.name, cache, kind, scales)
    for unpack in unpackings(device):
        for splits in (1, 2):
            assert_right(call, *on(device, call, unpack, splits=splits))
