"""Global memory: the caller's arrays and tensors at 64-bit addresses, loads and stores of elements, and atomics.

Source of the atomics: AMD "Instinct MI300" ISA reference, "MUBUF", "FLAT, GLOBAL" and "DS" atomics; "RDNA4" for the
new names.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import softfloat
from portattn.backends.rocm.emulator.amdgpu.errors import BadLaunch, UnknownInstruction
from portattn.backends.rocm.emulator.amdgpu.state import Array, WorkGroupState

if TYPE_CHECKING:
    import torch

BASE = 0x2_0000_0000  # above 32 bits, so that an address cut to 32 bits is never right
GUARD = 1 << 14  # bytes between arrays: an access just outside one is in no other
ALIGNMENT = 256  # as device allocators align
_WORD: dict[int, Any] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64),
         16: np.dtype("V16")}  # fmt: skip


@dataclass(frozen=True)
class Region:
    name: str
    offset: int
    size: int
    array: Array | None


def gather(store: Array, offsets: Array, size: int) -> Array:
    """Return `size` bytes at each offset of a byte array, as uint8 [n, size]."""
    word = _WORD.get(size)
    if word is not None and not (offsets & (size - 1)).any():
        found = store.view(word)[offsets >> (size.bit_length() - 1)]
        return found.view(np.uint8).reshape(-1, size)
    return store[offsets[:, None] + np.arange(size)]


def scatter(store: Array, offsets: Array, data: Array) -> None:
    """Write uint8 [n, size] at each offset of a byte array; of two lanes at one place the later wins."""
    size = data.shape[1]
    word = _WORD.get(size)
    if word is not None and not (offsets & (size - 1)).any():
        store.view(word)[offsets >> (size.bit_length() - 1)] = np.ascontiguousarray(data).view(word)[:, 0]
    else:
        store[offsets[:, None] + np.arange(size)] = data


class Memory:
    """Arrays that a kernel may access: copied in by `add`, copied back after each launch.

    >>> memory = Memory()
    >>> address = memory.add(np.zeros(100, np.float32))
    """

    def __init__(self) -> None:
        self.bytes: Array = np.zeros(1 << 16, np.uint8)
        self.unset: Array | None = None  # True for bytes not written yet; None without the check
        self.regions: list[Region] = []
        self._starts: list[int] = []
        self._top = GUARD

    def add(self, array: Array, name: str = "", *, defined: bool = True) -> int:
        """Map a C-contiguous numpy array and return its 64-bit address, else raise BadLaunch.

        `defined=False`: its contents count as undefined until the kernel writes them."""
        if not isinstance(array, np.ndarray):
            raise BadLaunch(f"array {name or len(self.regions)} is a {type(array).__name__}; a numpy array is needed")
        if not array.flags.c_contiguous:
            raise BadLaunch(f"array {name or len(self.regions)} is not C-contiguous")
        offset = -(-self._top // ALIGNMENT) * ALIGNMENT
        self._top = offset + array.nbytes + GUARD
        self._grow(self._top)
        region = Region(name or f"array {len(self.regions)}", offset, array.nbytes, array)
        self.regions.append(region)
        self._starts.append(offset)
        self.bytes[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        if not defined:
            if self.unset is None:
                self.unset = np.zeros(len(self.bytes), bool)
            self.unset[offset : offset + array.nbytes] = True
        return BASE + offset

    def address(self, region: Region) -> int:
        return BASE + region.offset

    def remove_last(self) -> None:
        region = self.regions.pop()
        self._starts.pop()
        self._top = region.offset
        if self.unset is not None:
            self.unset[region.offset : region.offset + region.size] = False

    def _grow(self, size: int) -> None:
        if size <= len(self.bytes):
            return
        room = max(2 * len(self.bytes), 1 << (size - 1).bit_length())
        bigger = np.zeros(room, np.uint8)
        bigger[: len(self.bytes)] = self.bytes
        self.bytes = bigger
        if self.unset is not None:
            unset = np.zeros(room, bool)
            unset[: len(self.unset)] = self.unset
            self.unset = unset

    def write_back(self) -> None:
        """Copy changed contents to the caller's arrays: others may be mapped for reading only."""
        for region in self.regions:
            if region.array is not None and region.array.flags.writeable:
                flat = region.array.reshape(-1).view(np.uint8)
                now = self.bytes[region.offset : region.offset + region.size]
                if not np.array_equal(flat, now):
                    flat[...] = now

    def outside(self, offsets: Array, size: int) -> Array | None:
        """Return which accesses of `size` bytes (offsets from BASE) lie in no array; None if all lie in one."""
        low, high = int(offsets.min()), int(offsets.max()) + size
        index = bisect.bisect_right(self._starts, low) - 1
        if index >= 0:
            region = self.regions[index]
            if high <= region.offset + region.size:
                return None
        starts = np.array(self._starts, np.int64)
        ends = np.array([region.offset + region.size for region in self.regions], np.int64)
        if not len(starts):
            return np.ones(len(offsets), bool)
        at = np.searchsorted(starts, offsets, "right") - 1
        bad = (at < 0) | (offsets + size > ends[np.maximum(at, 0)])
        return bad if bad.any() else None

    def describe(self, offset: int, size: int) -> str:
        """Describe an access outside every array: the nearest one and the distance."""
        text = f"{size} bytes at {BASE + offset:#x}"
        if not self.regions:
            return text
        nearest = min(self.regions, key=lambda r: max(r.offset - offset, offset + size - r.offset - r.size))
        if offset < nearest.offset:
            return f"{text}, {nearest.offset - offset} bytes before {nearest.name} ({nearest.size} bytes)"
        beyond = offset + size - nearest.offset - nearest.size
        return f"{text}, {beyond} bytes beyond the end of {nearest.name} ({nearest.size} bytes)"


