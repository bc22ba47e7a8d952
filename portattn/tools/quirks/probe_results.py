"""Outcomes of a probe's arms, the verdict of three arms on a quirk, and its change of the quirk's file."""

import datetime
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
from packaging.version import Version

from portattn.errors import DataError
from portattn.files import write_whole
from portattn.planning.quirk_files import check_text
from portattn.schema import compilers, toml_reader
from portattn.schema.quirk import Level, ProbeRun, Quirk
from portattn.schema.target import Target
from portattn.schema.toolchain import in_range, parse_range
from portattn.worker.client import Reply

Outcome = Literal["pass", "fail", "crash", "hang", "not run"]
ArmName = Literal["control", "off", "on"]

# docs/quirks.md has the table of verdicts.
ProbeOutcome = Literal[
    "confirmed", "stale", "changed", "ineffective", "absent", "too narrow", "inconclusive", "broken", "unverified"
]
RED: frozenset[str] = frozenset({"stale", "changed", "ineffective", "too narrow", "broken"})
SIGNATURE = "fail:signature"
SAW = 200  # characters of a failure that are kept in a quirk's file
BUG_FOUND = "BugFound"  # kind of a failure that the probe itself reports, and not the compiler
MISSING = "Missing"  # kind of a failure for want of a thing that the probe needs


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    kind: str = ""  # exception type, name of a signal, or `Gates` for figures over a limit
    stage: str = ""
    text: str = ""  # output of the compiler or the probe
    matched: bool = False  # the failure is the quirk's
    level: Level = "compiles"

    @property
    def word(self) -> str:
        """Return the word of [[verified]] tables: `pass`, `not run`, `fail:signature`, or `fail:` and the kind."""
        if self.outcome in ("pass", "not run"):
            return self.outcome
        return SIGNATURE if self.matched else f"fail:{self.kind or self.outcome}"


PASSED = Arm(outcome="pass")
NOT_RUN = Arm(outcome="not run")


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    quirk: str
    toolchain: str
    target: str
    in_range: bool  # the quirk's range has this toolchain
    verdict: ProbeOutcome
    control: Arm = NOT_RUN
    off: Arm = NOT_RUN
    on: Arm = NOT_RUN
    # of `unverified`: the missing part, and the date of the last probe; of others: the failure's main line
    reason: str = ""
    stand_in: str = ""  # the toolchain that ran in this one's place; empty if it ran itself
    # the change of the quirk's file that the verdict asks for, or a sentence if no range is left; else empty
    diff: str = ""
    seconds: float = 0.0
    date: datetime.date

    @property
    def red(self) -> bool:
        return self.verdict in RED

    @property
    def level(self) -> Level:
        return self.off.level


def arm_of_reply(reply: Reply, quirk: Quirk) -> Arm:
    level: Level = reply.facts.get("level", "compiles")  # type: ignore[assignment]
    if reply.outcome == "ok":
        return Arm(outcome="pass", level=level)
    outcome: Outcome = "fail" if reply.outcome == "error" else reply.outcome
    text = reply_text(reply)
    matched = matches(quirk, outcome, reply.kind, text)
    return Arm(outcome=outcome, kind=reply.kind, stage=reply.stage, text=text, matched=matched, level=level)


def reply_text(reply: Reply) -> str:
    """Return the compiler's output, which signatures are matched against."""
    return "\n".join(part for part in (f"{reply.kind}: {reply.message}", reply.log) if part)


def fails_as(reply: Reply, symptom: str, signature: str) -> bool:
    """Return whether a compile failed in the way of a known failure."""
    if reply.outcome == "hang" and symptom == "hang":
        return True
    return reply.outcome != "ok" and bool(signature) and re.search(signature, reply_text(reply)) is not None


def matches(quirk: Quirk, outcome: Outcome, kind: str, text: str) -> bool:
    """Return whether a failure is the quirk's: a hang's time-out, its signature, or else the probe's own report."""
    if outcome == "hang" and quirk.symptom == "hang":
        return True
    if quirk.evidence.signature:
        return re.search(quirk.evidence.signature, text) is not None
    return kind in (BUG_FOUND, "Gates") and quirk.symptom in ("wrong-result", "slow")


