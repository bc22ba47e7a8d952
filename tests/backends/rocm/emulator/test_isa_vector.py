"""Vector instructions that our kernels use, bit for bit as AMD's documents define them (isa_vector.py): on every arch
whose code has them, with edge cases and random bits, every kind of source, source modifiers, DPP, SDWA, lanes off."""

import random
import re
import struct
from collections.abc import Callable

import asmkit
import isa_numbers as number
import isa_run
import isa_vector
import numpy as np
import pytest
from isa_numbers import M32, signed

from portattn.backends.rocm.emulator.amdgpu import Checks, Memory, Program
from portattn.backends.rocm.emulator.amdgpu.machine import Machine

USED = isa_run.USED
# Not used by our kernels: once wrong in the model, or modelled for others.
_OTHERS = """
    v_mov_b32_e32 v_not_b32_e32 v_bfrev_b32_e32 v_lshlrev_b32_e32 v_lshrrev_b32_e32 v_ashrrev_i32_e32 v_and_b32_e32
    v_or_b32_e32 v_xor_b32_e32 v_xnor_b32_e32 v_mul_lo_u32 v_mul_hi_u32 v_mul_hi_i32 v_mul_u32_u24_e32 v_mul_i32_i24_e32
    v_mad_u32_u24 v_mad_i32_i24 v_max_u32_e32 v_min_u32_e32 v_max_i32_e32 v_min_i32_e32 v_and_or_b32 v_or3_b32
    v_lshl_or_b32 v_add3_u32 v_lshl_add_u32 v_add_lshl_u32 v_xad_u32 v_bfe_u32 v_bfe_i32 v_bfi_b32 v_perm_b32
    v_alignbit_b32 v_alignbyte_b32 v_bfm_b32 v_bcnt_u32_b32 v_max3_u32 v_min3_u32 v_med3_u32 v_max3_i32 v_min3_i32
    v_med3_i32 v_cvt_f32_u32_e32 v_cvt_f32_i32_e32 v_cvt_f32_ubyte0_e32 v_cvt_f32_ubyte1_e32 v_cvt_f32_ubyte2_e32
    v_cvt_f32_ubyte3_e32 v_add_f32_e32 v_sub_f32_e32 v_subrev_f32_e32 v_mul_f32_e32 v_max_f32_e32 v_fma_f32 v_max3_f32
    v_rndne_f32_e32 v_floor_f32_e32 v_ceil_f32_e32 v_trunc_f32_e32 v_sqrt_f32_e32 v_rcp_f32_e32 v_rsq_f32_e32
    v_exp_f32_e32 v_log_f32_e32"""
UNUSED = {arch: ["v_med3_f32", "v_min_f32_e32", "v_min3_f32", "v_fract_f32_e32"] for arch in asmkit.ARCH_NAMES} | {
    "gfx1201": ["v_med3_num_f32", "v_min_num_f32_e32", "v_min3_num_f32", "v_fract_f32_e32", "v_maximum_f32",
                "v_minimum_f32", "v_maxmin_num_f32", "v_minmax_num_f32"],
}  # fmt: skip
UNUSED["gfx90a"] += ["v_and_b32_sdwa", "v_add_u32_sdwa", "v_or_b32_sdwa", "v_lshlrev_b16_sdwa"]
UNUSED["gfx942"] += [*_OTHERS.split(), "v_add_u32_e32", "v_sub_u32_e32", "v_subrev_u32_e32", "v_ffbh_u32_e32",
                     "v_ffbl_b32_e32", "v_ffbh_i32_e32"]  # fmt: skip
UNUSED["gfx1100"] += [*_OTHERS.split(), "v_add_nc_u32_e32", "v_sub_nc_u32_e32", "v_subrev_nc_u32_e32",
                      "v_clz_i32_u32_e32", "v_ctz_i32_b32_e32", "v_xor3_b32"]  # fmt: skip
for _arch in ("gfx1100", "gfx1201"):
    UNUSED[_arch].append("v_dot2_bf16_bf16")
SCALED = [f"v_{name}" for name in isa_vector.FLOAT if name.startswith("cvt_scalef32")]
UNUSED["gfx950"] += SCALED
CONSTANT = 0x40490FDB  # the literal of fmaak and fmamk
OFF = 0x9C3A_5F01_DEAD_BEE5  # lanes that are on, where not all are


def base(mnemonic: str) -> str:
    return re.sub(r"_(e32|e64|dpp|sdwa)$", "", mnemonic.removeprefix("v_").removeprefix("dual_"))


