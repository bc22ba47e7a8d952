"""The order of additions to dQ in turns (tile_scheduler.py), by the kernels' own functions on plain numbers. What
a launch does with its turns is run here for some programs at a time that go on in any order: no deadlock, and each tile
of dQ gets the additions of all blocks that see it, always in the order of their keys."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import types
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support import random_call

from portattn import Problem
from portattn.backends.cuda.hopper_backward import variant as backward
from portattn.backends.cuda.hopper_backward.variant import LOG2E, BackwardVariant
from portattn.backends.cuda.schedules import ALIBI, BENT, function_source, gradient_source
from portattn.kernels.score_program import load_function
from portattn.launch import meta_call
from portattn.launch.kernelcall import CAP
from portattn.launch.run import launch_tensors
from portattn.reference.score_functions import evaluate
from portattn.schema.call import Call
from portattn.schema.lowering import launch_steps
from portattn.testing.tolerance import nan_filled_memory

pytest.importorskip("triton.experimental.gluon")

from portattn.backends.cuda.hopper_backward import consumer as hopper_consumer
from portattn.backends.cuda.hopper_backward import tile_scheduler
from portattn.backends.cuda.hopper_forward import fragments
from portattn.backends.cuda.hopper_forward import tile_scheduler as forward_scheduler

KEYS, ROWS = 128, 64


class Pointer:
    """An address in an array."""

    def __init__(self, values: list[int], at: Any = 0) -> None:
        self.values, self.at = np.array(values), at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(list(self.values), self.at + more)


PLAIN = types.SimpleNamespace(
    maximum=np.maximum, minimum=np.minimum, where=np.where, cdiv=lambda a, b: -(-a // b),
    load=lambda pointer: pointer.values[pointer.at], arange=lambda begin, end, layout: np.arange(begin, end),
    max=lambda x, axis: x.max(), BlockedLayout=lambda *given: None, constexpr=int,
)  # fmt: skip


# The records of tile_scheduler.py, whose fields only the compiler can ask for.
Work = namedtuple(
    "Work", "start rows head slot sequence q_first q_length k_first k_length tile"
)  # fmt: skip
Tiles = namedtuple("Tiles", "begin clean unclean end")


def plain(module: types.ModuleType, **more: Any) -> types.SimpleNamespace:
    """A kernel module's functions, to be called with plain numbers."""
    known: dict[str, Any] = {
        "gl": PLAIN, "_ROWS": ROWS, "range": range, "Work": Work, "BackwardWork": Work, "Tiles": Tiles, **more,
    }  # fmt: skip
    for name, value in vars(module).items():
        if hasattr(value, "fn") and name not in known:
            known[name] = types.FunctionType(value.fn.__code__, known, name, value.fn.__defaults__)
    return types.SimpleNamespace(**known)


FORWARD = plain(forward_scheduler)
BACKWARD = plain(
    tile_scheduler, in_turn=FORWARD.in_turn, first_row=FORWARD.first_row, last_seen=FORWARD.last_seen,
    position_of=FORWARD.position_of,
)  # fmt: skip
TURNS = BACKWARD


@dataclass(frozen=True)
class Case:
    """A launch.

    lengths     of each sequence (queries, keys); packed where asked for, else padded
    first_rows  cu_seqlens_q where it is not that of the lengths"""

    seq_q: int = 640
    seq_k: int = 640
    right: int | None = None
    left: int | None = None
    top_left: bool = False
    heads: int = 2
    share: int = 1
    together: int = 2
    lengths: tuple[tuple[int, int], ...] = ()
    packed: bool = False
    first_rows: tuple[int, ...] = ()

    def form(self) -> Any:
        varying = "none" if not self.lengths else "packed" if self.packed else "padded"
        limited, left = self.right is not None, self.left is not None
        return types.SimpleNamespace(
            KEYS=KEYS, ROWS=ROWS, RIGHT=limited, LEFT=left, TOP_LEFT=self.top_left, VARYING=varying, STAGGER=0,
            TURNS=True, RAGGED=varying == "none" and self.seq_k % KEYS != 0,
            UNSEEN=varying != "none" or (self.top_left and limited) or left,
        )  # fmt: skip

    def sizes(self) -> Any:
        batches = len(self.lengths) or 1
        q, k = ([pair[i] for pair in self.lengths] for i in (0, 1))
        seq_q, seq_k = self.seq_q, self.seq_k
        if self.packed:
            seq_q, seq_k = sum(q), sum(k)
            q, k = ([0, *itertools.accumulate(each)] for each in (q, k))
            q = list(self.first_rows) or q
        tiles = seq_k // KEYS + batches + 1 if self.packed else -(-seq_k // KEYS)
        query_tiles = seq_q // ROWS + batches + 1 if self.packed else -(-seq_q // ROWS)
        return types.SimpleNamespace(
            lengths_q=Pointer(q or [0]), lengths_k=Pointer(k or [0]), batches=batches, heads=self.heads,
            share=self.share, seq_q=seq_q, seq_k=seq_k, left=self.left or 0, right=self.right or 0, tiles=tiles,
            query_tiles=query_tiles, together=self.together,
        )  # fmt: skip

    def blocks(self) -> int:
        sizes = self.sizes()
        return int(sizes.tiles * sizes.heads * (1 if self.packed else sizes.batches))


