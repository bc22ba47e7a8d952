"""Quirk: one known compiler bug or limit, as data. The schema of quirks/<backend>/*.toml, and when one applies."""

from __future__ import annotations

import datetime
import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from portattn import conditions, tomlfile
from portattn.errors import DataError
from portattn.lowering import CHOICES, OPTIONS, LAUNCH_FIELDS, Launch, Lowering, check_launch_values
from portattn.problem import Problem
from portattn.target import Target
from portattn.toolchain import COMPILERS, COMPONENTS, Toolchain, has_upper_bound, parse_range

Symptom = Literal["compile-error", "compiler-crash", "hang", "wrong-result", "slow", "resource-limit"]
Level = Literal["declared", "compiles", "lowering-checked", "emulated", "runs", "measured"]
LEVELS: tuple[str, ...] = ("declared", "compiles", "lowering-checked", "emulated", "runs", "measured")

# Environment variables that Triton's compilers read at compile time and that a quirk may set.
COMPILE_ENV = frozenset(
    {
        "TRITON_HIP_USE_BLOCK_PINGPONG",
        "TRITON_HIP_USE_ASYNC_COPY",
        "TRITON_HIP_USE_IN_THREAD_TRANSPOSE",
        "AMDGCN_USE_BUFFER_OPS",
        "TRITON_ALL_BLOCKS_PARALLEL",
        "DISABLE_PTXAS_OPT",
    }
)
# Where a quirk's `path` effect leads; every path that comes before it in the order of falling back is not taken.
PATH_EFFECTS = ("vendor", "reference")

_ID = re.compile(r"^(cuda|rocm|ascend|any)-\d{4}-[a-z0-9-]+$")
_NUMBER = re.compile(r"^(<=|>=|!=|<|>)(\d+)$")


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All must hold; what is absent holds for any.

    backend    cuda | rocm | ascend; absent: every backend
    arch       glob patterns on the arch name
    toolchain  component -> PEP 440 range
    kernels    glob patterns on the kernel name
    features   conditions on the problem (portattn.conditions)
    lowering   choice -> value that the plan would otherwise take
    launch     launch value that the plan would otherwise take: a value, or a comparison such as ">=4"
    """

    backend: Literal["cuda", "rocm", "ascend"] | None = None
    arch: tuple[str, ...] = ()
    toolchain: dict[str, str] = {}
    kernels: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    lowering: dict[str, str] = {}
    launch: dict[str, bool | int | str] = {}


class Effect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of lowering, launch, variant, env and path. `cost` says what the work-around costs."""

    lowering: dict[str, str] | None = None
    launch: dict[str, bool | int | str] | None = None
    variant: str | None = None
    env: dict[str, str] | None = None
    path: Literal["vendor", "reference"] | None = None
    cost: str = ""

    @property
    def kind(self) -> str:
        return next(k for k in ("lowering", "launch", "variant", "env", "path") if getattr(self, k) is not None)


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why we believe it.

    signature   regex that the failure's text must match; empty only for `wrong-result` and `slow`
    probe       a program under quirks/, or "none: <reason>"
    upstream    link, or "unreported"
    source      where it was seen and who published it
    last_seen   newest toolchain it was seen on, NAME==VERSION; needed when the range has no upper bound
    review_by   date of the next look at it; needed when the range has no upper bound
    """

    signature: str = ""
    probe: str
    upstream: str
    source: str
    last_seen: str = ""
    review_by: datetime.date | None = None


class Verified(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one run of the probe saw. Written by the tool only."""

    toolchain: str
    target: str
    level: Level
    off: str
    on: str
    date: datetime.date


