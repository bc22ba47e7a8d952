"""Select the cells of a run: problems × targets, each target with the toolchain that compiles for it.

A file of kernels, which stand in for problems, is written from the launches of a process."""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomlkit

from portattn.errors import ArgumentError
from portattn.files import write_named
from portattn.planning import target_names
from portattn.planning.registry import Registry
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain, installed_for, is_installed
from portattn.testing import kernel_cases
from portattn.testing.kernel_cases import KernelCase, NamedKernel
from portattn.tools import lab
from portattn.tools.matrix.cells import cell_id
from portattn.tools.matrix.problems import SETS, NamedProblem, SetName, read_shapes
from portattn.worker import own_kernels
from portattn.worker.client import outside

OP = "matrix run"
ASK_SECONDS = 60.0


N = TypeVar("N", NamedProblem, NamedKernel)


class CellSpec(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    index: int
    named: NamedProblem | NamedKernel
    target: Target


def subjects(which: SetName, ops: Sequence[str], file: Path | None) -> Sequence[NamedProblem | NamedKernel]:
    """Return a file's kernels or problems, or the problems of a set, whose op or name matches a glob.

    Raises ArgumentError if a glob matches none, and DataError on the file."""
    if file is None:
        return problems(which, ops)
    if which == kernel_cases.KERNELS:
        return _wanted(kernel_cases.read(file), ops, which)
    return _wanted(read_shapes(file), ops, which)


def problems(which: SetName, ops: Sequence[str]) -> list[NamedProblem]:
    return _wanted(SETS[which](), ops, which)


def _wanted(found: list[N], ops: Sequence[str], which: SetName) -> list[N]:
    for glob in ops:
        if not any(wanted_name(one.problem.op, one.name, glob) for one in found):
            known = ", ".join(dict.fromkeys(one.problem.op for one in found))
            limit = f"must match an op ({known}) or a problem's name of the {which} set"
            raise ArgumentError(OP, "--problems", glob, limit)
    return [one for one in found if not ops or any(wanted_name(one.problem.op, one.name, glob) for glob in ops)]


def wanted_name(op: str, name: str, glob: str) -> bool:
    return fnmatch.fnmatchcase(op, glob) or fnmatch.fnmatchcase(name, glob)


def commas(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def globs(texts: Sequence[str]) -> list[str]:
    """Return the globs of targets in texts, chip names replaced by their targets. Raises ArgumentError."""
    registry, found = Registry.load(), []
    for text in commas(texts):
        try:
            found.append(registry.target(text, "none").name)
        except ArgumentError as error:
            known = text in registry.backends or registry.family(text) or set("*?[") & set(text)
            if not known:
                raise ArgumentError(OP, "--targets", text, error.limit) from None
            found.append(text)  # a glob; one that matches nothing is refused with all that could be meant
    return found


def targets(
    globs: Sequence[str], toolchains: Sequence[Toolchain], other: Toolchain | None = None, which: SetName = "full"
) -> list[Target]:
    """Return the targets that match a glob, with every toolchain of their compiler. Raises ArgumentError.

    Without globs: all, or in the quick set one of arches tuned alike. Default toolchain: `other`, the backend's own,
    or the installed one."""
    registry = Registry.load()
    names = [t.name for t in registry.targets(Toolchain.none())]
    for owner, backend in registry.backends.items():  # without core kernels: its library and the reference
        if backend.core_path != "triton" and which != kernel_cases.KERNELS:
            names += [f"{owner}:{name}" for name, arch in registry.arches[owner].items() if not arch.refused]
    for glob in globs:
        if not any(_matches(registry, name, glob) for name in names):
            every = (
                (f"{owner}:{n}", arch.refused) for owner, own in registry.arches.items() for n, arch in own.items()
            )
            refused = [f"is not supported: {why}" for name, why in every if why and _matches(registry, name, glob)]
            known = ", ".join((*names, *target_names.families(registry.arches)))
            raise ArgumentError(OP, "--targets", glob, (*refused, f"must match one of {known}")[0])
    if globs:
        names = [name for name in names if any(_matches(registry, name, glob) for glob in globs)]
    elif which != "full":
        names = [name for name in names if stands_alone(name, registry)]
    found = []
    for name in names:
        backend = registry.backends[name.partition(":")[0]]
        fitting = [t for t in toolchains if t.distribution in (*(backend.compilers or ("triton",)), "flagtree")]
        if backend.default_toolchain:
            fitting = fitting or [other or Toolchain.parse(backend.default_toolchain)]
        found += [registry.target(name, toolchain) for toolchain in fitting or [installed_for(backend.compilers)]]
    return found


def stands_alone(name: str, registry: Registry) -> bool:
    """Return whether a target is in the quick set: tuned itself, or the first of a family in which no arch is."""
    backend, arch = name.partition(":")[0], registry.arch(name)
    known = registry.arches[backend]
    if not arch.families or not arch.tuning:
        return True
    family = [other for other in known.values() if arch.families[0] in other.families and not other.refused]
    return family[0].name == arch.name and all(other.tuning for other in family)


def _matches(registry: Registry, name: str, glob: str) -> bool:
    return target_names.matches(name, registry.arch(name), glob)


def specs(named: Sequence[NamedProblem | NamedKernel], where: Sequence[Target]) -> list[CellSpec]:
    return [
        CellSpec(id=cell_id(one.problem, target.name, str(target.toolchain)), index=index, named=one, target=target)
        for index, (target, one) in enumerate(itertools.product(where, named))
    ]


def toolchains(texts: Sequence[str], every: bool = False) -> list[Toolchain]:
    """Read NAME==VERSION texts (3.4 is 3.4.0), each once; `every` adds the lab's. Raises ArgumentError."""
    found: dict[str, Toolchain] = {}
    for text in (*texts, *(lab.toolchains() if every else ())):
        parsed = toolchain(OP, "--toolchain", text)
        found.setdefault(str(parsed), parsed)
    return list(found.values())


def toolchain(op: str, option: str, text: str) -> Toolchain:
    try:
        parsed = Toolchain.parse(text)
        if parsed.distribution in lab.distributions():
            return msgspec.structs.replace(parsed, version=lab.canonical(str(parsed)).partition("==")[2])
    except ValueError as error:
        raise ArgumentError(op, option, text, str(error).partition(": ")[2]) from None
    return parsed


def missing(where: Sequence[Target], pythons: Mapping[str, str]) -> list[str]:
    """Return the targets' toolchains that are missing here and that the lab can make."""
    known = lab.distributions()
    names = dict.fromkeys(str(target.toolchain) for target in where if target.toolchain.distribution in known)
    return [name for name in names if name not in pythons and not is_installed(name) and lab.find(name) is None]


_ASK = """
import importlib.metadata as m, json
try: print(json.dumps(m.version("triton-ascend")))
except m.PackageNotFoundError: print('""')
"""


def toolchain_of(python: str) -> Toolchain:
    """Return another Python's triton-ascend. Raises ArgumentError if it has none or cannot be run."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
        if version := json.loads(done.stdout):
            return Toolchain.parse(f"triton-ascend=={version}")
        limit = "must be a Python with triton-ascend installed, and it has none"
    except OSError as error:
        limit = f"cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        limit = f"did not say what it has within {ASK_SECONDS:g} s"
    except (subprocess.CalledProcessError, json.JSONDecodeError):
        limit = "must be a Python interpreter; it did not say what is installed in it"
    raise ArgumentError(OP, "--ascend-python", python, limit)


# A run's launches, written as a file.

SITE = """\
import importlib.machinery, importlib.util, sys
spec = importlib.util.spec_from_file_location("portattn_own_kernels", {source!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.meta_path.insert(0, module.Recorder({notes!r}, {most}))
sys.path.remove({folder!r})
hidden = importlib.machinery.PathFinder.find_spec("sitecustomize")  # by this file
if hidden:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
"""


class Recording(msgspec.Struct, frozen=True):
    status: int  # of the command; of a signal 128 and its number
    kernels: tuple[str, ...]
    left_out: dict[str, int]  # why, and how many launches


def record(command: Sequence[str], out: Path, most: int) -> Recording:
    """Run a Python command, and write its launches as a file of kernels. Raises ArgumentError if it cannot be run."""
    with tempfile.TemporaryDirectory(prefix="portattn-record-") as folder:
        notes = Path(folder, "launches")
        source = SITE.format(source=own_kernels.__file__, notes=str(notes), most=most, folder=folder)
        Path(folder, "sitecustomize.py").write_text(source, encoding="utf-8")
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
        try:
            status = subprocess.run(command, env=outside() | {"PYTHONPATH": path}, check=False).returncode
        except OSError as error:
            limit = f"cannot be run: {error.strerror}"
            raise ArgumentError("matrix record", "COMMAND", command[0], limit) from None
        except KeyboardInterrupt:  # what was launched before is kept
            status = -signal.SIGINT
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    launches = [json.loads(line) for line in lines]
    left_out = Counter(f"{one['function']}: {one['error']}" for one in launches if "error" in one)
    kept = {line: one for line, one in zip(lines, launches, strict=True) if "error" not in one}
    text, names = toml_of(list(kept.values()), most, out)
    if names:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_named(out, text.encode())
    return Recording(status if status >= 0 else 128 - status, tuple(names), dict(left_out))


def toml_of(launches: Sequence[Mapping[str, Any]], most: int, out: Path) -> tuple[str, list[str]]:
    """Return a file's text and its kernels' names; a kernel of no installed package names its folder."""
    tables, counts, names = tomlkit.aot(), Counter[str](), Counter[str]()
    for launch in launches:
        module, _, function = launch["function"].partition(":")
        counts[launch["function"]] += 1
        if counts[launch["function"]] > most:  # of several processes
            continue
        entry = {name: value for name, value in launch.items() if name != "root" and value not in ({}, [])}
        root, top = Path(launch["root"]), module.partition(".")[0]
        place = kernel_cases.root_of_case(KernelCase(function="", outputs=(), package=top), out.parent)
        start = out.parent.resolve()
        shown = os.path.relpath(root, start) if root.is_relative_to(start) else str(root)
        entry |= {"package": top} if place == root and module != top else {"folder": shown}
        names[function] += 1
        table = tomlkit.table()
        for key, value in {
            "name": f"{function} #{names[function]}" if names[function] > 1 else function,
            **entry,
        }.items():
            inline = tomlkit.inline_table()
            inline.update(value if isinstance(value, dict) else {})
            table.add(key, inline if isinstance(value, dict) else value)
        tables.append(table)
    return tomlkit.dumps({"kernel": tables}), [str(table["name"]) for table in tables]
