"""Reading a lowered kernel's text, and making upstream's of it."""

from __future__ import annotations

import lowered_texts as texts
import pytest

from portattn.backends.ascend.linalg.llvm_tools import LinalgError
from portattn.backends.ascend.linalg.mlir_text import Argument, kernel_of, upstream


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
