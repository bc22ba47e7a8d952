"""Find claims of an entry that no evidence supports: in its signature, its range of versions, its reports.

Evidence is a probe's record ([[verified]]), a quotation of printed text (quotes, or between quotation marks in the
source), and the versions on which the bug was observed otherwise (last_seen, seen_on).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from portattn.planning.quirk_checks import seen_range
from portattn.schema.quirk import Quirk
from portattn.schema.toolchain import parse_range
from portattn.tools.quirks import examples
from portattn.tools.quirks.trackers import new_location

SIGNATURE = "fail:signature"
# What compilers and their wrappers print of every failure. A signature that is found here tells nothing apart.
OF_ANY_FAILURE = (
    "triton.compiler.errors.CompilationError: at 12:8:",
    "triton.compiler.errors.MLIRCompilationError: ",
    "[ConvertTritonIRToLinalgIR] encounters error:",
    "[ConvertLinalgRToBinary] encounters error:",
    "k.py:1:1: error: failed to legalize operation 'tt.histogram' that was explicitly marked illegal",
    "RuntimeError: PassManager::run failed",
    "subprocess.CalledProcessError: Command '['/opt/triton-adapter-opt', 'k.mlir']' died with <Signals.SIGSEGV: 11>.",
    "Fatal Python error: Segmentation fault",
    "Aborted (core dumped)",
    "PTXAS error: Internal Triton PTX codegen error",
    "ptxas fatal   : Ptx assembly aborted due to errors",
    "ptxas-blackwell fatal   : Ptx assembly aborted due to errors",
    "RuntimeError: AMD LLVM 6bc4aaf6641c56ee104f6200c96a6a571bc77052-1: AMD assembler rejected generated AMDGCN",
    "LLVM ERROR: operation destroyed but still has uses",
    "bishengir-compile: compile failed",
)
_QUOTED = re.compile(r"\"([^\"]+)\"|`([^`]+)`")
_Lacks = Iterator[tuple[tuple[str, ...], str]]  # (key of the file, what is wrong with it)


def lacks(quirk: Quirk) -> _Lacks:
    """What of an entry has no evidence."""
    yield from _signature(quirk)
    for name, text in quirk.when.toolchain.items():
        yield from _range(quirk, name, text)
    now = new_location(quirk.evidence.upstream)
    if now:
        yield ("evidence", "upstream"), f"{quirk.id}: {quirk.evidence.upstream} has moved; its project is at {now} now"


def alternatives(signature: str) -> list[str]:
    """The parts of a regular expression that a bar at its top level divides."""
    parts, depth, in_set, escaped = [""], 0, False, False
    for char in signature:
        if char == "|" and not (depth or in_set or escaped):
            parts.append("")
            continue
        parts[-1] += char
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_set:
            in_set = char != "]"
        elif char == "[":
            in_set = True
        else:
            depth += {"(": 1, ")": -1}.get(char, 0)
    return parts


def _signature(quirk: Quirk) -> _Lacks:
    signature = quirk.evidence.signature
    if not signature:
        return
    key = ("evidence", "signature")
    quoted = [text for pair in _QUOTED.findall(quirk.evidence.source) for text in pair if text]
    seen = [*quirk.evidence.quotes, *quoted, *(block.saw for block in quirk.verified if block.off == SIGNATURE)]
    for part in alternatives(signature):
        wide = next((text for text in OF_ANY_FAILURE if re.search(part, text)), "")
        if wide:
            yield key, f"{quirk.id}: {part!r} is found in what any failure has: {wide!r}"
        elif not any(re.search(part, text) for text in seen):
            yield (
                key,
                f"{quirk.id}: {part!r} is in nothing that was seen: no quotation, and no [[verified]] table",
            )


def _range(quirk: Quirk, name: str, text: str) -> _Lacks:
    """Yield the unobserved versions at the ends of a range."""
    allowed = parse_range(text)
    key = ("when", "toolchain", name)
    seen = sorted(_versions_seen(quirk, name), key=Version)
    spans = [span for item in quirk.evidence.seen_on for other, span in [seen_range(item)] if other == name]
    inside = [version for version in seen if allowed.contains(version, prereleases=True)]
    candidates = [v for v in examples.versions(name, [text, *spans]) if allowed.contains(v, prereleases=True)]
    if not inside and not any(parse_range(span).contains(v, prereleases=True) for span in spans for v in candidates):
        yield (
            key,
            f"{quirk.id}: it was seen on no version in {name} {text}: neither last_seen, seen_on nor a probe says so",
        )
        return
    releases = [version for version in examples.releases(name) if allowed.contains(version)]
    for bounds, at, beyond in (((">", ">=", "==", "~="), 0, "older"), (("<", "<=", "==", "~="), -1, "newer")):
        if not releases or not inside or not any(specifier.operator in bounds for specifier in allowed):
            continue
        end, last = Version(releases[at]), Version(inside[at])
        covered = any(parse_range(span).contains(end, prereleases=True) for span in spans)
        if (end < last if at == 0 else end > last) and not covered:
            yield key, f"{quirk.id}: {name} {text} has {end}, which is {beyond} than any on which it was seen ({last})"


def _versions_seen(quirk: Quirk, name: str) -> Iterator[str]:
    texts = [quirk.evidence.last_seen, *(block.toolchain for block in quirk.verified if block.off == SIGNATURE)]
    for text in (*texts, *quirk.evidence.seen_on):
        other, equals, version = text.partition("==")
        if equals and other == name:
            yield version