def saw(quirk: Quirk, arm: Arm) -> str:
    """Return a failure's most telling line: with the signature, or all its words, or the first beyond a path."""
    # A path says where this machine keeps a file, and nothing about the compiler.
    text = re.sub(r"(?:/[\w.+-]+)+/(?=[\w.-]+)", "", arm.text)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    signature = quirk.evidence.signature
    found = [line for line in lines if signature and re.search(signature, line)]
    if signature and not found and (match := re.search(signature, text)):
        found = [" ".join(match.group().split())]
    telling = [line for line in lines if not re.fullmatch(r"(\w+: )?at \d+:\d+:", line)]
    return (found or telling or lines or [""])[0][:SAW]


def probe_outcome(in_range: bool, control: str, off: str, on: str) -> ProbeOutcome:
    """Return the verdict on the words of three arms (Arm.word), by the design's table."""
    if control.startswith("fail:"):
        return "broken"
    if off == "not run":
        return "unverified"
    if off == "pass":
        return "stale" if in_range else "absent"
    if off != SIGNATURE:
        return "changed" if in_range else "inconclusive"
    if on.startswith("fail:"):
        # A wider range would bring a work-around to where it does not work.
        return "ineffective" if in_range else "inconclusive"
    return "confirmed" if in_range else "too narrow"


def recorded_outcome(quirk: Quirk, seen: ProbeRun, target: Target) -> ProbeOutcome:
    return probe_outcome(probed_range(quirk, target), "pass", seen.off, seen.on)


def probed_range(quirk: Quirk, target: Target) -> bool:
    """Return whether the range has the toolchain; an unknown version is outside, unlike in Quirk.in_range."""
    return all(target.toolchain.within(name, text) is True for name, text in quirk.when.toolchain.items())


_LOWER, _UPPER = (">=", ">"), ("<=", "<")


def range_component(quirk: Quirk) -> str:
    """Return the subject of the entry's range: its compiler, or else its first component; empty without a range."""
    names = list(quirk.when.toolchain)
    return next((name for name in names if compilers.is_compiler(name)), names[0] if names else "")


def narrow_range(text: str, version: str, affected: Iterable[str]) -> str:
    """Return the range without a version: a bound moves on the side without `affected` ones, else it is excluded."""
    kept = [str(s) for s in parse_range(text)]
    seen = [Version(v) for v in affected]
    older = any(v < Version(version) for v in seen)
    newer = any(v > Version(version) for v in seen)
    if older and newer:
        return _joined([*kept, f"!={version}"])
    if newer:
        return _joined([s for s in kept if not s.startswith(_LOWER)] + [f">={min(seen)}"])
    return _joined([s for s in kept if not s.startswith((*_UPPER, "==", "~="))] + _lower_of(text) + [f"<{version}"])


def satisfiable(text: str) -> bool:
    named = [Version(s.version.removesuffix(".*")) for s in parse_range(text)]
    after = [Version(f"{v}.0.0.1") for v in named]  # right behind each of them
    return any(parse_range(text).contains(v, prereleases=True) for v in (Version("0"), *named, *after))


def _lower_of(text: str) -> list[str]:
    return [f">={s.version.removesuffix('.*')}" for s in parse_range(text) if s.operator in ("==", "~=")]


def extend_range(text: str, version: str) -> str:
    """Return the range with one version more, on which the bug was seen."""
    kept = [s for s in parse_range(text) if not (s.operator == "!=" and s.contains(version) is False)]
    missing = [s for s in kept if not in_range(version, str(s))]
    found = [str(s) for s in kept if s not in missing]
    for specifier in missing:
        other = Version(specifier.version.removesuffix(".*"))
        if specifier.operator in _LOWER or (specifier.operator in ("==", "~=") and Version(version) < other):
            found.append(f">={version}")
            if specifier.operator in ("==", "~="):
                found.append(f"<={other}" if not specifier.version.endswith(".*") else f"<{_next(other)}")
        else:
            found += [f"<={version}", *(_lower_of(str(specifier)))]
    return _joined(found)


