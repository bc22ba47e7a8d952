"""Every kind of failure in the table is recognised in a log that has it, and by its own signature only."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_logs import NAMES, read

from portattn.tools.quirks.lifecycle.patterns import TABLE
from portattn.tools.quirks.lifecycle.recognise import recognise
from portattn.tools.quirks.lifecycle.signature import generalise

# log -> kind, stage, symptom, part of the cause
SEEN = {
    "ascend-3.2-div-rn": ("assertion", "ttadapter", "compiler-crash", "TypeRange.cpp: Assertion `llvm::all_of(types"),
    "ascend-3.2-early-return": ("mlir-op", "ttadapter", "compile-error", "failed to legalize unresolved material"),
    "ascend-3.2-no-cann": ("no-cann", "npubin", "compile-error", "ASCEND_HOME_PATH is not set"),
    "ascend-3.2-pointer-if": ("unreachable", "ttadapter", "compiler-crash", "AddPtrOp produced by unsupported"),
    "ascend-3.2-tf32": ("compilation-error", "parse", "compile-error", "input_precision == tf32 or tf32x3 is invalid"),
    "ascend-core-dim": ("core-dim", "launch", "resource-limit", "coreDim=131072 can't be greater than UINT16_MAX"),
    "ascend-old-passes": ("assertion", "ttadapter", "compiler-crash", "BlockPtrAnalysis.cpp: Assertion"),
    "ascend-ub-overflow": ("ub-overflow", "npubin", "resource-limit", "ub overflow, requires 3145728 bits"),
    "llvm-amdgpu-lds": ("local-memory-exceeds", "amdgcn", "resource-limit", "local memory (160000) exceeds limit"),
    "llvm-amdgpu-registers": ("ran-out-of-registers", "amdgcn", "compile-error", "no registers from class available"),
    "out-of-resources": ("out-of-resources", "load", "resource-limit", "shared memory, Required: 294912"),
    "ptxas-registers": ("ptxas-code", "cubin", "compile-error", "(C7602) Insufficient registers (24)"),
    "ptxas-serialized": ("ptxas-warning", "cubin", "slow", "(C7510) Potential Performance Loss"),
    "python-segmentation-fault": ("segmentation-fault", "unknown", "compiler-crash", "Segmentation fault"),
    "seed-ascend-sparse": ("adapter-mixuse", "ttadapter", "compiler-crash", '%206 = "tt.reshape"(%203) {MixUse}'),
    "seed-ascend-sparse-paged": ("cannot-div-0", "ttadapter", "compile-error", "cannot div 0!"),
    "triton-3.2-num-ctas": ("assertion", "ttgir", "compiler-crash", "LinearLayout.cpp: Assertion `getTotalInDimSize"),
    "triton-3.2-num-stages-0": ("exception", "ttgir", "compile-error", "Triton AMD backend pipeliner has been updated"),
    "triton-3.2-sm_120": ("assertion", "ttgir", "compiler-crash", "computeCapability not supported"),
    "triton-3.4-gdc-wait": ("exception-in-front-end", "parse", "compile-error", "TypeError: gdc_wait() got an unexpec"),
    "triton-3.4-kpack": ("exception", "parse", "compile-error", "AssertionError: gfx950 only accepts kpack == 1"),
    "triton-3.4-no-rocm-linker": ("no-rocm-linker", "hsaco", "compile-error", "ROCm linker /opt/rocm"),
    "triton-3.6-fp8-sm_80": ("compilation-error", "parse", "compile-error", "type fp8e4nv not supported in this arch"),
    "triton-3.6-gfx950-stages": ("mlir-op", "ttgir", "compile-error", "'tt.load' op operation destroyed but still"),
    "triton-3.6-num-ctas": ("exception", "parse", "compile-error", "num_ctas > 1 not supported on gfx942"),
    "triton-3.6-tf32-gfx90a": ("compilation-error", "parse", "compile-error", "input_precision must be one of"),
    "triton-3.9-block-pointers": ("compilation-error", "parse", "compile-error", "Block pointers have been removed"),
    "worker-time-out": ("time-out", "ttgir", "hang", "no answer in 120 s"),
}
# Kinds without a log of their own, by the line that they are about.
LINES = {
    "no-driver": ("RuntimeError: 0 active drivers ([]). There should only be one.", "compile-error"),
    "shared-data": (
        "ptxas error   : Entry function 'k' uses too much shared data (0xea60 bytes, 0xc000 max)",
        "resource-limit",
    ),
    "ptxas-line": (
        "ptxas /tmp/k.ptx, line 1; fatal   : Unsupported .version 9.9; current version is '8.7'",
        "compile-error",
    ),
    "ptxas-fatal": ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "compile-error"),
    "llvm-error": ("LLVM ERROR: Cannot select: intrinsic %llvm.amdgcn.fdot2", "compiler-crash"),
    "bishengir": ("bishengir-compile: error: hivm.hir.load failed to bufferize", "compile-error"),
    "ascend-stage": ("[ConvertLinalgRToBinary] encounters error:\nno such pass", "compile-error"),
    "mlir-error": (
        "k.py:3:4: error: number of elements must match\nk.py:3:4: note: see current operation: %1 = …",
        "compile-error",
    ),
    "adapter-died": ("Command '['/opt/triton-adapter-opt', 'k']' died with <Signals.SIGFPE: 8>.", "compiler-crash"),
    "pass-manager": ("RuntimeError: PassManager::run failed", "compile-error"),
    "abort": ("Aborted (core dumped)", "compiler-crash"),
}


def test_every_log_and_every_row_is_tried() -> None:
    assert set(SEEN) == set(NAMES) - {"green"}
    assert {kind for kind, *_ in SEEN.values()} | set(LINES) == {row.name for row in TABLE}
    assert all(row.source for row in TABLE)


@pytest.mark.parametrize("name", SEEN)
def test_a_log_is_recognised(name: str) -> None:
    text = read(name)
    failure = recognise(text)
    assert failure is not None
    kind, stage, symptom, cause = SEEN[name]
    assert (failure.kind, failure.stage, failure.symptom) == (kind, stage, symptom)
    assert cause in failure.cause
    assert kind not in failure.also
    if symptom != "hang":
        assert re.search(failure.signature, text)
        line = text.splitlines()[failure.line - 1]
        assert any(word in line for word in failure.cause.split()[:3])


@pytest.mark.parametrize("kind", LINES)
def test_a_line_is_recognised(kind: str) -> None:
    text, symptom = LINES[kind]
    failure = recognise(f"building\n{text}\n")
    assert failure is not None
    assert (failure.kind, failure.symptom) == (kind, symptom)
    assert re.search(failure.signature, text)


def test_a_build_that_worked_is_not_a_failure() -> None:
    assert recognise(read("green")) is None
    assert recognise("") is None


@pytest.mark.parametrize("name", SEEN)
def test_a_signature_is_of_one_failure(name: str) -> None:
    failure = recognise(read(name))
    assert failure is not None
    if not failure.signature:
        assert failure.symptom == "hang"
        return
    others = [other for other in NAMES if other != name and re.search(failure.signature, read(other))]
    # That a process died of a signal is all that is known of it: a more telling log has the words too.
    assert others == (["seed-ascend-sparse"] if name == "python-segmentation-fault" else [])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("'tt.load' op failed at %206 with 16 warps", "'tt.load' op failed at %c64_i32 with 8 warps"),
        ("(tensor<16xi32>) -> tensor<1x16xi32>", "(tensor<64x128xi32>) -> tensor<128xi32>"),
        ("/build/lib/A.cpp:36: bad", "/home/you/llvm/A.cpp:1204: bad"),
        ("at 0x00007f2a of /tmp/tmp8xk2/k.ttir", "at 0xdeadBEEF of /tmp/abc/j.ttir"),
        ("needs  two\tblanks", "needs two blanks"),
        ('%206 = "tt.reshape"(%203) {MixUse}', '%1 = "tt.reshape"(%arg4) {MixUse}'),
    ],
)
def test_what_varies_is_general(one: str, other: str) -> None:
    assert re.fullmatch(generalise(one), other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("type fp8e4nv not supported", "type fp8e5 not supported"),
        ("no registers on sm_90", "no registers on sm_80"),
        ("(C7602) Insufficient registers", "(C7600) Insufficient registers"),
        ("A.cpp:36: bad", "B.cpp:36: bad"),
        ("a tensor of i32", "a tensor of i64"),
    ],
)
def test_what_tells_failures_apart_is_kept(one: str, other: str) -> None:
    assert re.fullmatch(generalise(one), one)
    assert not re.search(generalise(one), other)


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=400))
def test_a_signature_matches_what_it_was_made_of(text: str) -> None:
    assert re.search(generalise(text), text)


def test_a_compiler_that_dies_after_its_error_has_crashed() -> None:
    error = "k.py:1:1: error: 'tt.load' op operation destroyed but still has uses\n"
    dead, raised = recognise(error + "Aborted (core dumped)\n"), recognise(error)
    assert dead is not None
    assert raised is not None
    assert (dead.symptom, raised.symptom) == ("compiler-crash", "compile-error")
    assert dead.signature == raised.signature


def test_a_long_log_takes_no_time() -> None:
    """Patterns must not go back and forth over it: 5 MB, without an error and then with one at its end."""
    import time

    lines = '  File "/x/triton/runtime/jit.py", line 1, in run\n    error: none\nnothing to see: 12\n' * 25_000
    begun = time.monotonic()
    assert recognise(lines) is None
    found = recognise(lines + "LLVM ERROR: Cannot select: t7\n")
    assert found is not None
    assert found.kind == "llvm-error"
    assert time.monotonic() - begun < 20
