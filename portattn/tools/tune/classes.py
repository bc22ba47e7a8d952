"""Classes: problems of one kernel that meet the same conditions share one entry of a tuning file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

import msgspec
from packaging.version import InvalidVersion, Version

from portattn.errors import ArgumentError
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.schema import compilers, conditions
from portattn.schema.features import EVERY_SCORE
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import KvFormat
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain, nameable, unknown_name
from portattn.schema.tuning import Entry, Tuning
from portattn.tools.tune.choice import Choice
from portattn.tools.tune.tunable import Tunable
from portattn.tools.tune.workloads import Workload


def same_compiler(timed_with: str, toolchain: Toolchain) -> bool:
    """Whether NAME==VERSION is this compiler, however its version is spelt: 3.6 is 3.6.0."""
    return str(Toolchain.parse(timed_with)) == str(toolchain)


def beside(timed_with: str, todays: Mapping[str, str], toolchain: Toolchain) -> dict[str, str]:
    """The ranges of the new entry: today's, and of them only what the choice was timed for.

    todays  ranges of the entry that holds today: outside of them another entry has the problems, and keeps them

    Raises ArgumentError where no reader would take what must be written: told before anything is timed.
    """
    own, other = toolchain, Toolchain.parse(timed_with)
    bound = ">=0" if own.distribution != other.distribution else _bound(own.version, other.version)
    made = {**todays, own.distribution: _narrowed(todays.get(own.distribution, ""), bound)}
    _check(made, own)
    return made


def _bound(own: str, other: str) -> str:
    """Of a newer release, it and those after it; of an older one, those before the other.

    A build of somebody's own, and a rebuild of the release that the other is of, say nothing of any other version:
    ranges would count the release itself among them (PEP 440), which keeps what was timed with it.
    """
    version, release, others = Version(own), _release(own), _release(other)
    if version.local or Version(release) == Version(others):
        return f"==={own}"
    if Version(release) > Version(others):
        return f">={release}"
    return f"<{others}"


def _release(version: str) -> str:
    """What a build or a rebuild is of: its version without either. A candidate stands for itself."""
    parsed = Version(version)
    candidate = "".join(map(str, parsed.pre or ()))
    made = "" if parsed.is_postrelease or parsed.dev is None else f".dev{parsed.dev}"
    return f"{parsed.base_version}{candidate}{made}"


def _narrowed(todays: str, bound: str) -> str:
    """Both ranges as one, without bounds of today's that the other makes idle; the compiler is in both."""
    if bound.startswith("==="):
        return bound
    parts = (part.strip() for part in todays.split(","))
    kept = [*(part for part in parts if part and not _idle(part, bound)), bound]
    return ",".join(sorted(kept, key=lambda part: not part.startswith(">")))


def _idle(one: str, bound: str) -> bool:
    """Whether one bound excludes nothing that the other leaves; False where more than a look would tell."""
    for operator in (">=", "<"):
        if one.startswith(operator) and bound.startswith(operator):
            try:
                there, limit = (Version(text.removeprefix(operator)) for text in (one, bound))
            except InvalidVersion:  # another operator that begins so, such as <=
                return False
            return there <= limit if operator == ">=" else there >= limit
    return False


def _check(made: Mapping[str, str], own: Toolchain) -> None:
    """Raise ArgumentError where a reader of tuning files would refuse these ranges of a choice timed with `own`."""
    wrong = next((f"{name!r} is {unknown_name()}" for name in made if not nameable(name)), "")
    # As the reader looks at it: of compilers alone, and of this one's name and version.
    named = {name: text for name, text in made.items() if compilers.is_compiler(name)}
    if not wrong and not Entry(kernel="", toolchain=named).is_for(Toolchain.parse(str(own))):
        wrong = "that leaves it out: today's entry is for other compilers than it can be named beside"
    if wrong:
        limit = f"must be one that a tuning file can name: its entry would be for {dict(made)}, and {wrong}"
        raise ArgumentError("tune", "--toolchain", str(own), limit)


# A class has the first condition of each group that holds; a group without one adds no condition.
_DTYPE = ("dtype!=fp32", "dtype=fp32")
_WIDTH = ("widest<=64", "widest<=128", "widest<=256", "widest<=512", "widest>512")
_MASK = ("causal", "!causal")
_KEYS = ("seq_k<=512", "seq_k<=2048", "seq_k<=8192", "seq_k>8192")
_BATCH = ("batch<8", "batch<64", "batch>=64")
_ROWS = ("rows<=16", "rows>16")
# For ops that read quantised caches: registers and time of dequantising differ by format. Caches of the queries' dtype
# are told apart too, so that their entry applies to no other format.
_FORMAT = tuple(f"kv_format={name}" for name in get_args(KvFormat))
_STORED = (("kv_scales=token", "kv_scales!=token"), ("aligned", "!aligned"))
PACKED = ("packed", "!packed")
_FEATURES = tuple((name,) for name in EVERY_SCORE)
_FORWARD = (_DTYPE, _WIDTH, _MASK, _KEYS, *_FEATURES)
_SPLIT = (_ROWS, _DTYPE, _WIDTH, ("seq_k<=4096", "seq_k>4096"), _BATCH, *_FEATURES)
_BACKWARD = (*_FORWARD, ("window", "!window"), ("dropout", "!dropout"), ("aligned", "!aligned"))
# For a variant's gradients: the concurrent blocks that add to dQ, and their order, depend on these.
_ADDED = (("deterministic", "!deterministic"), ("gqa", "!gqa"))
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention": _FORWARD,
    "varlen_attention": _FORWARD,
    "attention_backward": _BACKWARD,
    "varlen_attention_backward": _BACKWARD,
    "decode_attention": _SPLIT,
    "paged_attention": (*_SPLIT, ("page_size<64", "page_size<256", "page_size>=256")),
    "mla_attention": (_ROWS, _DTYPE, _WIDTH, _BATCH),
    "sparse_attention": (_DTYPE, _WIDTH, ("magicpig",), ("paged", "!paged"), _BATCH),
}


