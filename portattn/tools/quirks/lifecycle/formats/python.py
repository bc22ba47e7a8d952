"""Python: Triton's front end, and exceptions on the way through a compiler."""

from __future__ import annotations

from portattn.tools.quirks.lifecycle.formats.row import LINE, Recogniser

FRONT_END = (
    Recogniser(
        name="compilation-error",
        family="triton",
        pattern=(
            # Servers quote it: "RuntimeError: Worker failed with error 'at 1:0:".
            r"(?:CompilationError(?:\(['\"]|: )|with error ')at \d+:\d+:\n(?:[^\n]*\n){0,400}?[ ]*\^\n"
            rf"(?P<cause>(?!exit status|The above|During|Traceback|\s*$){LINE})"
        ),
        symptom="compile-error",
        stage="parse",
        source="reproduced: Triton 3.4.0, 3.6.0, 3.9.0 and triton-ascend 3.2.0; vllm-project/vllm#17581",
    ),
    Recogniser(
        name="exception-in-front-end",
        family="triton",
        pattern=(
            rf"^(?P<cause>(?!CompilationError)[A-Z]\w*(?:Error|Exception): {LINE})\n+"
            r"The above exception was the direct cause of the following exception:\n(?:[^\n]*\n){0,400}?"
            r"[^\n]*\.CompilationError: at"
        ),
        symptom="compile-error",
        stage="parse",
        source="reproduced: Triton 3.9.0 with block pointers, 3.4.0 with gdc_wait",
    ),
)  # fmt: skip
EXCEPTIONS = (
    Recogniser(
        name="amd-llvm",
        family="llvm-amdgpu",
        # Without the revision of LLVM, which stands before the words and is another one in each release.
        pattern=rf"RuntimeError: AMD LLVM \S+: (?P<cause>(?!AMD assembler rejected){LINE})",
        symptom="compile-error",
        source="Triton 3.9.0's backends/amd/compiler.py and the library that it calls",
    ),
    Recogniser(
        name="driver-refuses",
        family="triton",
        pattern=(
            r"(?P<cause>Triton Error \[(?:CUDA|HIP|ZE)\]: (?: Code: \d+, Messsage: )?"
            r"(?:device kernel image is invalid|no kernel image[^\n]*"
            r"|0x78000011|ZE_RESULT_ERROR_MODULE_BUILD_FAILURE[^\n]*)|ZE_RESULT_ERROR_MODULE_BUILD_FAILURE)"
        ),
        symptom="compile-error",
        stage="load",
        source="triton's drivers: vllm-project/vllm#18580, intel/intel-xpu-backend-for-triton#3777",
    ),
    Recogniser(
        name="exception",
        family="triton",
        # The last line of a traceback that goes through a compiler.
        pattern=(
            r"^  File \"[^\"\n]*triton[/\\](?:compiler|backends|language|runtime)[^\n]*\n(?:[ ][^\n]*\n)*"
            r"(?P<cause>(?!\S*(?:CalledProcessError|CompilationError|PTXASError)\b)[\w.]*(?:Error|Exception)\b: "
            rf"(?!PassManager::run failed|AMD LLVM |Internal Triton PTX codegen error|Worker failed with){LINE})"
        ),
        symptom="compile-error",
        source="reproduced: Triton 3.2.0 with num_stages = 0, 3.4.0 with kpack = 2, 3.6.0 with num_ctas = 2",
    ),
)  # fmt: skip
