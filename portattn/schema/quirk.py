"""Quirk: one known compiler bug or limit, as data. The schema of quirks/<backend>/*.toml, and when one applies."""

from __future__ import annotations

import datetime
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from portattn.errors import SettingError
from portattn.schema import conditions, quirk_names
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.symbolic_int import pin_sizes
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain

__all__ = [
    "ASSUMED",
    "EFFECTS",
    "LEVELS",
    "NUMBER",
    "PATH_EFFECTS",
    "STAGES",
    "Effect",
    "Evidence",
    "Level",
    "ProbeRun",
    "Quirk",
    "Retirement",
    "Symptom",
    "When",
    "describe_effect",
    "launch_holds",
    "parse_overrides",
]

# Where a quirk's `path` effect leads, least restrictive first; every path that comes before it is not taken.
PATH_EFFECTS = ("core", "vendor", "reference")

# The kinds of effect; every quirk has exactly one.
EFFECTS = ("lowering", "launch", "env", "path", "note")
# Stages of the compilers, as incidents name them; `load` and `launch` come after them.
STAGES = (
    "parse", "ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn", "hsaco", "ttadapter", "npubin", "load", "launch",
)  # fmt: skip
# What is said where a version that a quirk's range asks about is not known (Quirk.assumed).
ASSUMED = "assumed: a version that its range asks about is not known"
NUMBER = re.compile(r"^(<=|>=|!=|<|>)(\d+)$")  # a launch value that is compared: ">=4"

Symptom = Literal["compile-error", "compiler-crash", "hang", "wrong-result", "slow", "resource-limit"]
Level = Literal["declared", "compiles", "lowering-checked", "emulated", "runs", "measured"]
LEVELS: tuple[str, ...] = ("declared", "compiles", "lowering-checked", "emulated", "runs", "measured")


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions that must all hold; an absent one holds.

    backend    name of a backend (portattn's own or an installed package's); absent: every backend
    arch       glob patterns on the arch's name and its families'
    toolchain  component -> PEP 440 range
    kernels    glob patterns on the kernel name
    features   conditions on the problem (portattn.schema.conditions)
    lowering   choice -> value that the plan would otherwise take
    launch     launch value that the plan would otherwise take: a value, or a comparison such as ">=4"; if gradients'
               kernels differ in it, either's value
    """

    backend: str | None = None
    arch: tuple[str, ...] = ()
    toolchain: dict[str, str] = {}
    kernels: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    lowering: dict[str, str] = {}
    launch: dict[str, bool | int | str] = {}


class Effect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of lowering, launch, env, path and note. `cost` says what the work-around costs.

    lowering  choice -> value            launch  launch value or compiler option -> value
    path      the path that comes first  env     environment of the compile
              (`core` rejects variants only)
    note      a caution: changes nothing, and is listed in every plan it concerns
    """

    lowering: dict[str, str] | None = None
    launch: dict[str, bool | int | str] | None = None
    env: dict[str, str] | None = None
    path: Literal["core", "vendor", "reference"] | None = None
    note: str | None = None
    cost: str = ""

    @property
    def kind(self) -> str:
        """The one kind of effect that is given. Raises StopIteration on an effect that load_quirk refuses."""
        return next(k for k in EFFECTS if getattr(self, k) is not None)

    @property
    def sets(self) -> dict[str, bool | int | str]:
        """What a lowering, launch or env effect sets; empty for the other kinds, which set no value."""
        given = getattr(self, self.kind)
        return dict(given) if isinstance(given, dict) else {}


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why we believe it.

    signature   regex that the failure's text must match; empty only for `wrong-result`, `slow` and `hang`, and where
                neither a probe nor a publication has the text
    stage       stage of the compiler in which that text is printed (STAGES); empty where it is not known
    quotes      texts that the signature must match, as they were printed, where no [[verified]] table has them
    seen_on     where it was observed, beside [[verified]] and last_seen: NAME==VERSION, or a range such as
                "triton-ascend<3.2.0" for one version of it that is not stated
    probe       "probes/<name>.py", a program under quirks/; "plan: <op> --target …", a problem whose plan is compiled
                with the quirk switched off and on; or "none: <reason>"
    needs       device that the probe must run on, BACKEND:ARCH with a glob; empty for one that only compiles
    stand_in    a release that no registry has, NAME==VERSION, for which the lab's stand-in shows the failure too
    upstream    link, or "unreported"
    source      where it was seen and who published it
    last_seen   newest toolchain it was seen on, NAME==VERSION; needed when the range has no upper bound
    review_by   date of the next look at it; needed when the range has no upper bound
    """

    signature: str = ""
    stage: str = ""
    quotes: tuple[str, ...] = ()
    seen_on: tuple[str, ...] = ()
    probe: str
    needs: str = ""
    stand_in: str = ""
    upstream: str
    source: str
    last_seen: str = ""
    review_by: datetime.date | None = None


class ProbeRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one run of the probe saw. Written by the tool only; one for each (toolchain, target).

    off, on  the arms without and with the work-around: "pass", "fail:signature", "fail:<other kind>"; `on` is "not run"
             where the first arm passed. What that means is judged against the entry's range when it is asked for
    saw      the line of the failure that says most; empty when nothing failed
    stand_in the toolchain that really ran, where `toolchain` is in no registry; empty when it was the very one
    """

    toolchain: str
    target: str
    level: Level
    off: str
    on: str
    date: datetime.date
    saw: str = ""
    stand_in: str = ""


