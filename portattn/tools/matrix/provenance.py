"""Provenance of a run's cells: this portattn, its kernels, this machine and its compilers, or another's author.

A report is the file of `portattn report`: a run on a machine's devices, with the probes of their quirks."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata as metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

import portattn
from portattn.compile.record_store import COMPILER_VARIABLES
from portattn.errors import DataError
from portattn.planning.core_path import kernel_source_digest
from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.toolchain import installed_toolchain, is_installed
from portattn.source_tree import source_commit
from portattn.testing import bundle
from portattn.testing.executor import executors, interpreter_missing
from portattn.tools import lab, run_log
from portattn.tools.matrix.cells import Cell, Device, Host, Identity, Run, cell_key, digest, digests_of, with_id
from portattn.tools.matrix.select import CellSpec
from portattn.version import __version__

ROOT = Path(portattn.__file__).parent
SOURCES = (".py", ".c", ".toml")
DATA = ("arches", "tuning", "arches.toml")  # of a backend's folder: these have digests of their own
# Packages of portattn that no cell's result depends on; of the tools, cells are made by these alone.
APART = ("cli", "integrations", "kernels", "tools", "backends", "quirks")
TOOLS = ("matrix", "lab")
# What of a quirk nothing but people and the audit reads.
UNREAD = ("probe", "needs", "stand_in", "source", "review_by")


def digests(registry: Registry) -> dict[str, str]:
    found = {"kernels": kernel_source_digest(), "code": _files(ROOT, _counted()), "quirks/any": _quirks(registry, None)}
    for name, backend in registry.backends.items():
        found |= {
            f"quirks/{name}": _quirks(registry, name),
            f"arches/{name}": digest(registry.arches[name]),
            f"tuning/{name}": digest(registry.tunings[name]),
            f"backends/{name}": _files(backend.folder, _sources(backend.folder)),
        }
    return found


def _counted() -> list[Path]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in APART]
    folders += [ROOT / "tools" / name for name in TOOLS]
    shared = [*ROOT.glob("*.py"), *(ROOT / "tools").glob("*.py")]
    return [*shared, *(path for folder in folders for path in _sources(folder))]


def _sources(folder: Path) -> Iterable[Path]:
    found = (path for path in folder.rglob("*") if path.suffix in SOURCES)
    return (path for path in found if path.relative_to(folder).parts[0] not in DATA)


def _files(root: Path, paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()[:16]


def _quirks(registry: Registry, backend: str | None) -> str:
    """Digest the parts of a backend's quirks that plans, footnotes and checks read; None: of every backend's quirks."""
    return digest([_read(quirk) for _, quirk in sorted(registry.quirks.items()) if quirk.when.backend == backend])


def _read(quirk: Quirk) -> object:
    seen: dict[str, Any] = msgspec.to_builtins(quirk)
    evidence = {name: value for name, value in seen["evidence"].items() if name not in UNREAD}
    return {k: v for k, v in seen.items() if k not in ("verified", "retired", "file")} | {"evidence": evidence}


LEFT_OUT = "left out"  # of an executor that was not asked
# Where compilers keep and look for files: what they make does not depend on it.
PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR")


def this_run(
    specs: Sequence[CellSpec],
    problems: str,
    command: str,
    here: Sequence[Target],
    elsewhere: Mapping[str, str] | None = None,
    *,
    seconds: float = 0.0,
    left_out: Sequence[str] = (),
    host: str = "",
    author: str = "",
    registry: Registry | None = None,
) -> Run:
    """Return the Run made here and now; `elsewhere`: Pythons outside the lab; `left_out`: skipped executors."""
    elsewhere = elsewhere or {}
    toolchains = tuple(dict.fromkeys(str(s.target.toolchain) for s in specs))
    made = [
        e for e in lab.environments() if e.toolchain in {*toolchains} - {*elsewhere} and not is_installed(e.toolchain)
    ]
    commit, dirty = source_commit(ROOT)
    registry = registry or Registry.load()
    devices = tuple(_device(target, registry) for target in here if target.backend != "cpu")
    common: dict[str, Any] = {
        "portattn": __version__, "compiler": str(installed_toolchain()), "command": command,
        "versions": {"python": platform.python_version()} | installed_packages(("torch", "numpy")),
        "date": datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0),
    }  # fmt: skip
    identity = with_id(Identity(
        commit=commit, dirty=dirty, digests=digests(registry), author=author,
        toolchains={name: _compiles(name, elsewhere, made) for name in toolchains},
        host=Host(system=f"{platform.system()} {platform.machine()}", name=host, devices=devices),
        variables=_variables(os.environ), executors=_executors(specs, here, left_out), seconds=seconds, **common,
    ))  # fmt: skip
    return Run(
        kernels=identity.digests["kernels"], toolchains=toolchains, machine=identity.host.system,
        devices=tuple(str(t) for t in here), problems=problems,
        targets=tuple(dict.fromkeys(s.target.name for s in specs)), cells=tuple(s.id for s in specs),
        environments={e.toolchain: f"Python {e.python_version}, made {e.created}" for e in made},
        identities=(identity,), **common,
    )  # fmt: skip


def installed_packages(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def keys(specs: Iterable[CellSpec], identity: Identity) -> dict[str, str]:
    return {
        spec.id: cell_key(
            identity, spec.id, spec.target.name, str(spec.target.toolchain), dict(spec.target.toolchain.components)
        )
        for spec in specs
    }


def _compiles(toolchain: str, elsewhere: Mapping[str, str], made: Sequence[lab.Environment]) -> str:
    """Name the compiler of a toolchain here: this Python, another, or an environment of the lab. Empty without one."""
    if toolchain in elsewhere:
        return "another Python"
    if is_installed(toolchain):
        return _listed("installed", dict(installed_toolchain().components))
    found = next((e for e in made if e.toolchain == toolchain), None)
    return _listed(f"lab, Python {found.python_version}", found.versions) if found else ""


def _listed(what: str, versions: Mapping[str, str]) -> str:
    return ", ".join([what, *(f"{name} {version}" for name, version in sorted(versions.items()))])


def _device(target: Target, registry: Registry) -> Device:
    backend = registry.backends[target.backend]
    module: Any = getattr(torch, backend.device_type, None)
    chip = target.arch.title
    if hasattr(module, "get_device_name"):
        # What torch raises for a device that it cannot ask: the title remains.
        with contextlib.suppress(RuntimeError, AssertionError):
            chip = str(module.get_device_name())
    own = installed_toolchain().components
    versions = {name: version for name, version in target.toolchain.components if (name, version) not in own}
    return Device(target=target.name, chip=chip, versions=versions)


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {n: v for n, v in sorted(environment.items()) if n.startswith(COMPILER_VARIABLES) and n not in PLACES}


def _executors(specs: Sequence[CellSpec], here: Sequence[Target], left_out: Sequence[str]) -> dict[str, str]:
    """Return executors of code whose chip is not here: "target executor" -> "", or why it does not run."""
    found = {"any interpreter": interpreter_missing()}
    targets = {spec.target.name: spec.target for spec in specs}
    own = {backend: executors(backend, here=here) for backend in dict.fromkeys(t.backend for t in targets.values())}
    for target in targets.values():
        for name, executor in own[target.backend].items():
            found[f"{target.name} {name}"] = LEFT_OUT if name in left_out else executor.lacks(target)
    return found


class MachineReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run on the devices of a machine. Its identity has the chips, the toolchain, the author and the date."""

    format: Literal["portattn report 1"] = "portattn report 1"
    run: Run
    cells: list[Cell]
    probes: tuple[Any, ...] = ()