class Class(msgspec.Struct, frozen=True, kw_only=True):
    """Problems that will share one choice.

    kernel, when  of the future entry: the conditions of today's entry, and the class's own
    toolchain     ranges of the compilers that the entry will be for; empty: all
    position      of today's entry in the tuning file, or None
    incumbent     today's choice
    measured      whether today's choice was timed on the chip
    timed_with    the compiler that it was timed with, if it is not the target's; else empty
    """

    kernel: str
    op: str
    when: tuple[str, ...]
    workloads: tuple[Workload, ...]
    toolchain: dict[str, str] = {}
    position: int | None = None
    incumbent: Choice | None = None
    measured: bool = False
    timed_with: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel}: {', '.join(self.when)}"


def conditions_of(problem: Problem, several_ops: bool = False, variant: bool = False) -> tuple[str, ...]:
    """The conditions by which problems are told apart. several_ops: the kernel takes packed ones and others; variant:
    it is no core kernel.

    They hold for this class's problems alone: an entry for 4k keys says nothing of 1k, which may have kept what it had.
    """
    features = problem.features()
    found: list[str] = []
    groups = [*GROUPS[problem.op], *((PACKED,) if several_ops else ())]
    if variant and problem.backward:
        groups += _ADDED
    if "k_scale" in ROWS[problem.op].tensors:
        groups += [_FORMAT, *(_STORED if problem.kv_format != "as_q" else ())]
    for group in groups:
        place = next((i for i, text in enumerate(group) if conditions.parse(text).holds(features)), None)
        if place is not None:
            found += [*(_beyond(text) for text in group[max(place - 1, 0) : place]), group[place]]
    if set(_FEATURES) <= set(GROUPS[problem.op]) and not features["featured"]:
        found.append("!featured")
    return tuple(dict.fromkeys(text for text in found if text))


def _beyond(text: str) -> str:
    """What holds where an upper bound does not; empty for any other condition."""
    name, bound, limit = text.partition("<=") if "<=" in text else text.partition("<")
    return f"{name}{'>' if bound == '<=' else '>='}{limit}" if bound else ""


def classes(
    tunables: Iterable[Tunable], workloads: Iterable[Workload], tuning: Tuning | None, target: Target
) -> list[Class]:
    """The workloads of each tunable in classes, in the order in which they are first met.

    Problems that have different entries today are never in one class: an entry that is put before today's keeps its
    conditions, and is for no compiler that today's is not for, so that it takes no other entry's problems, and no later
    entry can become unreachable. Raises ArgumentError where the compiler is one that no entry could be for.
    """
    loads = list(workloads)
    found: dict[tuple[str, str, tuple[str, ...]], Class] = {}
    for tunable in tunables:
        variant = tunable.name not in KERNEL_NAMES
        for load in loads:
            if load.problem.op not in tunable.ops:
                continue
            features = load.problem.features()
            if variant and tuning is not None and tuning.left_to_core(tunable.name, features, target.toolchain):
                continue  # an entry that is found here would never be asked for
            position = None if tuning is None else tuning.position(tunable.name, features, target.toolchain, variant)
            entry = None if tuning is None or position is None else tuning.entry[position]
            kinds = conditions_of(load.problem, several_ops=len(tunable.ops) > 1, variant=variant)
            when = tuple(dict.fromkeys((*(entry.when if entry else ()), *kinds)))
            timed_with = tuning.timed_with(entry) if tuning is not None and entry is not None else ""
            timed_with = "" if timed_with and same_compiler(timed_with, target.toolchain) else timed_with
            todays = dict(entry.toolchain) if entry else {}
            key = (tunable.name, load.problem.op, when)
            made = Class(
                kernel=tunable.name,
                op=load.problem.op,
                when=when,
                workloads=(load,),
                position=position,
                incumbent=tunable.today(load.problem, target) if entry is None else choice_of(entry),
                measured=tuning is not None and entry is not None and tuning.measured(entry),
                timed_with=timed_with,
                toolchain=beside(timed_with, todays, target.toolchain) if timed_with else todays,
            )
            before = found.get(key)
            if before is not None:
                made = msgspec.structs.replace(before, workloads=(*before.workloads, load))
            found[key] = made
    return list(found.values())


def choice_of(entry: Entry) -> Choice:
    return Choice(
        launch=dict(entry.launch),
        lowering=dict(entry.lowering),
        flags=dict(entry.flags),
        occupancy=entry.occupancy,
        split_threshold=entry.split_threshold,
    )
