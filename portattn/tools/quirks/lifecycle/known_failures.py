"""Whether the registry knows a failure already: entries and tombstones whose signature its text matches.

A failure *is* an entry's only where everything is known to agree: the words, the kernel, the compiler's stage, the chip
and the version. Anything less only looks like it: many bugs are worded alike.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import DataError
from portattn.planning.registry import Registry
from portattn.schema import conditions, toml_reader
from portattn.schema.quirk import Quirk, launch_holds
from portattn.schema.target import Arch, Target
from portattn.tools.quirks.lifecycle.failure_report import Facts
from portattn.tools.quirks.lifecycle.recognise import UNKNOWN

_EXCEPTION = re.compile(r"^\s*(?:[A-Za-z_][\w.]*(?:Error|Exception)\b:?\s*)+")
_FRONT_END = {"parse", "ttir"}  # triton-ascend's worker names both so: from the source to TTIR is one stage of it
# Of these every kernel that is too large or too slow has the words: only the conditions tell one entry from another.
_AMOUNTS = ("resource-limit", "slow")


class KnownFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An entry with the failure's signature.

    is_it     whether all that tells one bug from another is known to agree: the failure is the entry's
    in_cause  whether the signature is in the words that say what went wrong, and not only somewhere in the log
    in_range  whether it applies where the failure was seen; None where that is not known
    because   what agrees; but: what differs or is not known, empty where is_it
    says      what that means, for people
    """

    id: str
    title: str
    is_it: bool
    in_cause: bool = True
    in_range: bool | None = None
    because: str = ""
    but: str = ""
    says: str = ""

    def __str__(self) -> str:
        rest = f"; {self.says}" if self.says else ""
        if self.is_it:
            return f"this is {self.id}: {self.title}{rest}"
        return f"this looks like {self.id}: {self.title} (because {self.because}; but {self.but}){rest}"


class _Compared(msgspec.Struct, frozen=True):
    """One thing that tells bugs apart. agrees: None where it is not known. said: in words, for either case."""

    what: str
    agrees: bool | None
    said: str = ""


def find_known_failures(facts: Facts, registry: Registry) -> list[KnownFailure]:
    """Every entry whose signature the text matches: the failure's own first, then those that are nearest."""
    target = facts.target(registry)
    found: list[tuple[Quirk, bool, list[_Compared]]] = []
    for quirk in (*registry.quirks.values(), *registry.retired.values()):
        signature = quirk.evidence.signature
        if quirk.when.backend not in (None, facts.backend) or not signature:
            continue
        in_cause = re.search(signature, _cause(facts)) is not None
        if in_cause or re.search(signature, facts.log):
            found.append((quirk, in_cause, list(_compared(quirk, in_cause, facts, target, registry))))
    fitting = [quirk.id for quirk, _, compared in found if all(part.agrees for part in compared)]
    made = [
        _known(quirk, in_cause, compared, facts, target, [one for one in fitting if one != quirk.id])
        for quirk, in_cause, compared in found
    ]
    return sorted(made, key=lambda entry: (not entry.is_it, not entry.in_cause, entry.in_range is not True, entry.id))


def _known(
    quirk: Quirk, in_cause: bool, compared: list[_Compared], facts: Facts, target: Target | None, others: list[str]
) -> KnownFailure:
    open_ = _open_conditions(quirk, facts)
    doubts = [part.said for part in compared if not part.agrees]
    if not doubts and open_ and (others or quirk.symptom in _AMOUNTS):
        also = f", as {', '.join(others)} would" if others else ""
        doubts = [f"it holds only where {', '.join(open_)}{also}, which the log does not tell"]
    same = [part.what for part in compared if part.agrees]
    return KnownFailure(
        id=quirk.id,
        title=quirk.title,
        is_it=not doubts,
        in_cause=in_cause,
        in_range=_in_range(compared),
        because="its " + (_listed(same) if same else "signature is somewhere in the log") + (" agree" if same else ""),
        but="; ".join(doubts),
        says=_advice(quirk, compared, target, open_ if not doubts else []),
    )


def _cause(facts: Facts) -> str:
    """What went wrong, as it was recognised and as it stands in the log; not the exception's name before it, which many
    bugs have in common."""
    lines = facts.log.splitlines()[facts.at - 1 :]
    return "\n".join(_EXCEPTION.sub("", text) for text in (facts.failure.cause, *lines[:1]))


def _compared(
    quirk: Quirk, in_cause: bool, facts: Facts, target: Target | None, registry: Registry
) -> Iterator[_Compared]:
    """All that tells one bug from another, in the order in which a reader looks at it."""
    yield _Compared("signature", in_cause, "its signature is in the log, and not in what went wrong")
    if quirk.retired:
        fixed = f", fixed in {quirk.retired.fixed_in}" if quirk.retired.fixed_in else ""
        yield _Compared("life", False, f"it was retired on {quirk.retired.date}{fixed}")
    yield _stage(quirk, facts)
    yield _kernel(quirk, facts)
    yield _chip(quirk, facts, registry)
    yield _versions(quirk, facts, target)
    wrong = [text for text, holds in _conditions(quirk, facts) if holds is False]
    if wrong:
        yield _Compared("conditions", False, f"it holds only where {', '.join(wrong)}, which is not so here")


def _stage(quirk: Quirk, facts: Facts) -> _Compared:
    asked, seen = quirk.evidence.stage, facts.failure.stage
    if not asked:
        return _Compared("stage", None, "its file does not say in which stage of the compiler it is seen")
    if seen in ("", UNKNOWN):
        return _Compared("stage", None, f"its stage is {asked}, and the log does not tell in which this was")
    same = asked == seen or {asked, seen} <= _FRONT_END
    return _Compared("stage", same, f"its stage is {asked}, and this is {seen}")


