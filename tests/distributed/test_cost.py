"""Costs of calls over several ranks: what is said to be sent is what is sent, and times follow the rates."""

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import cost_ranks
import msgspec
import pytest
from click.testing import CliRunner
from places import tables
from rank_processes import Ranks

from portattn.cli import main
from portattn.distributed import Rates, context_parallel_cost, decode_parallel_cost
from portattn.distributed.cost import pairs
from portattn.errors import ArgumentError

TABLES = tables(__file__)

Start = Callable[[int], Ranks]
LONG = ((1, 32, 131072, 128), (1, 8, 131072, 128))


@pytest.mark.parametrize(("world", "inner", "layout", "options"), [
    (4, 1, "zigzag", {"causal": True}), (4, 1, "contiguous", {"causal": True}), (4, 1, "contiguous", {}),
    (4, 1, "contiguous", {"causal": True, "window": (5, 0)}), (4, 4, "zigzag", {"causal": True}),
    (4, 2, "zigzag", {"causal": True}),
])  # fmt: skip
def test_bytes_and_messages_are_those_of_the_call(ranks, world, inner, layout, options):
    q, kv = (2, 8, 64, 16), (2, 2, 64, 16)
    seen = ranks(world).run(cost_ranks.sent, q, kv, inner, layout, options)
    given = {"causal": False, **options}
    found = context_parallel_cost(q, kv, ranks=world, inner=inner, layout=layout, **given)
    assert found.backward is not None
    for name, phase in (("forward", found.forward), ("backward", found.backward)):
        assert (phase.sent, phase.messages) in [tuple(rank[name]) for rank in seen], (name, phase, seen)
        if layout == "zigzag" or not options:  # even
            assert phase.sent == max(rank[name][0] for rank in seen), (name, phase, seen)


