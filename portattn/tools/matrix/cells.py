"""Cell: one square of the matrix. Run: how and where the cells were made. Together the schema of results.jsonl."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from portattn.planning.registry import Registry
from portattn.schema.plan import Rejection
from portattn.schema.problem import Problem
from portattn.schema.quirk import Level, describe_effect
from portattn.testing.findings import Gate, KernelFacts, Lint, Numerics
from portattn.tools.matrix.identity import Identity, Moment

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
    """A quirk that has to do with a cell. role: it changed the plan, ruled out a path, or explains a figure."""

    id: str
    role: Literal["applied", "rejected", "explains"]
    sentence: str
    upstream: str
    sets: dict[str, Any] = {}
    cost: str = ""
    note: str = ""


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a Plan a reader wants to see.

    kernel, form, lowering, launch, env  of the core kernel; `lowering` holds the choices that it reads
    core_taken  False: another path is taken, and this is how the core kernel would run
    schedule  of a variant, where the path is one
    """

    path: str
    core_taken: bool = True
    kernel: str = ""
    form: str = ""
    lowering: dict[str, str] = {}
    launch: dict[str, bool | int | str] = {}
    env: dict[str, str] = {}
    rejected: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()
    schedule: dict[str, bool | int | str] = {}


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cell", tag_field="type"):
    """One problem on one target with one toolchain.

    id        digest of (problem, target, toolchain); `index` is its place in the run
    status    see the vocabulary above; `reason` explains any but PASS
    level     evidence level reached; the interpreter's numerics are no level, they stand beside it
    lints     findings of an executor's `analyze` in the code (portattn/testing/executor.py)
    lowered   numerics of that code, executed on a CPU
    emulated  numerics of the machine code, in a model of the chip
    older     numerics of an older chip's code, run on a newer chip that is here
    label     the evidence of a level `runs` that was not reached on the chip itself: "sm_80 code on sm_90"
    stage, log  of a failed compile: its stage, and the end of its output
    key       digest of the result's dependences; another key is another result, though the id is the same
    origin    id of the identity that it was made under
    others    results of other runs, in merged runs
    conflict  the other result that differs under the same key
    """

    schema: int = SCHEMA
    id: str
    index: int
    name: str
    problem: Problem
    target: str
    toolchain: str
    status: Status
    level: Level
    reason: str = ""
    plan: PlanSummary | None = None
    footnotes: tuple[Footnote, ...] = ()
    kernels: tuple[KernelFacts, ...] = ()
    gates: tuple[Gate, ...] = ()
    lints: tuple[Lint, ...] = ()
    interpreter: Numerics | None = None
    lowered: Numerics | None = None
    emulated: Numerics | None = None
    older: Numerics | None = None
    label: str = ""
    native: Numerics | None = None
    stage: str = ""
    log: str = ""
    seconds: float = 0.0
    key: str = ""
    origin: str = ""
    others: tuple[Cell, ...] = ()
    conflict: str = ""
    date: Moment

    @property
    def red(self) -> bool:
        return self.status in RED


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="run", tag_field="type"):
    """The first line of results.jsonl: where the cells come from.

    kernels       digest of the kernels' source, so that cells of other code are never mixed in
    compiler      the toolchain of the Python that made the run
    environments  the lab environments that compile for it: toolchain -> its Python and when it was made
    cells         ids of all cells of the run, in order
    identities    what its cells depend on; several where it was resumed under other conditions, or merged
    """

    schema: int = SCHEMA
    portattn: str
    kernels: str
    toolchains: tuple[str, ...]
    compiler: str
    machine: str
    devices: tuple[str, ...]
    versions: dict[str, str]
    command: str
    problems: str
    targets: tuple[str, ...]
    cells: tuple[str, ...]
    environments: dict[str, str] = {}
    identities: tuple[Identity, ...] = ()
    date: Moment

    @property
    def identity(self) -> Identity:
        """What the cells are made under that are made now."""
        return self.identities[0]


def cell_id(problem: Problem, target: str, toolchain: str) -> str:
    """Digest that names a cell in every run."""
    data = msgspec.json.encode([problem, target, toolchain], order="deterministic")
    return hashlib.sha256(data).hexdigest()[:16]


def footnote(quirk_id: str, role: str, registry: Registry, **more: Any) -> Footnote:
    """The Footnote for a quirk of the registry."""
    quirk = registry.quirks[quirk_id]
    more.setdefault("sentence", quirk.sentence())
    return Footnote(
        id=quirk.id,
        role=role,  # type: ignore[arg-type]
        upstream=quirk.evidence.upstream,
        cost=quirk.effect.cost or describe_effect(quirk.effect),
        **more,
    )