class Quirk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the registry. See docs/quirks.md for the file format."""

    id: str
    title: str
    symptom: Symptom
    kind: Literal["workaround", "limit"]
    when: When
    effect: Effect
    evidence: Evidence
    verified: tuple[Verified, ...] = ()
    file: str = ""

    def applies(
        self, kernel: str, problem: Problem, target: Target, lowering: Lowering, launch: Launch, programs: int
    ) -> bool:
        """Whether every condition holds for this specialisation on this target."""
        when = self.when
        return (
            self.concerns(kernel, target)
            and self.in_range(target.toolchain)
            and conditions.all_hold(map(conditions.parse, when.features), problem.features() | {"programs": programs})
            and all(getattr(lowering, name) == value for name, value in when.lowering.items())
            and all(_launch_holds(launch.get(name), wanted) for name, wanted in when.launch.items())
        )

    def concerns(self, kernel: str, target: Target) -> bool:
        """Whether backend, arch and kernel match, whatever the toolchain and the problem."""
        when = self.when
        return (
            when.backend in (None, target.backend)
            and (not when.arch or any(fnmatch.fnmatchcase(target.arch.name, pattern) for pattern in when.arch))
            and (not when.kernels or any(fnmatch.fnmatchcase(kernel, pattern) for pattern in when.kernels))
        )

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

    def newer_than_seen(self, toolchain: Toolchain) -> bool:
        """Whether this toolchain is newer than the last one on which the quirk was seen (False when none is named)."""
        if not self.evidence.last_seen:
            return False
        name, _, version = self.evidence.last_seen.partition("==")
        return toolchain.within(name, f">{version}") is True

    def sentence(self) -> str:
        """One line for people: what goes wrong, and what is done about it."""
        return f"{self.title} ({self.symptom}); {describe_effect(self.effect)}"


def describe_effect(effect: Effect) -> str:
    values = getattr(effect, effect.kind)
    if effect.kind == "path":
        return f"the {values} path is taken"
    if effect.kind == "variant":
        return f"variant {values} is taken"
    return "sets " + ", ".join(f"{name} = {value}" for name, value in values.items())


def _launch_holds(seen: Any, wanted: bool | int | str) -> bool:
    match = _NUMBER.match(wanted) if isinstance(wanted, str) else None
    if not match:
        return bool(seen == wanted)
    if seen is None:
        return False
    compare, number = match.group(1), int(match.group(2))
    return conditions.COMPARE[compare](seen, number)


def load_quirk(path: Path) -> Quirk:
    """Read one quirk file. Raises DataError (file, line, key) on anything outside the schema or its vocabularies."""
    data, text = tomlfile.read(path)
    data.pop("file", None)
    quirk = tomlfile.convert(data, Quirk, path, text)
    for keys, problem in _problems(quirk):
        raise DataError(path, tomlfile.line_of(text, *keys), f"key {'.'.join(keys)!r}: {problem}")
    if quirk.id != path.stem.replace("_", "-"):
        raise DataError(path, tomlfile.line_of(text, "id"), f"key 'id': {quirk.id!r} does not match the file's name")
    return msgspec.structs.replace(quirk, file=str(path))


def _problems(quirk: Quirk) -> list[tuple[tuple[str, ...], str]]:
    """What the types alone do not catch: (key path, problem) pairs."""
    found: list[tuple[tuple[str, ...], str]] = []
    when, effect, evidence = quirk.when, quirk.effect, quirk.evidence
    if not _ID.match(quirk.id):
        found.append((("id",), f"{quirk.id!r} is not <backend>-<4 digits>-<words-with-dashes>"))
    elif when.backend and not quirk.id.startswith((when.backend, "any-")):
        found.append((("id",), f"{quirk.id!r} does not start with its backend {when.backend}"))
    if not quirk.title.strip():
        found.append((("title",), "is empty"))

    for name, specifier in when.toolchain.items():
        if name not in COMPILERS + COMPONENTS:
            found.append((("when", "toolchain", name), f"unknown; known: {', '.join(COMPILERS + COMPONENTS)}"))
        try:
            parse_range(specifier)
        except ValueError as error:
            found.append((("when", "toolchain", name), str(error)))
    for text in when.features:
        try:
            conditions.parse(text)
        except ValueError as error:
            found.append((("when", "features"), str(error)))
    for section, choices in (("when", when.lowering), ("effect", effect.lowering or {})):
        for name, value in choices.items():
            if name not in CHOICES:
                found.append(((section, "lowering", name), f"unknown choice; known: {', '.join(CHOICES)}"))
            elif value not in CHOICES[name]:
                found.append(((section, "lowering", name), f"{value!r} is not one of {', '.join(CHOICES[name])}"))
    for name in when.launch:
        if name not in LAUNCH_FIELDS and name not in OPTIONS:
            found.append((("when", "launch", name), f"unknown; known: {', '.join([*LAUNCH_FIELDS, *OPTIONS])}"))
    try:
        check_launch_values(effect.launch or {})
    except ValueError as error:
        found.append((("effect", "launch"), str(error)))

    kinds = [k for k in ("lowering", "launch", "variant", "env", "path") if getattr(effect, k) not in (None, {}, "")]
    if len(kinds) != 1:
        found.append((("effect",), f"needs exactly one of lowering, launch, variant, env, path; has {kinds or 'none'}"))
    for name in effect.env or {}:
        if name not in COMPILE_ENV:
            found.append((("effect", "env", name), f"unknown; known: {', '.join(sorted(COMPILE_ENV))}"))

    try:
        re.compile(evidence.signature)
    except re.error as error:
        found.append((("evidence", "signature"), f"not a regular expression: {error}"))
    if not evidence.signature and quirk.symptom not in ("wrong-result", "slow", "hang"):
        found.append((("evidence", "signature"), f"is needed: a {quirk.symptom} has a text to match"))
    for name in ("probe", "upstream", "source"):
        if not getattr(evidence, name).strip():
            found.append((("evidence", name), "is empty"))
    if evidence.probe == "none" or evidence.probe.startswith("none:") and not evidence.probe[5:].strip():
        found.append((("evidence", "probe"), 'a missing probe needs its reason: "none: <reason>"'))
    found += _open_range_problems(quirk)
    return found


def _open_range_problems(quirk: Quirk) -> list[tuple[tuple[str, ...], str]]:
    """A work-around whose range has no upper bound goes stale unseen: it needs last_seen and a review date."""
    if quirk.kind == "limit":
        return []
    found: list[tuple[tuple[str, ...], str]] = []
    try:
        bounded = any(has_upper_bound(s) for s in quirk.when.toolchain.values())
    except ValueError:
        return []
    evidence = quirk.evidence
    if not bounded:
        if evidence.review_by is None:
            found.append((("evidence", "review_by"), "is needed: the version range has no upper bound"))
        if not evidence.last_seen:
            found.append((("evidence", "last_seen"), "is needed: the version range has no upper bound"))
    if evidence.last_seen:
        try:
            Toolchain.parse(evidence.last_seen)
        except ValueError as error:
            name, _, version = evidence.last_seen.partition("==")
            if name not in COMPONENTS or not version:
                found.append((("evidence", "last_seen"), str(error)))
    return found


def parse_overrides(text: str, known: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Split "+id,-id" into the ids forced on and off. Raises SettingError on an id that does not exist."""
    from portattn.errors import SettingError

    forced: dict[str, set[str]] = {"+": set(), "-": set()}
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        sign, name = part[0], part[1:].strip()
        if sign not in forced:
            raise SettingError(f"quirk override {part!r} must start with + (apply) or - (switch off)")
        if name not in known:
            close = [k for k in sorted(known) if name and (name in k or k.startswith(name[:11]))]
            hint = f"; did you mean {', '.join(close[:3])}?" if close else ""
            raise SettingError(f"quirk override {part!r} names no quirk{hint}")
        forced[sign].add(name)
    both = forced["+"] & forced["-"]
    if both:
        raise SettingError(f"quirk override {text!r} both applies and switches off {', '.join(sorted(both))}")
    return frozenset(forced["+"]), frozenset(forced["-"])
