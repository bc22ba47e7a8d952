"""`portattn quirks bisect`: the first and the last compiler of the lab that has a bug, and the range that this means.

A bug comes once and goes once, as a rule: then two binary searches round one compiler that has it find both ends. What
was tested is all that is claimed; where it shows that the rule does not hold, every compiler is tested. Releases
between the ends that nobody tested are named. A failure that the entry's file has recorded stays in the range, whatever
is seen now: two observations that contradict each other are for a person to settle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
from packaging.version import Version

from portattn.errors import ArgumentError, PortattnError
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.quirk import Quirk
from portattn.schema.toolchain import in_range
from portattn.tools.quirks.probe.results import SIGNATURE, Arm, saw

OP = "quirks bisect"
Seen = Literal["bad", "good", "other", "skipped", "recorded"]


class ToolchainResult(msgspec.Struct, frozen=True, kw_only=True):
    """One compiler. bad: fails with the signature; good: passes; other: fails otherwise, so that it is in no range;
    skipped: cannot run here; recorded: no result now, and a failure with the signature in the entry's file."""

    toolchain: str
    seen: Seen
    detail: str = ""


class Bisection(msgspec.Struct, frozen=True, kw_only=True):
    """The result.

    tested      in order of version; those that were not needed are not in it
    last_good_before, first_bad, last_bad, first_good   ends that were seen; empty where the lab does not reach
    monotone    False where it comes and goes more than once: every compiler was tested then
    untested    releases between the ends, or between two that have it, on which nothing was seen
    contradicts those that pass now, and fail by the entry's file: they stay in the range
    range       for when.toolchain, as wide as what was seen; empty where it was seen nowhere
    """

    id: str
    compiler: str
    tested: tuple[ToolchainResult, ...]
    monotone: bool
    last_good_before: str = ""
    first_bad: str = ""
    last_bad: str = ""
    first_good: str = ""
    untested: tuple[str, ...] = ()
    contradicts: tuple[str, ...] = ()
    range: str = ""
    says: str = ""


def compiler_of(quirk: Quirk) -> str:
    """The compiler whose versions the quirk is about: triton, unless its range or its backend is another's."""
    named = [name for name in quirk.when.toolchain if compilers.is_compiler(name)]
    owner = Registry.load().backends.get(quirk.when.backend or "")
    return named[0] if named else owner.compiler if owner else "triton"


def candidates(compiler: str, known: Sequence[str], between: tuple[str, str] | None = None) -> list[str]:
    """Toolchains of one compiler in order of version, both ends of `between` included. Raises ArgumentError."""
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
    quirk: Quirk,
    toolchains: Sequence[str],
    off: Callable[[Quirk, str], Arm],
    *,
    every: bool = False,
    target: str = "",
    say: Callable[[ToolchainResult], None] = lambda tested: None,
) -> Bisection:
    """Find the ends among toolchains of one compiler, in order of version.

    off    runs the probe without the work-around (portattn.tools.quirks.probe.off). A PortattnError that
           it raises means that it cannot be run there: that compiler is skipped
    every  test each of them, whatever the first ones say
    target the chip whose recorded failures count; empty for every chip's
    """
    seen: dict[str, ToolchainResult] = {}

    def test(toolchain: str) -> Seen:
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
    runs = _runs(toolchains, seen)
    if runs > 1:
        for toolchain in toolchains:
            test(toolchain)
    return _result(quirk, toolchains, seen, recorded_failures(quirk, target))


def recorded_failures(quirk: Quirk, target: str = "") -> dict[str, str]:
    """Toolchain -> what the entry's file says of a failure there: of probes, and of reports that name a version."""
    compiler = compiler_of(quirk)
    found = {
        block.toolchain: f"failed on {block.date}, by the entry's file"
        for block in quirk.verified
        if block.off == SIGNATURE and target in ("", block.target)
    }
    for text in quirk.evidence.seen_on:
        if text.startswith(f"{compiler}=="):
            found.setdefault(text, "reported, by the entry's file")
    return {toolchain: text for toolchain, text in found.items() if toolchain.partition("==")[0] == compiler}


def _likely(quirk: Quirk, toolchains: Sequence[str]) -> list[str]:
    """Where the bug is looked for first: inside the entry's range, from its middle on; then elsewhere."""
    inside = [t for t in toolchains if _inside(quirk, t)]
    middle = len(inside) // 2
    return [*inside[middle:], *reversed(inside[:middle]), *(t for t in reversed(toolchains) if t not in inside)]


def _inside(quirk: Quirk, toolchain: str) -> bool:
    """Whether the entry's range has a toolchain; one without a range has all."""
    text = quirk.when.toolchain.get(compiler_of(quirk), "")
    return in_range(toolchain.partition("==")[2], text)


def _search(side: list[str], test: Callable[[str], Seen], inside: Callable[[str], bool]) -> None:
    """Find the neighbours, one bad and one good, on one side of a bad one: the far end first, then by halves.

    side   toolchains away from the bad one, the nearest first
    What cannot be run, or fails otherwise, says nothing and is left out.
    """
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
    seen: Seen = {"pass": "good", "fail:signature": "bad", "not run": "skipped"}.get(arm.word, "other")  # type: ignore[assignment]
    return ToolchainResult(toolchain=toolchain, seen=seen, detail="" if seen == "good" else saw(quirk, arm))


