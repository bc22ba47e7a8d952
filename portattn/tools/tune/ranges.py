"""For which compilers an entry is that stands beside one whose choice was timed with another compiler."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import InvalidVersion, Version

from portattn.errors import ArgumentError
from portattn.schema import compilers
from portattn.schema.toolchain import Toolchain, nameable, unknown_name
from portattn.schema.tuning import Entry


def same_compiler(timed_with: str, toolchain: Toolchain) -> bool:
    """Whether NAME==VERSION is this compiler, however its version is spelt: 3.6 is 3.6.0."""
    return str(Toolchain.parse(timed_with)) == str(toolchain)


def beside(timed_with: str, todays: Mapping[str, str], toolchain: Toolchain) -> dict[str, str]:
    """The ranges of the new entry: today's, and of them only what the choice was timed for.

    todays  ranges of the entry that holds today: outside of them another entry has the problems, and keeps them

    Raises ArgumentError where no reader would take what must be written: told before anything is timed.
    """
    own, other = toolchain, Toolchain.parse(timed_with)
    bound = ">=0" if own.distribution != other.distribution else _bound(own.version, other.version)
    made = {**todays, own.distribution: _narrowed(todays.get(own.distribution, ""), bound)}
    _check(made, own)
    return made


def _bound(own: str, other: str) -> str:
    """Of a newer release, it and those after it; of an older one, those before the other.

    A build of somebody's own, and a rebuild of the release that the other is of, say nothing of any other version:
    ranges would count the release itself among them (PEP 440), which keeps what was timed with it.
    """
    version, release, others = Version(own), _release(own), _release(other)
    if version.local or Version(release) == Version(others):
        return f"==={own}"
    if Version(release) > Version(others):
        return f">={release}"
    return f"<{others}"


def _release(version: str) -> str:
    """What a build or a rebuild is of: its version without either. A candidate stands for itself."""
    parsed = Version(version)
    candidate = "".join(map(str, parsed.pre or ()))
    made = "" if parsed.is_postrelease or parsed.dev is None else f".dev{parsed.dev}"
    return f"{parsed.base_version}{candidate}{made}"


def _narrowed(todays: str, bound: str) -> str:
    """Both ranges as one, without bounds of today's that the other makes idle; the compiler is in both."""
    if bound.startswith("==="):
        return bound
    parts = (part.strip() for part in todays.split(","))
    kept = [*(part for part in parts if part and not _idle(part, bound)), bound]
    return ",".join(sorted(kept, key=lambda part: not part.startswith(">")))


def _idle(one: str, bound: str) -> bool:
    """Whether one bound excludes nothing that the other leaves; False where more than a look would tell."""
    for operator in (">=", "<"):
        if one.startswith(operator) and bound.startswith(operator):
            try:
                there, limit = (Version(text.removeprefix(operator)) for text in (one, bound))
            except InvalidVersion:  # another operator that begins so, such as <=
                return False
            return there <= limit if operator == ">=" else there >= limit
    return False


def _check(made: Mapping[str, str], own: Toolchain) -> None:
    """Raise ArgumentError where a reader of tuning files would refuse these ranges of a choice timed with `own`."""
    wrong = next((f"{name!r} is {unknown_name()}" for name in made if not nameable(name)), "")
    # As the reader looks at it: of compilers alone, and of this one's name and version.
    named = {name: text for name, text in made.items() if compilers.is_compiler(name)}
    if not wrong and not Entry(kernel="", toolchain=named).is_for(Toolchain.parse(str(own))):
        wrong = "that leaves it out: today's entry is for other compilers than it can be named beside"
    if wrong:
        limit = f"must be one that a tuning file can name: its entry would be for {dict(made)}, and {wrong}"
        raise ArgumentError("tune", "--toolchain", str(own), limit)