class Retirement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tombstone: the entry applies no more, and its id stays taken.

    fixed_in     first compiler without the bug, NAME==VERSION; empty when it is not known, or was no bug
    replaced_by  id of the entry that took its place; empty for none
    """

    date: datetime.date
    reason: str
    fixed_in: str = ""
    replaced_by: str = ""


class Quirk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the registry. See docs/quirks.md for the file format.

    >>> import portattn
    >>> quirk = portattn.Registry.load().quirks["cuda-0012-serialised-wgmma"]
    >>> quirk.when.backend, quirk.symptom, quirk.effect.kind
    ('cuda', 'slow', 'launch')
    """

    id: str
    title: str
    symptom: Symptom
    kind: Literal["workaround", "limit"]
    when: When
    effect: Effect
    evidence: Evidence
    verified: tuple[ProbeRun, ...] = ()
    retired: Retirement | None = None
    file: str = ""

    def applies(
        self, kernel: str, problem: Problem, target: Target, lowering: Lowering, launch: Launch, programs: int
    ) -> bool:
        """Whether every condition holds for this specialisation on this target."""
        when = self.when
        return (
            self.concerns(kernel, target)
            and self.in_range(target.toolchain)
            and conditions.texts_hold(when.features, problem.features() | {"programs": programs})
            and all(getattr(lowering, name) == value for name, value in when.lowering.items())
            and any(
                all(launch_holds(one.get(name), wanted) for name, wanted in when.launch.items())
                for one in launch.kernels()
            )
        )

    def concerns(self, kernel: str, target: Target) -> bool:
        """Whether backend, arch and kernel match, whatever the toolchain and the problem."""
        when = self.when
        return self.names_chip(target) and (
            not when.kernels or any(fnmatch.fnmatchcase(kernel, pattern) for pattern in when.kernels)
        )

    def names_chip(self, target: Target) -> bool:
        """Whether backend and arch match, whatever the kernel, the toolchain and the problem."""
        when = self.when
        return when.backend in (None, target.backend) and (not when.arch or any(map(target.arch.matches, when.arch)))

    def reaches(self, variant: str, problem: Problem, target: Target) -> bool:
        """Whether every condition holds for a variant, which has none of the core's choices and launch values."""
        features = conditions.parse_all(self.when.features)
        return (
            self.names_variant(variant, target)
            and self.in_range(target.toolchain)
            and all(condition.name != "programs" for condition in features)
            and conditions.all_hold(features, problem.features())
        )

    def names_variant(self, variant: str, target: Target) -> bool:
        """Whether backend, arch and kernel match, and no choice or launch value of the core's is asked about."""
        return not self.when.lowering and not self.when.launch and self.concerns(variant, target)

    def in_range(self, toolchain: Toolchain) -> bool:
        """Whether the toolchain is one that has the bug, as far as anybody knows.

        What is not known is decided by what a wrong guess would cost. A component whose version is unknown, and a
        version newer than any the bug was seen on, count as affected (fail closed), except that a `slow` quirk
        then does not apply (fail open).
        """
        for name, specifier in self.when.toolchain.items():
            within = toolchain.within(name, specifier)
            if within is False or (within is None and self.symptom == "slow"):
                return False
        return not (self.symptom == "slow" and self.newer_than_seen(toolchain))

    def assumed(self, toolchain: Toolchain) -> bool:
        """Whether a version that the range asks about is not known, so that `in_range` answers by what is safe."""
        return any(toolchain.within(name, text) is None for name, text in self.when.toolchain.items())

    def doubt(self, toolchain: Toolchain) -> str:
        """Why it is not known that a toolchain which is `in_range` has the bug; empty where it is known."""
        if self.assumed(toolchain):
            return ASSUMED
        newer = self.newer_than_seen(toolchain)
        return f"last seen on {self.evidence.last_seen}, unverified on {toolchain}" if newer else ""

    def newer_than_seen(self, toolchain: Toolchain) -> bool:
        """Whether this toolchain is newer than the last one on which the quirk was seen (False when none is named)."""
        if not self.evidence.last_seen:
            return False
        name, _, version = self.evidence.last_seen.partition("==")
        return toolchain.within(name, f">{version}") is True

    def sentence(self) -> str:
        """One line for people: what goes wrong, and what is done about it."""
        return f"{self.title} ({self.symptom}); {describe_effect(self.effect)}"


