"""Heads of any width, of K and of V, for every op."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import PAGED, check, problem
from support import Device, random_call

# (D, Dv). Wider than 512, a head is two products.
WIDTHS = [(1, 1), (17, 17), (24, 40), (64, 1), (16, 80), (80, 80), (192, 128), (512, 512), (544, 64), (576, 512)]
NAMES = ["dense", "varlen", "decode", "paged", "sparse"]
FEW: dict[str, Any] = {"batch": 1, "heads_q": 2, "heads_k": 1, "seq_q": 3, "seq_k": 21}
FIELDS: dict[str, dict[str, Any]] = {
    "varlen": {"total_q": 3, "total_k": 21},
    "decode": {"leftpad_k": False, "seqlens_k": False},
    "paged": PAGED | {"seq_k": 24},
    "sparse": {"seq_q": 1, "tokens": 18, "magicpig": True},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), WIDTHS)
def test_heads_of_any_width(device: Device, name: str, head_dim: int, head_dim_v: int) -> None:
    fields = FEW | FIELDS.get(name, {}) | {"head_dim": head_dim, "head_dim_v": head_dim_v}
    causal = {} if name == "sparse" else {"causal": "bottom_right"}
    for dtype in ("fp32", "bf16") if head_dim in (17, 544) else ("fp32",):
        call = random_call(problem(name, dtype=dtype, **fields, **causal), 2, device=device.name, extremes=True)
        check(device, call, extra=summed_in_order(head_dim))


def summed_in_order(head_dim: int) -> float:
    """What an fp32 score of a wide head may lose beyond the budget, which is taken from torch on a CPU and its order of
    adding. An accelerator adds the columns one by one, and NumPy, which the interpreter multiplies with, in blocks
    whose width depends on the processor. The error of n terms grows with √n."""
    return head_dim**0.5 * 2.0**-24 if head_dim > 256 else 0.0


def test_columns_that_sparse_values_alone_can_have(device: Device) -> None:
    """No accumulator of a product holds them."""
    fields = FEW | FIELDS["sparse"] | {"head_dim": 576, "head_dim_v": 576}
    for parts in (1, 2):
        check(device, random_call(problem("sparse", **fields), 3, device=device.name), parts)


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (64, 16), (40, 24), (32, 1), (1, 1), (24, 0), (16, 80)])
@pytest.mark.parametrize("parts", [1, 2])
def test_latent_rows_of_any_width(device: Device, rank: int, rope: int, parts: int) -> None:
    fields = {"batch": 1, "heads_q": 3, "seq_q": 2, "head_dim": rank + rope, "head_dim_v": rank}
    for dtype in ("fp32", "bf16") if rank == 40 else ("fp32",):
        p = problem("mla", causal="bottom_right", dtype=dtype, **fields)
        check(device, random_call(p, 2, device=device.name, extremes=True), parts)
