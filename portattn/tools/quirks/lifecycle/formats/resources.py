"""What does not fit the chip. Such texts come wrapped in exceptions of every kind, so they are looked for early."""

from __future__ import annotations

from portattn.tools.quirks.lifecycle.formats.row import LINE, PTXAS, Recogniser

ROWS = (
    Recogniser(
        name="out-of-resources",
        family="triton",
        pattern=rf"(?P<cause>out of resource: {LINE}?)(?:\. [Rr]educing|$)",
        symptom="resource-limit",
        stage="load",
        source="triton.runtime.errors.OutOfResources of Triton 3.2 to 3.9; portattn.compile.compile_check.over_limit",
    ),
    Recogniser(
        name="ub-overflow",
        family="triton-ascend",
        # bishengir spells it `avaliable` before CANN 8.5; a log may be cut anywhere after the first two words.
        pattern=(
            r"(?P<cause>\b(?:ub|cbuf|cc) overflow\b"
            r"(?:, requires(?: \d+)?(?: bits)?(?: while(?: \d+)?)?(?: bits)?(?: ava\w*)?)?)"
        ),
        symptom="resource-limit",
        stage="npubin",
        signature=r"(ub|cbuf|cc) overflow, requires \d+ bits",
        source="bishengir-compile on 910B chips: triton-lang/triton-ascend#302, Ascend/pytorch#102",
    ),
    Recogniser(
        name="core-dim",
        family="triton-ascend",
        pattern=r"(?P<cause>coreDim=\d+ can't be greater than UINT16_MAX|grid should be less than 65536)",
        symptom="resource-limit",
        stage="launch",
        source="triton-ascend's launcher; vllm-project/vllm-ascend#10138",
    ),
    Recogniser(
        name="local-memory-exceeds",
        family="llvm-amdgpu",
        pattern=rf"(?:error: {LINE}?: |error: )?(?P<cause>local memory \(\d+\) exceeds limit \(\d+\))",
        symptom="resource-limit",
        stage="amdgcn",
        source="reproduced: Triton 3.6.0's LLVM for gfx942, a kernel with 160,000 bytes of LDS",
    ),
    Recogniser(
        name="scratch-exceeds",
        family="intel",
        pattern=rf"(?P<cause>total scratch space exceeds HW supported limit for kernel {LINE})",
        symptom="resource-limit",
        stage="zebin",
        source="Intel's graphics compiler: intel/intel-xpu-backend-for-triton#3449",
    ),
    Recogniser(
        name="ran-out-of-registers",
        family="llvm-amdgpu",
        pattern=(
            r"(?P<cause>ran out of registers during register allocation"
            r"|no registers from class available to allocate)"
        ),
        symptom="compile-error",
        stage="amdgcn",
        source="LLVM's register allocator; the second reproduced: Triton 3.6.0's LLVM, a kernel held to 24 VGPRs",
    ),
    Recogniser(
        name="shared-data",
        family="ptxas",
        pattern=rf"{PTXAS} (?:error|fatal)\s*: (?P<cause>Entry function {LINE}uses too much shared data {LINE})",
        symptom="resource-limit",
        stage="cubin",
        source="reproduced: ptxas of Triton 3.6.0, a kernel with 60,000 bytes of static shared memory",
    ),
)  # fmt: skip
