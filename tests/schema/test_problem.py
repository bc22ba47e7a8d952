"""Problem: its limits, its features, and what it counts."""

import copy
import pickle

import msgspec
import pytest
from support import problem, random_call

from portattn import ArgumentError, Problem
from portattn.schema import conditions
from portattn.schema.problem_limits import MAX_HEAD_DIM, MAX_LENGTH, MAX_SIZE, MAX_SPLITS
from portattn.testing.oracle import allowed_keys


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("op", "flash", "attention"), ("dtype", "fp64", "fp16"),
        ("dtype", "e4m3", "of quantised tensors it is the results' type, with kv_format='e4m3'"),
        ("causal", "lower", "bottom_right"), ("layout", "sbhd", "bhsd"), ("batch", -1, "from 0"),
        ("batch", MAX_SIZE + 1, str(MAX_SIZE)), ("batch", True, "integer"), ("heads_q", 0, "from 1"),
        ("heads_k", 0, "from 1"), ("seq_q", -1, "from 0"), ("seq_k", 2.0, "integer"),
        ("head_dim", MAX_HEAD_DIM + 1, str(MAX_HEAD_DIM)), ("head_dim", 0, "from 1"),
        ("head_dim_v", MAX_HEAD_DIM + 1, str(MAX_HEAD_DIM)), ("heads_q", 3, "multiple of the 2"),
        ("page_layout", "dhp", "phd, hpd"), ("window_left", -2, "from -1"),
        ("window_right", MAX_SIZE + 1, str(MAX_SIZE)), ("chunk", -1, "from 0"), ("total_q", -1, "from 0"),
        ("page_size", -1, "from 0"), ("tokens", 0.5, "integer"), ("num_splits", MAX_SPLITS + 1, str(MAX_SPLITS)),
    ],
)  # fmt: skip
def test_errors_name_field_value_and_limit(field: str, value: object, limit: str) -> None:
    with pytest.raises(ArgumentError) as error:
        problem(**{field: value})
    assert error.value.argument == field
    assert repr(value) in str(error.value)
    assert limit in str(error.value)


PAGES = {"op": "paged_attention", "page_size": 16}
PACKED = {"op": "varlen_attention", "total_q": 30, "total_k": 60}
SPARSE = {"op": "sparse_attention", "seq_q": 1, "tokens": 8}
INDEXER = {"op": "indexer_logits", "heads_k": 1, "return_lse": False}
LATENT = {"op": "mla_attention", "heads_k": 1, "head_dim_v": 8, "page_size": 16}


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({"op": "paged_attention"}, "page_size", "must be given for paged_attention"),
        ({"op": "mla_attention", "heads_k": 1}, "page_size", "must be given for mla_attention"),
        ({"op": "varlen_attention", "total_k": 3}, "total_q", "must be given for varlen_attention"),
        ({"op": "varlen_attention", "total_q": 3}, "total_k", "must be given for varlen_attention"),
        ({"total_q": 3}, "total_q", "attention has none"),
        ({"page_size": 16}, "page_size", "attention has none"),
        ({"op": "decode_attention", "tokens": 4}, "tokens", "decode_attention has none"),
        (PAGES | {"seqlens_q": True}, "seqlens_q", "paged_attention has none"),
        (INDEXER | {"causal": "top_left"}, "causal", "indexer_logits has none"),
        (INDEXER | {"window_left": 3}, "window_left, window_right", "indexer_logits has none"),
        (INDEXER | {"op": "topk_indices", "tokens": 4}, "heads_q, head_dim", "must be 1, 1"),
        (PACKED | {"leftpad_k": True}, "leftpad_k", "varlen_attention has none"),
        ({"tree_mask": True}, "tree_mask", "attention has none"),
        (PAGES | {"total_k": 3}, "total_k", "paged_attention has none"),
        (SPARSE | {"total_q": 3}, "total_q", "sparse_attention has none"),
        (LATENT | {"heads_k": 2}, "heads_k, head_dim_v", "must be 1"),
        (LATENT | {"head_dim_v": 17}, "heads_k, head_dim_v", "at most head_dim"),
    ],
)
def test_what_an_op_has_and_what_it_has_not(fields: dict, field: str, limit: str) -> None:
    with pytest.raises(ArgumentError) as error:
        problem(**fields)
    assert error.value.argument == field
    assert limit in str(error.value)


def test_every_op_has_a_problem() -> None:
    for fields in (PAGES, PACKED, SPARSE, SPARSE | {"page_size": 16}, LATENT, PAGES | {"total_q": 5}):
        assert problem(**fields).op == fields["op"]


def test_packed_queries_are_one_batch_of_all_rows() -> None:
    assert problem().query_rows == (2, 19)
    assert problem(**PACKED).query_rows == (1, 30)
    assert problem(**PAGES, total_q=5).query_rows == (1, 5)
    assert [problem(**fields).packed for fields in ({}, PACKED, PAGES)] == [False, True, False]


def test_a_problem_and_its_derived_values() -> None:
    assert problem(batch=0, seq_q=0, seq_k=0).batch == 0
    assert problem(seq_k=MAX_LENGTH, head_dim=MAX_HEAD_DIM).head_dim_v == MAX_HEAD_DIM
    assert problem(head_dim=24, head_dim_v=40).head_dim_v == 40
    assert hash(problem()) == hash(problem())
    assert problem() == problem(head_dim_v=16) != problem(aligned=False)
    assert problem(heads_q=12, heads_k=3).group == 4
    assert not problem().padded
    for name in ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"):
        assert problem(**{name: True}).padded


