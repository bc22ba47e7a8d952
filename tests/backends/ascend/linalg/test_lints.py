"""Reading a lowered kernel's text, and making upstream's of it. Each lint on texts written by hand: where it fires, and
where its neighbour lets it be."""

import ast
from typing import Any

import lowered_texts as texts
import pytest
from places import ROOT

from portattn.backends.ascend.linalg.llvm_tools import LinalgError
from portattn.backends.ascend.linalg.mlir_text import Argument, footprint, kernel_of, lints, read, upstream
from portattn.testing.findings import LIMITS

TILE = 64 * 64 * 4
SELECT_F16 = """\
    %mask = tensor.empty() : tensor<16x64xi1>
    %zero = tensor.empty() : tensor<16x64xf16>
    %picked = arith.select %mask, %tile, %zero : tensor<16x64xi1>, tensor<16x64xf16>"""


ROWS = texts.gather("1, 64", 64)
WIDE = texts.tiles(13, loop=False)
FIRED: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "a clean kernel": (texts.DOUBLE, {"grid": (65535,), "scratchpad_bytes": 196608}, {}),
    "tiles made of single loads": (texts.ELEMENTS, {}, {"scalar-loop": 128, "whole-tile-load": 1}),
    "loops of the kernel itself are no gathers": (
        ROWS.replace(" {ExtractedLoadOrStore, hivm.parallel_loop}", ""), {}, {}),
    "a whole tile that is masked afterwards": (
        texts.masked("%arg2", texts.WHOLE, "%old, %new"), {}, {"whole-tile-load": 1}),
    "rows of such a tile": (
        texts.gather("1, 64", 64, mask=SELECT_F16), {}, {"row-loop": 16, "whole-tile-load": 1}),
    "a load that the mask bounds is no whole tile": (texts.masked("%arg2", texts.BOUNDED, "%old, %new"), {}, {}),
    "reductions that start from nothing": (texts.UNFILLED, {}, {"uninitialised-reduction": 1}),
    "reductions that start from something": (texts.FILLED, {}, {}),
    "too many programs": (texts.DOUBLE, {"grid": (256, 256)}, {"programs": 65536}),
    "as many as the chip has": (texts.DOUBLE, {"grid": (256, 256), "max_programs": 65536}, {}),
    "fewer programs": (texts.DOUBLE, {"grid": (255, 257)}, {}),
    "a footprint over the unified buffer": (WIDE, {"scratchpad_bytes": 12 * TILE}, {"unified-buffer": 13 * TILE}),
    "a footprint that fits": (WIDE, {"scratchpad_bytes": 13 * TILE}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRED)
def test_where_each_fires(name: str) -> None:
    text, options, expected = FIRED[name]
    assert {lint.name: lint.value for lint in lints(text, "kernel", ("x", "out", "n"), **options)} == expected