def without_paths(document: Any) -> Any:
    """Return a document as plain data, without this host's name, and with files named by their last part alone."""
    paths = re.compile(r"(?<![\w:/.<])(?:~|[A-Za-z]:)?/(?:[^\s/:'\",;()<>]+/)+")
    host = re.compile(rf"\b{re.escape(platform.node() or 'localhost')}\b")

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        if not isinstance(value, str):
            return value
        # A chip, compiler or path of portattn's may be called as the host is, but these are no sentences.
        return paths.sub("…/", host.sub("…", value) if " " in value else value)

    return plain(msgspec.to_builtins(document))


def of_report(path: Path) -> tuple[Run, list[Cell]]:
    """Read a report as a run. Raises DataError if it is none, or unsigned."""
    try:
        found = msgspec.json.decode(run_log.read(path), type=MachineReport)
    except run_log.UNREADABLE as error:
        raise DataError(path, None, f"is not a file of `portattn report`: {error}") from None
    if not all(bundle.AUTHOR.fullmatch(identity.author) for identity in found.run.identities):
        raise DataError(path, None, 'is not signed: make it with `portattn report --sign-off "Name <mail>"`')
    return found.run, found.cells


def must_be_of_this_code(run: Run, cells: Iterable[Cell], path: Path) -> None:
    """Raise DataError if kernels, code or data of a cell's backend have changed: its launches would be others."""
    now = digests(Registry.load())
    for backend, origin in {(cell.backend, cell.origin) for cell in cells}:
        made = digests_of(run.known[origin], backend) if origin in run.known else {}
        if changed := [name for name, value in made.items() if now.get(name) != value]:
            raise DataError(path, None, f"is of other {', '.join(changed)}: use the checkout that made it")


