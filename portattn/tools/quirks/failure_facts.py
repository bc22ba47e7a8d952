"""Facts of a failure, from a log or from an incident; unknown facts stay empty.

Both are other people's: `permitted_env` and `permitted_signature` drop values that would import, read or execute."""

import datetime
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import ArgumentError
from portattn.files import read_limited
from portattn.launch import Signature
from portattn.planning import data_files
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.compile_record import Incident
from portattn.schema.target import Target
from portattn.schema.toolchain import COMPONENTS, Toolchain
from portattn.tools.quirks import recognise
from portattn.tools.quirks.failure_log import Stream, normalise, patterns
from portattn.tools.quirks.probe_plans import Specialisation

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
    """A text to save beside a draft."""

    kind: str  # ttir, ttgir, ptx, or source (a CompilationError's excerpt of a function: not a whole program)
    suffix: str  # of the file to save it in
    text: str
    origin: str
    passes: str = ""  # a reproducer's list of the failed passes, or ""

    @property
    def compiles(self) -> bool:
        return self.kind != "source"


def excerpts(log: str) -> list[Excerpt]:
    """Return whole programs first: modules and PTX in the text, existing files that it names, parts of sources."""
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
    return Excerpt(kind=kind, suffix=f".{kind}", text=text, origin=origin, passes=passes[1] if passes else "")


def _read(path: Path) -> str:
    try:
        return read_limited(path, LARGEST).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def request_in(log: str) -> dict[str, Any] | None:
    """Return the request to a worker that a log quotes, as an incident's command does; None without one."""
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


_SWITCH = re.compile(r"0|1|y|n|on|off|yes|no|true|false", re.IGNORECASE)
_WORDS = re.compile(r"[\w-]*(,[\w-]+)*", re.ASCII)  # what an option's text may be: no path, no program
_KERNELS = ("portattn.kernels.", "portattn.backends.")
# Triton evaluates the layout of a descriptor's type as Python: no text with calls in it gets there.
_TYPE = re.compile(
    r"\*{0,2}k?[a-z]\w*"
    r"|tensordesc<[a-z]\w*\[[\d, ]+\](, ?(NVMMA|Padded|Swizzled)SharedLayout\([\w=, \[\]-]*\))?>"
)


def permitted_env(env: Mapping[str, Any], registry: Registry) -> tuple[dict[str, str], list[str]]:
    """Split variables: permitted ones (switches, exact settings of a quirk's effect), and a line on each other one."""
    effects = [quirk.effect.env or {} for quirk in (*registry.quirks.values(), *registry.retired.values())]
    kept, left_out = {}, []
    for name, value in env.items():
        switch = name in patterns().switches and isinstance(value, str) and _SWITCH.fullmatch(value)
        if switch or any(name in effect and effect[name] == value for effect in effects):
            kept[name] = value
        else:
            why = "no switch of the compiler's, and no quirk sets it so; to have it set, add it to ENV of the program"
            left_out.append(f"variable {name}={value!r}: {why}")
    return kept, left_out


