"""prepare(): plan a call once, run it many times, with memory that is there before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import dispatch
from portattn.api.call import fake_result, run_with_autograd
from portattn.api.dynamo_disabled import leave_out, left_out
from portattn.api.execute import run_request
from portattn.api.request import CacheWriter, Request, Result, request_of, settings_for
from portattn.api.signatures import arguments_as_parts, named_arguments
from portattn.api.unknown_arguments import names_of, short_traceback, unknown_argument
from portattn.compile import variants
from portattn.config import current
from portattn.errors import ArgumentError, UnknownArgument
from portattn.launch import cache, has_rows
from portattn.launch.cached_launch import CachedLaunch, results
from portattn.launch.run import DescriptorMemory, device_guard
from portattn.launch.tensor_memory import reader
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.schema.tensors import POINTER_ALIGNMENT
from portattn.validate import wants_gradients
from portattn.validate.checks import check_dense


class Prepared:
    """One planned call, to be run with other data of the same shapes: what a serving loop holds per step shape.

    plan   how it runs
    run    `run(*args, out=None, lse=None, **kwargs)` with the operation's own arguments

    `portattn.prepare` makes one.

    >>> import torch, portattn
    >>> q = torch.randn(1, 2, 5, 16)
    >>> portattn.prepare("attention", q, q, q).plan.path
    'sdpa'

    Partial results of a split, and the memory that descriptors are built in, are allocated once and belong to the
    handle: use one handle on one stream at a time.
    From its second run on, a run of portattn's kernels (the core's or a variant's) allocates nothing when `out` is
    given (and `lse`, where one is returned) and pages come as a tensor (a PageTable's lengths are computed anew each
    time). It never waits for the device unless validate=True asks for it, and can be captured in a CUDA graph, which
    replays with lengths, tables and data changed in place.
    A handle can be copied (`copy.deepcopy`) and saved (`pickle`, `torch.save`), as a part of a module, say. A copy, and
    what is loaded, is prepared again by its first run, on the device of that run's tensors and under the settings of
    then, beside the original's own `backend` and `validate`; until then `plan` is the original's.
    Where no kernel of portattn runs, or q, k or v must be copied first (rows too far apart for 32-bit offsets), a run
    is an ordinary call. At each run a variant copies what its descriptors cannot read as it is: q, k or v with a stride
    of 0, and all of them where the scale is 0.
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
        self._op, self._bind = op, named_arguments(op)
        self._row, self._parts = ROWS[op], arguments_as_parts(op)
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
        """Op with problem, target and path."""
        return f"<portattn.Prepared {self.plan.problem} on {self.plan.target}: {self.plan.path} path>"

    def run(self, *args: Any, out: torch.Tensor | None = None, lse: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Run with these arguments, as the operation itself takes them.

        args, kwargs  the operation's own arguments; they may differ from the prepared call's in data only
        out   where the result goes: contiguous, in the operation's shape, as (B, Hq, Sq, Dv), and q's dtype; allocated
              when None. It shares no memory with q, k and v
        lse   where the LSE goes, float32, as (B, Hq, Sq), if the operation returns one; allocated when None

        Returns what the operation returns: `out`, or (out, lse) with return_lse; of one that fills a cache None.

        Raises ArgumentError where an argument differs from the prepared call's in anything but its data, or `out` or
        `lse` is not as it must be; UnknownArgument for a keyword that neither the operation nor `run` has.

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
        try:
            kind = self._in_c
            if (
                kind is not None and kind.hit is not None and (lse is None or self._returns_lse)
                and not _has_history(out) and not _has_history(lse)
            ):  # fmt: skip
                # What its kind takes of a call is made of the arguments, and no more. A bad `out` is found there.
                tensors, values, lengths = self._parts(*args, **kwargs)
                found = kind.hit(tensors, values, lengths, current(), out, lse, self._memory)
                if found is not None and found is not NotImplemented:
                    return found
            given = self._bind(*args, **kwargs)
        except UnknownArgument as error:  # says that `out` and `lse` are taken, too
            unknown = [name for name in kwargs if name not in names_of(error.op)]
            raise unknown_argument(error.op, unknown, ("out", "lse")) from None
        if self._row.writes and (out is not None or lse is not None):
            name, tensor = ("lse", lse) if out is None else ("out", out)
            limit = f"must be None: {self._op} fills a cache, and has no result"
            raise ArgumentError(self._name, name, type(tensor).__name__, limit)
        with short_traceback:
            found = self._run(given, out, lse)
        return None if self._row.writes else found

    def _run(self, given: dict[str, Any], out: torch.Tensor | None, lse: torch.Tensor | None) -> Result:
        found = self._try_cached(given, out, lse)
        if found is not None:
            return found
        request = request_of(self._op, given)
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

    def _try_cached(self, given: dict[str, Any], out: torch.Tensor | None, lse: torch.Tensor | None) -> Result | None:
        """The result where everything is as it was prepared; None where something is to be looked at. No Request is
        made: that would take longer than all else here."""
        kind = self._kind
        if kind is None or (lse is not None and self.plan.problem.return_lse is False):
            return None
        row, settings = self._row, current()
        if row.arguments:  # a PageTable, say: as tensors. A Request takes the original
            given = dict(given)
            row.load("arguments")(given)
        tensors = tuple([given[name] for name in row.parameters])
        values = (*[given[name] for name in row.fixed], given["backend"], given["validate"])
        lengths = tuple([given[name] for name in row.lengths])
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
        except RuntimeError:  # nested ones have no shape, and others no address. To ask first would cost each run
            check_dense(self._name, name, tensor)
            raise


def _has_history(place: Any) -> bool:
    return place is not None and getattr(place, "requires_grad", False)


def _run(handle: Prepared, args: Any, kwargs: Any) -> Any:
    return handle.run(*args, **kwargs)


leave_out("run", _run, "the run of a portattn handle launches kernels itself: call the operation instead")


_PLACE = (".device", f"'s address, modulo {POINTER_ALIGNMENT}")


def _portable(request: Request) -> dict[str, Any]:
    """Return everything of a request but its data and their place, by the names that its caller uses."""
    found: dict[str, Any] = dict(request.values)
    for name, t in request.named_tensors.items():
        given = isinstance(t, torch.Tensor)
        found[name] = (tuple(t.shape), t.stride(), t.dtype) if given else type(t).__name__
        if given:
            found[f"whether {name} is a view to be negated"] = t.is_neg()
    tensors = [t for t in request.tensors.values() if isinstance(t, torch.Tensor)]
    return found | {"whether gradients are asked for": wants_gradients(*tensors)}


def _placed(request: Request) -> dict[str, Any]:
    """Return the devices of a request's tensors, and of addresses on an accelerator what kernels are compiled for."""
    device, address = _PLACE
    found: dict[str, Any] = {}
    for name, t in request.named_tensors.items():
        if isinstance(t, torch.Tensor):
            found[name + device] = str(t.device)
            if t.device.type != "cpu":
                found[name + address] = t.data_ptr() % POINTER_ALIGNMENT
    return found