def of_bundle(folder: Path) -> tuple[Run, list[Cell]]:
    """Read a bundle and its runner's results as a run of their author, judged here. Raises DataError."""
    found = bundle.read(folder)
    answers = bundle.read_results(folder / bundle.RESULTS, found)
    try:
        run = msgspec.convert(found.run, Run)
        known = {cell.id: cell for cell in msgspec.convert(found.records, tuple[Cell, ...])}
        asked = [(known[one.id], one) for one in found.cells if one.id in answers.memory]
        identities = {name: run.known[name] for name in dict.fromkeys(cell.origin for cell, _ in asked)}
    except (msgspec.ValidationError, KeyError) as error:
        raise DataError(folder / bundle.MANIFEST, None, f"is not of a run: {error}") from None
    must_be_of_this_code(run, known.values(), folder)
    device = Device(target=asked[0][0].target, chip=answers.chip, versions={"runtime": answers.runtime})
    host = Host(system="", devices=() if answers.model else (device,))
    changed: dict[str, Any] = {"host": host, "author": answers.author, "date": answers.date, "command": ""}
    identities = {name: with_id(msgspec.structs.replace(one, **changed)) for name, one in identities.items()}
    cells = []
    for cell, one in asked:
        where = f"{answers.model or answers.chip or answers.device}, code of {one.toolchain}"
        numbers = bundle.judge_results(one, answers.memory[one.id], folder, where)
        passed = numbers.outcome == "pass"
        level = "declared" if not passed else "emulated" if answers.model else "runs"
        identity = identities[cell.origin]
        components = dict(Registry.load().target(cell.target, cell.toolchain).toolchain.components)
        fields: dict[str, Any] = {
            "status": "PASS" if passed else "FAIL", "level": level, "label": "", "origin": identity.id,
            "reason": "" if passed else f"on {where}: {numbers.reason}", "date": answers.date,
            "key": cell_key(identity, cell.id, cell.target, cell.toolchain, components),
            "emulated" if answers.model else "native": numbers,
        }  # fmt: skip
        cells.append(msgspec.structs.replace(cell, **fields))
    listed: dict[str, Any] = {"cells": tuple(cell.id for cell in cells), "identities": tuple(identities.values())}
    return msgspec.structs.replace(run, date=answers.date, **listed), cells
