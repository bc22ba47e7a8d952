"""Calling the command line in this process."""

import pytest
from planted import planted as planted
from planted import portattn as portattn

from portattn.testing import executor


@pytest.fixture
def quick_cells(monkeypatch):
    """Cells of the matrix are made without the interpreter and without this machine's devices."""
    monkeypatch.setattr(executor, "interpreter_missing", lambda: "left out by this test")
    monkeypatch.setattr("portattn.planning.registry.devices", lambda: [])
