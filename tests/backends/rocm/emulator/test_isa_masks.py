"""Comparisons, selects, carries, mixed precision, truth tables, packed pairs and the three instructions of a float32
division that our kernels use, bit for bit as AMD's documents define them (isa_masks.py, which says where they cannot be
meant), on every arch whose code has them."""

import random
import re
from typing import Any

import asmkit
import isa_masks
import isa_numbers as number
import isa_run
import numpy as np
import pytest
from isa_numbers import F16, F32, M32, signed
from isa_vector import agrees


def mask_name(arch: str, at: int) -> str:
    named = {106: ("vcc", "vcc_lo"), 126: ("exec", "exec_lo")}.get(at, (f"s[{at}:{at + 1}]", f"s{at}"))
    return named[asmkit.lanes(arch) == 32]


def columns(arch: str, seed: str, *kinds: str) -> tuple[list[list[int]], dict[int, Any]]:
    """Values and the registers they are in: the n-th from v[16 + 4n] on."""
    draw = random.Random(seed)
    values = [isa_run.column(kind, asmkit.lanes(arch), draw) for kind in kinds]
    if len(values) > 1 and kinds[0] == kinds[1]:
        values[1][::3] = values[0][::3]
    vectors = {
        16 + 4 * n + j: words
        for n, (kind, column) in enumerate(zip(kinds, values, strict=True))
        for j, words in enumerate(isa_run.words(kind, column, 0x1234))
    }
    return values, vectors


def bits(machine: Any, at: int, lanes: int) -> list[int]:
    return [asmkit.mask_of(machine, at) >> lane & 1 for lane in range(lanes)]


