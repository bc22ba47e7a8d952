"""Errors and budgets of an operation's results, gradients or written cache, also of a plan run in a child process."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from portattn.launch import run_core
from portattn.launch.run import run_variant
from portattn.planning.registry import Registry
from portattn.reference import blockwise, write
from portattn.schema.call import Call
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.ops import CAPTURED
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing import tolerance
from portattn.testing.oracle import DenseView, dense_view, oracle
from portattn.testing.random_writing import judge_writing
from portattn.testing.tolerance import (
    BUDGET_FACTOR,
    FLOAT32_STEPS,
    FRACTION_BITS,
    largest,
    nan_filled_memory,
    on_cpu,
    random_call,
    round_fraction,
)
from portattn.worker.child import RUNS

# Tensors that can have a gradient, in the order of results.
DIFFERENTIABLE = ("q", "k", "v", "q_rope", "bias", "sinks", "alibi_slopes")


def gradients(call: Call, grad_out: torch.Tensor, grad_lse: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Return gradients of sum(out·grad_out) + sum(LSE·grad_lse) in float64, by autograd through the oracle.

    q, k, v, the call's bias, sinks and alibi_slopes, and captured tensors that the problem requests have one each,
    shaped as in the Call (a broadcast bias's is not summed); values of mla_attention are columns of k. Rows and keys
    that do not count get 0; in rows that attend nothing grad_out and grad_lse may hold anything."""
    leaves = _leaves(call, torch.float64)
    call = _with(call, leaves)
    out, lse = oracle(call)
    some = _attending(call)
    results = [out]
    towards = [grad_out.double().masked_fill(~some[..., None], 0.0)]
    if grad_lse is not None:
        nothing = torch.isneginf(lse.detach())
        results.append(lse.masked_fill(nothing, 0.0))
        towards.append(grad_lse.double().masked_fill(nothing, 0.0))
    return _pulled(results, leaves, towards)


def same_dtype_gradients(
    call: Call, grad_out: torch.Tensor, grad_lse: torch.Tensor | None = None, precision: str = "ieee"
) -> dict[str, torch.Tensor]:
    """Return the same gradients by the kernels' formulas, with operands of products in the call's dtype.

    P = exp(S - LSE), delta = rowsum(out·grad_out) - grad_lse, dV = Pᵀ·dO, dS = P·(dO·Vᵀ - delta), dQ = scale·dS·K, dK =
    scale·dSᵀ·Q (Dao, "FlashAttention-2", arXiv 2307.08691, section 3.2). Dropout with factor Z takes P·Z before V and
    dO, and dO·Vᵀ·Z for dO·Vᵀ. Sums of products and the softmax are float32, as are gradients of sinks and ALiBi slopes;
    P, dS, the forward's output and the results are rounded to the call's dtype. MagicPIG's weights raise ValueError:
    they depend on q and k by more than their product."""
    return _formulas(call, grad_out, grad_lse, precision).results


def judge_gradients(
    call: Call,
    found: Mapping[str, torch.Tensor],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
    precision: str = "ieee",
) -> dict[str, int | float]:
    """Return errors and budgets of gradients: {error, budget, wrong, error_q, budget_q, error_k, …}.

    `error_x` is the largest |ours − oracle| of x's gradient over elements finite in both; `error` and `budget` belong
    to the gradient with the largest ratio. `wrong` counts elements finite in only one of the two, and nonzero
    elements in rows and keys that do not count. Gradients missing in `found` (shaped as in the Call) are not judged."""
    call, grad_out = on_cpu(call), grad_out.detach().cpu()
    grad_lse = None if grad_lse is None else grad_lse.detach().cpu()
    expected = gradients(call, grad_out, grad_lse)
    same, counted = _formulas(call, grad_out, grad_lse, precision), _counted(call)
    facts: dict[str, int | float] = {"error": 0.0, "budget": 0.0, "wrong": 0}
    worst = -1.0
    for name, gradient in found.items():
        if name not in expected:
            raise ValueError(f"a gradient of {name}, which the call does not have: it has {', '.join(expected)}")
        ours, right, torchs, counts = gradient.detach().cpu(), expected[name], same.results[name], counted[name]
        if name == "bias" and ours.ndim == right.ndim:
            # Of a broadcast bias, summed up.
            axes = [axis for axis in range(right.ndim) if ours.shape[axis] == 1 != right.shape[axis]]
            for axis in axes:
                right, torchs = right.sum(axis, keepdim=True), torchs.sum(axis, keepdim=True)
                counts = counts.any(axis, keepdim=True)
                same.summed[name] *= expected[name].shape[axis]
        if ours.shape != right.shape:
            raise ValueError(f"the gradient of {name} is {tuple(ours.shape)}, and the tensor {tuple(right.shape)}")
        error = largest(ours.double() - right)
        ulps = torch.finfo(ours.dtype).eps + FLOAT32_STEPS * torch.finfo(torch.float32).eps
        budget = BUDGET_FACTOR * largest(torchs.double() - right) + ulps * largest(right)
        # What slopes and sinks sum up is only as exact as delta, which is made of the rounded output.
        steps = torch.finfo(call.q.dtype).eps / 2 if name in ("alibi_slopes", "sinks", *CAPTURED) else 0.0
        budget += max(FLOAT32_STEPS * torch.finfo(torch.float32).eps, steps) * same.summed[name]
        facts[f"error_{name}"], facts[f"budget_{name}"] = error, budget
        wrong = (torch.isfinite(ours) != torch.isfinite(right)) | ((ours != 0) & ~counts)
        facts["wrong"] += int(wrong.sum())
        share = error / budget if budget else math.inf if error else 0.0
        if share > worst:
            worst, facts["error"], facts["budget"] = share, error, budget
    return facts


