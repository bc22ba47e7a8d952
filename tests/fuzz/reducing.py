"""A failing case made smaller: whatever it fails without is left out."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from portattn.schema.ops import FEATURES

from .drawing import WILD, Case

_OFF: dict[str, Any] = dict.fromkeys(FEATURES, False) | {"causal": "none", "window_left": -1, "window_right": -1,
    "chunk": 0, "num_splits": 0, "layout": "bhsd", "page_layout": "phd", "dtype": "fp32"}  # fmt: skip
_PLAIN = {"wild": "", "extremes": False, "strides": "plain", "scale": None, "q": "normal", "k": "normal", "v": "normal"}


def reduced(case: Case, fails: Callable[[Case], bool], seconds: float) -> Case:
    """The smallest case found in so many seconds that still fails, one change at a time."""
    end, shrunk = time.monotonic() + seconds, True
    while shrunk:
        shrunk = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                return case
            if fails(smaller):
                case, shrunk = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for name, value in _PLAIN.items():
        if getattr(case, name) != value:
            yield msgspec.structs.replace(case, **{name: value})
    p = case.problem
    heads = ((p.heads_k, p.heads_k), (1, 1))
    changes: list[dict[str, Any]] = [{"heads_q": q, "heads_k": k} for q, k in heads]
    changes += [{"kv_format": "as_q", "kv_scales": "none"}, *({name: value} for name, value in _OFF.items())]
    for name, least in (("batch", 1), ("seq_q", 1), ("seq_k", p.page_size or 1), ("tokens", 1)):
        size = getattr(p, name)
        changes += [{name: smaller} for smaller in (least, size // 2 // least * least) if least <= smaller < size]
    if p.op != "mla_attention":
        changes += [{"head_dim": 16, "head_dim_v": 16}]
    for change in changes:
        if WILD.get(case.wild) in change:
            continue
        if any(getattr(p, name) != value for name, value in change.items()):
            try:
                yield msgspec.structs.replace(case, problem=msgspec.structs.replace(p, **change))
            except ValueError:  # ArgumentError: the op has to have it
                continue


def snippet(case: Case, device: str) -> str:
    """Python that runs the case by itself; Problem's defaults are left out."""
    fields = {f.name: f for f in msgspec.structs.fields(type(case.problem))}
    given = (f"{name}={value!r}" for name, value in msgspec.structs.asdict(case.problem).items()
        if value != fields[name].default and not (name == "head_dim_v" and value == case.problem.head_dim))  # fmt: skip
    rest = (f"{name}={value!r}" for name, value in msgspec.structs.asdict(case).items() if name != "problem"
        and value != {f.name: f.default for f in msgspec.structs.fields(Case)}[name])  # fmt: skip
    interpret = "TRITON_INTERPRET=1 " if device == "cpu" else ""
    return f"""# {interpret}PYTHONPATH=.:tests python
from fuzz import values
from fuzz.drawing import Case
from portattn.schema.problem import Problem

case = Case(
    problem=Problem({", ".join(given)}),
    {", ".join(rest)},
)
with values.prepared({device!r}):
    print(values.run(case, {device!r}))
"""
