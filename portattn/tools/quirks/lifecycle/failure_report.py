"""Facts of a failure, from a log or from an incident; unknown facts stay empty."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import ArgumentError
from portattn.files import read_limited
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.compile_record import Incident
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain
from portattn.tools.quirks.lifecycle.environment_from_log import surroundings
from portattn.tools.quirks.lifecycle.normalise import Log, normalise
from portattn.tools.quirks.lifecycle.recognise import UNKNOWN, Failure, recognise, stage_of
from portattn.tools.quirks.lifecycle.signature import generalise
from portattn.tools.quirks.lifecycle.specialised import (
    Specialisation,
    of_incident,
    permitted_env,
    permitted_signature,
)
from portattn.tools.quirks.lifecycle.split import LoggedFailure, split

LARGEST = 4 * 2**20  # bytes of a file that is saved beside a draft
# A module that MLIR printed: aliases, the module, and what a reproducer says about its passes.
_MODULE = re.compile(
    r"(?:^#\w+ = [^\n]*\n)*^module(?: attributes| @\w+)?[^\n]*\{\n(?:.*\n)*?^\}[^\n]*\n?"
    r"(?:\n?\{-#\n(?:.*\n)*?#-\}\n?)?",
    re.MULTILINE,
)
_PTX = re.compile(r"^\.version [\d.]+\n\.target \w+\n(?:.*\n)*?(?=^=====|^Traceback|^\S*ptxas\S* |\Z)", re.MULTILINE)
_SOURCE = re.compile(
    r"CompilationError: at \d+:\d+:\n(?P<source>(?:@[^\n]*\n)*def [^\n]*\n(?:[^\n]*\n)*?)[ ]*\^\n", re.MULTILINE
)
_NAMED = re.compile(r"(?<![\w/])(/[\w./+-]+\.(?:ttir|ttgir|mlir|ttadapter|ptx))\b")
_CUT = re.compile(r"^… \d+ bytes …$", re.MULTILINE)  # what a worker leaves out of a long log (worker/client.py)
# Dialects that show how far a module was lowered.
_GPU = re.compile(r"\bttg\.|\btriton_gpu\.|#blocked")


class Excerpt(msgspec.Struct, frozen=True, kw_only=True):
    """A text to save beside a draft.

    kind     ttir, ttgir, ptx, or source (what a CompilationError shows of a function: not a whole program)
    suffix   of the file to save it in
    passes   what a reproducer says of the passes that failed; empty without one
    """

    kind: str
    suffix: str
    text: str
    origin: str
    passes: str = ""

    @property
    def compiles(self) -> bool:
        """Whether it is a whole program, which a compiler takes."""
        return self.kind != "source"


def excerpts(log: str) -> list[Excerpt]:
    """Whole programs first: modules and PTX in the text, files that it names and that are here, parts of sources."""
    whole = [match.group() for match in _MODULE.finditer(log) if not _CUT.search(match.group())]
    found = [_module(text, "in the log") for text in whole]
    programs = [match.group() for match in _PTX.finditer(log) if not _CUT.search(match.group())]
    found += [Excerpt(kind="ptx", suffix=".ptx", text=text, origin="in the log") for text in programs]
    for name in dict.fromkeys(_NAMED.findall(log)):
        text = _read(Path(name))
        if text and name.endswith(".ptx"):
            found.append(Excerpt(kind="ptx", suffix=".ptx", text=text, origin=name))
        elif text and (match := _MODULE.search(text)):
            found.append(_module(match.group(), name))
    sources = [m["source"] for m in _SOURCE.finditer(log)]
    found += [Excerpt(kind="source", suffix=".txt", text=s, origin="in the log") for s in dict.fromkeys(sources)]
    return found


def _module(text: str, origin: str) -> Excerpt:
    passes = re.search(r"pipeline: \"(.*)\"", text)
    kind = "ttgir" if _GPU.search(text) else "ttir"
    # A pass prints the module as it was before it: with this suffix Triton runs the passes that make TTGIR on it.
    return Excerpt(kind=kind, suffix=".ttir", text=text, origin=origin, passes=passes[1] if passes else "")


def _read(path: Path) -> str:
    """Return a file that a log names; empty if it is not here any more, is no regular file, or is too large to keep."""
    try:
        return read_limited(path, LARGEST).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def request_in(log: str) -> dict[str, Any] | None:
    """The request to a worker that a log quotes, as the command of an incident does; None without one."""
    for match in re.finditer(r"\{\"version\": \d+, \"task\": \"compile\"", log):
        try:
            found, _ = json.JSONDecoder().raw_decode(log, match.start())
        except ValueError:
            continue  # cut short, or quoted in a way that changed it
        if not isinstance(found, dict) or "target" not in found:
            continue
        if isinstance(found.get("signature"), dict) and isinstance(found.get("env", {}), dict):
            return found
    return None


OP = "quirks new"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A failure, and on what it was seen.

    told       fact -> the words that say so, for the reader of a draft
    compiler   NAME==VERSION; empty where nothing says
    kernels    portattn's core kernels that have `function` for their source
    at         number of the cause's line in `log`, from 1
    streams    ranks or processes whose lines of a log tell of it; times: how often it stands there
    cut        the log ends inside its cause
    signature  what the compiler saw (launch.Signature as plain data); None where it is not known
    left_out   what a log or an incident says and a compile here does not take, and why (specialised.py)
    alike      other incidents with the same cause, compiler and kernels
    """

    failure: Failure
    origin: str
    date: datetime.date
    log: str
    backend: str
    at: int = 1
    streams: tuple[str, ...] = ()
    times: int = 1
    cut: bool = False
    arches: tuple[str, ...] = ()
    chip: str = ""
    compiler: str = ""
    components: dict[str, str] = {}
    function: str = ""
    kernels: tuple[str, ...] = ()
    told: dict[str, str] = {}
    texts: tuple[Excerpt, ...] = ()
    signature: dict[str, Any] | None = None
    specialised: Specialisation | None = None
    env: dict[str, str] = {}
    left_out: tuple[str, ...] = ()
    command: str = ""
    alike: tuple[str, ...] = ()

    @property
    def program(self) -> Excerpt | None:
        """The whole program that the log carries, if it carries one."""
        return next((text for text in self.texts if text.compiles), None)

    def target(self, registry: Registry) -> Target | None:
        """Where it failed; None where chip or compiler are not known."""
        if not self.arches or not self.compiler:
            return None
        parts = [self.compiler, *(f"{name}=={version}" for name, version in self.components.items())]
        return registry.target(f"{self.backend}:{self.arches[0]}", ",".join(parts))


