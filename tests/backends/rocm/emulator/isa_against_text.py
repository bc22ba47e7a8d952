"""Compare the definitions of the ISA tests with the text of AMD's documents, for whoever has it.

    python isa_against_text.py TEXTS.json

TEXTS.json: {"9": {"V_ADD_F32": "D0.f32 = …", …}, "11": …, "12": …}, the pseudocode of the CDNA, RDNA3 and RDNA4
references by mnemonic without its encoding. Every definition of isa_vector.py, isa_scalar.py and isa_masks.py that has
a text is computed beside it on the same operands; those without one are named. Exits with 1 where they differ otherwise
than in DEPARTS."""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import isa_masks
import isa_numbers as number
import isa_run
import isa_scalar
import isa_vector
from isa_numbers import F16, F32, NAN
from isa_pseudocode import Run
from isa_values import NotUnderstood, Value, of

# Texts that masks() computes together.
_WITH_MASKS = {"V_CMP_CLASS_F32", "V_DIV_SCALE_F32", "V_DIV_FMAS_F32", "V_DIV_FIXUP_F32", "V_BITOP3_B32",
               "V_FMA_MIX_F32", "V_MAD_U64_U32", "V_MAD_CO_U64_U32", "V_MAD_I64_I32", "V_MAD_CO_I64_I32",
               "V_ADD_CO_U32"}  # fmt: skip
OPERANDS = 400  # tuples of one instruction
# The definitions depart from the text on purpose; isa_masks.py and isa_vector.py say why.
DEPARTS = {
    "V_DIV_FMAS_F32": "2^32 in place of V_DIV_SCALE's 2^64", "V_DIV_SCALE_F32": "a float64 that is never denormal",
    "V_FRACT_F32": "the clamp below 1 stands in the prose alone",
}  # fmt: skip
Case = tuple[str, str, dict[str, Any], Any]  # mnemonic, kind written, values of the text, what the definition gives


def source(kind: str, bits: int) -> Value:
    return Value(bits, 64 if kind == "u64" else 32, "f" if kind == "f32" else "b")


