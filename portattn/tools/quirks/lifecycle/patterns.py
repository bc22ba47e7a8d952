"""What compilers print when they fail: one row a kind of failure, the most telling first.

Every row names where its wording was seen. A row's pattern has a group `cause`: the words that say what went wrong and
that a signature is made of. `stage` is empty where the surrounding text has to tell (recognise.stage_of).
"""

from __future__ import annotations

import re
from functools import cached_property

import msgspec

from portattn.schema.quirk import Symptom

_LINE = r"[^\n]{1,400}"


class Recogniser(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One kind of failure.

    name, family   for reports; the family says whose wording it is
    pattern        regular expression with the group `cause`; `^` and `$` stand for lines
    symptom, stage as quirks and incidents name them
    signature      the regular expression to put into an entry, with <group> for a group of the pattern made general;
                   empty where it is made from `cause` alone
    not_a_bug      for what is no compiler's failure: what to do about it
    passes_on      the words follow from an earlier failure: asked only where nothing else is recognised
    source         where the wording was seen
    """

    name: str
    family: str
    pattern: str
    symptom: Symptom
    stage: str = ""
    signature: str = ""
    passes_on: bool = False
    not_a_bug: str = ""
    source: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE)


TABLE: tuple[Recogniser, ...] = (
    # Something that is not installed: no entry of the registry can work around that.
    Recogniser(
        name="no-cann",
        family="triton-ascend",
        pattern=r"(?P<cause>ASCEND_HOME_PATH is not set[^\n]*|Failed to load the backend extension: torch_npu[^\n]*)",
        symptom="compile-error",
        not_a_bug="install CANN and source its set_env.sh, or compile the front half only (portattn.worker.ascend)",
        source="reproduced: triton-ascend 3.2.0 without CANN",
    ),
    Recogniser(
        name="no-rocm-linker",
        family="triton",
        pattern=r"(?P<cause>ROCm linker \S+ not found[^\n]*)",
        symptom="compile-error",
        not_a_bug="install ROCm's LLVM, or set TRITON_HIP_LLD_PATH; Triton 3.5 and newer bring their own linker",
        source="reproduced: Triton 3.4.0 for gfx942",
    ),
    Recogniser(
        name="no-driver",
        family="triton",
        pattern=r"(?P<cause>\d+ active drivers \(\[[^\n]*\]\)[^\n]*)",
        symptom="compile-error",
        not_a_bug="no device is visible, or two backends claim one: compile for a named target (portattn matrix run)",
        source="triton.runtime.driver of Triton 3.2 to 3.9",
    ),
    # What does not fit the chip. Before everything else: such texts come wrapped in exceptions of every kind.
    Recogniser(
        name="out-of-resources",
        family="triton",
        pattern=rf"(?P<cause>out of resource: {_LINE}?)(?:\. Reducing|$)",
        symptom="resource-limit",
        stage="load",
        source="triton.runtime.errors.OutOfResources of Triton 3.2 to 3.9; portattn.compile.ensure.over_limit",
    ),
    Recogniser(
        name="ub-overflow",
        family="triton-ascend",
        pattern=rf"(?P<cause>ub overflow, requires {_LINE}?bits available)",
        symptom="resource-limit",
        stage="npubin",
        signature=r"ub overflow, requires \d+ bits",
        source="bishengir-compile on a 910B; collected from triton-ascend's issues, 2026-11",
    ),
    Recogniser(
        name="core-dim",
        family="triton-ascend",
        pattern=r"(?P<cause>coreDim=\d+ can't be greater than UINT16_MAX)",
        symptom="resource-limit",
        stage="launch",
        source="triton-ascend's launcher; collected from its issues, 2026-11",
    ),
    Recogniser(
        name="local-memory-exceeds",
        family="llvm-amdgpu",
        pattern=rf"(?:error: {_LINE}?: |error: )?(?P<cause>local memory \(\d+\) exceeds limit \(\d+\))",
        symptom="resource-limit",
        stage="amdgcn",
        source="reproduced: Triton 3.6.0's LLVM for gfx942, a kernel with 160,000 bytes of LDS",
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
        pattern=rf"ptxas (?:error|fatal)\s*: (?P<cause>Entry function {_LINE}uses too much shared data {_LINE})",
        symptom="resource-limit",
        stage="cubin",
        source="reproduced: ptxas of Triton 3.6.0, a kernel with 60,000 bytes of static shared memory",
    ),
    # ptxas
    Recogniser(
        name="ptxas-code",
        family="ptxas",
        pattern=rf"ptxas (?:error|fatal)\s*: (?P<cause>\(C\d{{4}}\) {_LINE})",
        symptom="compile-error",
        stage="cubin",
        source="reproduced: Triton 3.6.0 with maxnreg = 24 (C7602); triton issue 8488 (C7600)",
    ),
    Recogniser(
        name="ptxas-line",
        family="ptxas",
        pattern=rf"ptxas {_LINE}?line \d+; (?:error|fatal)\s*: (?P<cause>{_LINE})",
        symptom="compile-error",
        stage="cubin",
        source="reproduced: ptxas of Triton 3.6.0 on a version of PTX that it does not know",
    ),
    Recogniser(
        name="ptxas-fatal",
        family="ptxas",
        pattern=rf"ptxas (?:error|fatal)\s*: (?!Ptx assembly aborted)(?P<cause>{_LINE})",
        symptom="compile-error",
        stage="cubin",
        source="ptxas of CUDA 12",
    ),
    Recogniser(
        name="ptxas-warning",
        family="ptxas",
        pattern=rf"ptxas (?:info|warning)\s*: (?P<cause>\(C75\d\d\) {_LINE}serialized{_LINE})",
        symptom="slow",
        stage="cubin",
        signature=r"\(C75\d\d\)[^\n]*serialized",
        source="ptxas 12.8 and 12.9: C7508 to C7514, wgmma that could not stay asynchronous",
    ),
    # triton-ascend
    Recogniser(
        name="adapter-mixuse",
        family="triton-ascend",
        pattern=rf"^\s*(?P<cause>%\w+ = \"tt\.\w+\"\([^\n)]*\) \{{MixUse\}}{_LINE})",
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
    # MLIR and LLVM
    Recogniser(
        name="assertion",
        family="mlir",
        pattern=(
            rf"^{_LINE}?(?P<cause>(?P<file>\w+\.(?:cpp|h|cc|inc)):\d+: {_LINE}?(?P<said>Assertion `[^\n]+' failed))"
        ),
        symptom="compiler-crash",
        signature=r"<file>:\d+:.*<said>",
        source="reproduced: Triton 3.2.0 for sm_120 and with num_ctas = 2; triton-ascend 3.2.0 with the old passes",
    ),
    Recogniser(
        name="unreachable",
        family="mlir",
        pattern=rf"^(?P<cause>(?:{_LINE}\n)?UNREACHABLE executed at {_LINE}?)!?$",
        symptom="compiler-crash",
        source="llvm_unreachable in builds with assertions; triton-ascend 3.2.0, an `if` that selects a pointer",
    ),
    Recogniser(
        name="mlir-op",
        family="mlir",
        pattern=rf"error: (?P<cause>'[\w.]+' op {_LINE}|failed to legalize {_LINE})",
        symptom="compile-error",
        source="reproduced: Triton 3.5.1, 3.6.0 for gfx950 with num_stages = 4; triton-ascend 3.2.0, an early return",
    ),
    Recogniser(
        name="llvm-error",
        family="llvm",
        pattern=rf"^(?P<cause>LLVM ERROR: {_LINE})",
        symptom="compiler-crash",
        source="llvm::report_fatal_error; reproduced: Triton 3.5.1 for gfx950 with num_stages = 4",
    ),
    Recogniser(
        name="bishengir",
        family="triton-ascend",
        pattern=rf"(?P<cause>(?:bishengir|hivm|hfusion)[\w-]*{_LINE}?(?:error|failed){_LINE})",
        symptom="compile-error",
        stage="npubin",
        source="bishengir-compile, which triton-ascend calls for machine code; collected from its issues, 2026-11",
    ),
    Recogniser(
        name="ascend-stage",
        family="triton-ascend",
        pattern=rf"\[Convert(?:TritonIRToLinalgIR|LinalgI?RToBinary)\] encounters error:\n+(?P<cause>{_LINE})",
        symptom="compile-error",
        source="reproduced: triton-ascend 3.2.0 without CANN",
    ),
    # Python
    Recogniser(
        name="compilation-error",
        family="triton",
        pattern=(
            r"\.CompilationError: at \d+:\d+:\n(?:[^\n]*\n)*?[ ]*\^\n"
            rf"(?P<cause>(?!exit status|The above|During|Traceback|\s*$){_LINE})"
        ),
        symptom="compile-error",
        stage="parse",
        source="reproduced: Triton 3.4.0, 3.6.0, 3.9.0 and triton-ascend 3.2.0",
    ),
    Recogniser(
        name="exception-in-front-end",
        family="triton",
        pattern=(
            rf"^(?P<cause>(?!CompilationError)[A-Z]\w*(?:Error|Exception): {_LINE})\n+"
            r"The above exception was the direct cause of the following exception:\n(?:[^\n]*\n)*?"
            r"[^\n]*\.CompilationError: at"
        ),
        symptom="compile-error",
        stage="parse",
        source="reproduced: Triton 3.9.0 with block pointers, 3.4.0 with gdc_wait",
    ),
    Recogniser(
        name="time-out",
        family="process",
        pattern=(
            r"(?P<cause>(?:no answer in|did not end in) [\d.]+ s|timed out after [\d.]+ seconds"
            r"|Timeout >[\d.]+s|exit (?:status|code) 124\b|DUE TO TIME LIMIT)"
        ),
        symptom="hang",
        source="portattn's worker, Python's subprocess, pytest-timeout, GNU timeout, Slurm",
    ),
    Recogniser(
        name="exception",
        family="triton",
        # The last line of a traceback that goes through a compiler.
        pattern=(
            r"^  File \"[^\"\n]*triton[/\\](?:compiler|backends|language|runtime)[^\n]*\n(?:[ ][^\n]*\n)*"
            r"(?P<cause>(?!\S*(?:CalledProcessError|CompilationError|PTXASError)\b)[\w.]*(?:Error|Exception)\b: "
            rf"(?!PassManager::run failed){_LINE})"
        ),
        symptom="compile-error",
        source="reproduced: Triton 3.2.0 with num_stages = 0, 3.4.0 with kpack = 2, 3.6.0 with num_ctas = 2",
    ),
    Recogniser(
        name="mlir-error",
        family="mlir",
        pattern=(
            rf"error: (?!Failures have been detected|command failed)(?P<cause>{_LINE})\n"
            r"(?:[^\n]*\n){0,8}?[^\n]*note: "
        ),
        symptom="compile-error",
        source="MLIR's diagnostics: an error with the operation that it is about in a note",
    ),
    Recogniser(
        name="adapter-died",
        family="triton-ascend",
        pattern=(
            rf"(?P<cause>triton-adapter-opt['\"]?{_LINE}?"
            rf"(?:died|SIGSEGV|SIGABRT|signal \d+|Signals\.\w+|exit status -?\d+){_LINE}?)$"
        ),
        symptom="compiler-crash",
        stage="ttadapter",
        passes_on=True,
        source="triton-ascend, which calls it by subprocess; portattn.worker.ascend",
    ),
    Recogniser(
        name="pass-manager",
        family="mlir",
        pattern=r"(?P<cause>PassManager::run failed)",
        symptom="compile-error",
        passes_on=True,
        source="Triton's Python binding, after MLIR has printed its own errors",
    ),
    Recogniser(
        name="segmentation-fault",
        family="process",
        pattern=r"(?P<cause>SIGSEGV|[Ss]egmentation fault|exit (?:status|code):? (?:139|-11)\b|died of signal 11)",
        symptom="compiler-crash",
        signature=r"SIGSEGV|[Ss]egmentation fault|exit (status|code):? (139|-11)|signal 11",
        passes_on=True,
        source="shells, Python's subprocess and faulthandler, portattn's worker",
    ),
    Recogniser(
        name="abort",
        family="process",
        pattern=(
            r"(?P<cause>SIGABRT|^Aborted\b|Fatal Python error: Aborted|exit (?:status|code):? (?:134|-6)\b"
            r"|died of signal 6)"
        ),
        symptom="compiler-crash",
        signature=r"SIGABRT|Aborted|exit (status|code):? (134|-6)|signal 6",
        passes_on=True,
        source="shells, Python's subprocess and faulthandler, portattn's worker",
    ),
)  # fmt: skip
