"""One result of several: parts of one benchmark that were measured apart, as on the GPUs of one host at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from portattn.errors import ArgumentError
from portattn.tools.bench.results import Result
from portattn.tools.bench.store import SAME


def merge_results(parts: Mapping[Path, Result]) -> Result:
    """The runs, rows and first calls of all parts, in their order.

    The last run is said to have been asked for what all of them were, so that `left` names what no part has measured.

    parts  results by where they were read; each has a run

    Raises ArgumentError when two parts are not of one thing (SAME), or both have measured a case.
    """
    (first, base), *_ = parts.items()
    found = Result(runs=[], rows=[])
    places: dict[tuple[str, str], Path] = {}
    asked: dict[tuple[str, str], None] = {}
    for path, part in parts.items():
        for name in SAME:
            ours, theirs = getattr(base.runs[0], name), getattr(part.runs[0], name)
            if ours != theirs:
                said = f"its {name} is {theirs!r} and that of {first} is {ours!r}"
                raise ArgumentError("bench join", "RESULTS", str(path), said)
        for set_, case in part.done:
            if (set_, case) in places:
                said = f"it has measured {case!r} of the set {set_!r}, and so has {places[set_, case]}"
                raise ArgumentError("bench join", "RESULTS", str(path), said)
            places[set_, case] = path
        before = len(found.runs)
        found.runs += part.runs
        found.rows += [msgspec.structs.replace(row, run=row.run + before) for row in part.rows]
        found.first_calls += [msgspec.structs.replace(call, run=call.run + before) for call in part.first_calls]
        asked |= dict.fromkeys(part.runs[-1].asked)
    found.runs[-1] = msgspec.structs.replace(found.runs[-1], asked=tuple(asked))
    return found
