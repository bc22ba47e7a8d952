"""`make site` fails for what it promises to fail for, and shows the docstrings' lists as lists."""

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


sys.path.insert(0, str(ROOT / "scripts"))
from aligned_docstrings import markdown


def build(tmp_path: Path, **pages: str) -> subprocess.CompletedProcess[str]:
    """Run the Makefile's own `site` on these pages by the repository's settings. Only `start` is in the navigation."""
    for name, text in pages.items():
        (tmp_path / f"{name}.md").write_text(text, encoding="utf-8")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")  # the extension's path is the configuration file's
    settings = f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [start.md]\n"
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
    assert "<dl>" in page  # the aligned list of merge_states' parameters
    assert 'src="http' not in page
    assert 'rel="stylesheet" href="http' not in page


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ({"start": "[gone](gone.md)"}, "gone.md"),
        ({"start": "# Start\n\n[gone](#gone)"}, "#gone"),
        ({"start": "# Start\n\n[gone](folder/)"}, "folder/"),
        ({"start": "# Start", "other": "# Other"}, "other.md"),
        ({"start": "::: portattn.gone"}, "portattn.gone"),
    ],
    ids=["link", "anchor", "folder", "navigation", "reference"],
)
def test_what_is_dead_fails_the_build(pages: dict[str, str], words: str, tmp_path: Path) -> None:
    done = build(tmp_path, **pages)
    assert done.returncode != 0
    assert words in done.stderr + done.stdout


def test_an_aligned_list_becomes_a_definition_list() -> None:
    text = """Of q and k.

    q           (B, D), of any
                strides
    seqlens_q/k (B,) int32
    a, b        <id>.toml or `<id>`

    The rest.
    """
    assert markdown(text) == (
        "Of q and k.\n\n"
        "`q`\n:   (B, D), of any strides\n\n"
        "`seqlens_q/k`\n:   (B,) int32\n\n"
        "`a`, `b`\n:   &lt;id>.toml or `<id>`\n\n"
        "The rest."
    )


def test_sentences_and_examples_stay_what_they_are() -> None:
    assert markdown("One line.\n\nTwo lines  of\na sentence.") == "One line.\n\nTwo lines  of\na sentence."
    assert markdown("Use.\n\n>>> f()\n1\n") == "Use.\n\n```pycon\n>>> f()\n1\n```"
