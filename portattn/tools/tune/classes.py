"""Classes: problems of one kernel that meet the same conditions share one entry of a tuning file."""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
from packaging.version import InvalidVersion, Version

import portattn
from portattn.errors import ArgumentError
from portattn.planning.core_path import backward_problem
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.schema import compilers, conditions, toml_reader
from portattn.schema.call import Call
from portattn.schema.ops import EVERY_SCORE, ROWS, WRITERS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import KvFormat, KvScales, cache_format
from portattn.schema.target import Target
from portattn.schema.tensors import TORCH_DTYPE
from portattn.schema.toolchain import Toolchain, nameable, unknown_name
from portattn.schema.tuning import Entry, Tuning
from portattn.tools.bench.cases import SETS, STORED_OPS, Case
from portattn.tools.bench.contenders import arguments
from portattn.tools.bench.gate import as_call
from portattn.tools.bench.tensors import Tensors
from portattn.tools.param_types import check_known
from portattn.tools.tune.tunable import Choice, Tunable

WRITTEN = ("grad_q", "grad_k", "grad_v")
DROPOUT_SEED = 7


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A case to time, and its call's Problem."""

    case: Case
    problem: Problem

    @property
    def name(self) -> str:
        return self.case.name


def call_of(case: Case, t: Tensors) -> Call:
    """Return a candidate's call: the case's, or its gradients', after a forward here unless tensors have no data."""
    call = as_call(case, t)
    if not case.backward:
        return call
    call.problem = backward_problem(call.problem)
    if t.q.device.type == "meta":
        return call
    args, options = arguments(case, t)
    if case.dropout:  # both must drop the same weights
        call.dropout_seed = options["dropout_seed"] = torch.tensor([DROPOUT_SEED], device=t.q.device)
    with torch.no_grad():
        out, lse = getattr(portattn, case.op)(*args, **options, return_lse=True)
    assert t.grad_out is not None
    call.forward_out, call.grad_out = (x.transpose(0, 1)[None] if case.packed else x for x in (out, t.grad_out))
    call.forward_lse = (lse[None] if case.packed else lse).contiguous()
    for name, like in zip(WRITTEN, (call.q, call.k, call.v), strict=True):
        setattr(call, name, torch.empty_like(like))
    return call


def workload(case: Case) -> Workload:
    return Workload(case=case, problem=call_of(case, Tensors.random(case, torch.device("meta"))).problem)


def tunable_sets() -> list[str]:
    # The core's gradients are deterministic in any case.
    return [name for name, cases in SETS.items() if not all(case.deterministic for case in cases)]


def from_sets(names: tuple[str, ...], only: str | None) -> list[Case]:
    """Return named sets' cases whose names hold a text, not deterministic gradients. ArgumentError if unknown."""
    known = tunable_sets()
    wanted = known if "all" in names else list(dict.fromkeys(names))
    check_known("tune", "--set", wanted, [*known, "all"])
    cases = [case for name in wanted for case in SETS[name] if not case.deterministic]
    found = {case.name: case for case in cases if only is None or only in case.name}
    if names and not found:
        raise ArgumentError("tune", "--only", only, f"must match a case of {', '.join(wanted)}")
    return list(found.values())


_NUMBERS = ("head_dim_v", "page_size", "tokens")
_WORDS: dict[str, tuple[str, ...]] = {"kv_format": get_args(KvFormat), "kv_scales": get_args(KvScales)}
UNTUNED = (*WRITERS, "block_sparse_attention", "block_sparse_attention_backward")  # no case is a call of them
_FORM = (
    "must be an op and NAME=VALUE words, as in 'attention q=4,16,4096,128 kv=4,16,4096,128 dtype=bf16 causal'; "
    f"words: q, kv (B,H,S,D), dtype, causal[=top_left], window=L,R, dropout=P, {', '.join(_NUMBERS)}, "
    f"{', '.join(_WORDS)}"
)


