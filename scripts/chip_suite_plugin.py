"""pytest's side of scripts/chip_suite.py: which tests are run, on which GPU, and a line for each as it ends.

Loaded by `-p chip_suite_plugin` in the process that pytest starts in and in each of xdist's workers, before any
conftest: a worker's GPU is chosen before anything asks for a device.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

GPUS = "CHIP_SUITE_GPUS"  # indices with commas between, for the workers

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
_gpus = [gpu for gpu in os.environ.get(GPUS, "").split(",") if gpu]
if _worker.startswith("gw") and _gpus:
    # The worker's own comes first, and the others stay visible: some tests need two.
    _own = int(_worker.removeprefix("gw")) % len(_gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus[_own:] + _gpus[:_own])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chip-results", type=Path, required=True, help="where a line is added for each test")
    parser.addoption("--chip-done", type=Path, required=True, help="names of tests to leave out, a line each")
    parser.addoption("--chip-only", action="store_true", help="only tests that run on the device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(config.getoption("--chip-done").read_text(encoding="utf-8").splitlines())
    only = config.getoption("--chip-only")
    wanted = [item for item in items if item.nodeid not in done and (on_chip(item) or not only)]
    wanted_ids = {item.nodeid for item in wanted}
    left = [item for item in items if item.nodeid not in wanted_ids]
    config.hook.pytest_deselected(items=left)
    items[:] = sorted(wanted, key=on_chip, reverse=True)  # a stable sort: when time runs out, the others are missing


def on_chip(item: pytest.Item) -> bool:
    """Whether the test runs kernels on the device where there is one: by the fixture `device`, or marked `gpu`."""
    return "device" in getattr(item, "fixturenames", ()) or item.get_closest_marker("gpu") is not None


class Results:
    """Adds a test's outcome to the file when its last phase ends: what has ended is kept, however the run ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.open.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 3)
        if report.failed:
            found |= {"outcome": "failed", "phase": report.when, "why": report.longreprtext[-4000:]}
        elif report.skipped and found["outcome"] == "passed":
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            found |= {"outcome": "skipped", "why": str(why)}
        if report.when not in ("setup", "call"):  # teardown, or "???": xdist's one report of a worker that died
            self.write(self.open.pop(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "why": report.longreprtext[-4000:]})

    def write(self, found: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers send their reports to the process that has none
        config.pluginmanager.register(Results(config.getoption("--chip-results")), "chip_suite_results")
