"""portattn itself over the same cache in the queries' dtype: what a quantised cache is held against."""

from __future__ import annotations

import functools

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, ours
from portattn.tools.bench.tensors import Tensors


def absent() -> str:
    return ""


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    return {"unquantised": functools.partial(_build, case, t)} if case.quantised else {}


def _build(case: Case, t: Tensors) -> Contender:
    return ours(case.unquantised(), t.unquantised())
