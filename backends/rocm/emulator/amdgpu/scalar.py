"""Scalar instructions: arithmetic, logic, comparisons, moves and exec, over the waves as [waves] arrays.

Sources: AMD "Instinct MI300" ISA reference, "SALU" (SOP1, SOP2, SOPK, SOPC); "RDNA3" and "RDNA4" likewise, for the
float instructions and the new names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from portattn.backends.rocm.emulator.amdgpu import softfloat, vector_tables
from portattn.backends.rocm.emulator.amdgpu.assembly import EXEC, SCC, Instruction, Operand, operand
from portattn.backends.rocm.emulator.amdgpu.binder import BoundInstruction
from portattn.backends.rocm.emulator.amdgpu.errors import UnknownInstruction, UnknownOperand
from portattn.backends.rocm.emulator.amdgpu.state import KINDS, Array, WorkGroupState

_u32, _u64, _i32, _i64, _f32 = np.uint32, np.uint64, np.int32, np.int64, np.float32

# What becomes of scc: KEEP leaves it, NONZERO sets it to result ≠ 0, GIVEN takes it from the function's second value.
KEEP, NONZERO, GIVEN = "keep", "nonzero", "given"
Entry = tuple[str, str, str, Callable[..., Any]]


def _int32(x: Array) -> Array:
    return x.astype(_i32)


def _signed_over(a: Array, b: Array, minus: bool) -> tuple[Array, Array]:
    wide = a.astype(_i64) - b if minus else a.astype(_i64) + b
    return wide.astype(_i32), (wide < -(2**31)) | (wide >= 2**31)


def _unsigned_over(a: Array, b: Array, minus: bool, carry: Any = 0) -> tuple[Array, Array]:
    wide = a.astype(_i64) - b - carry if minus else a.astype(_i64) + b + carry
    return (wide & 0xFFFFFFFF).astype(_u32), (wide < 0) | (wide > 0xFFFFFFFF)


def _field(signed: bool, bits: int) -> Callable[[Array, Array], Array]:
    """S_BFE: the second source holds the offset in its low bits and the width in bits 16 to 22."""

    def function(a: Array, b: Array) -> Array:
        offset = (b & _u32(bits - 1)).astype(_u64)
        width = np.minimum((b >> _u32(16)) & _u32(127), _u32(bits)).astype(_u64)
        if signed:  # shifted as a signed number: beyond the highest bit lie copies of the sign
            whole: Array = (a.view(_i64) if bits == 64 else a.astype(_i64)) >> offset.astype(_i64)
        else:
            whole = (a if bits == 64 else a.astype(_u64)) >> offset
        mask = np.where(width >= _u64(64), _u64(0xFFFFFFFFFFFFFFFF), (_u64(1) << (width & _u64(63))) - _u64(1))
        value = whole.view(_u64) & mask
        if signed:
            sign = np.where(width > 0, _u64(1) << ((width - _u64(1)) & _u64(63)), _u64(0))
            value = (value ^ sign) - sign
        return value.astype(_u32) if bits == 32 else value

    return function


def _absolute(a: Array) -> Array:
    return np.where(a < 0, -a, a).view(_u32)


def _extreme(pick_first: Callable[[Array, Array], Array]) -> Callable[[Array, Array], tuple[Array, Array]]:
    def function(a: Array, b: Array) -> tuple[Array, Array]:
        first = pick_first(a, b)
        return np.where(first, a, b), first

    return function


def _shift_add(n: int) -> Callable[[Array, Array], tuple[Array, Array]]:
    def function(a: Array, b: Array) -> tuple[Array, Array]:
        wide = (a.astype(_u64) << _u64(n)) + b
        return (wide & _u64(0xFFFFFFFF)).astype(_u32), wide > _u64(0xFFFFFFFF)

    return function


def _count64(x: Array) -> Array:
    return vector_tables.count_bits(np.ascontiguousarray(x).view(_u32).reshape(-1, 2)).sum(1).astype(_u32)


def _first_set64(x: Array) -> Array:
    low, high = (x & _u64(0xFFFFFFFF)).astype(_u32), (x >> _u64(32)).astype(_u32)
    zeros = vector_tables.trailing_zeros
    return np.where(low != 0, zeros(low), np.where(high != 0, zeros(high) + _u32(32), _u32(0xFFFFFFFF)))


def _leading64(x: Array) -> Array:
    low, high = (x & _u64(0xFFFFFFFF)).astype(_u32), (x >> _u64(32)).astype(_u32)
    zeros = vector_tables.leading_zeros
    return np.where(high != 0, zeros(high), np.where(low != 0, zeros(low) + _u32(32), _u32(0xFFFFFFFF)))


# name → (type written, types read, new scc, function)
TABLE: dict[str, Entry] = {
    "mov_b32": ("u", "u", KEEP, lambda a: a), "mov_b64": ("U", "U", KEEP, lambda a: a),
    "add_i32": ("i", "ii", GIVEN, lambda a, b: _signed_over(a, b, False)),
    "sub_i32": ("i", "ii", GIVEN, lambda a, b: _signed_over(a, b, True)),
    "add_u32": ("u", "uu", GIVEN, lambda a, b: _unsigned_over(a, b, False)),
    "sub_u32": ("u", "uu", GIVEN, lambda a, b: _unsigned_over(a, b, True)),
    "add_u64": ("U", "UU", KEEP, np.add), "sub_u64": ("U", "UU", KEEP, np.subtract),
    "mul_i32": ("u", "uu", KEEP, np.multiply), "mul_u64": ("U", "UU", KEEP, np.multiply),
    "mul_hi_u32": ("u", "uu", KEEP, lambda a, b: ((a.astype(_u64) * b) >> _u64(32)).astype(_u32)),
    "mul_hi_i32": ("i", "ii", KEEP, lambda a, b: ((a.astype(_i64) * b) >> 32).astype(_i32)),
    "abs_i32": ("u", "i", NONZERO, lambda a: np.abs(a.astype(_i64)).astype(_u32)),
    "absdiff_i32": ("u", "ii", NONZERO, lambda a, b: _absolute(a - b)), # of a difference that wraps
    "lshl_b32": ("u", "uu", NONZERO, lambda a, b: a << (b & _u32(31))),
    "lshr_b32": ("u", "uu", NONZERO, lambda a, b: a >> (b & _u32(31))),
    "ashr_i32": ("i", "iu", NONZERO, lambda a, b: a >> (b & _u32(31)).astype(_i32)),
    "lshl_b64": ("U", "Uu", NONZERO, lambda a, b: a << (b & _u32(63)).astype(_u64)),
    "lshr_b64": ("U", "Uu", NONZERO, lambda a, b: a >> (b & _u32(63)).astype(_u64)),
    "ashr_i64": ("I", "Iu", NONZERO, lambda a, b: a >> (b & _u32(63)).astype(_i64)),
    **{f"lshl{n}_add_u32": ("u", "uu", GIVEN, _shift_add(n)) for n in (1, 2, 3, 4)},
    "bfe_u32": ("u", "uu", NONZERO, _field(False, 32)), "bfe_i32": ("u", "uu", NONZERO, lambda a, b: _field(True,
    32)(a.view(_i32), b)),
    "bfe_u64": ("U", "Uu", NONZERO, _field(False, 64)), "bfe_i64": ("U", "Uu", NONZERO, _field(True, 64)),
    "bfm_b32": ("u", "uu", KEEP, lambda a, b: ((_u32(1) << (a & _u32(31))) - _u32(1)) << (b & _u32(31))),
    "bfm_b64": ("U", "uu", KEEP, lambda a,
    b: ((_u64(1) << (a & _u32(63)).astype(_u64)) - _u64(1)) << (b & _u32(63)).astype(_u64)),
    "min_i32": ("i", "ii", GIVEN, _extreme(np.less)), "max_i32": ("i", "ii", GIVEN, _extreme(np.greater_equal)),
    "min_u32": ("u", "uu", GIVEN, _extreme(np.less)), "max_u32": ("u", "uu", GIVEN, _extreme(np.greater_equal)),
    "sext_i32_i16": ("i", "u", KEEP, lambda a: a.astype(np.int16).astype(_i32)),
    "sext_i32_i8": ("i", "u", KEEP, lambda a: a.astype(np.int8).astype(_i32)),
    "brev_b32": ("u", "u", KEEP, lambda a: vector_tables.reverse_bits(np.ascontiguousarray(a))),
    "ff1_i32_b32": ("u", "u", KEEP, vector_tables.trailing_zeros), "ff1_i32_b64": ("u", "U", KEEP, _first_set64),
    "flbit_i32_b32": ("u", "u", KEEP, vector_tables.leading_zeros), "flbit_i32_b64": ("u", "U", KEEP, _leading64),
    "flbit_i32": ("u", "u", KEEP, vector_tables.leading_sign_bits),
    "bcnt1_i32_b32": ("u", "u", NONZERO, vector_tables.count_bits),
    "bcnt1_i32_b64": ("u", "U", NONZERO, _count64),
    "pack_ll_b32_b16": ("u", "uu", KEEP, lambda a, b: (a & _u32(0xFFFF)) | (b << _u32(16))),
    "pack_lh_b32_b16": ("u", "uu", KEEP, lambda a, b: (a & _u32(0xFFFF)) | (b & _u32(0xFFFF0000))),
    "pack_hl_b32_b16": ("u", "uu", KEEP, lambda a, b: (a >> _u32(16)) | (b << _u32(16))),
    "pack_hh_b32_b16": ("u", "uu", KEEP, lambda a, b: (a >> _u32(16)) | (b & _u32(0xFFFF0000))),
    # RDNA 3.5 and later: floats on the scalar unit.
    "add_f32": ("f", "ff", KEEP, np.add), "sub_f32": ("f", "ff", KEEP, np.subtract), "mul_f32": ("f", "ff", KEEP,
    np.multiply),
    "cvt_f32_i32": ("f", "i", KEEP, lambda a: a.astype(_f32)), "cvt_f32_u32": ("f", "u", KEEP,
    lambda a: a.astype(_f32)),
    "cvt_i32_f32": ("i", "f", KEEP, vector_tables.TABLE["cvt_i32_f32"][2]),
    "cvt_u32_f32": ("u", "f", KEEP, vector_tables.TABLE["cvt_u32_f32"][2]),
    "cvt_f32_f16": ("f", "h", KEEP, softfloat.from_half),
    "cvt_f16_f32": ("u", "f", KEEP, lambda a: softfloat.f16_bits(np.ascontiguousarray(a))),
    "ceil_f32": ("f", "f", KEEP, np.ceil), "floor_f32": ("f", "f", KEEP, np.floor), "trunc_f32": ("f", "f", KEEP,
    np.trunc),
    "rndne_f32": ("f", "f", KEEP, np.rint),
}  # fmt: skip
_LOGIC: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip
for _name, _function in _LOGIC.items():
    TABLE[f"{_name}_b32"] = ("u", "uu", NONZERO, _function)
    TABLE[f"{_name}_b64"] = ("U", "UU", NONZERO, _function)
TABLE["not_b32"] = ("u", "u", NONZERO, np.invert)
TABLE["not_b64"] = ("U", "U", NONZERO, np.invert)
# exec becomes the function of (source, old exec); the destination gets the old exec.
SAVE_EXEC: dict[str, Callable[[Array, Array], Array]] = {
    **_LOGIC, "andn1": lambda a, e: ~a & e, "orn1": lambda a, e: ~a | e,
}  # fmt: skip
RENAMED = {
    "add_co_u32": "add_u32", "sub_co_u32": "sub_u32", "add_co_i32": "add_i32", "sub_co_i32": "sub_i32",
    "add_nc_u64": "add_u64", "sub_nc_u64": "sub_u64", "and_not1_b32": "andn2_b32", "and_not1_b64": "andn2_b64",
    "or_not1_b32": "orn2_b32", "or_not1_b64": "orn2_b64", "ctz_i32_b32": "ff1_i32_b32", "ctz_i32_b64": "ff1_i32_b64",
    "clz_i32_u32": "flbit_i32_b32", "clz_i32_u64": "flbit_i32_b64", "cls_i32": "flbit_i32",
}  # fmt: skip
TABLE |= {new: TABLE[old] for new, old in RENAMED.items()}
_SAVE_RENAMED = {"and_not1": "andn2", "or_not1": "orn2", "and_not0": "andn1", "or_not0": "orn1"}

_COMPARE = re.compile(r"cmpk?_(eq|lg|gt|ge|lt|le|neq|nlg|nlt|ngt|nle|nge|o|u)_(i32|u32|u64|i64|f32)")
_PREDICATES: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lg": lambda a, b: (a < b) | (a > b), "gt": np.greater, "ge": np.greater_equal, "lt": np.less,
    "le": np.less_equal, "neq": lambda a, b: ~(a == b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "nlt": lambda a, b: ~(a < b), "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b),
    "nge": lambda a, b: ~(a >= b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "u": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
_SAVE = re.compile(r"(\w+)_saveexec_b(32|64)")
# Read or write scc, or their own destination, beside their operands.
_OTHERS = frozenset({
    "cselect_b32", "cselect_b64", "cmov_b32", "cmov_b64", "cmovk_i32", "movk_i32", "addk_i32", "addk_co_i32",
    "mulk_i32",
    "addc_u32", "add_co_ci_u32", "subb_u32", "sub_co_ci_u32", "bitcmp0_b32", "bitcmp1_b32", "bitset0_b32",
    "bitset1_b32",
    "bitcmp0_b64", "bitcmp1_b64", "fmac_f32", "fmaak_f32", "fmamk_f32", "cmp_lg_u64", "getpc_b64",
})  # fmt: skip


# Functions of the vector unit that gfx12 offers on scalars, as v_s_….
TRANSCENDENTAL = frozenset({"exp_f32", "log_f32", "rcp_f32", "rsq_f32", "sqrt_f32"})


def bind_transcendental(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    items = [operand(text) for text in instruction.operands]
    if instruction.modifiers:
        raise UnknownOperand(f"modifiers of {instruction.mnemonic} are not modelled")
    function = vector_tables.TABLE[instruction.mnemonic.removeprefix("v_s_").removesuffix("_e64")][2]
    return _table(state, instruction, items, ("f", "f", KEEP, function))


def is_modelled(name: str) -> bool:
    save = _SAVE.fullmatch(name)
    if save:
        return _SAVE_RENAMED.get(save[1], save[1]) in SAVE_EXEC
    return name in TABLE or name in _OTHERS or softfloat.is_extreme(name) or bool(_COMPARE.fullmatch(name))


def reader(state: WorkGroupState, item: Operand, kind: str) -> Callable[[], Array]:
    """Return a scalar operand as [waves] values of a kind."""
    dtype, width, is_float = KINDS[kind]
    if item.negative or item.absolute:
        raise UnknownOperand("source modifiers on scalar instructions are not modelled")
    if item.kind == "literal":
        bits = item.bits(width, is_float)
        constant = np.full(state.waves, bits, f"<u{width // 8}").view(dtype)
        return lambda: constant
    if item.kind == "null":
        zero = np.zeros(state.waves, dtype)
        return lambda: zero
    if item.kind == "scc":
        return lambda: state.scc.astype(dtype)
    if item.kind != "s":
        raise UnknownOperand("a scalar operand is needed")
    if width == 64 and item.index % 2:
        return lambda: state.scalar(item.index, 64).view(dtype)
    if width == 16:
        return lambda: np.ascontiguousarray(state.S[:, item.index]).astype(np.uint16).view(dtype)
    # A copy: a view of a register would change under an instruction that writes it and uses it afterwards.
    view = (state.S[:, item.index] if width == 32 else state.S64[:, item.index // 2]).view(dtype)
    return lambda: view


def _writer(state: WorkGroupState, item: Operand, kind: str) -> Callable[[Array], None]:
    width = KINDS[kind][1]
    if item.kind == "null":
        return lambda value: None
    if item.kind != "s":
        raise UnknownOperand("a scalar destination is needed")
    index, unsigned = item.index, f"u{width // 8}"
    if index + width // 32 > EXEC - 1 or (width == 64 and index % 2):
        return lambda value: state.set_scalar(index, np.asarray(value).view(unsigned), width)
    column = (state.S[:, index] if width == 32 else state.S64[:, index // 2]).view(KINDS[kind][0])

    def put(value: Array) -> None:
        if state.together:
            column[...] = value
        else:
            np.copyto(column, value, where=state.group)

    return put


def _short(item: Operand) -> Operand:
    """Return a 16-bit immediate of SOPK, printed without its sign."""
    if item.kind != "literal":
        raise UnknownOperand("an immediate is needed")
    value = int(item.value) & 0xFFFF
    return Operand("literal", value=value - 0x10000 if value & 0x8000 else value)


def bind(state: WorkGroupState, instruction: Instruction) -> BoundInstruction:
    name = instruction.mnemonic[2:]
    items = [operand(text) for text in instruction.operands]
    if instruction.modifiers:
        raise UnknownOperand(f"modifiers of {instruction.mnemonic} are not modelled")
    compare, save = _COMPARE.fullmatch(name), _SAVE.fullmatch(name)
    if compare:
        return _compare(state, instruction, items, compare, short=name.startswith("cmpk"))
    if save:
        return _save_exec(state, instruction, items, save)
    if softfloat.is_extreme(name):
        kind, kinds, function = softfloat.extreme_entry(state, name)
        return _table(state, instruction, items, (kind, kinds, KEEP, function))
    if name in TABLE:
        return _table(state, instruction, items, TABLE[name])
    if name in _OTHERS:
        return _other(state, instruction, items, name)
    raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")


def _registers(*items: Operand) -> tuple[int, ...]:
    return tuple(n for item in items for n in item.registers) + ((SCC,) if any(i.kind == "scc" for i in items) else ())


def _table(state: WorkGroupState, instruction: Instruction, items: list[Operand], entry: Entry) -> BoundInstruction:
    kind, kinds, scc, function = entry
    if len(items) != len(kinds) + 1:
        raise UnknownInstruction(f"{instruction.mnemonic} with {len(items)} operands is not modelled")
    reads = [reader(state, item, k) for item, k in zip(items[1:], kinds, strict=True)]
    write = _writer(state, items[0], kind)

    def keep() -> None:
        write(function(*[read() for read in reads]))

    def nonzero() -> None:
        value = function(*[read() for read in reads])
        condition = value != 0
        write(value)
        state.set_scc(condition)

    def given() -> None:
        value, condition = function(*[read() for read in reads])
        write(value)
        state.set_scc(condition)

    run = {KEEP: keep, NONZERO: nonzero, GIVEN: given}[scc]
    written = _registers(items[0]) + (() if scc == KEEP else (SCC,))
    bitwise = instruction.mnemonic[2:].rsplit("_", 1)[0] in _BITWISE and len(items) <= 3
    flow = _bitwise_flow(instruction, items) if bitwise else None
    return BoundInstruction(instruction, run, _registers(*items[1:]), scalar_writes=written, flow=flow)


_BITWISE = frozenset({"and", "or", "xor", "andn2", "orn2", "not", "mov", "xnor", "and_not1", "or_not1", "nand", "nor"})


def _bitwise_flow(instruction: Instruction, items: list[Operand]) -> Callable[[Any], None]:
    """Move undefinedness bit by bit: lane masks are combined that are each defined only where they matter."""
    name = instruction.mnemonic[2:].rsplit("_", 1)[0]
    words = 2 if instruction.mnemonic.endswith("64") else 1

    def flow(defined: Any) -> None:
        defined.bitwise(name, items, words)

    return flow


def _compare(
    state: WorkGroupState, instruction: Instruction, items: list[Operand], found: re.Match[str], short: bool
) -> BoundInstruction:
    kind = {"i32": "i", "u32": "u", "u64": "U", "i64": "I", "f32": "f"}[found[2]]
    second = items[1]
    if short:
        second = _short(second) if kind == "i" else second
    a, b, predicate = reader(state, items[0], kind), reader(state, second, kind), _PREDICATES[found[1]]

    def run() -> None:
        state.set_scc(predicate(a(), b()))

    return BoundInstruction(instruction, run, _registers(items[0], second), scalar_writes=(SCC,))


def _save_exec(
    state: WorkGroupState, instruction: Instruction, items: list[Operand], found: re.Match[str]
) -> BoundInstruction:
    name = _SAVE_RENAMED.get(found[1], found[1])
    if name not in SAVE_EXEC:
        raise UnknownInstruction(f"{instruction.mnemonic} is not modelled")
    function, kind = SAVE_EXEC[name], "u" if found[2] == "32" else "U"
    source, write = reader(state, items[1], kind), _writer(state, items[0], kind)
    width = int(found[2])

    def run() -> None:
        old = state.scalar(EXEC, width).copy()
        new = function(source(), old)
        write(old)
        state.set_scalar(EXEC, new, width)
        state.set_scc(new != 0)

    words = tuple(range(EXEC, EXEC + width // 32))
    written = (*_registers(items[0]), *words, SCC)

    def flow(defined: Any) -> None:
        # In lanes that are off, the source does not matter: exec stays 0 there.
        defined.into_exec(items[1], width // 32, only_on=name in ("and", "andn1"))
        defined.clear_scalars(written)

    return BoundInstruction(instruction, run, _registers(items[1]) + words, scalar_writes=written, flow=flow)


def _other(state: WorkGroupState, instruction: Instruction, items: list[Operand], name: str) -> BoundInstruction:
    if name == "getpc_b64":
        raise UnknownInstruction("s_getpc_b64 is not modelled: code has no addresses here")
    wide = name.endswith("64")
    kind = "U" if wide else "u"
    if name.startswith("bitcmp"):
        value, bit, want = reader(state, items[0], kind), reader(state, items[1], "u"), name[6] == "1"
        size = np.uint32(63 if wide else 31)

        def run() -> None:
            one = (value().astype(_u64) >> (bit() & size).astype(_u64)) & _u64(1)
            state.set_scc((one == 1) == want)

        return BoundInstruction(instruction, run, _registers(*items), scalar_writes=(SCC,))
    if name in ("fmac_f32", "fmaak_f32", "fmamk_f32"):
        sources = [*items[1:], items[0]] if name == "fmac_f32" else items[1:]
        reads, put = [reader(state, item, "f") for item in sources], _writer(state, items[0], "f")

        def run() -> None:
            put(softfloat.fma32(*[np.ascontiguousarray(read()) for read in reads]))

        return BoundInstruction(instruction, run, _registers(*sources), scalar_writes=_registers(items[0]))
    write, destination = _writer(state, items[0], kind), reader(state, items[0], kind)
    short = (
        [_short(items[1])] if name in ("cmovk_i32", "movk_i32", "addk_i32", "addk_co_i32", "mulk_i32") else items[1:]
    )
    reads = [reader(state, item, "u" if name.startswith("bitset") else kind) for item in short]
    own = name in ("cmovk_i32", "addk_i32", "addk_co_i32", "mulk_i32") or name[:4] in ("cmov", "bits")
    takes_scc = name.startswith(("cselect", "cmov", "addc", "subb")) or name in ("add_co_ci_u32", "sub_co_ci_u32")
    sets_scc = name in ("addk_i32", "addk_co_i32", "addc_u32", "subb_u32", "add_co_ci_u32", "sub_co_ci_u32")

    def execute() -> None:
        first = reads[0]()
        if name.startswith("cselect"):
            write(np.where(state.scc, first, reads[1]()))
        elif name.startswith("cmov"):
            write(np.where(state.scc, first, destination()))
        elif name == "movk_i32":
            write(first)
        elif name == "mulk_i32":
            write(destination() * first)
        elif name.startswith("bitset"):
            bit = np.ones(state.waves, write_dtype) << (first & np.uint32(63 if wide else 31)).astype(write_dtype)
            write(destination() | bit if name[6] == "1" else destination() & ~bit)
        elif name.startswith("addk"):
            value, over = _signed_over(destination().view(_i32), first.view(_i32), False)
            write(value.view(_u32))
            state.set_scc(over)
        else:
            minus = name.startswith("sub")
            value, over = _unsigned_over(first, reads[1](), minus, state.scc.astype(_i64))
            write(value)
            state.set_scc(over)

    write_dtype = KINDS[kind][0]
    used = _registers(*short) + (_registers(items[0]) if own else ()) + ((SCC,) if takes_scc else ())
    written = _registers(items[0]) + ((SCC,) if sets_scc else ())
    return BoundInstruction(instruction, execute, used, scalar_writes=written)
