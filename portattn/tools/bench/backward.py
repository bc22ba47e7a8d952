"""Backward contenders: a contender's forward call run once, outside of the clock, and then its gradients taken.

What is timed is `torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)`, for portattn and peers alike. Any
contender whose call is recorded by autograd can be made one; of the others it is said that they have no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import portattn
from portattn.api import dispatch
from portattn.schema.plan import Plan
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import CORE, CORE_PATH, OURS, UNORDERED, Build, Contender, ours, own
from portattn.tools.bench.tensors import Tensors

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k and v, shaped as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientContender(Contender):
    """A contender whose call gives the gradients of q, k and v.

    out      the forward's result, (B, Hq, Sq, Dv), of packed queries (Tq, Hq, Dv)
    pull     the gradients for any gradient of `out`
    ordered  whether two runs have to agree in every bit
    plan     of portattn's own: the backward's; None where torch differentiates the forward's path
    """

    out: torch.Tensor
    pull: Callable[[torch.Tensor], Gradients]
    ordered: bool = False
    plan: Plan | None = None


def own_builds(case: Case, t: Tensors, backend: str = "auto", core: bool = False) -> dict[str, Build]:
    """portattn's contenders of any case by name; deterministic backwards have the same call without that mode beside.

    core  the portable core as well
    """
    if not case.backward:
        return own(case, t, backend, core)
    paths = {OURS: backend} | ({CORE: CORE_PATH} if core else {})
    leaves = t.leaves()
    forward = {name: _ours(case, leaves, path) for name, path in paths.items()}
    builds = with_gradients(leaves, forward, case.deterministic)
    if case.deterministic:
        builds |= with_gradients(leaves, {UNORDERED: _ours(case, leaves, backend)}, ordered=False)
    return builds


def _ours(case: Case, leaves: Tensors, backend: str) -> Build:
    return lambda: ours(case, leaves, backend)


def with_gradients(leaves: Tensors, builds: Mapping[str, Build], ordered: bool) -> dict[str, Build]:
    """The same contenders' gradients. builds: of the forward, over tensors that require gradients.

    ordered  under torch.use_deterministic_algorithms
    """

    def making(name: str, build: Build) -> Build:
        return lambda: _differentiated(leaves, build, ordered, name in (OURS, CORE, UNORDERED))

    return {name: making(name, build) for name, build in builds.items()}


def _differentiated(leaves: Tensors, build: Build, ordered: bool, mine: bool) -> GradientContender:
    inputs = (leaves.q, leaves.k, leaves.v)
    assert leaves.grad_out is not None
    with torch.enable_grad():
        forward = build()

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if ordered:
                stack.enter_context(deterministic())
            stack.enter_context(forward.around())
            yield

    with around(), torch.enable_grad():
        out = forward.shaped(forward.run())
    if not out.requires_grad:
        raise ValueError("autograd does not record its call: it has no gradient")

    def pull(grad_out: torch.Tensor) -> Gradients:
        dq, dk, dv = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
        return dq, dk, dv

    # In the strides of its own result, which a layer behind it would hand back: some peers copy what has others.
    grad_out = torch.empty_like(out).copy_(leaves.grad_out)
    found = None
    if mine:
        with around():
            found = backward_plan(lambda: pull(grad_out))
    return GradientContender(
        run=lambda: pull(grad_out), around=around, path=found.path if found else "",
        result_bytes=sum(x.numel() * x.itemsize for x in inputs), out=out.detach(), pull=pull, ordered=ordered,
        plan=found,
    )  # fmt: skip


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """torch.use_deterministic_algorithms, without the filling of new memory that comes with it: a means to find what
    was never written, and none of the algorithms."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled: Any = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def backward_plan(pull: Callable[[], Any]) -> Plan | None:
    """The plan of a backward; None where torch differentiates the path of the forward."""
    dispatch.forget_backward()
    pull()
    return portattn.last_backward_plan()
