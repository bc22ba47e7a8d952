"""Instructions on global memory: buffer_…, global_… and flat_… (also to LDS, also atomics), and scalar loads.

Sources: AMD "Instinct MI300" ISA reference, "Vector memory buffer instructions", "Flat, scratch and global" and
"Scalar memory"; "CDNA4" (loads to LDS of 96 and 128 bits); "RDNA4" (th:, scope:, scalar loads below 32 bits).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from portattn.backends.rocm.emulator.amdgpu.assembly import M0, Instruction, Operand, operand
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction, unified_registers, vector_plane
from portattn.backends.rocm.emulator.amdgpu.errors import MissingWait, OutOfBounds, UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.lds import Context, flat_waves
from portattn.backends.rocm.emulator.amdgpu.lds_scratch_ops import bind_buffer_scratch, is_buffer_scratch
from portattn.backends.rocm.emulator.amdgpu.memory import (
    ATOMICS,
    BASE,
    COMPARE_AND_SWAP,
    Element,
    apply_atomic,
    element,
    gather,
    get,
    put,
    scatter,
)
from portattn.backends.rocm.emulator.amdgpu.scalar import reader
from portattn.backends.rocm.emulator.amdgpu.state import Array

_NAME = re.compile(r"(buffer|global|flat)_(load|store|atomic)_(\w+)")
# Caches and ordering: nothing to model, values never depend on them here.
_HINTS = ("glc", "slc", "dlc", "sc0", "sc1", "nt", "th", "scope")
# Triton's descriptors end at 2 GiB, whatever the tensor; lanes that its masks leave out have an offset just there. Any
# other offset that is negative as a 32-bit number was meant to lie before the tensor's first element.
_UNBOUNDED, _MASKED, _NEAR = 0x7FFFFFFE, 0x80000000, 4096
# Every lane's address [waves, lanes] int64, from BASE, and how many bytes from there on are in range (None: all that
# are wanted, or not checked).
Located = tuple[Array, Array | None]
Address = Callable[[], Located]


def is_vector_memory_modelled(mnemonic: str) -> bool:
    found = _NAME.fullmatch(mnemonic)
    if not found:
        return False
    if found[2] == "atomic":
        return found[3] in ATOMICS or found[3] in COMPARE_AND_SWAP
    try:
        element(found[3].replace("lds_", ""))
    except UnknownInstruction:
        return False
    return True


def bind_vector_memory(machine: Context, instruction: Instruction) -> BoundInstruction:
    found = _NAME.fullmatch(instruction.mnemonic)
    if not found:
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    space, action, name = found.groups()
    binder = Binder(machine.state, instruction)
    binder.allow("offset", "offen", "lds", *_HINTS)
    to_lds = "lds" in instruction.modifiers or name.startswith("lds_")
    if action == "atomic":
        return _atomic(machine, binder, space, name)
    kind = element(name.replace("lds_", ""))
    if to_lds:
        items = binder.operands
        return _load_to_lds(machine, binder, kind, _address(machine, binder, space, items, kind.size), items)
    binder.expect(4 if space == "buffer" else 2 if space == "flat" else 3)
    data_first = space == "buffer" or action == "load"
    data = binder.operands[0] if data_first else binder.operands[1]
    items = binder.operands[1:] if data_first else [binder.operands[0], *binder.operands[2:]]
    if space == "buffer" and is_buffer_scratch(machine, items[1]):
        return bind_buffer_scratch(machine, binder, kind, action)
    address = _address(machine, binder, space, items, kind.size)
    if data.half is not None:
        kind = Element(kind.size, kind.signed, data.half)
    make = _load if action == "load" else _store
    return make(machine, binder, kind, vector_plane(data), address, items)


def _address(machine: Context, binder: Binder, space: str, items: list[Operand], size: int) -> Address:
    if space == "buffer":
        return _buffer_address(machine, binder, items, size)
    state, offset = machine.state, binder.instruction.number("offset")
    if len(items) > 1 and items[1].kind == "s":
        base, plane = items[1].index, vector_plane(items[0])
        if items[1].count != 2 or items[0].count != 1:
            raise UnknownOperand("an address is a 64-bit scalar and a 32-bit vector, or a 64-bit vector")
        planes = state.planes["u"]

        def scalar_base() -> Located:
            start = state.scalar(base, 64).view(np.int64)[:, None] + (offset - BASE)
            return start + planes[plane], None

        return scalar_base
    plane = vector_plane(items[0])
    if items[0].count != 2:
        raise UnknownOperand("an address of 64 bits is needed")
    return lambda: (state.pair(plane).view(np.int64) + (offset - BASE), None)


def _buffer_address(machine: Context, binder: Binder, items: list[Operand], size: int) -> Address:
    """Return base + vector offset + scalar offset + immediate, and the bytes in range by num_records.

    Words of the descriptor: base (48 bits), stride, num_records, flags. Raw buffers (stride 0) only: out of range is
    vector offset + immediate + bytes > num_records − scalar offset, which reads 0 and writes nothing. Loads and stores
    of several dwords are checked dword by dword, atomics as a whole (RDNA3 ISA reference, "Range checking")."""
    state, offset = machine.state, binder.instruction.number("offset")
    vector, resource, scalar = items
    if resource.kind != "s" or resource.count != 4:
        raise UnknownOperand("a buffer descriptor is four scalar registers")
    offen = "offen" in binder.instruction.modifiers
    if not offen and vector.kind == "v":
        raise UnknownOperand("a buffer address with idxen or without offen is not modelled")
    planes, r = state.planes["u"], resource.index
    plane = vector_plane(vector) if offen else 0
    add = scalar.bits(32) if scalar.kind == "literal" else 0

    def address() -> Located:
        words = state.S[:, r : r + 4]
        if (words[state.group, 1] >> np.uint32(16) & np.uint32(0x3FFF)).any():
            raise UnknownOperand("a buffer with a stride is not modelled")
        base = words[:, 0].astype(np.int64) | ((words[:, 1] & np.uint32(0xFFFF)).astype(np.int64) << 32)
        records = words[:, 2].astype(np.int64)
        extra = state.S[:, scalar.index].astype(np.int64) if scalar.kind == "s" else add
        fixed = extra + offset
        inside = planes[plane].astype(np.int64) if offen else np.zeros(state.mask.shape, np.int64)
        # One comparison for all: limits differ by wave only.
        if (inside <= (records - fixed - size)[:, None]).all():
            return inside + (base + fixed - BASE)[:, None], None
        negative = (inside >= _MASKED + _NEAR) & (records == _UNBOUNDED)[:, None] & state.mask
        if negative.any() and machine.checks.memory:
            first = int(inside[negative][0]) - 2**32
            problem = f"a buffer offset of {first} counts as beyond the buffer's end: it reads 0, or is not stored"
            machine.report(OutOfBounds, f"{problem}; {int(negative.sum())} lanes")
        return inside + (base + fixed - BASE)[:, None], (records - fixed)[:, None] - inside

    return address


def _words(machine: Context, located: Located, size: int) -> list[tuple[slice, Located]]:
    """Split an access into separately range-checked pieces: dwords if some lane is partly in range, else one piece."""
    where, room = located
    if room is not None and size > 4 and ((room >= 4) & (room < size) & machine.state.mask).any():
        return [(slice(n, n + 4), (where + n, room - n)) for n in range(0, size, 4)]
    return [(slice(0, size), located)]


def _chosen(machine: Context, located: Located, size: int) -> tuple[Array | None, Array | None, Array, Array | None]:
    """Return the active lanes (None: all), lanes in range (None: all), offsets, and lanes that miss all buffers."""
    state = machine.state
    where, room = located
    in_range = None if room is None else room >= size
    mask = None if state.full else state.mask
    within: Array | None = None
    if in_range is not None:
        chosen: Array = in_range.reshape(-1) if mask is None else in_range[mask]
        within = None if chosen.all() else chosen
    offsets = where.reshape(-1) if mask is None else where[mask]
    if within is not None:
        offsets = offsets[within]
    if not len(offsets):
        return mask, within, offsets, None
    bad = machine.memory.outside(offsets, size)
    if bad is not None and machine.checks.memory:
        first = int(offsets[bad][0])
        problem = f"access outside every buffer: {machine.memory.describe(first, size)}; {int(bad.sum())} lanes"
        machine.report(OutOfBounds, problem)
    return mask, within, offsets, bad


def _uses(items: list[Operand]) -> tuple[int, ...]:
    return tuple(register for item in items for register in item.registers)


def _load(
    machine: Context, binder: Binder, kind: Element, plane: int, address: Address, items: list[Operand]
) -> BoundInstruction:
    state, instruction = machine.state, binder.instruction
    registers = unified_registers(plane, kind.registers)
    marks = registers if kind.half is None else registers[:1]

    def run() -> None:
        data, mask, unset = fetch(machine, address, kind.size)
        put(state, plane, kind, data, mask)
        if unset is not None:
            machine.mark(marks, mask, unset)
        machine.issue("load", registers, half=kind.half)

    return BoundInstruction(instruction, run, (), (), registers, uses=_uses(items), counter="load")


def fetch(machine: Context, address: Address, size: int) -> tuple[Array, Array | None, Array | None]:
    """Return bytes [n, size] of the active lanes, those lanes, and which bytes are undefined."""
    pieces = _words(machine, address(), size)
    if len(pieces) == 1:
        return _fetch(machine, pieces[0][1], size)
    each = [_fetch(machine, piece, 4) for _, piece in pieces]
    unset = None
    if any(marks is not None for _, _, marks in each):
        unset = np.hstack([np.zeros(data.shape, bool) if marks is None else marks for data, _, marks in each])
    return np.hstack([data for data, _, _ in each]), each[0][1], unset


def _fetch(machine: Context, located: Located, size: int) -> tuple[Array, Array | None, Array | None]:
    mask, within, offsets, bad = _chosen(machine, located, size)
    memory = machine.memory
    machine.ordered(offsets if bad is None else offsets[~bad], size)
    if bad is not None:
        found = np.zeros((len(offsets), size), np.uint8)
        found[~bad] = gather(memory.bytes, offsets[~bad], size)
    else:
        found = gather(memory.bytes, offsets, size)
    unset = None
    if memory.unset is not None and machine.defined is not None and len(offsets) and bad is None:
        marks = gather(memory.unset.view(np.uint8), offsets, size)
        unset = marks.view(bool) if marks.any() else None
    if within is None:
        return found, mask, unset
    data = np.zeros((len(within), size), np.uint8)
    data[within] = found
    if unset is not None:
        whole = np.zeros((len(within), size), bool)
        whole[within] = unset
        unset = whole
    return data, mask, unset


def _store(
    machine: Context, binder: Binder, kind: Element, plane: int, address: Address, items: list[Operand]
) -> BoundInstruction:
    state, instruction = machine.state, binder.instruction
    registers = unified_registers(plane, kind.registers)

    def run() -> None:
        pieces = _words(machine, address(), kind.size)
        stored = [store(part, piece) for part, piece in pieces]
        offsets, mask = stored[0] if len(pieces) == 1 else (stored[0][0][:0], None)
        machine.issue_store(offsets, kind.size, mask)

    def store(part: slice, located: Located) -> tuple[Array, Array | None]:
        mask, within, offsets, bad = _chosen(machine, located, part.stop - part.start)
        data = np.ascontiguousarray(get(state, plane, kind, mask)[:, part])
        undefined = machine.undefined(registers, mask)
        if within is not None:
            data = data[within]
            undefined = None if undefined is None else undefined[within]
        if bad is not None:
            offsets, data = offsets[~bad], data[~bad]
            undefined = None if undefined is None else undefined[~bad]
        if undefined is not None and undefined[:, part].any():
            machine.undefined_store(registers)
        if machine.group_races is not None:
            machine.group_races.store(offsets, data)
        scatter(machine.memory.bytes, offsets, data)
        if machine.memory.unset is not None:
            scatter(machine.memory.unset.view(np.uint8), offsets, np.zeros(data.shape, np.uint8))
        return offsets, mask if within is None else None

    return BoundInstruction(instruction, run, registers, uses=_uses(items))


def _load_to_lds(
    machine: Context, binder: Binder, kind: Element, address: Address, items: list[Operand]
) -> BoundInstruction:
    """Lane i of a wave writes LDS bytes m0 + immediate + i·size (4 bytes each on gfx90a and gfx942)."""
    state, instruction, lds = machine.state, binder.instruction, machine.lds
    lane = np.arange(state.lanes, dtype=np.int64) * kind.size
    if kind.size < 4 or (kind.size > 4 and state.arch.name != "gfx950"):
        raise UnknownInstruction(f"{instruction.mnemonic} to LDS is not modelled for {state.arch.name}")
    offset = instruction.number("offset")

    def run() -> None:
        data, mask, unset = fetch(machine, address, kind.size)
        base = (state.S[:, M0] & np.uint32(0x3FFFF)).astype(np.int64)[:, None] + offset
        where = np.broadcast_to(base + lane, state.mask.shape)
        targets = where.reshape(-1) if mask is None else where[mask]
        waves = flat_waves(mask, state.waves, state.lanes)
        inside = lds.inside(targets, kind.size, instruction.place)
        if inside is not None:
            targets, data, waves = targets[inside], data[inside], waves[inside]
            unset = None if unset is None else unset[inside]
        entry = machine.issue("load", (), writes_lds=True)
        lds.store(targets, data, waves, instruction.place, unset, entry, dma=True)

    return BoundInstruction(instruction, run, uses=(*_uses(items), M0))


def _atomic(machine: Context, binder: Binder, space: str, name: str) -> BoundInstruction:
    """Bind an atomic; it returns the old value with sc0, glc or th:TH_ATOMIC_RETURN."""
    state, instruction = machine.state, binder.instruction
    compares = name in COMPARE_AND_SWAP
    if not compares and name not in ATOMICS:
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    modifiers = instruction.modifiers
    returns = "sc0" in modifiers or "glc" in modifiers or "RETURN" in modifiers.get("th", "")
    size = COMPARE_AND_SWAP.get(name) or ATOMICS[name][0]
    words = size // 4
    items = list(binder.operands)
    if space == "buffer":
        binder.expect(4)
        data, where = items[0], items[1:]
        result = data.index
    else:
        binder.expect((2 if space == "flat" else 3) + returns)
        destination = items.pop(0) if returns else None
        where, data = [items[0], *items[2:]], items[1]
        result = vector_plane(destination) if destination else 0
    plane, kind = vector_plane(data), Element(size, False, None)
    address = _address(machine, binder, space, where, size)
    stored = unified_registers(plane, words * (2 if compares else 1))
    written = unified_registers(result, words) if returns else ()

    def run() -> None:
        mask, within, offsets, bad = _chosen(machine, address(), size)
        word = np.dtype(np.uint32 if size == 4 else np.uint64)
        if bad is not None:
            return
        undefined = machine.undefined(stored, mask)
        values = [get(state, plane + part * words, kind, mask).view(word)[:, 0] for part in range(1 + compares)]
        if within is not None:
            values = [value[within] for value in values]
            undefined = None if undefined is None else undefined[within]
        if undefined is not None and undefined.any():
            machine.undefined_store(stored)
        if machine.group_races is not None:
            machine.group_races.atomic(offsets, size, returns)
        # cmpswap: the new value first, then the comparand.
        old = apply_atomic(machine.memory.bytes, offsets, name, values[0], values[1] if compares else None)
        if returns:
            whole = old
            if within is not None:
                whole = np.zeros(len(within), word)
                whole[within] = old
            put(state, result, kind, whole[:, None].view(np.uint8), mask)
            machine.issue("load", written)
        else:
            machine.issue_store(offsets, size, None)

    return BoundInstruction(instruction, run, (), (), written, uses=_uses(where))


def check_order(machine: Context, offsets: Array, size: int) -> None:
    """Report a load of bytes that another wave's store, not yet waited for, writes."""
    waits, group = machine.waits, machine.group_bits
    if waits is None or not len(offsets):
        return
    low, high = int(offsets.min()), int(offsets.max()) + size
    for entry in waits.queues[waits.names["store"]]:
        if entry.payload is None or (entry.waves | group) == 0:
            continue
        first, last, stored, width, owners = entry.payload
        if last <= low or first >= high:
            continue
        overlap = np.intersect1d(stored // 4, offsets // 4)
        if len(overlap) and width:
            others = owners[np.isin(stored // 4, overlap)]
            if any(entry.waves >> int(wave) & 1 for wave in np.unique(others)):
                machine.report(MissingWait, f"loads what the store at {entry.place} may not have written yet")
                return


_SCALAR_NAME = re.compile(r"s_(buffer_)?load_(dword(?:x\d+)?|b\d+|[ui](?:8|16))")
_SCALAR_WORDS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16, "b32": 1, "b64": 2,
          "b96": 3, "b128": 4, "b256": 8, "b512": 16}  # fmt: skip
_SCALAR_NARROW = {"u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16}


def is_scalar_memory_modelled(mnemonic: str) -> bool:
    found = _SCALAR_NAME.fullmatch(mnemonic)
    return found is not None and (found[2] in _SCALAR_WORDS or found[2] in _SCALAR_NARROW)


def bind_scalar_memory(machine: Context, instruction: Instruction) -> BoundInstruction:
    found = _SCALAR_NAME.fullmatch(instruction.mnemonic)
    if not found or (found[2] not in _SCALAR_WORDS and found[2] not in _SCALAR_NARROW):
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    state = machine.state
    for name in instruction.modifiers:
        if name not in ("offset", "glc", "dlc", "th", "scope", "sc0", "sc1", "nt"):
            raise UnknownOperand(f"modifier {name!r} is not modelled for {instruction.mnemonic}")
    items = [operand(text) for text in instruction.operands]
    if len(items) != 3:
        raise UnknownInstruction(f"{instruction.mnemonic} with {len(items)} operands is not modelled")
    target, base, offset = items
    words, immediate = _SCALAR_WORDS.get(found[2], 1), instruction.number("offset")
    narrow = _SCALAR_NARROW.get(found[2])
    size = np.dtype(narrow).itemsize if narrow else 4 * words
    added = reader(state, offset, "i" if offset.kind == "literal" else "u")

    def run() -> None:
        start = state.scalar(base.index, 64).view(np.int64)
        shift = added().astype(np.int64) + immediate
        if found[1]:
            start = start & 0xFFFFFFFFFFFF
        where = start + shift - BASE
        if not narrow:
            where = where & ~3  # the low bits of a scalar address are ignored
        group = np.nonzero(state.group)[0]
        offsets = where[group]
        ok = np.ones(len(group), bool)
        if found[1]:
            ok = shift[group] + size <= state.S[group, base.index + 2].astype(np.int64)
        data = np.zeros((len(group), size), np.uint8)
        if ok.any():
            bad = machine.memory.outside(offsets[ok], size)
            if bad is None:
                if machine.group_races is not None:
                    machine.group_races.load(offsets[ok], size)
                data[ok] = gather(machine.memory.bytes, offsets[ok], size)
            elif machine.checks.memory:
                first = int(offsets[ok][bad][0])
                machine.report(OutOfBounds, f"scalar load outside: {machine.memory.describe(first, size)}")
        if narrow:
            state.S[group, target.index] = data.view(narrow)[:, 0].astype(np.int64).astype(np.uint32)
        else:
            state.S[group, target.index : target.index + words] = data.view(np.uint32)
        machine.issue("scalar", written, unordered=True)

    written = tuple(range(target.index, target.index + words))
    uses = base.registers + offset.registers
    return BoundInstruction(instruction, run, scalar_writes=written, uses=uses)
