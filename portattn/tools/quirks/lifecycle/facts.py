"""Facts: what is known of a failure, from a log or from an incident; what is not known stays empty."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from portattn.errors import ArgumentError
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.outcome import Incident
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain
from portattn.tools.quirks.lifecycle.excerpts import Excerpt, excerpts, request_in
from portattn.tools.quirks.lifecycle.recognise import UNKNOWN, Failure, recognise, stage_of
from portattn.tools.quirks.lifecycle.signature import generalise
from portattn.tools.quirks.lifecycle.specialised import Specialised, of_incident
from portattn.tools.quirks.lifecycle.surroundings import surroundings

OP = "quirks new"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A failure, and on what it was seen.

    told       fact -> the words that say so, for the reader of a draft
    compiler   NAME==VERSION; empty where nothing says
    kernels    portattn's core kernels that have `function` for their source
    signature  what the compiler saw (launch.Signature as plain data); None where it is not known
    alike      other incidents with the same cause, compiler and kernels
    """

    failure: Failure
    origin: str
    date: datetime.date
    log: str
    backend: str
    arches: tuple[str, ...] = ()
    chip: str = ""
    compiler: str = ""
    components: dict[str, str] = {}
    function: str = ""
    kernels: tuple[str, ...] = ()
    told: dict[str, str] = {}
    texts: tuple[Excerpt, ...] = ()
    signature: dict[str, Any] | None = None
    specialised: Specialised | None = None
    env: dict[str, str] = {}
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
) -> Facts:
    """Read a log. target, toolchain and backend, where given, count instead of what it says.

    Raises ArgumentError when no failure is recognised, when it is no compiler's, or when the backend cannot be told.
    """
    failure = recognise(text)
    if failure is None:
        limit = "must hold the output of a compiler that failed: nothing in it is recognised (docs/logging-a-bug.md)"
        raise ArgumentError(OP, "--from-log", origin, limit)
    if failure.not_a_bug:
        raise ArgumentError(
            OP, "--from-log", origin, f"must be a compiler's failure: {failure.cause}; {failure.not_a_bug}"
        )
    found = surroundings(text, failure.family, registry)
    named = _named(registry, target, toolchain, backend)
    chosen = named["backend"] or (found.backend.value if found.backend else "")
    if not chosen:
        limit = f"must be given: the log does not say which of {', '.join(registry.backends)} it is about"
        raise ArgumentError(OP, "--backend", backend, limit)
    # What the log says of another backend than the one that was named says nothing about this one.
    same = found.backend is not None and found.backend.value == chosen
    arch = named["arch"] or (found.arch.value if found.arch and same else "")
    told = {"backend": found.backend, "arch": found.arch, "function": found.function, **found.versions}
    request = request_in(text)
    components = {n: t.value for n, t in found.versions.items() if n not in ("triton", "triton-ascend")}
    return Facts(
        failure=failure,
        origin=origin,
        date=datetime.date.today(),
        log=text,
        backend=chosen,
        arches=(arch,) if arch else (),
        chip=found.chip if same else "",
        compiler=named["toolchain"] or found.compiler,
        components=components | named["components"],
        function=found.function.value if found.function else "",
        kernels=found.kernels,
        told={name: value.words for name, value in told.items() if value is not None},
        texts=tuple(_distinct(excerpts(text))),
        signature=request["signature"] if request else None,
        env=request.get("env", {}) if request else {},
    )


def _named(registry: Registry, target: str | None, toolchain: str | None, backend: str | None) -> dict[str, Any]:
    """What the options name. Raises ArgumentError on names that the registry does not know."""
    if backend is not None and backend not in registry.backends:
        raise ArgumentError(OP, "--backend", backend, f"must be one of {', '.join(registry.backends)}")
    arch, compiler, components = "", "", {}
    if target is not None:
        where = registry.target(target, "none")
        if backend not in (None, where.backend):
            raise ArgumentError(OP, "--backend", backend, f"must be {where.backend}, which --target names")
        backend, arch = where.backend, where.arch.name
    if toolchain is not None:
        try:
            parsed = Toolchain.parse(toolchain)
        except ValueError as error:
            raise ArgumentError(OP, "--toolchain", toolchain, str(error).partition(": ")[2]) from None
        compiler, components = str(parsed), dict(parsed.components)
    return {"backend": backend or "", "arch": arch, "toolchain": compiler, "components": components}


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
    what = of_incident(incident)
    alike = [
        other
        for other in others
        if other.id != incident.id
        and other.target.startswith(f"{backend}:")
        and (other.toolchain, other.kernel) == (incident.toolchain, incident.kernel)
        and other.symptom == incident.symptom
        and (not failure.signature or re.search(failure.signature, text_of(other)))
    ]
    kernels = [of.kernel if (of := of_incident(i)) else "" for i in (incident, *alike)]
    if not any(kernels):
        kernels = [kernel.name for kernel in CORES.values() if kernel.function == incident.kernel]
    arches = dict.fromkeys([arch, *(other.target.partition(":")[2] for other in alike)])
    return Facts(
        failure=failure,
        origin=f"incident {incident.id}",
        date=incident.date.date(),
        log=incident.log,
        backend=backend,
        arches=tuple(arches),
        compiler=incident.toolchain if incident.toolchain != "none" else "",
        components=_components(incident),
        function=incident.kernel,
        kernels=tuple(dict.fromkeys(name for name in kernels if name)),
        texts=tuple(_distinct(excerpts(incident.log))),
        signature=incident.specialisation,
        specialised=what,
        env=incident.environment_set,
        command=incident.command,
        alike=tuple(other.id for other in alike),
    )


def text_of(incident: Incident) -> str:
    """All that an incident says, as signatures are matched against it."""
    return f"{incident.message}\n{incident.log}"


def failure_of(incident: Incident) -> Failure:
    """The failure of an incident: what it says of stage and symptom counts, the log gives the cause."""
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