def judge_backward(call: Call, delta: torch.Tensor, precision: str = "ieee") -> dict[str, int | float]:
    """Judge a gradients' call that has run, like `judge_gradients`: dQ, dK and dV lie in its own memory."""
    assert call.grad_out is not None
    names = ("q", "k", "v") if call.grad_bias is None else ("q", "k", "v", "bias")
    found = {name: getattr(call, f"grad_{name}") for name in names}
    if call.grad_slopes is not None:
        parts = call.grad_slopes.detach().cpu()
        if call.cu_seqlens_q is None:
            found["alibi_slopes"] = parts.sum(2)
        else:
            ends = call.cu_seqlens_q.tolist()
            of = [parts[0, :, first:end].sum(1) for first, end in itertools.pairwise(ends)]
            found["alibi_slopes"] = torch.stack(of) if of else parts.new_zeros(0, parts.shape[1])
    found |= {name: getattr(call, f"grad_{name}") for name in _captured(call)}
    facts = judge_gradients(call, found, call.grad_out, call.grad_lse, precision)
    error, budget, wrong = _judge_delta(on_cpu(call), delta.detach().cpu())
    facts["wrong"] += wrong
    if error * facts["budget"] > facts["error"] * budget:
        facts["error"], facts["budget"] = error, budget
    return {name: facts[name] for name in ("error", "budget", "wrong")}


def _judge_delta(call: Call, delta: torch.Tensor) -> tuple[float, float, int]:
    """Return delta's error, its budget and its wrong elements: not finite, or not 0 in rows that attend nothing."""
    assert call.grad_out is not None
    assert call.forward_out is not None
    assert call.forward_lse is not None
    products = call.forward_out.double() * call.grad_out.double()
    products = products.masked_fill(~_attending(call)[..., None], 0.0)
    nothing = torch.isneginf(call.forward_lse)
    right = products.sum(-1) - (0.0 if call.grad_lse is None else call.grad_lse.double())
    right = right.masked_fill(nothing, 0.0)
    budget = FLOAT32_STEPS * torch.finfo(torch.float32).eps * largest(products.abs().sum(-1) + right.abs())
    wrong = ~torch.isfinite(delta) | ((delta != 0) & nothing)
    return largest(delta.double() - right), budget, int(wrong.sum())


@dataclass(frozen=True)
class _Found:
    """Gradients by name, with the rounding scale of their sums."""

    results: dict[str, torch.Tensor]
    summed: dict[str, float]  # largest sum of magnitudes: a small difference has the rounding of large terms


