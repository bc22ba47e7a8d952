"""Problems from a line of text, and the problem that a case is without its data."""

import msgspec
import pytest
import torch
from places import tables

from portattn.errors import ArgumentError
from portattn.schema.ops import BACKWARD
from portattn.tools.bench.cases import SETS
from portattn.tools.bench.gate import as_call
from portattn.tools.bench.tensors import Tensors
from portattn.tools.tune.classes import from_sets, parse, tunable_sets, workload

TABLES = tables(__file__)

TEXTS = [
    "attention q=2,4,20,16 kv=2,2,37,16 dtype=fp16 causal", "attention q=2,4,20,16 kv=2,2,37,16 causal=top_left",
    "attention q=1,4,64,16 kv=1,4,64,16 dtype=fp32 window=7,0", "attention q=1,4,64,24 kv=1,4,64,24 head_dim_v=16",
    "varlen_attention q=2,4,20,16 kv=2,2,37,16 causal", "decode_attention q=2,4,1,16 kv=2,2,64,16",
    "paged_attention q=2,4,1,16 kv=2,2,64,16 page_size=16", "decode_attention q=2,4,1,16 kv=2,2,64,16 kv_format=e4m3",
    "decode_attention q=2,4,1,16 kv=2,2,64,16 dtype=fp16 kv_format=e5m2 kv_scales=head",
    "paged_attention q=2,4,1,16 kv=2,2,64,16 page_size=16 kv_format=int8",
    "paged_attention q=2,4,1,16 kv=2,2,64,16 page_size=16 kv_format=e4m3fnuz kv_scales=token",
    "sparse_attention q=2,4,1,16 kv=2,2,64,16 tokens=9",
    "mla_attention q=2,4,1,24 kv=2,1,64,24 head_dim_v=16 page_size=16",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_case_without_data_is_the_problem_of_its_call(text):
    case = parse(text)
    assert workload(case).problem == as_call(case, Tensors.random(case, torch.device("cpu"))).problem


def test_lengths_are_part_of_the_problem():
    case = parse(TEXTS[0])
    ragged = msgspec.structs.replace(case, lengths_q=(20, 7), lengths_k=(37, 9))
    made = workload(ragged).problem
    assert made == as_call(ragged, Tensors.random(ragged, torch.device("cpu"))).problem
    assert (made.seqlens_q, made.seqlens_k) == (True, True)


def test_every_set_can_be_tuned():
    for name in tunable_sets():
        for case in from_sets((name,), None):
            assert workload(case).problem.op == (BACKWARD[case.op] if case.backward else case.op)
    plain = (case for cases in SETS.values() for case in cases if not case.deterministic)
    assert len(from_sets(("all",), None)) == len({case.name for case in plain})


@pytest.mark.parametrize(("text", "message"), TABLES["bad_text"])
def test_bad_text(text, message):
    with pytest.raises(ArgumentError, match=message):
        parse(text)
