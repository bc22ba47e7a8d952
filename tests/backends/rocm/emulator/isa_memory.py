"""What the pseudocode of AMD's ISA documents says of loads and stores: which bytes, at which offset from the address,
go to or from which register. How the address is made is prose: base + offset (+ the lane's offset in the buffer)."""

import re
from dataclasses import dataclass

_NAME = re.compile(
    r"(?P<space>ds|buffer|global|s)_(?P<action>load|read|store|write)_?(?P<two>2(?:addr)?(?:_?st(?:ride)?64)?_)?"
    r"(?P<kind>[a-z]+\d*(?:x\d+)?)(?P<hi>_d16_hi)?"
)
_BYTES = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "dwordx8": 32, "ushort": 2, "short": 2, "ubyte": 1,
    "byte": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Access:
    """`places`: bytes that one unit of OFFSET0 (and OFFSET1) moves each of its elements, of `size` bytes each."""

    space: str
    load: bool
    size: int
    places: tuple[int, ...]
    high: bool  # 16 bits of the register's upper half


def access(name: str) -> Access | None:
    """Of a mnemonic; None where it is no load or store that the pseudocode spells out."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    kind, two = found["kind"], found["two"]
    size = _BYTES.get(kind) or (int(kind[1:]) // 8 if re.fullmatch(r"[bui]\d+", kind) else 0)
    if not size:
        return None
    unit = size * (64 if two and "64" in two.removeprefix("2") else 1) if two else 1
    load, places = found["action"] in ("load", "read"), (unit,) * (2 if two else 1)
    return Access(found["space"], load, size, places, bool(found["hi"]))


def registers(access: Access, data: bytes, old: list[int]) -> list[int]:
    """What a load of `data`, one element, leaves in registers that held `old`: zero-extended, or in the upper half."""
    if access.size < 4:
        value = int.from_bytes(data, "little")
        return [value << 16 | old[0] & 0xFFFF] if access.high else [value]
    return [int.from_bytes(data[n : n + 4], "little") for n in range(0, access.size, 4)]


def stored(access: Access, values: list[int]) -> bytes:
    """The bytes that a store writes of one element's registers."""
    whole = b"".join(value.to_bytes(4, "little") for value in values)
    return whole[2:][: access.size] if access.high else whole[: access.size]


def in_range(access: Access, offset: int, records: int, first: int) -> bool:
    """Is the dword at byte `first` of an access at this offset inside a raw buffer of `records` bytes? Loads and stores
    of several dwords are range-checked dword by dword."""
    return offset + first + min(access.size, 4) <= records
