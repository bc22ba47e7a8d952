"""Calls before they run: `plan`, `explain`, and `prepare`: plan once, run many times in memory allocated before."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from portattn.api import dispatch
from portattn.api.argument_errors import names_of, short_traceback, unknown_argument
from portattn.api.call import are_jagged, fake_result, packed, plan_request, run_with_autograd
from portattn.api.execute import run_request
from portattn.api.request import CacheWriter, Request, Result, checked_request, settings_for
from portattn.api.signatures import Parts, arguments_as_parts, request_of
from portattn.api.transform_checks import are_transformed, leave_out, left_out
from portattn.compile import variants
from portattn.config import current
from portattn.errors import ArgumentError, TracingError, UnknownArgument
from portattn.launch import cache, has_rows
from portattn.launch.cached_launch import CachedLaunch, results
from portattn.launch.native import reader
from portattn.launch.run import DescriptorMemory, device_guard
from portattn.planning.planner import plan as plan_problem
from portattn.planning.registry import parse_target
from portattn.schema.ops import PUBLIC, ROWS, OpRow
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.schema.tensors import POINTER_ALIGNMENT
from portattn.schema.toolchain import Toolchain
from portattn.validate import wants_gradients
from portattn.validate.checks import check_dense


@functools.cache
def _result_of(op: str) -> tuple[Callable[..., torch.Tensor], tuple[int, ...]]:
    """Return the function that makes a result of an operation's tensors and values, and their places among these."""
    row = ROWS[op]
    if not row.returns:
        return (lambda out: out), (row.parameters.index("out"),)
    function, names = row.load("returns"), (*row.parameters, *row.fixed)
    return function, tuple(map(names.index, inspect.signature(function).parameters))


def _filled(row: OpRow, parts: Parts) -> torch.Tensor | None:
    """Return the result of an operation that filled its `out`, None if it filled a cache."""
    if not row.allocates:
        return None
    function, places = _result_of(row.name)
    given = (*parts[0], *parts[1])
    return function(*(given[place] for place in places))


