"""Whatever the arguments: a result or an ArgumentError, and never another exception. Results: tests/test_fuzz.py."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import DTYPES

import portattn
from portattn import ArgumentError


def bounded(examples: int) -> settings:
    """The same examples in every run; no deadline, for machines differ."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip


sizes = st.lists(st.integers(0, 4), min_size=0, max_size=5).map(tuple)
dtypes = st.sampled_from([*DTYPES.values(), torch.float64, torch.int32, torch.bool])
shapes = st.one_of(st.just((2, 2, 3, 4)), sizes)
odd = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just([]), st.just({}),
    st.just(torch.tensor([1, 2])), st.just(torch.zeros(2, dtype=torch.int32)), st.just(object),
)  # fmt: skip
lengths = st.one_of(
    odd, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(lambda v: torch.tensor(v, dtype=torch.int32))
)


@bounded(400)
@given(
    st.lists(st.tuples(shapes, dtypes), min_size=3, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "scale": odd, "causal": odd, "layout": st.one_of(odd, st.just("bshd")), "return_lse": odd,
            "dropout_p": odd, "seqlens_q": lengths, "seqlens_k": lengths, "leftpad_q": lengths, "leftpad_k": lengths,
            "backend": st.one_of(odd, st.just("reference")),
        },
    ),
)  # fmt: skip
def test_any_arguments_give_a_result_or_an_argument_error(tensors: list, rest: dict) -> None:
    q, k, v = (torch.ones(shape).to(dtype) for shape, dtype in tensors)
    try:
        result = portattn.attention(q, k, v, **rest)
    except ArgumentError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.argument
        assert str(refused).startswith("attention: ")
        return
    out = result[0] if isinstance(result, tuple) else result
    assert (out.dtype, out.shape[:3]) == (q.dtype, q.shape[:3])
    scale = rest.get("scale")
    if scale is None or abs(scale) < 1e30:  # beyond, a score leaves float32 whoever computes it
        assert torch.isfinite(out).all()


@bounded(60)
@given(st.one_of(odd, st.floats()), st.sampled_from(["scale", "dropout_p"]))
def test_numbers(value: Any, name: str) -> None:
    q = torch.ones(1, 1, 2, 4)
    good = value is None and name == "scale"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(min(abs(value), 1e308)):
        good = abs(value) <= torch.finfo(torch.float32).max if name == "scale" else 0 <= value < 1
    if good and value == value:
        portattn.attention(q, q, q, **{name: value})
    else:
        with pytest.raises(ArgumentError, match=name):
            portattn.attention(q, q, q, **{name: value})
