"""Saying why a vendor's library is not taken: the first of a list of checks that holds, as a Rejection."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portattn.planner import Rejection

Check = tuple[bool, str, str]  # (holds, reason with value and limit, hint)


def first_refusal(path: str, *checks: Check) -> Rejection | None:
    """The first check that holds, as the rejection of `path`; None when none does."""
    from portattn.planner import Rejection  # the planner's registry imports the backends

    for holds, reason, hint in checks:
        if holds:
            return Rejection(path=path, reason=reason, hint=hint)
    return None
