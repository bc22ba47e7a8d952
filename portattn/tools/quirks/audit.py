"""The audit of the quirk registry, behind `portattn quirks audit`."""

import datetime
import difflib
import fnmatch
import itertools
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from packaging.version import Version

from portattn.errors import DataError, PathUnavailable, PortattnError, QuirkConflict
from portattn.planning.backend import Backend
from portattn.planning.data_files import load_arches, load_tunings
from portattn.planning.kernel_specs import CORES, KERNEL_NAMES
from portattn.planning.planner import plan
from portattn.planning.plugins import Broken
from portattn.planning.quirk_files import check_file, seen_range
from portattn.planning.registry import Registry, look_around, shipped_quirks
from portattn.schema import compilers, toml_reader
from portattn.schema.conditions import parse
from portattn.schema.lowering import CHOICES
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import Dtype
from portattn.schema.quirk import Quirk, concerning, launch_holds
from portattn.schema.target import Target
from portattn.schema.toolchain import parse_range
from portattn.tools.quirks import examples
from portattn.tools.quirks.draft_texts import MARK, open_lines
from portattn.tools.quirks.failure_log import patterns

REVIEW_SOON = datetime.timedelta(days=30)
SETTLE = "narrow [when] of one so that no plan meets both, or give both the same value"
FAILS = ("compile-error", "compiler-crash", "hang")  # what one kernel does to a compiler
TAKES = ("vendor", "reference")  # where a `path` effect leads that takes the core
SIGNATURE = "fail:signature"
_QUOTED = re.compile(r"\"([^\"]+)\"|`([^`]+)`")
_Lacks = Iterator[tuple[tuple[str, ...], str]]  # (key of the file, what is wrong with it)


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of the audit; `quirk`, `file` and `line` are empty or None if unknown."""

    severity: Literal["error", "warning"]
    message: str
    quirk: str = ""
    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(part for part in (where, self.severity, self.message) if part)


def run(folder: Path | None = None, today: datetime.date | None = None) -> list[AuditFinding]:
    """Audit a folder's quirk files, or portattn's and packages'. Raises DataError only on broken arches or tuning."""
    registry, findings = load_for_audit(folder)
    return findings + audit(registry, today or datetime.date.today())


def beside_shipped(folder: Path) -> list[AuditFinding]:
    """Return a folder's conflicts with the shipped registry; an entry in both is the folder's. Raises DataError."""
    given, _ = load_for_audit(folder)
    shipped, _ = load_for_audit()
    mine = given.quirks
    others = {name: quirk for name, quirk in (shipped.quirks | shipped.retired).items() if name not in mine}
    numbers = {_number(name): quirk.file for name, quirk in others.items()}
    findings = [
        _at(quirk, ("id",), f"{_number(quirk.id)} is already taken by {numbers[_number(quirk.id)]}")
        for quirk in mine.values()
        if _number(quirk.id) in numbers
    ]
    kept = {name: quirk for name, quirk in shipped.quirks.items() if name not in mine and name not in given.retired}
    both = Registry(
        backends=shipped.backends, arches=shipped.arches, tunings=shipped.tunings, quirks=kept | mine,
        retired=shipped.retired, broken=shipped.broken,
    )  # fmt: skip
    met = dict(_conflicts_by_condition(list(both.quirks.values()), both))
    met |= {pair: finding for pair, finding in _conflicts_by_planning(both, mine) if pair not in met}
    # Pairs of the folder's own are `run`'s to tell, and pairs of the registry's own the audit's of the registry.
    return findings + [finding for pair, finding in met.items() if pair & set(mine) and not pair <= set(mine)]


