"""Calling the command line in this process."""

from __future__ import annotations

from planted import planted as planted
from planted import portattn as portattn
