"""Saying why a path is not taken: Refused, and for a vendor's library the first of a list of checks that holds."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from portattn.schema.features import COMMON

if TYPE_CHECKING:
    from portattn.schema.plan import Rejection
    from portattn.schema.problem import Problem

Check = tuple[bool, str, str]  # (holds, reason with value and limit, hint)

# What a call can ask for beyond shapes, lengths and a causal mask, by the names of the public operations.
_FEATURES = ("window", *COMMON)


class PathRejected(Exception):
    """A path cannot be taken, for the reason that the rejection says. Never leaves the planner."""

    def __init__(self, rejection: Rejection) -> None:
        self.rejection = rejection
        super().__init__(rejection.reason)


def first_refusal(path: str, *checks: Check) -> Rejection | None:
    """The first check that holds, as the rejection of `path`; None when none does."""
    from portattn.schema.plan import Rejection  # the planner's registry imports the backends

    for holds, reason, hint in checks:
        if holds:
            return Rejection(path=path, reason=reason, hint=hint)
    return None


def undeclared_demand(path: str, problem: Problem, ops: Collection[str], takes: Collection[str]) -> Rejection | None:
    """Why a path is not taken that does not say that it can do what is asked for; None where it says so.

    Everything is denied by default: an op that is not among `ops`, a demand (Problem.demands) that is not in `takes`.
    """
    from portattn.schema.plan import Rejection

    if problem.op not in ops:
        return Rejection(path=path, reason=f"is declared for {', '.join(ops) or 'no op'}, and this is {problem.op}")
    lacking = [name for name in problem.demands() if name not in takes]
    if not lacking:
        return None
    hint = "" if path == "reference" else "backend='reference'"  # no path is left where it is the one
    return Rejection(path=path, reason=f"does not declare that it takes {', '.join(lacking)}", hint=hint)


def op_check(path: str, p: Problem, takes: Collection[str], why: str, hint: str = "backend='reference'") -> Check:
    """Holds for an op that is not among those that `path` takes."""
    return p.op not in takes, f"op is {p.op}, and {path} {why}", hint


def features_check(path: str, p: Problem, how: str = "has none", takes: Collection[str] = ()) -> Check:
    """Holds where a feature is asked for that `path` does not take; `how` says in what way it lacks it."""
    words = {"window": f"window ({p.window_left}, {p.window_right})"}
    asked = [words.get(name, name) for name in _FEATURES if getattr(p, name) and name not in takes]
    return bool(asked), f"{', '.join(asked)} asked for, and {path} {how}", "backend='reference'"


def dropout_check(path: str, p: Problem) -> Check:
    """Holds where probabilities are dropped: which ones must follow from the call's seed, the same on every path."""
    reason = f"dropout_p > 0, and {path} drops by random numbers of its own, not by dropout_seed"
    return p.dropout, reason, "dropout_p=0.0, or backend='reference'"


def splits_check(path: str, p: Problem) -> Check:
    """Holds where the caller says over how many programs keys are split: a promise that a library does not give."""
    reason = f"num_splits is {p.num_splits}, and {path} splits keys as it sees fit"
    return p.num_splits > 0, reason, "num_splits=None, or backend='reference'"
