"""Every public operation with every feature against the float64 oracle: each argument arrives where it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opcalls import (
    CALLS,
    as_call,
    assert_right,
    carry_out_by,
    differentiable,
    given,
    paths,
    perform,
    problem,
    use_small_tiles,
)
from support import Device, poisoned, random_call

import portattn
from portattn.api.call import perform as carry_out

PLACED: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"window_left": 4, "window_right": 2},
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
    "all": {"log_weights": True, "magicpig": True, "softcap": True, "alibi_slopes": True, "sinks": True},
}
EVERYWHERE: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": True},
    "alibi_slopes": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "bshd": {"layout": "bshd"},
    "hpd": {"page_layout": "hpd"},
    "no lse": {"return_lse": False},
    "fp16": {"dtype": "fp16"},
    "bf16": {"dtype": "bf16"},
}


def features(name: str) -> dict[str, dict[str, Any]]:
    """The features of a call: packed tensors have no layout, and packed queries no bias and no mask."""
    p = problem(name)
    found = EVERYWHERE | (CHOSEN if p.op == "sparse_attention" else PLACED)
    if p.op not in ("paged_attention", "sparse_attention") or not p.page_size:
        found = {k: v for k, v in found.items() if k != "hpd"}
    if p.packed:
        found = {k: v for k, v in found.items() if k not in ("bias", "mask", "bshd")}
        found["all"] = {k: v for k, v in PLACED["all"].items() if k not in ("bias", "mask")}
    return found


CASES = [(name, feature) for name in CALLS for feature in features(name)]


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize(("name", "feature"), CASES)
def test_results_are_right(device: Device, monkeypatch: pytest.MonkeyPatch, path: str, name: str, feature: str) -> None:
    use_small_tiles(monkeypatch)
    call = random_call(problem(name, **features(name)[feature]), seed=1, device=device.name)
    with poisoned():
        result = perform(call.problem.op, given(call), **paths(device)[path])
    assert portattn.last_plan().path == ("reference" if path == "reference" else device.path)
    out, lse = result if call.problem.return_lse else (result, None)
    assert_right(call, out, lse)


@pytest.mark.parametrize("name", CALLS)
def test_the_plan_is_that_of_the_call(device: Device, name: str) -> None:
    """plan(), explain() and the call itself speak of one Problem, and plan() runs nothing."""
    call = random_call(problem(name), seed=2, device=device.name)
    op, arguments = call.problem.op, given(call)
    made = portattn.plan(op, **arguments)
    assert portattn.last_plan() is None
    perform(op, arguments)
    assert portattn.last_plan() == made
    assert str(made.problem) in portattn.explain(op, **arguments)


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_not_changed(device: Device, name: str) -> None:
    call = random_call(problem(name), seed=3, device=device.name)
    arguments = given(call)
    before = {n: t.clone() for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    for path in paths(device).values():
        perform(call.problem.op, arguments, **path)
        for n, copy in before.items():
            assert torch.equal(arguments[n].nan_to_num(7.0), copy.nan_to_num(7.0)), n


STRIDED = ("spare", "transposed", "sliced", "expanded")


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize("name", CALLS)
def test_any_strides(device: Device, monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> None:
    use_small_tiles(monkeypatch)
    for seed, strides in enumerate(STRIDED):
        call = random_call(problem(name), seed=seed, device=device.name, strides=strides, scale=-0.3)
        with poisoned():
            out, lse = perform(call.problem.op, given(call), **paths(device)[path])
        assert_right(call, out, lse)


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
@pytest.mark.parametrize("name", ["paged", "ragged", "sparse paged"])
def test_keys_and_values_in_one_cache(
    device: Device, monkeypatch: pytest.MonkeyPatch, path: str, page_layout: str, name: str
) -> None:
    """(P, 2, Hk, page, D) and (P, 2, page, Hk, D), each half a view; and (P, page, 2, Hk, D), which is SGLang's way."""
    use_small_tiles(monkeypatch)
    p = problem(name, page_layout=page_layout, head_dim_v=16)
    call = random_call(p, seed=4, device=device.name, strides="combined")
    arguments = given(call)
    names = [n for n in arguments if n[1:] in ("_pages", "_cache")]
    k, v = (arguments[n] for n in names)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    with poisoned():
        out, lse = perform(p.op, arguments, **paths(device)[path])
    assert_right(call, out, lse)
    axis = 2 if page_layout == "phd" else 3
    both = torch.stack([k, v], dim=axis)
    other = dict(zip(names, both.unbind(axis), strict=True))
    assert not other[names[0]].is_contiguous()
    again, again_lse = perform(p.op, arguments | other, **paths(device)[path])
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    """Through the public function, where no padding holds NaN; against the oracle's own, in float64."""
    from portattn.testing.oracle import oracle

    call = random_call(problem(name), seed=5)
    for n in ("q", "k", "v", "q_rope"):
        if getattr(call, n) is not None:
            setattr(call, n, getattr(call, n).nan_to_num(0.5))
    arguments = given(call) | differentiable(call.problem.op)
    tensors = {
        n: t.clone().requires_grad_()
        for n, t in arguments.items()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    out, lse = perform(call.problem.op, arguments | tensors)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    finite = torch.isfinite(lse)
    ours = torch.autograd.grad((out * weights).sum() + lse[finite].sum(), list(tensors.values()))

    made: list = []
    carry_out_by(lambda request: made.append(request.build()))
    try:
        perform(call.problem.op, arguments | tensors)
    finally:
        carry_out_by(carry_out)
    expected, expected_lse = oracle(made[0])
    weights = as_call(call.problem, weights).double()
    expected_lse = expected_lse[0] if call.problem.packed else expected_lse
    theirs = torch.autograd.grad((expected * weights).sum() + expected_lse[finite].sum(), list(tensors.values()))
    for n, one, other in zip(tensors, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4, msg=lambda text, n=n: f"{n}: {text}")