def load_for_audit(
    folder: Path | None = None, backends: Mapping[str, Backend] | None = None
) -> tuple[Registry, list[AuditFinding]]:
    """Return every readable quirk's registry and the others' faults; packages are audited only without a folder."""
    broken: tuple[Broken, ...] = ()
    if backends is None:
        backends, broken = look_around()
    names = (*backends, *(one.name for one in broken))
    folders = sorted(path for path in (folder or shipped_quirks()).iterdir() if path.is_dir())
    if folder is None:
        folders += [own for backend in backends.values() if (own := backend.quirk_folder())]
    quirks: dict[str, Quirk] = {}
    findings = [finding for one in broken for finding in _left_out(one)] if folder is None else []
    paths = [path for place in folders for path in toml_reader.files(place)]
    if not paths:
        where = folder or shipped_quirks()
        text = "holds no quirk files: they are looked for as <backend>/<id>.toml"
        findings.append(AuditFinding(severity="error", file=str(where), message=text))
    for path in paths:
        quirk, errors = check_file(path, names)
        open_ = open_lines(path.read_text(encoding="utf-8")) if any(MARK in error.problem for error in errors) else []
        findings += [_to_fill_in(path, number, text) for number, text in open_]
        findings += [_from_error(error, quirk) for error in errors if not open_]
        if quirk is None or errors:
            continue
        taken = [other for other in quirks.values() if _number(other.id) == _number(quirk.id)]
        if taken:
            findings.append(_at(quirk, ("id",), f"{_number(quirk.id)} is already taken by {taken[0].file}"))
        else:
            quirks[quirk.id] = quirk
    registry = Registry(
        backends=dict(backends), arches={name: load_arches(b.folder) for name, b in backends.items()},
        tunings={name: load_tunings(b.folder / "tuning", name) for name, b in backends.items()},
        quirks={name: quirk for name, quirk in quirks.items() if quirk.retired is None},
        retired={name: quirk for name, quirk in quirks.items() if quirk.retired is not None}, broken=broken,
    )  # fmt: skip
    return registry, findings


def audit(registry: Registry, today: datetime.date) -> list[AuditFinding]:
    """Return all faults of a registry's quirks on a day; takes a few seconds for the shipped one."""
    quirks = list(registry.quirks.values())
    findings = [finding for quirk in quirks for finding in _stale(quirk, today)]
    findings += [finding for quirk in quirks for finding in _probed(quirk, registry)]
    findings += [finding for quirk in quirks for finding in _broad(quirk, registry)]
    findings += [_at(quirk, keys, text) for quirk in quirks for keys, text in lacks(quirk)]
    findings += [finding for quirk in registry.retired.values() for finding in _replaced(quirk, registry)]
    useless = {quirk.id: list(_never_applies(quirk, registry)) for quirk in quirks}
    findings += itertools.chain.from_iterable(useless.values())
    alive = [quirk for quirk in quirks if not any(f.severity == "error" for f in useless[quirk.id])]
    met = dict(_conflicts_by_condition(alive, registry))
    met |= {pair: f for pair, f in _conflicts_by_planning(registry) if pair not in met}
    return findings + list(met.values())


# The unique part of an id: `cuda-0012` of `cuda-0012-serialised-wgmma`.
def _number(quirk_id: str) -> str:
    return "-".join(quirk_id.split("-")[:2])


def _left_out(one: Broken) -> Iterator[AuditFinding]:
    for fault in one.faults:
        message = f"{one.kind} {one.package} is left out of every plan: {fault.text}"
        yield AuditFinding(severity="error", message=message, file=fault.file, line=fault.line)


def _from_error(error: DataError, quirk: Quirk | None) -> AuditFinding:
    name = quirk.id if quirk else Path(error.path).stem
    return AuditFinding(severity="error", message=error.problem, quirk=name, file=error.path, line=error.line)


def _to_fill_in(path: Path, number: int, text: str) -> AuditFinding:
    message = f"line {number} is still to be filled in: {text.partition(' ')[0]}"
    return AuditFinding(severity="error", message=message, quirk=path.stem, file=str(path), line=number)


