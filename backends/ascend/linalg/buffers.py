"""Kernel arguments in guarded memory (runtime.c). Child process only: a stray access is caught by a signal handler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from portattn.backends.ascend.linalg.tools import LinalgError
from portattn.schema.tensors import spans

MOST_FAULTS = 256  # as in runtime.c


class Stray(msgspec.Struct, frozen=True):
    """An access outside an argument's memory.

    offset  bytes from the argument's first element
    size    bytes that the argument has
    """

    argument: str
    what: str  # "reads", "writes" or "touches"
    offset: int
    size: int

    def __str__(self) -> str:
        if self.offset < 0:
            return f"{self.what} {self.argument} {-self.offset} bytes before its start"
        return f"{self.what} {self.argument} {self.offset - self.size} bytes after its end"


class _Fault(ctypes.Structure):
    _fields_ = (("buffer", ctypes.c_int32), ("wrote", ctypes.c_int32), ("offset", ctypes.c_int64))


_runtime: ctypes.CDLL | None = None


def load_runtime(make: Callable[[], Path]) -> ctypes.CDLL:
    """Load runtime.c's functions for this process and its kernels, once, and install its signal handler.

    make  compiles the library; it is not needed once it is loaded
    """
    global _runtime
    if _runtime is None:
        loaded = ctypes.CDLL(str(make()), mode=ctypes.RTLD_GLOBAL)
        loaded.guard_buffer.restype = ctypes.c_void_p
        loaded.guard_buffer.argtypes = (ctypes.c_size_t,)
        if loaded.guard_install():
            raise LinalgError("the handler of stray accesses cannot be installed")
        _runtime = loaded
    return _runtime


class Guarded:
    """One launch's buffers."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._held: list[tuple[str, int, torch.Tensor]] = []  # name, address, tensor

    def add(self, name: str, tensor: torch.Tensor) -> int:
        """Address of a copy of what the tensor spans. Raises LinalgError where there is no memory for it."""
        size = spans(tensor)
        address = self._runtime.guard_buffer(size)
        if not address:
            raise LinalgError(f"no guarded memory for the {size} bytes of {name}")
        ctypes.memmove(address, tensor.data_ptr(), size)
        self._held.append((name, address, tensor))
        return int(address)

    def strays(self) -> list[Stray]:
        """Stray accesses so far, each argument's nearest ones to its memory, reads and writes apart."""
        faults = (_Fault * MOST_FAULTS)()
        count = min(self._runtime.guard_faults(faults, MOST_FAULTS), MOST_FAULTS)
        found: dict[tuple[str, str, bool], Stray] = {}
        words = {1: "writes", 0: "reads", -1: "touches"}
        for fault in faults[:count]:
            name, _, tensor = self._held[fault.buffer]
            stray = Stray(name, words[fault.wrote], fault.offset, spans(tensor))
            key = (name, stray.what, fault.offset < 0)
            if key not in found or abs(fault.offset) < abs(found[key].offset):
                found[key] = stray
        for index, (name, _, tensor) in enumerate(self._held):
            if self._runtime.guard_broken(index):
                found.setdefault((name, "writes", True), Stray(name, "writes", -1, spans(tensor)))
        return list(found.values())

    def changed(self) -> list[str]:
        """Names of the arguments whose memory is not what it was."""
        names = []
        for name, address, tensor in self._held:
            size = spans(tensor)
            if ctypes.string_at(address, size) != ctypes.string_at(tensor.data_ptr(), size):
                names.append(name)
        return names

    def give_back(self, names: tuple[str, ...]) -> None:
        """Copy these arguments' memory back into their tensors."""
        for name, address, tensor in self._held:
            if name in names:
                ctypes.memmove(tensor.data_ptr(), address, spans(tensor))


@contextmanager
def guarded(runtime: ctypes.CDLL) -> Iterator[Guarded]:
    """Buffers for one launch; their memory is gone afterwards."""
    try:
        yield Guarded(runtime)
    finally:
        runtime.guard_release()
