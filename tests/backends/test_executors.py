"""What backends give as executors: names that lead somewhere, and imports that a serving process does without."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys

import pytest

from portattn.planning.registry import Registry, parse_target
from portattn.schema.quirk import LEVELS
from portattn.testing.executor import analyst, arches, executors, lacks
from portattn.tools.matrix.cells import Cell
from portattn.worker.serve import TASK

BACKENDS = list(Registry.load().backends)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_executor_s_names_lead_somewhere(backend: str) -> None:
    for name, executor in executors(backend).items():
        assert executor.level in LEVELS
        assert name in Cell.__struct_fields__
        for task, taken in ((executor.task, ["request", "enter"]), (executor.code_task, ["request", "arguments"])):
            if task:
                assert TASK.fullmatch(task)
                assert list(inspect.signature(pkgutil.resolve_name(task)).parameters) == taken
        for arch in executor.arches:
            assert arch in Registry.load().arches[backend]


def test_executors_are_found_by_name() -> None:
    assert set(arches("emulated").values()) == {"rocm"}
    assert not executors("cpu")
    found = [backend for backend in BACKENDS if any(one.lowers_to for one in executors(backend).values())]
    assert found == ["ascend"]
    reader = analyst(parse_target("ascend:ascend910b2", "triton-ascend==3.2.0"))
    assert reader is not None
    assert reader.asks == "text"
    assert analyst(parse_target("rocm:gfx942", "triton==3.6.0")) is None


def test_what_lacks_is_said_of_targets_of_other_backends_too() -> None:
    assert lacks("emulated", parse_target("rocm:gfx942", "triton==3.6.0")) == ""
    assert "sm_90 has no model here" in lacks("emulated", parse_target("cuda:sm_90", "triton==3.6.0"))
    assert "is no NVIDIA GPU" in lacks("older", parse_target("rocm:gfx942", "triton==3.6.0"))
    assert lacks("painted", parse_target("cuda:sm_90", "triton==3.6.0")).startswith("nothing runs the code of cuda:")


def test_backends_import_no_executor_before_they_are_asked() -> None:
    program = """
import sys
from portattn.planning.registry import Registry
Registry.load()
print([n for n in sys.modules if "executor" in n or "emulator" in n or ".linalg" in n or "ptx_compat" in n])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
