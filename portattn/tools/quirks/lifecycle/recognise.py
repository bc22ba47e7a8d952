"""Which failure a log tells of: its kind, stage, symptom and cause, and a signature for it."""

from __future__ import annotations

import re

import msgspec

from portattn.schema.quirk import Symptom
from portattn.tools.quirks.lifecycle.patterns import TABLE, Recogniser
from portattn.tools.quirks.lifecycle.signature import generalise

# Words that tell in which compiler stage a text was printed, most telling first. Functions of the tracebacks of
# Triton's compilers, Ascend's stage names, and the folders of MLIR's sources that assertions name.
_STAGES: tuple[tuple[str, str], ...] = (
    (r"\[ConvertTritonIRToLinalgIR\]|triton-adapter|TritonToLinalg|BlockPtrAnalysis|in ttir_to_linalg", "ttadapter"),
    (r"\[ConvertLinalgI?RToBinary\]|bishengir-compile|in linalg_to_bin", "npubin"),
    (r"in make_cubin\b|ptxas (?:fatal|error)", "cubin"),
    (r"in make_hsaco\b|ld\.lld", "hsaco"),
    (r"in make_amdgcn\b|amdgcn-amd-amdhsa", "amdgcn"),
    (r"in make_ptx\b", "ptx"),
    (r"in make_llir\b|Conversion/TritonGPUToLLVM|GPUToLLVM|Target/LLVMIR|ConvertTritonAMDGPUToLLVM", "llir"),
    (r"in make_ttgir\b|Dialect/TritonGPU/|TritonAMDGPUTransforms|TritonNvidiaGPU|TritonAMDGPU\w*Pipeline", "ttgir"),
    (r"in make_ttir\b|Dialect/Triton/Transforms", "ttir"),
    (r"in ast_to_ttir\b|\.CompilationError: at", "parse"),
    (r"in _init_handles\b|OutOfResources", "load"),
    (r"in parse_options\b", "parse"),
    (r"Tools/LinearLayout\.cpp", "ttgir"),
)
# portattn's own message, as in an incident: "timeout at ttgir: no answer in 120 s".
_OWN_WORDS = re.compile(r"^[\w. ]+ at (parse|ttir|ttgir|llir|ptx|cubin|amdgcn|hsaco|ttadapter|load): ", re.MULTILINE)
UNKNOWN = "unknown"
CRASHED = re.compile(
    r"SIGSEGV|SIGABRT|Segmentation fault|^Aborted|LLVM ERROR|Assertion `|UNREACHABLE executed"
    r"|exit (?:status|code):? (?:134|139|-6|-11)\b|died of signal|core dumped",
    re.MULTILINE,
)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says went wrong.

    kind       name of the row of patterns.TABLE; `also` are the other rows that the text holds
    line       number of the line on which the cause stands, from 1
    signature  regular expression; empty for a hang, which has no text of its own
    not_a_bug  what to do where it is no compiler's failure; empty elsewhere
    """

    kind: str
    family: str
    stage: str
    symptom: Symptom
    cause: str
    line: int
    signature: str
    not_a_bug: str = ""
    also: tuple[str, ...] = ()


def recognise(text: str) -> Failure | None:
    """The failure that a compiler's output tells of; None where no row of the table is in it."""
    found = [(row, match) for row in TABLE if (match := row.regex.search(text))]
    if not found:
        return None
    row, match = next(((r, m) for r, m in found if not r.passes_on), found[0])
    # An assertion's line holds a whole C++ signature: the file and the condition say what it is.
    parts = match.groupdict()
    shown = f"{parts['file']}: {parts['said']}" if "said" in parts else match["cause"]
    cause = " ".join(shown.split())
    return Failure(
        kind=row.name,
        family=row.family,
        stage=row.stage or stage_of(text),
        symptom=_symptom(row, text),
        cause=cause,
        line=text.count("\n", 0, match.start("cause")) + 1,
        signature=_signature(row, match, text),
        not_a_bug=row.not_a_bug,
        also=tuple(r.name for r, _ in found if r is not row),
    )


def stage_of(text: str) -> str:
    """The compiler stage that a text was printed in, as incidents name it; "unknown" where nothing tells."""
    own = _OWN_WORDS.search(text)
    if own:
        return own[1]
    return next((stage for pattern, stage in _STAGES if re.search(pattern, text)), UNKNOWN)


def _symptom(row: Recogniser, text: str) -> Symptom:
    """A compiler that said what is wrong and then died has crashed: the caller's process is what counts."""
    ended = re.search(r"Traceback \(most recent call last\)[\s\S]*^\S*(?:Error|Exception)\b", text, re.MULTILINE)
    died = CRASHED.search(text) is not None and ended is None
    return "compiler-crash" if row.symptom == "compile-error" and died else row.symptom


def _signature(row: Recogniser, match: re.Match[str], text: str) -> str:
    if row.symptom == "hang":
        return ""
    made = re.sub(r"<(\w+)>", lambda group: generalise(match[group[1]]), row.signature or "<cause>")
    # A signature that does not match its own log would never be found again.
    return made if re.search(made, text) else re.escape(match["cause"][:80])
