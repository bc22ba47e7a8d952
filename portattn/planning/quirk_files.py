"""Reads quirk files, and checks them beyond their types: vocabularies, ranges, and missing evidence."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import DataError
from portattn.planning.data_files import check_launch_values, check_option, options
from portattn.schema import compilers, conditions, toml_reader
from portattn.schema.lowering import CHOICES, EVERY_KERNELS, check_rows_value
from portattn.schema.quirk import EFFECTS, NUMBER, STAGES, Effect, Quirk, When
from portattn.schema.toolchain import has_upper_bound, nameable, parse_range, unknown_name


def load_quirk(path: Path, backends: Collection[str] = ()) -> Quirk:
    """Read one quirk file; raise DataError (file, line, key) on its first fault. No `backends` allow any name."""
    quirk, problems = check_file(path, backends)
    if problems:
        raise problems[0]
    assert quirk is not None  # check_file gives one or the other
    return quirk


def load_quirks(folders: list[Path], backends: tuple[str, ...], outer: Path | None = None) -> dict[str, Quirk]:
    """Read every quirk file of the folders, tombstones too; `outer` is the folder that holds the others.

    Raises DataError on a broken file, an unknown backend, an id used twice."""
    quirks: dict[str, Quirk] = {}
    for folder in folders:
        for nested in toml_reader.files(folder, "*/*.toml") if folder != outer else ():
            raise DataError(nested, None, f"quirk files lie in {folder} itself: this one would never be read")
        for path in toml_reader.files(folder):
            quirk = load_quirk(path, backends)
            if quirk.id in quirks:
                raise DataError(path, None, f"id {quirk.id!r} is already taken by {quirks[quirk.id].file}")
            quirks[quirk.id] = quirk
    return quirks


def check_file(path: Path, backends: Collection[str] = ()) -> tuple[Quirk | None, list[DataError]]:
    """Return a file's quirk, and every DataError that load_quirk could raise.

    Without the schema's shape there is no quirk and one error: later checks need that shape."""
    try:
        data, text = toml_reader.read(path)
    except DataError as error:
        return None, [error]
    return _checked(data, text, path, backends)


def check_text(text: str, path: Path, backends: Collection[str] = ()) -> tuple[Quirk | None, list[DataError]]:
    """Like check_file, for the text of a file at this path, which need not be there."""
    try:
        data = toml_reader.parse(text, path)
    except DataError as error:
        return None, [error]
    return _checked(data, text, path, backends)


def _checked(
    data: dict[str, Any], text: str, path: Path, backends: Collection[str]
) -> tuple[Quirk | None, list[DataError]]:
    try:
        if "file" in data:  # a field of Quirk that is filled in here, and no key of the format
            raise DataError(path, toml_reader.line_of(text, "file"), "key 'file': the table has the unknown key `file`")
        quirk = toml_reader.convert(data, Quirk, path, text)
    except DataError as error:
        return None, [error]
    errors = [
        DataError(path, toml_reader.line_of(text, *keys), f"key {'.'.join(keys)!r}: {problem}")
        for keys, problem in quirk_problems(quirk, backends, path)
    ]
    if quirk.id != path.stem:
        errors.append(
            DataError(path, toml_reader.line_of(text, "id"), f"key 'id': {quirk.id!r} is not the file's name")
        )
    return msgspec.structs.replace(quirk, file=str(path)), errors


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
ANY = "any"  # stands for the backend in the id of a quirk that concerns every backend

_ID = re.compile(r"^([a-z][a-z0-9_]*)-\d{4}(-[a-z0-9]+)+$")
PROGRAM = re.compile(r"^(probes/\w+\.py)(?::(\w+))?$")  # file, and its function if it is not `probe`

_Problems = list[tuple[tuple[str, ...], str]]  # (key path, problem) pairs


