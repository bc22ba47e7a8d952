"""What `portattn doctor` looks at. Each probe is guarded: its failure becomes a line of the report."""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import os
import platform
import warnings
from collections.abc import Callable, Sequence

import msgspec

from portattn.cli.checked import Check
from portattn.config import ENVIRONMENT, IGNORED, current, from_environment, unknown_variables
from portattn.errors import PluginWarning
from portattn.files import cache_folder, takes_no_files
from portattn.source_tree import install_extra
from portattn.version import __version__

CALL_SECONDS = 180.0  # limit of one real call: a first compile may be part of it


class Item(msgspec.Struct, frozen=True):
    name: str
    value: str


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the report.

    error     why it could not be made
    errors    what is wrong with something in it, beside what else it shows
    warnings  what in it wants attention
    """

    title: str
    items: tuple[Item, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str = ""
    errors: tuple[str, ...] = ()


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    sections: tuple[Section, ...]
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        return not any(s.error or s.errors for s in self.sections) and not any(c.outcome == "FAIL" for c in self.checks)


def examine(say: Callable[[str], None], emulate: str = "") -> DoctorReport:
    """Make the report; `say` is told what is being looked at. Never raises.

    emulate  an AMD arch in whose model a real kernel runs too
    """
    probes: list[tuple[str, Callable[[], Section]]] = [
        ("versions", versions),
        ("toolchain", toolchain),
        ("compilers", compilers),
        ("backends", backends),
        ("settings", settings),
        ("cache", cache),
        ("launches", launches),
        ("quirks that apply here", quirks),
        ("paths taken here", paths),
    ]
    sections: list[Section] = []
    with warnings.catch_warnings():
        # The report itself says what they would: a broken package, an unknown variable, a cache folder without files.
        warnings.simplefilter("ignore", PluginWarning)
        warnings.filterwarnings("ignore", "compile records cannot be kept under")
        warnings.filterwarnings("ignore", IGNORED)
        for title, probe in probes:
            say(f"looking at {title}")
            sections.append(said_once(probe_section(title, probe), sections))
        checks = [said_before(check, sections) for check in calls(say, emulate)]
    return DoctorReport(sections=tuple(sections), checks=tuple(checks))


def said_once(section: Section, before: Sequence[Section]) -> Section:
    """A section that could not be made for the reason that an earlier one has: it names that one."""
    first = next((one.title for one in before if section.error and one.error == section.error), "")
    return msgspec.structs.replace(section, error=f"the same as of `{first}`") if first else section


def said_before(check: Check, sections: Sequence[Section]) -> Check:
    """A call that failed for the reason for which a section could not be made: it names that one."""
    first = next((one.title for one in sections if one.error and one.error == check.detail), "")
    return msgspec.structs.replace(check, detail=f"the same as of `{first}`") if first else check


def probe_section(title: str, probe: Callable[[], Section]) -> Section:
    """The probe's section, or one that says why there is none."""
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - a report about a broken machine must not break on it
        return Section(title=title, error=f"{type(error).__name__}: {error}")


