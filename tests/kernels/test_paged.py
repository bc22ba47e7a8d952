"""decode_split over pages: any size and order of pages, either loop over them, uniform and packed queries."""

import itertools
import mmap
from typing import Any

import pytest
import torch
from kernel_cases import CAUSAL, check, page_loops, picker, problem, run, with_lengths
from support import assert_right, random_call, run_core
from support import problem as small_problem
from test_cache_writes import OPS
from test_quantised_caches import SMALL

from portattn.schema.problem import Problem
from portattn.testing.random_writing import random_writing
from portattn.testing.verdict import judge

CAPACITY = 57  # keys that a sequence's pages hold at least: four tiles


def sized(page, **fields):
    return {"page_size": page, "seq_k": -(-CAPACITY // page) * page} | fields


@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
@pytest.mark.parametrize(("page", "parts"), [(1, 1), (3, 2), (16, 3), (48, 4), (64, 5)])
def test_pages_of_any_size(device, page, parts, page_layout):
    fields = sized(page, heads_q=2, heads_k=2, page_layout=page_layout)
    uniform = problem("paged", batch=3, seq_q=2, causal="bottom_right", **fields)
    ragged = problem("ragged", **fields | {"heads_k": 1}, causal="bottom_right")
    for seed, p in enumerate((uniform, ragged)):
        call = random_call(p, seed, device=device.name, extremes=True)
        for loop in page_loops(p):
            check(device, call, parts if p is uniform else 1 + parts % 2, page_loop=loop)


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_tiles_of_another_size(device, block_n):
    for page in (16, 32, 64):
        call = random_call(problem("paged", **sized(page), heads_q=2, heads_k=1), page, device=device.name)
        for loop in ("flat_masked",) if page % block_n else ("per_page", "flat_masked"):
            assert_right(call, *run_core(device, call, {"page_loop": loop}, {"block_n": block_n, "splits": 2}))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 20])
@pytest.mark.parametrize("name", ["paged", "whole pages", "mla"])
def test_any_number_of_splits(device, name, parts):
    """More splits than key tiles (three) leave some programs with nothing: their share counts for nothing."""
    fields = {"heads_q": 5} if name == "mla" else {"heads_q": 2, "heads_k": 1, "window_left": 30}
    p = problem(name, causal="bottom_right", sinks=True, **fields)
    check(device, random_call(p, 4, device=device.name, extremes=True), parts)


