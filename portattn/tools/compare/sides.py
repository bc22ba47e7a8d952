"""Both sides of a comparison: compilers on targets with their plans, runs made or read, and the cells that count."""

import contextlib
import datetime
import fnmatch
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from packaging.version import Version

from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.planning.backend import Variant
from portattn.planning.planner import plan
from portattn.planning.quirk_files import load_quirks
from portattn.planning.registry import Registry
from portattn.schema import toml_reader
from portattn.schema.plan import Plan
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain, installed_for, is_installed
from portattn.testing.kernel_cases import KERNELS, NamedKernel
from portattn.tools import lab
from portattn.tools.compare.changes import Diff, compare, part_of
from portattn.tools.display_text import NAMED
from portattn.tools.matrix import provenance, results, select
from portattn.tools.matrix.cells import RED, Cell, Run, Snapshot, SnapshotCell, columns
from portattn.tools.matrix.problems import SETS, SHAPES, NamedProblem, SetName
from portattn.tools.matrix.run import Options, execute, planned_cell
from portattn.tools.matrix.select import CellSpec

CI = "ci"
ANY = "any"  # the folder of quirks of every backend
# Devices of this machine are left out: they run what the installed compiler made, and so one side alone.
LEFT_OUT = ("older",)


class Side(NamedTuple):
    """A target with one of the compilers, and the registry that its plans are made by."""

    target: Target
    registry: Registry

    @property
    def compiler(self) -> str:
        return str(self.target.toolchain)

    def variant(self, path: str) -> Variant | None:
        found = (one for one in self.registry.backends[self.target.backend].variants if one.name == path)
        variant = next(found, None)
        return None if variant is None else variant.for_toolchain(self.target.toolchain)


class Pair(NamedTuple):
    old: Side
    new: Side


class Plans:
    """The plans of a comparison, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str, str, str], Plan | PortattnError] = {}

    def of(self, named: NamedProblem, side: Side) -> Plan | PortattnError:
        key = (id(side.registry), side.target.name, side.compiler, named.name)
        if key not in self._made:
            try:
                self._made[key] = plan(named.problem, side.target, side.registry, settings=Settings())
            except PortattnError as error:
                self._made[key] = error
        return self._made[key]


def parse_compiler(op: str, option: str, text: str) -> Toolchain:
    """Return an option's compiler, its version as in the lab: 3.9 is 3.9.0. Raises ArgumentError on other texts."""
    if found := select.toolchain(op, option, text):
        return found
    raise ArgumentError(op, option, text, "must be a compiler, as in triton==3.6.0")


def cautions(toolchain: Toolchain) -> Iterator[str]:
    unknown, version = toolchain.unknown_release(), Version(toolchain.version)
    if unknown:
        yield f"{unknown}; plans go by its number alone, and nobody is known to have run it"
    if version.is_prerelease:
        yield f"{toolchain} comes before {version.base_version} in the ranges of quirks and of tuning"
    if version.local:
        yield f"{toolchain} is a build of its own: nothing that was seen with {version.public} counts as seen with it"


class MatrixRequest(NamedTuple):
    """The request of a run; empty globs and ops mean everything."""

    where: Sequence[Target]  # its targets
    globs: Sequence[str]
    ops: Sequence[str]
    which: SetName  # the set of problems
    every_toolchain: bool = False  # all of the lab's toolchains, not only installed or named ones

    def counts(self, before: Snapshot, after: Snapshot) -> Callable[[SnapshotCell], bool]:
        """Return a predicate of requested cells in an earlier run, also for targets that are gone."""
        names = {target.name for target in self.where}
        place, problem = request_predicates(names, self.globs, self.ops, self.which, before.set)
        if self.every_toolchain:
            return lambda entry: place(entry.target) and problem(entry)
        return part_of(before, after, place, problem)

    def compared(self, before: Snapshot, after: Snapshot) -> Diff:
        return compare(before, after, self.counts(before, after))

    def must_share(self, before: Snapshot, specs: Sequence[CellSpec]) -> None:
        must_compare(select.OP, "--baseline", before, self.counts(before, planned_snapshot(specs, self.which)))


