"""`portattn doctor`: installed and working parts, warnings, real calls; a part's failure becomes a line."""

import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import click
import msgspec

from portattn.cli import RED
from portattn.cli.output import emit_json, heading, json_option, pairs
from portattn.compile.record_store import store
from portattn.config import ENVIRONMENT, IGNORED, current, from_environment, unknown_variables
from portattn.errors import PluginWarning
from portattn.files import cache_folder, takes_no_files
from portattn.launch import native, triton_compat
from portattn.planning import plugins
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, devices, own_backends, parse_target
from portattn.schema import compilers as known_compilers
from portattn.schema.problem import Problem
from portattn.schema.toolchain import installed_beside, installed_toolchain, owners
from portattn.source_tree import install_extra
from portattn.testing.canary import CASES
from portattn.testing.executor import COMPARE, Interpreter, request_of
from portattn.testing.findings import Numerics, figure, numerics
from portattn.tools.matrix.provenance import installed_packages
from portattn.version import __version__
from portattn.worker.client import Worker


class Check(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    outcome: Literal["PASS", "FAIL", "SKIP"]
    detail: str
    error: float | None = None
    budget: float | None = None


# Small enough for an interpreter, with a ragged last tile, grouped heads, a mask and lengths.
PROBLEM = Problem(
    op="attention", batch=2, heads_q=4, heads_k=2, seq_q=77, seq_k=77, head_dim=64, dtype="fp16",
    causal="bottom_right", seqlens_k=True, return_lse=True,
)  # fmt: skip


def device_checks(seconds: float) -> list[Check]:
    found = []
    for target in devices():
        made = plan(PROBLEM, target, records=store(current()), settings=current())
        kind = Registry.load().backends[target.backend].device_type
        with Worker(runs="kernels") as worker:
            reply = worker.request(COMPARE, seconds, **request_of(made, PROBLEM, made.path, target.name, kind))
        found.append(_check_of(f"{target.name}, {made.path} path", numerics(reply, str(target), PROBLEM)))
    return found


def _check_of(name: str, seen: Numerics | str) -> Check:
    if isinstance(seen, str):
        return Check(name=name, outcome="SKIP", detail=seen)
    outcome: Literal["PASS", "FAIL"] = "PASS" if seen.outcome == "pass" else "FAIL"
    return Check(name=name, outcome=outcome, detail=figure(seen), error=seen.error, budget=seen.budget)


def interpreter_check(seconds: float) -> list[Check]:
    interpreter = Interpreter(seconds)
    seen: Numerics | str = interpreter.missing
    if not seen:
        with Worker(runs="interpreter") as worker:
            settings = msgspec.structs.replace(current(), backend="interpreter", quirks="")
            seen = interpreter.check(plan(PROBLEM, parse_target("cpu:generic"), settings=settings), worker)
    return [_check_of("interpreter, dense_forward", seen)]


CALL_SECONDS = 180.0  # limit of one real call: a first compile may be part of it


class Item(msgspec.Struct, frozen=True):
    name: str
    value: str


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the report. error: why it could not be made; errors, warnings: faults and notes of its parts."""

    title: str
    items: tuple[Item, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str = ""
    errors: tuple[str, ...] = ()


def _section(
    title: str, items: Iterable[tuple[str, str]], warnings: Iterable[str] = (), errors: Iterable[str] = ()
) -> Section:
    made = tuple(Item(name, value) for name, value in items)
    return Section(title=title, items=made, warnings=tuple(filter(None, warnings)), errors=tuple(errors))


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    sections: tuple[Section, ...]
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        return not any(s.error or s.errors for s in self.sections) and not any(c.outcome == "FAIL" for c in self.checks)


def examine(say: Callable[[str], None]) -> DoctorReport:
    """Make the report; `say` gets the current step. Never raises."""
    probes: dict[str, Callable[[], Section]] = {
        "versions": versions, "toolchain": toolchain, "compilers": compilers, "backends": backends,
        "settings": settings, "cache": cache, "launches": launches, "quirks that apply here": quirks,
        "paths taken here": paths,
    }  # fmt: skip
    sections: list[Section] = []
    with warnings.catch_warnings():
        # The report itself says what they would: a broken package, an unknown variable, a cache folder without files.
        warnings.simplefilter("ignore", PluginWarning)
        warnings.filterwarnings("ignore", "compile records cannot be kept under")
        warnings.filterwarnings("ignore", IGNORED)
        for title, probe in probes.items():
            say(f"looking at {title}")
            section = probe_section(title, probe)
            sections.append(msgspec.structs.replace(section, error=_said(section.error, sections)))
        checks = (msgspec.structs.replace(one, detail=_said(one.detail, sections)) for one in calls(say))
        return DoctorReport(sections=tuple(sections), checks=tuple(checks))


def _said(error: str, before: Sequence[Section]) -> str:
    first = next((one.title for one in before if error and one.error == error), "")
    return f"the same as of `{first}`" if first else error


def probe_section(title: str, probe: Callable[[], Section]) -> Section:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - a report about a broken machine must not break on it
        return Section(title=title, error=f"{type(error).__name__}: {error}")


def versions() -> Section:
    names = ("torch", "torch-npu", "numpy")
    found = installed_packages(names)
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    own = {"portattn": __version__, "python": platform.python_version(), "system": system}
    return _section("versions", (own | {name: found.get(name, "not installed") for name in names}).items())


def toolchain() -> Section:
    found = installed_toolchain()
    if not found:
        hint = f"Triton is not installed: {install_extra('triton')}, or triton-ascend on an NPU"
        return _section("toolchain", [("compiler", "none")], [hint])
    claims = [f"{name}=={version}" for name, version in owners(Path(found.path))]
    attention = ""
    if len(claims) > 1:
        attention = (
            f"{len(claims)} distributions claim triton/, and one overwrote another (last written: {claims[-1]}): "
            "uninstall all of them, and install the one that is wanted"
        )
    elif not claims:
        attention = "no installed distribution owns triton/: its version cannot be told, and no quirk's range holds"
    items = [("compiler", str(found)), ("path", found.path), ("claimed by", ", ".join(claims) or "no distribution")]
    return _section("toolchain", [*items, *found.components], [attention, *hidden_triton_folders(Path(found.path))])


def compilers() -> Section:
    here = {one.distribution: one.version for one in (installed_toolchain(), *installed_beside())}
    items = []
    for name, one in known_compilers.all_compilers().items():
        state = f"installed {here[name]}" if name in here else "not installed"
        beside = "" if one.package == known_compilers.TRITON else f", added to Triton as {one.package}"
        names = f"; also named {', '.join(one.aliases)}" if one.aliases else ""
        items.append((name, f"{state}{beside}; known to {one.brought_by}{names}"))
    return _section("compilers", items)


def hidden_triton_folders(folder: object) -> list[str]:
    seen = {Path(str(folder)).resolve()}
    found = []
    for place in sys.path:
        other = Path(place or ".") / "triton" / "__init__.py"
        if other.is_file() and other.parent.resolve() not in seen:
            seen.add(other.parent.resolve())
            found.append(f"{other.parent} is hidden by {folder}")
    return found


def backends() -> Section:
    items, errors = [], []
    registry = Registry.load()
    own = own_backends()
    for name, backend in registry.backends.items():
        try:
            arch = plugins.ask_backend(backend, "detect", own)
            seen = plugins.ask_backend(backend, "describe", own)
            trouble = plugins.ask_backend(backend, "trouble", own)
            components = (plugins.ask_backend(backend, "machine_components", own) or {}) if arch else {}
        except Exception as error:  # noqa: BLE001 - one backend's trouble must not hide the others
            errors.append(f"{name}: {type(error).__name__}: {error}")
            continue
        vendors = ", ".join(v.name for v in backend.vendor)
        paths = f"paths: {', '.join(p for p in (backend.core_path, vendors, 'reference') if p)}"
        versions = "".join(f", {component} {version}" for component, version in components.items())
        shown = f"{arch} ({seen})" if arch and seen else arch or (f"no arch of {seen}" if seen else "no device here")
        shown = f"not detected: {trouble}" if trouble else shown
        items.append((name, f"{shown}{versions}; {paths}" if arch else shown))
    errors += [one.told() for one in (*registry.broken, *plugins.disabled_backends())]
    return _section("backends", items, errors=errors)


def settings() -> Section:
    from_environment(os.environ)  # a bad value, which would raise at the first call, shows here
    now = current()
    variables = {field: variable for variable, field in ENVIRONMENT.items()}
    items = []
    for name in now.__struct_fields__:
        variable = variables.get(name, "")
        origin = f"  (from {variable})" if variable in os.environ else ""
        items.append((name, f"{getattr(now, name) or '(default)'}{origin}"))
    unknown = unknown_variables(os.environ)
    return _section("settings", items, [f"{IGNORED}: {', '.join(unknown)}" if unknown else ""])


def cache() -> Section:
    found = store(current())
    whole, absent = found.count()
    incidents = list(found.incidents())
    more = f"; {absent} more files are broken, or an older release's, and count as absent" if absent else ""
    counts = {"folder": found.folder, "compile records": f"{whole}{more}", "incidents": len(incidents)}
    items = [(name, str(value)) for name, value in counts.items()]
    items += [(one.id, f"{one.symptom} on {one.target}: {one.message}") for one in incidents[-5:]]
    why = takes_no_files(found.folder)
    errors = (f"no file can be written there ({why}): set PORTATTN_CACHE_DIR to a folder that takes files",)
    return _section("cache", items, errors=errors if why else ())


def launches() -> Section:
    directory = current().cache_dir
    module, why = native.load(directory)
    if not module and takes_no_files(cache_folder(directory)):
        why = "no file can be written to the cache folder"  # what the section `cache` says
    items = [
        ("by", "C functions" if module else "Python, through ctypes: some microseconds a call more"),
        ("library", str(native.path(directory)) if module else f"none: {why}"),
    ]
    attention = "this Triton has not been checked: it launches every call itself, which takes tens of microseconds"
    try:
        known = triton_compat.version() in triton_compat.KNOWN
    except ImportError:
        known = True
    return _section("launches", items, [] if known else [attention])


def quirks() -> Section:
    items = []
    for target in devices():
        for quirk in Registry.load().quirks.values():
            concerned = any(quirk.concerns(kernel, target) for kernel in KERNEL_NAMES)
            if concerned and quirk.in_range(target.toolchain):
                items.append((quirk.id, f"{quirk.sentence()}\n{quirk.evidence.upstream}"))
    return _section("quirks that apply here", items or [("none", "no quirk's conditions can hold on this machine")])


def paths() -> Section:
    items, fallen = [], dict[str, list[str]]()
    known = Registry.load().quirks
    for target in devices():
        for op, problems in CASES.items():
            made = plan(problems[0], target, records=store(current()), settings=current())
            lines = [f"{made.path} path", f"planned for {made.problem}"]
            for no in made.rejected:
                lines.append(f"not {no.path}: {no.reason}" + (f" (hint: {no.hint})" if no.hint else ""))
            for name in dict.fromkeys([q.id for q in made.quirks] + [no.quirk for no in made.rejected if no.quirk]):
                cost = known[name].effect.cost if name in known else ""
                lines.append(f"{name}" + (f" costs: {cost}" if cost else ""))
            items.append((f"{target.name} {op}", "\n".join(lines)))
            if made.fell_back:
                fallen.setdefault(f"on {target.name} to the {made.path} path", []).append(op)
    return _section("paths taken here", items, [f"falls back {at}: {', '.join(ops)}" for at, ops in fallen.items()])


def calls(say: Callable[[str], None]) -> list[Check]:
    found: list[Check] = []
    checks: dict[str, Callable[[float], list[Check]]] = {"devices": device_checks, "interpreter": interpreter_check}
    for name, check in checks.items():
        say(f"calling attention: {name}")
        try:
            found += check(CALL_SECONDS)
        except Exception as error:  # noqa: BLE001 - as in `probe_section`
            found.append(Check(name=name, outcome="FAIL", detail=f"{type(error).__name__}: {error}"))
    return found


COLOURS = {"PASS": "green", "FAIL": "red", "SKIP": "yellow"}


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Report the toolchain, backends, settings, the quirks that apply here, and one real call per device.

    What cannot be found out is reported as such: one broken part never hides the rest.

    Exit status 1: a call gave wrong numbers or failed, a part of the report could not be made, the cache folder takes
    no files, or an installed backend package is broken."""
    from rich.console import Console

    with Console(stderr=True).status("looking around") as status:
        report = examine(status.update)
    if as_json:
        emit_json(report)
    else:
        for section in report.sections:
            heading(section.title)
            pairs((item.name, item.value) for item in section.items)
            for lines, colour in ((section.warnings, "yellow"), (section.errors, "red")):
                for line in lines:
                    click.secho(f"  ! {line}", fg=colour)
            if section.error:
                click.secho(f"  could not be found out: {section.error}", fg="red")
        heading("calls")
        for check in report.checks:
            word = click.style(f"{check.outcome:<5}", fg=COLOURS[check.outcome])
            click.echo(f"  {word}{check.name}: {check.detail}")
    if not report.healthy:
        raise click.exceptions.Exit(RED)
