"""Where things lie, for tests in whatever folder."""

from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
WITHOUT_PORTATTN = "TESTS_WITHOUT_PORTATTN"  # set for a child that must find no portattn (conftest.py)


def tables(file: str) -> dict[str, Any]:
    """Return the tables of a test file, which lie beside it in a TOML file of its name."""
    from portattn.schema.toml_reader import tomllib

    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))