def request_predicates(
    names: Collection[str], globs: Sequence[str], ops: Sequence[str], which: SetName, sets: str
) -> tuple[Callable[[str], bool], Callable[[SnapshotCell], bool]]:
    """Return predicates of requested targets, and of cells of requested problems in an earlier run of `sets`."""
    known = {name: {named.name for named in made()} for name, made in SETS.items() if name in sets.split(", ")}
    others = set().union(*known.values()) - known.get(which, set())
    files = which in known and SHAPES in sets.split(", ")  # its problems are in no set

    def target(name: str) -> bool:
        parts = (name, *name.split(":"))
        return not globs or name in names or any(fnmatch.fnmatchcase(part, glob) for part in parts for glob in globs)

    def problem(entry: SnapshotCell) -> bool:
        if (entry.op == KERNELS) != (which == KERNELS):
            return False
        named = not ops or any(select.wanted_name(entry.op, entry.name, glob) for glob in ops)
        return named and entry.name not in others and (not files or entry.name in known[which])

    return target, problem


def planned_snapshot(specs: Sequence[CellSpec], which: SetName) -> Snapshot:
    entries = tuple(
        SnapshotCell(
            name=spec.named.name, op=spec.named.problem.op, target=spec.target.name,
            toolchain=str(spec.target.toolchain), status="NOT_RUN", level="declared",
        )
        for spec in specs
    )  # fmt: skip
    now = datetime.datetime.now(datetime.timezone.utc)
    return Snapshot(shown="this run", set=which, date=now, problems={}, identities={}, entries=entries)


def must_compare(op: str, argument: str, before: Snapshot, counts: Callable[[SnapshotCell], bool]) -> None:
    """Raise ArgumentError if no cell of an earlier run counts: a comparison of nothing would be green."""
    if any(map(counts, before.entries)):
        return
    where = _few([f"{target} with {toolchain}" for target, toolchain in columns(before.entries)])
    names = _few(list(dict.fromkeys(entry.name for entry in before.entries)))
    has = f"{where} ({names})" if before.entries else "no cell"
    limit = f"has none of the requested cells, so that nothing would be compared; it has {has}"
    raise ArgumentError(op, argument, before.shown, limit)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def baseline(path: Path | None, which: str) -> Snapshot | None:
    """Return the run to compare with. Raises ArgumentError if interrupted or of another set, DataError if broken."""
    if path is None:
        return None
    before = results.whole(path, select.OP, "--baseline")
    if which not in before.set.split(", "):
        limit = f"is of the {before.set} set, and this run of the {which} one"
        raise ArgumentError(select.OP, "--baseline", str(path), limit)
    return before


class CiRequest(NamedTuple):
    """The request of `portattn ci`: two compilers on targets and problems or kernels, or a compiler and a baseline."""

    old: Toolchain
    new: Toolchain
    pairs: tuple[Pair, ...]  # each target under both compilers, with the registry of that side
    problems: tuple[NamedProblem | NamedKernel, ...]  # of the set `which`
    which: SetName
    baseline: Snapshot | None = None  # the old side; None: it is made
    own: tuple[str, ...] = ()  # ids of the quirks that the user's folder adds to the new side
    # globs of the options; empty: all
    globs: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    file: Path | None = None  # of kernels or shapes

    @property
    def targets(self) -> list[str]:
        return [pair.new.target.name for pair in self.pairs]

    def counts(self) -> Callable[[SnapshotCell], bool]:
        """Return a predicate of requested cells of the old side, also for a target or problem that is gone."""
        sets = self.baseline.set if self.baseline is not None else self.which
        place, problem = request_predicates(self.targets, self.globs, self.ops, self.which, sets)
        return lambda entry: entry.toolchain == str(self.old) and place(entry.target) and problem(entry)


