"""Kernels of other packages as subjects: a file's entries, and runs of their compiled code against the interpreter.

A KernelCase is an entry of the file of `matrix run --kernels` (docs/ci.md) with a digest of its kernel's source.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from portattn.errors import DataError
from portattn.launch.run import mend_bf16
from portattn.planning import target_names
from portattn.planning.registry import Registry
from portattn.schema import toml_reader
from portattn.schema.problem import Problem
from portattn.schema.quirk import Quirk
from portattn.schema.target import Arch, Target
from portattn.testing.bound import executed_cycles
from portattn.testing.executor import run_code
from portattn.testing.findings import Facts, Gate, KernelFacts, Numerics, gate_of, resource_gates
from portattn.worker import own_kernels
from portattn.worker.client import Reply, Worker
from portattn.worker.own_kernels import MOST_ELEMENTS, memory_of

KERNELS = "kernels"  # the op of kernels' cells, and the name of their set
DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "fp8e4b8": torch.float8_e4m3fnuz,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "i1": torch.bool,
}  # fmt: skip
SCALARS = ("fp64", "fp32", "i64", "i32", "u64", "u32", "i16", "i8", "i1")
NONE = "none"  # the type of an argument that is passed None
# Two units in the last place of the coarsest type that a kernel reads or writes, as a share of the largest value: it
# rounds intermediate results to that type too, and a model adds in another order than numpy. TF32 for float32, since
# products may round their operands to its ten bits.
TOLERANCES = {
    "fp8e5": 0.5, "fp8e4nv": 0.25, "fp8e4b8": 0.25, "bf16": 2**-6, "fp16": 2**-9, "fp32": 2**-9, "fp64": 2**-9,
}  # fmt: skip
# What an entry may bound -> the fact, and the figure's name; None for the chip's name of its memory
BOUNDS = {"spills": ("spills", "bytes spilled"), "registers": ("registers", "registers"),
          "shared_memory": ("scratchpad_bytes", None)}  # fmt: skip
POWERS = {"num_warps": (1, 2, 4, 8, 16, 32), "num_ctas": (1, 2, 4, 8, 16)}  # values of compilers' options
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # along the axes of a grid
STEPS = 200_000_000  # of a model of a chip, instructions of a wave; the time limit is shorter
Number = bool | int | float


class TargetChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Keys of an entry that `on` may change for some targets; constants and options are added to the entry's own."""

    grid: tuple[int, ...] = ()
    constants: dict[str, Number | str | list[Any]] = {}  # tl.constexpr; "tl.bfloat16" is Triton's type
    options: dict[str, Number | str] = {}  # of the compiler
    # The most bytes that may spill, registers of a thread, and bytes of shared memory (LDS); None: any number.
    spills: int | None = None
    registers: int | None = None
    shared_memory: int | None = None


