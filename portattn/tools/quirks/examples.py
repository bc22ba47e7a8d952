"""Examples of a quirk: points on which it applies or just does not, from values at and next to its conditions."""

import datetime
import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from portattn.errors import ArgumentError
from portattn.planning.backend import Variant
from portattn.planning.data_files import options
from portattn.planning.kernel_specs import CORES, CoreKernel
from portattn.planning.registry import Registry
from portattn.schema import compilers, toml_reader
from portattn.schema.conditions import FLAGS, WORDS, Condition, parse
from portattn.schema.lowering import CHOICES, LAUNCH_FIELDS, POWERS_OF_TWO, Launch
from portattn.schema.ops import EVERY_SCORE, ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import cache_format
from portattn.schema.quirk import NUMBER, Quirk, launch_holds
from portattn.schema.target import Target
from portattn.schema.toolchain import parse_range
from portattn.schema.tuning import Entry, Provenance, Tuning

# Released compilers that entries are tried on, oldest first.
RELEASES: Mapping[str, tuple[str, ...]] = {
    "triton": ("3.2.0", "3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"),
    "triton-ascend": ("3.1.0", "3.2.0"),
}
COMMON_TOOLCHAIN = "triton==3.6.0"  # tried when an entry names no compiler, and its backend has no default of its own
_EXTREME_VERSIONS = ("9999", "0.0.1")  # above and below whatever a range names


