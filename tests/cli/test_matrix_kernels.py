"""Kernels of other packages in the matrix and in `ci`: right, wrong, outside their memory, edited, recorded."""

import re
import sys

import pytest
from places import ROOT
from quirk_files import plant

from portattn.schema.toolchain import installed_toolchain
from portattn.testing import kernel_cases
from portattn.tools import lab
from portattn.tools.matrix import results

EXAMPLE = ROOT / "examples" / "kernels" / "kernels.toml"
HERE = str(installed_toolchain())
AMD, GPU = "rocm:gfx942", "cuda:sm_90"
# FAULT is seen by compilers alone; PAST elements beyond the end are read; BLOCKED needs block pointers.
KERNELS = """\
import os
import triton
import triton.language as tl

FAULT = tl.constexpr(0.0 if os.environ.get("TRITON_INTERPRET") == "1" else 0.5)

@triton.jit
def copy(x, out, n, PAST: tl.constexpr, WRONG: tl.constexpr, BLOCKED: tl.constexpr):
    place = tl.arange(0, 64)
    if BLOCKED:
        pointer = tl.make_block_ptr(x, (n,), (1,), (0,), (64,), (0,))
        values = tl.load(pointer, boundary_check=(0,))
    else:
        values = tl.load(x + place, mask=place < n + PAST)
    if WRONG:
        values += FAULT * (1 + tl.program_id(0))
    tl.store(out + place, values, mask=place < n)
"""
ENTRY = """\
[[kernel]]
name = "{name}"
function = "copies:copy"
grid = [{grid}]
types = {{ x = "*fp32", out = "*fp32", n = "i32" }}
shapes = {{ x = [48], out = [48] }}
values = {{ n = 48 }}
outputs = ["out"]
constants = {{ PAST = {past}, WRONG = {wrong}, BLOCKED = {blocked} }}
"""
pytestmark = [pytest.mark.compiles,
              pytest.mark.skipif(not HERE.startswith("triton=="), reason="needs community Triton")]  # fmt: skip


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file of copies, each with its constants."""
    (tmp_path / "copies.py").write_text(KERNELS)

    def write(**entries):
        values = {"grid": 1, "past": 0, "wrong": "false", "blocked": "false"}
        text = "".join(ENTRY.format(name=name, **values | changes) for name, changes in entries.items())
        (tmp_path / "kernels.toml").write_text(text)
        return str(tmp_path / "kernels.toml")

    return write


def run(portattn, tmp_path, kernels, *options, out="out", targets=AMD, exits=0):
    line = ("matrix", "run", "--kernels", kernels, "--targets", targets, "--out", str(tmp_path / out), *options)
    portattn(*line, exits=exits)
    return {cell.name: cell for cell in results.read(tmp_path / out / results.NAME)[1]}


def test_right_and_wrong_kernels_in_a_model_of_the_chip(portattn, tmp_path, file) -> None:
    entries = {"right": {}, "wrong": {"wrong": "true"}, "past": {"past": 8}, "race": {"wrong": "true", "grid": 2}}
    cells = run(portattn, tmp_path, file(**entries), exits=1)
    right, wrong, past, race = cells.values()
    assert (right.status, right.level, right.op, right.problem) == ("PASS", "emulated", "kernels", None)
    assert (right.emulated.error, right.interpreter.outcome) == (0.0, "pass")
    assert right.kernels[0].facts["spills"] == 0
    assert (wrong.status, wrong.level) == ("FAIL", "declared")
    assert wrong.reason.startswith("emulated numerics: out's error 0.5 is over its budget ")
    assert (past.status, race.status) == ("FAIL", "FAIL")
    assert re.search("GlobalRace: .* stores .* out", race.reason)
    assert re.search("OutOfBounds: .* 4 bytes beyond the end of x ", past.reason)
    found = portattn("matrix", "report", str(tmp_path / "out"), "--json", exits=0).json
    assert [one["name"] for one in found["red"]] == ["wrong", "past", "race"]
    assert "Kernels of other packages" in (tmp_path / "out" / "index.html").read_text()
    portattn("matrix", "site", str(tmp_path / "out"), "--out", str(tmp_path / "site"), exits=0)

    # An edited kernel is another problem of its name; a baseline and --resume keep their promises.
    baseline = str(tmp_path / "baseline.toml")
    portattn("matrix", "baseline", str(tmp_path / "out"), baseline, exits=0)
    (tmp_path / "copies.py").write_text(KERNELS.replace("+= FAULT *", "+= 2 * FAULT *"))
    found = portattn("matrix", "run", "--kernels", file(right=entries["past"]), "--targets", AMD, "--out",
                     str(tmp_path / "new"), "--baseline", baseline, "--json", exits=1).json  # fmt: skip
    line = ("matrix", "diff", baseline, str(tmp_path / "new"), "--partial", "--json")
    changes = portattn(*line, exits=1).json["changes"]
    assert [(one["name"], one["kinds"][0]) for one in changes] == [("right", "level")]
    assert "the kernel's source or its entry in the file is another one" in changes[0]["causes"][0]["text"]
    assert {finding["kind"] for finding in found["findings"]} >= {"red", "level"}


def test_the_example_is_right_for_amd_and_the_interpreter_by_its_reference(portattn, tmp_path) -> None:
    (cell,) = run(portattn, tmp_path, str(EXAMPLE)).values()
    assert (cell.status, cell.level) == ("PASS", "emulated")
    assert 0 < cell.interpreter.error <= cell.interpreter.budget, "its reference is float64"
    assert [gate.name for gate in cell.gates] == ["bytes of LDS", "registers", "bytes spilled"]
    assert cell.emulated.cycles > 500, "of four programs of two waves"
    assert run(portattn, tmp_path, str(EXAMPLE), "--resume")[cell.name].date == cell.date


def test_bounds_of_a_file_and_changes_for_a_target_are_held_there_alone(portattn, tmp_path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace('folder = "."', f'folder = "{EXAMPLE.parent}"')
    bounds = "shared_memory = 65536\n[kernel.on.gfx942]\noptions = { num_warps = 1 }\n[kernel.on.cuda]\nregisters = 8\n"
    (tmp_path / "kernels.toml").write_text(text + bounds, encoding="utf-8")
    run(portattn, tmp_path, str(tmp_path / "kernels.toml"), targets=f"{AMD},{GPU}", exits=1)
    amd, gpu = sorted(results.read(tmp_path / "out" / results.NAME)[1], key=lambda cell: cell.target == GPU)
    assert (amd.status, amd.kernels[0].facts["num_warps"]) == ("PASS", 1)
    assert [gate.limit for gate in amd.gates][-2:] == ["0 allowed by the file", "65536 allowed by the file"]
    assert (gpu.status, gpu.kernels[0].facts["num_warps"]) == ("FAIL", 2)
    assert re.fullmatch(r"row_softmax: \d\d registers, 8 allowed by the file", gpu.reason)


def test_an_entry_of_ones_own_cures_a_kernel_that_spills(portattn, tmp_path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace("BLOCK = 64", "BLOCK = 8192")
    text = text.replace("num_warps = 2", "num_warps = 1")
    kernels, quirks = tmp_path / "kernels.toml", EXAMPLE.parent / "quirks"
    kernels.write_text(text.replace('folder = "."', f'folder = "{EXAMPLE.parent}"'), encoding="utf-8")
    (red,) = run(portattn, tmp_path, str(kernels), targets=GPU, exits=1).values()
    assert red.status == "FAIL", red
    assert "bytes spilled" in red.reason
    (cured,) = run(portattn, tmp_path, str(kernels), "--quirk-folder", str(quirks), targets=GPU).values()
    assert (cured.status, cured.level, cured.kernels[0].facts["num_warps"]) == ("PASS", "compiles", 16)
    assert [(note.id, note.role) for note in cured.footnotes] == [("cuda-0901-row-softmax", "applied")]
    refused = portattn("matrix", "run", "--quirk-folder", str(quirks), "--out", str(tmp_path / "none"), exits=2)
    assert f"--quirk-folder is '{quirks}', but goes with --kernels" in refused.err


@pytest.mark.usefixtures("real_lab")
def test_ascends_lowering_reads_past_the_end(portattn, tmp_path, file) -> None:
    if lab.find("triton-ascend==3.2.0") is None:
        pytest.skip("the lab has no triton-ascend==3.2.0: `portattn lab create triton-ascend==3.2.0` makes it")
    cells = run(portattn, tmp_path, file(right={}, past={"past": 8}), targets="ascend:ascend910b2", exits=1)
    assert (cells["right"].status, cells["right"].level) == ("PASS", "lowering-checked")
    assert cells["past"].reason == "lowered numerics: reads x 0 bytes after its end"


@pytest.mark.usefixtures("real_lab")
def test_ci_tells_a_kernel_that_the_new_compiler_refuses_and_its_quirk(portattn, tmp_path, file) -> None:
    for name in ("triton==3.6.0", "triton==3.9.0"):
        if lab.find(name) is None:
            pytest.skip(f"the lab has no {name}: `portattn lab create {name}` makes it")
    quirks = tmp_path / "quirks"
    entry = plant(quirks, "rocm-0901-copies", 'note = "use descriptors"', 'kernels = ["copy"]')
    text = re.sub("signature *= .*", 'signature = "make_block_ptr"', entry.read_text())
    entry.write_text(text.replace("3.6.0", "3.9.0"))
    plant(quirks, "rocm-0902-warps", "launch = { num_warps = 8 }", 'kernels = ["cop*"]')
    line = ("ci", "--kernels", file(plain={}, blocked={"blocked": "true"}), "--from", "triton==3.6.0", "--to",
            "triton==3.9.0", "--targets", AMD, "--quirk-folder", str(quirks))  # fmt: skip
    assert "goes with --compile: such kernels have no plan" in portattn(*line, exits=2).err
    found = portattn(*line, "--compile", "--out", str(tmp_path / "out"), "--json", exits=1).json
    (loss,) = found["losses"]
    assert (loss["problems"], loss["targets"]) == (["blocked"], [AMD])
    assert "CompilationError at parse: at 4:18: Block pointers have been removed" in loss["what"]
    cells = {cell.name: cell for cell in results.read(tmp_path / "out" / "after" / results.NAME)[1]}
    assert (cells["plain"].level, cells["blocked"].status) == ("emulated", "ERROR")
    notes = [(note.id, note.role) for note in cells["blocked"].footnotes]
    assert notes == [("rocm-0902-warps", "applied"), ("rocm-0901-copies", "explains")]
    assert cells["plain"].kernels[0].facts["num_warps"] == 8


def test_a_recorded_run_is_a_file_that_runs(portattn, tmp_path, monkeypatch) -> None:
    program = EXAMPLE.with_name("row_softmax.py")
    once = f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"
    file = tmp_path / "made" / "kernels.toml"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    line = ("matrix", "record", "--out", str(file), "--json", "--", sys.executable, "-c")
    called = portattn(*line, f"{once}\n{once}\nraise SystemExit(7)")
    assert (called.status, called.json["kernels"], called.json["status"]) == (7, ["row_softmax"], 7)
    (named,) = kernel_cases.read(file)
    case, (example,) = named.problem, kernel_cases.read(EXAMPLE)
    for field in ("function", "grid", "types", "shapes", "strides", "outputs", "constants", "options"):
        assert getattr(case, field) == getattr(example.problem, field), field
    assert case.values.items() >= example.problem.values.items(), "and zeros, if `torch.empty` gave such memory"
    low, high = case.ranges["x"]
    assert -6 < low < high < 6
    monkeypatch.delenv("TRITON_INTERPRET")
    (cell,) = run(portattn, tmp_path, str(file)).values()
    assert (cell.status, cell.level) == ("PASS", "emulated")
    same = f"import sys; sys.path.insert(0, {str(program.parent)!r}); import torch; from row_softmax import *\n"
    same += "out = torch.ones(1)\nfor width in (4, 2, 2, 2):\n"
    same += "    row_softmax[(1,)](torch.ones(1, 1), out.fill_(width == 4), 1, 1, BLOCK=width)"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = portattn(*line, same, exits=0).json
    assert found["kernels"] == ["row_softmax"], "a launch that wrote the same again"
    assert found["left_out"] == {"row_softmax:row_softmax: no tensor changed": 1}
    nothing = portattn("matrix", "record", "--out", str(file), "--", sys.executable, "-c", "1", exits=3)
    assert nothing.err == "portattn: nothing was recorded: the command launched no Triton kernel\n"
    refused = portattn("matrix", "record", "--out", str(file / "x"), "--", sys.executable, "-c", "1", exits=2)
    assert f"--out is '{file / 'x'}', but cannot be written: it is not a folder" in refused.err
    absent = portattn("matrix", "record", "--out", str(file), "--", "/nowhere/python", exits=2)
    assert "COMMAND is '/nowhere/python', but cannot be run: No such file or directory" in absent.err
