"""Which pairs of a row and a key the calls of all ranks attend: each pair of the whole mask once, and no other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from portattn.distributed.sharding import LAYOUTS, Documents, Mask, Shards, Span, step

LENGTH = 24
MASKS = [Mask(), Mask(None, 0), Mask(3, 0), Mask(2, 5), Mask(0, 0), Mask(None, 4), Mask(9, None), Mask(20, 3)]
PACKED = [None, Documents([0, 24]), Documents([0, 5, 5, 20]), Documents([0, 1, 2, 13, 24]), Documents([0])]


def attended(span: Span) -> Iterator[tuple[int, int]]:
    """(row, key) of a span, by the rule of portattn's windows."""
    for start, stop in itertools.pairwise(span.cu) if span.cu is not None else [(0, None)]:
        rows = range(span.rows[0] + start, span.rows[1] if stop is None else span.rows[0] + stop)
        keys = range(span.keys[0] + start, span.keys[1] if stop is None else span.keys[0] + stop)
        for i, j in itertools.product(range(len(rows)), range(len(keys))):
            place = i + len(keys) - len(rows)
            if (span.left is None or j >= place - span.left) and (span.right is None or j <= place + span.right):
                yield rows[i], keys[j]


def rows_of(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_every_pair_is_attended_once(layout: str, ring: int) -> None:
    shards = Shards(layout, ring)
    rows = [rows_of(shards.pieces(LENGTH, place)) for place in range(ring)]
    for mask, documents, join in itertools.product(MASKS, PACKED, (True, False)):
        found = []
        for place, source in itertools.product(range(ring), range(ring)):
            made = step(shards, LENGTH, mask, documents, join, place, source)
            keys = [rows[source][row] for row in rows_of(made.ranges)]
            for span in made.spans:
                pairs = list(attended(span))
                assert len(pairs) == span.pairs
                assert min(span.left or 0, span.right or 0) >= 0  # portattn takes no other window
                found += [(rows[place][i], keys[j]) for i, j in pairs]
                if not join and span.cu is None:
                    assert span.shift == rows[place][span.rows[0]] - keys[span.keys[0]]
        assert sorted(found) == list(whole(mask, documents)), (mask, documents and documents.cu, join)


def whole(mask: Mask, documents: Documents | None) -> Iterator[tuple[int, int]]:
    parts = [(0, LENGTH)] if documents is None else list(itertools.pairwise(documents.cu))
    for start, stop in parts:
        for i, j in itertools.product(range(start, stop), range(start, stop)):
            if (mask.left is None or j >= i - mask.left) and (mask.right is None or j <= i + mask.right):
                yield i, j


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_zigzag_work_is_even_in_every_step_and_contiguous_work_is_not(ring: int) -> None:
    def pairs(layout: str, place: int, source: int) -> int:
        made = step(Shards(layout, ring), 32 * ring, Mask(None, 0), None, True, place, source)
        return sum(span.pairs for span in made.spans)

    for distance in range(ring):
        assert len({pairs("zigzag", place, (place - distance) % ring) for place in range(ring)}) == 1
    by_rank = [sum(pairs("contiguous", place, source) for source in range(ring)) for place in range(ring)]
    assert by_rank[-1] > (2 * ring - 2) * by_rank[0] / 2


def test_causal_zigzag_steps_are_one_call() -> None:
    shards = Shards("zigzag", 4)
    counts = [len(step(shards, 64, Mask(None, 0), None, True, 1, source).spans) for source in range(4)]
    assert counts == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("layout", "ring", "inner"), [(a, b, c) for a in LAYOUTS for b in (1, 2, 3) for c in (1, 2, 4)]
)
def test_ranks_share_all_rows_out(layout: str, ring: int, inner: int) -> None:
    shards = Shards(layout, ring, inner)
    length = 3 * shards.unit
    places = list(itertools.product(range(ring), range(inner)))
    found = [rows_of(shards.rows(length, *place)) for place in places]
    assert {len(rows) for rows in found} == {length // shards.ranks}
    assert sorted(row for rows in found for row in rows) == list(range(length))
    for place in range(ring):
        # The inner ranks' rows, laid where they belong, are the ring's shard.
        shard = [-1] * (length // ring)
        for rank in range(inner):
            targets = rows_of(shards.gathered(length, rank))
            for target, row in zip(targets, rows_of(shards.rows(length, place, rank)), strict=True):
                shard[target] = row
        assert shard == rows_of(shards.pieces(length, place))


def test_documents_inside_of_rows() -> None:
    generator = random.Random(1)
    for _ in range(200):
        cu = [0, *sorted(generator.choices(range(30), k=generator.randrange(6)))]
        rows = sorted(generator.choices(range(31), k=2))
        slow = [(place, (max(a, rows[0]), min(b, rows[1]))) for place, (a, b) in enumerate(itertools.pairwise(cu))]
        assert Documents(cu).inside((rows[0], rows[1])) == [(place, part) for place, part in slow if part[0] < part[1]]
