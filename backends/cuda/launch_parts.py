"""Parts of the variants' launchers: copies of unfit tensors, TMA descriptors, counters, the launch that merges splits.

Counters in device memory, from which a kernel's blocks draw their work, are 0 between launches. Launches that may
overlap must not share one: a stream has its own, and a captured launch keeps one for its graph."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from portattn.backends.detection import torch_device_properties
from portattn.schema.lowering import FUSED, Step

if TYPE_CHECKING:
    import torch

    from portattn.schema.call import Call
    from portattn.schema.problem import Problem


Launch = Callable[[Mapping[str, Any]], None]


def with_copies(launch: Launch, call: Call, described: Sequence[str], queries: Sequence[str]) -> Launch:
    """Return `launch`, or a launch that first makes copies: of `described` tensors with a stride of 0 (undocumented),
    and of `queries` with a scale of 0 (a row's maximum is taken before scaling, and 0·inf is NaN)."""
    if call.scale != 0.0 and not any(_broadcast(getattr(call, name)) for name in described):
        return launch
    unscaled = dict.fromkeys(queries, call.problem.q_format) if call.scale == 0.0 else {}
    return functools.partial(_launch, launch, tuple(described), unscaled)


def _launch(launch: Launch, described: Sequence[str], unscaled: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
    copies = {name: t.contiguous() if _broadcast(t := tensors[name]) else t for name in described}
    launch({**tensors, **copies, **{name: _unscaled(copies[name], kind) for name, kind in unscaled.items()}})


def _unscaled(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the tensor times 0 (NaN for NaN and infinity). Bytes are int8, or e4m3, which has no infinity."""
    if x.is_floating_point():
        return x * 0.0
    return x * 0 if kind == "int8" else x.where((x & 127) == 127, 0)


def _broadcast(x: torch.Tensor | None) -> bool:
    return x is not None and any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def describe(x: torch.Tensor, *block: int) -> Any:
    """Return a descriptor of a tensor in blocks of these sizes; float32 is unswizzled in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # The stride of an axis of one element is anything: descriptors want a multiple of 16 bytes there too.
    strides = [stride if size > 1 else 16 * x.shape[-1] for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), _layout(block, str(x.dtype)))


@functools.lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: str) -> Any:
    from triton.experimental.gluon import language as gl

    if dtype == "torch.float32":
        return gl.NVMMASharedLayout(0, 32, len(block))
    kinds = {"torch.bfloat16": gl.bfloat16, "torch.int8": gl.int8, "torch.uint8": gl.uint8}
    return gl.NVMMASharedLayout.get_default_for(list(block), kinds.get(dtype, gl.float16))


def make_descriptor(x: torch.Tensor, rows: int, dim: int, before: int = 1) -> Any:
    """Return a descriptor of (B, H, S, D), in blocks of `before` × `rows` × a kernel's width."""
    return describe(x, 1, before, rows, dim)


def flat(x: torch.Tensor, rows: int) -> Any:
    """Return a descriptor of a contiguous float32 matrix by blocks of whole rows."""
    return describe(x, rows, x.shape[1])


_ROLES = {"partial": "partial", "partial_state": "partial_lse", "out": "out", "lse": "lse"}


def merging(problem: Problem, splits: int, tensors: Mapping[str, Any]) -> Step:
    """Return the step that merges `partial` (splits,B,Hq,Sq,Dv) and `partial_lse`, float32, into `out` and `lse`."""
    from portattn.kernels.combine import combine
    from portattn.launch.decode import merging_shape

    p, out = problem, tensors["out"]
    rows = p.query_rows[0] * p.heads_q * p.query_rows[1]
    constants, warps = merging_shape(splits, out.shape[-1])
    arguments = {
        **{name: tensors[role] for name, role in _ROLES.items()}, "sinks": None,
        "o_stride_b": out.stride(0), "o_stride_h": out.stride(1), "o_stride_s": out.stride(2),
        "heads_q": p.heads_q, "seq_q": p.query_rows[1], "rows": rows, "splits": splits, **constants,
        "STATE": "lse", "EXP": "exp", "NATURAL": True, "GRID": "full", "DEPENDENT": True,
    }  # fmt: skip
    return Step(combine, (rows,), arguments, {"num_warps": warps, "launch_pdl": True, **FUSED}, _ROLES)


# Counters that the launches of one stream take in turns. One would do; but a stream may be destroyed while its last
# kernels run, and its handle given to a new one.
TURNS = 64
CAPTURED = 4_096  # counters made beforehand for captured launches
# Numbers from one counter to the next: 16 bytes. For an address that is aligned otherwise Triton compiles anew.
APART = 4


class Counters:
    """The counters of one device; `in_graph` makes a captured launch's counter, which its graph resets."""

    def __init__(
        self, zeros: Callable[[int], torch.Tensor], in_graph: Callable[[], torch.Tensor] | None = None
    ) -> None:
        from portattn.launch import torch_compat  # torch: not where backends are only imported

        self._zeros, self._in_graph, self._lock = zeros, in_graph, threading.Lock()
        self.stream = torch_compat.runtime("cuda").stream
        self._of_stream: dict[int, Iterator[torch.Tensor]] = {}
        self._captured = zeros(CAPTURED * APART)  # never freed: graphs hold addresses in it
        self._left = list(self._captured.split(APART))

    def take(self, stream: int | None) -> torch.Tensor:
        """Return a counter, 0 once the stream's earlier launches are over; `stream` is None in a capture."""
        if stream is not None:
            turns = self._of_stream.get(stream)
            if turns is None:
                made = itertools.cycle(self._zeros(TURNS * APART).split(APART))
                turns = self._of_stream.setdefault(stream, made)
            return next(turns)
        with self._lock:
            if self._left:
                return self._left.pop()
        return self._zeros(1) if self._in_graph is None else self._in_graph()


def lasting_zeros(device: torch.device, count: int) -> torch.Tensor:
    """Return int32 zeros in memory of no graph, made by a new thread: a graph's warm-up owns this one's memory."""
    import torch

    made: list[torch.Tensor] = []

    def make() -> None:
        with torch.cuda.device(device):
            made.append(torch.zeros(count, dtype=torch.int32, device=device))
            torch.cuda.current_stream(device).synchronize()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise RuntimeError(f"no memory for {count} counters on {device}")
    return made[0]


_of_device: dict[int, Counters] = {}
_making = threading.Lock()


def multiprocessors(device: torch.device) -> int:
    """Return a device's multiprocessors; an H100's or H200's if there is no device."""
    found = torch_device_properties("cuda", device.index)
    return int(getattr(found, "multi_processor_count", 132))


def counter(device: torch.device) -> torch.Tensor:
    """Return a counter for one launch on the current device and stream; a meta tensor for the meta device."""
    import torch

    if device.type == "meta":
        return torch.empty(1, dtype=torch.int32, device=device)
    index = device.index
    found = _of_device.get(index)
    capturing = torch.cuda.is_current_stream_capturing()
    in_graph = functools.partial(torch.zeros, 1, dtype=torch.int32, device=device)
    if found is None:
        if capturing:
            return in_graph()
        with _making:
            found = _of_device.get(index)
            if found is None:
                found = _of_device[index] = Counters(functools.partial(lasting_zeros, device), in_graph)
    return found.take(None if capturing else found.stream(index))