@pytest.mark.parametrize("heads", ["all", "shard"])
def test_decoding_sends_what_it_says(ranks: Start, heads: str) -> None:
    q, kv = (2, 8, 1, 18), (2, 2, 64, 18)
    found = decode_parallel_cost(q, kv, ranks=4, heads=heads)
    for given in ranks(4).run(cost_ranks.decoded, q, kv, heads):
        assert found.forward.sent == (given * 3 if heads == "all" else given * 3 // 4)


def test_pairs_by_formula_are_those_by_counting() -> None:
    source = random.Random(0)
    for _ in range(3000):
        rows, keys = source.randint(0, 9), source.randint(0, 9)
        left, right = (source.choice([None, *range(-4, 9)]) for _ in "lr")
        if left is not None and right is not None and right < -left:
            continue
        counted = sum((left is None or j >= i + keys - rows - left)
            and (right is None or j <= i + keys - rows + right)
            for i, j in itertools.product(range(rows), range(keys)))  # fmt: skip
        assert pairs(rows, keys, left, right) == counted


@pytest.mark.parametrize("window", [(None, None), (4096, None), (1000, 700)])
@pytest.mark.parametrize(("ranks_", "inner"), [(2, 1), (8, 1), (8, 8), (8, 2)])
def test_even_work_is_the_whole_call_s(ranks_: int, inner: int, window: tuple[int | None, int | None]) -> None:
    found = context_parallel_cost(*LONG, ranks=ranks_, inner=inner, causal=window == (None, None), window=window)
    whole = pairs(131072, 131072, window[0], 0 if window == (None, None) else window[1])
    assert found.forward.flop_mean == 4.0 * 32 * 128 * whole / ranks_
    assert 1.0 <= found.forward.flop / found.forward.flop_mean < 1.1
    assert found.backward.flop == 2.5 * found.forward.flop


def test_contiguous_causal_work_is_uneven() -> None:
    found = context_parallel_cost(*LONG, ranks=8, layout="contiguous", causal=True)
    assert found.forward.flop / found.forward.flop_mean == pytest.approx(15 / 8, rel=1e-4)  # the last of eight pieces


def test_time_follows_the_rates() -> None:
    alone = context_parallel_cost(*LONG, ranks=1, causal=True)
    assert alone.forward.seconds == alone.forward.one == alone.forward.flop / Rates().forward
    assert alone.forward.sent == alone.forward.exposed == alone.memory == 0
    quick = context_parallel_cost(*LONG, ranks=8, causal=True, rates=Rates(link=1e18, latency=1e-12))
    slow = context_parallel_cost(*LONG, ranks=8, causal=True, rates=Rates(link=1e9))
    assert quick.forward.hidden
    assert not slow.forward.hidden
    assert slow.forward.seconds == pytest.approx(slow.forward.communication, rel=0.2)
    assert slow.forward.sent == quick.forward.sent
    across = context_parallel_cost(*LONG, ranks=8, causal=True, rates=Rates(per_host=4))
    assert quick.forward.communication < across.forward.communication < slow.forward.communication


def test_thousands_of_ranks() -> None:
    found = context_parallel_cost((1, 32, 1 << 23, 128), (1, 8, 1 << 23, 128), ranks=2048, inner=8, causal=True)
    assert found.method == "ring of ulysses"
    assert 1 < found.forward.speedup < 2048
    assert sum(call.count for call in found.calls) == 256


@pytest.mark.parametrize(("options", "text"), [
    ({"ranks": 0}, "ranks is 0, but must be an integer ≥ 1"),
    ({"ranks": 8, "inner": 3}, "ranks is 8, but must be a multiple of inner, 3"),
    ({"ranks": 3}, "S is 131072, but must be a multiple of 6"),
    ({"ranks": 64, "inner": 64}, "heads_q is 32, but must be a multiple of inner, 64"),
    ({"ranks": 2, "layout": "striped"}, "layout is 'striped', but must be one of zigzag, contiguous"),
    ({"ranks": 2, "dtype": "fp8"}, "dtype is 'fp8', but must be one of bf16, fp16, fp32"),
])  # fmt: skip
def test_bad_input(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        context_parallel_cost(*LONG, **options)
    assert text in str(raised.value)


@pytest.mark.parametrize(("options", "text"), TABLES["bad_input_of_decoding"])
def test_bad_input_of_decoding(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        decode_parallel_cost(**{"q": (1, 64, 1, 576), "kv": (1, 1, 4096, 576)} | options)
    assert text in str(raised.value)


@pytest.mark.parametrize(("options", "text"), [
    ({}, "bf16, no mask"), ({"causal": True}, "bf16, causal"), ({"window": (4096, None)}, "bf16, window (4096, None)"),
    ({"causal": True, "window": (4096, None)}, "bf16, causal, window (4096, None)"),
])  # fmt: skip
def test_the_first_line_says_the_mask(options: dict[str, Any], text: str) -> None:
    assert context_parallel_cost(*LONG, ranks=8, **options).explain().splitlines()[0].endswith(text)
    assert decode_parallel_cost((1, 64, 1, 128), (1, 8, 4096, 128), ranks=2).explain().splitlines()[0].endswith("bf16")


SHAPES = ("--q", "1,32,131072,128", "--kv", "1,8,131072,128", "--ranks", "8")


def test_the_command_prints_text_and_json() -> None:
    called = CliRunner().invoke(main, ["context-parallel", *SHAPES, "--causal", "--rate", "link=1e9"])
    assert called.exit_code == 0
    assert "ring over 8 ranks, zigzag: q (1,32,131072,128) kv (1,8,131072,128) bf16, causal\n" in called.output
    assert "  memory   548 MiB of a forward pass beyond a rank's own q, k, v and out\n" in called.output
    assert "448 MiB sent in 7 messages" in called.output
    called = CliRunner().invoke(main, ["context-parallel", *SHAPES, "--causal", "--json", "--rate", "link=1e9"])
    data = json.loads(called.output)
    found = context_parallel_cost(*LONG, ranks=8, causal=True, rates=Rates(link=1e9))
    assert data == json.loads(msgspec.json.encode(found.data()))
    assert data["forward"]["hidden"] is False
    decode = ["context-parallel", "--decode", "--q", "1,64,1,128", "--kv", "1,8,1048576,128", "--ranks", "2"]
    assert "decode over 2 ranks" in CliRunner().invoke(main, decode).output


@pytest.mark.parametrize(("options", "text"), TABLES["the_command_refuses_bad_input"])
def test_the_command_refuses_bad_input(options: tuple[str, ...], text: str) -> None:
    shapes = [word for pair in zip(SHAPES[::2], SHAPES[1::2], strict=True) if pair[0] not in options for word in pair]
    called = CliRunner().invoke(main, ["context-parallel", *shapes, *options])
    assert called.exit_code == 2
    assert text in called.output
