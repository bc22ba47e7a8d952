"""Find claims of an entry without evidence, and entries that take a whole backend away with no end in sight.

Evidence is a record of a probe ([[verified]]), a quotation of printed text, or seen versions (last_seen, seen_on)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec
from packaging.version import Version

from portattn.errors import PathUnavailable
from portattn.planning.planner import plan
from portattn.planning.quirk_files import seen_range
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.problem import Problem
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.toolchain import parse_range
from portattn.tools.quirks import examples
from portattn.tools.quirks.failure_log import patterns


def tracker_of(compiler: str) -> str:
    brought = compilers.find(compiler)
    return patterns().trackers.get(compiler, "") or (brought.tracker if brought else "")


def new_location(link: str) -> str:
    return next((now for before, now in patterns().moved.items() if link.lower().startswith(before.lower())), "")


SIGNATURE = "fail:signature"
_QUOTED = re.compile(r"\"([^\"]+)\"|`([^`]+)`")
_Lacks = Iterator[tuple[tuple[str, ...], str]]  # (key of the file, what is wrong with it)


def lacks(quirk: Quirk) -> _Lacks:
    yield from _signature(quirk)
    for name, text in quirk.when.toolchain.items():
        yield from _range(quirk, name, text)
    now = new_location(quirk.evidence.upstream)
    if now:
        yield ("evidence", "upstream"), f"{quirk.id}: {quirk.evidence.upstream} has moved; its project is at {now} now"


def alternatives(signature: str) -> list[str]:
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
        wide = next((text for text in patterns().any_failure if re.search(part, text)), "")
        if wide:
            yield key, f"{quirk.id}: {part!r} is found in what any failure has: {wide!r}"
        elif not any(re.search(part, text) for text in seen):
            yield key, f"{quirk.id}: {part!r} is in nothing that was seen: no quotation, and no [[verified]] table"


def _range(quirk: Quirk, name: str, text: str) -> _Lacks:
    allowed = parse_range(text)
    key = ("when", "toolchain", name)
    seen = sorted(_versions_seen(quirk, name), key=Version)
    spans = [span for item in quirk.evidence.seen_on for other, span in [seen_range(item)] if other == name]
    inside = [version for version in seen if allowed.contains(version, prereleases=True)]
    candidates = [v for v in examples.versions(name, [text, *spans]) if allowed.contains(v, prereleases=True)]
    if not inside and not any(parse_range(span).contains(v, prereleases=True) for span in spans for v in candidates):
        told = f"it was seen on no version in {name} {text}: neither last_seen, seen_on nor a probe says so"
        yield key, f"{quirk.id}: {told}"
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


TAKES = ("vendor", "reference")  # where a `path` effect leads that takes the core


def takes_whole(quirk: Quirk, registry: Registry, problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Return (backend, newest release) of each backend whose core a quirk takes from every arch and problem.
    A range that ends before the newest release takes nothing from users, and `<4` is no bound while there is no 4."""
    alone = msgspec.structs.replace(registry, quirks={quirk.id: quirk})
    found = []
    for name, backend in registry.backends.items():
        if quirk.when.backend not in (None, name) or not backend.core_path:
            continue
        releases = examples.releases(backend.compiler)
        if not releases:
            continue
        newest = f"{backend.compiler}=={max(releases, key=Version)}"
        arches = [arch for arch in registry.arches[name].values() if not arch.refused]
        targets = [registry.target(f"{name}:{arch.name}", newest) for arch in arches]
        taken = (took for target in targets for took in _taken(quirk, target, alone, problems))
        if next(taken, False) and all(taken):  # nearly every entry leaves the first problem
            found.append((name, newest))
    return found


def _taken(quirk: Quirk, target: Target, alone: Registry, problems: Sequence[Problem]) -> Iterator[bool]:
    core = alone.backends[target.backend].core_path
    for problem in problems:
        try:
            made = plan(problem, target, alone)
        except PathUnavailable:  # gradients that no kernel computes
            continue
        took = any(no.quirk == quirk.id for no in made.rejected)
        if took or made.path == core:
            yield took