def _runs(toolchains: Sequence[str], seen: dict[str, ToolchainResult]) -> int:
    """How often the bug comes, going by what was tested: more than once is not monotone."""
    words = [seen[t].seen for t in toolchains if t in seen and seen[t].seen in ("good", "bad")]
    return sum(word == "bad" and (i == 0 or words[i - 1] == "good") for i, word in enumerate(words))


def _result(
    quirk: Quirk, toolchains: Sequence[str], seen: dict[str, ToolchainResult], failures: dict[str, str]
) -> Bisection:
    tested = _with_recorded([seen[t] for t in toolchains if t in seen], failures)
    contradicts = tuple(t.toolchain for t in tested if t.seen == "good" and t.toolchain in failures)
    words = {t.toolchain: "bad" if t.seen == "recorded" or t.toolchain in contradicts else t.seen for t in tested}
    told = [t for t in words if words[t] in ("good", "bad")]
    bad = [t for t in told if words[t] == "bad"]
    common = {"id": quirk.id, "compiler": compiler_of(quirk), "tested": tested, "contradicts": contradicts}
    if not bad:
        where = "nowhere" if told else "nowhere: none of them can be run here"
        return Bisection(**common, monotone=True, says=f"seen {where}")  # type: ignore[arg-type]
    first, last = bad[0], bad[-1]
    before = [t for t in told if _version(t) < _version(first)]
    after = [t for t in told if _version(t) > _version(last)]
    good_inside = [t for t in told if words[t] == "good" and _version(first) < _version(t) < _version(last)]
    ends = (before[-1] if before else first, after[0] if after else last)
    # A toolchain that fails otherwise has not shown the bug: the range stops short of it, as of a good one.
    otherwise = [t for t in words if words[t] == "other"]
    clear = [t for t in words if words[t] in ("good", "other")]
    parts = list(
        _bounds(
            first,
            last,
            next((t for t in reversed(clear) if _version(t) < _version(first)), ""),
            next((t for t in clear if _version(t) > _version(last)), ""),
        )
    )
    parts += [f"!={_version(t)}" for t in clear if _version(first) < _version(t) < _version(last)]
    untested = tuple(_between(compiler_of(quirk), toolchains, [*told, *otherwise], *ends))
    says = []
    if good_inside:
        says.append(f"not monotone: it is gone in {', '.join(good_inside)} and back after")
    if contradicts:
        says.append(
            f"contradicts the entry's file, which has failures on {', '.join(contradicts)}: they stay in the range"
        )
    if otherwise:
        says.append(f"fails otherwise, which is no part of the range: {', '.join(otherwise)}")
    if untested:
        says.append(f"not tested, and between these: {', '.join(untested)}")
    return Bisection(
        **common,  # type: ignore[arg-type]
        monotone=not good_inside,
        last_good_before=before[-1] if before else "",
        first_bad=first,
        last_bad=last,
        first_good=after[0] if after else "",
        untested=untested,
        range=",".join(parts),
        says="; ".join(says),
    )


def _with_recorded(tested: list[ToolchainResult], failures: dict[str, str]) -> tuple[ToolchainResult, ...]:
    """In order of version, with the failures of the entry's file where nothing was learnt now."""
    learnt = {t.toolchain for t in tested if t.seen in ("good", "bad")}
    made = [t for t in tested if t.toolchain in learnt or t.toolchain not in failures]
    made += [
        ToolchainResult(toolchain=toolchain, seen="recorded", detail=detail)
        for toolchain, detail in failures.items()
        if toolchain not in learnt
    ]
    return tuple(sorted(made, key=lambda one: _version(one.toolchain)))


def _between(compiler: str, toolchains: Sequence[str], told: Sequence[str], low: str, high: str) -> Iterator[str]:
    """Releases from the one end to the other of which nothing is known: of the lab, and published ones."""
    known = {_version(toolchain) for toolchain in told}
    releases = {*toolchains, *(f"{compiler}=={version}" for version in compilers.released_versions(compiler))}
    for toolchain in sorted(releases, key=_version):
        if _version(low) < _version(toolchain) < _version(high) and _version(toolchain) not in known:
            yield toolchain


def _bounds(first: str, last: str, before: str, after: str) -> Iterator[str]:
    """Yield PEP 440 bounds: from the first bad release, if an older one is not, to the release after the last bad.

    before, after  the nearest tested releases that are not bad; empty: no bound on that side

    The upper bound is the next minor release, or `after` if it comes sooner: `<3.7` if 3.6.0 is bad and 3.7.1 is not.
    """
    if before:
        yield f">={_version(first)}"
    if after:
        newest = _version(last)
        following = Version(f"{newest.major}.{newest.minor + 1}")
        yield f"<{min(following, _version(after))}"


def _version(toolchain: str) -> Version:
    return Version(toolchain.partition("==")[2])
