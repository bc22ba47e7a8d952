"""Lowered kernels executed: small ones written by hand, right, wrong, and reaching where they must not."""

import tempfile

import lowered_texts as texts
import pytest
import torch

from portattn.backends.ascend.linalg import executor, llvm_tools
from portattn.backends.ascend.linalg.executor import Programs
from portattn.backends.ascend.linalg.llvm_tools import LinalgError

pytestmark = pytest.mark.usefixtures("mlir")


def launch(text: str, grid: tuple[int, ...], arguments: dict, outputs: tuple[str, ...] = ("out",)):
    """(outputs, strays as texts, inputs written), in a child."""
    seen = Programs().launch(text, grid, arguments, outputs)
    return {name: arguments[name] for name in outputs}, [str(s) for s in seen.strays], seen.wrote_inputs


def test_each_program_does_its_part(in_child):
    x, out = torch.randn(32), torch.full((32,), float("nan"))
    results, strays, wrote = in_child(launch, texts.DOUBLE, (4,), {"x": x, "out": out})
    assert torch.equal(results["out"], 2 * x)
    assert (strays, wrote) == ([], ())


def test_a_grid_has_three_sizes(in_child):
    # out[4·y + x] = 100·size_y + 10·y + x
    text = texts.kernel(
        """\
    %c4 = arith.constant 4 : i32
    %c10 = arith.constant 10 : i32
    %c100 = arith.constant 100 : i32
    %0 = arith.muli %idy, %c4 : i32
    %1 = arith.addi %0, %idx : i32
    %at = arith.index_cast %1 : i32 to index
    %2 = arith.muli %gridy, %c100 : i32
    %3 = arith.muli %idy, %c10 : i32
    %4 = arith.addi %2, %3 : i32
    %5 = arith.addi %4, %idx : i32
    memref.store %5, %arg2[%at] : memref<?xi32>""",
        "memref<?xi32>",
    )
    results, strays, _ = in_child(launch, text, (4, 3), {"out": torch.zeros(12, dtype=torch.int32)})
    assert results["out"].tolist() == [300 + 10 * y + x for y in range(3) for x in range(4)]
    assert strays == []


def test_bf16_is_rounded_to_the_nearest_even(in_child):
    x = torch.tensor([1.0, 1.00390625, 1.01171875, -3.1415926, 1e-40, 65504.0, 3.4e38, float("nan")])
    results, _, _ = in_child(launch, texts.ROUND, (1,), {"x": x, "out": torch.zeros(8, dtype=torch.bfloat16)})
    assert torch.equal(results["out"].nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (4, "reads x 0 bytes after its end"), (260, "reads x 1024 bytes after its end"), (-1024, None),
    ],
)  # fmt: skip
def test_a_read_outside_an_argument_is_seen_and_not_fatal(in_child, at, said):
    results, strays, _ = in_child(launch, texts.AT, (1,), {"x": torch.ones(4), "out": torch.zeros(1), "at": at})
    if said is None:  # before the start it is known to the page
        assert len(strays) == 1
        assert strays[0].startswith("reads x ")
        assert strays[0].endswith(" bytes before its start")
    else:
        assert strays == [said]
    assert torch.isnan(results["out"]).all()  # what lies there is NaN


@pytest.mark.parametrize("at", [8, 1000, -1, -3000])
def test_a_write_outside_an_argument_is_seen(in_child, at):
    arguments = {"x": torch.ones(8), "out": torch.zeros(8), "at": at}
    results, strays, _ = in_child(launch, texts.STORE_AT, (1,), arguments)
    assert len(strays) == 1
    assert strays[0].startswith("writes out")
    assert torch.equal(results["out"], torch.zeros(8))


def test_accesses_inside_are_no_strays(in_child):
    for at in (0, 7):
        arguments = {"x": torch.ones(8), "out": torch.zeros(8), "at": at}
        assert in_child(launch, texts.STORE_AT, (1,), arguments)[1] == []


def test_a_view_ends_where_its_last_element_does(in_child):
    x = torch.arange(64.0)[:40].view(8, 5)[:, :4]  # 39 elements from the first to the last
    for at, strays in ((38, []), (39, ["reads x 0 bytes after its end"])):
        assert in_child(launch, texts.AT, (1,), {"x": x, "out": torch.zeros(1), "at": at})[1] == strays