def concerning(quirks: Iterable[Quirk], kernel: str, target: Target) -> list[Quirk]:
    """Those whose backend, arch and kernel match: a few of some hundred."""
    return [quirk for quirk in quirks if quirk.concerns(kernel, target)]


def describe_effect(effect: Effect) -> str:
    """The effect as a clause: what is set, taken, or only noted."""
    if effect.kind == "path":
        return f"the {effect.path} path is taken"
    if effect.kind == "note":
        return f"nothing is changed: {effect.note}"
    return "sets " + ", ".join(f"{name} = {value}" for name, value in effect.sets.items())


def launch_holds(seen: Any, wanted: bool | int | str) -> bool:
    """Whether a launch value is the one wanted, or compares as wanted (">=4"). An option that is not set never does."""
    seen = pin_sizes(seen)
    match = NUMBER.match(wanted) if isinstance(wanted, str) else None
    if not match:
        return type(seen) is type(wanted) and bool(seen == wanted)
    if seen is None:
        return False
    compare, number = match.group(1), int(match.group(2))
    return conditions.COMPARE[compare](seen, number)


def parse_overrides(text: str, known: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Split "+id,-id" into the ids forced on and off; an id may end with its number (`-cuda-0007`).

    Raises SettingError on an id that does not exist or begins several.
    """
    forced: dict[str, set[str]] = {"+": set(), "-": set()}
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        sign, name = part[0], part[1:].strip()
        if sign not in forced:
            raise SettingError(f"quirk override {part!r} must start with + (apply) or - (switch off)")
        found = quirk_names.matching(name, known)
        if not found:
            raise SettingError(f"quirk override {part!r} names no quirk{quirk_names.did_you_mean(name, known)}")
        if len(found) > 1:
            raise SettingError(f"quirk override {part!r} begins several quirks: {quirk_names.several(found)}")
        forced[sign].add(found[0])
    both = forced["+"] & forced["-"]
    if both:
        raise SettingError(f"quirk override {text!r} both applies and switches off {', '.join(sorted(both))}")
    return frozenset(forced["+"]), frozenset(forced["-"])
