"""Quirk: one known compiler bug or limit, as data. The schema of quirks/<backend>/*.toml, and when one applies."""

from __future__ import annotations

import datetime
import fnmatch
import functools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from portattn import conditions, tomlfile
from portattn.errors import DataError, SettingError
from portattn.lowering import CHOICES, LAUNCH_FIELDS, OPTIONS, Launch, Lowering, check_launch_values, check_option
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
# Where a quirk's `path` effect leads, least restrictive first; every path that comes before it is not taken.
PATH_EFFECTS = ("vendor", "reference")

# The kinds of effect; every quirk has exactly one.
EFFECTS = ("lowering", "launch", "env", "path", "note")
ANY = "any"  # stands for the backend in the id of a quirk that concerns every backend

_ID = re.compile(r"^([a-z][a-z0-9_]*)-\d{4}(-[a-z0-9]+)+$")
NUMBER = re.compile(r"^(<=|>=|!=|<|>)(\d+)$")


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All must hold; what is absent holds for any.

    backend    name of a backend (portattn's own or an installed package's); absent: every backend
    arch       glob patterns on the arch name
    toolchain  component -> PEP 440 range
    kernels    glob patterns on the kernel name
    features   conditions on the problem (portattn.conditions)
    lowering   choice -> value that the plan would otherwise take
    launch     launch value that the plan would otherwise take: a value, or a comparison such as ">=4"
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
    note      a caution: changes nothing, and is listed in every plan it concerns
    """

    lowering: dict[str, str] | None = None
    launch: dict[str, bool | int | str] | None = None
    env: dict[str, str] | None = None
    path: Literal["vendor", "reference"] | None = None
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

    signature   regex that the failure's text must match; empty only for `wrong-result`, `slow` and `hang`
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
            and conditions.all_hold(_parsed(when.features), problem.features() | {"programs": programs})
            and all(getattr(lowering, name) == value for name, value in when.lowering.items())
            and all(launch_holds(launch.get(name), wanted) for name, wanted in when.launch.items())
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

    def assumed(self, toolchain: Toolchain) -> bool:
        """Whether a version that the range asks about is not known, so that `in_range` answers by what is safe."""
        return any(toolchain.within(name, text) is None for name, text in self.when.toolchain.items())

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
    """The effect as a clause: what is set, taken, or only noted."""
    if effect.kind == "path":
        return f"the {effect.path} path is taken"
    if effect.kind == "note":
        return f"nothing is changed: {effect.note}"
    return "sets " + ", ".join(f"{name} = {value}" for name, value in effect.sets.items())


@functools.lru_cache(maxsize=1024)
def _parsed(features: tuple[str, ...]) -> tuple[conditions.Condition, ...]:
    return tuple(conditions.parse(text) for text in features)


def launch_holds(seen: Any, wanted: bool | int | str) -> bool:
    """Whether a launch value is the one wanted, or compares as wanted (">=4"). An option that is not set never does."""
    match = NUMBER.match(wanted) if isinstance(wanted, str) else None
    if not match:
        return type(seen) is type(wanted) and bool(seen == wanted)
    if seen is None:
        return False
    compare, number = match.group(1), int(match.group(2))
    return conditions.COMPARE[compare](seen, number)


def load_quirk(path: Path, backends: Collection[str] = ()) -> Quirk:
    """Read one quirk file. `backends` are the names that `when.backend` may have; any name when none are given.

    Raises DataError (file, line, key) on the first thing that is outside the schema or its vocabularies.
    """
    quirk, problems = check_file(path, backends)
    if problems:
        raise problems[0]
    assert quirk is not None  # check_file gives one or the other
    return quirk


def check_file(path: Path, backends: Collection[str] = ()) -> tuple[Quirk | None, list[DataError]]:
    """Read one quirk file and collect what is wrong with it: (quirk, every DataError that load_quirk could raise).

    The quirk is None when the file is not TOML or has not the schema's shape; later checks need that shape, so such a
    file gives one error, the first.
    """
    try:
        data, text = tomlfile.read(path)
        if "file" in data:  # a field of Quirk that is filled in here, and no key of the format
            raise DataError(path, tomlfile.line_of(text, "file"), "key 'file': the table has the unknown key `file`")
        quirk = tomlfile.convert(data, Quirk, path, text)
    except DataError as error:
        return None, [error]
    errors = [
        DataError(path, tomlfile.line_of(text, *keys), f"key {'.'.join(keys)!r}: {problem}")
        for keys, problem in _problems(quirk, backends)
    ]
    if quirk.id != path.stem:
        errors.append(DataError(path, tomlfile.line_of(text, "id"), f"key 'id': {quirk.id!r} is not the file's name"))
    return msgspec.structs.replace(quirk, file=str(path)), errors


_Problems = list[tuple[tuple[str, ...], str]]  # (key path, problem) pairs


def _problems(quirk: Quirk, backends: Collection[str]) -> _Problems:
    """What the types alone do not catch."""
    return [
        *_identity_problems(quirk, backends),
        *_when_problems(quirk.when),
        *_effect_problems(quirk.effect, quirk.when.backend),
        *_evidence_problems(quirk),
        *_open_range_problems(quirk),
    ]


def _identity_problems(quirk: Quirk, backends: Collection[str]) -> _Problems:
    found: _Problems = []
    backend = quirk.when.backend
    if not _ID.match(quirk.id):
        found.append((("id",), f"{quirk.id!r} is not <backend>-<4 digits>-<words-with-dashes>"))
    elif quirk.id.partition("-")[0] != (backend or ANY):
        found.append((("id",), f"{quirk.id!r} does not start with {backend or ANY}-, as its when.backend asks for"))
    if backend is not None and backends and backend not in backends:
        found.append((("when", "backend"), f"unknown backend {backend!r}; known: {', '.join(backends)}"))
    if not quirk.title.strip():
        found.append((("title",), "is empty"))
    return found


def _when_problems(when: When) -> _Problems:
    found: _Problems = []
    for name, specifier in when.toolchain.items():
        if name not in COMPILERS + COMPONENTS:
            found.append((("when", "toolchain", name), f"unknown; known: {', '.join(COMPILERS + COMPONENTS)}"))
        try:
            parse_range(specifier)
        except ValueError as error:
            found.append((("when", "toolchain", name), str(error)))
    if len([name for name in when.toolchain if name in COMPILERS]) > 1:
        found.append((("when", "toolchain"), "names two compilers, and a toolchain has one"))
    for text in when.features:
        try:
            conditions.parse(text)
        except ValueError as error:
            found.append((("when", "features"), str(error)))
    found += _choice_problems("when", when.lowering)
    for name, wanted in when.launch.items():
        known = int if name in LAUNCH_FIELDS else OPTIONS.get(name)
        if known is None:
            found.append((("when", "launch", name), f"unknown; known: {', '.join([*LAUNCH_FIELDS, *OPTIONS])}"))
        elif type(wanted) is not known and not (known is int and isinstance(wanted, str) and NUMBER.match(wanted)):
            compared = ', or a comparison such as ">=4"' if known is int else ""
            found.append((("when", "launch", name), f"{wanted!r} is not of type {known.__name__}{compared}"))
        try:
            check_option(name, when.backend)
        except ValueError as error:
            found.append((("when", "launch", name), str(error)))
    return found


def _choice_problems(section: str, choices: Mapping[str, str]) -> _Problems:
    found: _Problems = []
    for name, value in choices.items():
        if name not in CHOICES:
            found.append(((section, "lowering", name), f"unknown choice; known: {', '.join(CHOICES)}"))
        elif value not in CHOICES[name]:
            found.append(((section, "lowering", name), f"{value!r} is not one of {', '.join(CHOICES[name])}"))
    return found


def _effect_problems(effect: Effect, backend: str | None) -> _Problems:
    found: _Problems = []
    kinds = [k for k in EFFECTS if getattr(effect, k) is not None]
    if len(kinds) != 1:
        found.append((("effect",), f"needs exactly one of {', '.join(EFFECTS)}; has {', '.join(kinds) or 'none'}"))
    found += [(("effect", k), "is empty") for k in kinds if not getattr(effect, k)]
    found += _choice_problems("effect", effect.lowering or {})
    try:
        check_launch_values(effect.launch or {}, backend)
    except ValueError as error:
        found.append((("effect", "launch"), str(error)))
    for name in effect.env or {}:
        if name not in COMPILE_ENV:
            found.append((("effect", "env", name), f"unknown; known: {', '.join(sorted(COMPILE_ENV))}"))
    return found


def _evidence_problems(quirk: Quirk) -> _Problems:
    found: _Problems = []
    evidence = quirk.evidence
    try:
        re.compile(evidence.signature)
    except re.error as error:
        found.append((("evidence", "signature"), f"not a regular expression: {error}"))
    if not evidence.signature and quirk.symptom not in ("wrong-result", "slow", "hang"):
        found.append((("evidence", "signature"), f"is needed: a {quirk.symptom} has a text to match"))
    for name in ("probe", "upstream", "source"):
        if not getattr(evidence, name).strip():
            found.append((("evidence", name), "is empty"))
    if evidence.probe == "none" or (evidence.probe.startswith("none:") and not evidence.probe[5:].strip()):
        found.append((("evidence", "probe"), 'a missing probe needs its reason: "none: <reason>"'))
    if evidence.last_seen:
        name, _, version = evidence.last_seen.partition("==")
        try:
            if name not in COMPILERS + COMPONENTS:
                raise ValueError(f"{evidence.last_seen!r} is not NAME==VERSION with a known name")
            parse_range(f"=={version}")
        except ValueError as error:
            found.append((("evidence", "last_seen"), str(error)))
    return found


def _open_range_problems(quirk: Quirk) -> _Problems:
    """A work-around whose range has no upper bound goes stale unseen: it needs last_seen and a review date."""
    if quirk.kind == "limit":
        return []
    try:
        bounded = any(has_upper_bound(s) for s in quirk.when.toolchain.values())
    except ValueError:
        return []  # a malformed range has been reported already
    if bounded:
        return []
    needed = ("review_by", "last_seen")
    missing = [name for name in needed if not getattr(quirk.evidence, name)]
    return [(("evidence", name), "is needed: the version range has no upper bound") for name in missing]


def parse_overrides(text: str, known: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Split "+id,-id" into the ids forced on and off. Raises SettingError on an id that does not exist."""
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
