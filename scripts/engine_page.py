"""docs/engines.md from docs/engines/*.json: engines' versions that were tested, with counts of their features.

    python scripts/engine_page.py            write the page

The files are written by `pytest tests/engines/<engine> --engine-report docs/engines` in an environment of the engine.
"""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parent.parent
FOLDER, PAGE = ROOT / "docs" / "engines", ROOT / "docs" / "engines.md"
COLUMNS = 120  # of the documentation
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "diffusers": "diffusers", "flash_attn": "flash_attn", "hub": "Hub kernels"}
GUIDES = {"vllm": "vllm.md", "sglang": "sglang.md", "diffusers": "diffusers.md", "flash_attn": "flash-attn.md"}
STATUSES = {"works", "refused", "failed", "not run"}


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return engine -> its files' contents, oldest version first. Raises ValueError for a file that no run writes."""
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
    engines = sorted(found, key=lambda engine: ([*NAMES, engine].index(engine), engine))
    rows = [_row(engine, run) for engine in engines for run in found[engine]]
    others = [line for engine in engines for run in found[engine] for line in _others(engine, run)]
    text = Path(__file__).with_suffix(".jinja").read_text(encoding="utf-8")
    made = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True).from_string(text)
    return made.render(rows=rows, others=others)


def _row(engine: str, run: dict[str, Any]) -> list[Any]:
    name = NAMES.get(engine, engine)
    if engine in GUIDES and (ROOT / "docs" / GUIDES[engine]).exists():
        name = f"[{name}]({GUIDES[engine]})"
    versions, entries = run["versions"], list(run["features"].values())
    works, refused = (sum(entry["status"] == status for entry in entries) for status in ("works", "refused"))
    return [
        name, run["version"], versions["torch"], versions["triton"] or "–", versions["portattn"], run["date"],
        sum(entry["tests"] for entry in entries), works, refused, len(entries) - works - refused,
    ]  # fmt: skip


def _others(engine: str, run: dict[str, Any]) -> list[str]:
    """Return the features that failed or did not run, each with its reason."""
    lines: list[str] = []
    for name, entry in sorted(run["features"].items()):
        if entry["status"] not in ("works", "refused"):
            title = f"{NAMES.get(engine, engine)} {run['version']}, " + re.sub(r"([|<>*_`\[\]])", r"\\\1", name)
            reason = entry.get("reason", "").replace("`", "'")
            text = f"- {title}: **{entry['status']}**: `{reason}`"
            lines += textwrap.wrap(
                text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(read(FOLDER)), encoding="utf-8")
