"""Powers of two by the multipliers (hopper_forward/powers.py): its instructions one by one, in numpy's float16."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from portattn.backends.cuda.hopper_forward import powers


def word(name: str, place: int = 0) -> np.float16:
    """The constant that the register `name` gets for the place-th time."""
    found = re.findall(rf"mov\.b32 {name}, 0x([0-9A-F]{{4}})([0-9A-F]{{4}});", powers._POWERS)[place]
    assert found[0] == found[1]
    return np.array([int(found[0], 16)], np.uint16).view(np.float16)[0]


def fma(a: np.ndarray, b: np.ndarray, c: np.float16) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + np.float64(c)).astype(np.float16)


def modelled(x: np.ndarray) -> np.ndarray:
    """What the instructions make of float32 numbers."""
    with np.errstate(over="ignore"):
        x = np.maximum(x.astype(np.float16), word("e", 0))  # keeps NaN, as max.NaN does
    r = (x + word("e", 1)).astype(np.float16)
    f = (x - (r + word("e", 2)).astype(np.float16)).astype(np.float16)
    p = fma(f, np.full_like(f, word("e", 3)), word("p"))
    p = fma(p, f, word("e", 4))
    p = fma(p, f, word("e", 5))
    power = ((r.view(np.uint16).astype(np.uint32) << 10) & 0xFC00).astype(np.uint16).view(np.float16)
    return (p * power).astype(np.float32)


def test_they_are_right_to_a_part_of_what_e4m3_rounds_by() -> None:
    x = np.linspace(-14, 8, 200_001, dtype=np.float32)
    off = modelled(x) / 2.0 ** x.astype(np.float64) - 1
    assert np.abs(off).max() < 4e-3
    assert off.std() < 1.2e-3
    assert abs(off.mean()) < 2e-4  # sums of many have no bias to speak of


def test_whole_powers_are_exact() -> None:
    """A weight that is the largest of its row among them: 2^8."""
    x = np.arange(-14, 9, dtype=np.float32)
    assert np.array_equal(modelled(x), 2.0**x)


def test_what_e4m3_cannot_hold_is_nothing_and_nan_stays() -> None:
    small = np.array([-np.inf, -1e30, -1000, -17, -15.6], np.float32)
    assert not modelled(small).any()
    smallest = torch.tensor(2.0**-14.5).to(torch.float8_e4m3fn)
    assert float(smallest) == 0.0
    assert np.isnan(modelled(np.array([np.nan], np.float32))).all()
