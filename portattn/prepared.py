"""prepare(): plan a call once, run it many times, with memory that is there before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from portattn import dispatch, fastpath
from portattn.errors import ArgumentError
from portattn.launch import has_rows, kernel_calls
from portattn.launch.run import DescriptorMemory
from portattn.planned import Plan
from portattn.request import Request, Result, collecting, finished
from portattn.validate import wants_gradients


class Prepared:
    """One planned call, to be run with other data of the same shapes: what a serving loop holds per step shape.

    plan   how it runs
    run    `run(*args, out=None, lse=None, **kwargs)` with the operation's own arguments

    Partial results of a split, and the memory that descriptors are built in, are allocated once and belong to the
    handle: use one handle on one stream at a time.
    From its second run on, a run of the core kernels allocates nothing when `out` is given (and `lse`, where one is
    returned) and pages come as a tensor (a PageTable's lengths are computed anew each time). It never waits for the
    device unless validate=True asks for it, and can be captured in a CUDA graph, which replays with lengths, tables and
    data changed in place.
    Where no kernel of portattn runs, or q, k or v must be copied first (rows too far apart for 32-bit offsets), a run
    is an ordinary call.
    """

    def __init__(self, op: Callable[..., Any], request: Request) -> None:
        call = request.build()
        self._op, self._settings, self._key = op, request.settings, request.key()
        self._kept: fastpath.Kept | None = None
        self.plan: Plan = dispatch.plan_call(call, request.settings)
        self._name = self.plan.problem.op
        self._types = tuple(map(type, request.values.values()))
        self._description = _description(request)
        self._out_shape, self._lse_shape = fastpath.results(self.plan.problem)
        q = request.tensors["q"]
        if not self.plan.kernel or self._key is None or call.copied or not has_rows(self.plan):
            return
        call.dry = False
        target, _ = dispatch.detect_target(q.device.type, q.device.index)
        launches, out, lse = kernel_calls(self.plan, call, target.arch.cores)
        if dispatch.unusable(self.plan, launches, q, target, request.settings) is not None:
            # It must not run here. Running it through dispatch plans again, warns, and takes the next path.
            self.plan = dispatch.plan_call(request.build(), request.settings)
            return
        self._kept = fastpath.Kept(self.plan, request.settings, launches, out, lse)
        self._buffers = self._kept.buffers(q)
        self._memory = DescriptorMemory(q.device, held={})

    def run(
        self, *args: Any, out: torch.Tensor | None = None, lse: torch.Tensor | None = None, **kwargs: Any
    ) -> Result:
        """Run with these arguments, as the operation itself takes them.

        out   where the result goes: contiguous, in the operation's shape and q's dtype; allocated when None
        lse   where the LSE goes, float32, if the operation returns one

        Raises ArgumentError where an argument differs from the prepared call's in anything but its data.
        """
        with collecting() as requests:
            self._op(*args, **kwargs)
        request = requests[0]
        self._check(request)
        q = request.tensors["q"]
        self._check_result("out", out, self._out_shape, q)
        self._check_result("lse", lse, self._lse_shape, q)
        if lse is not None and not request.return_lse:
            raise ArgumentError(self._name, "lse", tuple(lse.shape), "return_lse is False: none is computed")
        if self._kept is not None:
            if self._settings.validate == "always":
                request.build()  # reads lengths and ids back, as asked
            dispatch.note(self.plan)
            found = self._kept(request.tensors, out, lse, self._buffers, self._memory)
            return found if request.return_lse else found[0]  # type: ignore[return-value]
        kept = None if self._key is None else dispatch.repeat(self._key, request.settings, request.tensors)
        if kept is None:
            call = request.build()
            result = finished(call, *dispatch.run(call, request.settings, self._key))
        else:
            result = kept if request.return_lse else kept[0]  # type: ignore[assignment]
        values = result if isinstance(result, tuple) else (result,)
        given = [
            value if place is None else place.copy_(value) for place, value in zip((out, lse), values, strict=False)
        ]
        return (given[0], given[1]) if request.return_lse else given[0]

    def _check(self, request: Request) -> None:
        if request.settings != self._settings:
            for name in ("validate", "backend", *request.settings.__struct_fields__):
                now, was = getattr(request.settings, name), getattr(self._settings, name)
                if now != was:
                    raise ArgumentError(self._name, name, now, f"the call was prepared with {was!r}")
        # Types first: a value that is no plain one (a tensor, say) may not even compare.
        if tuple(map(type, request.values.values())) == self._types and request.key() == self._key is not None:
            return
        now = _description(request)
        for name, was in self._description.items():
            if type(now[name]) is not type(was) or now[name] != was:
                raise ArgumentError(self._name, name, now[name], f"the call was prepared with {was!r}")

    def _check_result(self, name: str, tensor: Any, shape: tuple[int, ...], q: torch.Tensor) -> None:
        if tensor is None:
            return
        dtype = q.dtype if name == "out" else torch.float32
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            given = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ArgumentError(self._name, name, given, f"must be a torch.Tensor of {shape}, {dtype}")
        if tensor.device != q.device or not tensor.is_contiguous() or tensor.data_ptr() % fastpath.POINTER_ALIGNMENT:
            limit = f"must be contiguous on {q.device}, from a multiple of {fastpath.POINTER_ALIGNMENT} bytes on"
            raise ArgumentError(self._name, name, (str(tensor.device), tensor.stride()), limit)


# What the caller knows tensors and the other arguments by, where kernels have other names or none.
_CACHE = {"k": "k_cache", "v": "v_cache"}
_TENSORS = {
    "decode_attention": _CACHE,
    "paged_attention": {"k": "k_pages", "v": "v_pages"},
    "sparse_attention": _CACHE | {"magicpig_bits": "magicpig's K", "magicpig_tables": "magicpig's L"},
    "mla_attention": {"q": "q_nope", "k": "kv_pages", "v": "kv_pages"},
}


def _description(request: Request) -> dict[str, Any]:
    """Everything of a request but its data, by the names that its caller uses."""
    names = _TENSORS.get(request.op, {})
    found: dict[str, Any] = dict(request.values)
    for name, t in request.tensors.items():
        given, name = isinstance(t, torch.Tensor), names.get(name, name)
        found[name] = (tuple(t.shape), t.stride(), t.dtype, str(t.device)) if given else type(t).__name__
        if given and t.device.type != "cpu":
            found[f"{name}'s address, modulo {fastpath.POINTER_ALIGNMENT}"] = t.data_ptr() % fastpath.POINTER_ALIGNMENT
    tensors = [t for t in request.tensors.values() if isinstance(t, torch.Tensor)]
    return found | {"whether gradients are asked for": wants_gradients(*tensors)}
