"""pyproject.toml names every package and file of the source tree: an editable install would work without that."""

from __future__ import annotations

import sys

import pytest
from places import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.parametrize(("folder", "package"), [("portattn", "portattn"), ("backends", "portattn.backends")])
def test_every_folder_with_modules_is_installed(folder: str, package: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    modules = [path.relative_to(ROOT / folder).parent for path in (ROOT / folder).rglob("*.py")]
    found = {".".join((package, *path.parts)) for path in modules}
    assert found, folder
    assert sorted(found - set(settings["packages"])) == []


def test_every_installed_file_that_is_no_module_is_named() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    sources = [path for path in (ROOT / "portattn").rglob("*") if path.suffix in (".c", ".jinja", ".typed")]
    assert sources
    for path in sources:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(path.match(pattern) for pattern in settings["package-data"].get(package, [])), path