def _at(
    quirk: Quirk, keys: tuple[str, ...], message: str, severity: Literal["error", "warning"] = "error"
) -> AuditFinding:
    path = Path(quirk.file)
    line = toml_reader.line_of(path.read_text(encoding="utf-8"), *keys) if quirk.file and path.exists() else None
    return AuditFinding(severity=severity, message=message, quirk=quirk.id, file=quirk.file, line=line)


def _stale(quirk: Quirk, today: datetime.date) -> Iterator[AuditFinding]:
    due = quirk.evidence.review_by
    if due is None:
        return
    key = ("evidence", "review_by")
    if due < today:
        yield _at(quirk, key, f"{quirk.id} was to be reviewed by {due}: probe it on a newer toolchain")
    elif due - today <= REVIEW_SOON:
        yield _at(quirk, key, f"{quirk.id} is due for review by {due}", "warning")


def _probed(quirk: Quirk, registry: Registry) -> Iterator[AuditFinding]:
    from portattn.tools.quirks import probe, probe_plans, probe_results

    if quirk.evidence.probe.startswith(probe_plans.PREFIX):
        try:
            probe.place(quirk, None, probe_plans.parse(quirk.evidence.probe).target, registry)
        except PortattnError as error:
            yield _at(quirk, ("evidence", "probe"), str(error))
            return
    if probe.has_probe(quirk) and not quirk.evidence.needs and not quirk.verified:
        hint = f"`portattn quirks probe {quirk.id} --all-toolchains --record` runs it"
        yield _at(quirk, ("evidence", "probe"), f"{quirk.id} was never probed: {hint}", "warning")
    for number, seen in enumerate(quirk.verified):
        key = ("verified", str(number))
        try:
            where = registry.target(seen.target, seen.toolchain)
        except PortattnError as error:
            yield _at(quirk, key, str(error))
            continue
        verdict = probe_results.recorded_outcome(quirk, seen, where)
        if verdict in probe_results.RED:
            diff = probe_results.range_diff(quirk, where, verdict, probe.affected_versions(quirk))
            saw = f": {seen.saw}" if seen.saw else ""
            message = f"{quirk.id} is {verdict} on {seen.toolchain} ({seen.target}, {seen.date}){saw}"
            yield _at(quirk, key, f"{message}\n{diff}" if diff else message)


def new_location(link: str) -> str:
    return next((now for before, now in patterns().moved.items() if link.lower().startswith(before.lower())), "")


def lacks(quirk: Quirk) -> _Lacks:
    """Return claims without evidence: a record of a probe ([[verified]]), a quotation, or seen versions."""
    yield from _signature(quirk)
    for name, text in quirk.when.toolchain.items():
        yield from _range(quirk, name, text)
    if now := new_location(quirk.evidence.upstream):
        yield ("evidence", "upstream"), f"{quirk.id}: {quirk.evidence.upstream} has moved; its project is at {now} now"


def alternatives(signature: str) -> list[str]:
    parts, depth, in_set, escaped = [""], 0, False, False
    for char in signature:
        if char == "|" and not (depth or in_set or escaped):
            parts.append("")
            continue
        parts[-1] += char
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_set:
            in_set = char != "]"
        elif char == "[":
            in_set = True
        else:
            depth += {"(": 1, ")": -1}.get(char, 0)
    return parts


def _signature(quirk: Quirk) -> _Lacks:
    signature = quirk.evidence.signature
    if not signature:
        return
    key = ("evidence", "signature")
    quoted = [text for pair in _QUOTED.findall(quirk.evidence.source) for text in pair if text]
    seen = [*quirk.evidence.quotes, *quoted, *(block.saw for block in quirk.verified if block.off == SIGNATURE)]
    for part in alternatives(signature):
        wide = next((text for text in patterns().any_failure if re.search(part, text)), "")
        if wide:
            yield key, f"{quirk.id}: {part!r} is found in what any failure has: {wide!r}"
        elif not any(re.search(part, text) for text in seen):
            yield key, f"{quirk.id}: {part!r} is in nothing that was seen: no quotation, and no [[verified]] table"