def test_a_written_input_is_named(in_child):
    arguments = {"x": torch.ones(8), "k": torch.zeros(8), "at": 3}
    assert in_child(launch, texts.STORE_AT, (1,), arguments, ())[2] == ("k",)


def test_what_was_never_filled_is_nan(in_child):
    for text, expected in ((texts.UNFILLED, float("nan")), (texts.FILLED, 8.0)):
        results, _, _ = in_child(launch, text, (1,), {"x": torch.ones(8), "out": torch.zeros(1)})
        assert results["out"].tolist() == pytest.approx([expected], nan_ok=True)


def test_memory_that_is_nobodys_ends_the_child(in_child):
    with pytest.raises(ChildProcessError, match="exit code -11"):
        in_child(launch, texts.kernel(texts.FAR_AWAY, "memref<?xf32>"), (1,), {"out": torch.zeros(1)})


def test_too_much_scratch_memory_ends_the_child(in_child):
    body = """\
    %a = memref.alloc() : memref<1000000000xf32>
    %c0 = arith.constant 0 : index
    %v = memref.load %a[%c0] : memref<1000000000xf32>
    memref.store %v, %arg2[%c0] : memref<?xf32>"""
    with pytest.raises(ChildProcessError, match="exit code -6"):
        in_child(launch, texts.kernel(body, "memref<?xf32>"), (1,), {"out": torch.zeros(1)})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x": torch.ones(8)}, "takes 2 arguments, not the 1 of x"),
        ({"x": torch.ones(8), "out": 1}, "out is i32, and the lowered kernel takes a pointer to f32"),
        ({"x": torch.ones(8).half(), "out": torch.ones(8)}, "x is f16, and the lowered kernel takes a pointer to f32"),
    ],
)
def test_other_arguments_are_refused(in_child, arguments, said):
    with pytest.raises(LinalgError, match=said):
        in_child(launch, texts.DOUBLE, (1,), arguments, ())


def test_a_text_that_mlir_refuses(in_child):
    text = texts.DOUBLE.replace("arith.mulf %2, %4 : tensor<8xf32>", "arith.mulf %2, %4 : tensor<9xf32>")
    with pytest.raises(LinalgError, match=r"mlir-opt: exit status 1\n.*expects different type"):
        in_child(launch, text, (1,), {"x": torch.ones(8), "out": torch.ones(8)})


def test_missing_programs_are_named(monkeypatch):
    monkeypatch.setattr(llvm_tools, "programs", lambda: {"mlir-opt": "/bin/true", "cc": "/bin/cc"})
    assert llvm_tools.missing_reason().startswith("no mlir-translate, llc here: ")
    with pytest.raises(LinalgError, match="install mlir-19-tools"):
        Programs().launch(texts.DOUBLE, (1,), {})


def test_a_text_is_compiled_once(in_child, monkeypatch):
    def twice() -> int:
        compiled = []
        original = executor.library
        monkeypatch.setattr(executor, "library", lambda *a: compiled.append(a) or original(*a))
        programs = Programs()
        for _ in range(3):
            programs.launch(texts.DOUBLE, (1,), {"x": torch.ones(8), "out": torch.zeros(8)})
        return len(compiled)

    assert in_child(twice) == 1


def test_no_file_is_left_of_a_child_however_it_ends(in_child, monkeypatch, tmp_path):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    given = {"x": torch.ones(8), "out": torch.zeros(8)}
    assert in_child(launch, texts.DOUBLE, (1,), given)[1] == []
    with pytest.raises(LinalgError, match="takes 2 arguments"):
        in_child(launch, texts.DOUBLE, (1,), {"x": torch.ones(8)}, ())
    with pytest.raises(LinalgError, match="mlir-opt: exit status 1"):
        in_child(launch, texts.DOUBLE.replace("arith.mulf", "arith.nonesuch"), (1,), given)
    with pytest.raises(ChildProcessError, match="exit code -11"):
        in_child(launch, texts.kernel(texts.FAR_AWAY, "memref<?xf32>"), (1,), {"out": torch.zeros(1)})
    assert list(place.iterdir()) == []
