"""Compile a kernel that is not portattn's, for any target and in any toolchain's environment."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from portattn.compile.ensure_compiled import first_line
from portattn.errors import ArgumentError, PortattnError
from portattn.planning.registry import Registry
from portattn.schema.target import Target
from portattn.worker.client import Reply, Worker

OP = "compile"
TEXTS = ("ptx", "amdgcn", "linalg")  # what a compiled kernel's text is called, by backend
SHOWN = 4000  # characters of a compiler's log that an error shows
SECONDS = 120.0


class CompiledKernel(msgspec.Struct, frozen=True, kw_only=True):
    """The result of compiling a kernel.

    >>> CompiledKernel(kernel="add", target="cuda:sm_90", toolchain="triton==3.6.0", facts={"spills": 8}).spills
    8"""

    kernel: str
    target: str  # BACKEND:ARCH
    toolchain: str  # the compiler, NAME==VERSION
    # figures of the code that the compiler tells: `registers`, `spills` (bytes), `scratchpad_bytes`, `num_warps`,
    # counts of the chip's matrix instructions
    facts: dict[str, int | str | float]
    language: str = ""  # of `assembly`: ptx, amdgcn, or linalg for Ascend, whose code is not analysed further
    assembly: str = ""

    @property
    def spills(self) -> int | None:
        """Return the bytes of spilled registers; None if the compiler does not tell (Ascend)."""
        return self._number("spills")

    @property
    def registers(self) -> int | None:
        """Return the registers of a thread; None if the compiler does not tell."""
        return self._number("registers")

    @property
    def shared_memory(self) -> int | None:
        """Return the bytes of shared memory, or LDS, of a program; None if the compiler does not tell."""
        return self._number("scratchpad_bytes")

    def _number(self, name: str) -> int | None:
        return int(self.facts[name]) if name in self.facts else None


class CompileError(PortattnError):
    """A kernel was not compiled; the text has the end of the compiler's log.

    `outcome` is `error` (the compiler raised), `crash` (its process died) or `hang` (the time was up), `stage` the
    compiler's, `kind` the exception's type or the signal's name, `log` all output; `unavailable`: the compiler did not
    run, as its process or the import of the kernel's module failed."""

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
    worker: Worker, kernel: Any, target: Target, signature: Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None, *, divisible: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None, seconds: float = SECONDS, options: Mapping[str, Any] | None = None,
) -> CompiledKernel:  # fmt: skip
    """Compile a kernel in a worker, whose Python has the target's toolchain (`tools.lab.worker`).

    Args:
        kernel: a @triton.jit function at the top of a module's file, autotuned or not. The child imports that file
        target: such as `portattn.target("rocm:gfx942", "triton==3.9.0")`
        signature: run-time argument -> Triton's type: `*fp16`, `i32`, `fp32`
        constexprs: tl.constexpr argument -> number, text, bool or None; arguments with a default may be left out
        divisible: arguments that are multiples of 16; every pointer if None
        env: variables that the compiler reads, for this compile
        seconds: limit of time
        options: of the compiler: num_warps, num_stages, ...

    Returns:
        Facts and assembly.

    Raises:
        ArgumentError: on a kernel that no child can import and on arguments that are not the kernel's
        CompileError: if the compiler fails, dies or does not end
    """
    function = _function(kernel)
    types, constants = _arguments(function, signature, constexprs or {})
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    for name in divisible or ():
        if name not in types:
            raise ArgumentError(OP, "divisible", name, f"must be one of {', '.join(types)}")
    backend = Registry.load().backends[target.backend]
    adapter = backend.compile_adapter()
    described = {
        "module": function.__module__, "function": function.__name__, "file": inspect.getfile(function),
        "absent": sorted({name.partition(".")[0] for name in sys.modules}), "types": types, "constants": constants,
        "divisible": list(pointers if divisible is None else divisible), "small": pointers,
        "options": dict(options or {}),
    }  # fmt: skip
    reply = worker.request(
        "compile", seconds, signature=described, target=list(backend.triton_target(target.arch)), env=dict(env or {}),
        facts="all", **({"adapter": adapter} if adapter else {}),
    )  # fmt: skip
    if reply.outcome != "ok":
        raise CompileError(function.__name__, target, reply)
    facts = dict(reply.facts)
    language = next((name for name in TEXTS if name in facts), "")
    return CompiledKernel(
        kernel=function.__name__, target=target.name, toolchain=str(target.toolchain),
        assembly=str(facts.pop(language, "")), language=language, facts=facts,
    )  # fmt: skip


def _function(kernel: Any) -> Any:
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