def _range(quirk: Quirk, name: str, text: str) -> _Lacks:
    allowed = parse_range(text)
    key = ("when", "toolchain", name)
    seen = sorted(_versions_seen(quirk, name), key=Version)
    spans = [span for item in quirk.evidence.seen_on for other, span in [seen_range(item)] if other == name]
    inside = [version for version in seen if allowed.contains(version, prereleases=True)]
    candidates = [v for v in examples.versions(name, [text, *spans]) if allowed.contains(v, prereleases=True)]
    if not inside and not any(parse_range(span).contains(v, prereleases=True) for span in spans for v in candidates):
        told = f"it was seen on no version in {name} {text}: neither last_seen, seen_on nor a probe says so"
        yield key, f"{quirk.id}: {told}"
        return
    releases = [version for version in examples.releases(name) if allowed.contains(version)]
    for bounds, at, beyond in (((">", ">=", "==", "~="), 0, "older"), (("<", "<=", "==", "~="), -1, "newer")):
        if not releases or not inside or not any(specifier.operator in bounds for specifier in allowed):
            continue
        end, last = Version(releases[at]), Version(inside[at])
        covered = any(parse_range(span).contains(end, prereleases=True) for span in spans)
        if (end < last if at == 0 else end > last) and not covered:
            yield key, f"{quirk.id}: {name} {text} has {end}, which is {beyond} than any on which it was seen ({last})"


def _versions_seen(quirk: Quirk, name: str) -> Iterator[str]:
    texts = [quirk.evidence.last_seen, *(block.toolchain for block in quirk.verified if block.off == SIGNATURE)]
    for text in (*texts, *quirk.evidence.seen_on):
        other, equals, version = text.partition("==")
        if equals and other == name:
            yield version


def _broad(quirk: Quirk, registry: Registry) -> Iterator[AuditFinding]:
    # A limit is a fact of the chip or the language, whatever the kernel.
    changed = quirk.effect.kind in ("path", "lowering", "launch")
    if quirk.kind == "workaround" and quirk.symptom in FAILS and changed and not quirk.when.kernels:
        message = 'when.kernels is missing, so the entry holds for all kernels; write kernels = ["*"] if you mean that'
        yield _at(quirk, ("when",), f"{quirk.id}: {message}")
    if quirk.effect.path not in TAKES:
        return
    for backend, newest in takes_whole(quirk, registry, _problems()):
        message = (
            f"{quirk.id} takes the core kernels from all of {backend}, also with {newest}, the newest release that is "
            "known: narrow [when] to what was observed"
        )
        yield _at(quirk, ("effect", "path"), message, "warning")


