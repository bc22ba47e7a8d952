"""CPU tensors that count as an H100's: plans are for one, calls are cached, fakedriver's library takes the launches.
For programs that run with that library; they install it before Triton is imported."""

import ast
from collections.abc import Callable
from typing import Any

import fakedriver
import opcalls
import torch

import portattn.launch.cached_launch
from portattn.api import backward, dispatch
from portattn.backends.cuda import launch_parts
from portattn.launch import torch_compat, triton_compat
from portattn.planning import core_path
from portattn.planning.registry import parse_target


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def pretend(
    current: Callable[[], int | None] = lambda: None, stream: Callable[[int], int] = lambda index: 7,
    empty: Callable[..., torch.Tensor] = _empty, zeros: Callable[[int], torch.Tensor] = _zeros,
) -> None:  # fmt: skip
    """Calls on CPU tensors are planned for an H100 and cached.

    current  index of the current device, None as a CPU tensor's is
    stream   the current stream of a device
    empty    allocates what a cached call needs, from a shape, strides and a dtype
    zeros    allocates memory that variants' counters lie in"""
    import triton

    target = parse_target("cuda:sm_90", f"triton=={triton.__version__}")
    dispatch.detect_target = lambda device_type, index: (target, "")  # type: ignore[assignment]
    backward.own_path = lambda backend, device_type: core_path.own_path(backend, "cuda")  # type: ignore[assignment]
    fakedriver.keep_everywhere()
    runtime = torch_compat.Runtime(current=current, stream=stream, empty=empty)
    torch_compat.runtime = portattn.launch.cached_launch.runtime = lambda device_type: runtime  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False  # a torch without CUDA has none
    launch_parts._of_device[None] = launch_parts.Counters(zeros)  # type: ignore[index]


def leave_bodies_out() -> None:
    """From now on the core's kernels are compiled with empty bodies, in a tenth of a second and not in two or ten. What
    is launched follows from their signatures. Without bodies none asks for shared memory. The variants' kernels keep
    theirs, which say how much memory for descriptors they need. No code is assembled, as the library would not look at
    it. All goes into Triton's cache as ever: for a process with a cache of its own."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    from portattn.kernels.records import _Rewriting
    from portattn.launch.run import KERNELS

    def without_body(parse: Callable[..., ast.Module]) -> Callable[..., ast.Module]:
        def parsed(*given: Any) -> ast.Module:
            module = parse(*given)
            if module.body[0].name in KERNELS:
                module.body[0].body = [ast.copy_location(ast.Pass(), module.body[0].body[-1])]
            return module

        return parsed

    JITFunction.parse = without_body(JITFunction.parse)
    _Rewriting.tree = without_body(_Rewriting.tree)  # type: ignore[method-assign]
    CUDABackend.make_cubin = lambda self, src, metadata, options, capability: b"none"


class Chip:
    """The chip, and what is recorded of calls on it.

    current         index of the current device, None as a CPU tensor's is
    stream          the current stream
    allocated       what cached calls allocated, in order
    counters        memory that variants' counters lie in
    allocating      called before each of them, where one is set: what another thread could do meanwhile
    compiled_calls  one item for every call that was planned"""

    def __init__(self, fake: fakedriver.Fake) -> None:
        self.fake = fake
        self.current: int | None = None
        self.stream = 7
        self.allocated: list[torch.Tensor] = []
        self.counters: list[torch.Tensor] = []
        self.counted: set[int] = set()  # addresses of counters
        self.allocating: Callable[[], None] | None = None
        self.compiled_calls: list[str] = []
        pretend(lambda: self.current, lambda index: self.stream, self._allocate, self._zeros)
        compile_kernel = triton_compat.compiled_kernel

        def described(*given: Any) -> Any:
            found = compile_kernel(*given)
            fake.describe(found.function, triton_compat.ptx_sizes(found.asm["ptx"]))
            return found

        triton_compat.compiled_kernel = described
        run = dispatch.run
        dispatch.run = lambda *given: self.compiled_calls.append(given[0].problem.op) or run(*given)  # type: ignore

    def _allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.allocating is not None:
            self.allocating()
        self.allocated.append(torch.empty_strided(shape, strides, dtype=dtype))
        return self.allocated[-1]

    def _zeros(self, count: int) -> torch.Tensor:
        self.counters.append(torch.zeros(count, dtype=torch.int32))
        self.counted |= {one.data_ptr() for one in self.counters[-1].split(launch_parts.APART)}
        return self.counters[-1]

    def normal(self, launches: list[fakedriver.Launch], arguments: dict[str, Any]) -> list[list[Any]]:
        """Launches with names in place of the addresses of what was allocated, since each call allocates anew."""
        # Buffers lie in one piece of memory, each from a multiple of 256 bytes on.
        places = dict.fromkeys(self.counted, "counter") | {
            t.data_ptr() + offset: f"allocated {i}" + (f" + {offset}" if offset else "")
            for i, t in enumerate(self.allocated)
            for offset in range(0, max(t.untyped_storage().nbytes(), 1), 256)
        }
        places |= {t.data_ptr(): n for n, t in arguments.items() if isinstance(t, torch.Tensor)}
        seen = []
        for launch in launches:
            words = [launch.parameters[i : i + 8] for i in range(0, len(launch.parameters), 4)]
            named = [places.get(int.from_bytes(w, "little"), "") for w in words]
            plain = bytes(launch.parameters)
            for i, n in enumerate(named):
                if n:
                    plain = plain[: 4 * i] + b"\xff" * 8 + plain[4 * i + 8 :]
            seen.append([*launch[:5], launch.stream, [n for n in named if n], plain.hex()])
        return seen

    def once(self, op: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """One call's launches, the shapes of its results, and whether they are what was allocated."""
        self.allocated.clear()
        self.fake.library.fake_clear()
        result = opcalls.perform(op, arguments)
        results = result if isinstance(result, tuple) else (result,)
        ours = [any(r is t for t in self.allocated) for r in results]
        layouts = [(tuple(r.shape), r.stride()) for r in results]
        return self.normal(self.fake.launches(), arguments), layouts, ours
