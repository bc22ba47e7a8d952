"""The program of a draft as a probe: its arms are asked one after the other, in one child with a real compiler."""

import re
from pathlib import Path

import pytest
from planted_probe import plant

from portattn.planning.registry import Registry, find_backends
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.quirks import drafts, failure_facts, probe
from portattn.tools.quirks.draft_texts import MARK

COMPILER = "triton==3.6.0"
LOG = Path(__file__).parent.parent / "lifecycle" / "logs" / "triton-3.6-gfx950-stages.log"
# As drafts were written before: they compile a text: by Triton's own function, past the bench.
DIRECT = """\
import pathlib
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

@triton.jit
def copy(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, tl.load(x + n))

def probe(arm, bench):
    if arm == "control":
        bench.compile(copy, {"x": "*fp32", "out": "*fp32"}, {"N": 64})
        return
    text = pathlib.Path(__file__).with_name("broken.ttir")
    if arm == "on":
        text = pathlib.Path(__file__).with_name("empty.ttir")
    triton.compile(str(text), target=GPUTarget(*bench.target), options={"num_warps": 4})
"""
EMPTY = "module {\n  tt.func public @nothing() attributes {noinline = false} {\n    tt.return\n  }\n}\n"


@pytest.fixture(autouse=True)
def compiler() -> None:
    if str(installed_toolchain()) != COMPILER:
        pytest.skip(f"the log is of {COMPILER}, and this is {installed_toolchain()}")


@pytest.mark.compiles
def test_a_drafted_text_is_probed(tmp_path: Path) -> None:
    registry = Registry.load()
    [found] = failure_facts.from_log(LOG.read_text(), LOG.name, registry, None, COMPILER, None, "dense_forward")
    made = drafts.make(found, registry, tmp_path, force=True, replay=False)
    entry, program = Path(made.files[-1]), next(Path(file) for file in made.files if file.endswith(".py"))
    text = re.sub(rf"{MARK}effect.*", "launch = { num_stages = 3 }", entry.read_text())
    entry.write_text(re.sub(rf"{MARK}conditions.*", 'launch = { num_stages = ">=4" }', text))
    program.write_text(re.sub(r"(WORKAROUND.*) = {}", r'\1 = {"num_stages": 3}', program.read_text()))
    drafted = Registry.read(find_backends(), tmp_path)
    result = probe.run(drafted.quirks[made.id], COMPILER, registry=drafted)
    assert (result.verdict, result.control.word, result.off.word, result.on.word) == (
        "confirmed", "pass", "fail:signature", "pass",
    ), result.reason  # fmt: skip
    assert result.off.stage == "ttgir"  # the stages of a text are announced too


@pytest.mark.compiles
def test_a_text_of_another_triton_is_unverified_and_not_changed(tmp_path: Path) -> None:
    quirk = plant(tmp_path, signature="boom")
    (tmp_path / "probes" / "broken.ttir").write_text(EMPTY.replace("tt.return", "tt.of_another_release\n    tt.return"))
    compiled = 'bench.compile_file(text, {"num_warps": 4})\n'
    (tmp_path / "probes" / "planted.py").write_text(DIRECT[: DIRECT.index("triton.compile(")] + compiled)
    result = probe.run(quirk, COMPILER)
    assert result.verdict == "unverified"
    assert result.reason.startswith("Triton 3.6.0 cannot read broken.ttir, which another one wrote; ")


@pytest.mark.compiles
def test_a_program_that_compiles_past_the_bench_is_not_told_as_the_control_arm(tmp_path: Path) -> None:
    quirk = plant(tmp_path, signature="expected ", probe="probes/planted.py:second")
    (tmp_path / "probes" / "broken.ttir").write_text("module { tt.func }\n")
    (tmp_path / "probes" / "empty.ttir").write_text(EMPTY)
    (tmp_path / "probes" / "planted.py").write_text(DIRECT.replace("def probe(", "def second("))
    result = probe.run(quirk, COMPILER)
    assert (result.verdict, result.control.word) == ("confirmed", "pass"), result.reason
