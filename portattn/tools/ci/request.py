"""What `portattn ci` compares: two compilers on targets and problems, or a compiler and a baseline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from portattn.errors import ArgumentError
from portattn.planning.quirk_files import load_quirks
from portattn.planning.registry import Registry
from portattn.schema import toml_reader
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain, installed_for
from portattn.tools.matrix import reading, select
from portattn.tools.matrix import request as matrix_asked
from portattn.tools.matrix.problems import NamedProblem, SetName
from portattn.tools.matrix.snapshot import Snapshot, SnapshotCell
from portattn.tools.upgrade.compilers import parse_compiler
from portattn.tools.upgrade.toolchain_pair import Pair, Side

OP = "ci"
ANY = "any"  # the folder of quirks of every backend


class CiRequest(NamedTuple):
    """What is compared.

    old, new   the compilers
    pairs      each target under both, with the registry of that side
    problems   of the set `which`
    baseline   what the old side is read from; None: it is made
    own        ids of the quirks that the user's folder adds to the new side
    """

    old: Toolchain
    new: Toolchain
    pairs: tuple[Pair, ...]
    problems: tuple[NamedProblem, ...]
    which: SetName
    baseline: Snapshot | None = None
    own: tuple[str, ...] = ()

    @property
    def targets(self) -> list[str]:
        return [pair.new.target.name for pair in self.pairs]


def read_request(
    before: str | None,
    after: str | None,
    targets: Sequence[str] = (),
    problems: Sequence[str] = (),
    *,
    which: SetName | None = None,
    baseline: Path | None = None,
    quirks: Path | None = None,
) -> CiRequest:
    """Read what was asked for.

    before    the old compiler; None: the baseline's, or the installed one
    after     the new compiler; None: the installed one, if there is another to compare it with
    targets   globs, as of `matrix run`; empty: the baseline's targets, or the quick set's
    problems  globs on ops and names of problems; empty: the baseline's, or all of the set
    which     the set of problems; None: the baseline's, or the quick one
    quirks    folder with the user's own quirk files, which hold on the new side

    Raises ArgumentError and DataError on bad input.
    """
    kept = reading.whole(baseline, OP, "--baseline") if baseline else None
    new = _new(before, after, kept)
    old = _old(before, new, kept, baseline)
    if old.distribution != new.distribution:
        limit = (
            f"must be a release of {old.distribution}, as --from is ({old}): versions of two compilers do not compare"
        )
        raise ArgumentError(OP, "--to", str(new), limit)
    chosen = _which(which, kept, baseline)
    registry = Registry.load()
    added = with_quirks(registry, quirks) if quirks else registry
    with _named():
        named = select.problems(chosen, select.commas(problems))
        if kept is not None and not problems:
            named = [one for one in named if one.name in kept.problems]
        names = _targets(select.globs(targets), new, registry, chosen, kept, str(old))
    if baseline and not (names and named):
        limit = f"has no cell of {old} whose target and problem are known here: write it anew"
        raise ArgumentError(OP, "--baseline", str(baseline), limit)
    pairs = tuple(
        Pair(Side(registry.target(name, old), registry), Side(added.target(name, new), added)) for name in names
    )
    own = tuple(name for name in added.quirks if name not in registry.quirks)
    what = CiRequest(old=old, new=new, pairs=pairs, problems=tuple(named), which=chosen, baseline=kept, own=own)
    if kept is not None:
        matrix_asked.must_compare(OP, "--baseline", kept, counts(what, targets, problems))
    return what


def counts(what: CiRequest, targets: Sequence[str], problems: Sequence[str]) -> Callable[[SnapshotCell], bool]:
    """Which cells of the old side are asked for by the texts of `asked`: also of a target or problem that is gone."""
    place = matrix_asked.places(what.targets, select.globs(targets))
    sets = what.baseline.set if what.baseline is not None else what.which
    problem = matrix_asked.problems(select.commas(problems), what.which, sets)
    return lambda entry: entry.toolchain == str(what.old) and place(entry.target) and problem(entry)


def with_quirks(registry: Registry, folder: Path) -> Registry:
    """A registry with the quirk files of a folder besides: in it, or in folders called as backends, or `any`.

    Raises ArgumentError where it has none, or an id that is taken, and DataError on a broken file.
    """
    if not folder.is_dir():
        raise ArgumentError(OP, "--quirk-folder", str(folder), "must be a folder with quirk files")
    inside = [folder / name for name in (*registry.backends, ANY) if (folder / name).is_dir()]
    for file in toml_reader.files(folder, "*/*.toml"):
        if file.parent not in inside:
            limit = f"has {file.relative_to(folder)}, but a folder in it must be {', '.join((*registry.backends, ANY))}"
            raise ArgumentError(OP, "--quirk-folder", str(folder), limit)
    found = load_quirks([*inside, folder], tuple(registry.backends), outer=folder)
    if not found:
        limit = f"must have quirk files (ID.toml), in it or in one of {', '.join((*registry.backends, ANY))}"
        raise ArgumentError(OP, "--quirk-folder", str(folder), limit)
    for name, quirk in found.items():
        if name in registry.quirks or name in registry.retired:
            raise ArgumentError(OP, "--quirk-folder", str(folder), f"has {quirk.file}, whose id is taken: {name}")
    living = {name: quirk for name, quirk in found.items() if quirk.retired is None}
    return msgspec.structs.replace(registry, quirks=registry.quirks | living)


def _new(before: str | None, after: str | None, kept: Snapshot | None) -> Toolchain:
    if after is not None:
        return parse_compiler(OP, "--to", after)
    if before is None and kept is None:
        raise ArgumentError(OP, "--to", "", "must be named where neither --from nor --baseline is, as in triton==3.9.0")
    there = [parse_compiler(OP, "--from", before).distribution] if before is not None else _distributions(kept)
    return _installed("--to", there)


def _old(before: str | None, new: Toolchain, kept: Snapshot | None, path: Path | None) -> Toolchain:
    """The compiler of the old side; of a baseline, one that it has."""
    if kept is None:
        return parse_compiler(OP, "--from", before) if before is not None else _installed("--from", [new.distribution])
    there = list(dict.fromkeys(entry.toolchain for entry in kept.entries))
    listed = ", ".join(there) or "none"
    if before is not None:
        old = parse_compiler(OP, "--from", before)
        if str(old) not in there:
            raise ArgumentError(OP, "--from", before, f"must be a compiler of {path}, which has {listed}")
        return old
    of_new = [name for name in there if name.partition("==")[0] == new.distribution]
    if len(of_new) != 1:
        limit = f"must name one compiler of {path}, which has {listed}"
        raise ArgumentError(OP, "--from", "", limit)
    return parse_compiler(OP, "--from", of_new[0])


def _distributions(kept: Snapshot | None) -> list[str]:
    return list(dict.fromkeys(entry.toolchain.partition("==")[0] for entry in kept.entries)) if kept else []


def _installed(option: str, names: Sequence[str]) -> Toolchain:
    """Return this Python's compiler for an option that is left out: of one of these names, if it is installed.

    names  of the other side's compilers: they tell a compiler that is added to Triton from Triton
    """
    here = str(installed_for(names))
    try:
        return parse_compiler(OP, option, here)
    except ArgumentError:
        raise ArgumentError(OP, option, "", f"must be named: this Python has {here}") from None


def _which(which: SetName | None, kept: Snapshot | None, path: Path | None) -> SetName:
    sets = kept.set.split(", ") if kept else []
    if kept is None:
        return which or "quick"
    if which is not None and which not in sets:
        option = "--full" if which == "full" else "--quick"
        raise ArgumentError(OP, option, "on", f"goes with a baseline of that set, and {path} is of the {kept.set} one")
    return which or ("full" if "full" in sets else "quick")


def _targets(
    globs: list[str], new: Toolchain, registry: Registry, which: SetName, kept: Snapshot | None, old: str
) -> list[str]:
    """The names of the targets that the new compiler is asked about."""
    if globs:
        names: dict[str, None] = {}
        for glob in globs:
            found = [target for target in select.targets([glob], [new], None, which) if _compiles(new, target)]
            if not found:
                limit = f"must match a target that {new.distribution} compiles for"
                raise ArgumentError(OP, "--targets", glob, limit)
            names |= {target.name: None for target in found}
        return list(names)
    if kept is not None:
        known = {f"{backend}:{arch}" for backend, arches in registry.arches.items() for arch in arches}
        there = dict.fromkeys(entry.target for entry in kept.entries if entry.toolchain == old)
        return [name for name in there if name in known]
    quick = select.targets([], [new], None, "quick")
    cores = registry.backends
    return [target.name for target in quick if _compiles(new, target) and cores[target.backend].core_path == "triton"]


def _compiles(new: Toolchain, target: Target) -> bool:
    return target.toolchain.distribution == new.distribution


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Errors about options that `matrix run` has, too, as this command's."""
    try:
        yield
    except ArgumentError as error:
        argument = "--problems" if error.argument == "--ops" else error.argument
        raise ArgumentError(OP, argument, error.value, error.limit) from None
