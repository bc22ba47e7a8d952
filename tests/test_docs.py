"""The pages under docs/ show what is true: examples and commands print what a page says, and lines are not too long."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean

import pytest
from click.testing import CliRunner
from places import DOCS, ROOT

from portattn.cli import main
from portattn.tools.bench.rounds import ratio

HIDDEN = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"), "")
COLUMNS = 120
CHOOSING = "choosing-a-backend.md"
# Tables that a program writes, one row an entry or a measurement: a row cannot be broken.
# Runs the examples that it reads, and writes what each printed.
CHILD = """
import contextlib, io, json, sys, warnings
warnings.simplefilter("ignore")  # on a CPU the reference path runs, and says so
namespace, printed = {}, []
for body in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(body, "docs", "exec"), namespace)
    printed.append(output.getvalue())
print(json.dumps(printed))
"""


def shows(shown: str, printed: str) -> bool:
    """Whether the lines shown are the lines printed; one that ends with … is the beginning of its line."""
    lines, full = shown.splitlines(), printed.splitlines()
    return len(lines) == len(full) and all(_begins(line, whole) for line, whole in zip(lines, full, strict=True))


def _begins(line: str, whole: str) -> bool:
    return whole.startswith(line[:-1].rstrip()) if line.endswith("…") else whole == line


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("operations", 7), ("serving", 3), ("training", 6), ("choosing-a-backend", 2), ("flash-attn", 2),
        ("context-parallel", 1), ("low-precision", 4), ("flex-attention", 5), ("../README", 1),
    ],
)  # fmt: skip
def test_the_examples_of_a_page(page: str, least: int, tmp_path: Path) -> None:
    assert_shown(page, least, tmp_path)


def assert_shown(page: str, least: int, tmp_path: Path) -> None:
    """In a process that sees no accelerator, whatever this machine has: the page shows what a CPU does."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    bodies = [body for kind, body in blocks if kind == "python"]
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(bodies), capture_output=True, text=True, timeout=240,
        cwd=tmp_path, env={**os.environ, **HIDDEN},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = iter(json.loads(done.stdout))
    printed = ""
    shown = 0
    for kind, body in blocks:
        if kind == "text":
            assert shows(body, printed), printed
            printed, shown = "", shown + 1
            continue
        assert not printed, f"the page does not show what is printed: {printed}"
        printed = next(outputs)
    assert not printed
    assert shown >= least


def commands(page: str) -> list[tuple[list[str], list[str]]]:
    """Each `$ portattn plan` of a page and the lines shown under it. A … stands for the first one's options."""
    found: list[tuple[list[str], list[str]]] = []
    rest: list[str] = []
    for block in re.findall(r"^```\w*\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for text in re.findall(r"^\$ portattn (plan .*?)(?=^\$ |\Z)", block, re.MULTILINE | re.DOTALL):
            command, _, output = text.replace("\\\n", " ").partition("\n")
            words = shlex.split(command)
            if words[-1] == "…":
                words = words[:-1] + rest
            rest = rest or words[words.index("--q") :]
            found.append((words, output.splitlines()))
    return found


SHOWN = [(page, *one) for page in (CHOOSING, "../README.md") for one in commands(page)]
assert len(SHOWN) > 5  # the pages that are compared have plans


@pytest.mark.parametrize(("words", "lines"), [pytest.param(*one, id=f"{page}-{one[0][3]}") for page, *one in SHOWN])
def test_a_plan_on_the_page_is_the_plan(words: list[str], lines: list[str]) -> None:
    """Lines may be left out, cut by …, and broken; they come in the page's order."""
    printed = CliRunner().invoke(main, words).output
    full = re.sub(r"\s+", " ", printed)
    assert lines
    place = 0
    for line in lines:
        part = re.sub(r"\s+", " ", line.strip().removesuffix("…").rstrip())
        found = full.find(part, place)
        assert found >= 0, f"not printed, or not in this order: {part}\n{printed}"
        place = found + len(part)


def test_the_speeds_of_the_readme_are_those_of_one_run() -> None:
    """Each cell of its table is a set's geometric mean and least ratio in docs/performance/releases.json."""
    sets = json.loads((DOCS / "performance" / "releases.json").read_text(encoding="utf-8"))["sets"]
    found = {(one["set"], one["release"]): one for one in sets if one["contender"] == "portattn"}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\(`(\w+)`\) \| (\d+) \| (.*) \| (.*) \| (.*) \| .* \|$", text, re.MULTILINE)
    assert len(rows) >= 5
    for name, cells, *shown in rows:
        ones = [found[name, release] for release in ("3.6.0", "3.8.0", "3.9.0")]
        assert shown == [f"{one['ratio']:.2f}×, {one['least_ratio']:.2f}×" for one in ones], name
        assert {one["cells"] for one in ones} == {int(cells)}, name


def too_long(text: str) -> list[int]:
    """Return numbers of the lines over the limit, except lines of one long word."""
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if len(line) > COLUMNS and " " in line.strip().removeprefix("- ")]


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")]
PAGES += sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_not_too_long(page: Path) -> None:
    assert too_long(page.read_text(encoding="utf-8")) == []