def versions() -> Section:
    items = [Item("portattn", __version__), Item("python", platform.python_version())]
    items.append(Item("system", f"{platform.system()} {platform.release()} {platform.machine()}"))
    for name in ("torch", "torch-npu", "numpy"):
        try:
            items.append(Item(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            items.append(Item(name, "not installed"))
    return Section(title="versions", items=tuple(items))


def toolchain() -> Section:
    from pathlib import Path

    from portattn.schema.toolchain import installed_toolchain, owners

    found = installed_toolchain()
    if not found:
        hint = f"Triton is not installed: {install_extra('triton')}, or triton-ascend on an NPU"
        return Section(title="toolchain", items=(Item("compiler", "none"),), warnings=(hint,))
    claims = owners(Path(found.path))
    items = [Item("compiler", str(found)), Item("path", found.path)]
    items.append(Item("claimed by", ", ".join(f"{name}=={version}" for name, version in claims) or "no distribution"))
    items += [Item(name, version) for name, version in found.components]
    attention = []
    if len(claims) > 1:
        last = f"{claims[-1][0]}=={claims[-1][1]}"
        attention.append(
            f"{len(claims)} distributions claim triton/, and one overwrote another (last written: {last}): "
            "uninstall all of them, and install the one that is wanted"
        )
    if not claims:
        attention.append(
            "no installed distribution owns triton/: its version cannot be told, and no quirk's range holds"
        )
    attention += hidden_triton_folders(Path(found.path))
    return Section(title="toolchain", items=tuple(items), warnings=tuple(attention))


def compilers() -> Section:
    """Every compiler that is known: which package knows it, for none brings one along, and what of it is here."""
    from portattn.schema import compilers as known
    from portattn.schema.toolchain import installed_beside, installed_toolchain

    here = {one.distribution: one.version for one in (installed_toolchain(), *installed_beside())}
    items = []
    for name, one in known.all_compilers().items():
        state = f"installed {here[name]}" if name in here else "not installed"
        beside = "" if one.package == known.TRITON else f", added to Triton as {one.package}"
        names = f"; also named {', '.join(one.aliases)}" if one.aliases else ""
        items.append(Item(name, f"{state}{beside}; known to {one.brought_by}{names}"))
    return Section(title="compilers", items=tuple(items))


def hidden_triton_folders(folder: object) -> list[str]:
    """Other `triton` folders on the import path, which the one in use hides."""
    import sys
    from pathlib import Path

    seen = {Path(str(folder)).resolve()}
    found = []
    for place in sys.path:
        other = Path(place or ".") / "triton" / "__init__.py"
        if other.is_file() and other.parent.resolve() not in seen:
            seen.add(other.parent.resolve())
            found.append(f"{other.parent} is hidden by {folder}")
    return found


def backends() -> Section:
    from portattn.planning import plugins
    from portattn.planning.registry import Registry, own_backends

    items, errors = [], []
    registry = Registry.load()
    own = own_backends()
    for name, backend in registry.backends.items():
        try:
            arch = plugins.ask_backend(backend, "detect", own)
            components = (plugins.ask_backend(backend, "machine_components", own) or {}) if arch else {}
        except Exception as error:  # noqa: BLE001 - one backend's trouble must not hide the others
            errors.append(f"{name}: {type(error).__name__}: {error}")
            continue
        vendors = ", ".join(v.name for v in backend.vendor)
        paths = f"paths: {', '.join(p for p in (backend.core_path, vendors, 'reference') if p)}"
        versions = "".join(f", {component} {version}" for component, version in components.items())
        items.append(Item(name, f"{arch}{versions}; {paths}" if arch else "no device here"))
    errors += [one.told() for one in (*registry.broken, *plugins.disabled_backends())]
    return Section(title="backends", items=tuple(items), errors=tuple(errors))


def settings() -> Section:
    from_environment(os.environ)  # a bad value, which would raise at the first call, shows here
    now = current()
    variables = {field: variable for variable, field in ENVIRONMENT.items()}
    items = []
    for name in now.__struct_fields__:
        variable = variables.get(name, "")
        origin = f"  (from {variable})" if variable in os.environ else ""
        items.append(Item(name, f"{getattr(now, name) or '(default)'}{origin}"))
    unknown = unknown_variables(os.environ)
    ignored = (f"{IGNORED}: {', '.join(unknown)}",) if unknown else ()
    return Section(title="settings", items=tuple(items), warnings=ignored)


def cache() -> Section:
    from portattn.compile.store import store
    from portattn.config import current

    found = store(current())
    whole, absent = found.count()
    incidents = list(found.incidents())
    kept = (
        f"{whole}; {absent} more files are broken, or an older release's, and count as absent" if absent else f"{whole}"
    )
    items = [Item("folder", str(found.folder)), Item("compile records", kept), Item("incidents", str(len(incidents)))]
    items += [
        Item(incident.id, f"{incident.symptom} on {incident.target}: {incident.message}") for incident in incidents[-5:]
    ]
    why = takes_no_files(found.folder)
    errors = (f"no file can be written there ({why}): set PORTATTN_CACHE_DIR to a folder that takes files",)
    return Section(title="cache", items=tuple(items), errors=errors if why else ())


def launches() -> Section:
    """How kept calls are launched on an NVIDIA GPU."""
    from portattn.config import current
    from portattn.launch import native, triton_compat

    directory = current().cache_dir
    module, why = native.load(directory)
    items = [Item("by", "C functions" if module else "Python, through ctypes: some microseconds a call more")]
    if not module and takes_no_files(cache_folder(directory)):
        why = "no file can be written to the cache folder"  # what the section `cache` says
    items.append(Item("library", str(native.path(directory)) if module else f"none: {why}"))
    attention = []
    try:
        known = triton_compat.version() in triton_compat.KNOWN
    except ImportError:
        known = True
    if not known:
        attention.append(
            "this Triton has not been checked: it launches every call itself, which takes tens of microseconds"
        )
    return Section(title="launches", items=tuple(items), warnings=tuple(attention))


def quirks() -> Section:
    from portattn.planning.detect_target import devices
    from portattn.planning.kernel_specs import KERNEL_NAMES
    from portattn.planning.registry import Registry

    items = []
    for target in devices():
        for quirk in Registry.load().quirks.values():
            concerned = any(quirk.concerns(kernel, target) for kernel in KERNEL_NAMES)
            if concerned and quirk.in_range(target.toolchain):
                items.append(Item(quirk.id, f"{quirk.sentence()}\n{quirk.evidence.upstream}"))
    if not items:
        items.append(Item("none", "no quirk's conditions can hold on this machine"))
    return Section(title="quirks that apply here", items=tuple(items))


def paths() -> Section:
    """Which path each operation takes on this machine's devices, and what it costs where that is not the core's.

    A path depends on the problem, so each item names the one that was planned: the first of the op's canaries.
    """
    from portattn.compile.store import store
    from portattn.config import current
    from portattn.planning.detect_target import devices
    from portattn.planning.planner import plan
    from portattn.planning.registry import Registry
    from portattn.testing.canary import CASES

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
            items.append(Item(f"{target.name} {op}", "\n".join(lines)))
            if made.fell_back:
                fallen.setdefault(f"on {target.name} to the {made.path} path", []).append(op)
    told = tuple(f"falls back {where}: {', '.join(ops)}" for where, ops in fallen.items())
    return Section(title="paths taken here", items=tuple(items), warnings=told)


def calls(say: Callable[[str], None], emulate: str = "") -> list[Check]:
    """One real call on each device, each path in a child; and the kernels under the interpreter where that runs."""
    from portattn.cli.calls import device_checks, emulated_check, interpreter_check

    found: list[Check] = []
    checks: list[tuple[str, Callable[[float], list[Check]]]] = [
        ("devices", device_checks), ("interpreter", interpreter_check),
    ]  # fmt: skip
    if emulate:
        checks.append((f"a model of {emulate}", functools.partial(emulated_check, emulate)))
    for name, check in checks:
        say(f"calling attention: {name}")
        try:
            found += check(CALL_SECONDS)
        except Exception as error:  # noqa: BLE001 - as in `probe_section`
            found.append(Check(name=name, outcome="FAIL", detail=f"{type(error).__name__}: {error}"))
    return found
