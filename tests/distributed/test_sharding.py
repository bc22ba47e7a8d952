"""Which pairs of a row and a key the calls of all ranks attend: each pair of the whole mask once, and no other."""

import itertools
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import portattn
from portattn.distributed import collectives, context_parallel, parallel
from portattn.distributed.collectives import packed
from portattn.distributed.sharding import LAYOUTS, Documents, Mask, Shards, step
from portattn.launch.run import load_kernels

LENGTH = 24
MASKS = [Mask(), Mask(None, 0), Mask(3, 0), Mask(2, 5), Mask(0, 0), Mask(None, 4), Mask(9, None), Mask(20, 3)]
PACKED = [None, Documents([0, 24]), Documents([0, 5, 5, 20]), Documents([0, 1, 2, 13, 24]), Documents([0])]


def attended(span):
    """(row, key) of a span, by the rule of portattn's windows."""
    for start, stop in itertools.pairwise(span.cu) if span.cu is not None else [(0, None)]:
        rows = range(span.rows[0] + start, span.rows[1] if stop is None else span.rows[0] + stop)
        keys = range(span.keys[0] + start, span.keys[1] if stop is None else span.keys[0] + stop)
        for i, j in itertools.product(range(len(rows)), range(len(keys))):
            place = i + len(keys) - len(rows)
            if (span.left is None or j >= place - span.left) and (span.right is None or j <= place + span.right):
                yield rows[i], keys[j]


