"""What `portattn doctor` found out by a real call."""

from __future__ import annotations

from typing import Literal

import msgspec


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One real call, compared with the float64 oracle."""

    name: str
    outcome: Literal["PASS", "FAIL", "SKIP"]
    detail: str
    error: float | None = None
    budget: float | None = None