class Prepared:
    """One planned call, to be run with other data of the same shapes: a serving loop holds one per step shape.

    Attributes:
        plan: how it runs
        run: `run(*args, out=None, lse=None, **kwargs)` with the operation's own arguments

    `portattn.prepare` makes one.

    Examples:
        >>> import torch, portattn
        >>> q = torch.randn(1, 2, 5, 16)
        >>> portattn.prepare("attention", q, q, q).plan.path
        'sdpa'

    Partial results of a split and the memory of descriptors are allocated once and belong to the handle: use one handle
    on one stream at a time. From its second run on, a run of portattn's kernels (the core's or a variant's) allocates
    nothing if `out` (and `lse`, if returned) is given and pages come as a tensor (a PageTable's lengths are computed
    each time). It waits for the device only with validate=True, and can be captured in a CUDA graph, which replays with
    lengths, tables and data changed in place.

    A handle can be copied (`copy.deepcopy`) and saved (`pickle`, `torch.save`). The first run of a copy or a loaded
    handle prepares it again, on the device of the run's tensors and under the settings of then, beside the original's
    own `backend` and `validate`; until then `plan` is the original's.

    If no kernel of portattn runs, or q, k or v must be copied first (rows too far apart for 32-bit offsets), a run is
    an ordinary call. At each run a variant copies tensors that its descriptors cannot read: q, k or v with a stride of
    0, and all of them if the scale is 0.
    """

    plan: Plan
    _in_c: cache.CallKey | None  # its `hit` looks at all of a run, places for results included
    _cached: CachedLaunch | None
    _kind: cache.CallKey | None

    def __init__(self, request: Request) -> None:
        self._asked = request.asked
        self._prepare(request)

    def _prepare(self, request: Request) -> None:
        values, tensors = request.values, request.tensors
        if values.get("dropout_p") and tensors["dropout_seed"] is None:
            limit = "must be given where a call that drops is prepared: its runs drop the same"
            raise ArgumentError("prepare", "dropout_seed", None, limit)
        call = request.build()
        q = request.tensors["q"]
        self._describe(request.op, dispatch.plan_call(call, request.settings), call.dtype, q.device)
        self._settings, self._description = request.settings, _portable(request) | _placed(request)
        self._restored = False
        ours = self.plan.kernel or variants.variant_of(self.plan) is not None
        if call.problem.needs_grad:  # a run is a node of autograd's graph, as a plain call is
            return
        if not ours or not request.launched_by_address() or call.copied or not has_rows(self.plan):
            return
        # The plan skips candidates that failed here. A run by another path then warns, as a plain call does.
        caching = CacheWriter(request, only=True)
        self.plan, self._cached = dispatch.prepare_call(call, request.settings, caching)
        if self._cached is None:
            return
        self._sizes = self._cached.sizes
        with device_guard(q):
            self._memory = self._cached.memory(self._sizes)
        self._descriptors = DescriptorMemory(q.device, held={})
        if request.cacheable():
            caching.kind.add(self._cached)
            self._kind = caching.kind
            if reader() is not None and not self._row.writes:
                self._in_c = caching.kind

    def _describe(self, op: str, plan: Plan, dtype: torch.dtype, device: torch.device | None) -> None:
        self._op, self._row, self._parts = op, ROWS[op], arguments_as_parts(op)
        self._in_c = self._cached = self._kind = None
        self.plan = plan
        self._name = f"prepare({plan.problem.op!r}).run"  # in errors
        self._out_shape, self._lse_shape = results(plan.problem)
        self._returns_lse = plan.problem.return_lse
        self._dtype, self._device = dtype, device

    def __getstate__(self) -> tuple[Any, ...]:
        portable = {name: value for name, value in self._description.items() if not name.endswith(_PLACE)}
        return self._op, self.plan, self._dtype, portable, self._asked

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        import portattn

        op, plan, dtype, self._description, self._asked = state
        getattr(portattn, op)  # a process that loads a handle first has not imported the operation's signature
        self._describe(op, plan, dtype, None)
        # The first run's tensors are there to prepare with: no memory as large as theirs is allocated for that.
        self._restored = True

    def __repr__(self) -> str:
        return f"<portattn.Prepared {self.plan.problem} on {self.plan.target}: {self.plan.path} path>"

    def run(self, *args: Any, out: torch.Tensor | None = None, lse: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Run with these arguments, as the operation itself takes them.

        Args:
            *args, **kwargs: the operation's own arguments; they may differ from the prepared call's in data only
            out: memory for the result: contiguous, in the operation's shape, as (B, Hq, Sq, Dv), and q's dtype;
                allocated when None. It shares no memory with q, k and v
            lse: memory for the LSE, float32, as (B, Hq, Sq), if the operation returns one; allocated when None

        Returns:
            The operation's result: `out`, or (out, lse) with return_lse; None if it fills a cache.

        Raises:
            ArgumentError: An argument differs from the prepared call's in anything but its data, or `out` or `lse` has
                another shape, dtype or device.
            UnknownArgument: Neither the operation nor `run` has the keyword.

        Examples:
            >>> import torch, portattn
            >>> q = torch.randn(1, 2, 5, 16)
            >>> handle = portattn.prepare("attention", q, q, q)
            >>> other, out = torch.randn(1, 2, 5, 16), torch.empty(1, 2, 5, 16)
            >>> handle.run(other, q, q, out=out) is out
            True
            >>> torch.equal(out, portattn.attention(other, q, q))
            True
        """
        if torch.compiler.is_dynamo_compiling():
            return left_out["run"](self, args, kwargs)
        if self._row.allocates and out is not None:  # an argument of the operation
            kwargs["out"], out = out, None
        try:
            parts = self._parts(*args, **kwargs)
            kind = self._in_c
            if (
                kind is not None and kind.hit is not None and (lse is None or self._returns_lse)
                and not _has_history(out) and not _has_history(lse)
            ):  # fmt: skip
                found = kind.hit(*parts, current(), out, lse, self._memory)  # a bad `out` is found there
                if found is not None and found is not NotImplemented:
                    return found
        except UnknownArgument as error:  # says that `out` and `lse` are taken, too
            unknown = [name for name in kwargs if name not in names_of(error.op)]
            raise unknown_argument(error.op, unknown, ("out", "lse")) from None
        if self._row.writes and (out is not None or lse is not None):
            name, tensor = ("lse", lse) if out is None else ("out", out)
            limit = f"must be None: {self._op} fills a cache, and has no result"
            raise ArgumentError(self._name, name, type(tensor).__name__, limit)
        with short_traceback:
            found = self._run(parts, out, lse)
        return _filled(self._row, parts) if self._row.writes else found

    def _run(self, parts: Parts, out: torch.Tensor | None, lse: torch.Tensor | None) -> Result:
        found = self._try_cached(parts, out, lse)
        if found is not None:
            return found
        request = checked_request(self._op, *parts)
        shapes = fake_result(request)
        self._check(request)
        if self._restored and shapes is None:
            self._prepare(request)
        self._check_results(out, lse)
        if lse is not None and not request.return_lse:
            raise ArgumentError(self._name, "lse", tuple(lse.shape), "return_lse is False: none is computed")
        if shapes is None and self._cached is not None:
            if self._settings.validate == "always":
                request.build()  # reads lengths and ids back, as asked
            dispatch.set_last_plan(self.plan)
            present = [tensor for tensor in request.tensors.values() if tensor is not None]
            return self._again(present, [tensor.data_ptr() for tensor in present], out, lse)
        result: Any = shapes
        if shapes is None:
            result = run_request(request) if self._row.writes else run_with_autograd(request)
        values = result if isinstance(result, tuple) else (result,)
        places = [
            value if place is None else place.copy_(value) for place, value in zip((out, lse), values, strict=False)
        ]
        return (places[0], places[1]) if request.return_lse else places[0]

    def _try_cached(self, parts: Parts, out: torch.Tensor | None, lse: torch.Tensor | None) -> Result | None:
        """Return the result if everything is as prepared, else None. A Request would take longer than all else here."""
        kind = self._kind
        if kind is None or (lse is not None and self.plan.problem.return_lse is False):
            return None
        settings, (tensors, values, lengths) = current(), parts
        if kind.hit is not None and isinstance(tensors[0], torch.Tensor):
            self._check_results(out, lse)
            done: Any = kind.hit(tensors, values, lengths, settings, out, lse, self._memory)
            if done is not NotImplemented:
                return done
        found = kind.match(tensors, values, lengths, settings)
        if found is None:
            return None
        among, addresses, _ = found
        self._check_results(out, lse)
        dispatch.set_last_plan(self.plan)
        return self._again(among, addresses, out, lse)

    def _again(
        self, given: Sequence[torch.Tensor], addresses: list[int], out: torch.Tensor | None, lse: torch.Tensor | None
    ) -> Result:
        assert self._cached is not None
        found, sums = self._cached(given, addresses, self._sizes, out, lse, self._memory, self._descriptors)
        return found if sums is None else (found, sums)

    def _check(self, request: Request) -> None:
        settings = settings_for(self._op, *self._asked) if self._restored else self._settings
        if request.settings != settings:
            for name in ("validate", "backend", *request.settings.__struct_fields__):
                now, was = getattr(request.settings, name), getattr(settings, name)
                if now != was:
                    raise ArgumentError(self._name, name, now, f"the call was prepared with {was!r}")
        now = _portable(request) | _placed(request)
        for name, was in self._description.items():
            if not cache.identical(now[name], was):
                raise ArgumentError(self._name, name, now[name], f"the call was prepared with {was!r}")

    def _check_results(self, out: Any, lse: Any) -> None:
        if out is not None:
            self._check_result("out", out, self._out_shape, self._dtype)
        if lse is not None:
            self._check_result("lse", lse, self._lse_shape, torch.float32)

    def _check_result(self, name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        try:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
                check_dense(self._name, name, tensor)
                given = (
                    (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                )
                raise ArgumentError(self._name, name, given, f"must be a torch.Tensor of {shape}, {dtype}")
            where = self._device or tensor.device
            if tensor.device != where or not tensor.is_contiguous() or tensor.data_ptr() % POINTER_ALIGNMENT:
                check_dense(self._name, name, tensor)
                limit = f"must be contiguous on {where}, from a multiple of {POINTER_ALIGNMENT} bytes on"
                shown = (str(tensor.device), tensor.stride())
                raise ArgumentError(self._name, name, shown, limit + " (shown are its device and strides)")
            if self._cached is not None and tensor.requires_grad:
                limit = "must not require grad: autograd would not learn what a kernel writes into it"
                raise ArgumentError(self._name, name, "requires_grad", limit)
        except RuntimeError:  # nested tensors have no shape, others no address; an earlier check would cost each run
            check_dense(self._name, name, tensor)
            raise


def _has_history(place: Any) -> bool:
    return place is not None and getattr(place, "requires_grad", False)


def _run(handle: Prepared, args: Any, kwargs: Any) -> Any:
    return handle.run(*args, **kwargs)


leave_out("run", _run, "the run of a portattn handle launches kernels itself: call the operation instead")


_PLACE = (".device", f"'s address, modulo {POINTER_ALIGNMENT}")


def _portable(request: Request) -> dict[str, Any]:
    """Return all of a request but its data and their place, by the caller's names."""
    found: dict[str, Any] = dict(request.values)
    for name, t in request.named_tensors.items():
        given = isinstance(t, torch.Tensor)
        found[name] = (tuple(t.shape), t.stride(), t.dtype) if given else type(t).__name__
        if given:
            found[f"whether {name} is a view to be negated"] = t.is_neg()
    tensors = [t for t in request.tensors.values() if isinstance(t, torch.Tensor)]
    return found | {"whether gradients are asked for": wants_gradients(*tensors)}


def _placed(request: Request) -> dict[str, Any]:
    """Return the devices of a request's tensors and, on an accelerator, the alignment of their addresses."""
    device, address = _PLACE
    found: dict[str, Any] = {}
    for name, t in request.named_tensors.items():
        if isinstance(t, torch.Tensor):
            found[name + device] = str(t.device)
            if t.device.type != "cpu":
                found[name + address] = t.data_ptr() % POINTER_ALIGNMENT
    return found


_PLANNERS = ("plan", "explain")  # they take a Problem too


def plan(op: str | Problem, *args: Any, **kwargs: Any) -> Plan:
    """Plan a call without running it.

    Args:
        op: the operation's name, "attention" say; or a Problem
        *args, **kwargs: the operation's own arguments, planned for the tensors' device; or for another machine, which
            need not be here, with two keywords more: target="h100", a name that `portattn.target` takes or a Target,
            and toolchain="triton==3.6.0" (None: this machine's). Of a Problem these two alone. Compile records of this
            machine's cache are not consulted where a target is given

    Returns:
        The Plan: path, kernel, quirks applied, and a reason for each rejected path. Nothing is launched.

    Raises:
        ArgumentError: The call would raise it.
        UnknownArgument: A keyword is unknown.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        QuirkConflict: The registry contradicts itself.

    Examples:
        >>> import torch, portattn
        >>> q = torch.randn(1, 8, 16, 64)
        >>> portattn.plan("attention", q, q, q, causal=True).path
        'sdpa'
        >>> problem = portattn.Problem(batch=1, heads_q=8, heads_k=8, seq_q=16, seq_k=16, head_dim=64)
        >>> portattn.plan(problem, portattn.target("rocm:gfx942", "triton==3.6.0")).kernel
        'dense_forward'
        >>> half = q.half()
        >>> portattn.plan("attention", half, half, half, target="h100", toolchain="triton==3.6.0").target
        'cuda:sm_90'
    """
    with short_traceback:
        return _planned("plan", op, args, kwargs)


def explain(op: str | Problem, *args: Any, **kwargs: Any) -> str:
    """Return `plan(...)` as text for people: path, kernel, applied quirks, and the reason for each rejected path.

    Args:
        op: as of `plan`
        *args, **kwargs: as of `plan`

    Returns:
        The text, several lines: `Plan.explain` of the plan.

    Raises:
        ArgumentError: The call would raise it.
        UnknownArgument: A keyword is unknown.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        QuirkConflict: The registry contradicts itself.

    Examples:
        >>> import torch, portattn
        >>> q = torch.randn(1, 8, 16, 64)
        >>> print(portattn.explain("attention", q, q, q).splitlines()[0])
        attention q (1,8,16,64) kv (1,8,16,64) fp32
    """
    with short_traceback:
        return _planned("explain", op, args, kwargs).explain()


def prepare(op: str, *args: Any, **kwargs: Any) -> Prepared:
    """Plan a call, compile its kernels and allocate its partial results: a handle whose `run` does the rest.

    Args:
        op: the operation's name, "paged_attention" say
        *args, **kwargs: the operation's own arguments; later runs may differ in data only, not in shapes, strides or
            types

    Returns:
        A Prepared: `handle.run(...)` takes the same arguments, and `out=` and `lse=`.

    Memory: the handle holds the partial results of a split (`decode_attention` says how many), and no tensor of the
    call.

    Raises:
        ArgumentError: The call would raise it.
        UnknownArgument: A keyword is unknown.
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        QuirkConflict: The registry contradicts itself.

    Examples:
        >>> import torch, portattn
        >>> q, k, v = torch.randn(3, 2, 8, 16, 64).unbind()
        >>> handle = portattn.prepare("attention", q, k, v, causal=True)
        >>> out = torch.empty_like(q)
        >>> handle.run(q, k, v, causal=True, out=out) is out
        True
        >>> torch.equal(out, portattn.attention(q, k, v, causal=True))
        True
    """
    with short_traceback:
        return Prepared(make_request("prepare", op, args, kwargs))


def _planned(asker: str, op: str | Problem, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    if isinstance(op, Problem):
        return plan_problem(op, _target_of_problem(asker, args, kwargs), settings=current())
    elsewhere = {name: kwargs.pop(name) for name in ("target", "toolchain") if name in kwargs}
    request = make_request(asker, op, args, kwargs)
    return plan_request(request, _target(asker, **elsewhere) if elsewhere else None)


def _target_of_problem(asker: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Target:
    given = dict(zip(("target", "toolchain"), args, strict=False))
    for name in filter(kwargs.__contains__, given):
        raise ArgumentError(asker, name, _briefly(kwargs[name]), "must be given once, and is given by position too")
    given |= kwargs
    if len(args) > 2 or "target" not in given or not given.keys() <= {"target", "toolchain"}:
        limit = f"must be a target and a toolchain: {asker}(problem, target, 'triton==3.6.0')"
        raise ArgumentError(asker, "arguments", (*(_briefly(value) for value in args), *kwargs), limit)
    return _target(asker, **given)


def _target(asker: str, target: Any = None, toolchain: Any = None) -> Target:
    if toolchain is not None and not isinstance(toolchain, (str, Toolchain)):
        limit = "must be a text, as 'triton==3.6.0', a Toolchain, or None for this machine's"
        raise ArgumentError(asker, "toolchain", _briefly(toolchain), limit)
    if isinstance(target, Target):
        if toolchain is not None:
            limit = f"goes with a target's name: {target} has its own"
            raise ArgumentError(asker, "toolchain", str(toolchain), limit)
        return target
    if not isinstance(target, str):
        limit = "must be a target's name, as `portattn doctor` lists them, or a Target of portattn.target(name)"
        raise ArgumentError(asker, "target", _briefly(target), limit)
    try:
        return parse_target(target, toolchain)
    except ArgumentError as error:
        if error.argument == "toolchain":
            raise ArgumentError(asker, "toolchain", toolchain, error.limit) from None
        raise ArgumentError(asker, "target", target, error.limit) from None


def _briefly(value: object) -> object:
    """Return a value as an error shows it: a target by its name, a large object by its type."""
    if isinstance(value, Target):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float)) else type(value).__name__


def make_request(asker: str, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
    if not isinstance(op, str) or op not in PUBLIC:
        problem = "a Problem or " if asker in _PLANNERS else ""
        given = type(op).__name__ if isinstance(op, torch.Tensor) else op  # not a page of numbers
        raise ArgumentError(asker, "op", given, f"must be {problem}one of {', '.join(PUBLIC)}")
    parts = arguments_as_parts(op)(*args, **kwargs)
    if asker in _PLANNERS and op == "attention" and are_jagged(*parts[0][:3]):
        request = request_of("varlen_attention", **packed(*parts[:2]))
    else:
        request = checked_request(op, *parts)
    if are_transformed(request.tensors.values()):
        raise TracingError(f"{asker}: torch.func has the tensors of this call. Ask outside of the transform")
    return request