CASES = {
    "full": Case(), "full, last tiles of a few": Case(seq_q=333, seq_k=700),
    "causal": Case(right=0), "causal, more keys": Case(right=0, seq_q=200, seq_k=900),
    "causal, more queries": Case(right=0, seq_q=900, seq_k=300),
    "causal, top left": Case(right=0, top_left=True, seq_q=300, seq_k=900), "a window": Case(right=0, left=150),
    "a window on both sides, top left": Case(right=30, left=70, top_left=True, seq_q=800, seq_k=500),
    "a window narrower than a tile": Case(right=0, left=3, seq_q=500, seq_k=501),
    "a window to the left": Case(left=40, seq_q=700, seq_k=400), "grouped": Case(right=0, heads=1, share=4, together=1),
    "padded": Case(right=0, lengths=((640, 640), (0, 300), (100, 0), (333, 129)), together=5),
    "padded, window": Case(right=0, left=90, lengths=((640, 500), (64, 640)), together=3),
    "packed": Case(lengths=((300, 300), (0, 200), (129, 700), (64, 1)), packed=True, together=1),
    "packed, causal, grouped": Case(
        right=0, lengths=((300, 300), (200, 500), (500, 200)), packed=True, share=2, together=2
    ),
    "packed, rows that fall": Case(
        lengths=((100, 200), (200, 200), (340, 240)), packed=True, together=1, first_rows=(0, 600, 300, 640)
    ),
    "packed, causal, rows that fall twice": Case(
        right=0, lengths=((300, 300), (200, 500), (100, 90), (40, 200)), packed=True, share=2, together=2,
        first_rows=(500, 90, 640, -7, 20),
    ),
}  # fmt: skip


@dataclass
class Block:
    """What the writers of a block do."""

    number: int
    tiles: list[int]  # of dQ, in the block's order
    waits: list[bool]


def block_of(drawn: int, case: Case) -> Block:
    """The block that has drawn a number; numbers of its additions as kernel.py has them."""
    form, sizes = case.form(), case.sizes()
    found = BACKWARD.work_of(drawn, sizes, form, KEYS, True, 1)
    tiles = BACKWARD.query_tiles(found, sizes, form)
    seen = TURNS.earlier_end(found, sizes, form)
    number, count = int(found.start) // KEYS, int(tiles.end - tiles.begin)
    made = Block(number, [], [])
    for i in range(count * sizes.share):
        m = int(BACKWARD.tile_at(BACKWARD.place_of(i, count, sizes, form), tiles, number, form))
        head = found.head * sizes.share + BACKWARD.member_of(i, count, sizes, form)
        made.tiles.append(int((found.slot * sizes.heads * sizes.share + head) * sizes.query_tiles + found.tile + m))
        made.waits.append(m < seen)
    return made


