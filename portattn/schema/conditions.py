"""Conditions on the keys of `Problem.features()`, of quirks (`features`) and tuning (`when`).

A condition is a flag (`causal`), a negated flag (`!causal`) or a comparison (`head_dim>=128`, `dtype=fp16|bf16`).
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import msgspec

from portattn.schema.problem_limits import ASKED, KvFormat, KvScales, Rotary

FLAGS = frozenset(
    {
        *ASKED, "causal", "gqa", "paged", "packed", "window", "chunk", "featured", "aligned", "words", "large",
        "dropout", "deterministic", "score_mod", "mask_mod", "grad_captured",
    }
)  # fmt: skip
NUMBERS = frozenset(
    {
        "batch", "heads_q", "heads_k", "group", "seq_q", "seq_k", "head_dim", "head_dim_v", "widest", "page_size",
        "tokens", "rows", "query_tiles", "programs",
    }
)  # fmt: skip
WORDS = {
    "dtype": frozenset({"fp16", "bf16", "fp32"}),
    "causal_align": frozenset({"none", "bottom_right", "top_left"}),
    "layout": frozenset({"bhsd", "bshd"}),
    "page_layout": frozenset({"phd", "hpd"}),
    "kv_format": frozenset(get_args(KvFormat)),
    "kv_scales": frozenset(get_args(KvScales)),
    "rotary": frozenset(get_args(Rotary)),
}

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_FORM = re.compile(r"^(!?)([a-z_]+)\s*(?:(<=|>=|!=|=|<|>)\s*([A-Za-z0-9_.|]+))?$")


class Condition(msgspec.Struct, frozen=True):
    text: str
    name: str
    compare: str
    values: tuple[Any, ...]

    def holds(self, features: Mapping[str, Any]) -> bool:
        seen = features[self.name]
        if self.compare == "flag":
            return bool(seen) is self.values[0]
        test = COMPARE[self.compare]
        if self.compare == "!=":
            return all(test(seen, v) for v in self.values)
        return any(test(seen, v) for v in self.values)


def parse(text: str) -> Condition:
    """Parse one condition. Raises ValueError that names the text and the known vocabulary."""
    match = _FORM.match(text.strip())
    if not match:
        raise ValueError(f"condition {text!r} is not a flag, !flag, or name<op>value")
    negated, name, compare, value = match.groups()
    if compare is None:
        if name not in FLAGS:
            raise ValueError(f"unknown flag {name!r} in condition {text!r}; known: {', '.join(sorted(FLAGS))}")
        return Condition(text, name, "flag", (not negated,))
    if negated:
        raise ValueError(f"condition {text!r} negates a comparison; turn the comparison round instead")
    values: tuple[Any, ...]
    if name in NUMBERS:
        if not all(v.isdigit() for v in value.split("|")):
            raise ValueError(f"condition {text!r} compares the number {name} with {value!r}")
        values = tuple(int(v) for v in value.split("|"))
    elif name in WORDS:
        values = tuple(value.split("|"))
        unknown = set(values) - WORDS[name]
        if unknown or compare not in ("=", "!="):
            raise ValueError(f"condition {text!r}: {name} is compared by = or != with {', '.join(sorted(WORDS[name]))}")
    else:
        known = ", ".join(sorted(NUMBERS | set(WORDS)))
        raise ValueError(f"unknown name {name!r} in condition {text!r}; known: {known}")
    if len(values) > 1 and compare not in ("=", "!="):
        raise ValueError(f"condition {text!r} lists values, which only = and != take")
    return Condition(text, name, compare, values)


def texts_hold(texts: tuple[str, ...], features: Mapping[str, Any]) -> bool:
    return all_hold(parse_all(texts), features)


def first_that_holds(named: Iterable[tuple[int, tuple[str, ...]]], features: Mapping[str, Any]) -> int | None:
    return next((number for number, texts in named if texts_hold(texts, features)), None)


def names(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(condition.name for condition in parse_all(texts))


@functools.lru_cache(maxsize=1024)
def parse_all(texts: tuple[str, ...]) -> tuple[Condition, ...]:
    return tuple(parse(text) for text in texts)


def all_hold(conditions: Iterable[Condition], features: Mapping[str, Any]) -> bool:
    return all(c.holds(features) for c in conditions)