def test_a_line_that_is_too_long_is_found() -> None:
    words = "word " * 24
    assert too_long(f"short\n{words}end\n| {words}|\n") == [2, 3]
    assert too_long(f"{words.strip()}\n") == []
    assert too_long("- " + "x" * COLUMNS) == []  # an address


# A link's target, without its anchor: what the site alone has (scripts/site_pages.py) is no target for a code host.
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


def test_the_pages_that_the_site_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is in the navigation, in the repository nowhere, and links to files."""
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import site_pages

    made = site_pages.made_pages()
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path, text in made.items():
        assert f": {path}\n" in navigation
        assert text.startswith("# ")
        assert not (ROOT / path).exists()
        assert [link for link in LINK.findall(text) if not ((ROOT / path).parent / link).exists()] == []
    assert "[Quirks](quirks.md" in made["docs/quirk-catalogue.md"]
    assert "| dense18 | portattn | 18 of 18 |" in made["docs/performance/tables.md"]
    assert "| `cuda:sm_90` | H100 SXM, H200, H20, GH200 | hopper | 132 | 227 KiB |" in made["docs/architectures.md"]
    rows = dict(re.findall(r"^\| `(\S+)` \| (.+) \|$", made["docs/compatibility.md"], re.MULTILINE))
    assert re.fullmatch(r"(19 \(\d+\) \| ){8}", rows["cuda:sm_90"])
    assert re.fullmatch(r"(0 \(0\) \| ){5}(19 \(\d+\) \| ){3}", rows["rocm:gfx1250"])
    assert "NVIDIA H100" in made["docs/performance/tables-h100.md"]


# `make site` fails for what it promises to fail for, and shows parameters as a table.


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


def test_published_ratios_are_those_of_the_results() -> None:
    """Each set's geometric mean and least cell in README's table and performance.md's."""
    folder, text = DOCS / "performance", (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {row[1]: row[0] for row in re.finditer(r"^\|[^|]*\(`([\w-]+)`\).*", text, re.M)}
    assert {"dense18", "decode", "paged", "mla", "prefill"} <= set(rows)
    for one in json.loads((folder / "releases.json").read_text())["sets"]:
        if one["set"] in rows and one["contender"] == "portattn":
            assert f"| {one['ratio']:.2f}×, {one['least_ratio']:.2f}× |" in rows[one["set"]], one
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    whole = json.loads((folder / "results.json").read_text())["summaries"]
    for name, row in (("dense18", "dense:"), ("dense-gqa", "dense with"), ("dense-packed", "packed,"), ("mla", "lat")):
        (one,) = (one for one in whole if (one["set"], one["name"]) == (name, "portattn"))
        said = re.search(rf"^\| {row}[^|]*\|[^|]*\| ([\d.]+) \| ([\d.]+)", page, re.M).groups()
        figures = f"{one['ratio']:.{len(said[0]) - 2}f}", f"{one['worst']:.{len(said[1]) - 2}f}"
        assert said == figures, name


def test_ratios_over_the_newest_peers_are_those_of_their_rows() -> None:
    """Forward and backward over cuDNN and FlashAttention-4, and wide heads over cudnn-frontend and SDPA."""

    def ratios(name: str, peer: str, head_dim: int = 0) -> list[float]:
        lines = (DOCS / f"performance/peers-2026-12-01-{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row["type"] == "row"]
        rows = [row for row in rows if head_dim in (0, row["case"]["head_dim"])]
        times = [{one["name"]: one["rounds_ms"] for one in row["contenders"]} for row in rows]
        return [ratio(one[peer], one["portattn"]) for one in times]

    forward, wide = ratios("dense18", "fa4"), geometric_mean(ratios("dense-wide", "cudnn-frontend"))
    by_width = [geometric_mean(ratios("backward18", "fa4", width)) for width in (64, 128, 256)]
    least, sdpa = min(ratios("backward18", "fa4")), geometric_mean(ratios("dense-wide", "sdpa"))
    figures = [by(ratios(name, "sdpa-cudnn")) for name in ("dense18", "backward18") for by in (geometric_mean, min)]
    figures += [geometric_mean(forward), min(forward), by_width[0], by_width[1], least, by_width[2]]
    page = (DOCS / "performance.md").read_text(encoding="utf-8").partition("**Newest peers**")[2].partition("\n\n")[0]
    said = re.findall(r"\b\d\.\d+\b", re.sub(r"\S+\.jsonl|\d+\.\d+\.\d\S*", "", page))
    assert said == [*(f"{figure:.2f}" for figure in figures), f"{1 / wide:.1f}", f"{1 / sdpa:.1f}"]