def from_log(
    text: str,
    origin: str,
    registry: Registry,
    target: str | None = None,
    toolchain: str | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> list[Facts]:
    """Read a log, and return the facts of every failure in it, in order.

    The arguments (target, toolchain, backend, kernel) override the log. Raises ArgumentError if no failure is
    recognised, if no failure is a compiler's, or if the backend of a failure cannot be told.
    """
    log = normalise(text)
    failures = split(log)
    if not failures:
        limit = "must hold the output of a compiler that failed: nothing in it is recognised (docs/logging-a-bug.md)"
        raise ArgumentError(OP, "--from-log", origin, limit)
    if all(found.failure.not_a_bug for found in failures):
        failure = failures[0].failure
        raise ArgumentError(
            OP, "--from-log", origin, f"must be a compiler's failure: {failure.cause}; {failure.not_a_bug}"
        )
    named = _named(registry, target, toolchain, backend, kernel)
    return [_of_failure(found, log, len(failures) == 1, origin, registry, named) for found in failures]


def _of_failure(
    found: LoggedFailure, log: Log, alone: bool, origin: str, registry: Registry, named: dict[str, Any]
) -> Facts:
    """The facts of one failure of a log. What its own lines do not say of chip and compiler, its test's heading does,
    and then the rest of the log."""
    failure = found.failure
    texts = [log.text] if alone and not found.test else [found.text, found.test, found.rest]
    around, *others = (surroundings(text, failure.family, registry) for text in texts)
    for other in others:
        around = around.completed(other)
    chosen = named["backend"] or (around.backend.value if around.backend else "")
    if not chosen and not failure.not_a_bug:
        if failure.family == "process" and not any(map(compilers.is_compiler, around.versions)):
            said = f"{failure.cause!r} (line {failure.line}) says that a process ended, and nothing names a compiler"
            raise ArgumentError(
                OP, "--from-log", origin, f"must be a compiler's failure: {said}; give --backend if one did"
            )
        which = "must name a chip or a compiler's backend, and names neither: give --target BACKEND:CHIP"
        where = "" if alone else f" (line {failure.line}: {failure.cause[:80]})"
        limit = f"{which}, or --backend ({', '.join(registry.backends)}){where}"
        raise ArgumentError(OP, "--from-log", origin, limit)
    # What the log says of another backend than the one that was named says nothing about this one.
    same = around.backend is not None and around.backend.value == chosen
    arch = named["arch"] or (around.arch.value if around.arch and same else "")
    told = {"backend": around.backend, "arch": around.arch, **around.versions}
    told["function"] = None if named["function"] else around.function
    request = request_in(found.text) or {}
    env, left_out = permitted_env(request.get("env", {}), registry)
    signature, more = permitted_signature(request.get("signature"), registry)
    components = {n: t.value for n, t in around.versions.items() if not compilers.is_compiler(n)}
    function = around.function.value if around.function else ""
    return Facts(
        failure=failure,
        origin=origin,
        date=datetime.date.today(),
        log=found.text,
        backend=chosen,
        at=found.at,
        streams=found.streams,
        times=found.times,
        cut=found.cut,
        arches=(arch,) if arch else (),
        chip=around.chip if same else "",
        compiler=named["toolchain"] or around.compiler,
        components=components | named["components"],
        function=named["function"] or function,
        kernels=named["kernels"] or around.kernels,
        told={name: value.words for name, value in told.items() if value is not None},
        texts=tuple(_distinct(excerpts(found.text))),
        signature=signature,
        env=env,
        left_out=(*left_out, *more),
    )


def _named(
    registry: Registry, target: str | None, toolchain: str | None, backend: str | None, kernel: str | None
) -> dict[str, Any]:
    """What the options name. Raises ArgumentError on names that the registry does not know."""
    if backend is not None and backend not in registry.backends:
        raise ArgumentError(OP, "--backend", backend, f"must be one of {', '.join(registry.backends)}")
    arch, compiler, components = "", "", {}
    if target is not None:
        try:
            where = registry.target(target, "none")
        except ArgumentError as error:
            raise ArgumentError(OP, "--target", target, error.limit) from None
        if backend not in (None, where.backend):
            raise ArgumentError(OP, "--backend", backend, f"must be {where.backend}, which --target names")
        backend, arch = where.backend, where.arch.name
    if toolchain is not None:
        try:
            parsed = Toolchain.parse(toolchain)
        except ValueError as error:
            raise ArgumentError(OP, "--toolchain", toolchain, str(error).partition(": ")[2]) from None
        compiler, components = str(parsed), dict(parsed.components)
    function = ""
    kernels: tuple[str, ...] = ()
    if kernel is not None:
        known = {core.name: core.function for core in CORES.values()}
        known |= dict.fromkeys(registry.variant_names(), "")  # of several functions each
        if kernel not in known:
            raise ArgumentError(OP, "--kernel", kernel, f"must be one of {', '.join(known)}")
        function, kernels = known[kernel], (kernel,)
    return {
        "backend": backend or "", "arch": arch, "toolchain": compiler, "components": components, "function": function,
        "kernels": kernels,
    }  # fmt: skip


def _distinct(found: Iterable[Excerpt]) -> list[Excerpt]:
    """One of each kind, the longest: logs print a program twice, once by each who passes the error on."""
    kept: dict[str, Excerpt] = {}
    for text in found:
        if text.kind not in kept or len(text.text) > len(kept[text.kind].text):
            kept[text.kind] = text
    return list(kept.values())


def from_incident(incident: Incident, others: Iterable[Incident], registry: Registry) -> Facts:
    """What an incident knows. `others` with the same cause, compiler and kernel widen the draft to their chips."""
    failure = failure_of(incident)
    backend, _, arch = incident.target.partition(":")
    what = of_incident(incident, registry)
    env, left_out = permitted_env(incident.environment_set, registry)
    signature, more = permitted_signature(incident.specialisation, registry)
    alike = [
        other
        for other in others
        if other.id != incident.id
        and other.target.startswith(f"{backend}:")
        and (other.toolchain, other.kernel) == (incident.toolchain, incident.kernel)
        and other.symptom == incident.symptom
        and (not failure.signature or re.search(failure.signature, text_of(other)))
    ]
    kernels = [of.kernel if (of := of_incident(i, registry)) else "" for i in (incident, *alike)]
    if not any(kernels):
        kernels = [kernel.name for kernel in CORES.values() if incident.kernel in kernel.functions]
    arches = dict.fromkeys([arch, *(other.target.partition(":")[2] for other in alike)])
    return Facts(
        failure=failure,
        origin=f"incident {incident.id}",
        date=incident.date.date(),
        log=incident.log,
        backend=backend,
        at=failure.line,
        arches=tuple(arches),
        compiler=incident.toolchain if incident.toolchain != "none" else "",
        components=_components(incident),
        function=incident.kernel,
        kernels=tuple(dict.fromkeys(name for name in kernels if name)),
        texts=tuple(_distinct(excerpts(incident.log))),
        signature=signature,
        specialised=what,
        env=env,
        left_out=(*left_out, *more),
        command=incident.command,
        alike=tuple(other.id for other in alike),
    )


def text_of(incident: Incident) -> str:
    """Return an incident's text, which signatures are matched against."""
    return f"{incident.message}\n{incident.log}"


def failure_of(incident: Incident) -> Failure:
    """Return the failure of an incident: the incident gives stage and symptom, its log the cause."""
    # "RuntimeError at ttgir: PassManager::run failed": the words after the stage are the compiler's.
    said = incident.message.partition(f" at {incident.stage}: ")[2] or incident.message
    found = recognise(incident.log) or recognise(said)
    if incident.symptom in ("hang", "wrong-result"):
        found = None
    if found is None:
        textless = incident.symptom in ("hang", "wrong-result", "slow")
        found = Failure(
            kind=incident.symptom, family="portattn", stage=incident.stage, symptom=incident.symptom, cause=said,
            line=1, signature="" if textless else generalise(said),
        )  # fmt: skip
    stage = incident.stage if incident.stage not in ("", UNKNOWN) else stage_of(incident.log)
    return msgspec.structs.replace(found, symptom=incident.symptom, stage=stage)


def _components(incident: Incident) -> dict[str, str]:
    from portattn.schema.toolchain import COMPONENTS

    return {name: version for name, version in incident.environment.items() if name in COMPONENTS}