def quirk_problems(quirk: Quirk, backends: Collection[str], path: Path) -> _Problems:
    """Return (key path, problem) pairs of a quirk that was read from `path`; with no `backends` any name is known."""
    return [
        *_identity_problems(quirk, backends),
        *_when_problems(quirk.when),
        *_effect_problems(quirk.effect, quirk.when.backend),
        *_evidence_problems(quirk),
        *_probe_problems(quirk, path),
        *_open_range_problems(quirk),
        *_tombstone_problems(quirk),
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
    if not quirk.title.isprintable():  # reports of CI and pages show it as one line
        found.append((("title",), "must be one line, without control characters"))
    return found


def _when_problems(when: When) -> _Problems:
    found: _Problems = []
    for name, specifier in when.toolchain.items():
        if not nameable(name):
            found.append((("when", "toolchain", name), unknown_name()))
        try:
            parse_range(specifier)
        except ValueError as error:
            found.append((("when", "toolchain", name), str(error)))
    if len([name for name in when.toolchain if compilers.is_compiler(name)]) > 1:
        found.append((("when", "toolchain"), "names two compilers, and a toolchain has one"))
    for text in when.features:
        try:
            conditions.parse(text)
        except ValueError as error:
            found.append((("when", "features"), str(error)))
    found += _choice_problems("when", when.lowering)
    for name, wanted in when.launch.items():
        try:
            check_rows_value(name)
        except ValueError as error:
            found.append((("when", "launch", name), str(error)))
            continue
        known = int if name in EVERY_KERNELS else options().get(name)
        if known is None:
            found.append((("when", "launch", name), f"unknown; known: {', '.join([*EVERY_KERNELS, *options()])}"))
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
        if name not in COMPILE_ENV and name not in compilers.variables():
            known = ", ".join((*sorted(COMPILE_ENV), *compilers.variables()))
            found.append((("effect", "env", name), f"unknown; known: {known}"))
    return found


def _evidence_problems(quirk: Quirk) -> _Problems:
    found: _Problems = []
    evidence = quirk.evidence
    try:
        re.compile(evidence.signature)
    except re.error as error:
        found.append((("evidence", "signature"), f"not a regular expression: {error}"))
    silent = quirk.symptom in ("wrong-result", "slow", "hang") or evidence.probe.startswith("none:")
    if not evidence.signature and not silent:
        found.append((("evidence", "signature"), f"is needed: a {quirk.symptom} has a text to match"))
    if evidence.stage and evidence.stage not in STAGES and evidence.stage not in compilers.stages():
        known = ", ".join((*STAGES, *compilers.stages()))
        found.append((("evidence", "stage"), f"{evidence.stage!r} is not one of {known}"))
    for name in ("stage", "quotes"):
        if getattr(evidence, name) and not evidence.signature:
            found.append((("evidence", name), "goes with a signature, and there is none"))
    for text in evidence.seen_on:
        try:
            seen_range(text)
        except ValueError as error:
            found.append((("evidence", "seen_on"), str(error)))
    for name in ("probe", "upstream", "source"):
        if not getattr(evidence, name).strip():
            found.append((("evidence", name), "is empty"))
    for name in ("last_seen", "stand_in"):
        if getattr(evidence, name):
            found += _version_problems(("evidence", name), getattr(evidence, name))
    return found


_SEEN_ON = re.compile(r"^([a-z-]+?)\s*((?:[<>=!~]=?|==)\s*\d.*)$")


def seen_range(text: str) -> tuple[str, str]:
    """Return (name, range) of an item of `seen_on`; raise ValueError on other texts."""
    match = _SEEN_ON.match(text.strip())
    if match is None or not nameable(match[1]):
        raise ValueError(f"{text!r} is not NAME==VERSION, or NAME and a range, with a known name")
    parse_range(match[2])
    return match[1], match[2]


def _version_problems(keys: tuple[str, ...], text: str) -> _Problems:
    name, _, version = text.partition("==")
    try:
        if not nameable(name):
            raise ValueError(f"{text!r} is not NAME==VERSION with a known name")
        parse_range(f"=={version}")
    except ValueError as error:
        return [(keys, str(error))]
    return []


def _probe_problems(quirk: Quirk, path: Path) -> _Problems:
    """Check that the probe is an existing program, a planned problem, or absent for a reason, and `needs` a device."""
    found: _Problems = []
    probe, needs = quirk.evidence.probe, quirk.evidence.needs
    kind, colon, rest = probe.partition(":")
    if kind == "none" and not rest.strip():
        found.append((("evidence", "probe"), 'a missing probe needs its reason: "none: <reason>"'))
    elif kind == "plan" and colon and not rest.strip():
        found.append((("evidence", "probe"), 'a planned probe needs its problem: "plan: <op> --target …"'))
    elif program := PROGRAM.match(probe):
        if not (path.parent.parent / program[1]).is_file():
            found.append((("evidence", "probe"), f"{path.parent.parent / program[1]} does not exist"))
    elif probe.strip() and not (colon and kind in ("none", "plan")):
        wanted = '"probes/<name>.py", "probes/<name>.py:<function>", "plan: <op> --target …" or "none: <reason>"'
        found.append((("evidence", "probe"), f"{probe!r} is not {wanted}"))
    if needs:
        backend, colon, arch = needs.partition(":")
        if not (backend and arch):
            found.append((("evidence", "needs"), f"{needs!r} is not BACKEND:ARCH"))
        elif quirk.when.backend not in (None, backend):
            found.append((("evidence", "needs"), f"{needs!r} is no device of {quirk.when.backend}"))
        if kind == "none":
            found.append((("evidence", "needs"), "goes with a probe, and there is none"))
    return found


def _open_range_problems(quirk: Quirk) -> _Problems:
    """Require last_seen and a review date of a work-around without an upper version: it goes stale unseen."""
    if quirk.kind == "limit" or quirk.retired:
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


def _tombstone_problems(quirk: Quirk) -> _Problems:
    retired = quirk.retired
    if retired is None:
        return []
    found: _Problems = [] if retired.reason.strip() else [(("retired", "reason"), "is empty")]
    if retired.fixed_in:
        found += _version_problems(("retired", "fixed_in"), retired.fixed_in)
    if retired.replaced_by and not _ID.match(retired.replaced_by):
        found.append((("retired", "replaced_by"), f"{retired.replaced_by!r} is not <backend>-<4 digits>-<words>"))
    return found