def run(blocks: list[Block], programs: int, seed: int) -> dict[int, list[int]]:
    """The numbers of the blocks that added to each tile, in order. Running blocks go on in any order; the next one
    starts when one has ended. Raises RuntimeError where none can go on."""
    chosen = random.Random(seed)
    turn: dict[int, int] = {}
    added: dict[int, list[int]] = {}
    waiting: Iterator[Block] = iter(blocks)
    running = [[block, 0] for block in itertools.islice(waiting, programs)]
    while running:
        ready = [r for r in running if r[1] == len(r[0].tiles) or not r[0].waits[r[1]]
                 or turn.get(r[0].tiles[r[1]], 0) == r[0].number]  # fmt: skip
        if not ready:
            raise RuntimeError(f"{len(running)} blocks wait for each other")
        one = chosen.choice(ready)
        block, place = one
        if place == len(block.tiles):
            running.remove(one)
            running.extend([block, 0] for block in itertools.islice(waiting, 1))
            continue
        added.setdefault(block.tiles[place], []).append(block.number)
        turn[block.tiles[place]] = block.number + 1
        one[1] += 1
    return added


@pytest.mark.parametrize("name", CASES)
def test_blocks_add_in_the_order_of_their_keys_and_none_waits_for_ever(name: str) -> None:
    case = CASES[name]
    blocks = [block_of(drawn, case) for drawn in range(case.blocks())]
    wanted = {}
    for block in sorted(blocks, key=lambda b: b.number):
        for tile in block.tiles:
            wanted.setdefault(tile, []).append(block.number)
    assert wanted
    for programs, seed in itertools.product((1, 2, 3, 7, len(blocks)), range(3)):
        assert run(blocks, programs, seed) == wanted


@pytest.mark.parametrize("name", CASES)
def test_a_tile_s_blocks_follow_each_other_and_the_first_one_waits_for_nobody(name: str) -> None:
    case = CASES[name]
    blocks = [block_of(drawn, case) for drawn in range(case.blocks())]
    added: dict[int, list[tuple[int, bool]]] = {}
    for block in blocks:
        assert len(set(block.tiles)) == len(block.tiles)
        for tile, waits in zip(block.tiles, block.waits, strict=True):
            added.setdefault(tile, []).append((block.number, waits))
    for given in added.values():  # in the order in which blocks draw their numbers
        first = given[0][0]
        assert given == [(first + i, i > 0) for i in range(len(given))]


def sees(case: Case, q_length: int, k_length: int) -> torch.Tensor:
    row, key = torch.arange(q_length)[:, None], torch.arange(k_length)[None]
    position = row + (0 if case.top_left else k_length - q_length)
    seen = torch.ones(q_length, k_length, dtype=torch.bool)
    if case.right is not None:
        seen &= key <= position + case.right
    if case.left is not None:
        seen &= key >= position - case.left
    return seen


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].lengths])
def test_every_pair_that_counts_is_visited(name: str) -> None:
    case = CASES[name]
    seen, tiles = sees(case, case.seq_q, case.seq_k), case.sizes().query_tiles
    visited = {(b.number, t) for b in (block_of(d, case) for d in range(case.blocks())) for t in b.tiles}
    for block, m in itertools.product(range(case.sizes().tiles), range(tiles)):
        if seen[m * ROWS : (m + 1) * ROWS, block * KEYS : (block + 1) * KEYS].any():
            for head in range(case.heads * case.share):
                assert (block, head * tiles + m) in visited


def test_a_deadlock_is_seen() -> None:
    """Blocks that draw the numbers of a head the other way round."""
    blocks = [block_of(drawn, CASES["full"]) for drawn in range(CASES["full"].blocks())]
    with pytest.raises(RuntimeError, match="wait for each other"):
        run(blocks[::-1], 2, 0)


VARIANT = BackwardVariant()
SUMMED_WIDTH = 64
# fp16: of bfloat16 the interpreter cuts digits off, where a device rounds.
BASE = Problem(
    op="attention_backward", batch=2, heads_q=4, heads_k=2, seq_q=100, seq_k=333, head_dim=64, dtype="fp16",
)  # fmt: skip


def problem(**fields: Any) -> Problem:
    return msgspec.structs.replace(BASE, **fields)


FORMS: dict[str, Problem] = {
    "ragged": problem(),
    "narrow, a gradient of the LSE": problem(seq_q=70, head_dim=40, head_dim_v=48, grad_lse=True, layout="bshd"),
    "more queries than keys": problem(seq_q=150, seq_k=50, causal="bottom_right"),
    "in turns": problem(seq_q=130, deterministic=True),
    "padded": problem(seq_q=130, batch=3, seqlens_q=True, seqlens_k=True),
    "tall": problem(seq_q=300, seq_k=513, causal="bottom_right"),
    "tall, padded": problem(seq_q=300, seq_k=513, batch=3, seqlens_q=True),
    "packed": problem(
        op="varlen_attention_backward", batch=4, seq_q=100, seq_k=100, total_q=230, total_k=200,
    ),
}  # fmt: skip