# Names of sizes: of gfx9, then of gfx11 and later. (bytes, sign-extended)
_SIZES = {
    "dword": (4, False), "dwordx2": (8, False), "dwordx3": (12, False), "dwordx4": (16, False), "ubyte": (1, False),
    "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True), "short": (2, False), "byte": (1, False),
    "b32": (4, False), "b64": (8, False), "b96": (12, False), "b128": (16, False), "u8": (1, False), "i8": (1, True),
    "u16": (2, False), "i16": (2, True), "b16": (2, False), "b8": (1, False),
}  # fmt: skip


@dataclass(frozen=True)
class Element:
    """One lane's data. `half`: 0 or 1 for the d16 forms, which keep the register's other half."""

    size: int
    signed: bool
    half: int | None

    @property
    def registers(self) -> int:
        return max(self.size // 4, 1)


@cache
def element(name: str) -> Element:
    """Parse dword, ubyte_d16_hi, d16_b16, b128 … Raises UnknownInstruction."""
    half = None
    for mark, which in (("_d16_hi", 1), ("d16_hi_", 1), ("_d16", 0), ("d16_", 0)):
        if mark in name:
            half, name = which, name.replace(mark, "")
            break
    if name not in _SIZES:
        raise UnknownInstruction(f"an access of type {name!r} is not modelled")
    return Element(*_SIZES[name], half)


def put(state: WorkGroupState, plane: int, kind: Element, data: Array, lanes: Array | None) -> None:
    """Write uint8 [n, size] into registers from `plane` on; `lanes` is [waves, lanes] bool, None for all."""
    shape = (state.waves, state.lanes)
    if kind.size >= 4:
        words = np.ascontiguousarray(data).view(np.uint32)
        for j in range(kind.size // 4):
            if lanes is None:
                state.planes["u"][plane + j][...] = words[:, j].reshape(shape)
            else:
                state.planes["u"][plane + j][lanes] = words[:, j]
        return
    code = {1: np.int8, 2: np.int16}[kind.size] if kind.signed else {1: np.uint8, 2: np.uint16}[kind.size]
    value = np.ascontiguousarray(data).view(code)[:, 0]
    if kind.half is None:
        target: Array = state.planes["u"][plane]
        wide = value.astype(np.int32).view(np.uint32) if kind.signed else value.astype(np.uint32)
    else:
        target = state.halves["w"][kind.half][plane]
        wide = value.astype(np.int16).view(np.uint16) if kind.signed else value.astype(np.uint16)
    if lanes is None:
        target[...] = wide.reshape(shape)
    else:
        target[lanes] = wide


def get(state: WorkGroupState, plane: int, kind: Element, lanes: Array | None) -> Array:
    """Return registers from `plane` on as uint8 [n, size], of the given lanes (None for all)."""
    planes: Any = state.planes["u"]
    if kind.size >= 4:
        count = state.waves * state.lanes if lanes is None else int(np.count_nonzero(lanes))
        words = np.empty((count, kind.size // 4), np.uint32)
        for j in range(kind.size // 4):
            words[:, j] = planes[plane + j].reshape(-1) if lanes is None else planes[plane + j][lanes]
        return words.view(np.uint8)
    source = planes[plane] if not kind.half else state.halves["w"][1][plane]
    # Always a copy: stored data are checked later, when the register has changed.
    values = source.flatten() if lanes is None else source[lanes]
    return values[:, None].view(np.uint8)[:, : kind.size]


AtomicFunction = Callable[[Array, Array], Array]
_CODES = {"u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64, "f64": np.float64}


def _typed(kind: str, function: AtomicFunction) -> tuple[int, AtomicFunction]:
    dtype = _CODES[kind]
    return np.dtype(dtype).itemsize, lambda old, new: function(old.view(dtype), new.view(dtype))


def _packed_f16(old: Array, new: Array) -> Array:
    return (old.view(np.float16) + new.view(np.float16)).view(np.uint32)


def _packed_bf16(old: Array, new: Array) -> Array:
    def wide(x: Array) -> Array:
        return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)

    return softfloat.bf16_bits(wide(old) + wide(new)).astype(np.uint16).view(np.uint32)


def _wrapping_increment(old: Array, limit: Array) -> Array:
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _wrapping_decrement(old: Array, limit: Array) -> Array:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


_INTEGER: dict[str, tuple[str, AtomicFunction]] = {
    "add": ("u", np.add), "sub": ("u", np.subtract), "smin": ("i", np.minimum), "umin": ("u", np.minimum),
    "smax": ("i", np.maximum), "umax": ("u", np.maximum), "and": ("u", np.bitwise_and), "or": ("u", np.bitwise_or),
    "xor": ("u", np.bitwise_xor), "swap": ("u", lambda old, new: new), "inc": ("u", _wrapping_increment),
    "dec": ("u", _wrapping_decrement),
}  # fmt: skip
_MODERN = {  # names of gfx11 and later, and of LDS instructions: (operation, types)
    "add": ("add", ("u",)), "sub": ("sub", ("u",)), "min_i": ("smin", ("i",)), "min_u": ("umin", ("u",)),
    "max_i": ("smax", ("i",)), "max_u": ("umax", ("u",)), "and_b": ("and", ()), "or_b": ("or", ()), "xor_b": ("xor",
    ()),
    "swap_b": ("swap", ()), "wrxchg_b": ("swap", ()), "storexchg_b": ("swap", ()), "inc_u": ("inc", ()),
    "dec_u": ("dec", ()),
}  # fmt: skip

ATOMICS: dict[str, tuple[int, AtomicFunction]] = {
    "add_f32": _typed("f32", np.add), "add_f64": _typed("f64", np.add), "min_f64": _typed("f64", np.fmin),
    "max_f64": _typed("f64", np.fmax), "pk_add_f16": (4, _packed_f16), "pk_add_bf16": (4, _packed_bf16),
    "min_f32": _typed("f32", np.fmin), "max_f32": _typed("f32", np.fmax), "fmin": _typed("f32", np.fmin),
    "fmax": _typed("f32", np.fmax), "min_num_f32": _typed("f32", np.fmin), "max_num_f32": _typed("f32", np.fmax),
}  # fmt: skip
for _name, (_sign, _function) in _INTEGER.items():
    ATOMICS[_name] = _typed(_sign + "32", _function)
    ATOMICS[_name + "_x2"] = _typed(_sign + "64", _function)
for _name, (_old, _types) in _MODERN.items():
    _sign, _function = _INTEGER[_old]
    for _bits in ("32", "64"):
        _full = _name + _bits if _name[-2:] in ("_i", "_u", "_b") else f"{_name}_u{_bits}"
        ATOMICS[_full] = _typed(_sign + _bits, _function)
COMPARE_AND_SWAP = {"cmpswap": 4, "cmpswap_x2": 8, "cmpswap_b32": 4, "cmpswap_b64": 8, "cmpst_b32": 4, "cmpst_b64": 8,
           "cmpstore_b32": 4, "cmpstore_b64": 8}  # fmt: skip


def apply_atomic(store: Array, offsets: Array, name: str, operand: Array, compare: Array | None) -> Array:
    """Apply an atomic of uint32 or uint64 bits at byte offsets, lane after lane, and return the old values."""
    size = COMPARE_AND_SWAP.get(name) or ATOMICS[name][0]
    word = np.dtype(np.uint32 if size == 4 else np.uint64)
    cells, index = store.view(word), offsets >> (2 if size == 4 else 3)
    function: AtomicFunction = (lambda old, new: new) if compare is not None else ATOMICS[name][1]
    if len(np.unique(index)) == len(index):
        old = cells[index]
        new = function(old, operand).view(word)
        cells[index] = np.where(old == compare, new, old) if compare is not None else new
        return old
    old = np.empty(len(index), word)
    for lane, at in enumerate(index):
        before = cells[at : at + 1].copy()
        old[lane] = before[0]
        if compare is None or before[0] == compare[lane]:
            cells[at : at + 1] = function(before, operand[lane : lane + 1]).view(word)
    return old


_FLOATS = ("fp16", "bf16", "fp32", "f32", "fp64")


def value_of(kind: str, argument: Any, memory: Memory) -> int | float:
    """Return a kernel argument: the address of a tensor's first element, or a number. Raise BadLaunch on others."""
    if argument is None:
        return 0
    tensor = _tensor(argument)
    if tensor is not None:
        return address_of(tensor, memory)
    if not isinstance(argument, (bool, int, float, np.number)):
        raise BadLaunch(f"an argument of type {kind} is {argument!r}; a tensor, a number or None is needed")
    return float(argument) if kind in _FLOATS else int(argument)


def share(arguments: Iterable[Any], memory: Memory) -> None:
    """Map the storages of all tensors, overlapping ones as one: of separate copies the last one out would win."""
    spans: list[tuple[int, int]] = []
    for tensor in map(_tensor, arguments):
        if tensor is not None:
            start, size = _span(tensor)
            spans.append((start, start + size))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    for start, end in merged:
        _map(start, end - start, memory)


def address_of(tensor: torch.Tensor, memory: Memory) -> int:
    """Return a tensor's address; tensors that share storage share memory, and a kernel may access all of it."""
    start, size = _span(tensor)
    for region in memory.regions:
        if region.array is not None and size:
            first = region.array.ctypes.data
            if first <= start and start + size <= first + region.size:
                return memory.address(region) + tensor.data_ptr() - first
    if size == 0:
        return memory.add(np.zeros(0, np.uint8))
    return memory.address(_map(start, size, memory)) + tensor.data_ptr() - start


def _tensor(argument: Any) -> torch.Tensor | None:
    import torch  # the model itself needs numpy alone

    if isinstance(argument, torch.Tensor):
        return argument
    if hasattr(argument, "data_ptr"):  # triton.testing's and TMA's wrappers
        return argument.base
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.device.type != "cpu":
        raise BadLaunch(f"a tensor on {tensor.device}; the model runs kernels on tensors of the CPU")
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _map(start: int, size: int, memory: Memory) -> Region:
    raw = np.frombuffer(memoryview((ctypes.c_char * size).from_address(start)), np.uint8)
    memory.add(raw, f"tensor {len(memory.regions)}")
    return memory.regions[-1]
