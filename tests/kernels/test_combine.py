"""combine alone, given partial results and states that no kernel made, against their merge in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import problem
from support import Device, core_plan, poisoned, random_call

from portattn.backends.cuda.merging import merging
from portattn.kernels.combine import combine as combine_kernel
from portattn.launch import combine, launch_all
from portattn.schema.call import Call
from portattn.schema.lowering import CHOICES
from portattn.schema.symbolic_int import next_power_of_two

INF, NAN = float("inf"), float("nan")
LN_2 = math.log(2.0)
SPLITS = (2, 7, combine.CHUNK + 3)


def prepared(
    device: Device, splits: int, sinks: bool = False, **lowering: str
) -> tuple[Call, combine.Outputs, Callable[[], None]]:
    """A call, its uninitialised outputs, and what launches combine on them."""
    call = random_call(problem("decode", sinks=sinks, seqlens_k=False, leftpad_k=False), 1, device=device.name)
    plan = core_plan(device, call.problem, lowering, {"splits": splits})
    with poisoned():
        outputs = combine.Outputs.of(plan, call)
    launches = combine.calls(plan, call, outputs, cores=3)
    return call, outputs, lambda: launch_all(launches, plan, call.q)


def random_states(outputs: combine.Outputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Fills the partial results. Returns each share's maximum and sum, float64 (splits, B, Hq, Sq)."""
    generator = torch.Generator().manual_seed(2)
    shape = outputs.partial.shape[:-1]
    outputs.partial.copy_(torch.randn(outputs.partial.shape, generator=generator))
    maxima = 4.0 * torch.randn(shape, generator=generator)
    sums = 1.0 + 50.0 * torch.rand(shape, generator=generator)
    return maxima.double(), sums.double()


