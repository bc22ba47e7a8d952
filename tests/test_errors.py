"""Errors cross processes: a pool pickles what its worker raised, and breaks where that cannot be unpickled."""

from __future__ import annotations

import copy
import pickle

import pytest

from portattn.errors import ArgumentError, DataError, PathUnavailable, PortattnError, QuirkConflict, UnknownArgument
from portattn.schema.plan import Rejection

ERRORS = (
    ArgumentError("attention", "q.dtype", ("float64", 1), "must be one of float16, float32"),
    UnknownArgument("attention", "sclae", ": did you mean scale?"),
    DataError("quirks/a.toml", 3, "misses when"),
    DataError("quirks/a.toml", None, "misses when"),
    QuirkConflict("load", ("cuda-0001", "pointer"), ("cuda-0002", "descriptor")),
    PathUnavailable("attention: none", [Rejection(path="triton", reason="of a reason", hint="do that")]),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickled", "copied"])
def test_an_error_stays_itself(error: PortattnError, again: object) -> None:
    found = again(error)  # type: ignore[operator]
    assert (type(found), str(found)) == (type(error), str(error))
    public = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    assert public
    assert {name: getattr(found, name) for name in public} == public
