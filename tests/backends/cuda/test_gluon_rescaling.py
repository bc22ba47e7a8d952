"""Hopper's forward with accumulators that are rescaled only where a row's maximum has grown much (`lazy`)."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from test_gluon_forms import plan_of, problem

from portattn.backends.cuda.hopper_forward import variant
from portattn.backends.cuda.hopper_forward.tuning import ForwardTunable
from portattn.backends.cuda.searched import ScheduledVariant
from portattn.compile.compile_check import compile_in
from portattn.launch import meta_call
from portattn.launch.described import signatures
from portattn.schema.target import Target
from portattn.worker.client import Worker

GROWTHS = (0.0, 0.7, 3.0, 7.9, 8.1, 40.0)


def _attention(
    scores: np.ndarray[Any, Any], values: np.ndarray[Any, Any], reference: Any
) -> tuple[Any, Any, int, float]:
    """Tiles of 16 keys, from the last to the first, with weights relative to `reference`: the results, the LSEs in
    powers of 2, how often an accumulator's row was rescaled, and the largest weight."""
    rows, keys = scores.shape
    base = np.full(rows, -np.inf)
    total, acc, rescaled, largest = np.zeros(rows), np.zeros((rows, values.shape[1])), 0, 0.0
    for n in range(keys // 16 - 1, -1, -1):
        tile = scores[:, 16 * n : 16 * n + 16]
        new = reference(base, tile.max(1))
        finite = np.where(np.isneginf(new), 0.0, new)
        factor = np.exp2(base - finite)
        weights = np.exp2(tile - finite[:, None])
        rescaled += int(((factor != 1.0) & ~np.isneginf(base)).sum())
        largest = max(largest, float(weights.max()))
        total = total * factor + weights.sum(1)
        acc = acc * factor[:, None] + weights @ values[16 * n : 16 * n + 16]
        base = new
    some = total > 0
    safe = np.where(some, total, 1.0)
    return acc / safe[:, None], np.where(some, base + np.log2(safe), -np.inf), rescaled, largest


@pytest.mark.parametrize("growth", GROWTHS)
def test_the_result_is_the_same_and_weights_stay_small(monkeypatch: pytest.MonkeyPatch, growth: float) -> None:
    """The kernel's own choice of the reference, on plain numbers."""
    rescaling = pytest.importorskip("portattn.backends.cuda.hopper_forward.lazy_rescale")
    monkeypatch.setattr(rescaling, "gl", SimpleNamespace(where=np.where))
    monkeypatch.setattr(rescaling, "GROWTH", 8.0)
    random = np.random.default_rng(1)
    scores = random.normal(size=(24, 256)) + growth * (15 - np.arange(256)[None, :] // 16)
    scores[3, 100:] = -np.inf  # sees nothing at first
    scores[4, :200] = -np.inf  # nothing at last
    scores[5] = -np.inf  # nothing at all
    scores[6] = -scores[6]  # maxima that fall
    values = random.normal(size=(256, 8))
    found, lse, rescaled, largest = _attention(scores, values, rescaling.reference.fn)
    wanted, wanted_lse, always, _ = _attention(scores, values, np.maximum)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-13, atol=1e-12)
    assert not found[5].any()
    assert np.isneginf(lse[5])
    assert largest <= 2.0**8
    if growth <= 0.7:
        assert rescaled <= 2 * 24  # at most as often as all that it grows by has room for
        assert always > 24
    if growth >= 12:
        assert rescaled == always
        assert largest <= 1.0


FORMS = [("ragged", 64, "bottom_right", True), ("plain", 128, "none", False), ("packed", 256, "bottom_right", True)]


@pytest.mark.compiles
@pytest.mark.parametrize(("form", "head_dim", "causal", "late"), FORMS, ids=str)
def test_a_warp_without_growth_leaves_its_accumulator_alone(
    gluon_compiler: Worker, gluon_target: Target, form: str, head_dim: int, causal: str, late: bool
) -> None:
    p = problem(form, head_dim, causal)
    chosen = variant.choice(p)
    assert chosen is not None
    schedule = msgspec.structs.replace(chosen.schedule, lazy=True, late=late)
    signature, *_ = signatures(ScheduledVariant(ForwardTunable(), schedule), meta_call(p))
    assert signature.constants["LAZY"] is True
    reply = compile_in(gluon_compiler, signature, plan_of(p, gluon_target), gluon_target, 120.0, "text")
    assert reply.outcome == "ok", reply.message
    votes = re.findall(
        r"vote\.sync\.any\.pred .*?\n(.*?)@!some bra\.uni KEPT;\n(.*?)KEPT:", str(reply.facts["ptx"]), re.S
    )
    assert votes
    for kept, multiplied in votes:
        moves = re.findall(r"mov\.b32 (%\w+), (%\w+);", kept)
        assert len(moves) == head_dim // 2
        assert all(to == of for to, of in moves), "nothing moves from one register to another"
        products = re.findall(r"mul\.f32 (%\w+), (%\w+), (%\w+);", multiplied)
        assert [to for to, _, _ in products] == [of for _, of, _ in products] == [to for to, _ in moves]
        # Two numbers of one row, two of the other: the factors that were voted on are all that there are.
        assert [factor for _, _, factor in products[:4]] * (head_dim // 8) == [factor for _, _, factor in products]
        assert products[0][2] == products[1][2] != products[2][2] == products[3][2]


@pytest.mark.compiles
@pytest.mark.parametrize(("form", "head_dim", "causal", "late"), FORMS[1:2], ids=str)
def test_no_product_waits_for_the_branch(
    gluon_compiler: Worker, gluon_target: Target, form: str, head_dim: int, causal: str, late: bool
) -> None:
    p = problem(form, head_dim, causal)
    chosen = variant.choice(p)
    assert chosen is not None
    spilled = []
    for schedule in (chosen.schedule, msgspec.structs.replace(chosen.schedule, lazy=True, late=late)):
        signature, *_ = signatures(ScheduledVariant(ForwardTunable(), schedule), meta_call(p))
        reply = compile_in(gluon_compiler, signature, plan_of(p, gluon_target), gluon_target, 120.0, "full")
        assert reply.outcome == "ok", reply.message
        assert "serialized_wgmma" not in reply.facts
        spilled.append(reply.facts["spills"])
    assert spilled[1] <= spilled[0]
