"""Register layouts against AMD's own: those that its matrix instruction calculator prints. layouts.json holds, for each
instruction that the calculator (github.com/ROCm/amd_matrix_instruction_calculator, 1.3.2, commit 2ef9189) knows, the
start of a SHA-256 of each matrix's layout: a line an element, in order of rows, "row,column:register.lane.lowest bit",
with a space between places where an element lies twice. gfx950 is not in it. test_matrix_instructions.py shows that the
model has the layout that is written there, and this that it is AMD's."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_matrix_instructions import (
    BYTES,
    MFMA,
    WMMA,
    Operand,
    mfma_result,
    mfma_source,
    product,
    wmma_result,
    wmma_sources,
)

LAYOUTS = json.loads((Path(__file__).parent / "layouts.json").read_text(encoding="utf-8"))
Places = Callable[[int, int], list[tuple[int, int]]]  # lanes and elements of an operand's element


def digest(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def operand(rows: int, columns: int, bits: int, places: Places) -> Iterator[str]:
    for row in range(rows):
        for column in range(columns):
            # An element of 64 bits lies in a pair of registers, named by the lower one.
            found = sorted((element * bits // 32, lane, element * bits % 32) for lane, element in places(row, column))
            yield f"{row},{column}:" + " ".join(f"{register}.{lane}.{low}" for register, lane, low in found)


@pytest.mark.parametrize(("arch", "name", "size", "depth", "kind"), [case[:5] for case in MFMA if case[0] != "gfx950"])
def test_mfma(arch: str, name: str, size: int, depth: int, kind: str) -> None:
    wanted, bits, words = LAYOUTS[arch][name], 8 * BYTES[kind], 2 if kind == "f64" else 1
    assert digest(operand(size, depth, bits, lambda m, k: [mfma_source(size, depth, m, k)])) == wanted["A"]
    assert digest(operand(depth, size, bits, lambda k, n: [mfma_source(size, depth, n, k)])) == wanted["B"]
    results = ((i, j, *mfma_result(size, kind, i, j)) for i in range(size) for j in range(size))
    assert digest(f"{i},{j}:{register * words}.{lane}.0" for i, j, lane, register in results) == wanted["D"]


def by_fours(m: int, k: int) -> list[tuple[int, int]]:
    """A[m, k] of 16 bits on gfx12 as the calculator has it: K 0 to 3 and 8 to 11 in the lower lanes."""
    return [(m + 16 * (k // 4 % 2), k % 4 + 4 * (k // 8))]


@pytest.mark.parametrize(("arch", "name", "kind"), [case[:3] for case in WMMA])
def test_wmma(arch: str, name: str, kind: str) -> None:
    wanted, bits = LAYOUTS[arch][name], 8 * BYTES[kind]
    # Two sources disagree here. Triton (and the model) have K 0 to 7 in the lower lanes; no product tells, since A and
    # B have one order of K.
    fours = arch == "gfx1201" and bits == 16

    def sources(m: int, k: int) -> list[tuple[int, int]]:
        return by_fours(m, k) if fours else wmma_sources(arch, m, k)

    assert digest(operand(16, 16, bits, sources)) == wanted["A"]
    assert digest(operand(16, 16, bits, lambda k, n: sources(n, k))) == wanted["B"]
    results = ((i, j, *wmma_result(arch, i, j)) for i in range(16) for j in range(16))
    assert digest(f"{i},{j}:{register}.{lane}.0" for i, j, lane, register in results) == wanted["D"]


def test_either_order_of_k_is_the_same_product() -> None:
    for m, n, k in ((0, 0, 5), (3, 7, 4), (15, 2, 11), (8, 8, 12)):
        a, b = Operand(4, 32, "f16"), Operand(4, 32, "f16")
        a.set(*by_fours(m, k)[0], 0x3C00)
        b.set(*by_fours(n, k)[0], 0x3C00)
        found = product("gfx1201", "v_wmma_f32_16x16x16_f16", a, b, 8)
        lane, register = wmma_result("gfx1201", m, n)
        assert found[register, lane] == 0x3F800000
        assert (found != 0).sum() == 1


def test_everything_that_was_compared_is_modelled() -> None:
    assert {(arch, name) for arch, names in LAYOUTS.items() for name in names} == {
        case[:2] for case in (*MFMA, *WMMA) if case[0] != "gfx950"
    }
