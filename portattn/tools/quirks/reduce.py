"""`portattn quirks reduce`: the smallest specialisation of our own kernels that fails in the same way."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from portattn.compile.ensure_compiled import first_line, reproducer
from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.launch import KernelCall, signature
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.compile_record import Incident
from portattn.schema.lowering import OF_ROWS, Launch, Lowering
from portattn.schema.ops import ROWS, of_kinds
from portattn.schema.problem_limits import UNLIMITED
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.tools.quirks import probe_plans
from portattn.tools.quirks.failure_facts import failure_of, of_incident
from portattn.tools.quirks.probe_plans import Specialisation, compile_all, plan_line
from portattn.tools.quirks.probe_results import edit, fails_as, reply_text
from portattn.worker.client import Reply, Worker

_TILES = (16, 32, 64, 128, 256)
_WIDTHS = (16, 32, 64, 128, 256, 512)
_BY_KEY = ("bias", "mask")  # whose second flag, that all rows have the same, goes with them
_FLAGS = (
    *of_kinds("scores", "row", "tokens"), "leftpad_q", "leftpad_k", "seqlens_q", "seqlens_k", "return_lse", "large",
    "negative_scale", "needs_grad",
)  # fmt: skip
_DTYPES = ("fp16", "bf16", "fp32")


class Simplification(NamedTuple):
    """One offered simplification: its name for people, and the result."""

    name: str
    result: Specialisation


# Steps are offered as (name, part of the specialisation -> its changes).
_Steps = Iterable[tuple[str, dict[str, Any]]]
Offer = Callable[[Specialisation], _Steps]


def changing_steps(offer: Offer, what: Specialisation) -> Iterator[Simplification]:
    """Yield the offered steps that change something and leave a problem that can be stated."""
    for name, parts in offer(what):
        try:
            made = {part: _changed_part(getattr(what, part), changes) for part, changes in parts.items()}
        except ArgumentError:
            continue
        result = msgspec.structs.replace(what, **made)
        if result != what:
            yield Simplification(name, result)


def _changed_part(old: Any, changes: Any) -> Any:
    if isinstance(old, dict) or not isinstance(changes, dict):
        return changes
    return old.changed(changes) if isinstance(old, Launch) else msgspec.structs.replace(old, **changes)


def _problem(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return name, {"problem": changes}


def _launch(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return name, {"launch": changes}


def _flag_off(flag: str) -> Offer:
    def offer(what: Specialisation) -> _Steps:
        if getattr(what.problem, flag) and not (flag == "seqlens_k" and ROWS[what.problem.op].always_lengths):
            by_key = {f"{flag}_by_key": False} if flag in _BY_KEY else {}
            yield _problem(f"without {flag}", **{flag: False}, **by_key)

    return offer


def _not_causal(what: Specialisation) -> _Steps:
    if what.problem.op != "varlen_attention" or not what.problem.window:
        yield _problem("not causal", causal="none")


def _one_split(what: Specialisation) -> _Steps:
    if what.launch.splits > 1 or what.problem.num_splits > 1:
        yield "one split", {"problem": {"num_splits": 1}, "launch": {"splits": 1}}


def _dtype(what: Specialisation) -> _Steps:
    for dtype in _DTYPES[: _DTYPES.index(what.problem.dtype)]:
        yield _problem(f"dtype {dtype}", dtype=dtype)


def _fewer_heads(what: Specialisation) -> _Steps:
    p = what.problem
    yield _problem("one head", heads_q=1, heads_k=1)
    yield _problem("one head a group", heads_q=p.heads_k)
    yield _problem("one group", heads_q=p.heads_q // p.heads_k, heads_k=1)


def _smaller(what: Specialisation) -> _Steps:
    p, tile = what.problem, max(16, *(max(one.block_m, one.block_n) for one in what.launch.kernels()))
    keys = -(-2 * tile // (p.page_size or 1)) * (p.page_size or 1)
    rows, keys = min(p.seq_q, tile), min(p.seq_k, keys)
    totals = {name: rows_ for name, rows_ in (("total_q", rows), ("total_k", keys)) if getattr(p, name) is not None}
    yield _problem("small sizes", batch=1, seq_q=rows, seq_k=keys, **totals)
    yield _problem("one batch", batch=1)


def _width(what: Specialisation) -> _Steps:
    p = what.problem
    if p.op == "mla_attention":
        for rank in (w for w in _WIDTHS if w < p.head_dim_v):
            yield _problem(f"latent rank {rank}", head_dim=rank + min(64, rank), head_dim_v=rank)
        return
    for width in (w for w in _WIDTHS if w < max(p.head_dim, p.head_dim_v)):
        yield _problem(f"head_dim {width}", head_dim=width, head_dim_v=width)
    yield _problem(f"head_dim_v {p.head_dim}", head_dim_v=p.head_dim)


def _one_tile(what: Specialisation) -> _Steps:
    for name, launch in (("rows as keys", what.launch), ("keys as rows", what.launch.of_rows())):
        yield _launch(name, **{field: launch.get(field) for field in OF_ROWS})


def _tile(field: str) -> Offer:
    return lambda what: (_launch(f"{field} {n}", **{field: n}) for n in _TILES if n < getattr(what.launch, field))


def _fewer(field: str) -> Offer:
    counts = [1, 2, 4, 8, 16, 32] if field == "num_warps" else range(1, 32)
    return lambda what: (_launch(f"{field} {n}", **{field: n}) for n in counts if n < getattr(what.launch, field))


def _option_off(what: Specialisation) -> _Steps:
    for name, _ in what.launch.options:
        kept = tuple(pair for pair in what.launch.options if pair[0] != name)
        yield f"without option {name}", {"launch": msgspec.structs.replace(what.launch, options=kept)}


def _variable_off(what: Specialisation) -> _Steps:
    for name in what.env:
        yield f"without {name}", {"env": {key: value for key, value in what.env.items() if key != name}}


def _usual_choice(what: Specialisation) -> _Steps:
    for name in CORES[what.problem.op].choices:
        value = getattr(Lowering(), name)
        yield f"{name} {value}", {"lowering": {name: value}}


_NO_WINDOW = (
    _problem("without window", window_left=UNLIMITED, window_right=UNLIMITED), _problem("without chunk", chunk=0),
)  # fmt: skip
_PLAIN_MEMORY = _problem("aligned", aligned=True), _problem("layout bhsd", layout="bhsd")
# In the order in which they are tried.
OFFERS: tuple[Offer, ...] = (
    *(_flag_off(flag) for flag in _FLAGS), lambda _: _NO_WINDOW, _not_causal, lambda _: _PLAIN_MEMORY, _one_split,
    _fewer_heads, _smaller, _dtype, _width, _one_tile, _tile("block_m"), _tile("block_n"), _fewer("num_warps"),
    _fewer("num_stages"), _option_off, _variable_off, _usual_choice,
)  # fmt: skip


OP = "quirks reduce"
REDUCED = "-reduced"
MOST = 400  # compiles of one reduction
BEFORE = "compiled before"
SECONDS = 120.0  # limit of one compile


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A specialisation, its environment, the failure's signature, and the quirks that are `off` when it is planned."""

    id: str
    what: Specialisation
    target: Target
    symptom: str
    signature: str
    off: tuple[str, ...] = ()


class ReductionStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step. kept: it still fails in the same way; ended: how it ended otherwise."""

    step: str
    kept: bool
    ended: str


class Reduction(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    target: str
    toolchain: str
    signature: str
    before: Specialisation
    after: Specialisation
    changed: tuple[str, ...]  # differences between before and after, "name: before -> after"
    tried: tuple[ReductionStep, ...]  # every tried step, in order
    compiles: int  # how many compiles it took
    complete: bool  # False when the limit of compiles ended it
    probe: str  # a "plan:" probe that states the smallest one, or ""
    function: str
    command: str  # a shell command that sends the smallest one to a compiler
    log: str  # the compiler's output


def of_quirk(quirk: Quirk, registry: Registry, toolchain: str | None) -> Subject:
    """Return the specialisation of a quirk's "plan:" probe, without the quirk. Raises ArgumentError without one."""
    if not quirk.evidence.probe.startswith(probe_plans.PREFIX):
        limit = (
            f"must have a probe of the form {probe_plans.PREFIX!r}, and {quirk.id} has {quirk.evidence.probe[:60]!r}"
        )
        raise ArgumentError(OP, "ID", quirk.id, limit)
    stated = probe_plans.parse(quirk.evidence.probe)
    target = registry.target(stated.target, toolchain)
    path = registry.backends[target.backend].core_path
    settings = Settings(quirks=f"-{quirk.id}", backend=path)
    made = plan(stated.problem, target, probe_plans.with_start_values(registry, stated, target), settings=settings)
    lowering, launch = made.specialised
    what = Specialisation(problem=stated.problem, lowering=lowering, launch=launch, env=made.env)
    return Subject(
        id=quirk.id, what=what, target=target, symptom=quirk.symptom, signature=quirk.evidence.signature,
        off=(quirk.id,),
    )  # fmt: skip


def subject_of_incident(incident: Incident, registry: Registry, toolchain: str | None) -> Subject:
    """Return an incident's specialisation. Raises ArgumentError if the incident lacks its problem."""
    what = of_incident(incident, registry)
    if what is None:
        raise ArgumentError(OP, "ID", incident.id, "must be an incident that holds its problem: this one has none")
    failure = failure_of(incident)
    target = registry.target(incident.target, toolchain or incident.toolchain)
    return Subject(id=incident.id, what=what, target=target, symptom=incident.symptom, signature=failure.signature)