def permitted_signature(given: Mapping[str, Any] | None, registry: Registry) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the signature that a log quotes, as a compile here takes it, and a line on each part that is left out.

    None for a kernel of no installed backend: an import runs code. Texts are plain words: some options name files."""
    if given is None:
        return None, []
    known = {name: given[name] for name in Signature.__struct_fields__ if name in given}
    try:
        signature = msgspec.convert({"small": (), **known}, Signature)
    except msgspec.ValidationError as error:
        return None, [f"the quoted request: this release cannot read its signature ({error})"]
    kernel = f"{signature.module}:{signature.function}"
    brought = {type(backend).__module__.partition(".")[0] for backend in registry.backends.values()} - {"portattn"}
    parts = [*signature.module.split("."), signature.function]
    ours = signature.module.startswith(_KERNELS) or parts[0] in brought
    if not ours or not all(part.isidentifier() for part in parts):
        by_hand = "to try it, write its compile into the program"
        return None, [f"kernel {kernel}: neither portattn's nor an installed backend's, so not imported; {by_hand}"]
    for name, kind in signature.types.items():
        if not _TYPE.fullmatch(kind):
            limit = "must be a scalar, a pointer or a descriptor, such as i32, *fp16 or tensordesc<fp16[64, 128]>"
            return None, [f"kernel {kernel}: the type of argument {name} is {kind!r}, but {limit}"]
    declared = {"num_warps": int, "num_stages": int, **data_files.options()}
    kept: dict[str, bool | int | str] = {}
    left_out = []
    for name, value in signature.options.items():
        if name not in declared:
            why = "no backend declares it"
        elif type(value) is not declared[name]:
            why = f"must be of type {declared[name].__name__}"
        elif isinstance(value, str) and not _WORDS.fullmatch(value):
            why = "must be words of letters, digits, - and _, with commas between them"
        else:
            kept[name] = value
            continue
        by_hand = "to have it set, add it to OPTIONS of the program"
        left_out.append(f"compiler option {name}={value!r}: {why}; {by_hand}")
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(signature, options=kept))
    return found, left_out


def of_incident(incident: Incident, registry: Registry) -> Specialisation | None:
    """Return an incident's specialisation with permitted variables; None for an older release's without its problem."""
    if incident.problem is None or incident.lowering is None or incident.launch is None:
        return None
    env, _ = permitted_env(incident.environment_set, registry)
    return Specialisation(problem=incident.problem, lowering=incident.lowering, launch=incident.launch, env=env)


OP = "quirks new"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    failure: recognise.Failure
    origin: str
    date: datetime.date
    log: str
    backend: str
    at: int = 1  # number of the cause's line in `log`, from 1
    streams: tuple[str, ...] = ()  # ranks or processes whose log lines have it; times: how often
    times: int = 1
    cut: bool = False  # the log ends inside its cause
    arches: tuple[str, ...] = ()
    chip: str = ""
    compiler: str = ""  # NAME==VERSION, or ""
    components: dict[str, str] = {}
    function: str = ""
    kernels: tuple[str, ...] = ()  # portattn's core kernels with the source `function`
    told: dict[str, str] = {}  # fact -> the words that say so, for the reader of a draft
    texts: tuple[Excerpt, ...] = ()
    signature: dict[str, Any] | None = None  # the compiled signature (launch.Signature as plain data); None if unknown
    specialised: Specialisation | None = None
    env: dict[str, str] = {}
    # parts of a log or an incident that a compile here does not take, and why
    left_out: tuple[str, ...] = ()
    command: str = ""
    alike: tuple[str, ...] = ()  # other incidents with the same cause, compiler and kernels

    @property
    def program(self) -> Excerpt | None:
        return next((text for text in self.texts if text.compiles), None)

    def target(self, registry: Registry) -> Target | None:
        if not self.arches or not self.compiler:
            return None
        parts = [self.compiler, *(f"{name}=={version}" for name, version in self.components.items())]
        return registry.target(f"{self.backend}:{self.arches[0]}", ",".join(parts))


def from_log(
    text: str, origin: str, registry: Registry, target: str | None = None, toolchain: str | None = None,
    backend: str | None = None, kernel: str | None = None,
) -> list[Facts]:  # fmt: skip
    """Read a log; return the facts of every failure, in order. The arguments override the log. Raises ArgumentError."""
    if not text.strip():
        limit = "must be a compiler's output, and is empty: did the compile fail? Redirect standard error too (2>&1)"
        raise ArgumentError(OP, "--from-log", origin, limit)
    log = normalise(text)
    failures = recognise.split(log)
    if not failures:
        limit = "must hold the output of a compiler that failed: nothing in it is recognised (docs/logging-a-bug.md)"
        names = recognise.environment_in(log.text, "", registry).described()
        raise ArgumentError(OP, "--from-log", origin, "; it names ".join(filter(None, [limit, names])))
    if all(found.failure.not_a_bug for found in failures):
        limit = f"must be a compiler's failure: {failures[0].failure.cause}; {failures[0].failure.not_a_bug}"
        raise ArgumentError(OP, "--from-log", origin, limit)
    named = _named(registry, target, toolchain, backend, kernel)
    made = [_of_failure(found, log, len(failures) == 1, origin, registry, named) for found in failures]
    if all(facts.failure.not_a_bug for facts in made):
        first = next(facts for facts, found in zip(made, failures, strict=True) if not found.failure.not_a_bug)
        raise ArgumentError(OP, "--from-log", origin, first.failure.not_a_bug)
    return made


def _of_failure(
    found: recognise.LoggedFailure, log: Stream, alone: bool, origin: str, registry: Registry, named: dict[str, Any]
) -> Facts:
    """Return the facts of one failure; chip and compiler come from its own lines, its test's heading, then the log."""
    failure = found.failure
    texts = [log.text] if alone and not found.test else [found.text, found.test, found.rest]
    around, *others = (recognise.environment_in(text, failure.family, registry) for text in texts)
    for other in others:
        around = around.completed(other)
    chosen = named["backend"] or (around.backend.value if around.backend else "")
    if not chosen and not failure.not_a_bug:
        compiling = failure.stage != recognise.UNKNOWN or any(map(compilers.is_compiler, around.versions))
        limit = "must name a chip or a compiler's backend, and names neither: give --target BACKEND:CHIP, or --backend"
        if around.foreign:
            limit = f"must be of a compiler that a backend has, and is one of {around.foreign}; backends"
        elif failure.family == "process" and not compiling:
            limit = "must be a compiler's failure: a process ended, and nothing names a compiler; give --backend"
        stage = "" if around.foreign else f" at stage {failure.stage}"
        seen = f"recognised on line {failure.line}: {failure.cause[:160]} ({failure.symptom}{stage})"
        limit = f"{limit} ({', '.join(registry.backends)}); {seen}"
        limit = "; it names ".join(filter(None, [limit, around.described()]))
        failure = msgspec.structs.replace(failure, not_a_bug=limit)  # others in the log may still be drafted
    owner = registry.backends.get(chosen)
    if owner is not None and not owner.core_path:
        limit = f"must be a backend that runs kernels of portattn's: {chosen} runs its library alone"
        raise ArgumentError(OP, "--backend", chosen, limit)
    compiler = named["toolchain"] or around.compiler
    if owner is not None and owner.compilers and compiler.partition("==")[0] not in owner.compilers:
        if named["toolchain"]:
            limit = f"must be a version of {' or '.join(owner.compilers)}, which compile for {chosen}"
            raise ArgumentError(OP, "--toolchain", compiler, limit)
        compiler = ""
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
        failure=failure, origin=origin, date=datetime.date.today(), log=found.text, backend=chosen, at=found.at,
        streams=found.streams, times=found.times, cut=found.cut, arches=(arch,) if arch else (),
        chip=around.chip if same else "", compiler=compiler,
        components=components | named["components"], function=named["function"] or function,
        kernels=named["kernels"] or around.kernels,
        told={name: value.words for name, value in told.items() if value is not None},
        texts=tuple(_distinct(excerpts(found.text))), signature=signature, env=env, left_out=(*left_out, *more),
    )  # fmt: skip