def read_request(
    before: str | None, after: str | None, targets: Sequence[str] = (), problems: Sequence[str] = (), *,
    which: SetName | None = None, baseline: Path | None = None, quirks: Path | None = None,
    file: Path | None = None,
) -> CiRequest:  # fmt: skip
    """Read the request of `portattn ci`. Raises ArgumentError or DataError on bad input.

    A missing option is the baseline's; without one, the installed compiler's or the quick set's. `quirks`: a folder
    with the user's own quirk files, which hold on the new side. `file`: of kernels or shapes"""
    kept = results.whole(baseline, CI, "--baseline") if baseline else None
    there = list(dict.fromkeys(entry.toolchain for entry in kept.entries)) if kept else []
    new = _new(before, after, there)
    old = _old(before, new, there, baseline)
    if old.distribution != new.distribution:
        whose = f"must be a release of {old.distribution}, as --from is ({old})"
        raise ArgumentError(CI, "--to", str(new), f"{whose}: versions of two compilers do not compare")
    chosen = _which(which, kept, baseline)
    registry = Registry.load()
    added = with_quirks(CI, registry, quirks) if quirks else registry
    ops = select.commas(problems)
    with _as_ci():
        named = select.subjects(chosen, ops, file)
        if kept is not None and not problems:
            named = [one for one in named if one.name in kept.problems]
        globs = select.globs(targets)
        names = _targets(globs, new, registry, chosen, kept, str(old))
    if baseline and not (names and named):
        limit = f"has no cell of {old} whose target and problem are known here: write it anew"
        raise ArgumentError(CI, "--baseline", str(baseline), limit)
    sides = ((registry.target(name, old), added.target(name, new)) for name in names)
    pairs = tuple(Pair(Side(was, registry), Side(now, added)) for was, now in sides)
    own = tuple(name for name in added.quirks if name not in registry.quirks)
    what = CiRequest(old, new, pairs, tuple(named), chosen, kept, own, tuple(globs), tuple(ops), file)
    if kept is not None:
        must_compare(CI, "--baseline", kept, what.counts())
    return what


def with_quirks(op: str, registry: Registry, folder: Path) -> Registry:
    """Return a registry with the quirk files of a folder and its subfolders. Raises ArgumentError or DataError."""

    def refused(limit: str) -> ArgumentError:
        return ArgumentError(op, "--quirk-folder", str(folder), limit)

    if not folder.is_dir():
        raise refused("must be a folder with quirk files")
    known = (*registry.backends, ANY)
    inside = [folder / name for name in known if (folder / name).is_dir()]
    for file in toml_reader.files(folder, "*/*.toml"):
        if file.parent not in inside:
            raise refused(f"has {file.relative_to(folder)}, but a folder in it must be {', '.join(known)}")
    found = load_quirks([*inside, folder], tuple(registry.backends), outer=folder)
    if not found:
        raise refused(f"must have quirk files (ID.toml), in it or in one of {', '.join(known)}")
    for name, quirk in found.items():
        if name in registry.quirks or name in registry.retired:
            raise refused(f"has {quirk.file}, whose id is taken: {name}")
    living = {name: quirk for name, quirk in found.items() if quirk.retired is None}
    return msgspec.structs.replace(registry, quirks=registry.quirks | living)


def _new(before: str | None, after: str | None, there: Sequence[str]) -> Toolchain:
    if after is not None:
        return parse_compiler(CI, "--to", after)
    if before is None and not there:
        raise ArgumentError(CI, "--to", "", "must be named where neither --from nor --baseline is, as in triton==3.9.0")
    if before is not None:
        return _installed("--to", [parse_compiler(CI, "--from", before).distribution])
    return _installed("--to", list(dict.fromkeys(name.partition("==")[0] for name in there)))


def _old(before: str | None, new: Toolchain, there: Sequence[str], path: Path | None) -> Toolchain:
    if path is None:
        return parse_compiler(CI, "--from", before) if before is not None else _installed("--from", [new.distribution])
    listed = ", ".join(there) or "none"
    if before is not None:
        old = parse_compiler(CI, "--from", before)
        if str(old) not in there:
            raise ArgumentError(CI, "--from", before, f"must be a compiler of {path}, which has {listed}")
        return old
    of_new = [name for name in there if name.partition("==")[0] == new.distribution]
    if len(of_new) != 1:
        raise ArgumentError(CI, "--from", "", f"must name one compiler of {path}, which has {listed}")
    return parse_compiler(CI, "--from", of_new[0])


def _installed(option: str, names: Sequence[str]) -> Toolchain:
    """Return this Python's compiler for an omitted option; `names`, the other side's, tell an added one from Triton."""
    here = str(installed_for(names))
    try:
        return parse_compiler(CI, option, here)
    except ArgumentError:
        raise ArgumentError(CI, option, "", f"must be named: this Python has {here}") from None


