"""Caches whose sequences are shared by ranks, against one process under the error budget."""

from collections.abc import Callable
from typing import Any

import decode_ranks
import pytest
import torch
from places import tables
from rank_processes import Ranks

import portattn
from portattn.distributed import CacheShard, collectives
from portattn.distributed.cache_shard import PartialCall
from portattn.errors import ArgumentError

TABLES = tables(__file__)

Start = Callable[[int], Ranks]

PLAIN: dict[str, Any] = {"seq_q": 1}
BOTH = {"alibi_slopes": True, "sinks": True}
CASES: list[tuple[str, int, str, dict[str, Any], int, str]] = [
    # id, ranks, call, fields, interleave, heads
    ("tokens", 2, "decode", PLAIN, 1, "all"), ("stretch", 2, "decode", PLAIN, 19, "all"),
    ("four", 4, "decode", PLAIN, 3, "all"), ("eight", 8, "decode", PLAIN, 1, "all"),
    ("eight-heads", 8, "decode", PLAIN | {"heads_q": 8}, 2, "shard"),
    ("heads", 4, "decode", PLAIN | {"layout": "bshd"}, 2, "shard"),
    ("causal", 4, "decode", {"causal": "bottom_right"}, 2, "all"),
    ("top-left", 2, "decode", {"causal": "top_left"}, 2, "all"),
    ("window", 4, "decode", {"window_left": 5, "window_right": 2, "layout": "bshd"}, 2, "all"),
    ("window-one", 2, "decode", PLAIN | {"causal": "bottom_right", "window_left": 6}, 4, "all"),
    ("alibi", 4, "decode", {"causal": "bottom_right", "alibi_slopes": True}, 1, "all"),
    ("alibi-window", 2, "decode", {"alibi_slopes": True, "window_left": 9, "window_right": 1}, 3, "shard"),
    ("sinks", 4, "decode", PLAIN | {"sinks": True, "softcap": True}, 1, "all"),
    ("bf16", 2, "decode", PLAIN | {"dtype": "bf16", "sinks": True}, 1, "shard"),
    ("odd-width", 2, "decode", PLAIN | {"dtype": "fp16", "head_dim_v": 25}, 1, "all"),
    ("paged", 2, "paged", PLAIN, 8, "all"),
    ("paged-hpd", 4, "paged", {"page_layout": "hpd", "causal": "bottom_right"}, 1, "shard"),
    ("paged-alibi", 2, "paged", {"alibi_slopes": True, "layout": "bshd", "sinks": True}, 5, "all"),
    ("ragged", 2, "ragged", {}, 1, "all"), ("ragged-causal", 4, "ragged", {"causal": "bottom_right"}, 3, "shard"),
    ("ragged-window", 2, "ragged", {"window_left": 7, "causal": "bottom_right"} | BOTH, 3, "all"),
    ("ragged-top-left", 2, "ragged", {"causal": "top_left"}, 2, "all"), ("mla", 2, "mla", PLAIN, 1, "all"),
    ("mla-causal", 4, "mla", {"causal": "bottom_right", "softcap": True}, 8, "shard"),
    ("mla-ragged", 2, "mla ragged", {"causal": "bottom_right"}, 2, "all"),
]  # fmt: skip


