"""Shape classes: a call is validated, planned and described again with Sizes in place of sizes and strides.
Comparisons become guards, results formulas (schema/symbolic_int.py). If the launches differ from the call's own or
cannot be traced, the call is cached for its own sizes alone, and `CachedLaunch.why_fixed` says why."""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from portattn.config import Settings
from portattn.errors import PortattnError
from portattn.launch import kernel_calls
from portattn.launch.cached_launch import CachedLaunch, ShapeClass, Templates, core_steps, exact_shape_class
from portattn.launch.kernelcall import KernelCall, constexprs, unspecialised_arguments
from portattn.launch.symbolic_tensor import SymbolicTensor, TensorKind
from portattn.planning.backend import Variant
from portattn.planning.planner import plan
from portattn.schema.call import TENSORS, Call
from portattn.schema.compile_record import CompileRecord
from portattn.schema.lowering import Buffers, Step, StepLauncher
from portattn.schema.plan import Plan
from portattn.schema.symbolic_int import Size, Trace, Untraceable, pin_sizes, plain_sizes
from portattn.schema.target import Target
from portattn.schema.tensors import INT32_MAX, POINTER_ALIGNMENT, TWO_GIB, spans
from portattn.validate import build_call

# Errors of code that was not written for Sizes: isinstance(x, int) is False, an assertion fails.
_REFUSALS = (Untraceable, PortattnError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)


@dataclass(slots=True, frozen=True)
class CallRecipe:
    """A call without its sizes, strides and data."""

    op: str
    settings: Settings
    kinds: tuple[TensorKind, ...]  # of its tensors, each once
    tensors: Mapping[str, int | None]  # name -> place among `kinds`; None: not given
    values: Mapping[str, Any]  # all other arguments
    lengths: tuple[str, ...]  # names of the `values` that are sizes
    target: Target
    failed: Mapping[str, CompileRecord]  # records that rejected other paths in its plan

    def call(self, numbers: Iterator[int]) -> Call:
        """Return the validated call with these sizes and strides, tensor by tensor, then lengths."""
        made = []
        for kind in self.kinds:
            sizes = [next(numbers) for _ in range(kind.ndim)]
            made.append(SymbolicTensor.make(kind, sizes, [next(numbers) for _ in range(kind.ndim)]))
        tensors = {name: None if place is None else made[place] for name, place in self.tensors.items()}
        lengths = {name: next(numbers) for name in self.lengths if self.values[name] is not None}
        return build_call(self.op, self.settings, tensors, {**self.values, **lengths})

    def plan(self, call: Call) -> Plan:
        return plan(call.problem, self.target, records=self.failed, settings=self.settings)

    def planner(self, inputs: bytes) -> Plan:
        numbers = array("q")
        numbers.frombytes(inputs)
        return self.plan(self.call(iter(numbers)))


def trace_core(
    recipe: CallRecipe, inputs: Sequence[int], made: Plan, launches: Sequence[KernelCall],
    out: torch.Tensor, lse: torch.Tensor | None, known: ShapeClass | None = None,
) -> tuple[list[Step], ShapeClass]:  # fmt: skip
    """Return a core plan's steps and their shape class. Nothing needs to be compiled.

    known: the shape class of such a call, which is taken if its launches are the same"""
    steps, buffers = core_steps(launches, out, lse)

    def describe(call: Call, planned: Plan) -> tuple[list[Step], Buffers]:
        return core_steps(*kernel_calls(planned, call, recipe.target.arch.cores))

    return steps, _sized(recipe, inputs, made, steps, buffers, describe, known)


def cache_core(
    recipe: CallRecipe, inputs: Sequence[int], made: Plan, given: Sequence[str], launches: Sequence[KernelCall],
    out: torch.Tensor, lse: torch.Tensor | None, device: torch.device, known: ShapeClass | None = None,
) -> CachedLaunch:  # fmt: skip
    steps, sized = trace_core(recipe, inputs, made, launches, out, lse, known)
    descriptors = any(launch.constexprs.get("LOAD") == "descriptor" for launch in launches)
    return CachedLaunch(
        made, recipe.settings, given, device, Templates(steps), steps, sized, recipe.planner, descriptors
    )


def trace_variant(
    recipe: CallRecipe, inputs: Sequence[int], made: Plan, variant: Variant, launch: Any, tensors: Mapping[str, Any],
    known: ShapeClass | None = None,
) -> tuple[list[Step], ShapeClass]:  # fmt: skip
    """Return a variant's steps and their shape class. Nothing needs to be compiled."""
    if not isinstance(launch, StepLauncher):
        return [], exact_shape_class(inputs, made.problem, [], {}, f"{made.path} does not describe its launches")
    fresh = launch.fresh(tensors["q"])
    steps = launch.steps({**tensors, **fresh})

    def describe(call: Call, planned: Plan) -> tuple[list[Step], Buffers]:
        launcher = variant.launcher(call)
        if not isinstance(launcher, StepLauncher):
            raise Untraceable(f"{planned.path} does not describe its launches")
        named: dict[str, Any] = {name: getattr(call, name) for name in TENSORS}
        named |= {"out": call.new_out(), "lse": call.new_lse() if call.problem.return_lse else None}
        named |= {name: call.q.new_empty(shape, dtype=dtype) for name, (shape, dtype) in launcher.buffers.items()}
        return launcher.steps({**named, **{name: fresh[name] for name in launcher.each}}), launcher.buffers

    return steps, _sized(recipe, inputs, made, steps, launch.buffers, describe, known)