def definition(arch: str, name: str, ieee: bool = True) -> isa_vector.Entry | None:
    return isa_vector.defined(isa_run.family(arch), ieee).get({"fmaak_f32": "fma_f32", "fmamk_f32": "fma_f32"}.get(
        base(name), base(name)))  # fmt: skip


CASES = isa_run.checked(
    (arch, name) for arch, names in USED.items() for name in dict.fromkeys([*names, *UNUSED[arch]])
    if name.startswith("v_") and definition(arch, name)
)  # fmt: skip


def constants(kind: str) -> list[tuple[str, int]]:
    """Inline constants: integers sign-extended, floats in the operand's format."""
    width = int(kind[1:])
    found = [(str(n), n & ((1 << width) - 1)) for n in (-16, -1, 0, 1, 31, 64)]
    if width == 32:
        codes = [(text, struct.unpack("<I", struct.pack("<f", float(text)))[0]) for text in ("0.5", "-4.0", "1.0")]
        return [*found, *codes, ("0.15915494", 0x3E22F983), ("0x7f812345", 0x7F812345)]
    return [*found, ("1.0", 0x3C00), ("-0.5", 0xB800)] if kind == "f16" else found


class Call:
    """One instruction's operands: registers, values, and the text."""

    def __init__(self, arch: str, name: str, seed: int) -> None:
        entry = definition(arch, name)
        assert entry is not None
        self.arch, self.name, self.lanes = arch, name, asmkit.lanes(arch)
        self.kind, kinds, self.function = entry
        self.kinds = kinds.split()
        self.random = random.Random(f"{name} {seed}")
        self.accumulates = base(name) in isa_vector.ACCUMULATING
        self.sources = [isa_run.column(kind, self.lanes, self.random) for kind in self.kinds]
        if len(self.sources) > 1:  # equal operands
            for lane in range(0, self.lanes, 5):
                if self.kinds[0] == self.kinds[1]:
                    self.sources[1][lane] = self.sources[0][lane]
        reads_a, writes_a = (base(name) in names for names in (("accvgpr_read_b32", "accvgpr_mov_b32"),
            ("accvgpr_write_b32", "accvgpr_mov_b32")))  # fmt: skip
        self.shift = 256 if reads_a else 0
        self.plane = 256 if writes_a else 0
        self.words = [
            isa_run.named(16 + 4 * n, isa_run.registers(kind), "a" if reads_a else "v")
            for n, kind in enumerate(self.kinds)
        ]
        self.target = isa_run.named(0, isa_run.registers(self.kind), "a" if writes_a else "v")
        if self.accumulates:
            self.target, self.plane = self.words.pop(), 16 + 4 * (len(self.kinds) - 1)
        constant = {"fmaak_f32": 2, "fmamk_f32": 1}.get(base(name))
        if constant is not None:
            self.words[constant], self.sources[constant] = hex(CONSTANT), [CONSTANT] * self.lanes
        self.scalars: dict[int, int] = {}

    def run(self, modifiers: str = "", on: int | None = None) -> list[int]:
        vectors = {
            self.shift + 16 + 4 * n + j: column
            for n, (kind, values) in enumerate(zip(self.kinds, self.given, strict=True))
            for j, column in enumerate(isa_run.words(kind, values, 0x5A5A))
        }
        text = f"{self.name} {self.target}, {', '.join(self.words)}{modifiers}"
        if self.name.startswith("v_dual"):
            text += " :: v_dual_mov_b32 v9, v16"
        self.text = text
        machine = asmkit.execute(self.arch, [text], vectors, self.scalars, exec_mask=on)
        return isa_run.result(machine, self.kind, self.plane)

    def check(self, modifiers: str = "", given: list[list[int]] | None = None) -> None:
        """Run it; `given` are the registers, where they differ from the sources that the definition sees."""
        self.given = given or self.sources
        found = self.run(modifiers)
        for lane, values in enumerate(zip(*self.sources, strict=True)):
            expected = isa_vector.masked(self.kind, self.function(*values))
            assert isa_vector.agrees(self.kind, found[lane], expected), (
                f"{self.arch}: {self.text}: {[hex(v) for v in values]} gives {found[lane]:#x}, "
                f"the documents say {expected if isinstance(expected, tuple) else hex(expected)}"
            )


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_registers(arch: str, name: str) -> None:
    if name.endswith(("_sdwa", "_dpp")):
        modifiers = {"dpp": " quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf"}.get(name[-3:], "")
        if not modifiers:
            modifiers = " dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD"
            modifiers += " src1_sel:DWORD" if len(definition(arch, name)[1].split()) > 1 else ""  # type: ignore[index]
        Call(arch, name, 0).check(modifiers)
        return
    for seed in range(3):
        Call(arch, name, seed).check()


