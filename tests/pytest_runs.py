"""What the fixture `inner` of the pytest plug-in's tests is: its conftest cannot be imported by name."""

from collections.abc import Callable

import pytest

Runner = Callable[..., pytest.RunResult]
