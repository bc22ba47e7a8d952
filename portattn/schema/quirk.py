"""Quirk: a known compiler bug or limit as data, the schema of quirks/<backend>/*.toml, and when a quirk applies."""

from __future__ import annotations

import datetime
import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from portattn.errors import SettingError
from portattn.schema import conditions
from portattn.schema.lowering import LAUNCH_FIELDS, Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.symbolic_int import pin_sizes
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain

SHOWN = 3  # ids that an error names


def matching(text: str, known: Iterable[str]) -> list[str]:
    """Return a text that is an id, else the ids that begin with it up to a dash."""
    ids = list(known)
    return [text] if text in ids else [name for name in ids if text and name.startswith(f"{text}-")]


def nearest(text: str, known: Iterable[str]) -> list[str]:
    """Return the ids that contain a text, then the ids most like it, whole or up to the number."""
    names = {"-".join(name.split("-")[:2]): name for name in known}
    names |= {name: name for name in names.values()}
    holding = [name for name in names.values() if text and text in name]
    close = difflib.get_close_matches(text, names, n=2 * SHOWN, cutoff=0.6)
    return list(dict.fromkeys([*holding, *(names[name] for name in close)]))[:SHOWN]


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return the nearest ids as the end of a sentence, or an empty text."""
    close = nearest(text, known)
    return f"; did you mean {', '.join(close)}?" if close else ""


def several(found: list[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{', '.join(found[:SHOWN])}{more}"


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

# Values of a `path` effect, least restrictive first: the plan takes no path that comes before the effect's.
PATH_EFFECTS = ("core", "vendor", "reference")

# The kinds of effect; every quirk has exactly one.
EFFECTS = ("lowering", "launch", "env", "path", "note")
# Stages of the compilers, as incidents name them; `load` and `launch` come after them.
STAGES = (
    "parse", "ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn", "hsaco", "ttadapter", "npubin", "load", "launch",
)  # fmt: skip
# The doubt about a version that a quirk's range names and that is unknown (Quirk.assumed).
ASSUMED = "assumed: a version that its range asks about is not known"
TILES = frozenset(LAUNCH_FIELDS) - {"num_warps", "num_stages"}  # launch values that are no compiler option
NUMBER = re.compile(r"^(<=|>=|!=|<|>)(\d+)$")  # a launch value that is compared: ">=4"

Symptom = Literal["compile-error", "compiler-crash", "hang", "wrong-result", "slow", "resource-limit"]
Level = Literal["declared", "compiles", "lowering-checked", "emulated", "runs", "measured"]
LEVELS: tuple[str, ...] = ("declared", "compiles", "lowering-checked", "emulated", "runs", "measured")


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions that must all hold; an absent condition holds."""

    backend: str | None = None  # portattn's own or an installed package's; absent: every backend
    arch: tuple[str, ...] = ()  # glob patterns on the arch's name and its families'
    toolchain: dict[str, str] = {}  # component -> PEP 440 range
    kernels: tuple[str, ...] = ()  # glob patterns on the kernel name
    features: tuple[str, ...] = ()  # conditions on the problem (portattn.schema.conditions)
    lowering: dict[str, str] = {}  # choice -> value that the plan would otherwise take
    # Launch value that the plan would otherwise take: a value, or a comparison such as ">=4"; if gradients' kernels
    # differ in it, either's value.
    launch: dict[str, bool | int | str] = {}