def _which(which: SetName | None, kept: Snapshot | None, path: Path | None) -> SetName:
    if kept is None:
        return which or "quick"
    sets = kept.set.split(", ")
    if which is not None and which not in sets:
        option = f"--{which}"
        raise ArgumentError(CI, option, "on", f"goes with a baseline of that set, and {path} is of the {kept.set} one")
    return which or ("full" if "full" in sets else "quick" if "quick" in sets else _lacks_file(path))


def _lacks_file(path: Path | None) -> SetName:
    limit = "is of a file, and needs it: --shapes FILE, or --kernels FILE --compile"
    raise ArgumentError(CI, "--baseline", str(path), limit)


def _targets(
    globs: list[str], new: Toolchain, registry: Registry, which: SetName, kept: Snapshot | None, old: str
) -> list[str]:
    def compiles(target: Target) -> bool:
        return target.toolchain.distribution == new.distribution

    if globs:
        names: dict[str, None] = {}
        for glob in globs:
            found = [target for target in select.targets([glob], [new], None, which) if compiles(target)]
            if not found:
                limit = f"must match a target that {new.distribution} compiles for: one run, one compiler"
                raise ArgumentError(CI, "--targets", glob, limit)
            names |= {target.name: None for target in found}
        return list(names)
    if kept is not None:
        known = {f"{backend}:{arch}" for backend, arches in registry.arches.items() for arch in arches}
        there = dict.fromkeys(entry.target for entry in kept.entries if entry.toolchain == old)
        return [name for name in there if name in known]
    quick = select.targets([], [new], None, "quick")
    cores = registry.backends
    return [target.name for target in quick if compiles(target) and cores[target.backend].core_path == "triton"]


@contextlib.contextmanager
def _as_ci() -> Iterator[None]:
    """Rename errors about options shared with `matrix run` to this command's."""
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(CI, error.argument, error.value, error.limit) from None


class SideRun(msgspec.Struct):
    run: Run
    specs: Sequence[CellSpec]
    registry: Registry
    cells: list[Cell] = []

    def plan(self) -> None:
        for spec in self.specs:
            self._add(planned_cell(spec, self.registry))

    def compile(self, options: Options, done: Callable[[Cell], None]) -> None:
        """Make every cell; `done` is called with each one. KeyboardInterrupt keeps finished cells."""
        options = msgspec.structs.replace(options, registry=self.registry)
        execute(self.specs, options, lambda cell: done(self._add(cell)))
        self.cells.sort(key=lambda cell: cell.index)

    def _add(self, cell: Cell) -> Cell:
        key = provenance.keys([self.specs[cell.index]], self.run.identity)[cell.id]
        self.cells.append(msgspec.structs.replace(cell, key=key, origin=self.run.identity.id))
        return self.cells[-1]


def begin_side_run(asked: CiRequest, sides: Sequence[Side], command: str, options: Options) -> SideRun:
    specs, registry = select.specs(asked.problems, [side.target for side in sides]), sides[0].registry
    run = provenance.this_run(
        specs, asked.which, command, (), seconds=options.seconds, left_out=options.left_out, registry=registry
    )
    return SideRun(run=run, specs=specs, registry=registry)


def as_planned(kept: Snapshot) -> Snapshot:
    entries = tuple(
        msgspec.structs.replace(
            entry, status="ERROR" if entry.status in RED and not entry.path else "NOT_RUN", level="declared",
            label="", worse={}, looked=False, numbers="", reason="",
        )
        for entry in kept.entries
    )  # fmt: skip
    return msgspec.structs.replace(kept, entries=entries)


def missing(compilers: Sequence[tuple[str, Toolchain]]) -> list[str]:
    """Return missing compilers that the lab can make, each with its option. Raises ArgumentError on any other."""
    found = []
    for option, toolchain in compilers:
        name = str(toolchain)
        if is_installed(name):
            continue
        if toolchain.distribution not in lab.distributions():
            here = installed_for((toolchain.distribution,))
            limit = f"goes without --compile: this Python has {here}, and the lab cannot install it"
            raise ArgumentError(CI, option, name, limit)
        if lab.find(name) is None:
            found.append(name)
    return list(dict.fromkeys(found))
