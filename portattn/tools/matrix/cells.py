"""Schema of results.jsonl: a Cell is one square, a Run the cells' origin, an Identity their dependences as data.

A Snapshot holds the parts of a run that two runs are compared by; it comes from results or from a baseline."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from portattn.planning.registry import Registry
from portattn.schema.plan import Rejection
from portattn.schema.problem import Problem
from portattn.schema.quirk import LEVELS, Level, describe_effect
from portattn.testing.findings import Gate, KernelFacts, Lint, Numerics, programs_a_core
from portattn.testing.kernel_cases import KernelCase, Subject

Moment = Annotated[datetime.datetime, msgspec.Meta(tz=True)]  # without a zone, two machines' do not compare


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An accelerator of the host: its target, its driver's name for it, versions of driver and run-time library."""

    target: str
    chip: str = ""
    versions: dict[str, str] = {}

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.chip or self.target} ({versions})" if versions else self.chip or self.target


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine. name: from `matrix run --host`, or ""."""

    system: str
    name: str = ""
    devices: tuple[Device, ...] = ()

    def __str__(self) -> str:
        chips = ", ".join(map(str, self.devices)) or self.system
        return f"{self.name} ({chips})" if self.name else chips


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The origin of cells: all their dependences beside problem and target."""

    id: str = ""  # digest of the fields below, except date and command: a cell's `origin`
    portattn: str
    commit: str = ""  # of the source tree; empty if portattn is installed, or without git
    dirty: bool = False  # the tree has changes that the commit lacks, also new files
    # kernels; code (planning, compiling, judging); and for each backend `quirks/…`, `arches/…`, `tuning/…` and
    # `backends/…`. `quirks/any` covers quirks of every backend
    digests: dict[str, str] = {}
    compiler: str = ""  # the toolchain of the Python that made the run
    # toolchain -> its compiler here: this Python, another, or the lab's; empty without one
    toolchains: dict[str, str] = {}
    host: Host
    author: str = ""  # `Name <mail>` of another machine's report or results, who answers for them
    versions: dict[str, str] = {}  # of this Python and its packages
    variables: dict[str, str] = {}  # environment variables that compilers read
    # executors of code whose chip is not here, by target and name -> "", or why it does not run
    executors: dict[str, str] = {}
    seconds: float = 0.0  # the time limit of a compile, and of a check of numbers
    command: str = ""
    date: Moment

    def code(self) -> str:
        """Return the short commit, `1a2b3c4d5e`, with `+changes` if the tree had changes."""
        return f"{self.commit[:10] or 'no commit'}{'+changes' if self.dirty else ''}"


def with_id(identity: Identity) -> Identity:
    parts = {k: v for k, v in msgspec.structs.asdict(identity).items() if k not in ("id", "command", "date")}
    return msgspec.structs.replace(identity, id=digest(parts))


def digests_of(identity: Identity, backend: str) -> dict[str, str]:
    names = ("kernels", "code", *(f"{part}/{backend}" for part in ("quirks", "arches", "tuning", "backends")))
    return {name: identity.digests[name] for name in (*names, "quirks/any") if name in identity.digests}


def cell_key(identity: Identity, cell: str, target: str, toolchain: str, components: Mapping[str, str]) -> str:
    """Digest all dependences of a cell's result but the time limit (see `results.Results.resume`)."""
    backend = target.partition(":")[0]
    parts = {
        "cell": cell, "portattn": identity.portattn, "digests": digests_of(identity, backend),
        "toolchain": [toolchain, identity.toolchains.get(toolchain, ""), dict(components)],
        "compiler": identity.compiler, "versions": identity.versions, "variables": identity.variables,
        "executors": {name: lacks for name, lacks in identity.executors.items() if name.split()[0] in (target, "any")},
        # What runs on a device depends on it; all else is the same wherever it is made.
        "devices": [device for device in identity.host.devices if device.target.partition(":")[0] == backend],
    }  # fmt: skip
    return digest(parts)


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits for a JSON-encodable value, independent of the order of mappings."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]


SCHEMA = 2  # of results.jsonl; raised when a reader of the version before would misread it

