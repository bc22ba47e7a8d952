"""Each lint on texts written by hand: where it fires, and where its neighbour lets it be."""

from __future__ import annotations

import lowered_texts as texts
import pytest

from portattn.backends.ascend.linalg.executor import footprint, lints, read
from portattn.testing.findings import LIMITS

TILE = 64 * 64 * 4
SELECT_F16 = """\
    %mask = tensor.empty() : tensor<16x64xi1>
    %zero = tensor.empty() : tensor<16x64xf16>
    %picked = arith.select %mask, %tile, %zero : tensor<16x64xi1>, tensor<16x64xf16>"""


def fired(text: str, **options) -> dict[str, int]:
    found = lints(text, "kernel", ("x", "out", "n"), **options)
    return {lint.name: lint.value for lint in found}


def test_a_clean_kernel_has_none():
    assert fired(texts.DOUBLE, grid=(65535,), scratchpad_bytes=196608) == {}


def test_scalar_loops_count_their_elements():
    found = lints(texts.gather("1, 1", 64, nested=True), "kernel", ("x", "out"))
    assert [(lint.name, lint.value, lint.red) for lint in found] == [("scalar-loop", 128, False)]
    assert str(found[0]) == "kernel: scalar-loop: a load of x is 128 copies of one element, one after another"


def test_tiles_made_of_single_loads():
    assert fired(texts.ELEMENTS) == {"scalar-loop": 128, "whole-tile-load": 1}


def test_row_loops_count_their_rows():
    found = lints(texts.gather("1, 64", 64), "kernel", ("x", "out"))
    assert [(lint.name, lint.value) for lint in found] == [("row-loop", 16)]
    assert "a load of x is 16 copies of one row" in found[0].message


def test_loops_of_the_kernel_itself_are_no_gathers():
    assert fired(texts.gather("1, 64", 64).replace(" {ExtractedLoadOrStore, hivm.parallel_loop}", "")) == {}


def test_a_whole_tile_that_is_masked_afterwards():
    text = texts.masked("%arg2", texts.WHOLE, "%old, %new")
    assert fired(text) == {"whole-tile-load": 1}
    assert fired(texts.gather("1, 64", 64, mask=SELECT_F16)) == {"row-loop": 16, "whole-tile-load": 1}


def test_a_load_that_the_mask_bounds_is_no_whole_tile():
    assert fired(texts.masked("%arg2", texts.BOUNDED, "%old, %new")) == {}


def test_a_masked_store_that_writes_everything_back():
    text = texts.masked("%arg3", texts.WHOLE, "%new, %old")
    found = lints(text, "kernel", ("x", "out", "n"))
    assert [(lint.name, lint.red) for lint in found] == [("masked-store", True)]
    assert "a masked store to out reads the tile" in found[0].message


def test_a_select_between_inputs_is_no_masked_store():
    assert "masked-store" not in fired(texts.masked("%arg2", texts.WHOLE, "%new, %old"))


@pytest.mark.parametrize("left", ["tt.reduce", "hivm.hir.sync_block"])
def test_leftovers(left):
    text = texts.DOUBLE.replace("    return", f'    %9 = "{left}"(%5) : (tensor<8xf32>) -> tensor<8xf32>\n    return')
    (lint,) = lints(text, "kernel")
    assert (lint.name, lint.red) == ("leftover", True)
    assert left in lint.message


def test_attributes_of_the_backend_are_no_leftovers():
    assert "tt.divisibility" in texts.DOUBLE
    assert "hivm.unlikely_condition" in texts.DOUBLE
    assert "leftover" not in fired(texts.DOUBLE)


def test_reductions_that_start_from_nothing():
    assert fired(texts.UNFILLED) == {"uninitialised-reduction": 1}
    assert fired(texts.FILLED) == {}


def test_programs():
    assert fired(texts.DOUBLE, grid=(256, 256)) == {"programs": 65536}
    assert fired(texts.DOUBLE, grid=(256, 256), max_programs=65536) == {}
    assert fired(texts.DOUBLE, grid=(255, 257)) == {}


def test_the_footprint_counts_what_lives_at_once():
    assert footprint(read(texts.tiles(3, loop=False))) == 3 * TILE
    # What a loop reads lives until it ends.
    assert footprint(read(texts.tiles(3, loop=True))) == 4 * TILE
    assert footprint(read(texts.DOUBLE)) == 8 * 4


def test_a_footprint_over_the_unified_buffer():
    text = texts.tiles(13, loop=False)
    assert fired(text, scratchpad_bytes=12 * TILE) == {"unified-buffer": 13 * TILE}
    assert fired(text, scratchpad_bytes=13 * TILE) == {}


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
