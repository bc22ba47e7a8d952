"""What an arm of a probe ended as, and what three arms say about a quirk."""

from __future__ import annotations

import datetime
import re
from typing import Literal

import msgspec

from portattn.schema.quirk import Level, ProbeRun, Quirk
from portattn.schema.target import Target
from portattn.worker.client import Reply

Outcome = Literal["pass", "fail", "crash", "hang", "not run"]
ArmName = Literal["control", "off", "on"]

# confirmed     in range: fails with the signature without the work-around, passes with it
# stale         in range: passes without it
# changed       in range: fails, and not with the signature
# ineffective   in range: fails with the signature, and with the work-around as well
# absent        out of range: passes, as the range says
# too narrow    out of range: fails with the signature
# inconclusive  out of range: fails otherwise, or with the work-around as well: another entry's matter
# broken        the control fails: the probe, or its environment, is at fault
# unverified    it could not be run here
ProbeOutcome = Literal[
    "confirmed", "stale", "changed", "ineffective", "absent", "too narrow", "inconclusive", "broken", "unverified"
]
RED: frozenset[str] = frozenset({"stale", "changed", "ineffective", "too narrow", "broken"})
SIGNATURE = "fail:signature"
SAW = 200  # characters of a failure that are kept in a quirk's file
SEEN = "Seen"  # kind of a failure that the probe itself reports, and not the compiler
MISSING = "Missing"  # kind of a failure for want of a thing that the probe needs


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One arm: how it ended.

    kind     exception type, name of a signal, or `Gates` for figures over a limit
    text     what the compiler or the probe said
    matched  whether that is what the quirk describes
    """

    outcome: Outcome
    kind: str = ""
    stage: str = ""
    text: str = ""
    matched: bool = False
    level: Level = "compiles"

    @property
    def word(self) -> str:
        """As [[verified]] tables spell it: `pass`, `not run`, `fail:signature`, or `fail:` and what else it was."""
        if self.outcome in ("pass", "not run"):
            return self.outcome
        return SIGNATURE if self.matched else f"fail:{self.kind or self.outcome}"


PASSED = Arm(outcome="pass")
NOT_RUN = Arm(outcome="not run")


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What probing one quirk on one toolchain gave.

    in_range  whether the quirk's range has this toolchain
    reason    of `unverified`: the missing part, and the date of the last probe; of others: the failure's main line
    stand_in  the toolchain that ran in this one's place; empty if it ran itself
    diff      the change of the quirk's file that the verdict asks for, or a sentence if no range is left; else empty
    """

    quirk: str
    toolchain: str
    target: str
    in_range: bool
    verdict: ProbeOutcome
    control: Arm = NOT_RUN
    off: Arm = NOT_RUN
    on: Arm = NOT_RUN
    reason: str = ""
    stand_in: str = ""
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
    """The arm that a worker's reply is."""
    level: Level = reply.facts.get("level", "compiles")  # type: ignore[assignment]
    if reply.outcome == "ok":
        return Arm(outcome="pass", level=level)
    outcome: Outcome = "fail" if reply.outcome == "error" else reply.outcome
    text = "\n".join(part for part in (f"{reply.kind}: {reply.message}", reply.log) if part)
    matched = matches(quirk, outcome, reply.kind, text)
    return Arm(outcome=outcome, kind=reply.kind, stage=reply.stage, text=text, matched=matched, level=level)


def matches(quirk: Quirk, outcome: Outcome, kind: str, text: str) -> bool:
    """Return whether a failure is the one that the quirk describes.

    A time-out matches a hang; otherwise the quirk's signature decides. Without a signature, the probe's own report
    matches a wrong result or slow code.
    """
    if outcome == "hang" and quirk.symptom == "hang":
        return True
    if quirk.evidence.signature:
        return re.search(quirk.evidence.signature, text) is not None
    return kind in (SEEN, "Gates") and quirk.symptom in ("wrong-result", "slow")


def saw(quirk: Quirk, arm: Arm) -> str:
    """What of a failure says most: the line with the signature, or the words of one that runs over several, or else the
    first line that is no mere place."""
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
    """The verdict on the words of three arms (Arm.word), by the design's table."""
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
    """The verdict that a [[verified]] table has on the entry as it is now; `target` with the table's toolchain."""
    return probe_outcome(probed_range(quirk, target), "pass", seen.off, seen.on)


def probed_range(quirk: Quirk, target: Target) -> bool:
    """Whether the range has the target's toolchain. A version that is not known is taken to be out of it.

    Unlike Quirk.in_range it does not ask what is safe: a probe has just looked.
    """
    return all(target.toolchain.within(name, text) is True for name, text in quirk.when.toolchain.items())
