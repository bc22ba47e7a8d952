"""Cases: their FLOPs and bytes against numbers worked out by hand, and what the sets hold."""

from collections import Counter

import msgspec
import pytest

from portattn.schema.problem import Problem
from portattn.tools.bench import cases as bench_cases
from portattn.tools.bench.cases import SETS, Case, _expand

SMALL = Case(name="", op="attention", batch=2, heads_q=6, heads_k=3, seq_q=4, seq_k=6, head_dim=8, dtype="fp16")
DECODE = msgspec.structs.replace(SMALL, op="decode_attention", seq_q=1)


def small(**fields):
    return msgspec.structs.replace(SMALL, **fields)


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({}, 2 * 4 * 6), ({"causal": "bottom_right"}, 2 * (3 + 4 + 5 + 6)),
        ({"causal": "top_left"}, 2 * (1 + 2 + 3 + 4)),
        # Query i stands at i + 2 among the keys.
        ({"window": (1, 0)}, 2 * (2 + 2 + 2 + 2)), ({"window": (1, 1)}, 2 * (3 + 3 + 3 + 2)),
        ({"window": (None, 1)}, 2 * (4 + 5 + 6 + 6)),
        ({"window": (3, 2), "causal": "bottom_right"}, 2 * (3 + 4 + 4 + 4)),
        ({"lengths_q": (4, 2), "lengths_k": (6, 3)}, 4 * 6 + 2 * 3),
        ({"lengths_q": (4, 2), "lengths_k": (6, 3), "causal": "bottom_right"}, (3 + 4 + 5 + 6) + (2 + 3)),
        ({"lengths_q": (3, 1), "lengths_k": (1, 6), "causal": "bottom_right"}, 1 + 6),
        ({"op": "sparse_attention", "seq_q": 1, "tokens": 5}, 2 * 5),
    ],
)  # fmt: skip
def test_flops_count_what_is_attended(fields, pairs):
    assert small(**fields).flops() == 2 * 6 * pairs * (8 + 8)


def test_flops_are_those_of_the_problem():
    for case in SETS["dense18"][:4]:
        sizes = {name: getattr(case, name) for name in ("batch", "heads_q", "heads_k", "seq_q", "seq_k", "head_dim")}
        assert case.flops() == Problem(**sizes, causal=case.causal).flops()


@pytest.mark.parametrize(
    ("case", "size"),
    [
        (DECODE, 2 * 6 * 3 * (8 + 8) * 2),
        (msgspec.structs.replace(DECODE, dtype="fp32"), 2 * 6 * 3 * (8 + 8) * 4),
        (msgspec.structs.replace(DECODE, head_dim_v=4), 2 * 6 * 3 * (8 + 4) * 2),
        # Half a byte a number, and one for the scale of 16.
        (msgspec.structs.replace(DECODE, head_dim=16, kv_format="nvfp4", kv_scales="head"), 2 * 6 * 3 * 2 * (8 + 1)),
        (msgspec.structs.replace(DECODE, lengths_k=(6, 1)), 7 * 3 * (8 + 8) * 2),
        (msgspec.structs.replace(DECODE, lengths_k=(6, 1), op="paged_attention", page_size=4), 7 * 3 * (8 + 8) * 2),
        (msgspec.structs.replace(DECODE, window=(2, 0)), 2 * 3 * 3 * (8 + 8) * 2),
        # A latent row is read once: its first columns are V.
        (msgspec.structs.replace(DECODE, op="mla_attention", heads_k=1, head_dim_v=6), 2 * 6 * 8 * 2),
        # Of 6 tokens, two heads that choose 3 each at random have 6·(1 - 1/4) = 4.5 in all: 9 for two sequences.
        (msgspec.structs.replace(DECODE, op="sparse_attention", tokens=3), 9 * 3 * (8 + 8) * 2),
        (msgspec.structs.replace(DECODE, op="sparse_attention", tokens=3, heads_q=3), 2 * 3 * 3 * (8 + 8) * 2),
    ],
)
def test_bytes_are_those_of_attended_keys_and_values(case, size):
    assert case.read_bytes() == size


