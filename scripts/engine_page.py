"""docs/engines.md from docs/engines/*.json: which features of which engines' versions work, and what is refused.

    python scripts/engine_page.py            write the page
    python scripts/engine_page.py --check    exit with 1 where the page is not what the files give

The files are written by `pytest tests/engines/<engine> --engine-report docs/engines` in an environment of the engine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER, PAGE = ROOT / "docs" / "engines", ROOT / "docs" / "engines.md"
COLUMNS = 120  # of the documentation
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "diffusers": "diffusers", "flash_attn": "flash_attn", "hub": "Hub kernels"}
GUIDES = {"vllm": "vllm.md", "sglang": "sglang.md", "diffusers": "diffusers.md", "flash_attn": "flash-attn.md"}
STATUSES = {"works", "refused", "failed", "not run"}
HEAD = """\
# Engines

What portattn's adapters do in each version of an engine that was tried. The tables are made from runs of
`tests/engines/<engine>` with the engine installed: its own classes drive portattn, with random weights, and results are
compared with the engine's own backend or with float64 under [the error budget](testing.md). They ran on a CPU, and say
nothing about speed.

| in a table | means |
| --- | --- |
| works | every test of the feature passed |
| refused | an error names what is not supported, before anything is computed; the reason is below the table |
| not run | the tests were skipped; the reason is below the table |
| **failed** | a test failed |
| – | this version's run had no test of the feature |

Of a version that has no column there is no whole run in an environment of its own; the engine's page says how else it
was tried. The adapters refuse versions outside the range that they name.

To run an engine's tests again, and make this page of what they found:

```
python scripts/engine_env.py make diffusers==0.42.1
python scripts/engine_env.py test diffusers-0.42.1 --engine-report docs/engines
python scripts/engine_page.py
```

<!-- Made by scripts/engine_page.py from docs/engines/*.json. -->
"""


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Engine -> its files' contents, oldest version first. Raises ValueError for a file that no run writes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        contents = json.loads(path.read_text(encoding="utf-8"))
        expected = f"{contents['engine']}-{contents['version']}.json"
        unknown = {entry["status"] for entry in contents["features"].values()} - STATUSES
        if path.name != expected or unknown:
            raise ValueError(f"{path}: {unknown or f'is named {expected} by what it holds'}")
        found.setdefault(contents["engine"], []).append(contents)
    for runs in found.values():
        runs.sort(key=lambda run: [int(number) for number in re.findall(r"\d+", run["version"])])
    return found


def page(found: dict[str, list[dict[str, Any]]]) -> str:
    sections = [section(engine, found[engine]) for engine in sorted(found, key=_order)]
    return "\n".join([HEAD, *sections])


def _order(engine: str) -> tuple[int, str]:
    known = list(NAMES)
    return (known.index(engine) if engine in known else len(known), engine)


def section(engine: str, runs: list[dict[str, Any]]) -> str:
    """One engine: what ran, a table of features by versions, and reasons."""
    lines = [f"## {NAMES.get(engine, engine)}", ""]
    if engine in GUIDES and (ROOT / "docs" / GUIDES[engine]).exists():
        lines += [f"How to use it: [{NAMES[engine]}]({GUIDES[engine]}).", ""]
    lines += ["| version | torch | Triton | portattn | date | tests |", "| --- | --- | --- | --- | --- | --- |"]
    for run in runs:
        versions = run["versions"]
        tests = sum(entry["tests"] for entry in run["features"].values())
        cells = [run["version"], versions["torch"], versions["triton"] or "–", versions["portattn"], run["date"], tests]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    names = sorted({name for run in runs for name in run["features"]}, key=lambda name: (_refused(name, runs), name))
    lines += ["", "| feature | " + " | ".join(run["version"] for run in runs) + " |"]
    lines.append("| --- |" + " --- |" * len(runs))
    for name in names:
        lines.append(f"| {_escaped(name)} | " + " | ".join(_cell(run["features"].get(name)) for run in runs) + " |")
    reasons = [reason for name in names for reason in _reasons(name, runs)]
    if reasons:
        lines += ["", "Why:", "", *reasons]
    return "\n".join(lines) + "\n"


def _refused(name: str, runs: list[dict[str, Any]]) -> bool:
    """Whether no version has it: such features come last."""
    return all(run["features"].get(name, {"status": "refused"})["status"] == "refused" for run in runs)


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    return "**failed**" if entry["status"] == "failed" else str(entry["status"])


def _reasons(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """A line for each reason that some version has, with the versions where it is not all of them."""
    by_reason: dict[str, list[str]] = {}
    for run in runs:
        entry = run["features"].get(name)
        if entry is not None and entry.get("reason"):
            by_reason.setdefault(entry["reason"], []).append(run["version"])
    lines: list[str] = []
    for reason, versions in by_reason.items():
        where = "" if len(versions) == len(runs) else f" ({', '.join(versions)})"
        text = f"- {_escaped(name)}{where}: {_literal(reason)}"
        lines += textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines


def _escaped(text: str) -> str:
    """What Markdown would read as something else: names of classes and arguments stay as they are."""
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", text)


def _literal(reason: str) -> str:
    """An error's text, as code; a backtick inside would end it."""
    return "`" + reason.replace("`", "'") + "`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    text = page(read(FOLDER))
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != text:
        print("docs/engines.md is not what docs/engines/*.json give: python scripts/engine_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