def merged(partial: torch.Tensor, exponents: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge in float64. Shares with a sum of 0 are left out; exponents are natural."""
    exponents = exponents.masked_fill(sums == 0.0, -INF)
    base = exponents.amax(0).nan_to_num(neginf=0.0)
    weights = torch.exp(exponents - base) * sums
    total = weights.sum(0)
    partial = partial.double().cpu().masked_fill((sums == 0.0)[..., None], 0.0)
    out = (partial * weights[..., None]).sum(0) / torch.where(total == 0.0, 1.0, total)[..., None]
    return out, base + torch.log(total)


def assert_merged(outputs: combine.Outputs, exponents: torch.Tensor, sums: torch.Tensor) -> None:
    out, lse = merged(outputs.partial, exponents, sums)
    torch.testing.assert_close(outputs.out.cpu().double(), out, rtol=1e-5, atol=2e-6)
    assert outputs.lse is not None
    torch.testing.assert_close(outputs.lse.cpu().double(), lse, rtol=1e-6, atol=2e-6)


@triton.jit
def _nothing():
    tl.static_assert(True)  # the interpreter wants a function that knows the language


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize("splits", SPLITS)
def test_a_row_has_several_programs_where_merging_begins_early(
    device: Device, monkeypatch: pytest.MonkeyPatch, splits: int, head_dim: int
) -> None:
    """The interpreter runs one kernel after the other, so that there is nothing to wait for."""
    monkeypatch.setitem(combine_kernel.fn.__globals__, "wait_for_kernel_before", _nothing)
    monkeypatch.setattr(combine, "dependent", lambda plan: True)
    fields = {"seqlens_k": False, "leftpad_k": False, "head_dim": head_dim, "head_dim_v": head_dim}
    call = random_call(problem("decode", **fields), 1, device=device.name)
    plan = core_plan(device, call.problem, {}, {"splits": splits})
    with poisoned():
        outputs = combine.Outputs.of(plan, call)
    (launch,) = combine.calls(plan, call, outputs, cores=3)
    assert launch.constexprs["DEPENDENT"]
    assert launch.grid[1] == next_power_of_two(head_dim) // combine.PART
    maxima, sums = random_states(outputs)
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch_all([launch], plan, call.q)
    assert_merged(outputs, maxima * LN_2, sums)


@pytest.mark.parametrize("exp", CHOICES["exp"])
@pytest.mark.parametrize("splits", SPLITS)
def test_weights_are_sums_against_the_largest_maximum(device: Device, splits: int, exp: str) -> None:
    _, outputs, launch = prepared(device, splits, exp=exp)
    maxima, sums = random_states(outputs)
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch()
    assert_merged(outputs, maxima * (LN_2 if exp == "exp2" else 1.0), sums)


@pytest.mark.parametrize("exp", CHOICES["exp"])
@pytest.mark.parametrize("splits", SPLITS)
def test_a_share_that_attended_nothing_has_no_weight(device: Device, splits: int, exp: str) -> None:
    """Its sum says so. Its maximum and its partial result may be anything."""
    _, outputs, launch = prepared(device, splits, exp=exp)
    maxima, sums = random_states(outputs)
    anything = itertools.cycle([NAN, INF, -INF, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    for split in range(0, splits, 2):
        maxima[split], sums[split] = next(anything), 0.0
        outputs.partial[split] = next(anything)
    maxima[:, 0, 0, 0], sums[:, 0, 0, 0] = NAN, 0.0  # a row without a key in any share
    outputs.partial[:, 0, 0, 0] = NAN
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch()
    assert_merged(outputs, maxima * (LN_2 if exp == "exp2" else 1.0), sums)
    assert not outputs.out[0, 0, 0].any()
    assert outputs.lse[0, 0, 0] == -INF


@pytest.mark.parametrize("exp", CHOICES["exp"])
def test_what_is_not_finite_stays_so(device: Device, exp: str) -> None:
    """A share that attended NaN or infinity: its sum is NaN, whatever its maximum is. One of -inf has no weight."""
    _, outputs, launch = prepared(device, 3, exp=exp)
    maxima, sums = random_states(outputs)
    for head, maximum in enumerate((NAN, INF, -INF)):
        maxima[1, :, head], sums[1, :, head] = maximum, NAN
    maxima[1, :, 3], sums[1, :, 3] = -INF, 1.0  # a sink of -inf that no key followed
    outputs.partial[1, :, 3] = 0.0
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch()
    assert outputs.out[:, :3].isnan().all()
    assert outputs.lse[:, :3].isnan().all()
    out, lse = merged(outputs.partial, maxima * (LN_2 if exp == "exp2" else 1.0), sums)
    torch.testing.assert_close(outputs.out[:, 3].cpu().double(), out[:, 3], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(outputs.lse[:, 3].cpu().double(), lse[:, 3], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("splits", SPLITS)
def test_variants_shares_merge_by_their_lses(device: Device, splits: int) -> None:
    """The launch that Hopper's kernels share. A share of -inf counts for nothing, with NaN in its result."""
    call, outputs, _ = prepared(device, splits)
    lses = random_states(outputs)[0]
    lses[0] = -INF
    outputs.partial[0] = NAN
    lses[:, 1] = -INF
    outputs.partial[:, 1] = NAN
    lses[1, 0, 0] = NAN
    tensors = {
        "partial": outputs.partial,
        "partial_lse": lses.float().to(device.name),
        "out": outputs.out,
        "lse": outputs.lse,
    }
    step = merging(call.problem, splits, tensors)
    kernel, options = step.kernel, {} if device.path == "interpreter" else dict(step.options)
    options.pop("launch_pdl", None)  # nothing was launched before
    kernel[step.grid](**step.arguments | {"DEPENDENT": False}, **options)
    assert outputs.out[0, 0].isnan().all()
    assert outputs.lse[0, 0].isnan().all()
    sums = torch.isfinite(lses).double()
    out, lse = merged(outputs.partial, lses, sums)
    torch.testing.assert_close(outputs.out[:, 1:].cpu().double(), out[:, 1:], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(outputs.lse[:, 1:].cpu().double(), lse[:, 1:], rtol=1e-6, atol=2e-6)


def test_the_largest_sink_is_the_lse(device: Device) -> None:
    """Scores in base 2 cannot hold it, so its state has it as it is (sink_score), and so has the LSE."""
    call, outputs, launch = prepared(device, 3, sinks=True, exp="exp2")
    call.sinks.copy_(torch.tensor([3e38, -3e38, 0.0, 0.5]))
    maxima, sums = random_states(outputs)
    for head, score in enumerate((3e38, -3e38)):
        maxima[0, :, head], sums[0, :, head] = score, 1.0
    sums[1:, :, 1] = 0.0
    outputs.partial[0, :, :2] = 0.0
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch()
    assert outputs.lse[:, 0].eq(3e38).all()
    assert outputs.lse[:, 1].eq(-3e38).all()
    assert outputs.out[:, :2].eq(0.0).all()
    out, lse = merged(outputs.partial, maxima * LN_2, sums)
    torch.testing.assert_close(outputs.out[:, 2:].cpu().double(), out[:, 2:], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(outputs.lse[:, 2:].cpu().double(), lse[:, 2:], rtol=1e-6, atol=2e-6)