def test_sets_have_their_cases():
    """How many; each under a name of its own, and by the clock of its set."""
    counts = {name: len(cases) for name, cases in SETS.items()}
    assert counts == {
        "dense18": 18, "dense-gqa": 18, "dense-packed": 6, "dense-window": 6, "dense-short-q": 6, "dense-beyond": 42,
        "dense-wide": 4, "decode": 6, "paged": 18, "decode-quantised": 24, "paged-quantised": 90, "decode-nvfp4": 12,
        "sparse": 12, "mla": 5, "seed": 7, "small": 6, "host": 3, "cold-start": 3, "padded": 12, "prefill": 2,
        "backward18": 18, "backward_more": 11,
    }  # fmt: skip
    assert len({case.name for cases in SETS.values() for case in cases}) == sum(counts.values())
    cold = {"decode", "paged", "decode-quantised", "paged-quantised", "decode-nvfp4", "sparse", "mla"}
    for name, cases in SETS.items():
        expected = "cold" if name in cold else "do_bench" if name in ("seed", "small") else "hot"
        assert {case.timing for case in cases} == {expected}, name


def test_a_table_of_axes_becomes_cases():
    """The last axis is the fastest; what an axis says twice differently is left out; sizes follow from others."""
    shapes = {"kinds": [{"text": "x", "page_size": 16, "op": "paged_attention"}, {"text": "y", "seq_q": 2}]}
    found = list(_expand(shapes, name="{text} {head_dim}", seq=4096, head_dim=64, group=4, each={
        "page_size": [0, 16], "kind": "kinds", "causal": [False, True],
    }))  # fmt: skip
    assert [(c.name, c.page_size, c.seq_q, c.causal) for c in found] == [
        (f"{text} 64", page, rows, causal)
        for text, page, rows in (("y", 0, 2), ("x", 16, 4096), ("y", 16, 2))
        for causal in ("none", "bottom_right")
    ]
    assert {(c.heads_q, c.heads_k, c.batch, c.seq_k) for c in found} == {(32, 8, 4, 4096)}
    (runs,) = _expand({}, name="", head_dim=64, lengths_k=[[2, 7], 9])
    assert (runs.lengths_k, runs.lengths_q) == ((7, 7, 9), ())
    with pytest.raises(TypeError, match="haeds"):
        list(_expand({}, name="", head_dim=64, haeds=3))


def test_dense_peers_of_packed_cases_have_as_many_flops():
    packed = SETS["dense-packed"]
    padded_cases = [case for case in SETS["padded"] if case.lengths_k]
    even = [case for case in SETS["padded"] if not case.lengths_k]
    for ragged, padded, full in zip(packed, padded_cases, even, strict=True):
        assert ragged.flops() == padded.flops()
        assert full.flops() == pytest.approx(ragged.flops(), rel=0.02)
        assert sum(ragged.queries) == 16384


def test_an_order_under_a_budget_covers_every_set():
    chosen = {name: SETS[name] for name in ("dense18", "decode", "small")}
    cells = bench_cases.covering(chosen)
    assert sorted((name, case.name) for name, case in cells) == sorted(
        (name, case.name) for name, cases in chosen.items() for case in cases
    )
    assert [name for name, _ in cells[:6]] == ["dense18", "decode", "small"] * 2
    for end in range(1, 19):  # wherever it stops, none is two ahead of another that has cells left
        counts = Counter(name for name, _ in cells[:end])
        assert max(counts.values()) - min(counts.get(name, 0) for name in chosen) <= 1
    assert [case.name for _, case in bench_cases.plain(chosen)[:18]] == [case.name for case in SETS["dense18"]]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 18])
def test_a_set_is_spread(count):
    cases = SETS["dense18"][:count]
    spread = bench_cases.spread(cases)
    assert sorted(case.name for case in spread) == sorted(case.name for case in cases)
    assert spread[0] is cases[0]
    if count == 18:
        assert spread[1] is cases[16]
        assert spread[2] is cases[8]
