"""What the tests of all engines share: an engine that is not installed skips its folder, and a report of features.

    pytest tests/engines/vllm --engine-report docs/engines

writes docs/engines/vllm-<version>.json, of which docs/engines.md has a row. It is written for a whole folder alone,
never for tests that -k or a node's name selects.

An engine's own conftest.py imports the engine inside fixtures: pytest loads it before the folder can be skipped.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ENGINES = Path(__file__).parent
# features.py lies here. Not for longer: engines look each other up by name, and the folders here have their names.
sys.path.insert(0, str(ENGINES))
import features  # noqa: E402

while str(ENGINES) in sys.path:
    sys.path.remove(str(ENGINES))

MARKER = "engine_feature"


def engine_of(path: Path) -> str:
    """The engine whose folder a test file lies in; empty for files beside the folders."""
    parts = path.relative_to(ENGINES).parts
    return parts[0] if len(parts) > 1 else ""


class _Absent(pytest.Module):
    """A test file whose engine is not installed. It is not imported."""

    def collect(self) -> Any:
        pytest.skip(features.absent(engine_of(self.path)), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    engine = engine_of(module_path)
    return _Absent.from_parent(parent, path=module_path) if engine and features.absent(engine) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-report", default="", metavar="FOLDER",
        help="write <engine>-<version>.json there: the engine's features, as its tests found them",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--engine-report", "")
    if folder and not hasattr(config, "workerinput"):  # with xdist, its parent alone writes
        config.pluginmanager.register(_Writer(Path(folder), config))


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in item.iter_markers(MARKER):
        _check(item.nodeid, *mark.args, **mark.kwargs)
        item.user_properties.append((MARKER, {"refused": False, **mark.kwargs, "name": mark.args[0]}))


def _check(where: str, name: str, *, refused: bool = False) -> None:
    if not isinstance(name, str) or not isinstance(refused, bool):
        raise pytest.UsageError(f"{where}: @pytest.mark.{MARKER}(name, refused=False) takes a str and a bool")


@pytest.fixture
def refusal(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`with refusal(ArgumentError, match="dropout_p") as raised:`: pytest.raises, whose text becomes the reason."""

    @contextmanager
    def expect(kind: type[BaseException] | tuple[type[BaseException], ...], match: str) -> Iterator[Any]:
        with pytest.raises(kind, match=match) as raised:
            yield raised
        text = " ".join(str(raised.value).split())
        request.node.user_properties.append(("refusal", text))

    return expect


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A test marked refused=True shows the refusal, not only says so."""
    result = yield
    names = [mark.args[0] for mark in pyfuncitem.iter_markers(MARKER) if mark.kwargs.get("refused")]
    shown = [text for key, text in pyfuncitem.user_properties if key == "refusal"]
    assert not names or shown, f"{names} are marked refused=True: expect the error by the fixture `refusal`"
    return result


class _Writer:
    """Collects the outcomes of a run, and writes one file an engine."""

    def __init__(self, folder: Path, config: pytest.Config) -> None:
        self.folder, self.config = folder, config
        self.reports: dict[str, features.Report] = {}
        self.seen: dict[str, tuple[str, str]] = {}  # node -> outcome and reason of its worst phase
        self.partial = [arg for arg in config.args if not Path(arg).is_dir()]
        self.lines: list[str] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.partial += [item.nodeid for item in items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seen.setdefault(report.nodeid, ("passed", ""))
        elif report.skipped:
            _, _, why = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
            self.seen[report.nodeid] = ("skipped", why.removeprefix("Skipped: "))
        elif report.failed:
            self.seen[report.nodeid] = ("failed", f"{report.when} of {report.nodeid.rpartition('/')[2]}")
        if report.when == "teardown":
            self._add(report)

    def _add(self, report: pytest.TestReport) -> None:
        engine = engine_of(Path(str(self.config.rootpath)) / report.nodeid.partition("::")[0])
        marks = [value for key, value in report.user_properties if key == MARKER]
        texts = [value for key, value in report.user_properties if key == "refusal"]
        outcome, reason = self.seen.pop(report.nodeid)
        found = self.reports.setdefault(engine, features.Report(engine))
        found.add(marks, outcome, reason or " ".join(texts[:1]))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.lines.append(f"no report of engines was written: pytest ended with {exitstatus!r}")
        elif self.partial:
            self.lines.append(f"no report of engines was written: not a whole folder ran ({self.partial[0]}, …)")
        else:
            written = [report.write(self.folder) for report in self.reports.values() if report.features]
            self.lines += [f"features of engines: {path}" for path in written]
            if not written:
                self.lines.append("no report of engines was written: no test has the mark engine_feature")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.lines:
            terminalreporter.write_line(line)