def assert_all_right(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["wrong"] == 0, facts["wrong"]
        assert facts["error"] <= facts["budget"], (facts["error"], facts["budget"])
        assert facts["lse_error"] <= facts["lse_budget"], (facts["lse_error"], facts["lse_budget"])
    assert len({facts["bits"] for facts in found}) == 1, "ranks have different results"


@pytest.mark.parametrize(("world", "name", "fields", "interleave", "heads"), [c[1:] for c in CASES],
    ids=[c[0] for c in CASES])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_merged_parts_are_the_whole(ranks, world, name, fields, interleave, heads, seed):
    fields = {"leftpad_k": False} | fields if name == "decode" else fields
    assert_all_right(ranks(world).run(decode_ranks.attend, name, fields, seed, interleave, heads))


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("lengths", [[0, 1, 2], [0, 0, 0], [37, 3, 5]], ids=str)
@pytest.mark.parametrize("name", ["decode", "paged", "mla"])
def test_empty_parts_count_nothing_whatever_they_hold(ranks: Start, name: str, lengths: list[int], poison: str) -> None:
    fields = {"leftpad_k": False, "seq_q": 1} if name == "decode" else {"seq_q": 1}
    assert_all_right(ranks(4).run(decode_ranks.attend, name, fields, 2, 1, "all", lengths, poison))


@pytest.mark.parametrize("kv_format", ["e4m3", "int8"])
@pytest.mark.parametrize("name", ["decode", "paged"])
def test_quantised_caches(ranks: Start, name: str, kv_format: str) -> None:
    scales = "token" if kv_format == "int8" and name == "decode" else "head"
    fields = {"seq_q": 1, "dtype": "bf16", "kv_format": kv_format, "kv_scales": scales}
    fields |= {"leftpad_k": False} if name == "decode" else {}
    assert_all_right(ranks(2).run(decode_ranks.attend, name, fields, 0, 3, "all"))


def test_ranks_without_memory_for_a_sequence(ranks: Start) -> None:
    for found in ranks(4).run(decode_ranks.without_memory):
        assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize(("change", "text"), TABLES["every_rank_raises_the_same_error"])
def test_every_rank_raises_the_same_error(ranks: Start, change: str, text: str) -> None:
    found = ranks(4).run(decode_ranks.raised, change)
    assert text in found[0]
    assert len(set(found)) == 1, found
    # The ranks still answer one another.
    assert ranks(4).run(decode_ranks.raised, "") == ["nothing"] * 4


@pytest.mark.parametrize(("heads", "name"), [("all", "all_gather_into_tensor"), ("shard", "all_to_all_single")])
def test_one_collective_and_nothing_else(ranks: Start, heads: str, name: str) -> None:
    for found in ranks(2).run(decode_ranks.collectives, heads):
        assert found == [(name, 3 * 4 * (16 * 4 + 4))]  # rows of 16 float32 and an LSE


@pytest.mark.parametrize(("layout", "interleave"), [("bhsd", 1), ("bshd", 4)])
@pytest.mark.parametrize("quantised", [False, True])
def test_appended_rows_go_to_their_ranks(ranks: Start, layout: str, interleave: int, quantised: bool) -> None:
    ranks(4).run(decode_ranks.appended, layout, interleave, quantised)


@pytest.mark.parametrize("interleave", [1, 4])
def test_slots_of_pages(ranks: Start, interleave: int) -> None:
    assert max(ranks(2).run(decode_ranks.written_pages, interleave)) < 1e-6


@pytest.mark.parametrize("heads", ["all", "shard"])
def test_a_call_compiles_without_a_break(ranks: Start, heads: str) -> None:
    assert max(ranks(2).run(decode_ranks.compiled, heads)) == 0.0


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (3, 4), (8, 2), (2, 50)])
def test_each_token_has_one_place(world: int, interleave: int) -> None:
    shards = [CacheShard(rank, world, interleave) for rank in range(world)]
    lengths = torch.arange(101, dtype=torch.int32)
    assert torch.equal(sum(shard.lengths(lengths) for shard in shards), lengths)  # type: ignore[arg-type]
    held = {}
    for shard in shards:
        rows = int(shard.lengths(lengths[-1]))
        places = shard.positions(rows)
        assert (places.diff() > 0).all()
        held[shard.rank] = places.tolist()
        assert torch.equal(shard.slots(places[None], 101), torch.arange(rows))
        others = [p for other in shards if other is not shard for p in other.positions(5).tolist()]
        assert (shard.slots(torch.tensor([others], dtype=torch.int32), 101) == -1).all()
        for length in (0, 1, 7, 100):
            assert int(shard.lengths(torch.tensor(length))) == sum(p < length for p in held[shard.rank])
    assert sorted(p for places in held.values() for p in places) == list(range(100))
    assert shards[0].lengths(torch.tensor([-1])).tolist() == [0]


def test_slots_refuse_what_lies_beyond_a_table() -> None:
    table = torch.tensor([[5, 3]], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"positions is 65, but rank 1 has 2 pages of 16 tokens"):
        CacheShard(1, 2).slots(torch.tensor([[65]]), 16, table)
    assert CacheShard(0, 2).slots(torch.tensor([[65]]), 16, table).tolist() == [-1]
    with pytest.raises(ArgumentError, match=r"must be \(B, S\), or \(T,\) with sequences"):
        CacheShard(0, 2).slots(torch.tensor([65]), 16, table)
    with pytest.raises(ArgumentError, match="rank is 2, but must be below world_size, 2"):
        CacheShard(2, 2).check()


SCORES: list[dict[str, Any]] = [{"causal": True}, {"window": (3, 0)}, {"window": (3, None)}]


@pytest.mark.parametrize("scores", SCORES)
def test_calls_without_queries_or_without_sequences(scores: dict[str, Any]) -> None:
    shard, cache = CacheShard(0, 2), torch.ones(2, 2, 16, 8)
    lengths, none = torch.tensor([5, 9], dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    call = PartialCall("decode_attention", shard, [torch.ones(2, 4, 0, 8)], [cache, cache], None, lengths, scores)
    out, lse = call.run("all")
    assert (out.shape, lse.shape) == ((4, 2, 0, 8), (4, 2, 0))
    options = {**scores, "cu_seqlens_q": lengths.new_zeros(1), "max_seqlen_q": 1}
    call = PartialCall("paged_attention", shard, [torch.ones(3, 4, 8)], [cache.transpose(1, 2), cache.transpose(1, 2)],
        none.view(0, 2), none, options)  # fmt: skip
    out, lse = call.run("all")
    assert torch.equal(out, torch.zeros(4, 3, 8))
    assert torch.equal(lse, torch.full((4, 3), float("-inf")))


def test_merging_is_merge_states() -> None:
    outs, lses = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5)
    lses[0, 0], lses[:, 1, 2] = float("-inf"), float("-inf")
    outs[0, 0], outs[:, 1, 2] = float("nan"), float("inf")
    out, lse = collectives.merge_partials(outs, lses)
    right, right_lse = portattn.merge_states(outs, lses)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)
    assert (out[1, 2] == 0.0).all()


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 7), (torch.float16, 8), (torch.float32, 5)])
def test_rows_travel_bit_for_bit(dtype: torch.dtype, width: int) -> None:
    out, lse = torch.randn(2, 3, width).to(dtype), torch.randn(2, 3)
    out[0, 0, 0], lse[0, 1], lse[1, 1] = float("nan"), float("-inf"), float("nan")
    words = collectives.packed(out, lse)
    assert words.shape == (2, 3, collectives.row_words(width, dtype))
    found, found_lse = collectives.unpack_rows(words, width, dtype)
    torch.testing.assert_close(found, out, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found_lse, lse, rtol=0, atol=0, equal_nan=True)