def _named(
    registry: Registry, target: str | None, toolchain: str | None, backend: str | None, kernel: str | None
) -> dict[str, Any]:
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
        if kernel not in known and not kernel.isidentifier():
            limit = f"must be the name of another package's @triton.jit function, or one of {', '.join(known)}"
            raise ArgumentError(OP, "--kernel", kernel, limit)
        function, kernels = known.get(kernel, kernel), (kernel,)
    return {
        "backend": backend or "", "arch": arch, "toolchain": compiler, "components": components, "function": function,
        "kernels": kernels,
    }  # fmt: skip


# Wrappers print a program again when they pass the error on: the longest of each kind is kept.
def _distinct(found: Iterable[Excerpt]) -> list[Excerpt]:
    kept: dict[str, Excerpt] = {}
    for text in found:
        if text.kind not in kept or len(text.text) > len(kept[text.kind].text):
            kept[text.kind] = text
    return list(kept.values())


def from_incident(incident: Incident, others: Iterable[Incident], registry: Registry) -> Facts:
    """Return an incident's facts. `others` with the same cause, compiler and kernel widen the draft to their chips."""
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
        failure=failure, origin=f"incident {incident.id}", date=incident.date.date(), log=incident.log,
        backend=backend, at=failure.line, arches=tuple(arches),
        compiler=incident.toolchain if incident.toolchain != "none" else "",
        components={name: version for name, version in incident.environment.items() if name in COMPONENTS},
        function=incident.kernel, kernels=tuple(dict.fromkeys(name for name in kernels if name)),
        texts=tuple(_distinct(excerpts(incident.log))), signature=signature, specialised=what, env=env,
        left_out=(*left_out, *more), command=incident.command, alike=tuple(other.id for other in alike),
    )  # fmt: skip


def text_of(incident: Incident) -> str:
    return f"{incident.message}\n{incident.log}"


def failure_of(incident: Incident) -> recognise.Failure:
    """Return the failure of an incident: the incident gives stage and symptom, its log the cause."""
    # "RuntimeError at ttgir: PassManager::run failed": the words after the stage are the compiler's.
    said = incident.message.partition(f" at {incident.stage}: ")[2] or incident.message
    found = recognise.recognise(incident.log) or recognise.recognise(said)
    if incident.symptom in ("hang", "wrong-result"):
        found = None
    if found is None:
        textless = incident.symptom in ("hang", "wrong-result", "slow")
        found = recognise.Failure(
            kind=incident.symptom, family="portattn", stage=incident.stage, symptom=incident.symptom, cause=said,
            line=1, signature="" if textless else recognise.generalise(said),
        )  # fmt: skip
    stage = incident.stage if incident.stage not in ("", recognise.UNKNOWN) else recognise.stage_of(incident.log)
    return msgspec.structs.replace(found, symptom=incident.symptom, stage=stage)
