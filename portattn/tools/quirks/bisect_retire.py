"""`portattn quirks bisect` and `retire`: the compilers of the lab that have a bug, and an entry made a tombstone."""

import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import tomlkit
from packaging.version import InvalidVersion, Version

from portattn.errors import ArgumentError, PortattnError
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.quirk import ProbeRun, Quirk
from portattn.schema.toolchain import in_range, nameable, parse_range, unknown_name
from portattn.tools.quirks.examples import releases
from portattn.tools.quirks.probe_results import SIGNATURE, Arm, edit, probe_outcome, saw

OP = "quirks bisect"
Outcome = Literal["bad", "good", "other", "skipped", "recorded"]


class ToolchainResult(msgspec.Struct, frozen=True, kw_only=True):
    """One compiler's result.

    bad: fails with the signature; good: passes; other: fails otherwise, in no range; skipped: cannot run here;
    recorded: no result now, and a failure with the signature in the entry's file."""

    toolchain: str
    seen: Outcome
    detail: str = ""


class Bisection(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    compiler: str
    tested: list[ToolchainResult]  # in order of version, without unneeded ones
    monotone: bool  # False if the bug comes and goes more than once: every compiler was then tested
    # last_good_before, first_bad, last_bad, first_good: observed ends; empty if the lab does not reach them
    last_good_before: str = ""
    first_bad: str = ""
    last_bad: str = ""
    first_good: str = ""
    untested: tuple[str, ...] = ()  # releases between the ends, or between two bad ones, without a result
    contradicts: tuple[str, ...] = ()  # compilers that pass now, and fail by the entry's file: they stay in the range
    range: str = ""  # for when.toolchain, as wide as the observations; empty if the bug was not seen
    says: str = ""


def compiler_of(quirk: Quirk) -> str:
    """Return the compiler that the quirk is about: triton, unless its range or its backend names another."""
    named = [name for name in quirk.when.toolchain if compilers.is_compiler(name)]
    owner = Registry.load().backends.get(quirk.when.backend or "")
    return named[0] if named else owner.compiler if owner else "triton"


def candidates(compiler: str, known: Sequence[str], between: tuple[str, str] | None = None) -> list[str]:
    """Return toolchains of one compiler in order of version, both ends of `between` included. Raises ArgumentError."""
    found = sorted((t for t in known if t.partition("==")[0] == compiler), key=_version)
    if between is None:
        return found
    ends = []
    for text in between:
        version = text.partition("==")[2] or text
        match = [t for t in found if t == text or t == f"{compiler}=={version}"]
        if not match:
            raise ArgumentError(OP, "--between", text, f"must be one of {', '.join(found)}")
        ends.append(found.index(match[0]))
    if ends[0] > ends[1]:
        raise ArgumentError(OP, "--between", " ".join(between), "must name the older version first")
    return found[ends[0] : ends[1] + 1]


def bisect(
    quirk: Quirk, toolchains: Sequence[str], off: Callable[[Quirk, str], Arm], *, every: bool = False, target: str = "",
    say: Callable[[ToolchainResult], None] = lambda tested: None,
) -> Bisection:  # fmt: skip
    """Find the ends among toolchains in order of version; a PortattnError of `off` skips one. `target` "": any chip."""
    seen: dict[str, ToolchainResult] = {}

    def test(toolchain: str) -> Outcome:
        if toolchain not in seen:
            seen[toolchain] = _test(quirk, toolchain, off)
            say(seen[toolchain])
        return seen[toolchain].seen

    if every:
        for toolchain in toolchains:
            test(toolchain)
    else:
        bad = next((t for t in _likely(quirk, toolchains) if test(t) == "bad"), None)
        if bad is not None:
            at = toolchains.index(bad)
            for side in (list(reversed(toolchains[:at])), list(toolchains[at + 1 :])):
                _search(side, test, lambda toolchain: _inside(quirk, toolchain))
    if _runs(toolchains, seen) > 1:
        for toolchain in toolchains:
            test(toolchain)
    return _result(quirk, toolchains, seen, recorded_failures(quirk, target))


def recorded_failures(quirk: Quirk, target: str = "") -> dict[str, str]:
    """Return toolchain -> the entry's record of a failure there: from probes, and from reports that name a version."""
    compiler = compiler_of(quirk)
    found = dict.fromkeys(quirk.evidence.seen_on, "reported, by the entry's file") | {
        block.toolchain: f"failed on {block.date}, by the entry's file"
        for block in quirk.verified
        if block.off == SIGNATURE and target in ("", block.target)
    }
    return {toolchain: text for toolchain, text in found.items() if toolchain.startswith(f"{compiler}==")}


def _likely(quirk: Quirk, toolchains: Sequence[str]) -> list[str]:
    """Return toolchains in search order: inside the entry's range, from its middle on; then the others."""
    inside = [t for t in toolchains if _inside(quirk, t)]
    middle = len(inside) // 2
    return [*inside[middle:], *reversed(inside[:middle]), *(t for t in reversed(toolchains) if t not in inside)]


def _inside(quirk: Quirk, toolchain: str) -> bool:
    return in_range(toolchain.partition("==")[2], quirk.when.toolchain.get(compiler_of(quirk), ""))


def _search(side: list[str], test: Callable[[str], Outcome], inside: Callable[[str], bool]) -> None:
    """Find neighbouring bad and good toolchains on one side, `side` nearest first; unclear results are left out."""
    while side and test(side[-1]) not in ("good", "bad"):
        side.pop()
    if side and test(side[-1]) == "bad":
        # As far as the lab reaches. Where the entry says that it is gone in between, somebody has seen that: look.
        for toolchain in side:
            if not inside(toolchain):
                test(toolchain)
        return
    if not side:
        return
    last_bad, first_good = -1, len(side) - 1
    while first_good - last_bad > 1:
        middle = (last_bad + first_good) // 2
        found = test(side[middle])
        if found == "bad":
            last_bad = middle
        elif found == "good":
            first_good = middle
        else:
            side.pop(middle)
            first_good -= 1


def _test(quirk: Quirk, toolchain: str, off: Callable[[Quirk, str], Arm]) -> ToolchainResult:
    try:
        arm = off(quirk, toolchain)
    except PortattnError as error:
        return ToolchainResult(toolchain=toolchain, seen="skipped", detail=str(error))
    seen: Outcome = {"pass": "good", "fail:signature": "bad", "not run": "skipped"}.get(arm.word, "other")  # type: ignore[assignment]
    return ToolchainResult(toolchain=toolchain, seen=seen, detail="" if seen == "good" else saw(quirk, arm))


def _runs(toolchains: Sequence[str], seen: dict[str, ToolchainResult]) -> int:
    words = [seen[t].seen for t in toolchains if t in seen and seen[t].seen in ("good", "bad")]
    return sum(word == "bad" and (i == 0 or words[i - 1] == "good") for i, word in enumerate(words))


def _result(
    quirk: Quirk, toolchains: Sequence[str], seen: dict[str, ToolchainResult], failures: dict[str, str]
) -> Bisection:
    tested = _with_recorded([seen[t] for t in toolchains if t in seen], failures)
    contradicts = tuple(t.toolchain for t in tested if t.seen == "good" and t.toolchain in failures)
    words = {t.toolchain: "bad" if t.seen == "recorded" or t.toolchain in contradicts else t.seen for t in tested}

    def among(*kinds: str) -> list[str]:
        return [toolchain for toolchain, word in words.items() if word in kinds]

    compiler, told, bad, otherwise = compiler_of(quirk), among("good", "bad"), among("bad"), among("other")
    common = {"id": quirk.id, "compiler": compiler, "tested": tested, "contradicts": contradicts}
    if not bad:
        where = "nowhere" if told else "nowhere: none of them can be run here"
        return Bisection(**common, monotone=True, says=f"seen {where}")  # type: ignore[arg-type]
    first, last = bad[0], bad[-1]
    before, after = _beside(told, first, last)
    good_inside = _inside_of(among("good"), first, last)
    # A toolchain that fails otherwise has not shown the bug: the range stops short of it, as of a good one.
    clear = among("good", "other")
    releases_of = {*toolchains, *(f"{compiler}=={version}" for version in compilers.released_versions(compiler))}
    known = {_version(toolchain) for toolchain in (*told, *otherwise)}
    untried = sorted((t for t in releases_of if _version(t) not in known and not _before_supported(t)), key=_version)
    # Neither has a release beside the ends that was not tried: the range is open only where no release is left.
    parts = [*_bounds(first, last, *_beside(sorted((*clear, *untried), key=_version), first, last))]
    parts += [f"!={_version(t)}" for t in _inside_of(clear, first, last)]
    untested = tuple(_inside_of(untried, before or first, after or last))
    said = (
        (good_inside, "not monotone: it is gone in {} and back after"),
        (contradicts, "contradicts the entry's file, which has failures on {}: they stay in the range"),
        (otherwise, "fails otherwise, which is no part of the range: {}"),
        (untested, "not tested, and between these: {}"),
    )
    return Bisection(
        **common, monotone=not good_inside, last_good_before=before, first_bad=first,  # type: ignore[arg-type]
        last_bad=last, first_good=after, untested=untested, range=",".join(parts),
        says="; ".join(text.format(", ".join(names)) for names, text in said if names),
    )  # fmt: skip


def _with_recorded(tested: list[ToolchainResult], failures: dict[str, str]) -> list[ToolchainResult]:
    learnt = {t.toolchain for t in tested if t.seen in ("good", "bad")}
    made = [t for t in tested if t.toolchain in learnt or t.toolchain not in failures]
    for toolchain in failures.keys() - learnt:
        made.append(ToolchainResult(toolchain=toolchain, seen="recorded", detail=failures[toolchain]))
    return sorted(made, key=lambda one: _version(one.toolchain))


def _beside(ordered: Sequence[str], first: str, last: str) -> tuple[str, str]:
    before = [t for t in ordered if _version(t) < _version(first)]
    after = [t for t in ordered if _version(t) > _version(last)]
    return before[-1] if before else "", after[0] if after else ""


def _inside_of(ordered: Sequence[str], first: str, last: str) -> list[str]:
    return [t for t in ordered if _version(first) < _version(t) < _version(last)]


def _bounds(first: str, last: str, before: str, after: str) -> Iterator[str]:
    """Yield PEP 440 bounds: the first bad release; the minor after the last bad, or an earlier `after`; "": none."""
    if before:
        yield f">={_version(first)}"
    if after:
        newest = _version(last)
        yield f"<{min(Version(f'{newest.major}.{newest.minor + 1}'), _version(after))}"


def _version(toolchain: str) -> Version:
    return Version(toolchain.partition("==")[2])


RETIRE = "quirks retire"


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """The result; still_in_range: supported compilers on which the entry applied until now."""

    id: str
    file: str
    date: datetime.date
    reason: str
    fixed_in: str
    replaced_by: str
    still_in_range: tuple[str, ...]


def confirming(quirk: Quirk) -> tuple[ProbeRun, ...]:
    """Return each compiler's and chip's latest probe if it failed on a supported or newer compiler: the bug lives."""
    confirmed = (block for block in quirk.verified if probe_outcome(True, "pass", block.off, block.on) == "confirmed")
    return tuple(block for block in confirmed if not _before_supported(block.toolchain))


def _before_supported(toolchain: str) -> bool:
    name, _, version = toolchain.partition("==")
    tried = compilers.tried_range(name)
    if not tried:
        return False
    supported = [Version(known) for known in releases(name) if parse_range(tried).contains(known)]
    return bool(supported) and Version(version) < min(supported)


def retire(
    quirk_id: str, registry: Registry, reason: str, *, fixed_in: str = "", replaced_by: str = "", force: bool = False,
    today: datetime.date | None = None,
) -> Tombstone:  # fmt: skip
    """Write the tombstone into the entry's file, which keeps its comments; whole or not at all.

    Raises ArgumentError on bad values, or without `force` on a confirmed entry; DataError on an unusable file."""
    quirk = _living(quirk_id, registry)
    if not reason.strip():
        raise ArgumentError(RETIRE, "--reason", reason, "must say why, in a few words")
    _check_fixed_in(fixed_in)
    if replaced_by and (replaced_by == quirk_id or replaced_by not in registry.quirks):
        raise ArgumentError(RETIRE, "--replaced-by", replaced_by, "must be the id of another entry that lives")
    confirmed = confirming(quirk)
    if confirmed and not force:
        block = max(confirmed, key=lambda one: Version(one.toolchain.partition("==")[2]))
        others = sorted({one.toolchain for one in confirmed if one.toolchain != block.toolchain})
        also = f"; and with {', '.join(others)}" if others else ""
        limit = (
            f"must be confirmed no more on a supported compiler: its probe of {block.date} failed without the "
            f"work-around on {block.target} with {block.toolchain}{also}. Probe it again, or give --force"
        )
        raise ArgumentError(RETIRE, "ID", quirk_id, limit)
    date = today or datetime.date.today()
    values = {"date": date, "reason": reason.strip(), "fixed_in": fixed_in, "replaced_by": replaced_by}

    def add(document: tomlkit.TOMLDocument) -> None:
        document.add(tomlkit.nl())
        document["retired"] = {name: value for name, value in values.items() if value != ""}

    edit(Path(quirk.file), quirk_id, add)
    return Tombstone(id=quirk_id, file=quirk.file, still_in_range=still_in_range(quirk), **values)  # type: ignore[arg-type]


def still_in_range(quirk: Quirk) -> tuple[str, ...]:
    found = []
    for name, text in quirk.when.toolchain.items():
        tried = compilers.tried_range(name)
        for version in releases(name) if tried else ():
            if parse_range(tried).contains(version) and parse_range(text).contains(version):
                found.append(f"{name}=={version}")
    return tuple(found)


def _living(quirk_id: str, registry: Registry) -> Quirk:
    if quirk_id in registry.retired:
        tombstone = registry.retired[quirk_id].retired
        assert tombstone is not None
        raise ArgumentError(RETIRE, "ID", quirk_id, f"was retired on {tombstone.date}: {tombstone.reason}")
    if quirk_id not in registry.quirks:
        raise ArgumentError(RETIRE, "ID", quirk_id, "must be an entry's id; `portattn quirks list` names all")
    return registry.quirks[quirk_id]


def _check_fixed_in(text: str) -> None:
    if not text:
        return
    name, _, version = text.partition("==")
    try:
        Version(version)
    except InvalidVersion:
        raise ArgumentError(RETIRE, "--fixed-in", text, "must be NAME==VERSION, as in triton==3.7.1") from None
    if not nameable(name):
        limit = f"must name a compiler or component; {name!r} is {unknown_name()}"
        raise ArgumentError(RETIRE, "--fixed-in", text, limit)
