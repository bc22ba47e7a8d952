"""The blockwise path against the oracle: every op with every feature."""

from __future__ import annotations

import pytest
from reference_cases import CASES, OPS, problem, run
from support import assert_right

from portattn.reference import blockwise
from portattn.testing.tolerance import random_call


@pytest.mark.parametrize(("op", "feature"), CASES)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_features_are_right(op: str, feature: str, seed: int) -> None:
    call = random_call(problem(op, feature), seed, extremes=seed == 1)
    assert_right(call, *run(call))


@pytest.mark.parametrize(("op", "feature"), CASES)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_dtypes_are_right(op: str, feature: str, dtype: str) -> None:
    call = random_call(problem(op, feature, dtype=dtype), seed=4)
    assert_right(call, *run(call))


@pytest.mark.parametrize(("op", "feature"), CASES)
def test_blocks_of_any_size_are_right(monkeypatch: pytest.MonkeyPatch, op: str, feature: str) -> None:
    """Both loops take several turns, with ragged ends."""
    call = random_call(problem(op, feature), seed=5)
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 5)
    monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", 5 * 4 * call.problem.batch * call.problem.heads_q)
    assert_right(call, *run(call))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strides", ["spare", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
def test_strides(op: str, strides: str, page_layout: str) -> None:
    call = random_call(problem(op, page_layout=page_layout), seed=6, strides=strides, scale=-0.3)
    assert_right(call, *run(call))
