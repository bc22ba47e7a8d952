"""The logs of this folder. Each begins with lines of `# ` that say how it was made; a compiler never printed those."""

from __future__ import annotations

from pathlib import Path

from portattn.planning.registry import Registry
from portattn.tools.quirks.lifecycle import facts
from portattn.tools.quirks.lifecycle.facts import Facts

FOLDER = Path(__file__).parent / "logs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.log"))


def read(name: str) -> str:
    """A log as the compiler wrote it."""
    lines = (FOLDER / f"{name}.log").read_text(encoding="utf-8").splitlines(keepends=True)
    made = next(i for i, line in enumerate(lines) if not line.startswith("# "))
    assert made, f"{name} does not say how it was made"
    return "".join(lines[made:])


def facts_of(name: str, registry: Registry, **named: str) -> Facts:
    return facts.from_log(read(name), f"{name}.log", registry, **named)
