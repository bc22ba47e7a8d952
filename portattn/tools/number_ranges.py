"""Types of options that are numbers of a range."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range of floats without NaN and infinity. Of those, click.FloatRange takes NaN, which no limit can refuse, and
    infinity; JSON has neither."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found:g} is not in the range {self._describe_range()}: it must be finite.", param, ctx)
        return found


LONGEST = 1e6  # seconds. Source: poll(2) takes its time as an int of milliseconds, 2**31 - 1 of them at most
SECONDS = FiniteRange(min=0, min_open=True, max=LONGEST)  # a time limit, or a time for all of it