def _next(version: Version) -> str:
    return ".".join(map(str, (*version.release[:-1], version.release[-1] + 1)))


def _joined(parts: Iterable[str]) -> str:
    unique = list(dict.fromkeys(parts))
    return ",".join(
        sorted(unique, key=lambda s: (not s.startswith(_LOWER), not s.startswith("="), s.startswith("!"), s))
    )


def range_diff(quirk: Quirk, target: Target, verdict: str, affected: Iterable[str]) -> str:
    """Return the quirk file's change for a `stale` or `too narrow` verdict, a sentence if no version is left, or ""."""
    name = range_component(quirk)
    version = target.toolchain.component(name) if name else None
    if verdict not in ("stale", "too narrow") or version is None:
        return ""
    old, affected = quirk.when.toolchain[name], list(affected)
    new = narrow_range(old, version, affected) if verdict == "stale" else extend_range(old, version)
    if not satisfiable(new):
        seen = f"{name}=={version} does not have it any more" if version in affected else f"no probe showed it in {old}"
        return f"{seen}: retire {quirk.id}, or mend its probe"
    path = Path(quirk.file)
    if not path.is_file() or new == old:
        return ""
    text = path.read_text(encoding="utf-8")
    number = toml_reader.line_of(text, "when", "toolchain", name)
    line = text.splitlines()[number - 1] if number else ""
    if old not in line:
        return ""
    return f"--- {path}:{number}\n-{line}\n+{line.replace(old, new)}"


def edit(path: Path, quirk_id: str, change: Callable[[Any], object]) -> None:
    """Change a quirk's file, and write it whole. Raises DataError if it does not hold, or would not load, the quirk."""
    import tomlkit

    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    if document.get("id") != quirk_id:
        raise DataError(path, 1, f"key 'id': the file is {document.get('id')!r} now, and not {quirk_id!r}")
    change(document)
    # A table begins after an empty line, and after its comment where it has one.
    text = tomlkit.dumps(document).rstrip("\n") + "\n"
    text = re.sub(r"(?m)^(?!#)(.+)\n+(?=\[\[verified\]\]$)", r"\1\n\n", text)
    # Checked as text: a trial file in the folder would be read by others, and stay where this process is killed.
    _, wrong = check_text(text, path)
    if wrong:
        raise DataError(path, wrong[0].line, f"would be broken, so nothing was written: {wrong[0].problem}")
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise DataError(path, None, f"cannot be written: {error.strerror or error}") from error


_SAID_NOTHING = ("unverified", "broken", "inconclusive")  # verdicts of probes that saw nothing about their quirk


def _verified(quirk: Quirk, result: ProbeResult) -> dict[str, Any]:
    return {
        "toolchain": result.toolchain, "target": result.target, "stand_in": result.stand_in, "level": result.level,
        "off": result.off.word, "on": result.on.word,
        "saw": saw(quirk, result.off) if result.off.outcome != "pass" else "", "date": result.date,
    }  # fmt: skip


def record(quirk: Quirk, results: list[ProbeResult]) -> int:
    """Write a quirk's results into its file, a table a (toolchain, target); return their number. Raises DataError."""
    import tomlkit
    from tomlkit.items import AoT

    seen = [_verified(quirk, result) for result in results if result.verdict not in _SAID_NOTHING]

    def write(document: Any) -> None:
        tables = document.get("verified")
        if not isinstance(tables, AoT):
            tables = tomlkit.aot()
            document.append("verified", tables)
        for new in seen:
            place = (new["toolchain"], new["target"])
            table = next((t for t in tables if (t.get("toolchain"), t.get("target")) == place), None)
            if table is None:
                tables.append(table := tomlkit.table())
            for name, value in new.items():
                if value == "":
                    table.pop(name, None)
                elif table.get(name) != value:
                    table[name] = value

    if seen:
        edit(Path(quirk.file), quirk.id, write)
    return len(seen)
