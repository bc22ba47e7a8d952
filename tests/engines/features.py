"""Which features of an engine its tests show: what is collected while they run, and the file that it is written to.

A test names what it shows by `@pytest.mark.engine_feature("masks, boolean and added")`, or several such marks. A
feature that all its tests show works. One that must be refused is marked `refused=True`; its test takes the fixture
`refusal`, which expects the error and keeps its text as the reason.
"""

import datetime
import importlib.metadata as metadata
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portattn.version import __version__

# Folder of tests -> the distribution that is the engine. Any other folder has the distribution's name.
DISTRIBUTIONS = {"hub": "kernels"}
MODULES = {"hub": "kernels"}
WORKS, REFUSED, FAILED, NOT_RUN = "works", "refused", "failed", "not run"


def absent(engine: str) -> str:
    """Why an engine's tests cannot run in this environment; empty where they can. find_spec alone does not tell: a
    folder tests/engines/<engine> on the path looks like a package without __init__."""
    module = MODULES.get(engine, engine)
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return f"{module} is not installed: `python scripts/engine_env.py` makes environments that have it"
    return ""


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


@dataclass
class Feature:
    """What the tests of one feature found."""

    refused: bool
    outcomes: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def entry(self) -> dict[str, Any]:
        """As it is written: the status, how many tests, and a reason where it does not work."""
        if "failed" in self.outcomes:
            status = FAILED
        elif "passed" not in self.outcomes:
            status = NOT_RUN
        else:
            status = REFUSED if self.refused else WORKS
        found: dict[str, Any] = {"status": status, "tests": len(self.outcomes)}
        if status != WORKS and self.reasons:
            found["reason"] = sorted(set(self.reasons))[0]
        return found


class Report:
    """The features of one engine in one run of its tests."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.features: dict[str, Feature] = {}

    def add(self, marks: Iterable[dict[str, Any]], outcome: str, reason: str) -> None:
        """One test: its marks, "passed", "failed" or "skipped", and why it did not pass, or the refusal's text. Raises
        ValueError for a feature that one test calls refused and another does not."""
        for mark in marks:
            feature = self.features.setdefault(mark["name"], Feature(mark["refused"]))
            if feature.refused != mark["refused"]:
                raise ValueError(f"feature {mark['name']!r} is marked refused=True by some of its tests, not by all")
            feature.outcomes.append(outcome)
            if reason and (outcome != "passed" or mark["refused"]):
                feature.reasons.append(reason)

    def contents(self) -> dict[str, Any]:
        distribution = DISTRIBUTIONS.get(self.engine, self.engine)
        return {
            "engine": self.engine, "version": version_of(distribution),
            "versions": {"torch": version_of("torch"), "triton": version_of("triton"), "portattn": __version__},
            "date": datetime.date.today().isoformat(),
            "features": {name: self.features[name].entry() for name in sorted(self.features)},
        }  # fmt: skip

    def write(self, folder: Path) -> Path:
        contents = self.contents()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.engine}-{contents['version']}.json"
        path.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path