def test_rows_are_what_a_kernel_packs() -> None:
    fields = {"heads_q": 8, "heads_k": 2, "seq_q": 3}
    assert problem(**fields).features()["rows"] == 3
    assert problem(op="decode_attention", **fields).features()["rows"] == 12
    assert problem(**PAGES, **fields).features()["rows"] == 12
    assert problem(**SPARSE | {"heads_q": 8}).features()["rows"] == 1  # heads have tokens of their own
    assert problem(**LATENT, heads_q=8).features()["rows"] == 19 * 8
    # Of packed rows the lengths are on the device: what a sequence has on average.
    assert problem(**PACKED).features()["rows"] == 15
    assert problem(**PAGES, total_q=5, **fields).features()["rows"] == 3 * 4


def test_a_demanded_number_of_splits_hides_the_batch() -> None:
    """1 split promises a sequence the same result whatever the rest of the batch: nothing may be chosen by its size."""
    fields = {"op": "decode_attention", "seq_q": 1}
    assert problem(**fields, batch=7).features()["batch"] == 7
    assert problem(**fields, batch=7, num_splits=1).features() == problem(**fields, num_splits=1).features()


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        (PAGES, {"paged"}), (PACKED, {"packed"}),
        (SPARSE | {"log_weights": True, "magicpig": True}, {"log_weights", "magicpig"}),
        ({"window_left": 0}, {"window", "featured"}), ({"window_right": 0}, {"window", "featured"}),
        ({"chunk": 8}, {"chunk", "window", "featured"}), ({"sinks": True}, {"sinks"}),
        ({"softcap": True}, {"softcap", "featured"}), ({"alibi_slopes": True}, {"alibi_slopes", "featured"}),
        ({"bias": True}, {"bias", "featured"}), ({"mask": True}, {"mask", "featured"}),
    ],
)  # fmt: skip
def test_flags_say_what_is_asked_for(fields: dict, flags: set[str]) -> None:
    plain = {name for name in conditions.FLAGS if problem().features()[name]}
    assert {name for name in conditions.FLAGS if problem(**fields).features()[name]} - {"gqa"} == plain | flags


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (5, 5), (3, 9), (9, 3), (0, 4), (4, 0), (1, 7), (7, 1)])
def test_flops_count_what_is_attended(causal: str, seq_q: int, seq_k: int) -> None:
    p = problem(causal=causal, seq_q=seq_q, seq_k=seq_k, head_dim=16, head_dim_v=24)
    pairs = int(allowed_keys(random_call(p))[0].sum())
    assert p.flops() == 2 * p.batch * p.heads_q * pairs * (16 + 24)


def test_flops_of_chosen_tokens_and_latent_rows() -> None:
    assert problem(**SPARSE).flops() == 2 * 2 * 2 * 8 * (16 + 16)
    assert problem(**LATENT).flops() == 2 * 2 * 2 * 19 * 37 * (16 + 8)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"causal": "top_left", "seqlens_k": True, "dtype": "bf16"},
         ("attention", "q (2,2,19,16)", "kv (2,2,37,16)", "bf16", "causal top-left", "seqlens_k", "return_lse")),
        (PACKED, ("q (30,2,16)", "kv (60,2,16)", "2 sequences")),
        (PAGES | {"num_splits": 3}, ("q (2,2,19,16)", "kv (2,2,37,16)", "page_size 16", "num_splits 3")),
        (PAGES | {"total_q": 5}, ("q (5,2,16)", "kv (2,2,37,16)", "2 sequences")),
        (SPARSE | {"magicpig": True}, ("tokens 8", "magicpig")),
        ({"window_left": 4, "softcap": True, "sinks": True}, ("window (4,-1)", "softcap", "sinks")),
        ({"chunk": 8}, ("chunk 8",)),
        ({"op": "block_sparse_attention", "tokens": 3, "block_k": 16}, ("tokens 3 blocks of 16 keys",)),
    ],
)  # fmt: skip
def test_text_says_what_caches_and_packed_rows_are(fields: dict, parts: tuple[str, ...]) -> None:
    for part in parts:
        assert part in str(problem(**fields))


@pytest.mark.parametrize("fields", [{"causal": "bottom_right", "leftpad_k": True}, PAGES, PACKED, SPARSE, LATENT])
def test_survives_json(fields: dict) -> None:
    p = problem(**fields)
    assert msgspec.json.decode(msgspec.json.encode(p), type=Problem) == p


def test_arguments_by_place_are_named_an_error() -> None:
    with pytest.raises(
        TypeError, match=r"2 positional arguments, but Problem takes keywords only: Problem\(batch=1, heads_q=8, .*head"
    ):
        Problem("attention", 2, heads_q=8, heads_k=8, seq_q=128, seq_k=128, head_dim=64)  # type: ignore[misc]
    made = Problem(op="attention", batch=2, heads_q=8, heads_k=8, seq_q=128, seq_k=128, head_dim=64)
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), msgspec.structs.replace(made)):
        assert type(same) is Problem
        assert same == made
    assert msgspec.json.decode(msgspec.json.encode(made), type=Problem) == made