def rows_of(ranges):
    return [row for start, stop in ranges for row in range(start, stop)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_every_pair_is_attended_once(layout, ring):
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


def whole(mask, documents):
    parts = [(0, LENGTH)] if documents is None else list(itertools.pairwise(documents.cu))
    for start, stop in parts:
        for i, j in itertools.product(range(start, stop), range(start, stop)):
            if (mask.left is None or j >= i - mask.left) and (mask.right is None or j <= i + mask.right):
                yield i, j


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_zigzag_work_is_even_in_every_step_and_contiguous_work_is_not(ring):
    def pairs(layout, place, source):
        made = step(Shards(layout, ring), 32 * ring, Mask(None, 0), None, True, place, source)
        return sum(span.pairs for span in made.spans)

    for distance in range(ring):
        assert len({pairs("zigzag", place, (place - distance) % ring) for place in range(ring)}) == 1
    by_rank = [sum(pairs("contiguous", place, source) for source in range(ring)) for place in range(ring)]
    assert by_rank[-1] > (2 * ring - 2) * by_rank[0] / 2


def test_causal_zigzag_steps_are_one_call():
    shards = Shards("zigzag", 4)
    counts = [len(step(shards, 64, Mask(None, 0), None, True, 1, source).spans) for source in range(4)]
    assert counts == [1, 1, 1, 1]


@pytest.mark.parametrize(("layout", "ring", "inner"),
    [(a, b, c) for a in LAYOUTS for b in (1, 2, 3) for c in (1, 2, 4)])  # fmt: skip
def test_ranks_share_all_rows_out(layout, ring, inner):
    shards = Shards(layout, ring, inner)
    length, places = 3 * shards.unit, list(itertools.product(range(ring), range(inner)))
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


def test_documents_inside_of_rows():
    generator = random.Random(1)
    for _ in range(200):
        cu = [0, *sorted(generator.choices(range(30), k=generator.randrange(6)))]
        rows = sorted(generator.choices(range(31), k=2))
        slow = [(place, (max(a, rows[0]), min(b, rows[1]))) for place, (a, b) in enumerate(itertools.pairwise(cu))]
        assert Documents(cu).inside((rows[0], rows[1])) == [(place, part) for place, part in slow if part[0] < part[1]]


# Process groups: their cached control groups, the collective before the first message, remembered kinds of calls.
FILES = Path("/proc/self/fd")
ROWS, PACKED_GROUPS = torch.ones(1, 2, 8, 8), torch.ones(8, 2, 8)


def begin():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    begin()
    yield collectives.Ranks.of_group(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.skipif(not FILES.exists(), reason="/proc/self/fd is Linux's")
def test_a_destroyed_group_is_not_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    counts = []
    for _ in range(6):  # the first one loads what stays
        begin()
        context_parallel().attention(ROWS, ROWS, ROWS)
        dist.destroy_process_group()
        counts.append(len(os.listdir(FILES)))
    assert counts[1] == counts[-1], counts


def test_a_made_group_is_kept_as_long_as_its_own(group, monkeypatch):
    monkeypatch.setattr(collectives, "_has_host_messages", lambda group: False)
    made = collectives.control_group(group)
    assert made is not group.group
    assert collectives.control_group(group) is made
    other = collectives.Ranks.of_group(dist.new_group([0]), "other")
    collectives.control_group(other)
    before = len(collectives._made)
    dist.destroy_process_group(other.group)
    del other
    assert len(collectives._made) == before - 1


def test_one_collective_before_the_first_message(group, monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: sent.append((tensor.device.type, group)))
    collectives.connect(group, torch.device("cpu"))
    assert sent == []
    for _ in range(2):
        collectives.connect(group, torch.device("meta"))
    assert sent == [("meta", group.group)]


@pytest.mark.parametrize("check", ["always", "first"])
def test_kinds_of_calls_do_not_add_up(group, monkeypatch, check):
    monkeypatch.setattr(parallel, "_KINDS", 3)
    shared = context_parallel(check=check)
    for last in range(1, 9):
        shared.varlen_attention(PACKED_GROUPS, PACKED_GROUPS, PACKED_GROUPS, (0, last))
        assert len(shared._seen) <= (3 if check == "first" else 0)


# Merging partial results and adding up gradients: the kernels and torch's operations against float64.
INF = math.inf


@pytest.fixture(params=["kernel", "torch"])
def device(request, device, monkeypatch):
    """Where tensors are; collectives.py takes the kernels, or torch's operations."""
    monkeypatch.setattr(collectives, "can_fuse", lambda _: request.param == "kernel")
    if device.path == "interpreter":
        monkeypatch.setattr(collectives, "load_kernels", lambda module, _: load_kernels(module, interpreted=True))
    return device.name


def exact(outs, lses):
    lse = torch.logsumexp(torch.stack([part.double() for part in lses]), 0)
    total = torch.zeros(outs[0].shape, dtype=torch.float64, device=outs[0].device)
    for out, part in zip(outs, lses, strict=True):
        share = torch.exp(part.double() - lse.masked_fill(lse.isneginf(), 0.0))[..., None]
        total += torch.where(part.isneginf()[..., None], 0.0, out.double()) * share
    return total, lse


def parts(device, dtype, sizes, count):
    """Partial results; each has rows that attended nothing, which hold NaN, and row 0 attended nothing in any."""
    generator, found = torch.Generator().manual_seed(len(sizes) + count), []
    for place in range(count):
        out = torch.randn(sizes, generator=generator).to(dtype)
        lse = 20 * torch.randn(sizes[:-1], generator=generator)
        for row in {0, place + 1}:
            lse[..., row] = -INF
            out[..., row, :] = math.nan
        found.append((out.to(device), lse.to(device)))
    return found


def near(ours, right, dtype):
    """Log-sum-exps are up to 80 here, and float32 has 64 units in the last place of 1 there."""
    limit = (torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps) * float(right.abs().max())
    return float((ours.double() - right).abs().max()) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_parts_of_rows_are_merged_as_they_come(device, dtype, wide):
    first, second = parts(device, dtype, (2, 3, 21, 24), 2)
    first[0][:, :, 0] = 0.0  # as local calls return what attended nothing
    merged = collectives.StateMerger((2, 3, 21, 24), dtype, torch.device(device), 3 if wide else 2)
    merged.add((0, 21), first[0].masked_fill(first[1].isneginf()[..., None], 0.0), first[1].clone())
    # Rows 5 to 20 alone, of another layout.
    some = second[0][:, :, 5:20].transpose(1, 2).contiguous().transpose(1, 2)
    merged.add((5, 20), some.clone(), second[1][:, :, 5:20].clone())
    merged.finish()
    right, lse = exact([first[0][:, :, 5:20], some], [first[1][:, :, 5:20], second[1][:, :, 5:20]])
    assert merged.out.dtype is (torch.float32 if wide else dtype)
    assert near(merged.out[:, :, 5:20], right, torch.float32 if wide else dtype)
    assert torch.allclose(merged.lse[:, :, 5:20].double(), lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(merged.out[:, :, 20:], first[0][:, :, 20:].to(merged.out.dtype))
    assert not merged.out[:, :, 0].any()
    assert merged.lse[:, :, 0].isneginf().all()


def test_rows_without_a_part_give_nothing(device):
    merged = collectives.StateMerger((1, 2, 8, 16), torch.float32, torch.device(device), 2)
    (part,) = parts(device, torch.float32, (1, 2, 4, 16), 1)
    merged.add((2, 6), part[0].clone(), part[1].clone())
    assert merged.lse[:, :, [0, 1, 6, 7]].isneginf().all()
    assert not merged.out[:, :, [0, 1, 2, 3, 6, 7]].any()
    assert torch.equal(merged.out[:, :, 4:6], part[0][:, :, 2:])
    nothing = collectives.StateMerger((1, 2, 0, 16), torch.float32, torch.device(device), 0)
    nothing.finish()
    assert nothing.out.shape == (1, 2, 0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_ranks_sent_is_merged(device, dtype, count):
    found = parts(device, dtype, (3, 2, 9, 5), count)  # 5 elements: a row of bf16 ends within a word
    words = torch.stack([packed(out, lse) for out, lse in found])
    out, lse = collectives.merge_words(words, 5, dtype)
    right, right_lse = exact([out for out, _ in found], [lse for _, lse in found])
    assert out.dtype is dtype
    assert out.is_contiguous()
    assert near(out, right, dtype)
    assert torch.allclose(lse.double(), right_lse, rtol=1e-6, atol=1e-6)
    assert lse[..., 0].isneginf().all()
    assert collectives.merge_words(words[:, :, :0], 5, dtype)[0].shape == (3, 0, 9, 5)


@pytest.mark.parametrize("apart", [200.0, -200.0])
def test_parts_far_apart_are_merged_without_an_overflow(device, apart):
    """exp(200) is no float32: each part is weighed against the largest log-sum-exp."""
    found = [(out, lse + i * apart) for i, (out, lse) in enumerate(parts(device, torch.float32, (3, 2, 9, 5), 3))]
    out, lse = collectives.merge_words(torch.stack([packed(*one) for one in found]), 5, torch.float32)
    right, right_lse = exact([out for out, _ in found], [lse for _, lse in found])
    assert near(out, right, torch.float32)
    assert torch.allclose(lse.double(), right_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "most"), [([], 0), ([(0, 0)], 0), ([(0, 4), (4, 8)], 1),
    ([(0, 8), (2, 4), (3, 9), (4, 5)], 3)])  # fmt: skip
def test_most_parts_of_a_row(rows, most):
    assert collectives.most_parts(rows) == most


def test_sums_of_two_parts_are_those_of_float32():
    """Bit for bit, in half the memory; of three parts the sum is float32."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(1, 2, 64, 8, generator=generator).bfloat16() for _ in range(3))

    def summed(count, *given):
        found: Any = collectives.Sum(a, count)
        for rows, part in given:
            found.add(rows, part.clone())
        return found.result(torch.device("cpu"))

    assert torch.equal(summed(2, ((0, 64), a), ((0, 64), b)), (a.float() + b.float()).bfloat16())
    assert torch.equal(summed(2, ((0, 32), a[:, :, :32]), ((32, 64), b[:, :, 32:]))[:, :, 32:], b[:, :, 32:])
    right = (a.float() + b.float() + c.float()).bfloat16()
    assert torch.equal(summed(3, ((0, 64), a), ((0, 64), b), ((0, 64), c)), right)
    assert not torch.equal((a + b) + c, right)
    assert not summed(2).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["kernel"], indirect=True)
def test_a_pause_writes_nothing(device, dtype):
    memory = torch.full((4,), 7.0, dtype=dtype, device=device)
    collectives.load_kernels("portattn.kernels.combine", False).pause[(1,)](memory, 0.0, 50)
    assert (memory == 7.0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on this device")
def test_a_device_on_which_no_kernel_runs_is_said_once_and_torch_merges(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    collectives.can_fuse.cache_clear()
    try:
        with pytest.warns(portattn.FallbackWarning,
                match=r"merged by torch's operations: kernels do not run on cuda:0"):  # fmt: skip
            assert not collectives.can_fuse(torch.device("cuda", 0))
        assert not collectives.can_fuse(torch.device("cuda", 0))
    finally:
        collectives.can_fuse.cache_clear()


def test_a_sink_without_weight_changes_nothing():
    out, lse = torch.randn(1, 2, 3, 4), torch.tensor([[[0.5, -torch.inf, 2.0]] * 2])
    out[:, :, 1] = 0.0
    sum_ = collectives.StateMerger((1, 2, 3, 4), torch.float32, torch.device("cpu"), 1)
    sum_.add((0, 3), out.clone(), lse.clone())
    sum_.count_sinks(torch.tensor([-torch.inf, -torch.inf]), None)
    torch.testing.assert_close(sum_.out, out)
    torch.testing.assert_close(sum_.lse, lse)