def parse(text: str) -> Case:
    """Parse a case: `attention q=B,H,S,D kv=B,H,S,D dtype=bf16 causal window=1023,0 page_size=64`.

    All sequences are full. Without kv_scales a cache of int8 or int4 has a scale for each token, and others have none.
    Raises ArgumentError naming the wrong word."""

    def bad(limit: str = _FORM) -> ArgumentError:
        return ArgumentError("tune", "--problem", text, limit)

    op, *words = text.split()
    tuned = [name for name in ROWS if name not in UNTUNED]
    if op not in tuned:
        raise bad(f"its first word must be one of {', '.join(tuned)}")
    backward = bool(ROWS[op].gradient_of)
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    fields: dict[str, Any] = {"name": text, "op": ROWS[op].gradient_of or op, "backward": backward}
    fields["dtype"] = given.pop("dtype", "bf16")
    try:
        batch, heads_q, seq_q, dim = (int(part) for part in given.pop("q").split(","))
        batch_k, heads_k, seq_k, dim_k = (int(part) for part in given.pop("kv").split(","))
        fields |= {name: int(given.pop(name)) for name in _NUMBERS if name in given}
        fields["dropout"] = float(given.pop("dropout", "0"))
        if "window" in given:
            left, right = (None if int(side) < 0 else int(side) for side in given.pop("window").split(","))
            fields["window"] = (left, right)
    except (KeyError, ValueError):
        raise bad() from None
    if "causal" in given:
        fields["causal"] = given.pop("causal") or "bottom_right"
    for name, known in _WORDS.items():
        if name in given:
            fields[name] = given.pop(name)
            if fields[name] not in known:
                raise bad(f"{name} must be one of {', '.join(known)}")
    stored = fields.get("kv_format", "as_q")
    fields.setdefault("kv_scales", cache_format(stored).default_scales)
    if stored == "as_q" and fields.get("kv_scales", "none") != "none":
        raise bad("kv_scales goes with a kv_format other than as_q")
    if stored != "as_q" and op not in STORED_OPS:
        raise bad(f"kv_format goes with {' and '.join(STORED_OPS)}")
    if fields["dropout"] and (op != "attention_backward" or heads_q != heads_k or not 0 < fields["dropout"] < 1):
        raise bad("dropout must be from 0 to below 1, of attention_backward with as many heads in q as in kv")
    if given:
        raise bad(f"it has the unknown word {next(iter(given))!r}; {_FORM}")
    if (batch, dim) != (batch_k, dim_k) or min(batch, heads_q, seq_q, dim, heads_k, seq_k) < 1:
        raise bad("q and kv must agree in B and D, and hold positive numbers")
    if fields["dtype"] not in TORCH_DTYPE:
        raise bad(f"dtype must be one of {', '.join(TORCH_DTYPE)}")
    if op in ("paged_attention", "mla_attention") and not fields.get("page_size"):
        raise bad(f"page_size must be given for {op}")
    if op == "mla_attention":
        fields["scale"] = dim**-0.5  # which its callers must say, and on which no time depends
    if op == "sparse_attention" and not fields.get("tokens"):
        raise bad(f"tokens must be given for {op}")
    fields |= {"batch": batch, "heads_q": heads_q, "seq_q": seq_q, "head_dim": dim, "heads_k": heads_k, "seq_k": seq_k}
    case = Case(**fields, packed=fields["op"] == "varlen_attention")
    workload(case)  # raises ArgumentError on what no call of the op can be
    return case


def same_compiler(timed_with: str, toolchain: Toolchain) -> bool:
    """Return whether NAME==VERSION is this compiler, however its version is spelt: 3.6 is 3.6.0."""
    return str(Toolchain.parse(timed_with)) == str(toolchain)


def beside(timed_with: str, todays: Mapping[str, str], toolchain: Toolchain) -> dict[str, str]:
    """Return today's toolchain ranges narrowed to the compilers that the choice was timed for. Raises ArgumentError."""
    own, other = toolchain, Toolchain.parse(timed_with)
    bound = ">=0" if own.distribution != other.distribution else _bound(own.version, other.version)
    made = {**todays, own.distribution: _narrowed(todays.get(own.distribution, ""), bound)}
    _check(made, own)
    return made


def _bound(own: str, other: str) -> str:
    """Return the bound of a newer or older release; a rebuild is bound by ===, as a range would include the release."""
    version, release, others = Version(own), _release(own), _release(other)
    if version.local or Version(release) == Version(others):
        return f"==={own}"
    if Version(release) > Version(others):
        return f">={release}"
    return f"<{others}"


def _release(version: str) -> str:
    parsed = Version(version)
    candidate = "".join(map(str, parsed.pre or ()))
    made = "" if parsed.is_postrelease or parsed.dev is None else f".dev{parsed.dev}"
    return f"{parsed.base_version}{candidate}{made}"


def _narrowed(todays: str, bound: str) -> str:
    """Return both ranges as one, without today's bounds that the other makes redundant; both include the compiler."""
    if bound.startswith("==="):
        return bound
    parts = (part.strip() for part in todays.split(","))
    kept = [*(part for part in parts if part and not _idle(part, bound)), bound]
    return ",".join(sorted(kept, key=lambda part: not part.startswith(">")))


def _idle(one: str, bound: str) -> bool:
    for operator in (">=", "<"):
        if one.startswith(operator) and bound.startswith(operator):
            try:
                there, limit = (Version(text.removeprefix(operator)) for text in (one, bound))
            except InvalidVersion:  # another operator that begins so, such as <=
                return False
            return there <= limit if operator == ">=" else there >= limit
    return False