PLAIN = [(arch, name) for arch, name in CASES if not name.endswith(("_sdwa", "_dpp")) and "accvgpr" not in name]


@pytest.mark.parametrize(("arch", "name"), PLAIN)
def test_constants_and_scalars(arch: str, name: str) -> None:
    kind = Call(arch, name, 0).kinds[0]
    # Which half a constant fills is documented for no packed number of 16 bits.
    for text, value in constants(kind) if name != "v_pk_mul_f16" else ():
        call = Call(arch, name, 1)
        call.words[0], call.sources[0] = text, [value] * call.lanes
        call.check()
    if name.startswith("v_dual") or kind.endswith("64"):
        return
    call, value = Call(arch, name, 2), random.Random(name).choice(isa_run.edges(kind))
    call.words[0], call.scalars[5], call.sources[0] = "s5", value, [value] * call.lanes
    call.check()


SIGNED = [
    (arch, name) for arch, name in PLAIN
    if definition(arch, name)[1].startswith("f") and not re.search(r"_e32|dual|aak|amk|dot2acc", name)  # type: ignore[index]
]  # fmt: skip


@pytest.mark.parametrize(("arch", "name"), SIGNED)
def test_signs_of_sources(arch: str, name: str) -> None:
    for which in range(4):
        call = Call(arch, name, 4 + which)
        given = [list(values) for values in call.sources]
        for n, kind in enumerate(call.kinds):
            if kind[0] != "f":
                continue
            absolute, negative = call.random.random() < 0.5, call.random.random() < 0.5
            word = f"|{call.words[n]}|" if absolute else call.words[n]
            call.words[n] = f"-{word}" if negative else word
            call.sources[n] = [isa_run.changed(kind, value, absolute, negative) for value in given[n]]
        call.check(given=given)


@pytest.mark.parametrize(("arch", "name"), PLAIN)
def test_lanes_that_are_off_keep_their_value(arch: str, name: str) -> None:
    call = Call(arch, name, 3)
    call.given, on = call.sources, OFF & (1 << call.lanes) - 1
    found = call.run(on=on)
    everywhere = Call(arch, name, 3)
    everywhere.given = everywhere.sources
    written = everywhere.run()
    old = call.sources[-1] if call.accumulates else [asmkit.JUNK * 0x1_0000_0001] * call.lanes
    mask = (1 << 16 if call.kind.endswith("16") else 1 << 32 * isa_run.registers(call.kind)) - 1
    for lane in range(call.lanes):
        assert found[lane] == (written[lane] if on >> lane & 1 else old[lane] & mask), lane


@pytest.mark.parametrize("arch", [arch for arch in asmkit.ARCH_NAMES if arch != "gfx1201"])
def test_extremes_without_ieee_mode(arch: str) -> None:
    """A descriptor with .amdhsa_ieee_mode 0: a signalling NaN comes out as it is."""
    for name in ("v_max_f32_e32", "v_min_f32_e32", "v_max3_f32", "v_med3_f32"):
        call = Call(arch, name, 5)
        text = asmkit.text(arch, [f"{name} v0, {', '.join(call.words)}"])
        text = text.replace("\t.end_amdhsa_kernel", "\t\t.amdhsa_ieee_mode 0\n\t.end_amdhsa_kernel")
        machine = Machine(Program.parse(text).assembly, 1, 0, Checks(undefined=False))
        machine.renew(Memory(), 100)
        machine.start((0, 0, 0), 0)
        for n, values in enumerate(call.sources):
            machine.state.V[16 + 4 * n] = np.array(values, np.uint32)
        machine.finish()
        function = definition(arch, name, ieee=False)[2]  # type: ignore[index]
        assert isa_run.result(machine, "f32") == [function(*values) for values in zip(*call.sources, strict=True)]


