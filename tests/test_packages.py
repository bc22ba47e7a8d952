"""pyproject.toml names every package and file of the source tree: an editable install would work without that."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from places import ROOT

from portattn.source_tree import install_extra

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
    kinds = (".c", ".jinja", ".js", ".pyi", ".typed")
    sources = [path for path in (ROOT / "portattn").rglob("*") if path.suffix in kinds]
    assert sources
    for path in sources:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(path.match(pattern) for pattern in settings["package-data"].get(package, [])), path


def test_an_extra_is_installed_from_where_portattn_is(tmp_path: Path) -> None:
    """No index has what is in a checkout; an installed portattn has backends/ inside its own folder."""
    package = tmp_path / "portattn"
    (tmp_path / "backends").mkdir()
    package.mkdir()
    assert install_extra("triton", str(package)) == "pip install -e '.[triton]' in the checkout"
    assert install_extra("triton") == "pip install -e '.[triton]' in the checkout"
    (package / "backends").mkdir()
    assert install_extra("triton", str(package)) == "pip install 'portattn[triton]'"


def test_every_hint_names_an_extra_that_there_is() -> None:
    """In code through install_extra alone, so that nobody is told to ask an index for a checkout's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    named = set()
    for path in [*(ROOT / "portattn").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"install_extra\([\"'](\w+)[\"']", text))
        assert "pip install " not in text or path.name == "source_tree.py", path
    assert {"triton", "tools", "transformers", "diffusers", "bench"} == named & extras == named
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        assert "pip install 'portattn[" not in text, page
        for several in re.findall(r"pip install (?:-e )?'\.\[([\w,]+)\]'", text):
            assert set(several.split(",")) <= extras, page