def _check(made: Mapping[str, str], own: Toolchain) -> None:
    """Raise ArgumentError if a reader of tuning files would refuse these ranges of a choice timed with `own`."""
    wrong = next((f"{name!r} is {unknown_name()}" for name in made if not nameable(name)), "")
    # As the reader looks at it: of compilers alone, and of this one's name and version.
    named = {name: text for name, text in made.items() if compilers.is_compiler(name)}
    if not wrong and not Entry(kernel="", toolchain=named).is_for(Toolchain.parse(str(own))):
        wrong = "that leaves it out: today's entry is for other compilers than it can be named beside"
    if wrong:
        limit = f"must be one that a tuning file can name: its entry would be for {dict(made)}, and {wrong}"
        raise ArgumentError("tune", "--toolchain", str(own), limit)


PACKED = ("packed", "!packed")


class _Groups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    conditions: dict[str, tuple[str, ...]]
    ops: dict[str, tuple[str, ...]]


@functools.cache
def groups() -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[tuple[str, ...], ...]]]:
    """Return the groups by name, and of each op. Raises DataError (file, line, key) on an unknown name."""
    path = Path(__file__).with_name("classes.toml")
    content, text = toml_reader.read(path)
    data = toml_reader.convert(content, _Groups, path, text)
    for name, group in data.conditions.items():
        with toml_reader.errors_at(path, text, "conditions", name):
            conditions.parse_all(group)
    known = {name: (group,) for name, group in data.conditions.items()} | {"features": _FEATURES}
    of_ops = {}
    for op, names in data.ops.items():
        with toml_reader.errors_at(path, text, "ops", op):
            of_ops[op] = tuple(one for name in names for one in known[name])
    return data.conditions, of_ops


_FORMAT = tuple(f"kv_format={name}" for name in get_args(KvFormat))
_FEATURES = tuple((name,) for name in EVERY_SCORE)


class Class(msgspec.Struct, frozen=True, kw_only=True):
    """Problems that will share one choice."""

    # kernel, when: of the future entry: the conditions of today's entry, and the class's own
    kernel: str
    op: str
    when: tuple[str, ...]
    workloads: tuple[Workload, ...]
    toolchain: dict[str, str] = {}  # ranges of the compilers that the entry will be for; empty: all
    position: int | None = None  # of today's entry in the tuning file, or None
    incumbent: Choice | None = None  # today's choice
    measured: bool = False  # today's choice was timed on the chip
    timed_with: str = ""  # the compiler that it was timed with, if it is not the target's; else empty

    @property
    def name(self) -> str:
        return f"{self.kernel}: {', '.join(self.when)}"


def conditions_of(problem: Problem, several_ops: bool = False, variant: bool = False) -> tuple[str, ...]:
    """Return the conditions that tell this class's problems apart: an entry for 4k keys must not change 1k."""
    features = problem.features()
    found: list[str] = []
    named, of_ops = groups()
    tried = [*of_ops[problem.op], *((PACKED,) if several_ops else ())]
    if variant and problem.backward:
        tried += [named["deterministic"], named["gqa"]]
    if "k_scale" in ROWS[problem.op].tensors:
        # Registers and time of dequantising differ by format. Caches of the queries' dtype are told apart too, so that
        # their entry applies to no other format.
        stored = problem.kv_format != "as_q"
        tried += [_FORMAT, *((named["scales"], named["aligned"]) if stored else ())]
    for group in tried:
        place = next((i for i, text in enumerate(group) if conditions.parse(text).holds(features)), None)
        if place is not None:
            found += [*(_beyond(text) for text in group[max(place - 1, 0) : place]), group[place]]
    if set(_FEATURES) <= set(of_ops[problem.op]) and not features["featured"]:
        found.append("!featured")
    return tuple(dict.fromkeys(text for text in found if text))


def _beyond(text: str) -> str:
    name, bound, limit = text.partition("<=") if "<=" in text else text.partition("<")
    return f"{name}{'>' if bound == '<=' else '>='}{limit}" if bound else ""


def classes(
    tunables: Iterable[Tunable], workloads: Iterable[Workload], tuning: Tuning | None, target: Target
) -> list[Class]:
    """Return the workloads of each tunable in classes, in the order in which they are first met. Raises ArgumentError.
    A class has one entry today: a new one before it, with its conditions, takes no other entry's problems."""
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
                kernel=tunable.name, op=load.problem.op, when=when, workloads=(load,), position=position,
                incumbent=tunable.today(load.problem, target) if entry is None else choice_of(entry),
                measured=tuning is not None and entry is not None and tuning.measured(entry), timed_with=timed_with,
                toolchain=beside(timed_with, todays, target.toolchain) if timed_with else todays,
            )  # fmt: skip
            before = found.get(key)
            if before is not None:
                made = msgspec.structs.replace(before, workloads=(*before.workloads, load))
            found[key] = made
    return list(found.values())


def choice_of(entry: Entry) -> Choice:
    return Choice(**{name: getattr(entry, name) for name in Choice.__struct_fields__})
