"""Ids of quirks as people write them: whole, or up to the number (`cuda-0007`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 3  # ids that an error names


def matching(text: str, known: Iterable[str]) -> list[str]:
    """The ids that a text means: the one that it is, or those that begin with it up to a dash."""
    ids = list(known)
    return [text] if text in ids else [name for name in ids if text and name.startswith(f"{text}-")]


def nearest(text: str, known: Iterable[str]) -> list[str]:
    """The ids that hold a text, or else look most like it, by their whole name or up to the number."""
    names = {"-".join(name.split("-")[:2]): name for name in known}
    names |= {name: name for name in names.values()}
    holding = [name for name in names.values() if text and text in name]
    close = difflib.get_close_matches(text, names, n=2 * SHOWN, cutoff=0.6)
    return list(dict.fromkeys([*holding, *(names[name] for name in close)]))[:SHOWN]


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """The nearest ids as the end of a sentence; empty where none is near."""
    close = nearest(text, known)
    return f"; did you mean {', '.join(close)}?" if close else ""


def several(found: list[str]) -> str:
    """The first ids of many that a text begins, and how many more there are."""
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{', '.join(found[:SHOWN])}{more}"
