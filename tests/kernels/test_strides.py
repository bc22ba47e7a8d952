"""Any strides between and inside rows: room between them, columns that are not neighbours, caches that share memory."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import check, problem
from support import Device, random_call

PHD, HPD, BSHD = {"page_layout": "phd"}, {"page_layout": "hpd"}, {"layout": "bshd"}
# The layouts in which each op can be called.
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "dense": [{}, BSHD],
    "varlen": [{}],
    "decode": [{}, BSHD],
    "paged": [PHD, HPD | BSHD],
    "whole pages": [PHD, HPD],
    "ragged": [PHD, HPD],
    "sparse": [{}, BSHD],
    "sparse paged": [PHD, HPD | BSHD],
    "mla": [{}, BSHD],
}
STRIDES = ("spare", "transposed", "sliced", "expanded")
CASES = [(name, strides) for name in LAYOUTS for strides in STRIDES]
CASES += [(name, "combined") for name in ("paged", "whole pages", "ragged", "sparse paged")]


@pytest.mark.parametrize(("name", "strides"), CASES)
def test_any_strides(device: Device, name: str, strides: str) -> None:
    fields = {"head_dim": 20, "head_dim_v": 20 if strides == "combined" else 12, "aligned": False}
    for seed, layout in enumerate(LAYOUTS[name]):
        call = random_call(problem(name, **fields, **layout), seed, device=device.name, strides=strides)
        check(device, call, 2 if name == "decode" else 1)  # the same merging follows them all