def _kernel(quirk: Quirk, facts: Facts) -> _Compared:
    asked = ", ".join(quirk.when.kernels)
    if not quirk.when.kernels or "*" in quirk.when.kernels:
        return _Compared("kernel", True)
    if facts.kernels:
        same = any(fnmatch.fnmatchcase(name, pattern) for name in facts.kernels for pattern in quirk.when.kernels)
        return _Compared("kernel", same, f"its kernels are {asked}, and this is {', '.join(facts.kernels)}")
    if facts.function:
        return _Compared("kernel", False, f"its kernels are {asked}, and this is {facts.function}")
    return _Compared("kernel", None, f"its kernels are {asked}, and the log names none: give --kernel")


def _chip(quirk: Quirk, facts: Facts, registry: Registry) -> _Compared:
    asked = ", ".join(quirk.when.arch)
    if not facts.arches:
        if facts.chip and quirk.when.arch:
            return _Compared("chip", False, f"its chips are {asked}, and this is {facts.chip}")
        if facts.chip or not quirk.when.arch:
            return _Compared("chip", True)
        return _Compared("chip", None, f"its chips are {asked}, and the log names none: give --target")
    arches = registry.arches.get(facts.backend, {})
    other = [name for name in facts.arches if not _has_arch(quirk, name, arches.get(name))]
    return _Compared("chip", not other, f"its chips are {asked}, and this is {', '.join(other)}")


def _versions(quirk: Quirk, facts: Facts, target: Target | None) -> _Compared:
    if not quirk.when.toolchain:
        return _Compared("range of versions", True)
    asked = ", ".join(f"{name} {text}" for name, text in quirk.when.toolchain.items())
    if target is None:
        missing = "--toolchain" if not facts.compiler else "--target"
        return _Compared(
            "range of versions", None, f"its range is {asked}, and the log names no version: give {missing}"
        )
    for name, text in quirk.when.toolchain.items():
        within = target.toolchain.within(name, text)
        if within is not True:
            version = target.toolchain.component(name)
            this = f"this is {version or target.toolchain}" if within is False else "its version is not known"
            return _Compared("range of versions", within, f"its range is {name} {text}, and {this}")
    return _Compared("range of versions", True)


def _conditions(quirk: Quirk, facts: Facts) -> Iterator[tuple[str, bool | None]]:
    """Conditions on the problem and on choices, each with whether it holds; None where only a log is known."""
    what = facts.specialised
    features = what.problem.features() if what else None
    for condition in conditions.parse_all(quirk.when.features):
        holds = None if features is None or condition.name not in features else condition.holds(features)
        yield condition.text, holds
    for name, value in quirk.when.lowering.items():
        yield f"{name} = {value}", getattr(what.lowering, name) == value if what else None
    for name, wanted in quirk.when.launch.items():
        shown = f"{name} {wanted}" if str(wanted)[:1] in "<>!" else f"{name} = {wanted}"
        yield shown, launch_holds(what.launch.get(name), wanted) if what else None


def _open_conditions(quirk: Quirk, facts: Facts) -> list[str]:
    return [text for text, holds in _conditions(quirk, facts) if holds is None]


def _in_range(compared: list[_Compared]) -> bool | None:
    """Whether chip, versions, kernel and conditions are the entry's, alive as it is."""
    parts = [part.agrees for part in compared if part.what not in ("signature", "stage")]
    return False if False in parts else None if None in parts else True


def _advice(quirk: Quirk, compared: list[_Compared], target: Target | None, open_: list[str]) -> str:
    """What to do about it: why a work-around did not help, or which file is too narrow."""
    differs = {part.what for part in compared if part.agrees is False}
    if "life" in differs:
        return "if it is, it is back: the draft logs it anew"
    if differs == {"chip"}:
        return "if it is, add the chip to its file"
    if differs == {"range of versions"}:
        return "if it is, its range is too narrow: `portattn quirks bisect` finds it"
    if any(part.agrees is not True for part in compared):
        return ""
    unverified = target is not None and quirk.newer_than_seen(target.toolchain)
    caution = f", though last seen on {quirk.evidence.last_seen}" if unverified else ""
    where = f" where {', '.join(open_)}" if open_ else ""
    if quirk.effect.note is not None:
        return f"in range here{caution}, and no plan can avoid it: {quirk.effect.note}"
    return f"in range here{caution}: its work-around should have been applied{where}"


def find_drafts(facts: Facts, out: Path) -> list[KnownFailure]:
    """Drafts under a folder that are of this failure: the same signature on the same chips and compiler."""
    found = []
    for path in sorted((out / facts.backend).glob("*.toml")):
        draft = _read(path)
        when, evidence = (draft[name] if isinstance(draft.get(name), dict) else {} for name in ("when", "evidence"))
        same = (
            facts.failure.signature
            and evidence.get("signature") == facts.failure.signature
            and when.get("arch", []) == list(facts.arches)
            and evidence.get("last_seen", "") == facts.compiler
        )
        if same:
            says = f"drafted already, in {path}"
            found.append(KnownFailure(id=path.stem, title=str(draft.get("title")), is_it=True, says=says))
    return found


def _read(path: Path) -> dict[str, Any]:
    """Return a draft's tables; empty if the file cannot be read, or is no TOML while it is written by hand."""
    try:
        return toml_reader.read(path)[0]
    except (OSError, DataError):
        return {}


def _has_arch(quirk: Quirk, name: str, arch: Arch | None) -> bool:
    """Return whether an entry concerns a chip; arch: its description, with families, if known."""
    patterns = quirk.when.arch
    matches = arch.matches if arch else functools.partial(fnmatch.fnmatchcase, name)
    return not patterns or any(matches(pattern) for pattern in patterns)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
