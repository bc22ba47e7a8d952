"""The pytest plug-in: portattn's conformance cases as tests, and a team's own kernels per target and compiler.

pytest loads it in every run of an environment with portattn: it imports pytest alone until an option, the fixture or
the marker is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from portattn.integrations.pytest_plugin.targets import KernelTarget

FIXTURE = "portattn_target"
QUIRK = "portattn_quirk"
CONFORMANCE = "portattn_conformance"
# Options by the names under which pytest keeps them.
OPTIONS = {
    "portattn_target": "--portattn-target",
    "portattn_toolchain": "--portattn-toolchain",
    "portattn_conformance": "--portattn-conformance",
    "portattn_baseline": "--portattn-baseline",
    "portattn_expected": "--portattn-expected",
    "portattn_fail_on": "--portattn-fail-on",
    "portattn_seconds": "--portattn-seconds",
}
NODES = "portattn::"  # how ids of conformance cases begin
USAGE = "portattn: usage"  # the id under which a worker of pytest-xdist reports a usage error


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("portattn", "portattn: conformance cases and kernels per target and toolchain")
    group.addoption(
        OPTIONS["portattn_target"], action="append", default=[], metavar="TARGET",
        help="Targets, as `cuda:sm_90`, `gfx942`, `h100` or a family (`rdna3`); repeat it, or use commas.",
    )  # fmt: skip
    group.addoption(
        OPTIONS["portattn_toolchain"], action="append", default=[], metavar="NAME==VERSION",
        help="Compile with this compiler, installed or in portattn's lab; repeat it for several.",
    )  # fmt: skip
    group.addoption(
        OPTIONS["portattn_conformance"], nargs="?", const="quick", default=None, metavar="SELECTION",
        help="Also run portattn's conformance cases: quick (the default), full, or globs on ops and problems' names.",
    )  # fmt: skip
    group.addoption(
        OPTIONS["portattn_baseline"], default=None, metavar="FILE",
        help="A baseline, or an earlier run of the matrix: a conformance case that lost something since is red.",
    )  # fmt: skip
    group.addoption(
        OPTIONS["portattn_expected"], default=None, metavar="FILE",
        help="The conformance cases that are expected to fail, and why.",
    )  # fmt: skip
    group.addoption(
        OPTIONS["portattn_fail_on"], action="append", default=[], metavar="WORDS",
        help="Further changes that are red: not_run, note; with a baseline also new, facts, quirks, won.",
    )  # fmt: skip
    group.addoption(
        OPTIONS["portattn_seconds"], type=float, default=None, metavar="N",
        help="Limit of each compile and each numerical check; 120 unless told.",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{QUIRK}(id): of a test with the fixture {FIXTURE}: fails with the quirk's signature where it applies",
    )
    config.addinivalue_line("markers", f"{CONFORMANCE}: a conformance case of portattn")
    # Ids of conformance cases name no file: pytest must not look for them.
    nodes = [arg for arg in config.args if arg.startswith(NODES)]
    if nodes:
        config.args[:] = [arg for arg in config.args if not arg.startswith(NODES)]
    if nodes or any(config.getoption(name) not in (None, []) for name in OPTIONS):
        from portattn.integrations.pytest_plugin import session

        session.begin(config, nodes)
    if nodes:
        session.check_nodes(config)  # here, since under pytest-xdist this process collects nothing
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_OfWorkers())


class _OfWorkers:
    """Report workers' usage errors at collection once, as the whole run's, under pytest-xdist."""

    found = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.found = self.found or (report.failed and report.nodeid == USAGE)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.found:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR


def pytest_unconfigure(config: pytest.Config) -> None:
    if any(config.getoption(name, None) not in (None, []) for name in OPTIONS):
        from portattn.integrations.pytest_plugin import session

        session.end(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("portattn_target") or config.getoption("portattn_conformance") is not None:
        from portattn.integrations.pytest_plugin import session

        return session.header(config)
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if FIXTURE in metafunc.fixturenames and metafunc.config.getoption("portattn_target"):
        from portattn.integrations.pytest_plugin import targets

        targets.parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    # First, so that -k, -m, --deselect and --last-failed see the conformance cases.
    try:
        if config.getoption("portattn_conformance") is not None:
            from portattn.integrations.pytest_plugin.session import collect_cases

            items.extend(collect_cases(session))
        marked = [item for item in items if item.get_closest_marker(QUIRK)]
        if marked:
            _quirk_marks().resolve(marked)
    except pytest.UsageError as error:
        if not hasattr(config, "workerinput"):
            raise
        # pytest-xdist tells of a worker that raises here by an internal error, which does not say why. It hands on a
        # failed collection.
        report = pytest.CollectReport(nodeid=USAGE, outcome="failed", longrepr=str(error), result=None)
        config.hook.pytest_collectreport(report=report)
        items.clear()


def _quirk_marks() -> Any:
    """Return the marker's module. Raises UsageError if a package of the extra `tools` is not installed."""
    try:
        from portattn.integrations.pytest_plugin import targets
    except ModuleNotFoundError as error:
        from portattn.source_tree import install_extra

        raise pytest.UsageError(f"the marker {QUIRK} needs {error.name}: {install_extra('tools')}") from None
    return targets


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker(QUIRK):
        _quirk_marks().judge(item, call, report)
    return report


@pytest.fixture(scope="session")
def portattn_target(request: pytest.FixtureRequest) -> KernelTarget:
    """Return a target of --portattn-target with a toolchain, whose `compile` compiles a kernel; skip without one."""
    from portattn.integrations.pytest_plugin import targets

    return targets.kernel_target(request)


@pytest.fixture
def portattn_amdgpu() -> Callable[..., Any]:
    """Return `emulate`: `with portattn_amdgpu("gfx942"):` runs Triton's kernels in a model of the chip; or skip."""
    pytest.importorskip("triton")
    from portattn.backends.rocm.emulator.amdgpu.triton_driver import emulate

    return emulate