ON = 0x7F3A_5F01_DEAD_BEE6
_ORDERS = ("lt", "eq", "le", "gt", "ge")
_FLOATS = (*_ORDERS, "lg", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt")
COMPARES = {
    "gfx942": " ".join(f"v_cmp_{p}_{kind}_e64" for p in (*_ORDERS, "ne")
                       for kind in ("i16", "u16", "i32", "u32", "i64", "u64")),
    "gfx1100": " ".join(["v_cmpx_lt_u32_e32", *(f"v_cmp_{p}_f32_e64" for p in _FLOATS)]),
}  # fmt: skip
_CARRIES9 = "v_add_co_u32_e32 v_addc_co_u32_e32 v_add_co_u32_e64 v_addc_co_u32_e64 v_sub_co_u32_e64 v_subb_co_u32_e64"
_CARRIES11 = "v_add_co_u32 v_add_co_ci_u32_e64 v_sub_co_u32 v_sub_co_ci_u32_e64"
CARRIES = {arch: _CARRIES9 if asmkit.lanes(arch) == 64 else _CARRIES11 for arch in asmkit.ARCH_NAMES}
WIDE = dict.fromkeys(asmkit.ARCH_NAMES, "v_mad_u64_u32 v_mad_i64_i32")
WIDE["gfx1201"] = "v_mad_co_u64_u32 v_mad_co_i64_i32"
MIXED = {"": "v_fma_mix_f32 v_fma_mixlo_f16 v_fma_mixhi_f16"}
PACKED = dict.fromkeys(("gfx90a", "gfx942", "gfx950"), "v_pk_add_f32 v_pk_mul_f32 v_pk_fma_f32")


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_cmpx?_(?!class).*", COMPARES))
def test_comparison(arch: str, name: str) -> None:
    """A bit for every lane that is on, 0 for the others."""
    found = re.fullmatch(r"v_cmp(x?)_(\w+)_([iuf])(16|32|64)_(e32|e64|sdwa)", name)
    assert found, name
    to_exec, predicate, kind, encoding = bool(found[1]), found[2], found[3] + found[4], found[5]
    lanes, at = asmkit.lanes(arch), 126 if found[1] else 106 if found[5] == "e32" else 8
    for seed in range(3):
        operand = kind if kind == "f32" else f"u{found[4]}"
        (first, second), vectors = columns(arch, f"{name} {seed}", operand, operand)
        words = [isa_run.named(16 + 4 * n, isa_run.registers(operand)) for n in range(2)]
        tail = ""
        if encoding == "sdwa":
            raw = columns(arch, f"sdwa {seed}", "u32", "u32")
            first, second = [x >> 16 for x in raw[0][0]], [signed(x >> 8, 8) & 0xFFFF for x in raw[0][1]]
            vectors, tail, words[1] = raw[1], " src0_sel:WORD_1 src1_sel:BYTE_1", "sext(v20)"
        elif encoding == "e64" and kind == "f32":
            words = [f"-{words[0]}", f"|{words[1]}|"]
            first, second = [x ^ F32.sign for x in first], [number.magnitude(F32, x) for x in second]
        text = f"{name} {'' if to_exec else mask_name(arch, at) + ', '}{', '.join(words)}{tail}"
        on = ON & (1 << lanes) - 1
        machine = asmkit.execute(arch, [text], vectors, exec_mask=on)
        expected = [
            int(isa_masks.compare(predicate, kind, x, y)) & on >> n
            for n, (x, y) in enumerate(zip(first, second, strict=True))
        ]
        assert bits(machine, at, lanes) == expected, text


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_cmp_class_f32_e64", {"gfx942": "v_cmp_class_f32_e64"}))
def test_class_names_every_kind_of_number(arch: str, name: str) -> None:
    lanes = asmkit.lanes(arch)
    for seed in range(4):
        (value, wanted), vectors = columns(arch, f"{name} {seed}", "f32", "u32")
        machine = asmkit.execute(arch, [f"{name} {mask_name(arch, 8)}, v16, v20"], vectors)
        expected = [int(isa_masks.cmp_class_f32(*pair)) for pair in zip(value, wanted, strict=True)]
        assert bits(machine, 8, lanes) == expected


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_(dual_)?cndmask_b32.*"))
def test_select(arch: str, name: str) -> None:
    lanes, at = asmkit.lanes(arch), 8 if name.endswith("_e64") else 106
    (no, yes), vectors = columns(arch, name, "u32", "u32")
    chosen = random.Random(name).getrandbits(lanes)
    text = f"{name} v0, v16, v20" + ("" if "dual" in name else f", {mask_name(arch, at)}")
    text += " :: v_dual_mov_b32 v9, v16" if "dual" in name else ""
    if name.endswith("_sdwa"):
        text += " dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_0"
        no, yes = [x >> 16 & 255 for x in no], [x & 0xFFFF for x in yes]
    machine = asmkit.execute(arch, [text], vectors, {at: chosen & M32, at + 1: chosen >> 32})
    assert isa_run.result(machine, "u32") == [(yes if chosen >> n & 1 else no)[n] for n in range(lanes)]


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_(add|addc|sub)_co(_ci)?_u32.*", CARRIES))
def test_carry(arch: str, name: str) -> None:
    """The carry out of a lane that is off is 0, as a comparison's bit is."""
    short, lanes = re.sub(r"_e(32|64)$", "", name[2:]), asmkit.lanes(arch)
    takes = short not in ("add_co_u32", "sub_co_u32")
    out = 106 if name.endswith("_e32") else 8
    into = 106 if name.endswith("_e32") else 10
    for seed in range(3):
        (a, b), vectors = columns(arch, f"{name} {seed}", "u32", "u32")
        carry = random.Random(f"{name} {seed}").getrandbits(lanes)
        on = ON & (1 << lanes) - 1
        text = f"{name} v0, {mask_name(arch, out)}, v16, v20" + (f", {mask_name(arch, into)}" if takes else "")
        machine = asmkit.execute(arch, [text], vectors, {into: carry & M32, into + 1: carry >> 32}, exec_mask=on)
        found, carries = isa_run.result(machine, "u32"), bits(machine, out, lanes)
        for n in range(lanes):
            value, over = isa_masks.CARRIES[short](a[n], b[n], carry >> n & 1)
            expected = (value & M32, int(over)) if on >> n & 1 else (asmkit.JUNK, 0)
            assert (found[n], carries[n]) == expected, (text, n)


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_mad_(co_)?(u64_u32|i64_i32)", WIDE))
def test_wide_product(arch: str, name: str) -> None:
    lanes = asmkit.lanes(arch)
    definition = isa_masks.mad_i64_i32 if name.endswith("i32") else isa_masks.mad_u64_u32
    for seed in range(3):
        values, vectors = columns(arch, f"{name} {seed}", "u32", "u32", "u64")
        machine = asmkit.execute(arch, [f"{name} v[0:1], {mask_name(arch, 8)}, v16, v20, v[24:25]"], vectors)
        found, carries = isa_run.result(machine, "u64"), bits(machine, 8, lanes)
        assert list(zip(found, carries, strict=True)) == [definition(*x) for x in zip(*values, strict=True)]


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_bitop3_b(16|32)"))
def test_truth_tables(arch: str, name: str) -> None:
    kind = f"u{name[-2:]}"
    draw = random.Random(name)
    for table in (0, 0xFF, 0xF0, 0xCC, 0xAA, *(draw.randrange(256) for _ in range(20))):
        values, vectors = columns(arch, f"{name} {table}", kind, kind, kind)
        machine = asmkit.execute(arch, [f"{name} v0, v16, v20, v24 bitop3:{table:#x}"], vectors)
        mask = (1 << int(name[-2:])) - 1
        expected = [isa_masks.bitop3(table, *x) & mask for x in zip(*values, strict=True)]
        assert isa_run.result(machine, kind) == expected, hex(table)


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_fma_mix(lo|hi)?_f(16|32)", MIXED))
def test_mixed_precision(arch: str, name: str) -> None:
    draw = random.Random(name)
    for turn in range(24):
        values, vectors = columns(arch, f"{name} {turn}", "f32", "f32", "f32")
        high, narrow = [draw.randrange(2) for _ in range(3)], [draw.randrange(2) for _ in range(3)]
        signs = [(draw.random() < 0.3, draw.random() < 0.3) for _ in range(3)]  # |x|, −x
        words = [f"|v{16 + 4 * n}|" if absolute else f"v{16 + 4 * n}" for n, (absolute, _) in enumerate(signs)]
        words = [f"-{word}" if negative else word for word, (_, negative) in zip(words, signs, strict=True)]
        bits_of = {"op_sel": high, "op_sel_hi": narrow}
        tail = " ".join(f"{key}:[{','.join(map(str, value))}]" for key, value in bits_of.items())
        text = f"{name} v0, {', '.join(words)} {tail}"
        machine = asmkit.execute(arch, [text], vectors)
        found = isa_run.result(machine, "u32")
        for lane, sources in enumerate(zip(*values, strict=True)):
            given = []
            for n, source in enumerate(sources):
                value = isa_masks.mixed(source, narrow[n], high[n])
                given.append(value if value == number.NAN else isa_run.changed("f32", value, *signs[n]))
            single = number.fma(F32, *given)
            if name.endswith("_f32"):
                assert agrees("f32", found[lane], single), (text, [hex(x) for x in sources])
                continue
            half = number.convert(F32, F16, single) if single != number.NAN else single
            shift = 16 if "hi" in name else 0
            assert agrees("f16", found[lane] >> shift & 0xFFFF, half), (text, [hex(x) for x in sources])
            assert found[lane] >> (16 - shift) & 0xFFFF == asmkit.JUNK >> (16 - shift) & 0xFFFF


def test_a_mixed_sum_rounds_twice() -> None:
    """65520 − 2⁻¹³ is 65520 in float32, and a tie of float16 that goes to infinity."""
    for arch in asmkit.ARCH_NAMES:
        vectors = {16: asmkit.bits([-1.0] * asmkit.lanes(arch), np.float32),
                   17: asmkit.bits([2.0**-13] * asmkit.lanes(arch), np.float32),
                   18: asmkit.bits([65520.0] * asmkit.lanes(arch), np.float32)}  # fmt: skip
        body = ["v_fma_mixlo_f16 v0, v16, v17, v18", "v_fma_mixhi_f16 v0, v16, v17, v18"]
        assert int(asmkit.execute(arch, body, vectors).state.V[0, 0, 0]) == 0x7C007C00


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_pk_(add|mul|fma)_f32", PACKED))
def test_packed_pairs(arch: str, name: str) -> None:
    """op_sel and op_sel_hi choose the register for the low and the high result, neg_lo and neg_hi its sign."""
    count, draw = 3 if "fma" in name else 2, random.Random(name)
    function = {"add": number.add, "mul": number.multiply, "fma": number.fma}[name.split("_")[2]]
    for turn in range(16):
        values, vectors = columns(arch, f"{name} {turn}", *["f32"] * 6)
        vectors = {16 + n: vectors[16 + 4 * n] for n in range(6)}
        flags = {key: [draw.randrange(2) for _ in range(count)] for key in ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")}
        tail = " ".join(f"{key}:[{','.join(map(str, value))}]" for key, value in flags.items())
        words = ", ".join(f"v[{16 + 2 * n}:{17 + 2 * n}]" for n in range(count))
        machine = asmkit.execute(arch, [f"{name} v[0:1], {words} {tail}"], vectors)
        for part, (select, sign) in enumerate((("op_sel", "neg_lo"), ("op_sel_hi", "neg_hi"))):
            found = isa_run.result(machine, "u32", part)
            for lane in range(asmkit.lanes(arch)):
                given = [values[2 * n + flags[select][n]][lane] ^ (F32.sign * flags[sign][n]) for n in range(count)]
                assert agrees("f32", found[lane], function(F32, *given)), (tail, [hex(x) for x in given])


@pytest.mark.parametrize(("arch", "name"), isa_run.used(r"v_pk_mov_b32"))
def test_packed_move(arch: str, name: str) -> None:
    values, vectors = columns(arch, name, *["u32"] * 4)
    vectors = {16 + n: vectors[16 + 4 * n] for n in range(4)}
    for low in (0, 1):
        for high in (0, 1):
            machine = asmkit.execute(arch, [f"{name} v[0:1], v[16:17], v[18:19] op_sel:[{low},{high}]"], vectors)
            assert isa_run.result(machine, "u32", 0) == values[low]
            assert isa_run.result(machine, "u32", 1) == values[2 + high]


# Not in our kernels. Inline constants of packed 16-bit instructions have 32 bits: integers are sign-extended, a float
# is a float16 below zeros for float16 instructions, and a float32 for integer instructions.
@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("v_pk_add_u16 v0, v16, -3", 0xFFFD, 0xFFFF), ("v_pk_add_u16 v0, v16, 1.0", 0, 0x3F80),
        ("v_pk_add_u16 v0, v16, 1.0 op_sel:[0,1] op_sel_hi:[1,0]", 0x3F80, 0),
        ("v_pk_add_f16 v0, v16, 1.0", 0x3C00, 0), ("v_pk_add_f16 v0, v16, 1.0 op_sel_hi:[1,0]", 0x3C00, 0x3C00),
        ("v_pk_add_f16 v0, v16, -3", 0xFFFD, 0xFFFF),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", asmkit.ARCH_NAMES)
def test_packed_constants(arch: str, text: str, low: int, high: int) -> None:
    (values,), vectors = columns(arch, text, "u32")
    found = isa_run.result(asmkit.execute(arch, [text], vectors), "u32")
    for lane, value in enumerate(values):
        for shift, constant in ((0, low), (16, high)):
            part, half = value >> shift & 0xFFFF, found[lane] >> shift & 0xFFFF
            if "u16" in text:
                assert half == part + constant & 0xFFFF, (hex(part), hex(half), hex(constant))
            else:
                assert agrees("f16", half, number.add(F16, part, constant))


# The sequence that LLVM makes of a float32 division has a correctly rounded quotient.


ARCHES = list(isa_run.USED)
DIVIDES = isa_run.used(r"v_div_(scale|fmas|fixup)_f32")
SEEDS = range(6)


def operands(arch: str, seed: str, count: int) -> tuple[list[list[int]], dict[int, Any]]:
    draw = random.Random(seed)
    values = [isa_run.column("f32", asmkit.lanes(arch), draw) for _ in range(count)]
    return values, {16 + n: np.array(column, np.uint32) for n, column in enumerate(values)}


def test_every_arch_divides() -> None:
    assert len(DIVIDES) == 3 * len(ARCHES)


@pytest.mark.parametrize("arch", ARCHES)
def test_division_scale(arch: str) -> None:
    for seed in SEEDS:
        (denominator, numerator), vectors = operands(arch, f"scale {seed}", 2)
        for source in (16, 17):
            text = f"v_div_scale_f32 v0, {mask_name(arch, 8)}, v{source}, v16, v17"
            machine = asmkit.execute(arch, [text], vectors)
            found, flags = isa_run.result(machine, "f32"), asmkit.mask_of(machine, 8)
            for lane, (d, n) in enumerate(zip(denominator, numerator, strict=True)):
                value, flag = isa_masks.div_scale_f32((d, n)[source - 16], d, n)
                said = f"{text}: denominator {d:#x}, numerator {n:#x} gives {found[lane]:#x}"
                assert agrees("f32", found[lane], value), said
                assert flags >> lane & 1 == flag, said


@pytest.mark.parametrize("arch", ARCHES)
def test_division_multiply_add(arch: str) -> None:
    for seed in SEEDS:
        values, vectors = operands(arch, f"fmas {seed}", 3)
        chosen = random.Random(seed).getrandbits(asmkit.lanes(arch))
        text = "v_div_fmas_f32 v0, v16, v17, v18"
        machine = asmkit.execute(arch, [text], vectors, {106: chosen & M32, 107: chosen >> 32})
        found = isa_run.result(machine, "f32")
        for lane, sources in enumerate(zip(*values, strict=True)):
            expected = isa_masks.div_fmas_f32(*sources, chosen >> lane & 1)
            assert agrees("f32", found[lane], expected), [hex(x) for x in sources]


@pytest.mark.parametrize("arch", ARCHES)
def test_division_fixup(arch: str) -> None:
    for seed in SEEDS:
        values, vectors = operands(arch, f"fixup {seed}", 3)
        machine = asmkit.execute(arch, ["v_div_fixup_f32 v0, v16, v17, v18"], vectors)
        found = isa_run.result(machine, "f32")
        for lane, sources in enumerate(zip(*values, strict=True)):
            special = any(number.is_nan(F32, x) or number.is_infinite(F32, x) for x in sources[1:])
            if number.is_nan(F32, sources[0]) and not special:
                continue  # an overflow on the way: the sequence below says what is right
            expected = isa_masks.div_fixup_f32(*sources)
            assert agrees("f32", found[lane], expected), [hex(x) for x in sources]


@pytest.mark.parametrize("arch", ARCHES)
def test_quotients_are_rounded_correctly(arch: str) -> None:
    flag, vcc = mask_name(arch, 4), mask_name(arch, 106)
    body = [f"v_div_scale_f32 v2, {flag}, v16, v16, v17", "v_rcp_f32_e32 v3, v2",
            f"v_div_scale_f32 v5, {vcc}, v17, v16, v17", "v_fma_f32 v4, -v2, v3, 1.0", "v_fma_f32 v3, v4, v3, v3",
            "v_mul_f32_e32 v4, v5, v3", "v_fma_f32 v6, -v2, v4, v5", "v_fma_f32 v4, v6, v3, v4",
            "v_fma_f32 v2, -v2, v4, v5", "v_div_fmas_f32 v2, v2, v3, v4",
            "v_div_fixup_f32 v7, v2, v16, v17"]  # fmt: skip
    lanes = asmkit.lanes(arch)
    pairs = [(0xFF7FFFFF, 0x4B000000)]  # once off by one: the inverse of the denominator is denormal
    draw = random.Random(arch)
    for n in range(40 * lanes):
        d, x = isa_run.column("f32", 2, draw)
        if n % 4 == 0:  # large denominators
            d = d & 0x80FFFFFF | (0x7E000000 if n % 8 else 0x7F000000 & ~0x00800000)
        if n % 4 == 1:  # quotients near the smallest normal number
            d, x = d & 0x807FFFFF | 0x5F000000, x & 0x807FFFFF | draw.randrange(0x3B, 0x45) << 23
        pairs.append((d, x))
    for start in range(0, len(pairs) - lanes + 1, lanes):
        some = pairs[start : start + lanes]
        vectors = {16 + n: np.array([pair[n] for pair in some], np.uint32) for n in range(2)}
        found = isa_run.result(asmkit.execute(arch, body, vectors), "f32", 7)
        for lane, (d, x) in enumerate(some):
            expected = number.divide(F32, x, d)
            # Two NaN operands, 0/0: a quiet NaN, of whatever payload.
            assert agrees("f32", found[lane], expected), f"{arch}: {x:#x} / {d:#x} gives {found[lane]:#x}"


def test_an_overflow_before_the_scale_stays_infinite() -> None:
    """V_DIV_FMAS: 2^100 · 2^100 + 1 is infinite as a float32, whatever it is scaled by."""
    for arch in ARCHES:
        vectors = {n: asmkit.bits([2.0**100] * asmkit.lanes(arch), np.float32) for n in (16, 17)}
        machine = asmkit.execute(arch, ["v_div_fmas_f32 v0, v16, v17, 1.0"], vectors, {106: M32, 107: M32})
        assert set(isa_run.result(machine, "f32")) == {F32.infinity}