SAID = {
    "scalar loops": (texts.gather("1, 1", 64, nested=True), ("scalar-loop", 128, False),
                     "kernel: scalar-loop: a load of x is 128 copies of one element, one after another"),
    "row loops": (ROWS, ("row-loop", 16, False), "a load of x is 16 copies of one row"),
    "a masked store that writes everything back": (
        texts.masked("%arg3", texts.WHOLE, "%new, %old"), ("masked-store", None, True),
        "a masked store to out reads the tile"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_it_says(name: str) -> None:
    text, (kind, value, red), said = SAID[name]
    (lint,) = lints(text, "kernel", ("x", "out", "n"))
    assert (lint.name, lint.red) == (kind, red)
    assert value in (None, lint.value)
    assert said in str(lint)


def test_what_is_no_lint() -> None:
    """A select between inputs is no masked store; the backend's attributes and HFusion operations are no leftovers."""
    text = texts.masked("%arg2", texts.WHOLE, "%new, %old")
    assert "masked-store" not in {lint.name for lint in lints(text, "kernel", ("x", "out", "n"))}
    assert "tt.divisibility" in texts.DOUBLE
    assert "hivm.unlikely_condition" in texts.DOUBLE
    text = texts.DOUBLE.replace("    return", f"    {texts.HISTOGRAM}\n    return")
    assert "leftover" not in {lint.name for lint in lints(text, "kernel", ("x", "out", "n"))}


@pytest.mark.parametrize("left", ["tt.reduce", "hivm.hir.sync_block"])
def test_leftovers(left):
    text = texts.DOUBLE.replace("    return", f'    %9 = "{left}"(%5) : (tensor<8xf32>) -> tensor<8xf32>\n    return')
    (lint,) = lints(text, "kernel")
    assert (lint.name, lint.red) == ("leftover", True)
    assert left in lint.message


def test_the_footprint_counts_what_lives_at_once():
    assert footprint(read(texts.tiles(3, loop=False))) == 3 * TILE
    # What a loop reads lives until it ends.
    assert footprint(read(texts.tiles(3, loop=True))) == 4 * TILE
    assert footprint(read(texts.DOUBLE)) == 8 * 4


def test_names_that_the_printer_gives_twice_are_two_values():
    text = texts.kernel(
        "    %c0 = arith.constant 0 : index\n    %c4 = arith.constant 4 : index\n"
        "    %seed = tensor.empty() : tensor<64x64xf32>\n"
        + "    scf.for %arg8 = %c0 to %c4 step %c4 {\n      %1 = math.exp %seed : tensor<64x64xf32>\n"
        "      %2 = math.exp %1 : tensor<64x64xf32>\n      %3 = math.exp %2 : tensor<64x64xf32>\n    }\n" * 2,
        "memref<?xf32>",
    )
    module = read(text)
    assert len({o.results for o in module.operations if o.name == "math.exp"}) == 6
    assert [loop.trips for loop in module.loops] == [1, 1]
    assert footprint(module) == TILE


def test_only_what_cannot_be_right_is_red():
    assert {"masked-store", "leftover", "uninitialised-reduction", "programs"} == LIMITS


def test_a_kernel_has_its_own_arguments_only():
    found = kernel_of(texts.kernel("", "memref<?xbf16> {tt.divisibility = 16 : i32}", "f32", "i64", name="decode"))
    assert found.name == "decode"
    assert found.arguments == (Argument(True, "bf16"), Argument(False, "f32"), Argument(False, "i64"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("module {}", "no func.func"),
        ("func.func @k(%arg0: memref<?xi8>, %arg1: memref<?xi8>) {", "byte buffers"),
        (texts.DOUBLE.replace("%idz: i32", "%idz: i64"), "the grid's sizes"),
        (texts.DOUBLE.replace("%arg3: memref<?xf32>", "%arg3: tensor<8xf32>"), "another type"),
    ],
)
def test_other_texts_are_refused(text, said):
    with pytest.raises(LinalgError, match=said):
        kernel_of(text)


def test_what_only_says_where_and_how_is_taken_out():
    plain = upstream(texts.DOUBLE)
    assert "annotation.mark" not in plain
    assert "hivm" not in plain
    assert "arith.mulf" in plain
    assert "tt.divisibility" in plain  # an attribute, which mlir-opt keeps


def test_loops_keep_their_bodies_when_their_marks_go():
    plain = upstream(texts.gather("1, 64", 64))
    assert "ExtractedLoadOrStore" not in plain
    assert plain.count("scf.for") == 1
    assert plain.count("{") == plain.count("}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('%9 = "tt.reduce"(%5) : (tensor<8xf32>) -> tensor<8xf32>', "has tt.reduce"),
        ("hivm.hir.sync_block %arg0 : memref<?xi8>", "has hivm.hir.sync_block"),
        ("%9 = call @triton_gather(%5) : (tensor<8xf32>) -> tensor<8xf32>", "calls triton_gather"),
    ],
)
def test_what_only_the_vendor_knows_is_refused_by_name(line, said):
    with pytest.raises(LinalgError, match=said):
        upstream(texts.DOUBLE.replace("    return", f"    {line}\n    return"))


def test_masked_loads_of_kernels_say_what_hidden_places_give():
    """triton-ascend leaves them undefined without `other` (triton-ascend PR #953)."""
    without = set()
    for path in (ROOT / "portattn" / "kernels").glob("*.py"):
        tree = ast.parse(path.read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                given = {keyword.arg for keyword in call.keywords}
                if ast.unparse(call.func) == "tl.load" and "mask" in given and "other" not in given:
                    without.add(function.name)
    assert without == {"load_numbers"}  # reads inside its rows on Ascend
