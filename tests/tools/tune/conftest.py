"""Classes of the fake kernel, and searching them on the CPU."""

import datetime
import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from faketunable import FILE, SMALL, FakeClock, NoWorker
from planted import planted as planted

from portattn.planning.data_files import load_tuning
from portattn.planning.registry import parse_target
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain
from portattn.tools.tune.classes import Class, classes, parse, workload
from portattn.tools.tune.log import History
from portattn.tools.tune.records import Origin, Outcome, Record
from portattn.tools.tune.run import TuneOptions, Tuner


@pytest.fixture
def target() -> Target:
    return parse_target("cuda:sm_90", "triton==3.6.0")


@pytest.fixture
def base() -> str:
    return FILE


@pytest.fixture
def class_of(class_with, target) -> Callable[..., Class]:
    """The class of some problems, which a file (FILE unless another is named) has an incumbent for."""
    return functools.partial(class_with, target.toolchain)


@pytest.fixture
def class_with(tmp_path, target) -> Callable[..., Class]:

    def make(toolchain: Toolchain, tunable: Any, *texts: str, file: str | None = FILE) -> Class:
        tuning = None
        if file is not None:
            path = tmp_path / "made.toml"
            path.write_text(file)
            tuning = load_tuning(path, "cuda")
        found = classes(
            [tunable], [workload(parse(text)) for text in texts or (SMALL,)], tuning,
            msgspec.structs.replace(target, toolchain=toolchain),
        )  # fmt: skip
        assert len(found) == 1
        return found[0]

    return make


@pytest.fixture
def search(target) -> Callable[..., tuple[Outcome, list[Record]]]:
    """Search one class on the CPU with a fake clock: (outcome, records)."""

    def run(
        tunable: Any, of: Class, timed: bool = True, clock: Any = None, history: History | None = None, **options: Any
    ) -> tuple[Outcome, list[Record]]:
        records: list[Record] = []
        tuner = Tuner(
            target, [tunable], TuneOptions(**options), records.append, history or History([]),
            torch.device("cpu") if timed else None, (clock or FakeClock()) if timed else None,
            make=lambda name: NoWorker(),
        )  # fmt: skip
        return tuner.run([of], lambda one, outcome: None)[0], records

    return run


@pytest.fixture
def origin() -> Callable[..., Origin]:
    def make(*names: str, **changes: Any) -> Origin:
        fields: dict[str, Any] = {
            "target": "cuda:sm_90", "chip": "NVIDIA H200", "measured": True, "toolchain": "triton==3.6.0",
            "ptxas": "12.8.93", "torch": "2.11.0", "portattn": "0.1.0", "kernels": "abc", "commit": "1234567",
            "command": "portattn tune", "date": datetime.date(2026, 11, 22), "classes": dict.fromkeys(names, ("p",)),
        }  # fmt: skip
        return Origin(**(fields | changes))

    return make
