"""NaN and infinity in what is attended reach the outputs that depend on it, and no others. Lengths of any int32 value.

Without a causal mask: within a tile of keys a masked probability of 0 times a NaN value is NaN in rows that do not
attend that key.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import Device, assert_right, poisoned, problem, random_call, run_core

from portattn.call import Call
from portattn.reference import blockwise
from portattn.reference.oracle import oracle

NAN, INF = float("nan"), float("inf")
DENSE = {"heads_q": 4, "heads_k": 2}
DECODE = DENSE | {"op": "decode_attention", "seq_q": 2, "seq_k": 50}
LOWEST, HIGHEST = -(2**31), 2**31 - 1
RUNS = {
    "dense": (DENSE, lambda device, call: run_core(device, call)),
    "decode": (DECODE, lambda device, call: run_core(device, call, launch={"splits": 1})),
    "decode_split": (DECODE, lambda device, call: run_core(device, call, launch={"splits": 3})),
    "reference": (DENSE, lambda device, call: _reference(call)),
    "reference_decode": (DECODE, lambda device, call: _reference(call)),
}  # fmt: skip


def _reference(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    with poisoned(), torch.no_grad():
        return blockwise.run(call)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize(("tensor", "value"), [("q", NAN), ("k", NAN), ("v", NAN), ("q", INF), ("v", INF)])
def test_what_is_not_finite_reaches_exactly_what_depends_on_it(
    device: Device, run: str, padded: bool, tensor: str, value: float
) -> None:
    fields, kernel = RUNS[run]
    lengths = {"seqlens_k": True, "leftpad_k": True} if padded else {}
    call = random_call(problem(**(fields | lengths)), seed=7, device=device.name)
    if padded:  # rows that exist: the lengths below leave every key from 3 to 30 valid in the first sequence
        call.leftpad_k = torch.tensor([2, 4], dtype=torch.int32, device=device.name)
        call.seqlens_k = torch.tensor([30, 9], dtype=torch.int32, device=device.name)
        call.k[:, :, 2:32], call.v[:, :, 2:32] = call.k[:, :, 2:32].nan_to_num(0.5), call.v[:, :, 2:32].nan_to_num(0.5)
    row = 1 if tensor == "q" else 20
    getattr(call, tensor)[0, 1, row, 3] = value
    out, lse = kernel(device, call)
    expected, _ = oracle(call)
    bad = int((~torch.isfinite(expected)).sum())
    assert 0 < bad < expected.numel()
    assert_right(call, out, lse) if (tensor, value) != ("q", INF) else assert_not_finite_alike(call, out, lse)


def assert_not_finite_alike(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """The same elements are finite. An LSE over an infinite score may be +inf or NaN."""
    expected, expected_lse = oracle(call)
    assert torch.equal(torch.isfinite(out), torch.isfinite(expected))
    assert lse is not None
    assert torch.equal(torch.isfinite(lse), torch.isfinite(expected_lse))


EXTREMES = {
    # leftpad_k, seqlens_k -> what they mean in a storage of 37 keys
    "longest after padding": ((5, 5), (HIGHEST, HIGHEST), (5, 5), (32, 32)),
    "negative length": ((5, 0), (LOWEST, LOWEST), (5, 0), (0, 0)),
    "negative padding": ((LOWEST, LOWEST), (HIGHEST, 20), (0, 0), (37, 20)),
    "padding beyond the storage": ((HIGHEST, HIGHEST), (HIGHEST, 3), (37, 37), (0, 0)),
    "one of each": ((LOWEST, HIGHEST), (LOWEST, LOWEST), (0, 37), (0, 0)),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize("case", EXTREMES)
def test_keys_of_any_int32_length_mean_the_clamped_one(device: Device, run: str, causal: str, case: str) -> None:
    fields, kernel = RUNS[run]
    clean = random_call(problem(**(fields | {"seq_k": 37, "causal": causal})), seed=8, device=device.name)
    p = problem(**(fields | {"seq_k": 37, "causal": causal, "seqlens_k": True, "leftpad_k": True}))
    pad, length, clamped_pad, clamped_length = (
        torch.tensor(values, dtype=torch.int32, device=device.name) for values in EXTREMES[case]
    )
    wild = replace(clean, problem=p, seqlens_k=length, leftpad_k=pad)
    meant = replace(clean, problem=p, seqlens_k=clamped_length, leftpad_k=clamped_pad)
    assert_same(kernel(device, wild), kernel(device, meant))
    assert_right(meant, *kernel(device, wild))


@pytest.mark.parametrize("run", ["dense", "reference"])
@pytest.mark.parametrize("case", EXTREMES)
def test_queries_of_any_int32_length_mean_the_clamped_one(device: Device, run: str, case: str) -> None:
    _, kernel = RUNS[run]
    sized = {"seq_q": 37, "causal": "bottom_right"}
    clean = random_call(problem(**(DENSE | sized)), seed=9, device=device.name)
    p = problem(**(DENSE | sized | {"seqlens_q": True, "leftpad_q": True}))
    pad, length, clamped_pad, clamped_length = (
        torch.tensor(values, dtype=torch.int32, device=device.name) for values in EXTREMES[case]
    )
    wild = replace(clean, problem=p, seqlens_q=length, leftpad_q=pad)
    meant = replace(clean, problem=p, seqlens_q=clamped_length, leftpad_q=clamped_pad)
    assert_same(kernel(device, wild), kernel(device, meant))
    assert_right(meant, *kernel(device, wild))


def assert_same(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["reference", "core"])
def test_any_length_is_taken_by_a_call_that_is_not_validated(device: Device, backend: str) -> None:
    import portattn

    call = random_call(problem(**DENSE), seed=10, device=device.name)
    given = {"seqlens_k": [HIGHEST, LOWEST], "leftpad_k": [5, 5]}
    meant = {"seqlens_k": [32, 0], "leftpad_k": [5, 5]}
    as_tensors = lambda d: {n: torch.tensor(v, dtype=torch.int32, device=device.name) for n, v in d.items()}  # noqa: E731
    path = device.path if backend == "core" else backend
    with portattn.settings(validate="never", backend=path):
        found, expected = (portattn.attention(call.q, call.k, call.v, **as_tensors(d)) for d in (given, meant))
    assert torch.equal(found, expected)
    assert not found[1].any()
