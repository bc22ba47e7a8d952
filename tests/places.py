"""Where things lie, for tests in whatever folder."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
WITHOUT_PORTATTN = "TESTS_WITHOUT_PORTATTN"  # set for a child that must find no portattn (conftest.py)