def cache_variant(
    recipe: CallRecipe, inputs: Sequence[int], made: Plan, given: Sequence[str], variant: Variant,
    launch: Callable[[Mapping[str, Any]], None], tensors: Mapping[str, Any], device: torch.device,
    known: ShapeClass | None = None,
) -> CachedLaunch:  # fmt: skip
    """Return a variant's cached launch: direct if its launcher is a StepLauncher, else by calling the launcher."""
    settings, problem = recipe.settings, made.problem

    def by_name(named: Mapping[str, Any]) -> None:
        launch(variant.views(problem, {**dict.fromkeys(TENSORS), **named}))

    steps, sized = trace_variant(recipe, inputs, made, variant, launch, tensors, known)
    if not isinstance(launch, StepLauncher):
        return CachedLaunch(made, settings, given, device, by_name, [], sized, recipe.planner)
    # `by_name` has its own buffers, for the sizes of this call alone, and runs if no DriverLauncher could be made.
    cached = CachedLaunch(made, settings, given, device, by_name, steps, sized, recipe.planner, each=launch.each)
    if cached.direct is None:
        alone = exact_shape_class(inputs, problem, [], {}, "Triton launches it")
        return CachedLaunch(made, settings, given, device, by_name, [], alone, recipe.planner)
    return cached


def _sized(
    recipe: CallRecipe, inputs: Sequence[int], made: Plan, steps: Sequence[Step], buffers: Buffers,
    describe: Callable[[Call, Plan], tuple[list[Step], Buffers]], known: ShapeClass | None,
) -> ShapeClass:  # fmt: skip
    """Return the shape class of a trace, or of the call's own sizes alone."""
    if known is not None and not known.why:
        with contextlib.suppress(Untraceable):
            _compare(steps, known.steps, buffers, known.buffers)
            return known
    trace = Trace()
    try:
        call = recipe.call(trace.input(number) for number in inputs)
        if call.copied:
            raise Untraceable("a tensor is copied")
        planned = recipe.plan(call)
        if (planned.path, planned.key) != (made.path, made.key):
            raise Untraceable(f"it is planned as {planned.path} {planned.key}, and was as {made.path} {made.key}")
        others, between = describe(call, planned)
        others = [_with_constants(step) for step in others]
        _compare(steps, others, buffers, between)
        for step in others:
            _specialise(step)
        return ShapeClass(trace, planned.problem, others, between)
    except _REFUSALS as error:
        return exact_shape_class(inputs, made.problem, steps, buffers, f"{type(error).__name__}: {error}")


def _with_constants(step: Step) -> Step:
    """Return the step with a kernel's constants and options pinned: it is compiled for their values."""
    constants = constexprs(step.kernel)
    arguments = {name: pin_sizes(value) if name in constants else value for name, value in step.arguments.items()}
    return dataclasses.replace(step, arguments=arguments, options=pin_sizes(dict(step.options)))


def _compare(steps: Sequence[Step], others: Sequence[Step], buffers: Buffers, between: Buffers) -> None:
    """Raise Untraceable if the traced launches are not the call's own at the call's sizes."""
    if plain_sizes({name: shape for name, (shape, _) in between.items()}) != {
        name: tuple(shape) for name, (shape, _) in buffers.items()
    }:
        raise Untraceable("its buffers are others")
    if len(steps) != len(others):
        raise Untraceable("its launches are others")
    for step, other in zip(steps, others, strict=True):
        same = step.kernel is other.kernel and step.roles == other.roles and dict(step.options) == dict(other.options)
        if not same or tuple(step.grid) != plain_sizes(tuple(other.grid)):
            raise Untraceable("a launch is another")
        own_sizes = plain_sizes(list(other.values))
        for name, value, size, known in zip(step.kernel.arg_names, step.values, other.values, own_sizes, strict=True):
            if isinstance(value, torch.Tensor) or hasattr(value, "block_shape"):
                own, its = _layout(value), _layout(size)
                if own is None or own != its:
                    raise Untraceable(f"argument {name} is {its}, and was {own}")
            elif getattr(value, "value", value) != getattr(known, "value", known):
                raise Untraceable(f"argument {name} is {size}, and was {value}")


def _layout(value: Any) -> tuple[Any, ...] | None:
    """Return a descriptor's sizes, strides and block, or a tensor's dtype and number of axes."""
    if hasattr(value, "block_shape"):
        return plain_sizes(tuple(value.shape)), plain_sizes(tuple(value.strides)), tuple(value.block_shape)
    if not isinstance(value, torch.Tensor):
        return None
    return (value.dtype, len(value.shape))


def _specialise(step: Step) -> None:
    """Record Triton's specialisation as guards: integers of 1, multiples of 16, beyond 32 bits; tensors of 2 GiB."""
    general = unspecialised_arguments(step.kernel)
    for name, value in zip(step.kernel.arg_names, step.values, strict=True):
        if isinstance(value, Size):
            size = cast("int", value)
            _ = size > INT32_MAX, size < -INT32_MAX - 1
            _ = name in general or size == 1 or size % POINTER_ALIGNMENT == 0
        elif isinstance(value, SymbolicTensor):
            _ = spans(value) >= TWO_GIB
        elif hasattr(value, "block_shape"):
            _ = [size > INT32_MAX for size in value.shape]