class Effect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of lowering, launch, env, path and note."""

    lowering: dict[str, str] | None = None  # choice -> value
    launch: dict[str, bool | int | str] | None = None  # launch value or compiler option -> value
    env: dict[str, str] | None = None  # environment of the compile
    # the first path that may be taken; `core` rejects variants alone
    path: Literal["core", "vendor", "reference"] | None = None
    note: str | None = None  # a caution: changes nothing; every plan that it concerns lists it
    cost: str = ""  # of the work-around

    @property
    def kind(self) -> str:
        """Return the name of the given effect. Raises StopIteration on an effect that load_quirk refuses."""
        return next(k for k in EFFECTS if getattr(self, k) is not None)

    @property
    def sets(self) -> dict[str, bool | int | str]:
        """Return the values that a lowering, launch or env effect sets; empty for other kinds."""
        given = getattr(self, self.kind)
        return dict(given) if isinstance(given, dict) else {}


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Regular expression that the failure's text must match; empty only for `wrong-result`, `slow` and `hang`, and if
    # neither a probe nor a publication has the text.
    signature: str = ""
    stage: str = ""  # the compiler's stage that prints the text (STAGES); empty: unknown
    quotes: tuple[str, ...] = ()  # printed texts that the signature must match, if no [[verified]] table has them
    # Toolchains beside [[verified]] and last_seen: NAME==VERSION, or a range such as "triton-ascend<3.2.0" for an
    # unstated version in it.
    seen_on: tuple[str, ...] = ()
    # "probes/<name>.py", a program under quirks/; "plan: <op> --target …", a problem whose plan is compiled with the
    # quirk switched off and on; or "none: <reason>".
    probe: str
    needs: str = ""  # device that the probe must run on, BACKEND:ARCH with a glob; empty: it only compiles
    stand_in: str = ""  # a release that no registry has, NAME==VERSION: the lab's stand-in shows the failure too
    upstream: str  # link, or "unreported"
    source: str  # where it was seen, and who published it
    last_seen: str = ""  # newest toolchain that showed it, NAME==VERSION; required if the range has no upper bound
    review_by: datetime.date | None = None  # date of the next review; required if the range has no upper bound


class ProbeRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one run of the probe, written by the tool alone; one for each (toolchain, target)."""

    toolchain: str
    target: str
    level: Level
    off: str  # the arm without the work-around: "pass", "fail:signature", "fail:<other kind>"
    on: str  # the arm with it; "not run" after a pass. The entry's range decides the verdict when it is asked for
    date: datetime.date
    saw: str = ""  # the failure's most telling line; empty if nothing failed
    stand_in: str = ""  # toolchain that really ran, if no registry has `toolchain`


