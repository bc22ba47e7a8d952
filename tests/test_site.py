"""`make site` fails for what it promises to fail for, and shows parameters as a table."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
pytest.importorskip("griffe", reason="the extra `docs` is not installed")
if shutil.which("make") is None:
    pytest.skip("there is no `make`", allow_module_level=True)


def build(tmp_path: Path, **pages: str) -> subprocess.CompletedProcess[str]:
    """Run the Makefile's `site` on these pages, by the repository's settings without hooks; `start` is in the nav."""
    for name, text in pages.items():
        (tmp_path / f"{name}.md").write_text(text, encoding="utf-8")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")  # the extension's path is the configuration file's
    settings = f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [start.md]\nhooks: []\n"
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    given = ["VENV=", f"PYTHON={sys.executable}", "PAGES=" + " ".join(f"{name}.md" for name in pages)]
    command = ["make", "-f", str(ROOT / "Makefile"), "--old-file=.venv-none.stamp", "site", *given]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120, check=False
    )


def test_pages_whose_links_hold_are_built(tmp_path: Path) -> None:
    done = build(tmp_path, start="# Start\n\n[here](#start)\n\n::: portattn.merge_states\n")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / ".site" / "html" / "start.html").read_text(encoding="utf-8")
    assert "(..., Sq, Dv)" in page.partition("<table>")[2]  # the parameters of merge_states
    assert 'src="http' not in page
    assert 'rel="stylesheet" href="http' not in page


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ({"start": "[gone](gone.md)"}, "gone.md"), ({"start": "# Start\n\n[gone](#gone)"}, "#gone"),
        ({"start": "# Start\n\n[gone](folder/)"}, "folder/"), ({"start": "# Start", "other": "# Other"}, "other.md"),
        ({"start": "::: portattn.gone"}, "portattn.gone"),
    ],
    ids=["link", "anchor", "folder", "navigation", "reference"],
)  # fmt: skip
def test_what_is_dead_fails_the_build(pages: dict[str, str], words: str, tmp_path: Path) -> None:
    done = build(tmp_path, **pages)
    assert done.returncode != 0
    assert words in done.stderr + done.stdout
