"""Which cells a run has: problems × targets, each target with the toolchain that would compile for it."""

from __future__ import annotations

import fnmatch
import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from portattn.errors import ArgumentError
from portattn.planning import target_names
from portattn.planning.registry import Registry
from portattn.schema.target import Arch, Target
from portattn.schema.toolchain import Toolchain, installed_for, is_installed
from portattn.tools import lab
from portattn.tools.matrix.cells import cell_id
from portattn.tools.matrix.problems import SETS, NamedProblem, SetName

OP = "matrix run"
ASK_SECONDS = 60.0


class CellSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A cell before it is made."""

    id: str
    index: int
    named: NamedProblem
    target: Target


def problems(which: SetName, ops: Sequence[str]) -> list[NamedProblem]:
    """The problems of a set whose op or name matches a glob. Raises ArgumentError when a glob matches none."""
    found = SETS[which]()
    for glob in ops:
        if not any(_wanted(named, glob) for named in found):
            known = ", ".join(dict.fromkeys(named.problem.op for named in found))
            raise ArgumentError(OP, "--ops", glob, f"must match an op ({known}) or a problem's name of the {which} set")
    return [named for named in found if not ops or any(_wanted(named, glob) for glob in ops)]


def _wanted(named: NamedProblem, glob: str) -> bool:
    return wanted_name(named.problem.op, named.name, glob)


def wanted_name(op: str, name: str, glob: str) -> bool:
    """Whether a glob means a problem, by its op or its name."""
    return fnmatch.fnmatchcase(op, glob) or fnmatch.fnmatchcase(name, glob)


def commas(texts: Sequence[str]) -> list[str]:
    """The parts of texts that may hold commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def globs(texts: Sequence[str]) -> list[str]:
    """The globs of targets that texts name, with names of chips as the targets that they mean. Raises ArgumentError."""
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
    globs: Sequence[str],
    toolchains: Sequence[Toolchain],
    other: Toolchain | None = None,
    which: SetName = "full",
) -> list[Target]:
    """Return the targets that match a glob, with every toolchain of their compiler.

    other  the toolchain of another Python, for backends with a default of their own (Backend.default_toolchain)
    which  without globs the quick set has one of the arches that are tuned alike, and the full set all

    A compiler without a named toolchain has the installed one, or its backend's default. Raises ArgumentError if a glob
    matches no target.
    """
    registry = Registry.load()
    names = [t.name for t in registry.targets(Toolchain.none())] + ["cpu:generic"]
    for glob in globs:
        if not any(_matches(registry, name, glob) for name in names):
            refused = [
                arch.refused for name, arch in _arches(registry) if arch.refused and _matches(registry, name, glob)
            ]
            if refused:
                raise ArgumentError(OP, "--targets", glob, f"is not supported: {refused[0]}")
            known = ", ".join((*names, *target_names.families(registry.arches)))
            raise ArgumentError(OP, "--targets", glob, f"must match one of {known}")
    if globs:
        names = [name for name in names if any(_matches(registry, name, glob) for glob in globs)]
    elif which == "quick":
        names = [name for name in names if stands_alone(name, registry)]
    found = []
    for name in names:
        backend = registry.backends[name.partition(":")[0]]
        fitting = [t for t in toolchains if t.distribution in (*(backend.compilers or ("triton",)), "flagtree")]
        if backend.default_toolchain:
            fitting = fitting or [other or Toolchain.parse(backend.default_toolchain)]
        found += [registry.target(name, toolchain) for toolchain in fitting or [installed_for(backend.compilers)]]
    return found


def _arches(registry: Registry) -> list[tuple[str, Arch]]:
    return [(f"{owner}:{name}", arch) for owner, known in registry.arches.items() for name, arch in known.items()]


def stands_alone(name: str, registry: Registry) -> bool:
    """Return whether a target is in the quick set: it has its own tuning, or its family has no such member.

    The first of a family's members that borrow tuning stands for the others.
    """
    backend, arch = name.partition(":")[0], registry.arch(name)
    known = registry.arches[backend]
    if not arch.families or not arch.tuning:
        return True
    family = [other for other in known.values() if arch.families[0] in other.families and not other.refused]
    return family[0].name == arch.name and all(other.tuning for other in family)


def _matches(registry: Registry, name: str, glob: str) -> bool:
    """Return whether a glob means a target: by full name (`rocm:*`), backend, arch (`gfx9*`) or family."""
    backend = name.partition(":")[0]
    whole = any(fnmatch.fnmatchcase(part, glob) for part in (name, backend))
    return whole or registry.arch(name).matches(glob.removeprefix(f"{backend}:"))


def specs(named: Sequence[NamedProblem], where: Sequence[Target]) -> list[CellSpec]:
    """The cells, target by target: neighbours in the run then ask for different specialisations."""
    pairs = [(target, problem) for target in where for problem in named]
    return [
        CellSpec(
            id=cell_id(problem.problem, target.name, str(target.toolchain)), index=index, named=problem, target=target
        )
        for index, (target, problem) in enumerate(pairs)
    ]


def toolchains(texts: Sequence[str], every: bool = False) -> list[Toolchain]:
    """Read NAME==VERSION texts, each once; with `every` the lab's toolchains, too. Raises ArgumentError.

    A version is written as in the lab: 3.4 is 3.4.0.
    """
    found: dict[str, Toolchain] = {}
    for text in (*texts, *(lab.toolchains() if every else ())):
        try:
            parsed = Toolchain.parse(text)
            if parsed.distribution in lab.distributions():
                version = lab.canonical(str(parsed)).partition("==")[2]
                parsed = msgspec.structs.replace(parsed, version=version)
        except ValueError as error:
            raise ArgumentError(OP, "--toolchain", text, str(error).partition(": ")[2]) from None
        found.setdefault(str(parsed), parsed)
    return list(found.values())


def missing(where: Sequence[Target], pythons: Mapping[str, str]) -> list[str]:
    """Return the targets' toolchains that are missing here and that the lab can make."""
    names = dict.fromkeys(
        str(target.toolchain) for target in where if target.toolchain.distribution in lab.distributions()
    )
    return [name for name in names if name not in pythons and not is_installed(name) and lab.find(name) is None]


_ASK = """
import importlib.metadata as m, json
found = {}
for name in ("triton-ascend", "triton", "torch", "numpy"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


def toolchain_of(python: str) -> Toolchain:
    """The triton-ascend of another Python. Raises ArgumentError when it cannot be asked or has none."""

    def bad(limit: str) -> ArgumentError:
        return ArgumentError(OP, "--ascend-python", python, limit)

    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
        versions: dict[str, Any] = json.loads(done.stdout)
    except OSError as error:
        raise bad(f"cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise bad(f"did not say what it has within {ASK_SECONDS:g} s") from None
    except (subprocess.CalledProcessError, json.JSONDecodeError):
        raise bad("must be a Python interpreter; it did not say what is installed in it") from None
    if "triton-ascend" not in versions:
        raise bad("must be a Python with triton-ascend installed, and it has none")
    return Toolchain.parse(f"triton-ascend=={versions['triton-ascend']}")