# PASS     everything that was looked at is as it should be (how far that goes is the level's business)
# NOTE     looked at, nothing wrong, and yet no evidence for a level: the reason says what was seen
# FAIL     wrong numbers, a run of the kernels that raised, or machine code that does not suit the chip
# ERROR    the compiler refused, or no plan could be made
# TIMEOUT  the compiler, or a run of the kernels, did not answer in the time it had
# CRASH    the process of the compiler, or of a run of the kernels, died
# NOT_RUN  what is needed to look is not here; the reason says what
Status = Literal["PASS", "NOTE", "FAIL", "ERROR", "TIMEOUT", "CRASH", "NOT_RUN"]
RED: frozenset[str] = frozenset({"FAIL", "ERROR", "TIMEOUT", "CRASH"})


class Footnote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quirk that concerns a cell. role: it changed the plan, ruled out a path, or explains a figure."""

    id: str
    role: Literal["applied", "rejected", "explains"]
    sentence: str
    upstream: str
    sets: dict[str, Any] = {}
    cost: str = ""
    note: str = ""

    @property
    def changes_nothing(self) -> bool:
        """Return whether the quirk applies and leaves the plan as it is: it is a note, or another overrules it."""
        return self.role == "applied" and not self.sets


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    core_taken: bool = True  # False: another path is taken, and these fields tell how the core kernel would run
    # kernel, form, lowering, launch, env: of the core kernel; `lowering` holds the choices that it reads
    kernel: str = ""
    form: str = ""
    lowering: dict[str, str] = {}
    launch: dict[str, bool | int | str] = {}
    env: dict[str, str] = {}
    rejected: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()
    schedule: dict[str, bool | int | str] = {}  # of a variant, if the path is one


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cell", tag_field="type"):
    schema: int = SCHEMA
    id: str  # digest of (subject, target, toolchain); `index` is its place in the run
    index: int
    name: str
    # problem: of portattn's operations; case: of another package's kernel, without a plan. One of both
    problem: Problem | None = None
    case: KernelCase | None = None
    target: str
    toolchain: str
    status: Status  # see the vocabulary above; `reason` explains any but PASS
    level: Level  # evidence level reached; the interpreter's numerics are no level
    reason: str = ""
    plan: PlanSummary | None = None
    footnotes: tuple[Footnote, ...] = ()
    kernels: tuple[KernelFacts, ...] = ()
    gates: tuple[Gate, ...] = ()
    lints: tuple[Lint, ...] = ()  # findings of an executor's `analyze` in the code (portattn/testing/executor.py)
    interpreter: Numerics | None = None
    lowered: Numerics | None = None  # numerics of that code, executed on a CPU
    emulated: Numerics | None = None  # numerics of the machine code, in a model of the chip
    older: Numerics | None = None  # numerics of an older chip's code, run on a newer chip that is here
    label: str = ""  # the evidence of a level `runs` that was not reached on the chip itself: "sm_80 code on sm_90"
    native: Numerics | None = None
    # stage, log: of a failed compile: its stage, and the end of its output
    stage: str = ""
    log: str = ""
    seconds: float = 0.0
    # digest of the result's dependences; another key means another result, though the id is the same
    key: str = ""
    origin: str = ""  # id of its identity
    others: tuple[Cell, ...] = ()  # results of other runs, in merged runs
    conflict: str = ""  # the other result that differs under the same key
    date: Moment

    @property
    def subject(self) -> Subject:
        found = self.problem or self.case
        assert found is not None, "a cell has a problem or a case: results.read has looked"
        return found

    @property
    def op(self) -> str:
        return self.subject.op

    @property
    def red(self) -> bool:
        return self.status in RED

    @property
    def place(self) -> tuple[str, str, str]:
        return self.target, self.toolchain, self.name

    @property
    def backend(self) -> str:
        return self.target.partition(":")[0]


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="run", tag_field="type"):
    schema: int = SCHEMA
    portattn: str
    kernels: str  # digest of the kernels' source, so that cells of other code are never mixed in
    toolchains: tuple[str, ...]
    compiler: str  # the toolchain of the Python that made the run
    machine: str
    devices: tuple[str, ...]
    versions: dict[str, str]
    command: str
    problems: str
    targets: tuple[str, ...]
    cells: tuple[str, ...]  # ids of all cells of the run, in order
    # the lab environments that compile for it: toolchain -> its Python and when it was made
    environments: dict[str, str] = {}
    # dependences of its cells; several if it was resumed under other conditions, or merged
    identities: tuple[Identity, ...] = ()
    date: Moment

    @property
    def identity(self) -> Identity:
        return self.identities[0]

    @property
    def known(self) -> dict[str, Identity]:
        return {identity.id: identity for identity in self.identities}

    def missing(self, cells: Iterable[Cell]) -> int:
        return len(set(self.cells) - {cell.id for cell in cells})


def cell_id(problem: Subject, target: str, toolchain: str) -> str:
    return digest([problem, target, toolchain])


def footnote(quirk_id: str, role: str, registry: Registry, **more: Any) -> Footnote:
    quirk = registry.quirks[quirk_id]
    cost = quirk.effect.cost or describe_effect(quirk.effect)
    fields = {"sentence": quirk.sentence(), "upstream": quirk.evidence.upstream, "cost": cost} | more
    return Footnote(id=quirk.id, role=role, **fields)  # type: ignore[arg-type]


# Kinds of paths, the best first: what a cell loses when its path moves down.
TIERS = ("variant", "core", "vendor", "reference", "none")
Tier = Literal["variant", "core", "vendor", "reference", "none"]
# Facts of compiled kernels of which more is worse: bytes spilled, products made to wait, deaths of the compiler.
WORSE = ("spills", "serialized_wgmma", "deaths")
CPU_NUMBERS = "reference numbers on this CPU, not a chip's"


class SnapshotCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    op: str
    target: str
    toolchain: str
    status: Status
    level: Level
    label: str = ""
    path: str = ""
    tier: Tier = "none"  # kind of the planned path
    quirks: tuple[str, ...] = ()  # ids of the quirks that changed the plan
    rejected: tuple[str, ...] = ()  # ids of the quirks that ruled a path out
    noted: tuple[str, ...] = ()  # ids of the quirks that apply and change nothing; not kept in a baseline
    why_not: dict[str, str] = {}  # path -> why it is not taken; not kept in a baseline
    worse: dict[str, int] = {}  # "function fact" -> its amount, of facts of which more is worse; zeros are left out
    # "function fact" -> instructions_a_megaflop (of products), spills and occupancy (programs a core) of its compiled
    # kernels, cycles in a model of the chip, and a digest of the launch or schedule that they are compared under
    speed: dict[str, int] = {}
    tile: str = ""
    looked: bool = True  # a compiler was run
    numbers: str = ""  # outcome of the interpreter's numerics; empty without them
    reason: str = ""  # why it has no level; not kept in a baseline
    origin: str = ""  # id of its identity

    @property
    def place(self) -> tuple[str, str, str]:
        return self.target, self.toolchain, self.name

    @property
    def red(self) -> bool:
        return self.status in RED

    def __str__(self) -> str:
        return f"{self.target}  {self.toolchain}  {self.name}"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    shown: str  # its source, for reports
    set: str  # its set of problems
    date: datetime.datetime
    problems: dict[str, str]  # digest of each problem by its name: a name can mean another problem later
    identities: dict[str, Identity]  # by id
    entries: tuple[SnapshotCell, ...]
    missing: int = 0  # number of cells that an interrupted run lacks

    def identity(self, entry: SnapshotCell) -> Identity | None:
        return self.identities.get(entry.origin)


def snapshot(run: Run, cells: Sequence[Cell], shown: str) -> Snapshot:
    return Snapshot(
        shown=shown, set=run.problems, date=run.date, identities=run.known, entries=tuple(map(entry, cells)),
        problems={cell.name: problem_digest(cell.subject) for cell in cells}, missing=run.missing(cells),
    )  # fmt: skip


def entry(cell: Cell) -> SnapshotCell:
    plan = cell.plan
    same = {name: getattr(cell, name) for name in SnapshotCell.__struct_fields__ if hasattr(cell, name)}
    return SnapshotCell(
        path=plan.path if plan else "", tier=_tier(plan, cell.target),
        quirks=_ids(cell, "applied"), rejected=_ids(cell, "rejected"),
        noted=tuple(sorted({note.id for note in cell.footnotes if note.changes_nothing})),
        why_not=_why_not(plan) if plan else {}, worse=_worse(cell), **_speed(cell), looked=bool(cell.kernels),
        numbers=cell.interpreter.outcome if cell.interpreter else "", **same,
    )  # fmt: skip


def evidence(seen: SnapshotCell | Cell) -> int:
    """Return the amount of a cell's evidence: -1 for a red one, a NOTE as much as `declared`.

    `runs` that rests on another chip is less than `runs` on the chip itself."""
    if seen.status in RED:
        return -1
    if seen.status == "NOT_RUN":
        return 0
    level = LEVELS.index(seen.level) if seen.status == "PASS" else 0
    return 2 * (1 + level) - bool(seen.label)


def word(one: SnapshotCell | Cell) -> str:
    """Return the status or level: `emulated`, `runs (sm_80 code on sm_90)`, `NOTE`."""
    if one.status != "PASS":
        return one.status
    label = said_label(one)
    return f"{one.level} ({label})" if label else one.level


def said_label(one: SnapshotCell | Cell) -> str:
    """Return the evidence of a level `runs` not reached on the chip itself, or ""; also "" for a CPU's numbers."""
    if one.label or one.status != "PASS" or LEVELS.index(one.level) < LEVELS.index("runs"):
        return one.label
    return "" if has_chip(one.target) else CPU_NUMBERS


