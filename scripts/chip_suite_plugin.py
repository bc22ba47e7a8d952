"""pytest's side of scripts/chip_suite.py: choose tests and their GPU, and write a line for each as it ends.

Loaded by `-p chip_suite_plugin` in pytest's first process and in each of xdist's workers, before any conftest: a
worker's GPU must be chosen before anything asks for a device."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

GPUS = "CHIP_SUITE_GPUS"  # the entries of VARIABLE, with commas between, that workers take turns at
VARIABLE = "CHIP_SUITE_VARIABLE"  # what names a process's devices: CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
_gpus = [gpu for gpu in os.environ.get(GPUS, "").split(",") if gpu]
if _worker.startswith("gw") and _gpus:
    # The worker's own comes first, and the others stay visible: some tests need two.
    _own = int(_worker.removeprefix("gw")) % len(_gpus)
    os.environ[os.environ[VARIABLE]] = ",".join(_gpus[_own:] + _gpus[:_own])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chip-results", type=Path, required=True, help="where a line is added for each test")
    parser.addoption("--chip-before", type=Path, required=True, help="JSON: names of tests by how they ended")
    parser.addoption("--chip-only", action="store_true", help="only tests that run on the device")


def pytest_configure(config: pytest.Config) -> None:
    before = json.loads(config.getoption("--chip-before").read_text(encoding="utf-8"))
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Selected(config, before), "chip_suite_selected")
    else:  # workers send their reports here
        config.pluginmanager.register(Results(config.getoption("--chip-results")), "chip_suite_results")


def on_chip(item: pytest.Item) -> bool:
    """Return whether the test runs on the device if there is one: by the fixture `device`, or a mark."""
    marked = any(item.get_closest_marker(name) is not None for name in ("gpu", "on_device"))
    return marked or "device" in getattr(item, "fixturenames", ())


class Selected:
    """A worker's tests, and their order."""

    def __init__(self, config: pytest.Config, before: dict[str, list[str]]) -> None:
        self.only = config.getoption("--chip-only")
        self.passed, self.others = set(before["passed"]), set(before["others"])

    @pytest.hookimpl(trylast=True)  # after -k and -m have taken theirs
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        asked = [item for item in items if on_chip(item) or not self.only]
        wanted = {item.nodeid for item in asked} - self.passed
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])

        def late(item: pytest.Item) -> tuple[bool, bool]:
            # When time runs out, the others are missing: those without a device, and what has run before.
            return not on_chip(item), item.nodeid in self.others

        items[:] = sorted((item for item in asked if item.nodeid in wanted), key=late)
        config.workeroutput["chip_suite"] = {"asked": len(asked), "left": len(items)}  # type: ignore[attr-defined]


class Results:
    """Writes a test's outcome when its last phase ends, so that it is kept however the run ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.open.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 3)
        if report.failed:
            found |= {"outcome": "failed", "phase": report.when, "why": report.longreprtext[-4000:]}
            found |= {"said": report.capstdout[-1500:]}
        elif report.skipped and found["outcome"] == "passed":
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            found |= {"outcome": "skipped", "why": str(why)}
        if report.when not in ("setup", "call"):  # teardown, or "???": xdist's one report of a worker that died
            self.write(self.open.pop(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write({"collection": report.nodeid, "why": report.longreprtext[-4000:]})

    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Write a finished worker's requested tests; a killed worker has told nothing."""
        told = getattr(node, "workeroutput", {}).get("chip_suite")
        if told:
            self.write({"selected": told})

    def write(self, found: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
