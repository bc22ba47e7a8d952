"""Prints as JSON what the Triton of this process calls what the scheduled kernels need, as gluon_names.py found it."""

from __future__ import annotations

import json

import triton

from portattn.backends.cuda import gluon_names


def origin(name: str) -> str:
    found = getattr(gluon_names, name)
    return f"{found.__module__}.{found.__qualname__}"


names = {
    "aggregate",
    "gather",
    "load",
    "reduce_add",
    "reinterpreted",
    "store",
}  # a release's own; others are gluon_names'
assert names < set(gluon_names.__all__)
print(json.dumps({"triton": triton.__version__, **{name: origin(name) for name in names}}))
