"""Conditions on a problem: what parses, what each one decides, and what is refused."""

from __future__ import annotations

import re

import pytest

from portattn.schema import conditions
from portattn.schema.problem import Problem

PROBLEM = Problem(batch=2, heads_q=8, heads_k=2, seq_q=100, seq_k=300, head_dim=96, dtype="bf16", causal="top_left")
FEATURES = PROBLEM.features() | {"programs": 7}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("causal", True),
        ("!causal", False),
        ("seqlens_k", False),
        ("!seqlens_k", True),
        ("gqa", True),
        ("head_dim=96", True),
        ("head_dim!=96", False),
        ("head_dim<96", False),
        ("head_dim<=96", True),
        ("head_dim>95", True),
        ("head_dim>=97", False),
        ("head_dim=64|96|128", True),
        ("head_dim=64|128", False),
        ("head_dim!=64|128", True),
        ("head_dim!=64|96", False),
        ("dtype=bf16", True),
        ("dtype=fp16|bf16", True),
        ("dtype!=fp32", True),
        ("dtype!=fp16|bf16", False),
        ("causal_align=top_left", True),
        ("group=4", True),
        ("programs<8", True),
        (" seq_k >= 300 ", True),
    ],
)
def test_decides(text: str, holds: bool) -> None:
    assert conditions.parse(text).holds(FEATURES) is holds


PAGED = Problem(
    op="paged_attention", batch=2, heads_q=8, heads_k=2, seq_q=4, seq_k=96, head_dim=64, page_size=48,
    page_layout="hpd", total_q=6, window_left=9, sinks=True,
).features()  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("paged", True),
        ("packed", True),
        ("window", True),
        ("sinks", True),
        ("!softcap", True),
        ("alibi_slopes", False),
        ("bias", False),
        ("!mask", True),
        ("magicpig", False),
        ("log_weights", False),
        ("page_size=48", True),
        ("page_size>=64", False),
        ("tokens>0", False),
        ("page_layout=hpd", True),
        ("page_layout!=hpd|phd", False),
        ("rows=12", True),
        ("featured", True),
    ],
)
def test_decides_about_caches_and_features(text: str, holds: bool) -> None:
    assert conditions.parse(text).holds(PAGED) is holds


def test_all_must_hold() -> None:
    parsed = [conditions.parse(t) for t in ("causal", "head_dim>64")]
    assert conditions.all_hold(parsed, FEATURES)
    assert not conditions.all_hold([*parsed, conditions.parse("dtype=fp32")], FEATURES)
    assert conditions.all_hold([], FEATURES)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not a flag"),
        ("head_dim >> 3", "is not a flag"),
        ("Causal", "is not a flag"),
        ("casual", "unknown flag 'casual'"),
        ("head_dim", "unknown flag 'head_dim'"),
        ("!head_dim>3", "negates a comparison"),
        ("head_dim>wide", "compares the number head_dim with 'wide'"),
        ("head_dim>64|128", "lists values"),
        ("headdim>3", "unknown name 'headdim'"),
        ("causal=1", "unknown name 'causal'"),
        ("dtype=fp64", "dtype is compared"),
        ("dtype>fp16", "dtype is compared"),
        ("page_layout=dhp", "page_layout is compared"),
        ("page_size", "unknown flag 'page_size'"),
        ("window>3", "unknown name 'window'"),
    ],
)
def test_refuses(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        conditions.parse(text)


def known(text: str) -> str:
    """What the complaint about a condition lists as known."""
    with pytest.raises(ValueError, match="condition") as caught:
        conditions.parse(text)
    return re.split("known: |compared by = or != with ", str(caught.value))[1]


def test_a_complaint_lists_what_is_known() -> None:
    assert known("casual") == ", ".join(sorted(conditions.FLAGS))
    assert known("headdim>3") == ", ".join(sorted({*conditions.NUMBERS, *conditions.WORDS}))
    assert known("dtype=fp64") == "bf16, fp16, fp32"


@pytest.mark.parametrize("text", ["causal", "!gqa", "head_dim>=64", "dtype=fp16|bf16"])
def test_a_condition_knows_its_own_text(text: str) -> None:
    assert conditions.parse(text).text == text


def test_vocabulary_is_what_problems_have() -> None:
    """A name that conditions take and a problem lacks would raise KeyError in the middle of a plan."""
    vocabulary = conditions.FLAGS | conditions.NUMBERS | set(conditions.WORDS)
    assert vocabulary == set(FEATURES)
