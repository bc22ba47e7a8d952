"""Compiling a kernel that is not portattn's, for any target and in any toolchain's environment."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from portattn.compile.compile_check import first_line
from portattn.errors import ArgumentError, PortattnError
from portattn.planning.registry import Registry
from portattn.schema.target import Target
from portattn.worker.client import Reply, Worker

OP = "compile"
TEXTS = ("ptx", "amdgcn", "linalg")  # what a compiled kernel's text is called, by backend
SHOWN = 4000  # characters of a compiler's log that an error shows
SECONDS = 120.0


class CompiledKernel(msgspec.Struct, frozen=True, kw_only=True):
    """What a compiler made of a kernel.

    kernel      its name
    target      BACKEND:ARCH
    toolchain   what compiled it, NAME==VERSION
    facts       figures of the code: `registers`, `spills` (bytes), `scratchpad_bytes`, `num_warps`, how often each
                matrix instruction of the chip occurs; what the compiler does not say is left out
    language    of the text: ptx, amdgcn, or linalg for Ascend, whose code is not looked at beyond that
    assembly    the text

    >>> CompiledKernel(kernel="add", target="cuda:sm_90", toolchain="triton==3.6.0", facts={"spills": 8}).spills
    8
    """

    kernel: str
    target: str
    toolchain: str
    facts: dict[str, int | str | float]
    language: str = ""
    assembly: str = ""

    @property
    def spills(self) -> int | None:
        """Bytes of spilled registers; None where the compiler does not say (Ascend)."""
        return self._number("spills")

    @property
    def registers(self) -> int | None:
        """Registers of a thread; None where the compiler does not say."""
        return self._number("registers")

    @property
    def shared_memory(self) -> int | None:
        """Bytes of shared memory, or LDS, of a program; None where the compiler does not say."""
        return self._number("scratchpad_bytes")

    def _number(self, name: str) -> int | None:
        return int(self.facts[name]) if name in self.facts else None


class CompileError(PortattnError):
    """A kernel was not compiled. The text has the end of the compiler's log.

    kernel, target, toolchain  of the request
    outcome      `error`: the compiler raised; `crash`: its process died; `hang`: the time was up
    stage, kind  the stage of the compiler, and the exception's type or the signal's name
    log          all of its known output
    unavailable  the compiler was not tried: its process could not be started, or the kernel's module could not be
                 imported
    """

    def __init__(self, kernel: str, target: Target, reply: Reply) -> None:
        self.kernel, self.target, self.toolchain = kernel, target.name, str(target.toolchain)
        self.outcome, self.stage, self.kind = reply.outcome, reply.stage, reply.kind
        self.unavailable = reply.unavailable
        self.log = "\n".join(filter(None, (f"{reply.kind}: {reply.message}", reply.log.strip())))
        what = {"crash": "the compiler died", "hang": "the compiler did not end"}.get(reply.outcome, "not compiled")
        head = f"{kernel} for {target}: {what} at {reply.stage}: {reply.kind}: {first_line(reply.message)}"
        super().__init__(f"{head}\n{self.log[-SHOWN:]}")
        self._made = (kernel, target, reply)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made


def compile_for(
    worker: Worker,
    kernel: Any,
    target: Target,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None,
    *,
    divisible: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
    options: Mapping[str, Any] | None = None,
) -> CompiledKernel:
    """Compile a kernel in a worker, whose Python has the target's toolchain (`tools.lab.worker`).

    kernel      a @triton.jit function at the top of a module's file, autotuned or not. The child imports that file
    target      what to compile for: `portattn.target("rocm:gfx942", "triton==3.9.0")`
    signature   run-time argument -> Triton's type: `*fp16`, `i32`, `fp32`
    constexprs  tl.constexpr argument -> number, text, bool or None; those with a default may be left out
    divisible   arguments that are multiples of 16; every pointer where None
    env         variables that the compiler reads, for this compile
    seconds     limit of time
    options     of the compiler: num_warps, num_stages, ...

    Returns what was made: facts and assembly.

    Raises ArgumentError on a kernel that no child can import and on arguments that are not the kernel's, CompileError
    where the compiler fails, dies or does not end.
    """
    function = _function(kernel)
    types, constants = _arguments(function, signature, constexprs or {})
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    for name in divisible or ():
        if name not in types:
            raise ArgumentError(OP, "divisible", name, f"must be one of {', '.join(types)}")
    backend = Registry.load().backends[target.backend]
    adapter = backend.compile_adapter()
    reply = worker.request(
        "compile",
        seconds,
        signature={
            "module": function.__module__,
            "function": function.__name__,
            "file": inspect.getfile(function),
            "absent": sorted({name.partition(".")[0] for name in sys.modules}),
            "types": types,
            "constants": constants,
            "divisible": list(pointers if divisible is None else divisible),
            "small": pointers,
            "options": dict(options or {}),
        },
        target=list(backend.triton_target(target.arch)),
        env=dict(env or {}),
        facts="all",
        **({"adapter": adapter} if adapter else {}),
    )
    if reply.outcome != "ok":
        raise CompileError(function.__name__, target, reply)
    facts = dict(reply.facts)
    language = next((name for name in TEXTS if name in facts), "")
    return CompiledKernel(
        kernel=function.__name__,
        target=target.name,
        toolchain=str(target.toolchain),
        assembly=str(facts.pop(language, "")),
        language=language,
        facts=facts,
    )


def _function(kernel: Any) -> Any:
    """The Python function of a kernel, under what decorates it. Raises ArgumentError where no child can find it."""
    function = kernel
    while hasattr(function, "fn"):
        function = function.fn
    if not inspect.isfunction(function) or function is kernel:
        raise ArgumentError(OP, "kernel", kernel, "must be a @triton.jit function")
    if function.__qualname__ != function.__name__:
        limit = "must stand at the top of its module: a child process imports it from there"
        raise ArgumentError(OP, "kernel", function.__qualname__, limit)
    return function


def _arguments(
    function: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of run-time arguments, and constants with defaults. Raises ArgumentError on any that does not fit."""
    known = inspect.signature(function).parameters
    names = ", ".join(known)
    for argument, given in (("signature", signature), ("constexprs", constexprs)):
        for name in given:
            if name not in known:
                raise ArgumentError(OP, argument, name, f"the arguments of {function.__name__} are {names}")
    for name in signature:
        if name in constexprs:
            raise ArgumentError(OP, "constexprs", name, "is in signature too")
    defaults = {
        name: one.default
        for name, one in known.items()
        if name not in signature and one.default is not inspect.Parameter.empty
    }
    constants = {name: getattr(value, "value", value) for name, value in (defaults | dict(constexprs)).items()}
    missing = [name for name in known if name not in signature and name not in constants]
    if missing:
        limit = f"must have the type of each run-time argument, and constexprs the rest; none has {', '.join(missing)}"
        raise ArgumentError(OP, "signature", dict(signature), limit)
    for name, value in constants.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ArgumentError(OP, f"constexprs[{name!r}]", value, "must be a number, a text, a bool or None")
    return dict(signature), constants