def takes_whole(quirk: Quirk, registry: Registry, problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Return (backend, newest release) of each backend whose core a quirk takes from every arch and problem.
    A range that ends before the newest release takes nothing from users, and `<4` is no bound while there is no 4."""
    alone = msgspec.structs.replace(registry, quirks={quirk.id: quirk})
    found = []
    for name, backend in registry.backends.items():
        if quirk.when.backend not in (None, name) or not backend.core_path:
            continue
        releases = examples.releases(backend.compiler)
        if not releases:
            continue
        newest = f"{backend.compiler}=={max(releases, key=Version)}"
        arches = [arch for arch in registry.arches[name].values() if not arch.refused]
        targets = [registry.target(f"{name}:{arch.name}", newest) for arch in arches]
        taken = (took for target in targets for took in _taken(quirk, target, alone, problems))
        if next(taken, False) and all(taken):  # nearly every entry leaves the first problem
            found.append((name, newest))
    return found


def _taken(quirk: Quirk, target: Target, alone: Registry, problems: Sequence[Problem]) -> Iterator[bool]:
    core = alone.backends[target.backend].core_path
    for problem in problems:
        try:
            made = plan(problem, target, alone)
        except PathUnavailable:  # gradients that no kernel computes
            continue
        took = any(no.quirk == quirk.id for no in made.rejected)
        if took or made.path == core:
            yield took


def _replaced(quirk: Quirk, registry: Registry) -> Iterator[AuditFinding]:
    other = quirk.retired.replaced_by if quirk.retired else ""
    if other and other not in registry.quirks and other not in registry.retired:
        yield _at(quirk, ("retired", "replaced_by"), f"no quirk has the id {other!r}")


FOREIGN = 0.7  # a glob on kernels that is less like each of portattn's names is no misspelt one


def _never_applies(quirk: Quirk, registry: Registry) -> Iterator[AuditFinding]:
    when = quirk.when
    if when.backend is not None and when.backend not in registry.backends:
        yield _at(quirk, ("when", "backend"), f"unknown backend {when.backend!r}: {registry.unknown(when.backend)}")
        return
    arches = [arch for b, named in registry.arches.items() if when.backend in (None, b) for arch in named.values()]
    arches = [arch for arch in arches if not arch.refused]  # where nothing is planned, nothing applies
    known = list(dict.fromkeys(name for arch in arches for name in (arch.name, *arch.families)))
    kernel_names = [*KERNEL_NAMES, *registry.variant_names()]
    for key, globs, names in (("arch", when.arch, known), ("kernels", when.kernels, kernel_names)):
        for pattern in globs:
            if not fnmatch.filter(names, pattern):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
                if key == "kernels" and not difflib.get_close_matches(pattern, names, cutoff=FOREIGN):
                    continue  # another package's kernel
                meant = f"; did you mean {' or '.join(near)}?" if near else ""
                yield _at(quirk, ("when", key), f"{pattern!r} matches nothing{meant}; known: {', '.join(names)}")
    kernels = examples.kernels_of(quirk)
    wanted = quirk.effect.lowering
    if wanted and kernels and not any(set(wanted) & set(kernel.choices) for kernel in kernels):
        shown = ", ".join(kernel.name for kernel in kernels)
        yield _at(quirk, ("effect", "lowering"), f"sets {', '.join(wanted)}, which {shown} do not read")
    if when.kernels and not any(fnmatch.filter(kernel_names, pattern) for pattern in when.kernels):
        return  # an example is a problem of portattn's
    try:
        found = examples.find(quirk, registry)
        registry.target(found.target, found.toolchain)
    except ValueError as error:
        yield _at(quirk, ("when",), f"{quirk.id} can never apply: {error}")


_Pairs = Iterator[tuple[frozenset[str], AuditFinding]]


def _conflicts_by_condition(quirks: list[Quirk], registry: Registry) -> _Pairs:
    """Return pairs that set one choice differently and whose conditions can hold together, for any tuning."""
    for one, two in itertools.combinations(quirks, 2):
        if one.effect.kind != two.effect.kind:
            continue
        differ = [k for k, v in one.effect.sets.items() if two.effect.sets.get(k, v) != v]
        if not differ or not _meet(one, two, registry):
            continue
        message = (
            f"{one.id} and {two.id} can both apply and set {one.effect.kind} {differ[0]} differently: "
            f"{one.effect.sets[differ[0]]!r} and {two.effect.sets[differ[0]]!r}; {SETTLE}"
        )
        yield frozenset((one.id, two.id)), _at(one, ("effect", one.effect.kind, differ[0]), message)


def _meet(one: Quirk, two: Quirk, registry: Registry) -> bool:
    """Return whether both can be active in one plan, at once or after each other's effect."""
    a, b = one.when, two.when
    if not set(examples.arches_of(one, registry)) & set(examples.arches_of(two, registry)):
        return False
    if not {k.name for k in examples.kernels_of(one)} & {k.name for k in examples.kernels_of(two)}:
        return False
    named = {name for name in (*a.toolchain, *b.toolchain) if compilers.is_compiler(name)}
    if len(named) > 1:
        return False
    for name in a.toolchain.keys() & b.toolchain.keys():
        ranges = [parse_range(text) for text in (a.toolchain[name], b.toolchain[name])]
        tried = examples.versions(name, [a.toolchain[name], b.toolchain[name]])
        if not any(all(r.contains(v, prereleases=True) for r in ranges) for v in tried):
            return False
    parsed = [parse(text) for text in (*a.features, *b.features)]
    for name in {c.name for c in parsed}:
        mine = [c for c in parsed if c.name == name]
        if not any(all(c.holds({name: value}) for c in mine) for value in examples.feature_values(name, mine)):
            return False
    conditions_one, conditions_two = ({**q.when.launch, **q.when.lowering} for q in (one, two))
    return (
        _reachable(conditions_one, conditions_two, {})
        or _reachable(conditions_one, conditions_two, one.effect.sets)
        or _reachable(conditions_two, conditions_one, two.effect.sets)
    )


def _reachable(first: Mapping[str, Any], second: Mapping[str, Any], moved: Mapping[str, Any]) -> bool:
    """Return whether a launch and lowering meet `first`, and `second` once the values in `moved` are set."""
    for name in first.keys() | second.keys():
        wanted = [first[name]] if name in first else []
        if name in second and name in moved:
            if not launch_holds(moved[name], second[name]):
                return False
        elif name in second:
            wanted.append(second[name])
        tried = CHOICES[name] if name in CHOICES else examples.launch_values(name, wanted)
        if not any(all(launch_holds(value, w) for w in wanted) for value in tried):
            return False
    return True


def _conflicts_by_planning(registry: Registry, of: Container[str] | None = None) -> _Pairs:
    """Return contradicting pairs in plans of known targets; a plan needs two entries that differ, one in `of`."""
    problems = _problems()
    for target in _targets(registry):
        differing = {kernel.name for kernel in CORES.values() if _differ(kernel.name, target, registry, of)}
        for problem in problems:
            if CORES[problem.op].name not in differing:
                continue
            try:
                plan(problem, target, registry)
            except PathUnavailable:
                if not ROWS[problem.op].gradient_of:  # where no kernel computes gradients torch does, and plans nothing
                    raise
            except QuirkConflict as conflict:
                one = registry.quirks[conflict.quirks[0]]
                message = f"{problem} on {target}: {conflict}"
                yield frozenset(conflict.quirks), _at(one, ("effect", one.effect.kind), message)


def _differ(kernel: str, target: Target, registry: Registry, of: Container[str] | None) -> bool:
    found: dict[tuple[str, str], dict[Any, bool]] = {}  # value by value, whether an entry among `of` sets it
    for quirk in concerning(registry.quirks.values(), kernel, target):
        asked = of is None or quirk.id in of
        for name, value in quirk.effect.sets.items():
            values = found.setdefault((quirk.effect.kind, name), {})
            values[value] = values.get(value, False) or asked
    return any(len(values) > 1 and any(values.values()) for values in found.values())


def _targets(registry: Registry) -> list[Target]:
    return [
        target
        for compiler in compilers.names()
        for release in examples.releases(compiler)
        for target in registry.targets(f"{compiler}=={release}")
        if compiler in (registry.backends[target.backend].compilers or (compiler,))
    ]


def _problems() -> list[Problem]:
    usual: dict[str, Any] = {"batch": 2, "heads_q": 8, "heads_k": 2, "seq_k": 4096}
    return [
        Problem(**usual | tried.problem | change, dtype=dtype, head_dim=head_dim)
        for tried in examples.problems().audit
        for change in tried.each
        for dtype in get_args(Dtype)
        for head_dim in tried.head_dims
    ]