@pytest.mark.parametrize("name", SCALED)
def test_words_of_scaled_conversions(name: str) -> None:
    """op_sel chooses the source's word, an fp4's byte; into fp8 the destination's word, and the other is kept."""
    source, fp4, narrows = name.rpartition("_")[2], name.endswith("fp4"), "_pk_fp8" in name or "_pk_bf8" in name
    for chosen in range(4 if fp4 else 2):
        call = Call("gfx950", name, 30 + chosen)
        given = [list(values) for values in call.sources]
        if narrows:
            call.given, last = given, 3 if source == "f32" else 2
            found = call.run(f" op_sel:[{','.join(['0'] * last)},{chosen}]")
            assert {x >> 16 * (1 - chosen) & 0xFFFF for x in found} == {asmkit.JUNK >> 16 * (1 - chosen) & 0xFFFF}
            for lane, values in enumerate(zip(*call.sources, strict=True)):
                assert isa_vector.agrees(call.kind, found[lane] >> 16 * chosen, call.function(*values)), call.text
            continue
        call.sources[0] = [value >> (8 if fp4 else 16) * chosen for value in given[0]]
        call.check(f" op_sel:[{chosen & 1},{chosen >> 1},0]", given)


SDWA = [(arch, name) for arch, name in CASES if name.endswith("_sdwa")]
FIELDS = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16), **{f"BYTE_{n}": (8 * n, 8) for n in range(4)}}


@pytest.mark.parametrize(("arch", "name"), SDWA)
def test_sdwa(arch: str, name: str) -> None:
    """Sources are fields, sign-extended with sext(); the result goes into a field, the rest is 0, kept, or its sign."""
    draw = random.Random(name)
    for turn in range(24):
        call = Call(arch, name, 10 + turn)
        raw = [isa_run.column("u32", call.lanes, call.random) for _ in call.sources]
        modifiers = ""
        for n, kind in enumerate(call.kinds):
            choice = draw.choice(["WORD_0", "WORD_1"] if kind == "f16" else list(FIELDS))
            first, width = FIELDS[choice]
            extend = kind[0] == "u" and draw.random() < 0.5
            modifiers += f" src{n}_sel:{choice}"
            call.words[n] = f"sext(v{16 + 4 * n})" if extend else call.words[n]
            parts = [number.field(value, first, width) for value in raw[n]]
            call.sources[n] = [signed(part, width) & M32 if extend else part for part in parts]
        target = draw.choice(list(FIELDS)) if call.kind == "u32" else "DWORD"
        unused = draw.choice(["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
        call.given, call.kinds = raw, ["u32"] * len(raw)
        found = call.run(f" dst_sel:{target} dst_unused:{unused}{modifiers}")
        first, width = FIELDS[target]
        for lane, values in enumerate(zip(*call.sources, strict=True)):
            expected = isa_vector.masked(call.kind, call.function(*values))
            if call.kind == "u32" and width < 32:
                expected = placed(expected, asmkit.JUNK, first, width, unused)
            assert isa_vector.agrees(call.kind, found[lane], expected), (call.text, [hex(v) for v in values])


def placed(value: int, old: int, first: int, width: int, unused: str) -> int:
    part = number.field(value, 0, width)
    if unused == "UNUSED_PRESERVE":
        return old & ~(((1 << width) - 1) << first) | part << first
    return (signed(part, width) if unused == "UNUSED_SEXT" else part) << first & M32


DPP: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[3,0,1,1]": lambda i: (i & ~3) + (3, 0, 1, 1)[i & 3],
    "row_shl:1": lambda i: i + 1 if i & 15 < 15 else None, "row_shr:4": lambda i: i - 4 if i & 15 >= 4 else None,
    "row_ror:7": lambda i: (i & ~15) + (i - 7) % 16, "row_mirror": lambda i: i ^ 15, "row_half_mirror": lambda i: i ^ 7,
}  # fmt: skip


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch, name in CASES if name.endswith("_dpp")])
def test_dpp(arch: str, name: str) -> None:
    """Source 0 comes from another lane; without one, from one that is off, the lane is not written, or reads 0."""
    for turn, (control, source) in enumerate(DPP.items()):
        for bound in (False, True):
            call = Call(arch, name, 20 + turn)
            on = OFF & (1 << call.lanes) - 1
            call.given = call.sources
            tail = " row_mask:0x7 bank_mask:0xb" + (" bound_ctrl:1" if bound else "")
            found = call.run(f" {control}{tail}", on)
            for lane, values in enumerate(zip(*call.sources, strict=True)):
                at = source(lane)
                valid = at is not None and bool(on >> at & 1)
                enabled = 0x7 >> lane // 16 & 1 and 0xB >> lane // 4 % 4 & 1
                if on >> lane & 1 and enabled and (valid or bound):
                    moved = call.sources[0][at] if valid and at is not None else 0
                    expected = isa_vector.masked(call.kind, call.function(moved, *values[1:]))
                else:
                    expected = asmkit.JUNK
                assert isa_vector.agrees(call.kind, found[lane], expected), (call.text, lane)