class Retirement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tombstone: the entry no longer applies, and its id stays taken."""

    date: datetime.date
    reason: str
    fixed_in: str = ""  # first compiler without the bug, NAME==VERSION; empty: unknown, or it was no bug
    replaced_by: str = ""  # id of the entry that took its place, or empty


class Quirk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the registry. docs/logging-a-bug.md has the file format.

    Examples:
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
        """Return whether every condition holds for this specialisation on this target."""
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
        """Return whether backend, arch and kernel match, whatever the toolchain and the problem."""
        when = self.when
        return self.names_chip(target) and (
            not when.kernels or any(fnmatch.fnmatchcase(kernel, pattern) for pattern in when.kernels)
        )

    def names_chip(self, target: Target) -> bool:
        """Return whether backend and arch match."""
        when = self.when
        return when.backend in (None, target.backend) and (not when.arch or any(map(target.arch.matches, when.arch)))

    def reaches(self, variant: str, problem: Problem, target: Target) -> bool:
        """Return whether every condition holds for a variant, which has no choices and launch values of the core's."""
        features = conditions.parse_all(self.when.features)
        return (
            self.names_variant(variant, target)
            and self.in_range(target.toolchain)
            and all(condition.name != "programs" for condition in features)
            and conditions.all_hold(features, problem.features())
        )

    def explains(self, text: str) -> bool:
        return bool(self.evidence.signature and re.search(self.evidence.signature, text))

    def names_foreign(self, function: str, target: Target, options: Mapping[str, Any]) -> bool:
        """Return whether every condition holds for a kernel outside portattn, which has compiler options alone.

        Features, choices and tiles are portattn's own: an entry with a condition on one names no other kernel, nor does
        an entry that gives no `kernels` and changes one."""
        when = self.when
        own = when.features or when.lowering or TILES & when.launch.keys()
        return (
            not own
            and bool(when.kernels or self.changes_foreign)
            and self.concerns(function, target)
            and self.in_range(target.toolchain)
            and all(launch_holds(options.get(name), wanted) for name, wanted in when.launch.items())
        )

    @property
    def changes_foreign(self) -> bool:
        """Return whether the effect can change the compile of a kernel outside portattn."""
        return self.effect.kind in ("launch", "env") and not TILES & self.effect.sets.keys()

    def names_variant(self, variant: str, target: Target) -> bool:
        """Return whether backend, arch and kernel match, and no choice or launch value of the core's is a condition."""
        return not self.when.lowering and not self.when.launch and self.concerns(variant, target)

    def in_range(self, toolchain: Toolchain) -> bool:
        """Return whether the toolchain has the bug, as far as is known.

        A component of unknown version, and a version newer than the bug was seen on, count as affected (fail closed),
        except by a `slow` quirk (fail open)."""
        for name, specifier in self.when.toolchain.items():
            within = toolchain.within(name, specifier)
            if within is False or (within is None and self.symptom == "slow"):
                return False
        return not (self.symptom == "slow" and self.newer_than_seen(toolchain))

    def assumed(self, toolchain: Toolchain) -> bool:
        """Return whether a version that the range names is unknown: `in_range` then returns the safe answer."""
        return any(toolchain.within(name, text) is None for name, text in self.when.toolchain.items())

    def doubt(self, toolchain: Toolchain) -> str:
        """Return why it is uncertain that a toolchain which is `in_range` has the bug, or an empty text."""
        if self.assumed(toolchain):
            return ASSUMED
        newer = self.newer_than_seen(toolchain)
        return f"last seen on {self.evidence.last_seen}, unverified on {toolchain}" if newer else ""

    def newer_than_seen(self, toolchain: Toolchain) -> bool:
        """Return whether this toolchain is newer than the last that showed the bug (False if none is named)."""
        if not self.evidence.last_seen:
            return False
        name, _, version = self.evidence.last_seen.partition("==")
        return toolchain.within(name, f">{version}") is True

    def sentence(self) -> str:
        """Return one line for people: the bug, and the work-around."""
        return f"{self.title} ({self.symptom}); {describe_effect(self.effect)}"


def concerning(quirks: Iterable[Quirk], kernel: str, target: Target) -> list[Quirk]:
    return [quirk for quirk in quirks if quirk.concerns(kernel, target)]


def describe_effect(effect: Effect) -> str:
    if effect.kind == "path":
        return f"the {effect.path} path is taken"
    if effect.kind == "note":
        return f"nothing is changed: {effect.note}"
    return "sets " + ", ".join(f"{name} = {value}" for name, value in effect.sets.items())


def launch_holds(seen: Any, wanted: bool | int | str) -> bool:
    """Return whether a launch value is as wanted, or compares so (">=4"). An option that is not set never is."""
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

    Raises SettingError on an id that does not exist or begins several ids."""
    forced: dict[str, set[str]] = {"+": set(), "-": set()}
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        sign, name = part[0], part[1:].strip()
        if sign not in forced:
            raise SettingError(f"quirk override {part!r} must start with + (apply) or - (switch off)")
        found = matching(name, known)
        if not found:
            raise SettingError(f"quirk override {part!r} names no quirk{did_you_mean(name, known)}")
        if len(found) > 1:
            raise SettingError(f"quirk override {part!r} begins several quirks: {several(found)}")
        forced[sign].add(found[0])
    both = forced["+"] & forced["-"]
    if both:
        raise SettingError(f"quirk override {text!r} both applies and switches off {', '.join(sorted(both))}")
    return frozenset(forced["+"]), frozenset(forced["-"])