class TriedProblems(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems of the audit's plans: `problem` with each of the changes and of the widths."""

    problem: dict[str, Any]
    head_dims: tuple[int, ...]
    each: tuple[dict[str, Any], ...] = ({},)


class _Problems(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    usual: dict[str, dict[str, Any]]
    audit: tuple[TriedProblems, ...]


@functools.cache
def problems() -> _Problems:
    """Return the problems. Raises DataError (file, line, key) if the file departs from its schema."""
    path = Path(__file__).with_name("problems.toml")
    content, text = toml_reader.read(path)
    return toml_reader.convert(content, _Problems, path, text)


_PAGE_SIZE = 64  # where a condition asks for pages
_WINDOW = 128  # where a condition asks for a window
_CHUNK = 128  # where a condition asks for a chunk
# What a problem has where nothing is asked for, if that is neither False nor 0.
_NOTHING = {
    "causal": "none", "layout": "bhsd", "page_layout": "phd", "total_q": None, "total_k": None, "kv_format": "as_q",
    "kv_scales": "none", "rotary": "none",
}  # fmt: skip
_UNTIMED = Provenance(chip="none", toolchain="none", date=datetime.date(2026, 1, 1), measured=False)


class QuirkExample(msgspec.Struct, frozen=True, kw_only=True):
    """One point at which a quirk is tried."""

    kernel: str
    problem: Problem
    target: str
    toolchain: str
    # lowering, launch: of the plan without the quirk
    lowering: dict[str, str]
    launch: dict[str, Any]
    broken: str = ""  # the one condition that does not hold; empty when all hold

    def place(self, registry: Registry) -> tuple[Registry, Target]:
        """Return the target, and the registry with a tuning that makes a plan start from this lowering and launch."""
        target = registry.target(self.target, self.toolchain)
        return tuned_by(registry, target, Entry(kernel=self.kernel, lowering=self.lowering, launch=self.launch)), target


def tuned_by(registry: Registry, target: Target, entry: Entry) -> Registry:
    """Return the registry with one entry as the tuning data of a target's backend."""
    tuning = {target.arch.tuning or target.arch.name: Tuning(provenance=_UNTIMED, entry=(entry,))}
    return msgspec.structs.replace(registry, tunings={**registry.tunings, target.backend: tuning})


def find(quirk: Quirk, registry: Registry) -> QuirkExample:
    """Return a point at which every condition holds. Raises ValueError naming a condition that nothing known meets."""
    return _point(quirk, registry, "")


def outside(quirk: Quirk, registry: Registry) -> Iterator[QuirkExample]:
    """Yield points at which all conditions but one hold: one for each condition that something known can break."""
    when = quirk.when
    named = {"backend": when.backend, "arch": when.arch, "kernels": when.kernels}
    parts = [name for name, given in named.items() if given]
    parts += [f"toolchain {name}" for name in when.toolchain]
    parts += [f"feature {text}" for text in when.features]
    parts += [f"lowering {name}" for name in when.lowering]
    parts += [f"launch {name}" for name in when.launch]
    for part in parts:
        try:
            yield _point(quirk, registry, part)
        except ValueError:
            continue  # an entry for every kernel, or every arch of its backend, has nothing outside in that direction


def _point(quirk: Quirk, registry: Registry, broken: str) -> QuirkExample:
    when = quirk.when
    backend, arch = _machine(quirk, registry, broken)
    kernel, problem = _kernel_and_problem(quirk, registry, broken)
    launch = {}
    for name, wanted in when.launch.items():
        negate = broken == f"launch {name}"
        values = launch_values(name, [wanted])
        value = _pick(values, lambda v, w=wanted, n=negate: launch_holds(v, w) is not n, f"when.launch.{name}")  # type: ignore[misc]
        if value is not None:
            launch[name] = value
    lowering = {
        name: _pick(CHOICES[name], lambda v, w=value, n=broken == f"lowering {name}": (v == w) is not n, name)  # type: ignore[misc]
        for name, value in when.lowering.items()
    }
    return QuirkExample(
        kernel=kernel, problem=problem, target=f"{backend}:{arch}",
        toolchain=_toolchain(quirk, registry, (backend, arch), broken.removeprefix("toolchain ")), lowering=lowering,
        launch=launch, broken=broken,
    )  # fmt: skip


def _kernel_and_problem(quirk: Quirk, registry: Registry, broken: str) -> tuple[str, Problem]:
    """Return the first kernel, and its problem, for the conditions; kernels with the quirk's choices come first."""
    conditions = [parse(text) for text in quirk.when.features]
    kernels = kernels_of(quirk, negate=broken == "kernels")
    reason = "nothing known meets when.kernels"
    if not kernels_of(quirk):  # an entry about variants
        own = variants_of(quirk, registry)
        if broken != "kernels":
            for variant, op in [(one, op) for one in own for op in one.ops]:
                try:
                    return variant.name, _problem(CORES[op], conditions, broken.removeprefix("feature "))
                except ValueError as error:
                    reason = str(error)
            raise ValueError(reason)
        kernels = [kernel for kernel in kernels if not any(kernel.op in variant.ops for variant in own)]
    for kernel in sorted(kernels, key=lambda k: not set(quirk.when.lowering) <= set(k.choices)):
        try:
            return kernel.name, _problem(kernel, conditions, broken.removeprefix("feature "))
        except ValueError as error:
            reason = str(error)
    raise ValueError(reason)


def _pick(values: Iterable[Any], test: Callable[[Any], bool], what: str) -> Any:
    for value in values:
        if test(value):
            return value
    raise ValueError(f"nothing known meets {what}")


def kernels_of(quirk: Quirk, negate: bool = False) -> list[CoreKernel]:
    patterns = quirk.when.kernels or ("*",)
    return [k for k in CORES.values() if any(fnmatch.fnmatchcase(k.name, p) for p in patterns) is not negate]


def variants_of(quirk: Quirk, registry: Registry) -> list[Variant]:
    patterns = quirk.when.kernels or ("*",)
    return [
        variant
        for name, backend in registry.backends.items()
        if quirk.when.backend in (None, name)
        for variant in backend.variants
        if any(fnmatch.fnmatchcase(variant.name, pattern) for pattern in patterns)
    ]


def arches_of(quirk: Quirk, registry: Registry) -> list[tuple[str, str]]:
    patterns = quirk.when.arch or ("*",)
    return [
        (backend, name)
        for backend, arches in registry.arches.items()
        if quirk.when.backend in (None, backend) and registry.backends[backend].core_path
        for name, arch in arches.items()
        if not arch.refused and any(map(arch.matches, patterns))
    ]


def _machine(quirk: Quirk, registry: Registry, broken: str) -> tuple[str, str]:
    concerned = arches_of(quirk, registry)
    if broken not in ("backend", "arch"):
        found: tuple[str, str] = _pick(concerned, lambda _: True, "when.backend and when.arch")
        return found
    known = [(b, a) for b, arches in registry.arches.items() for a, arch in arches.items() if not arch.refused]
    same = broken == "arch"
    found = _pick(
        known,
        lambda m: (
            m not in concerned and (m[0] == quirk.when.backend) is same and bool(registry.backends[m[0]].core_path)
        ),
        f"a machine outside when.{broken}",
    )
    return found


def releases(name: str) -> tuple[str, ...]:
    """Return released versions of a compiler to try entries on; all released ones for another package's compiler."""
    return RELEASES.get(name) or compilers.released_versions(name)


def versions(name: str, ranges: Iterable[str]) -> list[str]:
    """Return versions of a compiler or component to try: releases and the ranges' versions, newest first, extremes."""
    named = {s.version.removesuffix(".*") for text in ranges for s in parse_range(text)}
    return [*sorted(named | set(releases(name)), key=Version, reverse=True), *_EXTREME_VERSIONS]


def _toolchain(quirk: Quirk, registry: Registry, machine: tuple[str, str], broken: str) -> str:
    ranges = quirk.when.toolchain
    name, _, version = (registry.backends[machine[0]].default_toolchain or COMMON_TOOLCHAIN).partition("==")
    chosen = {name: version}
    if any(compilers.is_compiler(name) for name in ranges):
        chosen = {}
    seen, _, seen_version = quirk.evidence.last_seen.partition("==")
    for name, text in ranges.items():
        tried = versions(name, [text])
        if name == seen and name != broken:
            tried.insert(0, seen_version)
        chosen[name] = _pick(
            tried,
            lambda v, t=text, n=name == broken: parse_range(t).contains(v, prereleases=True) is not n,  # type: ignore[misc]
            f"when.toolchain.{name}",
        )
    return ",".join(f"{n}=={v}" for n, v in sorted(chosen.items(), key=lambda item: not compilers.is_compiler(item[0])))


def feature_values(name: str, wanted: Iterable[Condition], op: str = "attention") -> list[Any]:
    """Return values of a problem's feature to try: the usual one, and values at and next to every named number."""
    if name in FLAGS:
        return [False, True]
    if name in WORDS:
        return sorted(WORDS[name], key=lambda word: (word not in ("fp16", "none", "bhsd", "phd", "as_q"), word))
    least = 0 if name in ("page_size", "tokens") else 1  # an op without pages has pages of 0
    usual = problems().usual[op].get("head_dim" if name in ("head_dim_v", "widest") else name, least)
    near = {value + step for c in wanted for value in c.values for step in (-1, 0, 1)}
    return [usual, *sorted(value for value in near if value >= least)]


def launch_values(name: str, wanted: Iterable[bool | int | str]) -> list[Any]:
    """Return values of a launch field or compiler option to try; None stands for an unset option."""
    if options().get(name) is bool:
        return [True, False]
    numbers = {int(m.group(2)) if (m := NUMBER.match(str(w))) else w for w in wanted}
    if options().get(name) is str:
        return [*sorted(map(str, numbers)), None]
    given = sorted(int(n) for n in numbers)
    steps = [n * 2 for n in given] + [n // 2 for n in given]
    if name not in POWERS_OF_TWO:
        steps += [n + 1 for n in given] + [n - 1 for n in given]
    usual = getattr(Launch(), name) if name in LAUNCH_FIELDS else None
    return list(dict.fromkeys([*given, *(s for s in steps if s > 0), usual]))


def _problem(kernel: CoreKernel, wanted: list[Condition], broken: str) -> Problem:
    chosen: dict[str, Any] = dict(problems().usual[kernel.op])
    for name in dict.fromkeys(c.name for c in wanted):
        mine = [c for c in wanted if c.name == name]
        chosen[name] = _pick(
            feature_values(name, mine, kernel.op),
            lambda v, n=name, cs=mine: all(c.holds({n: v}) is not (c.text == broken) for c in cs),  # type: ignore[misc]
            f"when.features on {name}",
        )
    if "programs" in chosen:
        raise ValueError("a number of programs follows from the launch: no problem can be chosen for it alone")
    problem = _made(kernel.op, chosen, {c.name for c in wanted})
    features = problem.features()
    for condition in wanted:
        if condition.holds(features) is (condition.text == broken):
            raise ValueError(f"nothing known meets when.features on {condition.name}")
    if kernel.cannot(problem):
        raise ValueError(f"nothing known meets when.features: {kernel.name} cannot run it")
    return problem


def _made(op: str, chosen: dict[str, Any], named: Collection[str]) -> Problem:
    if "query_tiles" in chosen:  # of one head, with few rows, as many as there are sequences
        chosen |= {"batch": chosen.pop("query_tiles"), "heads_k": 1, "group": 1}
    if "gqa" in chosen:
        chosen["group"] = 4 if chosen.pop("gqa") else 1
    if "rows" in chosen:
        chosen["seq_q"] = -(-chosen.pop("rows") // (chosen["group"] if ROWS[op].packs_heads else 1))
    if "widest" in chosen:
        widest = chosen.pop("widest")
        chosen["head_dim" if "head_dim" not in named else "head_dim_v"] = widest
        chosen["head_dim_v"] = min(chosen.get("head_dim_v", widest), widest)
    if chosen.pop("featured", False) and not any(chosen.get(name) for name in EVERY_SCORE):
        chosen |= {name: True for name in ("softcap", "alibi_slopes") if name not in named}
    if "paged" in chosen:
        chosen["page_size"] = (chosen.get("page_size") or _PAGE_SIZE) if chosen.pop("paged") else 0
    if chosen.pop("window", False):
        chosen["window_left"] = _WINDOW
    if chosen.pop("chunk", False):
        chosen["chunk"] = _CHUNK
    if chosen.pop("packed", False):
        chosen["total_q"] = chosen["batch"] * chosen["seq_q"]
    if "words" in chosen:  # of a quantised cache
        if chosen.pop("words"):
            chosen.setdefault("kv_format", "e4m3")
        elif "aligned" not in named:
            chosen |= {"aligned": False, "word_aligned": False}
    kind = cache_format(chosen.get("kv_format", "as_q"))
    if kind.default_scales != "none":
        chosen.setdefault("kv_scales", kind.default_scales)
    if kind.latent and "dtype" not in named:
        chosen["dtype"] = kind.dtypes[0]
    if kind.block:  # rows are whole blocks
        for name in ("head_dim", "head_dim_v"):
            if name in chosen and name not in named:
                chosen[name] = max(chosen[name] // kind.block, 1) * kind.block
    if chosen.get("kv_scales", "none") != "none":
        by_token = chosen["kv_scales"] == "token" and "q_scale" in ROWS[op].tensors  # which int8 alone has there
        chosen.setdefault("kv_format", "int8" if by_token else "e4m3")
    if chosen.get("rotary", "none") != "none":
        chosen["rotary_dim"] = chosen.get("head_dim", 0) // 2 * 2
    causal = chosen.pop("causal_align", "bottom_right" if chosen.pop("causal", False) else "none")
    heads_q = chosen.pop("heads_q", chosen["heads_k"] * chosen.pop("group"))
    try:
        problem = Problem(op=op, heads_q=heads_q, causal=causal, **chosen)  # type: ignore[arg-type]
    except ArgumentError as error:
        raise ValueError(f"nothing known meets when.features: {error}") from None
    for name in dict.fromkeys(name for row in ROWS.values() for name in row.options):
        if getattr(problem, name) != _NOTHING.get(name, False) and name not in ROWS[op].options:
            raise ValueError(f"nothing known meets when.features on {name}: {op} has none")
    if ROWS[op].always_lengths and not problem.seqlens_k:
        raise ValueError(f"nothing known meets when.features on seqlens_k: {op} always has it")
    return problem
