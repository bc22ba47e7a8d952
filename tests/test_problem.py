"""Problem: its limits, its features, and what it counts."""

from __future__ import annotations

import msgspec
import pytest
import torch
from support import problem, random_call

from portattn import ArgumentError, Problem, conditions
from portattn.problem import MAX_HEAD_DIM, MAX_SIZE
from portattn.reference.oracle import allowed


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("op", "flash", "attention"),
        ("dtype", "fp64", "fp16"),
        ("causal", "lower", "bottom_right"),
        ("layout", "sbhd", "bhsd"),
        ("batch", -1, "from 0"),
        ("batch", MAX_SIZE + 1, str(MAX_SIZE)),
        ("batch", True, "integer"),
        ("heads_q", 0, "from 1"),
        ("heads_k", 0, "from 1"),
        ("seq_q", -1, "from 0"),
        ("seq_k", 2.0, "integer"),
        ("head_dim", MAX_HEAD_DIM + 1, str(MAX_HEAD_DIM)),
        ("head_dim", 0, "from 1"),
        ("head_dim_v", MAX_HEAD_DIM + 1, str(MAX_HEAD_DIM)),
        ("heads_q", 3, "multiple of the 2"),
    ],
)
def test_errors_name_field_value_and_limit(field: str, value: object, limit: str) -> None:
    with pytest.raises(ArgumentError) as error:
        problem(**{field: value})
    assert error.value.argument == field
    assert repr(value) in str(error.value)
    assert limit in str(error.value)


def test_smallest_and_largest_sizes_are_accepted() -> None:
    assert problem(batch=0, seq_q=0, seq_k=0).batch == 0
    assert problem(seq_k=MAX_SIZE, head_dim=MAX_HEAD_DIM).head_dim_v == MAX_HEAD_DIM


def test_head_dim_v_is_head_dim_unless_given() -> None:
    assert problem(head_dim=24).head_dim_v == 24
    assert problem(head_dim=24, head_dim_v=40).head_dim_v == 40


def test_equal_problems_are_one_key() -> None:
    assert hash(problem()) == hash(problem())
    assert problem() == problem(head_dim_v=16)
    assert problem() != problem(aligned=False)


def test_group_and_padded() -> None:
    assert problem(heads_q=12, heads_k=3).group == 4
    assert not problem().padded
    for name in ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"):
        assert problem(**{name: True}).padded


def test_features_are_the_vocabulary_of_conditions() -> None:
    vocabulary = conditions.FLAGS | conditions.NUMBERS | set(conditions.WORDS)
    assert set(problem().features()) | {"programs"} == vocabulary


def test_rows_are_what_a_kernel_packs() -> None:
    fields = {"heads_q": 8, "heads_k": 2, "seq_q": 3}
    assert problem(**fields).features()["rows"] == 3
    assert problem(op="decode_attention", **fields).features()["rows"] == 12


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (5, 5), (3, 9), (9, 3), (0, 4), (4, 0), (1, 7), (7, 1)])
def test_flops_count_what_is_attended(causal: str, seq_q: int, seq_k: int) -> None:
    p = problem(causal=causal, seq_q=seq_q, seq_k=seq_k, head_dim=16, head_dim_v=24)
    pairs = int(allowed(random_call(p))[0].sum())
    assert p.flops() == 2 * p.batch * p.heads_q * pairs * (16 + 24)


def test_text_says_what_is_asked() -> None:
    text = str(problem(causal="top_left", seqlens_k=True, dtype="bf16"))
    for part in ("attention", "q (2,2,19,16)", "kv (2,2,37,16)", "bf16", "causal top-left", "seqlens_k", "return_lse"):
        assert part in text


def test_survives_json() -> None:
    p = problem(causal="bottom_right", leftpad_k=True)
    assert msgspec.json.decode(msgspec.json.encode(p), type=Problem) == p


def test_random_calls_hold_nan_exactly_in_their_padding() -> None:
    """What the other tests rest on: padding is poisoned, and nothing else is."""
    call = random_call(problem(seqlens_k=True, leftpad_k=True, batch=4), seed=3)
    j = torch.arange(37)
    for b in range(4):
        first, length = int(call.leftpad_k[b]), int(call.seqlens_k[b])
        valid = (j >= first) & (j < first + length)
        assert torch.equal(call.k[b, 0, :, 0].isfinite(), valid)
        assert torch.equal(call.v[b, 1, :, 3].isfinite(), valid)
    assert call.q.isfinite().all()
