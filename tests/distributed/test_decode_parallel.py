"""Caches whose sequences are shared by ranks, against one process under the error budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import decode_ranks
import pytest
from rank_processes import Ranks

Start = Callable[[int], Ranks]

PLAIN: dict[str, Any] = {"seq_q": 1}
BOTH = {"alibi_slopes": True, "sinks": True}
CASES: list[tuple[str, int, str, dict[str, Any], int, str]] = [
    # id, ranks, call, fields, interleave, heads
    ("tokens", 2, "decode", PLAIN, 1, "all"),
    ("stretch", 2, "decode", PLAIN, 19, "all"),
    ("four", 4, "decode", PLAIN, 3, "all"),
    ("eight", 8, "decode", PLAIN, 1, "all"),
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
    ("ragged", 2, "ragged", {}, 1, "all"),
    ("ragged-causal", 4, "ragged", {"causal": "bottom_right"}, 3, "shard"),
    ("ragged-window", 2, "ragged", {"window_left": 7, "causal": "bottom_right"} | BOTH, 3, "all"),
    ("ragged-top-left", 2, "ragged", {"causal": "top_left"}, 2, "all"),
    ("mla", 2, "mla", PLAIN, 1, "all"),
    ("mla-causal", 4, "mla", {"causal": "bottom_right", "softcap": True}, 8, "shard"),
    ("mla-ragged", 2, "mla ragged", {"causal": "bottom_right"}, 2, "all"),
]  # fmt: skip


def assert_all_right(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["wrong"] == 0, facts["wrong"]
        assert facts["error"] <= facts["budget"], (facts["error"], facts["budget"])
        assert facts["lse_error"] <= facts["lse_budget"], (facts["lse_error"], facts["lse_budget"])
    assert len({facts["bits"] for facts in found}) == 1, "ranks have different results"


@pytest.mark.parametrize(
    ("world", "name", "fields", "interleave", "heads"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_merged_parts_are_the_whole(
    ranks: Start, world: int, name: str, fields: dict[str, Any], interleave: int, heads: str, seed: int
) -> None:
    fields = {"leftpad_k": False} | fields if name == "decode" else fields
    assert_all_right(ranks(world).run(decode_ranks.attend, name, fields, seed, interleave, heads))