def _formulas(call: Call, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, precision: str) -> _Found:
    if call.problem.magicpig:
        raise ValueError("MagicPIG's weights depend on q and k by more than their product")
    dtype = call.q.dtype
    bits = FRACTION_BITS.get(precision) if dtype is torch.float32 else None

    def operand(values: torch.Tensor) -> torch.Tensor:
        return values.to(dtype).float() if bits is None else round_fraction(values, bits)

    dtypes = {name: leaf.dtype for name, leaf in _leaves(call).items()}
    leaves = _leaves(call, torch.float32)
    call = _with(call, leaves)
    view = dense_view(call)
    with torch.no_grad():
        q, k, v = (operand(x) for x in (view.q, view.k, view.v))
    scaled = (view.products(q, k) * call.scale).requires_grad_()
    scores = view.with_terms(scaled, scaled, q, k)
    with torch.no_grad():
        lse = view.lse(scores)
        nothing = torch.isneginf(lse)
        lse = lse.masked_fill(nothing, 0.0)[..., None]
        probabilities = torch.exp(scores - lse)
        grads = view.by_sequence(grad_out.float()).masked_fill(~(view.some & ~nothing)[..., None], 0.0)
        dropped = view.dropped(probabilities)
        out = view.mixed(operand(dropped), v).to(dtype).float()  # as the backward pass reads it
        delta = (out * grads).sum(dim=-1)
        if grad_lse is not None:
            delta = delta - view.by_sequence(grad_lse.float())
        delta = delta.masked_fill(nothing, 0.0)[..., None]
        grads = operand(grads)
        products = view.products(grads, v)
        products = view.dropped(products)
        ds = probabilities * (products - delta)
        magnitudes = probabilities * (products.abs() + delta.abs())
    terms = {name: leaf for name, leaf in leaves.items() if name in ("bias", "alibi_slopes", *CAPTURED)}
    # Softcap's derivative, and sums over what a slope is for.
    d_scaled, *d_terms = torch.autograd.grad(scores, [scaled, *terms.values()], ds, retain_graph=True)
    (m_scaled,) = torch.autograd.grad(scores, [scaled], magnitudes)
    with torch.no_grad():
        inner = [
            view.mixed(operand(d_scaled), k) * call.scale,
            _across(view, operand(d_scaled), q) * call.scale,
            _across(view, operand(dropped), grads),
        ]
        summed = {
            "q": largest(view.mixed(m_scaled, k.abs()) * call.scale),
            "k": largest(_across(view, m_scaled, q.abs()) * call.scale),
            "v": largest(_across(view, dropped, grads.abs())),
            "bias": largest(magnitudes),
            "alibi_slopes": largest((magnitudes * view.distance).sum(dim=(2, 3))),
        }
        summed |= dict.fromkeys(_captured(call), float(magnitudes.sum()))  # one element may get all
        results = dict(zip(terms, d_terms, strict=True))
        if call.sinks is not None:
            of_sinks = -torch.exp(call.sinks[None, :, None, None] - lse) * delta
            results["sinks"] = of_sinks.sum(dim=(0, 2, 3))
            summed["sinks"] = largest(of_sinks.abs().sum(dim=(0, 2, 3)))
    operands = {name: leaf for name, leaf in leaves.items() if name not in (*terms, "sinks")}
    results |= _pulled([view.q, view.k, view.v], operands, inner)
    summed["q_rope"] = summed["q"]
    return _Found({name: results[name].to(dtypes[name]) for name in leaves}, summed)