def has_chip(target: str) -> bool:
    backend = Registry.load().backends.get(target.partition(":")[0])
    return backend is None or backend.device_type != "cpu"


def problem_digest(problem: Subject) -> str:
    """Digest a problem's fields: a field that a later portattn adds changes no digest while it has its default."""
    said = ((field.name, getattr(problem, field.name), field.default) for field in msgspec.structs.fields(problem))
    return digest({name: value for name, value, default in said if value != default})


def _worse(cell: Cell) -> dict[str, int]:
    """Return facts of which more is worse; of several compilations of one function the worst."""
    found: dict[str, int] = {}
    for kernel in cell.kernels:
        for fact in WORSE:
            if value := int(kernel.facts.get(fact, 0)):
                name = f"{kernel.function} {fact}"
                found[name] = max(value, found.get(name, 0))
    return found


def _speed(cell: Cell) -> dict[str, Any]:
    """Return the fields `speed` and `tile`; of several compilations of one function the worst counts."""
    found: dict[str, int] = {}
    backend, _, name = cell.target.partition(":")
    arch = Registry.load().arches.get(backend, {}).get(name)  # None: a chip of another portattn's
    for kernel in cell.kernels:
        facts: dict[str, Any] = {name: kernel.facts.get(name) for name in ("instructions_a_megaflop", "spills")}
        facts["occupancy"] = kernel.facts.get("occupancy") or (arch and programs_a_core(kernel.facts, arch))
        for fact, value in facts.items():
            if value:
                name = f"{kernel.function} {fact}"
                found[name] = (min if fact == "occupancy" else max)(int(value), found.get(name, int(value)))
    plan, case = cell.plan, cell.case
    if case and arch:
        case = case.on_target(cell.target, arch)
    if case and cell.emulated and cell.emulated.cycles:
        found[f"{case.kernel} cycles"] = cell.emulated.cycles
    warps = [kernel.facts.get("num_warps") for kernel in cell.kernels]  # which a quirk may have changed
    tile = [plan.launch, plan.schedule] if plan else [case.constants, case.options, warps] if case else None
    return {"speed": found, "tile": digest(tile)[:8] if tile and found else ""}


