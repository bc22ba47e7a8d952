"""Every op with every feature against the float64 oracle, one at a time and all together."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import OPS, SPLITTING, check, problem
from support import Device, random_call

TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": True},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
}
PLACED: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window_before": {"window_left": 3},
    "window_after": {"window_right": 1},
    "window": {"window_left": 9, "window_right": 5},
    "window_wider_than_a_tile": {"window_left": 17, "window_right": 18},
    "window_of_itself": {"window_left": 0, "window_right": 0},
    "causal_window": {"causal": "bottom_right", "window_left": 5},
    "top_left_window": {"causal": "top_left", "window_left": 5},
    "chunk": {"chunk": 5},
    "chunk_of_one": {"chunk": 1},
    "chunk_wider_than_a_tile": {"chunk": 19},
    "causal_chunk": {"causal": "bottom_right", "chunk": 7},
    "top_left_chunk": {"causal": "top_left", "chunk": 7},
    "chunk_and_window": {"window_left": 4, "window_right": 2, "chunk": 6},
    "chunk_and_more": {
        "causal": "bottom_right", "window_left": 9, "chunk": 11, "softcap": True, "alibi_slopes": True, "sinks": True,
    },
    "window_and_more": {
        "causal": "bottom_right", "window_left": 9, "softcap": True, "alibi_slopes": True, "sinks": True,
    },
}  # fmt: skip
GIVEN: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "mask": {"mask": True},
    "all": {
        "causal": "bottom_right", "window_left": 9, "softcap": True, "alibi_slopes": True, "sinks": True, "bias": True,
        "mask": True,
    },
}  # fmt: skip
CHOSEN: dict[str, dict[str, Any]] = {
    "log_weights": {"log_weights": True},
    "magicpig": {"magicpig": True},
    "all": {"log_weights": True, "softcap": True, "alibi_slopes": True, "sinks": True},
    "all_magicpig": {"magicpig": True, "softcap": True, "alibi_slopes": True, "sinks": True},
}
# Bias and mask have another broadcast shape for each of four seeds, slopes are per head and per sequence in turn.
SEEDS = {"alibi": (0, 1), "bias": (0, 1, 2, 3), "mask": (0, 1, 2, 3)}
ONCE = ("padded", "whole pages", "mla")  # their kernels' other ops go through all of those


def features(name: str) -> dict[str, dict[str, Any]]:
    """Those that the op has: bias and mask are given for every pair of a query and a key."""
    if name.startswith("sparse"):
        return TERMS | CHOSEN
    return TERMS | PLACED | ({} if "total_q" in OPS[name] else GIVEN)


CASES = [
    (name, feature, seed)
    for name in OPS
    for feature in features(name)
    for seed in (SEEDS.get(feature, (1,)) if name not in ONCE else (1,))
]


def splits(name: str, seed: int) -> int:
    """One for most packed queries: merging takes the interpreter a program a row."""
    return 1 + seed % 3 if name in SPLITTING and ("ragged" not in name or seed > 1) else 1


@pytest.mark.parametrize(("name", "feature", "seed"), CASES)
def test_features_are_right(device: Device, name: str, feature: str, seed: int) -> None:
    call = random_call(problem(name, **features(name)[feature]), seed, device=device.name)
    check(device, call, splits(name, seed))


def everything(name: str) -> dict[str, Any]:
    known = features(name)
    return known.get("all_magicpig", known.get("all", known.get("window_and_more", {})))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_dtypes_are_right(device: Device, name: str, dtype: str) -> None:
    """The longest and the empty sequences, and with everything that the op has."""
    causal = {} if name.startswith("sparse") else {"causal": "bottom_right"}
    fields, seed = (causal, 2) if dtype == "fp16" else (everything(name), 3)
    call = random_call(problem(name, batch=3, dtype=dtype, **fields), seed, device=device.name, extremes=True)
    check(device, call, splits(name, seed))


@pytest.mark.parametrize("name", OPS)
def test_a_negative_scale(device: Device, name: str) -> None:
    """The product's sign is carried by the query: a cap, slopes and MagicPIG's angle know nothing of that."""
    call = random_call(problem(name, **everything(name)), 6, device=device.name, scale=-0.7)
    check(device, call, splits(name, 7))


@pytest.mark.parametrize("name", OPS)
def test_without_an_lse(device: Device, name: str) -> None:
    call = random_call(problem(name, return_lse=False, sinks=True), 2, device=device.name)
    for parts in (1, 2) if name in SPLITTING else (1,):
        check(device, call, parts)


@pytest.mark.parametrize("name", [n for n in OPS if not n.startswith("sparse")])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_attend_nothing(device: Device, name: str, sinks: bool) -> None:
    """A window that ends before the first key, more queries than keys, and a sequence whose mask is False."""
    seq_k = 16 if "page_size" in OPS[name] else 9
    fields: dict[str, Any] = {"causal": "bottom_right", "window_left": 2, "seq_k": seq_k, "sinks": sinks}
    if name == "varlen":
        fields["total_k"] = 17
    if "total_q" not in OPS[name]:
        fields["mask"] = True
    call = random_call(problem(name, **fields), 4, device=device.name, extremes=True)
    if call.mask is not None:
        call.mask = call.mask.clone()
        call.mask[0] = False
    check(device, call, splits(name, 2))