def _across(view: DenseView, of_scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return Σ over rows of (B, Hq, rows, keys)ᵀ · (B, Hq, rows, X), and over a group's heads: (B, H, keys, X)."""
    b, heads, count, keys = of_scores.shape
    shared = view.k.shape[1]
    across = of_scores.reshape(b, shared, heads // shared * count, keys).transpose(-1, -2)
    return across @ rows.reshape(b, shared, heads // shared * count, rows.shape[3])


def _leaves(call: Call, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    found = {name: getattr(call, name) for name in (*DIFFERENTIABLE, *_captured(call))}
    if call.problem.op == "mla_attention":
        del found["v"]  # columns of k
    return {
        name: tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_()
        for name, tensor in found.items()
        if tensor is not None
    }


def _captured(call: Call) -> list[str]:
    """Return the names of the tensors that score_mod reads whose gradients are requested."""
    return [name for number, name in enumerate(CAPTURED) if call.problem.grad_captured >> number & 1]


def _with(call: Call, leaves: Mapping[str, Any]) -> Call:
    found = replace(call, **leaves)
    if "v" not in leaves:
        found.v = found.k[..., : call.problem.head_dim_v]
    return found


def _pulled(
    results: list[torch.Tensor], leaves: Mapping[str, torch.Tensor], towards: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    reached = [(result, grad) for result, grad in zip(results, towards, strict=True) if result.requires_grad]
    found = torch.autograd.grad(
        [result for result, _ in reached],
        list(leaves.values()),
        [grad for _, grad in reached],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, found, strict=True))


def _attending(call: Call) -> torch.Tensor:
    view = dense_view(call)
    return view.restored(view.some.expand(-1, call.problem.heads_q, -1), False)


def _counted(call: Call) -> dict[str, torch.Tensor]:
    """Return by name the elements of each tensor that a result may depend on: bool, shaped as the tensor."""
    leaves = _leaves(call)
    call = _with(call, leaves)
    view = dense_view(call)
    found = _pulled([view.q, view.k, view.v], leaves, [torch.ones_like(x) for x in (view.q, view.k, view.v)])
    counted = {name: gradient != 0 for name, gradient in found.items()}
    for name in ("sinks", "alibi_slopes", *CAPTURED):
        if name in counted:
            counted[name] = torch.ones_like(counted[name])
    if "bias" in counted:
        counted["bias"] = view.keep.expand_as(counted["bias"])
    return counted


def judge(
    call: Call, out: torch.Tensor, lse: torch.Tensor | None, precision: str = "ieee", probabilities: str = "as_q"
) -> dict[str, int | float]:
    """Judge any call like `tolerance.judge`; for gradients `out` is delta, for append and write the cache is judged."""
    if call.problem.writes:
        return judge_writing(call, precision)
    if call.problem.backward:
        return judge_backward(call, out, precision)
    return tolerance.judge(call, out, lse, precision, probabilities)


def compare(request: dict[str, Any], enter: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """Run `path` of `target` on random tensors, NaN in outputs and padding: {"facts": …} of testing/verdict.judge.

    With `timed` the facts have `microseconds`, if the device's events keep time."""
    target = Registry.load().target(request["target"])
    if request["device"] != "cpu":
        # TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from importing the device's package, as torch_npu; detection does.
        Registry.load().backends[target.backend].detect()
    call = call_of(request)
    enter(RUNS)
    with nan_filled_memory(), torch.no_grad():
        out, lse, probabilities = _run_path(request, call, target)
    precision = request.get("lowering", {}).get("dot_precision", "ieee") if request["path"] == "triton" else "ieee"
    facts = judge(call, out, lse, precision, probabilities)
    p = call.problem
    if not (p.writes or p.backward or p.dropout or p.magicpig) and (p.q_format, probabilities) == ("as_q", "as_q"):
        facts["wrong"] += 0 if precision in ("tf32", "hf32") else tolerance.rows_outside(call, out, lse)
    if request.get("timed"):
        enter("time")
        with torch.no_grad():
            facts |= _timed(lambda: _run_path(request, call, target), call.q.device.type)
    return {"facts": facts}


def _run_path(request: Mapping[str, Any], call: Call, target: Target) -> tuple[torch.Tensor, Any, str]:
    """Return the results, and the format of the path's probabilities."""
    if request["path"] == "reference":
        reference = blockwise.run_backward if call.problem.backward else blockwise.run
        return (*(write.run if call.problem.writes else reference)(call), "as_q")
    if "lowering" in request:
        return (*run_core(plan_of(dict(request), target), call, target.arch.cores), "as_q")
    backend = Registry.load().backends[target.backend]
    variant = next((v for v in backend.variants if v.name == request["path"]), None)
    if variant is None:
        return (*next(v for v in backend.vendor if v.name == request["path"]).run(call), "as_q")
    _, out, lse = run_variant(variant.for_toolchain(target.toolchain), call)
    return out, lse, variant.probabilities


TIMED_CALLS, TIMED_SECONDS = 7, 3.0  # the median of these calls counts, or of those begun within these seconds


def _timed(run: Callable[[], Any], device_type: str) -> dict[str, float]:
    """Return the device time of a call that has run before, on one shape: evidence, no benchmark."""
    module, begun = getattr(torch, device_type), time.monotonic()
    times: list[float] = []
    while hasattr(module, "Event") and len(times) < TIMED_CALLS and time.monotonic() - begun < TIMED_SECONDS:
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        module.synchronize()
        times.append(begin.elapsed_time(end))
    return {"microseconds": 1e3 * statistics.median(times)} if times else {}


def call_of(request: dict[str, Any]) -> Call:
    problem = msgspec.convert(request["problem"], Problem)
    strides = "plain" if problem.aligned else "spare"
    return random_call(problem, request.get("seed", 0), device=request["device"], strides=strides, extremes=True)


def plan_of(request: dict[str, Any], target: Target) -> Plan:
    return Plan(
        problem=msgspec.convert(request["problem"], Problem),
        target=target.name,
        toolchain=str(target.toolchain),
        requested=request["path"],
        path=request["path"],
        kernel=request["kernel"],
        lowering=msgspec.convert(request["lowering"], Lowering),
        launch=msgspec.convert(request["launch"], Launch),
        choices=tuple(request["lowering"]),
        env=request.get("env", {}),
    )