def _why_not(plan: PlanSummary) -> dict[str, str]:
    """Return path -> why it is not taken; a note tells why the core runs instead of a variant."""
    said = (re.match(r"not (\w+): (.*)", note, re.DOTALL) for note in plan.notes)
    return {found[1]: found[2] for found in said if found} | {no.path: no.reason for no in plan.rejected}


def _ids(cell: Cell, role: str) -> tuple[str, ...]:
    return tuple(sorted({note.id for note in cell.footnotes if note.role == role and not note.changes_nothing}))


def _tier(plan: PlanSummary | None, target: str) -> Tier:
    if plan is None:
        return "none"
    backend = Registry.load().backends.get(target.partition(":")[0])
    if backend is not None and plan.path == backend.core_path:
        return "core"
    if plan.path == "reference":
        return "reference"
    if plan.schedule or (backend is not None and any(variant.name == plan.path for variant in backend.variants)):
        return "variant"
    return "core" if plan.core_taken and plan.kernel else "vendor"


def columns(entries: Iterable[SnapshotCell]) -> dict[tuple[str, str], list[SnapshotCell]]:
    found: dict[tuple[str, str], list[SnapshotCell]] = {}
    for one in entries:
        found.setdefault((one.target, one.toolchain), []).append(one)
    return found


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One run's result of a cell; changed: kinds of changes since the run before, with a clause each."""

    run: str
    date: datetime.datetime
    target: str
    toolchain: str
    name: str
    word: str
    path: str
    commit: str
    host: str
    changed: dict[str, str] = {}
    lost: bool = False
    causes: tuple[str, ...] = ()
