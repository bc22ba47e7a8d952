"""The interpreter of AMD's pseudocode on programs of our own, and the comparison of definitions with texts."""

from typing import Any

import isa_against_text
import isa_numbers as number
import pytest
from isa_numbers import F16, F32, NAN
from isa_pseudocode import Run
from isa_values import NotUnderstood, Value, of

A, B = Value(0xF0000003, 32, "b"), Value(0x00000005, 32, "b")


def run(text: str, **values: Any) -> Any:
    """What D0 holds after a program of two sources."""
    found = {"S0": A, "S1": B, "laneId": of(3, 32, "u")} | values
    return Run(text, found, {"V_TWICE_U32": "D0.u32 = S0.u32 + S0.u32"}).run()["D0"].bits


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("D0.u32 = S0.u32 - S1.u32 * 2U", 0xEFFFFFF9), ("D0.i32 = S0.i32 >> S1[1 : 0].u32", 0xF8000001),
        ("D0.u32 = S0.u32 >> 4U", 0x0F000000), ("D0.u64 = { S1.u32, S0.u32 }", 0x5F0000003),
        ("D0.u32[31 : 0] = S1.u32[0 : 31]", 0xA0000000), ("D0.u64 = 64'U(S0.u32) + 64'U(S0.u32)", 0x1E0000006),
        ("D0.i32 = 32'I(signext(S0.i16) + 4LL)", 7), ("D0.u32 = S0.i32 < S1.i32 ? 7U : 8U", 7),
        ("D0.u32 = S0.u32 < S1.u32 ? 7U : 8U", 8), ("D0.u32 = v_twice_u32(S1.u32)", 10),
        ("tmp = 4U;\ntmp += S1.u32; // a comment\nD0.u32 = tmp.u32", 9),
        ("if S0.u32 == 1U then\nD0.u32 = 1U\nelsif S1.u32 == 5U then\nD0.u32 = 2U\nelse\nD0.u32 = 3U\nendif", 2),
        ("if S0.u32 == 1U then\nD0.u32 = 1U\nelse\nif S1.u32 == 5U then\nD0.u32 = 4U\nendif\nendif", 4),
        ("t = 0U;\nfor i in 0 : 3 do\nt = t + 32'U(S1[i])\nendfor;\nD0.u32 = t", 2),
        ("F = lambda(a, b) (\na + b * 2U);\nD0.u32 = F(S1.u32, 3U)", 11),
        ("F = lambda(n) (\ndeclare in : 8'B[4];\nfor i in 0 : 3 do\nin[i] = S0[i * 8 + 7 : i * 8].b8\nendfor;\n"
         "if n.u32 >= 4U then\nreturn 8'0xff\nelse\nreturn in[n]\nendif);\n"
         "D0[7 : 0] = F(S1.u32);\nD0[15 : 8] = F(3U)", 0xF0FF),
        ("D0.u64[laneId] = S1.u32 <> 5U", 0), ("D0.u64[laneId] = S1.u32 == 5U", 8),
        ("D0.u32 = 16'U(~S0.b16) | 16'0U", 0xFFFC),
    ],
)  # fmt: skip
def test_integers(text: str, expected: int) -> None:
    assert run(text) == expected


ONE, MINUS_ZERO, SIGNALLING = (Value(bits, 32, "b") for bits in (0x3F800000, 0x80000000, 0xFFA00001))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("D0.f32 = fma(S0.f32, S0.f32, S0.f32)", 0x40000000), ("D0.f32 = S0.f32 + -S0.f32", 0),
        ("D0.f32 = 2.0F ** 3 * S0.f32", 0x41000000), ("D0.f32 = 1.0F / 0.0F", F32.infinity),
        ("D0.u32 = S1.f32 == 0.0F ? 1U : 0U", 1), ("D0.u32 = 64'F(S1.f32) == +0.0 ? 1U : 0U", 0),
        ("D0.u32 = 64'F(S1.f32) == -0.0 ? 1U : 0U", 1), ("D0.u32 = isSignalNAN(64'F(S2.f32)) ? 1U : 0U", 1),
        ("D0.f32 = 32'F(cvtToQuietNAN(64'F(S2.f32)))", 0xFFE00001), ("D0.f32 = S2.f32 + S0.f32", NAN),
        ("D0.u32 = S2.f32 <> S0.f32 ? 1U : 0U", 0), ("D0.u32 = !(S2.f32 == S0.f32) ? 1U : 0U", 1),
        ("D0[15 : 0].f16 = f32_to_f16(S0.f32);\nD0[31 : 16].f16 = f32_to_f16(-S0.f32)", 0xBC003C00),
        ("D0.f32 = sign(S1.f32) ? -INF.f32 : +INF.f32", F32.infinity | F32.sign),
        ("D0.f32 = 32'F(0xffc00000)", 0xFFC00000), ("D0.f32 = 32'F(S0.f16)", 0),
    ],
)  # fmt: skip
def test_floats(text: str, expected: int) -> None:
    assert run(text, S0=ONE, S1=MINUS_ZERO, S2=SIGNALLING) == expected


def test_what_is_not_known_is_an_error() -> None:
    for text in ("D0.u32 = frobnicate(S0.u32)", "D0.u32 = S9.u32", "D0.u32 = S0.u32 @ 1", "if S0 D0 = 1"):
        with pytest.raises((NotUnderstood, AssertionError)):
            run(text)


def test_a_text_that_says_something_else_is_found() -> None:
    right = {"V_ADD_U32": "D0.u32 = S0.u32 + S1.u32", "S_BITSET0_B32": "D0.u32[S0.u32[4 : 0]] = 1'0U"}
    equal, bad, missing = isa_against_text.compare(9, right)
    assert set(equal) == set(right)
    assert not bad
    assert "V_SUB_U32" in missing
    wrong = {"V_ADD_U32": "D0.u32 = S0.u32 + S1.u32 + 1U", "S_BITSET0_B32": "D0.u32[S0.u32[4 : 0]] = 1'1U"}
    assert set(isa_against_text.compare(9, wrong)[1]) == set(wrong)


def test_arithmetic_against_the_machine_s() -> None:
    """isa_numbers, which all definitions use, beside float64 of this machine where that is exact."""
    import struct

    def single(bits: int) -> float:
        return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])

    for bits in (1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800001, 0x7F7FFFFF, 0x40490FDB, 0xC2F6E979):
        assert float(number.exact(F32, bits)) == single(bits)
        assert number.rounded(F32, number.exact(F32, bits)) == bits
        for other in (0x3F800000, 0xBF000001, 0x00000003, 0x7F000000):
            product = single(bits) * single(other)  # exact: 48 bits
            if product and abs(product) < 3.4028234e38:
                expected = struct.unpack("<I", struct.pack("<f", product))[0]
                assert number.multiply(F32, bits, other) == expected
    assert number.rounded(F16, number.Fraction(65520)) == F16.infinity
    assert number.rounded(F16, number.Fraction(65519)) == 0x7BFF
