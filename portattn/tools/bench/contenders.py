"""Contenders: portattn's calls as a user writes them, the same calls prepared, and the gradients of any contender."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import portattn
from portattn.api import dispatch
from portattn.schema.plan import Plan
from portattn.tools.bench.cases import Case
from portattn.tools.bench.tensors import Tensors

Run = Callable[[], Any]  # a tensor; of a backward, the gradients of q, k and v
OURS, PREPARED, CORE, UNORDERED = "portattn", "portattn prepared", "portattn core", "portattn unordered"
MINE = (OURS, PREPARED, CORE, UNORDERED)
CORE_PATH = "triton"


def as_is(out: torch.Tensor) -> torch.Tensor:
    return out


@dataclass(frozen=True, slots=True)
class Contender:
    run: Run  # the timed call
    # brings the result into the form (B, Hq, Sq, Dv), packed (Tq, Hq, Dv); not timed
    shaped: Callable[[torch.Tensor], torch.Tensor] = as_is
    # a context for all of its calls, entered before the clock starts
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    path: str = ""  # the plan's path, of portattn's own contenders
    result_bytes: int = 0  # memory of a call's result, if it is known apart from other allocations


Build = Callable[[], Contender]  # raises where the contender cannot run the case


def transpose_heads(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2)


def arguments(case: Case, t: Tensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options: dict[str, Any] = {}
    if case.causal != "none":
        options["causal"] = case.causal
    if case.windowed:
        options["window"] = case.window
    if case.scale is not None:
        options["scale"] = case.scale
    if case.dropout:
        options["dropout_p"] = case.dropout
    if case.quantised:
        options |= {"k_scale": t.k_scale, "v_scale": t.v_scale}
    if t.k_block_scale is not None:
        options |= {"k_block_scale": t.k_block_scale, "v_block_scale": t.v_block_scale}
    if case.op == "attention":
        return (t.q, t.k, t.v), options | {"seqlens_q": t.seqlens_q, "seqlens_k": t.seqlens_k}
    if case.op == "varlen_attention":
        longest = max(case.queries), max(case.keys)
        return (t.q, t.k, t.v, t.cu_seqlens_q, t.cu_seqlens_k, *longest), options
    if case.op == "decode_attention":
        return (t.q, t.k, t.v, t.seqlens_k), options
    if case.op == "sparse_attention":
        options |= {"page_table": t.page_table, "seqlens_k": t.seqlens_k, "magicpig": case.magicpig}
        return (t.q, t.k, t.v, t.indices, t.counts), options
    if case.packed:
        options |= {"cu_seqlens_q": t.cu_seqlens_q, "max_seqlen_q": max(case.queries)}
    if case.op == "paged_attention":
        return (t.q, t.k, t.v, t.page_table, t.seqlens_k), options
    rank = case.width_v
    queries = t.q[..., :rank], t.q[..., rank:]
    return (*queries, t.k, t.page_table, t.seqlens_k), options | ({} if case.packed else {"layout": "bshd"})


def _shape(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    return transpose_heads if case.op == "mla_attention" and not case.packed else as_is


def ours(case: Case, t: Tensors, backend: str = "auto") -> Contender:
    op, (args, options) = getattr(portattn, case.op), arguments(case, t)
    path = plan_of(case, t, backend).path
    return Contender(lambda: op(*args, **options, backend=backend), _shape(case), path=path)


def prepared_contender(case: Case, t: Tensors, backend: str = "auto") -> Contender:
    """Return portattn's call by a handle from `portattn.prepare`, with an output tensor."""
    args, options = arguments(case, t)
    options["backend"] = backend
    handle: Any = portattn.prepare(case.op, *args, **options)
    out = torch.empty_like(getattr(portattn, case.op)(*args, **options), memory_format=torch.contiguous_format)
    path = plan_of(case, t, backend).path
    return Contender(lambda: handle.run(*args, out=out, **options), _shape(case), path=path)


def plan_of(case: Case, t: Tensors, backend: str = "auto") -> portattn.Plan:
    args, options = arguments(case, t)
    return portattn.plan(case.op, *args, **options, backend=backend)


def own(case: Case, t: Tensors, backend: str = "auto", core: bool = False) -> dict[str, Build]:
    """Return portattn's contenders by name, prepared too if the op reads a cache; `core`: the core kernel too."""
    builds: dict[str, Build] = {OURS: lambda: ours(case, t, backend)}
    if case.reads_cache:
        builds[PREPARED] = lambda: prepared_contender(case, t, backend)
    if core:
        builds[CORE] = lambda: ours(case, t, CORE_PATH)
    return builds


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k and v, shaped as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientContender(Contender):
    out: torch.Tensor  # the forward's result, (B, Hq, Sq, Dv); packed (Tq, Hq, Dv)
    pull: Callable[[torch.Tensor], Gradients]  # computes the gradients from a gradient of `out`
    ordered: bool = False  # two runs must agree in every bit
    plan: Plan | None = None  # portattn's backward plan; None if torch differentiates the forward's path


def own_builds(case: Case, t: Tensors, backend: str = "auto", core: bool = False) -> dict[str, Build]:
    """Return portattn's contenders of any case by name; a deterministic backward also gets one without that mode."""
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
    """Return the gradients of contenders whose forwards take tensors that require gradients."""

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
    """Enable torch.use_deterministic_algorithms, but not its filling of new memory, which is only a debugging aid."""
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
    """Return the plan of a backward, or None if torch differentiates the forward's path."""
    dispatch.forget_backward()
    pull()
    return portattn.last_backward_plan()


def explain_plans(case: Case, t: Tensors | None, ours: Contender | None, backend: str) -> tuple[str, ...]:
    if ours is None or t is None:
        return ()
    with ours.around():
        plans = [plan_of(case, t.leaves() if case.backward else t, backend)]
    if isinstance(ours, GradientContender) and ours.plan is not None:
        plans.append(ours.plan)
    return tuple(line for plan in plans for line in plan.explain().splitlines())
