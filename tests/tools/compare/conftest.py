"""The command line, for the tests of comparisons."""

from __future__ import annotations

from planted import portattn as portattn
