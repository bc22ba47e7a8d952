"""Which failure a text tells of: its kind, stage, symptom and cause, and a signature for it.

The text is a compiler's own (normalise.py has taken away what others added). Where it may hold several failures,
split.py finds them and asks here about each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from portattn.schema.quirk import Symptom
from portattn.tools.quirks.lifecycle.formats.row import PTXAS, Recogniser
from portattn.tools.quirks.lifecycle.formats.table import TABLE
from portattn.tools.quirks.lifecycle.signature import generalise

# Words that tell in which compiler stage a text was printed, most telling first. Functions of the tracebacks of
# Triton's compilers, Ascend's stage names, and the folders of MLIR's sources that assertions name.
_STAGES: tuple[tuple[str, str], ...] = (
    (r"\[ConvertTritonIRToLinalgIR\]|triton-adapter|TritonToLinalg|BlockPtrAnalysis|in ttir_to_linalg", "ttadapter"),
    (r"\[ConvertLinalgI?RToBinary\]|bishengir-compile|in linalg_to_bin", "npubin"),
    (rf"in make_cubin\b|{PTXAS} (?:fatal|error)|Triton PTX codegen error", "cubin"),
    (r"in make_hsaco\b|ld\.lld", "hsaco"),
    (r"in make_zebin\b|ZEBIN codegen", "zebin"),
    (r"in make_amdgcn\b|amdgcn-amd-amdhsa|AMDGPU DAG->DAG|llvm\.amdgcn\.", "amdgcn"),
    (r"in make_ptx\b", "ptx"),
    (r"in make_llir\b|Conversion/TritonGPUToLLVM|GPUToLLVM|Target/LLVMIR|ConvertTritonAMDGPUToLLVM", "llir"),
    (r"in make_ttgir\b|Dialect/TritonGPU/|TritonAMDGPUTransforms|TritonNvidiaGPU|TritonAMDGPU\w*Pipeline", "ttgir"),
    (r"in make_ttir\b|Dialect/Triton/Transforms", "ttir"),
    (r"in ast_to_ttir\b|\.CompilationError: at", "parse"),
    (r"in _init_handles\b|OutOfResources", "load"),
    (r"in parse_options\b", "parse"),
    (r"Tools/LinearLayout\.cpp|lib/Analysis/Allocation\.cpp", "ttgir"),
)
# portattn's own message, as in an incident: "timeout at ttgir: no answer in 120 s".
_OWN_WORDS = re.compile(r"^[\w. ]+ at (parse|ttir|ttgir|llir|ptx|cubin|amdgcn|hsaco|ttadapter|load): ", re.MULTILINE)
UNKNOWN = "unknown"
CRASHED = re.compile(
    r"SIGSEGV|SIGABRT|Segmentation fault|^Aborted|\bAborted +\(core dumped\)|IOT instruction|LLVM ERROR|Assertion `"
    r"|UNREACHABLE executed|exit ?(?:status|code)\s*[:=]?\s*(?:134|139|-6|-11)\b|died of signal|core dumped",
    re.MULTILINE,
)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says went wrong.

    kind       name of the row of the table (formats/); `also` are the other rows that the text holds
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
    return describe_failure(row, match, text, also=(r.name for r, _ in found if r is not row))


def describe_failure(
    row: Recogniser, match: re.Match[str], text: str, around: str = "", also: Iterable[str] = (), cut: bool = False
) -> Failure:
    """The failure that a row of the table found in a text.

    around  what tells of stage and symptom; the text itself by default
    cut     the log ends inside the cause: its last word says nothing
    """
    # An assertion's line holds a whole C++ signature: the file and the condition say what it is.
    parts = match.groupdict()
    shown = f"{parts['file']}: {parts['said']}" if "said" in parts else match["cause"]
    around = around or text
    return Failure(
        kind=row.name,
        family=row.family,
        stage=row.stage or stage_of(around),
        symptom=_symptom(row, around),
        cause=" ".join(shown.split()),
        line=text.count("\n", 0, match.start("cause")) + 1,
        signature=signature_of(row, match, cut),
        not_a_bug=row.not_a_bug,
        also=tuple(dict.fromkeys(also)),
    )


def stage_of(text: str) -> str:
    """The compiler stage that a text was printed in, as incidents name it; "unknown" where nothing tells."""
    own = _OWN_WORDS.search(text)
    if own:
        return own[1]
    return next((stage for pattern, stage in _STAGES if re.search(pattern, text)), UNKNOWN)


def the_stage_of(text: str) -> str:
    """The one stage that a text with several failures names; "unknown" where it names none, or more."""
    named = {stage for pattern, stage in _STAGES if re.search(pattern, text)}
    return named.pop() if len(named) == 1 else UNKNOWN


def _symptom(row: Recogniser, text: str) -> Symptom:
    """A compiler that said what is wrong and then died has crashed: the caller's process is what counts."""
    ended = re.search(r"Traceback \(most recent call last\)[\s\S]*^\S*(?:Error|Exception)\b", text, re.MULTILINE)
    died = CRASHED.search(text) is not None and ended is None
    return "compiler-crash" if row.symptom == "compile-error" and died else row.symptom


def signature_of(row: Recogniser, match: re.Match[str], cut: bool = False) -> str:
    """The regular expression that finds a failure again; empty for a hang, which has no text of its own."""
    if row.symptom == "hang":
        return ""
    text = match.group()
    made = re.sub(r"<(\w+)>", lambda group: generalise(match[group[1]]), row.signature or "<cause>")
    if cut and not (row.signature and re.search(made, text)):
        made = generalise(match["cause"].strip().rpartition(" ")[0] or match["cause"])
    # A signature that does not match its own log would never be found again.
    return made if re.search(made, text) else re.escape(match["cause"][:80])
