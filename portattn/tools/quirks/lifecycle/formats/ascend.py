"""triton-ascend: its adapter, and bishengir, the compiler of CANN that it calls."""

from __future__ import annotations

from portattn.tools.quirks.lifecycle.formats.row import LINE, Recogniser

SAID = (
    Recogniser(
        name="adapter-mixuse",
        family="triton-ascend",
        pattern=rf"^\s*(?P<cause>%\w+ = \"tt\.\w+\"\([^\n)]*\) \{{MixUse\}}{LINE})",
        symptom="compiler-crash",
        stage="ttadapter",
        source="the project's seed on a 910B2, 2025-10: triton-adapter-opt died of SIGSEGV after this line",
    ),
    Recogniser(
        name="cannot-div-0",
        family="triton-ascend",
        pattern=r"error: (?P<cause>cannot div 0!)",
        symptom="compile-error",
        stage="ttadapter",
        signature="cannot div 0!",
        source="the project's seed on a 910B2, 2025-10",
    ),
)  # fmt: skip
# Asked after MLIR's and LLVM's own words, which say more.
TOOLS = (
    Recogniser(
        name="bishengir",
        family="triton-ascend",
        pattern=(
            rf"(?P<cause>(?:bishengir|hivm|hfusion)[\w-]*: (?:{LINE}?: )?"
            rf"(?:error: (?!Failed to run){LINE}|Cannot find option {LINE}))"
        ),
        symptom="compile-error",
        stage="npubin",
        source="bishengir-compile, which triton-ascend calls for machine code: vllm-project/vllm-ascend#7421",
    ),
)  # fmt: skip
PASSED_ON = (
    Recogniser(
        name="ascend-stage",
        family="triton-ascend",
        pattern=(
            r"\[Convert(?:TritonIRToLinalgIR|LinalgI?RToBinary)\] encounters error:\n+"
            rf"(?P<cause>(?!///-|\s*$|PassManager::run failed){LINE})"
        ),
        symptom="compile-error",
        passes_on=True,
        source="reproduced: triton-ascend 3.2.0 without CANN",
    ),
    Recogniser(
        name="bishengir-failed",
        family="triton-ascend",
        pattern=r"(?P<cause>Failed to run BiSheng[\w ]+pipeline|(?:bishengir|hivm)[\w-]*: [^\n]*\bfailed\b[^\n]*)",
        symptom="compile-error",
        stage="npubin",
        passes_on=True,
        source="bishengir-compile: Ascend/triton-ascend#2, triton-lang/triton-ascend#448",
    ),
    Recogniser(
        name="adapter-died",
        family="triton-ascend",
        pattern=(
            r"(?P<cause>triton-adapter-opt['\"]?[^\n]{1,1000}?"
            r"(?P<how>died of signal \d+|died with <Signals\.\w+|SIGSEGV|SIGABRT|exit status -?\d+)[^\n]{0,80})$"
        ),
        symptom="compiler-crash",
        stage="ttadapter",
        signature="triton-adapter-opt.*<how>",
        passes_on=True,
        source="triton-ascend, which calls it by subprocess; portattn.worker.ascend",
    ),
)  # fmt: skip