def given(kinds: list[str], values: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {f"S{n}": source(k, v) for n, (k, v) in enumerate(zip(kinds, values, strict=True))}
    # What texts name beside sources: here a vector lane 0 of which every mask has its bit clear.
    return found | {"laneId": of(0, 32, "u"), "VCC": of(0, 64, "u"), "D0": of(0, 64, "b"), "IEEE": of(1, 1, "u")}


def vector(family: int, texts: Mapping[str, str]) -> Iterator[Case]:
    for name, (kind, kinds, function) in isa_vector.defined(family).items():
        draw, split = random.Random(name), kinds.split()
        if f"V_{name.upper()}" not in texts:
            yield f"V_{name.upper()}", "", {}, None
            continue
        for values in zip(*(isa_run.column(k, OPERANDS, draw) for k in split), strict=True):
            found = given(split, values)
            if name in isa_vector.ACCUMULATING:
                found["D0"] = source(split[-1], values[-1])
            yield f"V_{name.upper()}", kind, found, isa_vector.masked(kind, function(*values))


def scalar(family: int, texts: Mapping[str, str]) -> Iterator[Case]:
    for name, (kind, kinds, function) in isa_scalar.defined(family).items():
        prefix = "V_S_" if name == "exp_f32" else "S_"
        draw, split = random.Random(name), kinds.split()
        if prefix + name.upper() not in texts:
            yield prefix + name.upper(), "", {}, None
            continue
        for values in zip(*(isa_run.column(k, OPERANDS, draw) for k in split), strict=True):
            if name.startswith("bfe"):
                values = (values[0], draw.randrange(70) | draw.randrange(64) << 16)
            scc, old = draw.randrange(2), draw.getrandbits(32)
            value, after = function(*values, scc, old)
            found = given(split, values) | {"SCC": of(scc, 1, "u"), "D0": of(old, 32, "b")}
            expected = isa_vector.masked(kind, value)
            yield f"{prefix}{name.upper()}", f"{kind} scc", found, (expected, scc if after is None else int(after))


def masks(family: int, texts: Mapping[str, str]) -> Iterator[Case]:
    draw = random.Random(5)
    for kind in ("i16", "u16", "i32", "u32", "i64", "u64", "f32"):
        operand = kind if kind == "f32" else f"u{kind[1:]}"
        for predicate in isa_masks.PREDICATES:
            for a, b in zip(*(isa_run.column(operand, 40, draw) for _ in range(2)), strict=True):
                b = a if draw.random() < 0.3 else b
                expected = int(isa_masks.compare(predicate, kind, a, b))
                yield f"V_CMP_{predicate.upper()}_{kind.upper()}", "bit", given([operand] * 2, (a, b)), expected
    for _ in range(OPERANDS if texts.keys() & _WITH_MASKS else 0):
        x = [isa_run.column("f32", 1, draw)[0] for _ in range(3)]
        wanted, flag = draw.getrandbits(10), draw.randrange(2)
        asked = int(isa_masks.cmp_class_f32(x[0], wanted))
        yield "V_CMP_CLASS_F32", "bit", given(["f32", "u32"], (x[0], wanted)), asked
        if not number.is_nan(F32, x[0]):  # see test_isa_masks.py
            yield "V_DIV_FIXUP_F32", "f32", given(["f32"] * 3, tuple(x)), isa_masks.div_fixup_f32(*x)
        value, scaled = isa_masks.div_scale_f32(x[1], x[1], x[2])
        text = given(["f32"] * 3, (x[1], x[1], x[2])) | {"D0": source("f32", x[1])}
        yield "V_DIV_SCALE_F32", "f32 vcc", text, (value, scaled)
        text = given(["f32"] * 3, tuple(x)) | {"VCC": of(flag, 64, "u")}
        yield "V_DIV_FMAS_F32", "f32", text, isa_masks.div_fmas_f32(*x, flag)
        a, b, c = (isa_run.column(k, 1, draw)[0] for k in ("u32", "u32", "u64"))
        table = draw.randrange(256)
        yield "V_BITOP3_B32", "bitop", given(["u32"] * 3, (a, b, c)) | {"TABLE": table}, isa_masks.bitop3(
            table, a, b, c & number.M32)  # fmt: skip
        for name, function in (("U64_U32", isa_masks.mad_u64_u32), ("I64_I32", isa_masks.mad_i64_i32)):
            name = f"V_MAD_{'CO_' if family == 12 else ''}{name}"
            yield name, "u64 carry", given(["u32", "u32", "u64"], (a, b, c)), function(a, b, c)
        for name, function in isa_masks.CARRIES.items():
            text = given(["u32"] * 2, (a, b)) | {"VCC": of(flag, 64, "u")}
            sum_, carry = function(a, b, flag)
            yield f"V_{name.upper()}", "u32 vcc", text, (sum_ & number.M32, int(carry))
        high, narrow = [draw.randrange(2) for _ in range(3)], [draw.randrange(2) for _ in range(3)]
        text = given(["f32"] * 3, tuple(x)) | {
            "S": [Value(v, 32, "b") for v in x], "in": [None] * 3,
            "OPSEL": of(sum(h << n for n, h in enumerate(high)), 3, "u"),
            "OPSEL_HI": of(sum(h << n for n, h in enumerate(narrow)), 3, "u"),
        }  # fmt: skip
        single = number.fma(F32, *(isa_masks.mixed(*part) for part in zip(x, narrow, high, strict=True)))
        half = NAN if single == NAN else number.convert(F32, F16, single)
        yield "V_FMA_MIX_F32", "f32", text, single
        yield "V_FMA_MIXLO_F16", "f16", text, half


def outcome(text: str, kind: str, values: dict[str, Any], texts: dict[str, str]) -> Any:
    """What a text gives, in the shape of the definition's result."""
    if "TABLE" in values:  # the instruction's fields, which no value holds
        text, table = text.split("\n", 1)[1], values["TABLE"]
        values = values | {"TTBL": of(table, 32, "u")}
    end = Run(text, values, texts).run()
    first, *second = kind.split()
    if kind == "bit":
        return end["D0"].bits & 1
    found = end.get("D", end["D0"]) if kind == "bitop" else end["D0"]
    width = {"u16": 16, "f16": 16, "u64": 64}.get(first, 32)
    bits = found.bits if found.bits == NAN else found.bits & ((1 << width) - 1)
    if not second:
        return bits
    other = {"scc": "SCC", "vcc": "VCC", "carry": "D1"}[second[0]]
    return bits, end[other].bits & 1


def compare(family: int, texts: dict[str, str]) -> tuple[dict[str, int], dict[str, str], set[str]]:
    """mnemonic → operands that agree; mnemonic → the first that do not, or why there is no comparison; no text."""
    equal: dict[str, int] = {}
    bad: dict[str, str] = {}
    missing: set[str] = set()
    sources: list[Callable[[int, Mapping[str, str]], Iterator[Case]]] = [vector, scalar, masks]
    for make in sources:
        for name, kind, values, expected in make(family, texts):
            if name not in texts:
                missing.add(name)
            if name in bad or name in missing:
                continue
            try:
                found = outcome(texts[name], kind, values, texts)
            except (NotUnderstood, KeyError, AttributeError, TypeError, AssertionError) as error:
                bad[name] = f"{type(error).__name__}: {error}"
                continue
            first = kind.split()[0]
            pair = (found, expected) if isinstance(found, tuple) else ((found,), (expected,))
            same = isa_vector.agrees(first, pair[0][0], pair[1][0]) and pair[0][1:] == pair[1][1:]
            if same:
                equal[name] = equal.get(name, 0) + 1
            else:
                shown = {key: hex(v.bits) for key, v in values.items() if isinstance(v, Value)}
                bad[name] = f"{shown}: the text gives {found}, the definition {expected}"
    return equal, bad, missing


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    everything, wrong = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), 0
    for family in (9, 11, 12):
        equal, bad, missing = compare(family, everything[str(family)])
        whole = {name: count for name, count in equal.items() if name not in bad}
        print(f"gfx{family}: {len(whole)} instructions as their texts say, {sum(whole.values())} operands")
        for name, problem in sorted(bad.items()):
            wrong += name not in DEPARTS
            print(f"  {name}: {DEPARTS.get(name, problem)}")
        print(f"  no text: {', '.join(sorted(missing)) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.exit(main())
