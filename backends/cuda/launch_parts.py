"""Parts of the variants' launchers: copies of unfit tensors, TMA descriptors, arguments of functions, counters, the
launches that merge splits and that find hidden keys.

Counters in device memory, from which a kernel's blocks draw their work, are 0 between launches. Launches that may
overlap must not share one: a stream has its own, and a captured launch keeps one for its graph."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from portattn.backends.cuda.schedules import vector_source
from portattn.backends.detection import torch_device_properties
from portattn.kernels.score_program import SIZES, parse
from portattn.planning.kernel_specs import ceil_div
from portattn.schema import ops
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


def shown_shape(call: Call, keys: int, flags: int) -> tuple[int, ...]:
    """Return the shape of `find_hidden_keys`' result for a call with a mask function: a tile has flags, and its keys.

    It is of one sequence and one head if all have one mask."""
    p, program, lists = call.problem, parse(call.problem.mask_mod), call.block_mask
    assert lists is not None
    sequences, heads = (
        size if program.uses(name) or (size > 1 and stride != 0) else 1
        for name, size, stride in zip("bh", (p.batch, p.heads_q), lists.stride(), strict=False)
    )
    return sequences, heads, ceil_div(p.seq_k, p.block_k) * (p.block_k // keys), flags + keys


def function_arguments(
    p: Problem, shown: tuple[int, ...] | None, tensors: Mapping[str, Any], axes: str = "qk"
) -> dict[str, Any]:
    """Return a kernel's arguments about functions and lists of blocks but tensors; None for those that it lacks.

    axes: of its tiles of scores, queries and keys."""
    lists = tensors.get("block_mask")
    sequences, heads = shown[:2] if shown else (1, 1)
    sizes = [size for name in ops.CAPTURED if tensors.get(name) is not None for size in tensors[name].shape]
    blocks = ((p.seq_q, p.block_q), (p.seq_k, p.block_k)) if p.block_mask else ()
    ends = [ceil_div(length, block) * block for length, block in blocks]
    long = tuple(n for n, size in enumerate(sizes) if ends and size >= ends[0] and size >= ends[1])
    return {
        **{f"list_{axis}": None if lists is None else lists.stride(n) for n, axis in enumerate("bhq")},
        "shown_b": heads * (sequences > 1) if shown else None, "shown_h": 1 * (heads > 1) if shown else None,
        **{f"size_{n}": sizes[n] if n < len(sizes) else None for n in range(SIZES)},
        "LISTED_Q": p.block_q if p.block_mask else 0, "LISTED_K": p.block_k if p.block_mask else 0,
        "SCORE_MOD": vector_source(p, p.score_mod, long),
        "MASK_MOD": vector_source(p, p.mask_mod, long, axes),
    }  # fmt: skip


def finding(
    kernel: Any, p: Problem, shown: tuple[int, ...], keys: int, tensors: Mapping[str, Any], own: Mapping[str, Any]
) -> Step:
    """Return the step before a forward that finds the keys which no query attends.

    kernel: `find_hidden_keys`; keys: of a tile; own: `function_arguments`."""
    sequences, heads, tiles, _ = shown
    roles = {"shown": "shown", "lists": "block_mask", **{name: name for name in ops.CAPTURED}}
    arguments = {
        **{name: tensors.get(role) for name, role in roles.items()},
        **{name: own[name] for name in kernel.arg_names if name in own},
        "heads": heads, "seq_q": p.seq_q, "seq_k": p.seq_k, "down": ceil_div(p.seq_q, p.block_q),
        "across": ceil_div(p.seq_k, p.block_k), "KEYS": keys,
    }  # fmt: skip
    return Step(kernel, (tiles, sequences * heads), arguments, {"num_warps": 4, **FUSED}, roles)


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
