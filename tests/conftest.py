"""What every test gets: a device to run kernels on, settings of its own, and no state left over from another test.

Triton decides once a process whether kernels are compiled or interpreted, so the choice is made here, before anything
imports it: compiled where there is an accelerator, interpreted (numpy on the CPU) where there is none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ACCELERATOR = torch.cuda.is_available()
if ACCELERATOR:
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))  # tests share helpers by `import support`

import support  # noqa: E402

from portattn import config  # noqa: E402

torch.set_num_threads(1)  # problems are tiny, and test processes run side by side


def pytest_configure(config: pytest.Config) -> None:
    # Triton's interpreter turns one-element arrays into scalars, and reduces over rows that hold only NaN (padding).
    for ignored in ("DeprecationWarning:triton.runtime.interpreter", "RuntimeWarning:triton.runtime.interpreter"):
        config.addinivalue_line("filterwarnings", f"ignore::{ignored}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_interpreter = support.no_interpreter()
    for item in items:
        if item.get_closest_marker("gpu") and not ACCELERATOR:
            item.add_marker(pytest.mark.skip(reason="torch sees no accelerator"))
        if item.get_closest_marker("interpreter") and ACCELERATOR:
            item.add_marker(pytest.mark.skip(reason="Triton compiles for the accelerator in this process"))
        if item.get_closest_marker("interpreter") and no_interpreter:
            item.add_marker(pytest.mark.skip(reason=no_interpreter))
        if item.get_closest_marker("compiles") and support.TRITON is None:
            item.add_marker(pytest.mark.skip(reason="Triton is not installed"))


@pytest.fixture(scope="session")
def device() -> support.Device:
    """Where kernels run: the accelerator where there is one, else the CPU under Triton's interpreter."""
    if ACCELERATOR:
        if support.TRITON is None:
            pytest.skip("Triton is not installed")
        return support.Device("cuda", "triton")
    reason = support.no_interpreter()
    if reason:
        pytest.skip(reason)
    return support.Device("cpu", "interpreter")


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No PORTATTN_* of the developer's, and verdicts in a folder of the test's own."""
    for name in [n for n in os.environ if n.startswith("PORTATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PORTATTN_CACHE_DIR", str(tmp_path / "cache"))
    config.environment_settings.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    """Plans, warnings given and the last plan are the process's: each test starts without any."""
    from portattn import compiling, dispatch

    dispatch.forget_plans()
    dispatch.detect_target.cache_clear()
    dispatch._warned.clear()
    dispatch._last.set(None)
    compiling._ready.clear()
    yield
    dispatch.forget_plans()
    dispatch.detect_target.cache_clear()