def spans(call: Call) -> list[tuple[int, int, int, int]]:
    """Of each sequence: its place on the first axis, its first row there and its number of rows, and its number."""
    p = call.problem
    if call.cu_seqlens_q is not None:
        return [(0, a, b - a, i) for i, (a, b) in enumerate(itertools.pairwise(call.cu_seqlens_q.tolist()))]
    lengths = [p.seq_q] * p.batch if call.seqlens_q is None else call.seqlens_q.tolist()
    return [(i, 0, length, i) for i, length in enumerate(lengths)]


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
def test_rows_before_and_after_the_products(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The statistics, the copies without rows that do not count, dQ from its sums, and unused turns."""
    monkeypatch.setattr(backward, "in_turns", lambda p, keys: True)
    call = random_call(FORMS[form], 3)
    p, launcher = call.problem, VARIANT.described(call)
    with nan_filled_memory():
        tensors = launch_tensors(call)
        tensors |= launcher.fresh(call.q)
    steps = launcher.steps(tensors)
    launch_steps(steps[:1])
    nothing = torch.isneginf(call.forward_lse)
    delta = (call.forward_out.double() * call.grad_out.double()).sum(-1)
    if call.grad_lse is not None:
        delta = delta - call.grad_lse
    delta = delta.masked_fill(nothing, 0.0)
    torch.testing.assert_close(tensors["out"].double(), delta, atol=1e-5, rtol=1e-5)
    assert int((tensors["sums"] != 0).sum()) == 0
    assert ("turns" in tensors) is (p.deterministic or "tall" in form)  # the next block of keys is drawn there
    tiles, size = steps[0].arguments["tiles"], steps[0].arguments["ROWS"]
    assert (size == 128) is ("tall" in form)
    if "turns" in tensors:
        assert tensors["turns"].tolist() == [0] * (1 + len(tensors["sums"]) * 256 // (size * SUMMED_WIDTH))

    statistics = tensors["statistics"].view(-1, p.heads_q, tiles, 2, size)
    made = torch.randn(*call.q.shape[:3], SUMMED_WIDTH)  # dQ, in rows; what is not a sequence's must not be read
    sums = torch.full((statistics.shape[0], p.heads_q, tiles, size, SUMMED_WIDTH), float("nan"))
    for slot, first, rows, number in spans(call):
        before = first // size + number if p.packed else 0
        for row in range(0, rows, size):
            count, tile = min(size, rows - row), before + row // size
            here = slice(first + row, first + row + count)
            lse = torch.full((p.heads_q, size), float("inf"))
            lse[:, :count] = call.forward_lse[slot, :, here] / math.log(2)
            lse[torch.isneginf(lse)] = float("inf")
            torch.testing.assert_close(statistics[slot, :, tile, 0], lse)
            torch.testing.assert_close(statistics[slot, :, tile, 1, :count], tensors["out"][slot, :, here])
            sums[slot, :, tile, :count] = made[slot, :, here]
            for head in range(p.heads_q):
                missing = torch.isinf(lse[head])
                if missing.all() or "edge_q" not in tensors:
                    continue
                for side in [i for i, row_of_it in enumerate((0, size - 1)) if missing[row_of_it]]:
                    for name, whole in (("edge_q", call.q), ("edge_do", call.grad_out)):
                        expected = torch.zeros(size, whole.shape[3], dtype=whole.dtype)
                        expected[:count] = whole[slot, head, here]
                        expected[missing] = 0.0
                        assert torch.equal(tensors[name][2 * number + side, head], expected)

    # The order of consumer.put: 64 rows, half of the columns, 8 columns, warp, row of 8, lane's pair, half of 16 rows.
    order = sums.view(*sums.shape[:3], -1, 4, 2, 8, 2, SUMMED_WIDTH // 16, 4, 2)
    order = order.permute(0, 1, 2, 3, 7, 8, 4, 6, 9, 5, 10)
    tensors["sums"].copy_(order.reshape(tensors["sums"].shape))
    launch_steps(steps[2:])
    expected = torch.zeros(call.q.shape)
    for slot, first, rows, _ in spans(call):
        here = slice(first, first + rows)
        expected[slot, :, here] = made[slot, :, here, : p.head_dim] * call.scale
    assert torch.equal(call.grad_q, expected.to(call.q.dtype))


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("share", [1, 3])
def test_the_consumer_s_tiles_are_the_producer_s(turns: bool, share: int) -> None:
    """Functions depend on a tile's number and head, also where blocks begin apart."""
    consumer = plain(hopper_consumer, tile_at=BACKWARD.tile_at, member_of=BACKWARD.member_of)
    form = types.SimpleNamespace(KEYS=KEYS, GROUPED=share > 1, TURNS=turns, STAGGER=0 if turns else 8)
    tiles, sizes = Tiles(begin=2, clean=4, unclean=15, end=17), types.SimpleNamespace(share=share)
    work = types.SimpleNamespace(head=5, start=3 * KEYS)
    visited = set()
    for i in range(15 * share):
        m = 16 - i // share if turns else 2 + i % 15
        place = BACKWARD.place_of(i, 15, sizes, form)
        produced = BACKWARD.tile_at(place, tiles, 3, form), 5 * share + BACKWARD.member_of(i, 15, sizes, form)
        assert consumer._tile(i, m, tiles, work, sizes, form) == produced
        visited.add(produced)
    assert len(visited) == 15 * share


@pytest.mark.parametrize("text", [BENT, ALIBI, ""], ids=["bent", "ALiBi", "softcap"])
def test_derivatives_of_scores(text: str) -> None:
    """With torch in the place of Gluon: P, and P times the derivative, of a tile of 64 queries and 128 keys."""
    torch.manual_seed(0)
    jit: Any = types.ModuleType("plain")
    jit.jit = lambda function: function
    p = problem(score_mod=text, softcap=not text)
    sources = (function_source(p), gradient_source(p)) if text else (None, None)
    mod, slope = (None if each is None else load_function(each, jit, torch, torch.tanh) for each in sources)
    assert (slope is None) is (text in (ALIBI, ""))
    form = types.SimpleNamespace(SCORE_MOD=mod, SCORE_GRADIENT=slope, SOFTCAP=not text)
    kernel = plain(fragments, gl=torch, LOG2E=LOG2E, apply_softcap=lambda s, a, c, form: c * torch.tanh(s * a))
    products, head = 4.0 * torch.randn(128, 64), torch.tensor(2)
    rows, keys = torch.arange(64, 128, dtype=torch.int32)[None], torch.arange(40, 168, dtype=torch.int32)[:, None]
    natural = (products.double() * 0.3).requires_grad_()
    inputs = {"score": natural, "b": torch.tensor(1), "h": head, "q_idx": rows, "kv_idx": keys}
    final = evaluate(text, inputs, {}) if text else 3.0 * torch.tanh(natural / 3.0)
    weights = (final - final.detach().logsumexp(0)).exp()
    lse = final.detach().logsumexp(0).float() * LOG2E
    expected = torch.autograd.grad(final.sum(), natural)[0] * weights.detach()
    scale, cap = (0.3, 0.0) if text else (0.1, LOG2E * 3.0)
    found = kernel.final_scores(products, 1, head, rows, keys, scale, cap, form)
    made = torch.exp2(found - lse)
    torch.testing.assert_close(made.double(), weights.detach(), rtol=2e-5, atol=1e-9)
    made = kernel.with_derivative(made, products, found, 1, head, rows, keys, scale, cap, form)
    torch.testing.assert_close(made.double(), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.125 * LOG2E, 0.0)),
        ({"score_mod": BENT}, (0.125, 0.0)),
        ({"softcap": True}, (0.125 / CAP, LOG2E * CAP)),
    ],
)
def test_scales_of_products(fields, expected):
    """Caps and functions take natural scores, and kernels powers of 2."""
    for deterministic in (False, True):
        call = dataclasses.replace(meta_call(problem(**fields, deterministic=deterministic)), scale=0.125)
        launcher = BackwardVariant().described(call)
        steps = launcher.steps(launch_tensors(call) | launcher.fresh(call.q))
        found = [step.arguments for step in steps if step.kernel.__name__.startswith("scheduled_")]
        assert len(found) == 1 + deterministic
        assert {(each["scale"], each["softcap"], each["factor"]) for each in found} == {(*expected, 0.125)}
