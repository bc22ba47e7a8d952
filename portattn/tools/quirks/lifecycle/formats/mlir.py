"""MLIR and LLVM: assertions, aborts, diagnostics."""

from __future__ import annotations

from portattn.tools.quirks.lifecycle.formats.row import LINE, PLACE, Recogniser

SAID = (
    Recogniser(
        name="assertion",
        family="mlir",
        pattern=(
            rf"^{LINE}?(?P<cause>(?P<file>\w+\.(?:cpp|h|cc|inc)):\d+: {LINE}?(?P<said>Assertion `[^\n]+' failed))"
        ),
        symptom="compiler-crash",
        signature=r"<file>:\d+:.*<said>",
        source="reproduced: Triton 3.2.0 for sm_120 and with num_ctas = 2; triton-ascend 3.2.0 with the old passes",
    ),
    Recogniser(
        name="assertion-of-msvc",
        family="mlir",
        pattern=(
            r"(?P<cause>(?P<said>Assertion failed: [^\n]+?), file [^\n]*?(?P<file>\w+\.(?:cpp|h|cc|inc)), line \d+)"
        ),
        symptom="compiler-crash",
        signature=r"<said>.*<file>",
        source="assert of Microsoft's C library, in Triton's builds for Windows",
    ),
    Recogniser(
        name="unreachable",
        family="mlir",
        pattern=rf"^(?P<cause>(?:{LINE}\n)?UNREACHABLE executed at {LINE}?)!?$",
        symptom="compiler-crash",
        source="triton-ascend 3.2.0, an `if` that selects a pointer; fla-org/flash-linear-attention#607",
    ),
    Recogniser(
        name="mlir-op",
        family="mlir",
        pattern=rf"error: (?P<cause>'[\w.]+' op {LINE}|failed to legalize {LINE})",
        symptom="compile-error",
        source="reproduced: Triton 3.5.1, 3.6.0 for gfx950 with num_stages = 4; triton-ascend 3.2.0, an early return",
    ),
    Recogniser(
        name="no-such-register",
        family="llvm",
        pattern=r"(?P<cause>(?:couldn't|could not) allocate (?:in|out)put (?:reg|register) for constraint '[^'\n]+')",
        symptom="compile-error",
        source="LLVM on inline assembly of another chip: sgl-project/sglang#34351, triton-lang/triton-windows#45",
    ),
    Recogniser(
        name="amd-assembler",
        family="llvm-amdgpu",
        # The same few errors are said of every instruction: its name is of the cause. It stands over a caret.
        pattern=(
            r"^(?:triton-amdgpu-assembler:\d+:\d+: error: |error: (?=[^\n]+\n[^\n]+\n\s*\^$))"
            rf"(?P<cause>{LINE}(?:\n\s+[\w.]+(?=[^\n]*\n\s*\^$))?)"
        ),
        symptom="compile-error",
        stage="hsaco",
        source="reproduced: Triton 3.7.1, 3.8.0 (without a place) and 3.9.0, inline assembly for gfx942",
    ),
    Recogniser(
        name="llvm-error",
        family="llvm",
        pattern=rf"(?P<cause>LLVM ERROR: {LINE})",
        symptom="compiler-crash",
        source="llvm::report_fatal_error; reproduced: Triton 3.5.1 for gfx950 with num_stages = 4",
    ),
)  # fmt: skip
# An error at a place in a file. Asked late: a traceback's own error says more where there is one.
PLACED = (
    Recogniser(
        name="mlir-error",
        family="mlir",
        pattern=(
            rf"(?:{PLACE}error: (?!Failed to run BiSheng)|error: (?=[^\n]*\n(?:[^\n]*\n){{0,8}}?[^\n]*note: ))"
            r"(?!Failures have been detected|command failed|backend compiler failed|Pass execution failed)"
            rf"(?P<cause>{LINE})"
        ),
        symptom="compile-error",
        source="MLIR's diagnostics, with and without the operation in a note: Said-Akbar/triton-gcn5#4",
    ),
    Recogniser(
        name="unknown-processor",
        family="llvm",
        pattern=r"(?P<cause>'\w+' is not a recognized processor for this target)",
        symptom="compile-error",
        source="LLVM's table of subtargets: pytorch/pytorch#148551",
    ),
)  # fmt: skip
PASSED_ON = (
    Recogniser(
        name="stack-dump",
        family="llvm",
        # The last of the list is the innermost.
        pattern=r"^\d+\.\s+(?P<cause>Running pass '(?P<ran>[^'\n]+)' on [^\n]+)$(?!\n\d+\.\s)",
        symptom="compiler-crash",
        signature=r"Running pass '<ran>'",
        passes_on=True,
        source="LLVM's PrettyStackTrace: llvm/llvm-project#102981, #174586",
    ),
    Recogniser(
        name="amd-assembler-failed",
        family="llvm-amdgpu",
        pattern=r"AMD LLVM \S+: (?P<cause>AMD assembler rejected generated AMDGCN)",
        symptom="compile-error",
        stage="hsaco",
        passes_on=True,
        source="Triton 3.9.0's backends/amd/compiler.py, with LLVM's revision, after the assembler's own errors",
    ),
    Recogniser(
        name="pass-manager",
        family="mlir",
        pattern=r"(?P<cause>PassManager::run failed)",
        symptom="compile-error",
        passes_on=True,
        source="Triton's Python binding, after MLIR has printed its own errors",
    ),
)  # fmt: skip
