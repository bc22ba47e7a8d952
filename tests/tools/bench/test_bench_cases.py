"""Cases: their FLOPs and bytes against numbers worked out by hand, and what the sets hold."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from portattn.schema.problem import Problem
from portattn.tools.bench import schedule
from portattn.tools.bench.cases import Case
from portattn.tools.bench.sets import SETS

SMALL = Case(name="", op="attention", batch=2, heads_q=6, heads_k=3, seq_q=4, seq_k=6, head_dim=8, dtype="fp16")
DECODE = msgspec.structs.replace(SMALL, op="decode_attention", seq_q=1)


def small(**fields):
    return msgspec.structs.replace(SMALL, **fields)


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({}, 2 * 4 * 6),
        ({"causal": "bottom_right"}, 2 * (3 + 4 + 5 + 6)),
        ({"causal": "top_left"}, 2 * (1 + 2 + 3 + 4)),
        # Query i stands at i + 2 among the keys.
        ({"window": (1, 0)}, 2 * (2 + 2 + 2 + 2)),
        ({"window": (1, 1)}, 2 * (3 + 3 + 3 + 2)),
        ({"window": (None, 1)}, 2 * (4 + 5 + 6 + 6)),
        ({"window": (3, 2), "causal": "bottom_right"}, 2 * (3 + 4 + 4 + 4)),
        ({"lengths_q": (4, 2), "lengths_k": (6, 3)}, 4 * 6 + 2 * 3),
        ({"lengths_q": (4, 2), "lengths_k": (6, 3), "causal": "bottom_right"}, (3 + 4 + 5 + 6) + (2 + 3)),
        ({"lengths_q": (3, 1), "lengths_k": (1, 6), "causal": "bottom_right"}, 1 + 6),
        ({"op": "sparse_attention", "seq_q": 1, "tokens": 5}, 2 * 5),
    ],
)
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


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("decode B=8 H=64/16 S=1024 D=64", 33.554432),
        ("decode B=64 H=32/8 S=8192 D=128", 2147.483648),
        ("paged B=64 H=32/8 S=8192 D=128 page=16", 2147.483648),
        ("mla B=128 H=128 S=4096", 603.979776),
        ("seed sparse paged", 157.2864),
    ],
)
def test_bytes_of_known_shapes(name, megabytes):
    assert named(name).read_bytes() == megabytes * 1e6


def test_flops_of_known_shapes():
    assert named("mla B=128 H=128 S=4096").flops() == 2 * 128 * 128 * 4096 * (576 + 512)
    window = named("window D=128 S=16384 window=1024 causal")
    assert window.flops() == 2 * 16 * (16384 * 1024 - 1024 * 1023 // 2) * 256


def named(name: str) -> Case:
    return next(case for cases in SETS.values() for case in cases if case.name == name)


def test_names_are_unique():
    counted = Counter(case.name for cases in SETS.values() for case in cases)
    assert [name for name, times in counted.items() if times > 1] == []


def test_the_seed_set_has_all_of_its_kernels():
    kinds = {(case.op, case.page_size > 0, bool(case.lengths_q), case.magicpig is not None) for case in SETS["seed"]}
    assert kinds == {
        ("attention", False, False, False),
        ("attention", False, True, False),
        ("decode_attention", False, False, False),
        ("paged_attention", True, False, False),
        ("sparse_attention", False, False, False),
        ("sparse_attention", False, False, True),
        ("sparse_attention", True, False, False),
    }


def test_every_decode_shape_is_there_with_every_page_size():
    assert len(SETS["paged"]) == 3 * len(SETS["decode"])
    for case in SETS["paged"]:
        like = named(case.name.replace("paged", "decode").rpartition(" page")[0])
        assert (case.flops(), case.read_bytes()) == (like.flops(), like.read_bytes())


def test_dense_peers_of_packed_cases_have_as_many_flops():
    packed = SETS["dense-packed"]
    padded_cases = [case for case in SETS["padded"] if case.lengths_k]
    even = [case for case in SETS["padded"] if not case.lengths_k]
    for ragged, padded, full in zip(packed, padded_cases, even, strict=True):
        assert ragged.flops() == padded.flops()
        assert full.flops() == pytest.approx(ragged.flops(), rel=0.02)
        assert sum(ragged.queries) == 16384


def test_the_dense_sets_are_those_of_the_goals():
    def shapes(name):
        return {(c.head_dim, c.seq_q, c.seq_k, c.causal != "none", c.dtype) for c in SETS[name]}

    eighteen = {(d, s, s, c, "bf16") for d in (64, 128, 256) for s in (1024, 4096, 16384) for c in (False, True)}
    assert shapes("dense18") == shapes("dense-gqa") == eighteen
    assert len(SETS["dense18"]) == 18
    assert {case.group for case in SETS["dense-gqa"]} == {8}
    for case in (*SETS["dense18"], *SETS["dense-gqa"]):
        assert case.batch * case.seq_q == 16384
        assert case.heads_q * case.head_dim == 2048
    lengths = (256, 512, 65536, 131072)
    beyond = {(d, s, s, c, "bf16") for d in (64, 128, 256) for s in lengths for c in (False, True)}
    assert shapes("dense-beyond") == beyond | {(*shape[:4], "fp16") for shape in eighteen}
    assert {(c.batch, c.seq_q, c.seq_k) for c in SETS["dense-short-q"]} == {(1, 128, 16384)}
    for case in SETS["dense-packed"]:
        assert sum(case.keys) / case.batch == 2048
        assert case.packed
    assert {case.window for case in SETS["dense-window"]} == {(1023, 0)}


def test_caches_are_timed_cold_and_the_small_as_the_seed_timed_them():
    for name, cases in SETS.items():
        kinds = {case.timing for case in cases}
        if name in ("decode", "paged", "decode-quantised", "paged-quantised", "decode-nvfp4", "sparse", "mla"):
            assert kinds == {"cold"}
        else:
            assert kinds == ({"do_bench"} if name in ("seed", "small") else {"hot"})


def test_an_order_under_a_budget_covers_every_set():
    chosen = {name: SETS[name] for name in ("dense18", "decode", "small")}
    cells = schedule.covering(chosen)
    assert sorted((name, case.name) for name, case in cells) == sorted(
        (name, case.name) for name, cases in chosen.items() for case in cases
    )
    assert [name for name, _ in cells[:6]] == ["dense18", "decode", "small"] * 2
    for end in range(1, 19):  # wherever it stops, none is two ahead of another that has cells left
        counts = Counter(name for name, _ in cells[:end])
        assert max(counts.values()) - min(counts.get(name, 0) for name in chosen) <= 1
    assert [case.name for _, case in schedule.plain(chosen)[:18]] == [case.name for case in SETS["dense18"]]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 18])
def test_a_set_is_spread(count):
    cases = SETS["dense18"][:count]
    spread = schedule.spread(cases)
    assert sorted(case.name for case in spread) == sorted(case.name for case in cases)
    assert spread[0] is cases[0]
    if count == 18:
        assert spread[1] is cases[16]
        assert spread[2] is cases[8]
