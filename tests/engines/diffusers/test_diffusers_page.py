"""docs/diffusers.md shows what its examples print, and names the versions that register() takes."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest
import test_docs
import test_docstrings
from places import DOCS, ROOT

from portattn.integrations import diffusers as integration


def test_the_examples_of_the_page(tmp_path: Path) -> None:
    test_docs.assert_shown("diffusers", 4, tmp_path)


def test_the_versions_of_the_page_and_of_the_extra() -> None:
    page = (DOCS / "diffusers.md").read_text(encoding="utf-8")
    assert f"diffusers {integration.OLDEST} to {integration.NEWEST}" in page
    extra = f'diffusers = ["diffusers>={integration.OLDEST},<={integration.NEWEST}"]'
    assert extra in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_register_s_docstring() -> None:
    assert test_docstrings.lacks(integration.register) == []
    test: Any = doctest.DocTestParser().get_doctest(inspect.getdoc(integration.register) or "", {}, "it", None, 0)
    found = doctest.DocTestRunner(verbose=False).run(test)
    assert found.attempted >= 4
    assert found.failed == 0


def test_an_environment_without_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what is missing, and how to install it."""
    import builtins
    import importlib

    real = builtins.__import__

    def missing(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "diffusers":
            raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    source = importlib.util.find_spec("portattn.integrations.diffusers")  # type: ignore[attr-defined]
    module = importlib.util.module_from_spec(source)  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"needs diffusers, which is not installed: pip install .*\[diffusers\]"):
        source.loader.exec_module(module)