class KernelCase(TargetChanges, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One kernel with the arguments of one launch."""

    function: str  # package.module:function
    outputs: tuple[str, ...]  # pointers that are compared
    name: str = ""  # by default the function's and the constants
    package: str = ""  # an installed package that holds it, or the folder from which it is imported
    folder: str = ""
    grid: tuple[int, ...] = (1,)
    types: dict[str, str] = {}  # run-time argument -> Triton's type; `none` for None
    shapes: dict[str, tuple[int, ...]] = {}
    strides: dict[str, tuple[int, ...]] = {}  # of tensors that are not contiguous
    values: dict[str, Number | list[Any]] = {}  # scalars, and tensors' elements: nested lists, or one number for all
    ranges: dict[str, tuple[float, float]] = {}  # of tensors' random elements; normal ones without
    unaligned: tuple[str, ...] = ()  # pointers that are no multiples of 16 bytes
    reference: str = ""  # module:function of arguments by name that returns outputs by name
    tolerance: float | None = None  # of the largest value
    on: dict[str, TargetChanges] = {}  # glob of targets -> changes there
    source: str = ""  # digest of the source of the function and of all that it calls; not in a file

    @property
    def op(self) -> str:
        return KERNELS

    @property
    def kernel(self) -> str:
        return self.function.rpartition(":")[2]

    @property
    def pointers(self) -> list[str]:
        return [name for name, kind in self.types.items() if kind.startswith("*")]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.shapes:
            return self.shapes[name]
        found, value = list[int](), self.values[name]
        while isinstance(value, list):
            found.append(len(value))
            value = value[0] if value else 0
        return tuple(found)

    def on_target(self, name: str, arch: Arch) -> KernelCase:
        """Return the case with the changes of all globs that match a target."""
        found = msgspec.structs.replace(self, on={})
        for glob, changes in self.on.items():
            if target_names.matches(name, arch, glob):
                found = found.changed(changes)
        return found

    def changed(self, changes: TargetChanges) -> KernelCase:
        given: dict[str, Any] = {name: getattr(changes, name) for name in TargetChanges.__struct_fields__}
        more = {name: getattr(self, name) | given.pop(name) for name in ("constants", "options")}
        kept = {name: value for name, value in given.items() if value not in (None, ())}
        return msgspec.structs.replace(self, **more, **kept)

    def budget(self) -> float:
        kinds = (self.types[name][1:] for name in self.pointers)
        return self.tolerance or max((TOLERANCES.get(kind, 0.0) for kind in kinds), default=0.0)

    def __str__(self) -> str:
        tensors = (f"{name} {self.types[name]} {'×'.join(map(str, self.shape(name)))}" for name in self.pointers)
        return f"{self.function} of {', '.join(tensors)}"


class NamedKernel(msgspec.Struct, frozen=True):
    name: str
    problem: KernelCase
    root: str  # the folder from which its module is imported here


Subject = Problem | KernelCase


class _KernelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernel: tuple[KernelCase, ...]
    package: str = ""
    folder: str = ""


def read(path: Path, seconds: float = 120.0) -> list[NamedKernel]:
    """Read a file of kernels, and look their functions up. Raises DataError with file, line, key, value and limit."""
    try:
        data, text = toml_reader.read(path)
    except OSError as error:
        raise DataError(path, None, f"cannot be read: {error.strerror}") from None
    file = toml_reader.convert(data, _KernelFile, path, text)
    found: dict[str, NamedKernel] = {}
    places = [(f"{owner}:{name}", arch) for owner, own in Registry.load().arches.items() for name, arch in own.items()]
    with Worker() as worker:
        for number, entry in enumerate(file.kernel):
            package = entry.package or ("" if entry.folder else file.package)
            folder = "" if package else entry.folder or file.folder
            case = msgspec.structs.replace(entry, package=package, folder=folder)

            def refuse(key: str, limit: str, at: tuple[str, ...] = ("kernel", str(number))) -> DataError:
                return DataError(path, toml_reader.line_of(text, *at, *key.split(".")), f"key {key!r}: {limit}")

            for glob in case.on:
                if not any(target_names.matches(*place, glob) for place in places):
                    raise refuse(f"on.{glob}", "must match a target, a backend, an arch or a family")
            forms = {"": case} | {f"on.{glob}.": case.changed(changes) for glob, changes in case.on.items()}
            for key, limit in ((at + key, limit) for at, one in forms.items() for key, limit in _wrong(one)):
                raise refuse(key, limit)
            root = root_of_case(case, path.parent)
            if root is None:
                key = "package" if package else "folder"
                limit = f"{getattr(case, key)!r} is not here: install it, or name another folder"
                raise refuse(key, limit) if getattr(entry, key) else refuse(key, limit, ())
            reply = worker.request(
                "portattn.worker.own_kernels:describe", seconds, root=str(root), function=case.function
            )
            if reply.outcome != "ok":
                raise refuse("function", f"{case.function!r} is no kernel in {root}: {reply.kind}: {reply.message}")
            for key, limit in ((at + key, limit) for at, one in forms.items() for key, limit in _unlike(one, reply)):
                raise refuse(key, limit)
            shown = " ".join(f"{name}={value}" for name, value in case.constants.items())
            name = case.name or f"{case.kernel} {shown}".strip()
            if name in found:
                raise refuse("name", f"{name!r} is the name of another kernel of this file")
            case = msgspec.structs.replace(case, name=name, source=str(reply.facts["source"]))
            found[name] = NamedKernel(name, case, str(root))
    if not found:
        raise DataError(path, None, "has no [[kernel]]")
    return list(found.values())


def root_of_case(case: KernelCase, beside: Path) -> Path | None:
    """Return the folder from which a kernel's module is imported here, or None; `beside` is its file's folder."""
    if not case.package:
        folder = beside / os.path.expanduser(case.folder or ".")
        return folder.resolve() if folder.is_dir() else None
    spec = importlib.util.find_spec(case.package.partition(".")[0])
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).parent if places else None


def _wrong(case: KernelCase) -> Iterator[tuple[str, str]]:
    """Yield (key, limit) for each wrong key of an entry."""
    for key in ("function", "reference"):
        module, colon, name = getattr(case, key).partition(":")
        if (key == "function" or case.reference) and not (colon and name.isidentifier() and module):
            yield key, f"{getattr(case, key)!r} must be package.module:function"
    if case.source:
        yield "source", "unknown key"
    if not 1 <= len(case.grid) <= 3 or any(not 1 <= n <= m for n, m in zip(case.grid, MOST_PROGRAMS, strict=False)):
        yield "grid", f"{list(case.grid)} must be one to three numbers of at least 1 and at most {MOST_PROGRAMS}"
    if not case.name.isprintable():
        yield "name", f"{case.name!r} must be printable characters in one line"
    yield from ((key, f"{getattr(case, key)} must be at least 0") for key in BOUNDS if (getattr(case, key) or 0) < 0)
    for name, known in POWERS.items():
        if case.options.get(name, 1) not in known:
            yield f"options.{name}", f"{case.options[name]} must be one of {', '.join(map(str, known))}"
    if case.tolerance is not None and not 0 < case.tolerance < math.inf:
        yield "tolerance", f"{case.tolerance} must be a number above 0"
    for name, kind in case.types.items():
        if kind not in (kinds := [*(f"*{one}" for one in DTYPES), *SCALARS, NONE]):
            yield f"types.{name}", f"{kind!r} must be one of {', '.join(kinds)}"
        if name in case.constants:
            yield f"constants.{name}", "is in types too"
    tensors = set(case.pointers)
    for key in ("shapes", "strides", "ranges", "unaligned", "outputs"):
        for name in getattr(case, key):
            if name not in tensors:
                yield f"{key}.{name}", f"must be one of the pointers in types: {', '.join(sorted(tensors)) or 'none'}"
    if not case.outputs:
        yield "outputs", "names no pointer: nothing would be compared"
    for name, value in case.values.items():
        if name not in case.types or case.types[name] == NONE:
            yield f"values.{name}", f"must be one of the arguments in types: {', '.join(case.types)}"
        elif name not in tensors and isinstance(value, list):
            yield f"values.{name}", f"must be a number: {name} is {case.types[name]}"
        elif not isinstance(value, list) and (limit := _unfit(case.types[name], value)):
            yield f"values.{name}", f"{value} {limit}"
    for name, kind in case.types.items():
        if name in tensors:
            yield from _wrong_tensor(case, name)
        elif kind != NONE and name not in case.values:
            yield "values", f"lacks {name}, which is {kind}"


def _unfit(kind: str, *values: Number) -> str:
    """Return the limit of a type that a value exceeds, or nothing."""
    kind = kind.removeprefix("*")
    if kind[0] not in "iu":
        return "" if not any(isinstance(value, bool) for value in values) else f"must be a number: the type is {kind}"
    bits = int(kind[1:])
    low, high = (0, 2**bits - 1) if kind[0] == "u" or bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    fit = (low <= value <= high and value == int(value) and (bits == 1 or type(value) is not bool) for value in values)
    return "" if all(fit) else f"must be a whole number from {low} to {high}: the type is {kind}"


def _wrong_tensor(case: KernelCase, name: str) -> Iterator[tuple[str, str]]:
    listed = isinstance(case.values.get(name), list)
    if name not in case.shapes and not listed:
        yield "shapes", f"lacks {name}, and values does not list its elements"
        return
    shape, strides = case.shape(name), case.strides.get(name)
    if min(shape, default=0) < 0 or math.prod(shape) > MOST_ELEMENTS:
        yield f"shapes.{name}", f"{list(shape)} must be sizes of at most {MOST_ELEMENTS} elements"
    if listed:
        try:
            given = torch.tensor(case.values[name])
        except (TypeError, ValueError, RuntimeError) as error:
            yield f"values.{name}", f"is no tensor: {error}"
            return
        if given.numel() != math.prod(shape):
            yield f"values.{name}", f"has {given.numel()} elements, and {name} is {list(shape)}"
        elif given.numel() and (limit := _unfit(case.types[name], given.min().item(), given.max().item())):
            yield f"values.{name}", limit
    if strides is not None and (len(strides) != len(shape) or min(strides, default=0) < 0):
        yield f"strides.{name}", f"{list(strides)} must be a number of at least 0 for each of {list(shape)}"
    elif strides is not None and memory_of(shape, strides) > MOST_ELEMENTS:
        yield f"strides.{name}", f"{list(strides)} must have the last within {MOST_ELEMENTS} elements of the first"
    whole = not DTYPES[case.types[name][1:]].is_floating_point
    if whole and name not in case.values and name not in case.ranges and name not in case.outputs:
        yield "ranges", f"lacks {name}: whole numbers are taken from values, or at random from a range"
    low, high = case.ranges.get(name, (0, 0))
    if not -math.inf < low <= high < math.inf:
        yield f"ranges.{name}", f"{[low, high]} must be two numbers in order"
    elif name in case.ranges and (limit := _unfit(case.types[name], low, high)):
        yield f"ranges.{name}", f"each of {[low, high]} {limit}"


def _unlike(case: KernelCase, reply: Reply) -> Iterator[tuple[str, str]]:
    """Yield (key, limit) for each key of an entry that its function contradicts."""
    names = str(reply.facts["arguments"]).split(",")
    for key in ("types", "constants"):
        for name in getattr(case, key):
            if name not in names:
                yield f"{key}.{name}", f"the arguments of {case.kernel} are {', '.join(names)}"
    given = {*case.types, *case.constants, *str(reply.facts["optional"]).split(",")}
    if lacking := [name for name in names if name not in given]:
        yield "types", f"lacks {', '.join(lacking)}, and so does constants"


# A kernel in the matrix: quirks, a compile, figures, numbers.


def quirks_of(case: KernelCase, target: Target, registry: Registry) -> list[Quirk]:
    options = {"num_warps": 4} | case.on_target(target.name, target.arch).options
    return [quirk for quirk in registry.quirks.values() if quirk.names_foreign(case.kernel, target, options)]


def compile_case(named: NamedKernel, target: Target, worker: Worker, seconds: float, quirks: Sequence[Quirk]) -> Reply:
    """Compile a kernel in a worker, whose Python has the target's toolchain, with the effects of quirks."""
    backend = Registry.load().backends[target.backend]
    adapter = backend.compile_adapter()
    case, env = msgspec.structs.asdict(named.problem), dict[str, str]()
    for quirk in (one for one in quirks if one.changes_foreign):
        case["options"] = case["options"] | (quirk.effect.launch or {})
        env |= quirk.effect.env or {}
    signature = {"root": named.root, "function": case["function"], "case": case}
    return worker.request(
        "compile", seconds, signature=signature, facts="all", env=env,
        target=list(backend.triton_target(target.arch)), **({"adapter": adapter} if adapter else {}),
    )  # fmt: skip


TEXTS = ("ptx", "amdgcn", "linalg", "scratch", "arguments")  # of a reply: what code and its figures are apart


def gates(case: KernelCase, kernel: KernelFacts, target: Target) -> tuple[Gate, ...]:
    """Return the gates of the chip's limits, and of the file's bounds where the compiler tells the figure."""
    found = [one for one in resource_gates(kernel, target.arch, 0, "") if one.name != "bytes spilled"]
    for key, (fact, name) in BOUNDS.items():
        most = getattr(case, key)
        if most is not None and fact in kernel.facts:
            used, name = int(kernel.facts[fact]), name or f"bytes of {target.arch.scratchpad_kind}"
            found.append(gate_of(name, kernel, used, f"{most} allowed by the file", used <= most))
    return tuple(found)


def numbers_of(
    named: NamedKernel, target: Target | None, worker: Worker, seconds: float, where: str, reply: Reply | None = None
) -> Numerics:
    """Return the numerics of compiled code (`reply`), or of the interpreter, against the reference."""
    fields: dict[str, Any] = {"root": named.root, "case": msgspec.to_builtins(named.problem)}
    if reply is not None and target is not None:
        facts = dict(reply.facts)
        fields |= {
            "target": target.name, "grid": list(named.problem.grid), "outputs": list(named.problem.outputs),
            "texts": facts, "facts": facts, "unchecked": [], "triton": target.toolchain.version, "steps": STEPS,
            "groups": True,  # a race of two programs
        }  # fmt: skip
    done = worker.request("portattn.testing.kernel_cases:check", seconds, **fields)
    if done.outcome != "ok":
        reason = f"{done.outcome}: {done.kind}: {done.message.strip().splitlines()[0] if done.message else ''}"[:500]
        # An exception of the interpreter or of an executor is no finding about the code, nor is a slow interpreter.
        nothing = done.outcome == "error" or (done.outcome == "hang" and reply is None)
        if done.outcome == "error" and done.stage == "reference" and (reference := named.problem.reference):
            nothing, reason = False, f"reference {reference!r}: {reason}"
        return Numerics(outcome="not_run" if nothing else done.outcome, where=where, reason=reason)
    seen = done.facts
    if missing := str(seen.get("missing", "")):
        return Numerics(outcome="not_run", where=where, reason=missing)
    if strays := str(seen.get("strays", "")):
        return Numerics(outcome="fail", where=where, reason=strays)
    error, budget = float(seen["error"]), float(seen["budget"])
    reasons = [f"{seen['wrong']} elements are NaN or infinite where they must not be, or the reverse"]
    reasons = reasons if seen["wrong"] else []
    if error > budget:
        reasons.append(f"{seen['output']}'s error {error:.3g} is over its budget {budget:.3g}")
    outcome: Any = "fail" if reasons else "pass"
    cycles = int(seen.get("cycles", 0)) or None
    return Numerics(
        outcome=outcome, where=where, error=error, budget=budget, cycles=cycles, reason="; ".join(reasons)
    )  # fmt: skip


# In the child, which has the interpreter.


def arguments_of(case: KernelCase) -> dict[str, Any]:
    """Return the arguments by name: scalars, and tensors with random, given or (outputs) poisoned elements."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for name, kind in case.types.items():
        if not kind.startswith("*"):
            found[name] = None if kind == NONE else case.values[name]
            continue
        dtype, shape, value = DTYPES[kind[1:]], case.shape(name), case.values.get(name)
        strides = case.strides.get(name) or [math.prod(shape[n + 1 :]) for n in range(len(shape))]
        size = memory_of(shape, strides)
        whole = not dtype.is_floating_point
        if isinstance(value, list):
            memory = torch.zeros(size, dtype=dtype)
            memory.as_strided(shape, strides).copy_(torch.tensor(value).to(dtype).reshape(shape))
        elif value is not None:
            memory = torch.full((size,), value).to(dtype)
        elif name in case.ranges:
            low, high = case.ranges[name]
            memory = torch.empty(size, dtype=torch.float64).uniform_(low, high + whole, generator=generator)
            memory = (memory.floor().clamp(max=high) if whole else memory).to(dtype)
        elif name in case.outputs:
            poison = 1 if dtype == torch.bool else torch.iinfo(dtype).max if whole else math.nan
            memory = torch.full((size,), poison).to(dtype)
        else:
            memory = torch.randn(size, generator=generator).to(dtype)
        found[name] = memory.as_strided(shape, strides)
    return found


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements from a tensor's first to its last in memory, also between its own."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,))


def interpret(case: KernelCase, root: str) -> dict[str, torch.Tensor]:
    kernel, given = own_kernels.kernel_of(root, case.function), arguments_of(case)
    constants = {name: own_kernels.constant_of(value) for name, value in case.constants.items()}
    defaults = {name: one.default for name, one in inspect.signature(kernel.fn).parameters.items()}
    mend_bf16()
    with own_kernels.loops_of_tensors(own_kernels.modules_of_kernels()):
        kernel[tuple(case.grid)](*((defaults | constants | given)[name] for name in kernel.arg_names))
    return {name: given[name] for name in case.outputs}


def run_reference(case: KernelCase, root: str) -> dict[str, torch.Tensor]:
    """Return in float64 the outputs of the function that the file names; memory outside of elements stays as it is.

    Raises KeyError if it does not return an output."""
    if root not in sys.path:
        sys.path.append(root)  # not first: a file beside the kernel's must not displace a module of Python
    place, (own, other) = case.reference, (re.split("[.:]", one)[0] for one in (case.function, case.reference))
    if own == other and own in own_kernels.TAKEN:
        own_kernels.kernel_of(root, case.function)  # finds the module from then on
        place = own_kernels.PRIVATE + place
    function, given = pkgutil.resolve_name(place), arguments_of(case)
    known = inspect.signature(function).parameters
    made = function(**{name: value for name, value in (given | case.constants).items() if name in known})
    found = {}
    for name in case.outputs:
        found[name] = _flat(given[name]).double().as_strided(given[name].shape, given[name].stride())
        found[name].copy_(made[name])
    return found


_right: dict[str, dict[str, torch.Tensor]] = {}  # by the case's digest


def check(request: Mapping[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Run the code of a request, or without code the interpreter, and compare it with the reference. Child only."""
    case, root = msgspec.convert(request["case"], KernelCase), request["root"]
    key = f"{root} {case.source} {msgspec.json.encode(request['case'], order='sorted').decode()}"
    enter("reference")
    with torch.no_grad():
        if key not in _right:
            _right[key] = (run_reference if case.reference else interpret)(case, root)
        right = _right[key]
        for name, tensor in right.items():
            if tensor.is_floating_point() and tensor.numel() and not tensor.double().isfinite().any():
                again = f"{name} is NaN in the reference: if the kernel reads it, give it values or a range"
                return {"facts": {"missing": again}}
        if "texts" not in request:
            enter("interpret")
            return {"facts": compare(case, right, interpret(case, root) if case.reference else right)}
        enter("execute")
        given = arguments_of(case)
        names = [name for name in str(request["facts"]["arguments"]).split(",") if name]
        flat = {name: _flat(given[name]) if name in case.pointers else given[name] for name in names}
        types = {name: case.types[name] for name in names}
        answer = run_code({**request, "types": types}, flat)[0]
    if "missing" in answer:
        return {"facts": {"missing": answer["missing"]}}
    if answer["strays"]:
        return {"facts": {"strays": "; ".join(answer["strays"])}}
    cycles = executed_cycles(answer.get("executed", {}), Registry.load().target(request["target"]))
    return {"facts": compare(case, right, given) | {"cycles": cycles}}


def compare(case: KernelCase, right: Mapping[str, Any], given: Mapping[str, Any]) -> Facts:
    """Return the worst output's error and budget, and how many elements are NaN or infinite in one of both alone."""
    worst: Facts = {"error": 0.0, "budget": 0.0, "output": ""}
    wrong = 0
    for name in case.outputs:
        whole, flat = not given[name].is_floating_point(), [_flat(one[name]) for one in (right, given)]
        wanted, got = (one.double() for one in flat)
        finite = wanted.isfinite() & got.isfinite()
        same = finite | (wanted == got) | (wanted.isnan() & got.isnan())
        wrong += int((~same).sum())
        error = float((wanted - got)[finite].abs().max()) if finite.any() else 0.0
        largest = float(wanted[wanted.isfinite()].abs().max()) if wanted.isfinite().any() else 0.0
        if whole and not error and bool((flat[0] != flat[1]).any()):  # float64 rounds numbers past 2**53
            error = 1.0
        budget = 0.0 if whole else case.budget() * largest
        if not worst["output"] or error * float(worst["budget"]) > float(worst["error"]) * budget or error > budget:
            worst = {"error": error, "budget": budget, "output": name}
    return worst | {"wrong": wrong}
