"""The fixture `portattn_target`: a target with a toolchain, and compiling a kernel for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from portattn.errors import ArgumentError, PortattnError
from portattn.integrations.pytest_plugin import FIXTURE, OPTIONS, session
from portattn.planning.registry import Registry
from portattn.schema.target import Target
from portattn.schema.toolchain import is_installed
from portattn.tools import lab
from portattn.tools.own_kernels import CompiledKernel, compile_for


class KernelTarget:
    """What a test gets as `portattn_target`.

    target     the portattn.Target: backend, arch with the chip's limits, toolchain
    name       BACKEND:ARCH
    toolchain  NAME==VERSION
    """

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

        kernel      a @triton.jit function at the top of a module's file, autotuned or not. The child imports that
                    file; what it imports besides Triton need not be in the lab's environment
        signature   run-time argument -> Triton's type: `*fp16`, `i32`, `fp32`
        constexprs  tl.constexpr argument -> number, text, bool or None; those with a default may be left out
        divisible   arguments that are multiples of 16; every pointer where None
        env         variables that the compiler reads, for this compile
        seconds     limit of time; --portattn-seconds, or 120
        options     of the compiler: num_warps, num_stages, ...

        Returns a Compiled: `spills`, `registers`, `shared_memory`, `facts`, `assembly`.

        Raises ArgumentError on a kernel that no child can import and on arguments that are not the kernel's,
        CompileError where the compiler fails, dies or does not end; its text has the end of the compiler's log.
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
    """One case of a test for each target and toolchain, where the test does not name its own."""
    own = (
        mark.args[0] if mark.args else mark.kwargs.get("argnames", "")
        for mark in metafunc.definition.iter_markers("parametrize")
    )
    if not any(FIXTURE in (names.replace(" ", "").split(",") if isinstance(names, str) else names) for names in own):
        pairs = [(one.name, str(one.toolchain)) for one in session.of(metafunc.config).asked.where]
        metafunc.parametrize(FIXTURE, pairs, ids=["-".join(pair) for pair in pairs], indirect=True)


def kernel_target(request: pytest.FixtureRequest) -> KernelTarget:
    """The fixture's value; skips the test where nothing compiles for it here."""
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
    """The target that a parameter of the fixture means: (target, toolchain) of the options, or a test's own text.

    Raises UsageError on a text that names none.
    """
    if param is None:
        return None
    name, toolchain = param if isinstance(param, tuple) else (param, None)
    try:
        return Registry.load().target(name, toolchain)
    except ArgumentError as error:
        raise pytest.UsageError(f"{FIXTURE} is {name!r}, but {error.limit}") from None


def _lacks(toolchain: str) -> str:
    """Why nothing compiles with a toolchain here; empty where something does."""
    if is_installed(toolchain):
        return ""
    try:
        lab.need(toolchain)
    except PortattnError as error:
        return f"not compiled here: {error}"
    return ""
