"""The fixture `portattn_target`, a target with a toolchain that compiles a test's kernel, and marks of quirks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from portattn.compile.ensure_compiled import first_line
from portattn.config import current
from portattn.errors import ArgumentError, PortattnError
from portattn.integrations.pytest_plugin import FIXTURE, OPTIONS, QUIRK, session
from portattn.integrations.pytest_plugin.session import SECONDS
from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.toolchain import is_installed
from portattn.tools import lab
from portattn.tools.quirks.probe_results import BUG_FOUND, Outcome, matches
from portattn.worker.client import Reply, Worker
from portattn.worker.own_kernels import root_of

OP = "compile"
TEXTS = ("ptx", "amdgcn", "linalg")  # what a compiled kernel's text is called, by backend
SHOWN = 4000  # characters of a compiler's log that an error shows


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
    """Compile a kernel in a worker, whose Python has the target's toolchain; arguments as KernelTarget.compile's.

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
    file = Path(inspect.getfile(function))
    root = root_of(function.__module__, str(file))
    described = {
        "root": root or str(file.parent), "types": types,
        "function": f"{function.__module__ if root else file.stem}:{function.__name__}", "constants": constants,
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


class KernelTarget:
    """Value of the fixture `portattn_target`: `target`, `name` (BACKEND:ARCH) and `toolchain` (NAME==VERSION)."""

    def __init__(self, target: Target, shared: session.PluginSession) -> None:
        self.target, self._shared = target, shared

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def toolchain(self) -> str:
        return str(self.target.toolchain)

    def compile(
        self,
        kernel: Any,
        signature: Mapping[str, str],
        constexprs: Mapping[str, Any] | None = None,
        *,
        divisible: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        **options: Any,
    ) -> CompiledKernel:
        """Compile a kernel for this target with its toolchain, in a child process. No device is needed.

        Args:
            kernel: a @triton.jit function at the top of a module's file, autotuned or not. The child runs of that file
                the statements that the kernel needs; other packages need not be in the lab's environment
            signature: run-time argument -> Triton's type: `*fp16`, `i32`, `fp32`
            constexprs: tl.constexpr argument -> number, text, bool or None; optional if it has a default
            divisible: arguments that are multiples of 16; None for every pointer
            env: variables that the compiler reads, for this compile
            seconds: limit of time; None for --portattn-seconds, or 120
            options: of the compiler: num_warps, num_stages, ...

        Returns:
            A CompiledKernel: `spills`, `registers`, `shared_memory`, `facts`, `assembly`.

        Raises:
            ArgumentError: No child can import the kernel, or the arguments are not the kernel's.
            CompileError: The compiler fails, dies or hangs; the text has the end of its log.
        """
        return compile_for(
            self._shared.workers.compiler(self.toolchain),
            kernel,
            self.target,
            signature,
            constexprs,
            divisible=divisible,
            env=env,
            seconds=self._shared.options.seconds if seconds is None else seconds,
            options=options,
        )

    def __repr__(self) -> str:
        return f"<{self.target}>"


def parametrize(metafunc: pytest.Metafunc) -> None:
    own = (
        mark.args[0] if mark.args else mark.kwargs.get("argnames", "")
        for mark in metafunc.definition.iter_markers("parametrize")
    )
    if not any(FIXTURE in (names.replace(" ", "").split(",") if isinstance(names, str) else names) for names in own):
        pairs = [(one.name, str(one.toolchain)) for one in session.of(metafunc.config).asked.where]
        metafunc.parametrize(FIXTURE, pairs, ids=["-".join(pair) for pair in pairs], indirect=True)


def kernel_target(request: pytest.FixtureRequest) -> KernelTarget:
    """Return the fixture's value; skip the test if no compiler for it is here."""
    found = target_of(getattr(request, "param", None))
    if found is None:
        pytest.skip(f"no {OPTIONS['portattn_target']} says what to compile for")
    shared = session.of(request.config)
    lacks = _lacks(str(found.toolchain))
    if lacks:
        if "not_run" in shared.asked.fail_on:
            pytest.fail(lacks, pytrace=False)
        pytest.skip(lacks)
    return KernelTarget(found, shared)


def target_of(param: Any) -> Target | None:
    """Return the target of a fixture's parameter: (target, toolchain) of the options, or a test's own text."""
    if param is None:
        return None
    name, toolchain = param if isinstance(param, tuple) else (param, None)
    try:
        return Registry.load().target(name, toolchain)
    except ArgumentError as error:
        raise pytest.UsageError(f"{FIXTURE} is {name!r}, but {error.limit}") from None


def _lacks(toolchain: str) -> str:
    if is_installed(toolchain):
        return ""
    try:
        lab.need(toolchain)
    except PortattnError as error:
        return f"not compiled here: {error}"
    return ""


KEY = pytest.StashKey[tuple[Quirk, ...]]()  # of an item: the quirks that it must fail for


def resolve(items: list[pytest.Item]) -> None:
    """Determine each marked item's quirks that apply; UsageError for an unknown id or a test without the fixture."""
    try:
        registry = Registry.load()
        forced = registry.overrides(current().quirks)
    except PortattnError as error:
        raise pytest.UsageError(str(error)) from None
    for item in items:
        named = [quirk for mark in item.iter_markers(QUIRK) for quirk in _quirks(item, mark, registry)]
        if FIXTURE not in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(f"{item.nodeid}: the marker {QUIRK} needs the fixture {FIXTURE}, which it lacks")
        params = getattr(getattr(item, "callspec", None), "params", {})
        target = target_of(params.get(FIXTURE))
        if target is not None:
            found = tuple(quirk for quirk in named if _applies(quirk, target, *forced))
            item.stash[KEY] = found
            item.user_properties += [("portattn_target", target.name), ("portattn_toolchain", str(target.toolchain))]
            if found:
                item.user_properties.append(("portattn_quirks", ", ".join(quirk.id for quirk in found)))


def _quirks(item: pytest.Item, mark: pytest.Mark, registry: Registry) -> Iterator[Quirk]:
    if not mark.args or mark.kwargs or not all(isinstance(text, str) for text in mark.args):
        raise pytest.UsageError(f"{item.nodeid}: the marker {QUIRK} takes ids of quirks, as in {QUIRK}('rocm-0015')")
    for text in mark.args:
        try:
            yield registry.quirk(text, item.nodeid, QUIRK)
        except PortattnError as error:
            raise pytest.UsageError(str(error)) from None


def _applies(quirk: Quirk, target: Target, on: frozenset[str], off: frozenset[str]) -> bool:
    """Return whether a quirk applies to a target and its toolchain, whatever portattn's own kernels and problems."""
    if quirk.id in off or not quirk.names_chip(target):
        return False
    return quirk.id in on or quirk.in_range(target.toolchain)


def judge(item: pytest.Item, call: Any, report: pytest.TestReport) -> None:
    """Change the report of a test that must fail: xfail for its reason; red if it passes or fails otherwise."""
    quirks = item.stash.get(KEY, ())
    if not quirks or item.config.option.runxfail or call.when == "teardown":
        return
    if report.skipped or hasattr(report, "wasxfail"):
        return
    ids = ", ".join(quirk.id for quirk in quirks)
    if call.excinfo is None:
        if call.when == "call":
            report.outcome = "failed"
            report.longrepr = "\n".join(_passed(quirk, item) for quirk in quirks)
        return
    found = next((quirk for quirk in quirks if _explains(quirk, call.excinfo.value)), None)
    if found is not None:
        report.outcome = "skipped"
        report.wasxfail = f"{found.id}: {found.title}"
    else:
        wanted = "; ".join(_wanted(quirk) for quirk in quirks)
        report.sections.append((QUIRK, f"expected to fail for {ids}, and fails for another reason than {wanted}"))


def _passed(quirk: Quirk, item: pytest.Item) -> str:
    properties = dict(item.user_properties)
    target, toolchain = properties["portattn_target"], properties["portattn_toolchain"]
    return (
        f"passes, though {quirk.id} applies to {target} with {toolchain}: {quirk.title}. The quirk may be retired, or "
        f"its range narrowed: `portattn quirks probe {quirk.id} --target {target} --toolchain {toolchain}` looks."
    )


def _wanted(quirk: Quirk) -> str:
    if quirk.evidence.signature:
        return f"its signature {quirk.evidence.signature!r}"
    return {
        "hang": "a compile that does not end",
        "wrong-result": "a failed assertion",
        "slow": "a failed assertion",
    }.get(quirk.symptom, "a signature, of which the entry has none")


def _explains(quirk: Quirk, error: BaseException) -> bool:
    return any(matches(quirk, *said) for one in _chain(error) for said in _said(one))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _said(error: BaseException) -> Iterator[tuple[Outcome, str, str]]:
    """Yield a failure as a probe's arm: outcome, kind, text; nothing if a compile says nothing of the compiler."""
    if isinstance(error, CompileError):
        if not error.unavailable:
            yield ("hang" if error.outcome == "hang" else "fail"), error.kind, error.log
    else:
        # An assertion says what no compiler does, as a probe's own `BugFound`: wrong numbers, slow code.
        kind = BUG_FOUND if isinstance(error, AssertionError) else type(error).__name__
        yield "fail", kind, f"{type(error).__name__}: {error}"