# Rows of queries and of keys: decoding ones, chunks of a prefill, and sequences without rows, beside one another.
MIXED = {
    "decode and prefill": ((1, 40), (18, 30), (1, 16), (3, 3)),
    "no queries or no keys": ((0, 17), (4, 0), (0, 0), (2, 33), (0, 1)), "more queries than keys": ((18, 4), (5, 1)),
    "nothing at all": ((0, 0), (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("rows", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("behind", [0, 3])
def test_a_ragged_batch(device, rows, causal, behind):
    queries, keys = zip(*rows, strict=True)
    p = problem("ragged", batch=len(rows), seq_q=max(1, *queries), total_q=sum(queries) + behind, causal=causal)
    # A call whose sequences all are full has pages enough for any lengths.
    call = random_call(p, 5, device=device.name)
    call.k, call.v = (torch.cat([x] * 5) for x in (call.k, call.v))
    call = with_lengths(call, keys, queries)
    out, lse = run(device, call, 1 + behind % 2)
    assert_right(call, out, lse)
    if behind:
        assert not out[:, :, -behind:].any()
        assert torch.isneginf(lse[:, :, -behind:]).all()


@pytest.mark.parametrize("parts", [1, 2])
def test_more_rows_than_a_tile(device, parts):
    """A chunk of a prefill, with query heads that do not divide a tile."""
    p = problem("paged", heads_q=3, heads_k=1, seq_q=13, causal="bottom_right", window_left=20, batch=1)
    check(device, random_call(p, 6, device=device.name, extremes=True), parts)


def test_pages_that_sequences_share(device):
    """Prefix caching: both tables begin with the same pages, and one sequence has one of them twice."""
    call = with_lengths(random_call(problem("paged", causal="bottom_right"), 8, device=device.name), (20, 24))
    call.page_table = torch.tensor([[2, 0, 1, -1, -1], [2, 0, 2, -1, -1]], dtype=torch.int32, device=device.name)
    for parts in (1, 2):
        check(device, call, parts)


EMPTY: dict[str, list[dict[str, int]]] = {
    "paged": [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}, {"seq_k": 8}],
    "mla": [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}, {"seq_k": 8}],
    "ragged": [{"batch": 0, "total_q": 3}, {"total_q": 0}, {"seq_k": 0}, {"total_q": 1}],
}


@pytest.mark.parametrize(("name", "sizes"), [(name, one) for name in EMPTY for one in EMPTY[name]], ids=str)
def test_empty_and_smallest_sizes(device, name, sizes):
    for parts in (1, 2):
        p = problem(name, sinks=name == "paged", **sizes)
        check(device, random_call(p, device=device.name, extremes=name == "ragged"), parts)


@pytest.mark.parametrize("seed", range(8))
def test_random_problems(device, seed):
    pick = picker(4000 + seed)
    heads_k, page, ragged, causal = pick(1, 2), pick(1, 3, 5, 16, 32), seed % 2 == 0, pick(*CAUSAL)
    fields = {"seq_q": 20, "total_q": pick(*range(1, 25))} if ragged else {"seq_q": pick(1, 2, 5), "bias": seed == 1}
    p = problem(
        "ragged" if ragged else "paged", batch=pick(1, 2, 4), heads_k=heads_k, heads_q=heads_k * pick(1, 3),
        page_size=page, seq_k=page * pick(1, 2, 40 // page), page_layout=pick("phd", "hpd"), causal=causal,
        head_dim=pick(16, 33), head_dim_v=pick(16, 40), dtype=pick("fp32", "fp16", "bf16"),
        window_left=pick(-1, 0, 7), window_right=pick(-1, 4) if causal == "none" else -1, softcap=pick(True, False),
        sinks=pick(True, False), alibi_slopes=pick(True, False), **fields,
    )  # fmt: skip
    call = random_call(p, seed, device=device.name, strides=pick("plain", "spare"), extremes=pick(True, False))
    check(device, call, pick(1, 2, 3), page_loop=pick(*page_loops(p)))


GIB = 2**30
APART = GIB + 4096  # bytes from one page to the next
PAGES = 6
BEFORE, AFTER = 4 * GIB + 2**20, 5 * APART + 2**20  # of 2-byte numbers, 2^31 elements back and less than that on
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python names it from 3.13 on


@pytest.fixture(scope="module")
def memory(device):
    size = BEFORE + AFTER
    if device.name == "cuda":
        if torch.cuda.mem_get_info()[0] < 2 * size:
            pytest.skip(f"the device has no {size} bytes to spare")
        return torch.empty(size, dtype=torch.uint8, device=device.name)
    kept = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(kept, dtype=torch.uint8)


def put_far(call, memory):
    """The caches, and scales of tokens, as the last of PAGES pages or sequences, each 1 GiB behind the one before.
    Returns the number of the first."""
    first = PAGES - call.k.shape[0]
    for number, name in enumerate(("k", "v", "k_scale", "v_scale")):
        cache = getattr(call, name)
        if cache is None or not (name in "kv" or call.problem.kv_scales == "token"):
            continue
        each, at = cache.element_size(), BEFORE + 2**16 * number
        shape, stride = (PAGES, *cache.shape[1:]), (APART // cache.element_size(), *cache.stride()[1:])
        assert cache[0].numel() * each <= 2**13, "tensors lie apart"
        placed = memory.view(cache.dtype).as_strided(shape, stride, at // each)
        placed[first:] = cache
        setattr(call, name, placed)
    return first


STORED = [("as_q", "none"), ("e4m3", "token"), ("int4", "token")]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("unpack", ["bytes", "ptx"])
@pytest.mark.parametrize("stored", STORED, ids="-".join)
def test_rows_are_written_where_pages_are(device, memory, op, unpack, stored):
    """Of numbers that are stored as they are, `ptx` finds places as of any others, and the interpreter runs it."""
    if unpack == "ptx" and stored[0] != "as_q" and device.name == "cpu":
        pytest.skip("Triton's interpreter knows no PTX")
    sizes = {"pages": {"seq_k": 8 * PAGES, "seq_q": 40}, "append": {"batch": PAGES}}[op]
    call = random_writing(Problem(**OPS[op] | sizes | {"kv_format": stored[0], "kv_scales": stored[1]}), 1,
                          device=device.name)  # fmt: skip
    if call.seqlens_k is not None:
        call.seqlens_k = torch.arange(PAGES, dtype=torch.int32, device=device.name) * 3
    elif call.slots is not None:
        assert {slot // 8 for slot in call.slots.tolist() if 0 <= slot < 8 * PAGES} == set(range(PAGES))
    assert put_far(call, memory) == 0
    run_core(device, call, {"unpack": unpack}, {"block_m": 16})
    assert judge(call, call.new_out(), None) == {"error": 0.0, "budget": 0.0, "wrong": 0}


@pytest.mark.parametrize("block_m", [8, 16])
@pytest.mark.parametrize(
    ("stored", "unpack"),
    [("as_q-none", "bytes"), ("e4m3-token", "bytes"), ("e4m3-token", "words"), ("int4-token", "words")],
)
def test_keys_are_read_where_pages_are(device, memory, stored, unpack, block_m):
    kind, scales = stored.split("-")
    fields: dict[str, Any] = {"op": "paged_attention", "batch": 1, "page_size": 8, "seq_k": 8 * PAGES, "head_dim": 64}
    p = small_problem(**SMALL | fields | {"kv_format": kind, "kv_scales": scales})
    loops = ["flat_masked"] if unpack == "bytes" else ["flat_masked", "by_page"]
    for page_loop in loops:
        call = random_call(p, device=device.name)
        pages, table = call.k.shape[0], call.page_table
        first = put_far(call, memory)
        assert first < 4, "pages are above 4 GiB"
        table[:] = torch.where((table >= 0) & (table < pages), table + first, table)
        assert_right(call, *run_core(device, call, {"unpack": unpack, "page_loop": page_loop},
                                     {"block_m": block_m, "block_n": 32}))  # fmt: skip


# Where each key of 16 is read: of lane t of four the columns 2t, 2t + 1, 8 + 2t, 9 + 2t of a product's result.
ORDER = [key for t in range(4) for key in (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)]


def transposed(device, v, keys, first=None, seq_q=9, **limits):
    """By the kernel. first: lengths of sequences, or with PACKED their first rows. What is not written is 77."""
    if device.path == "interpreter":
        pytest.importorskip("triton")
    from portattn.backends.cuda.auxiliary_kernels import transpose_values

    given = {"q": None, "k": None} | {
        side: torch.tensor(rows, dtype=torch.int32, device=device.name) for side, rows in (first or {}).items()
    }
    constants = {"PACKED": False, "RIGHT": False, "LEFT": False, "TOP_LEFT": False} | limits
    left, right = constants.pop("left", 0), constants.pop("right", 0)
    batch, heads, rows, columns = v.shape
    batches, tiles, block = batch, -(-rows // keys), 128
    if constants["PACKED"]:
        batches = len(given["k"]) - 1
        tiles = rows // keys + batches + 1
    out = torch.full((batch, heads, columns, tiles * keys), 77, dtype=torch.int8, device=device.name)
    v = v.to(device.name)
    grid = (tiles, heads, batch * -(-columns // block))
    transpose_values[grid](
        v, out, given["q"], given["k"], *v.stride()[:3], heads, seq_q, rows, columns, tiles, batches, left, right,
        KEYS=keys, BLOCK=block, **constants,
    )  # fmt: skip
    return out.cpu()


def wanted(v, keys, length=None):
    rows = v.shape[2]
    padded = torch.zeros(*v.shape[:2], max(1, -(-rows // keys)) * keys, v.shape[3], dtype=v.dtype)
    padded[:, :, : rows if length is None else length] = v[:, :, :length]
    return padded[:, :, torch.arange(padded.shape[2]).view(-1, 16)[:, ORDER].flatten()].transpose(-1, -2)


def numbers(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("columns", "keys"), [(16, 64), (48, 128), (128, 128), (160, 64), (256, 128)])
def test_every_key_goes_to_its_lane(device, columns, keys):
    v = numbers(2, 3, 200, columns)
    assert torch.equal(transposed(device, v, keys), wanted(v, keys))


def test_any_strides_are_read(device):
    v = numbers(2, 150, 3, 64).transpose(1, 2)
    assert torch.equal(transposed(device, v, 64), wanted(v, 64))


def test_what_no_query_sees_is_nothing(device):
    """0x7f is NaN."""
    v = numbers(2, 1, 200, 32)
    v[0, :, 130:] = 127
    v[1] = 127
    found = transposed(device, v, 64, {"k": [130, 0]})
    assert torch.equal(found[:1], wanted(v[:1], 64, 130))
    assert not found[1].any()
    # Nine queries at the end of as many keys, seen from the top left: the last sees key 8.
    found = transposed(device, v[:1], 64, RIGHT=True, TOP_LEFT=True)
    assert torch.equal(found, wanted(v[:1], 64, 9))
    found = transposed(device, v[:1], 64, LEFT=True, left=20)
    v[:, :, : 200 - 9 - 20] = 0
    assert torch.equal(found, wanted(v[:1], 64))


@pytest.mark.parametrize("keys", [64, 128])
def test_packed_sequences_begin_at_a_tiles_edge(device, keys):
    v = numbers(1, 2, 220, 64)
    first = [0, 70, 70, 199]
    found = transposed(device, v, keys, {"q": [0, 5, 9, 60], "k": first}, seq_q=60, PACKED=True)
    for b, (begin, end) in enumerate(itertools.pairwise(first)):
        want = wanted(v[:, :, begin:end], keys)
        at = (begin // keys + b) * keys
        assert torch.equal(found[..., at : at + want.shape[-1]], want)
    # All of it is written: what is read behind a sequence must not be what was there.
    assert not found[..., (first[-1] // keys + 3) * keys :].any()


def test_first_rows_that_are_none_are_harmless(device):
    v = numbers(1, 1, 100, 16)
    transposed(device, v, 64, {"q": [5, -7, 900], "k": [50, -3, 2**31 - 1]}, seq_q=60, PACKED=True)


@pytest.mark.parametrize("page", [1, 3, 16, 48, 64])
def test_pages_of_any_size_of_latent_rows(device, page):
    fields = {"page_size": page, "seq_k": -(-41 // page) * page, "causal": "bottom_right"}
    uniform, ragged = problem("mla", batch=3, seq_q=2, **fields), problem("mla ragged", **fields)
    for seed, p in enumerate((uniform, ragged)):
        call = random_call(p, seed, device=device.name, extremes=True)
        for loop in page_loops(p):
            check(device, call, 1 + (seed + page) % 3, page_loop=loop)


@pytest.mark.parametrize("causal", CAUSAL)
def test_a_ragged_batch_of_latent_rows(device, causal):
    queries, keys = (1, 0, 9, 3, 0), (40, 7, 30, 0, 0)
    p = problem("mla ragged", batch=5, total_q=sum(queries) + 2, causal=causal, sinks=True)
    call = random_call(p, 3, device=device.name)
    call.k = torch.cat([call.k] * 5)
    call.v = call.k[..., : p.head_dim_v]
    check(device, with_lengths(call, keys, queries))


def test_every_head_reads_the_same_rows(device):
    for rows in (1, 2):
        p = problem("mla", heads_q=20, seq_q=rows, causal="bottom_right", batch=1)
        check(device, random_call(p, 4, device=device.name), 2)