def reduce(
    subject: Subject, registry: Registry, worker: Worker, *, seconds: float = SECONDS, most: int = MOST,
    say: Callable[[ReductionStep, int], None] = lambda tried, compiles: None,
) -> Reduction:  # fmt: skip
    """Shrink while it fails in the same way; `say` gets step and compiles so far. Raises PortattnError if it passes."""
    if not subject.signature and subject.symptom != "hang":
        raise PortattnError(f"{subject.id}: a {subject.symptom} without a signature cannot be told by compiling")
    seen: dict[str, bool] = {}
    compiles, last = 0, (Reply(outcome="ok"), "")

    def fails(what: Specialisation) -> tuple[bool, str]:
        nonlocal compiles, last
        key = _key(what, subject.target, registry)
        if key in seen:
            return seen[key], BEFORE
        compiles += 1
        reply, function = compile_all(what, subject.target, registry, worker, seconds)
        seen[key] = fails_as(reply, subject.symptom, subject.signature)
        if seen[key]:
            last = reply, function
            return True, "the same"
        otherwise = f"fails otherwise: {reply.kind}: {first_line(reply.message)[:120]}"
        return False, "compiles" if reply.outcome == "ok" else otherwise

    same, ended = fails(subject.what)
    if not same:
        raise PortattnError(f"{subject.id} does not fail on {subject.target}: {ended}")
    now, tried = subject.what, list[ReductionStep]()

    def first_that_fails(offered: Iterable[Simplification]) -> Specialisation | None:
        for step in offered:
            if compiles >= most:
                return None
            reason = step.result.cannot(subject.target)
            same, ended = (False, reason) if reason else fails(step.result)
            if same or ended != BEFORE:
                tried.append(ReductionStep(step=step.name, kept=same, ended=ended))
                say(tried[-1], compiles)
            if same:
                return step.result
        return None

    progress = True
    while progress:
        progress = False
        for offers in OFFERS:
            while (simpler := first_that_fails(changing_steps(offers, now))) is not None:
                now, progress = simpler, True
    launch = _launch_of(now, last[1], subject.target, registry)
    command = reproducer(launch, now.plan(subject.target, registry), subject.target, worker.python)
    return Reduction(
        id=subject.id, target=subject.target.name, toolchain=str(subject.target.toolchain),
        signature=subject.signature, before=subject.what, after=now, changed=tuple(_changed(subject.what, now)),
        tried=tuple(tried), compiles=compiles, complete=compiles < most,
        probe=plan_line(now, subject.target, registry, subject.off), function=last[1], command=command,
        log=reply_text(last[0]),
    )  # fmt: skip


# Problems with equal input for the compiler are compiled once.
def _key(what: Specialisation, target: Target, registry: Registry) -> str:
    seen = [signature(launch) for launch in what.launches(target, registry)]
    return hashlib.sha256(msgspec.json.encode([seen, what.env], order="deterministic")).hexdigest()


def _launch_of(what: Specialisation, function: str, target: Target, registry: Registry) -> KernelCall:
    return next(launch for launch in what.launches(target, registry) if launch.function == function)


def _changed(before: Specialisation, after: Specialisation) -> Iterator[str]:
    parts = [(msgspec.to_builtins(one.problem), one.env, one.values()) for one in (before, after)]
    for old, new in zip(*parts, strict=True):
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                yield f"{name}: {old.get(name)} -> {new.get(name)}"


def incident_of(reduced: Reduction, original: Incident, registry: Registry) -> Incident:
    """Return the smallest one as an incident, <id>-reduced, for `quirks new --from-incident`."""
    after = reduced.after
    launch = _launch_of(after, reduced.function, registry.target(reduced.target, reduced.toolchain), registry)
    return msgspec.structs.replace(
        original, id=f"{original.id.removesuffix(REDUCED)}{REDUCED}", log=reduced.log, command=reduced.command,
        toolchain=reduced.toolchain, specialisation=msgspec.to_builtins(signature(launch)), problem=after.problem,
        lowering=after.lowering, launch=after.launch, environment_set=after.env,
    )  # fmt: skip


def write_probe(reduced: Reduction, registry: Registry) -> str:
    """Write the smallest one to the quirk's `probe`; return the file's name. Raises PortattnError or DataError."""
    quirk = registry.quirks[reduced.id]
    if not reduced.probe:
        limit = f"no probe of the form {probe_plans.PREFIX!r} states the smallest one; see the command"
        raise PortattnError(f"{reduced.id}: {limit}")
    edit(Path(quirk.file), quirk.id, lambda document: document["evidence"].update(probe=reduced.probe))
    return quirk.file
