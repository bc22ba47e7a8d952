"""Logits of an indexer for sm_90a over e4m3 queries and keys, explicitly scheduled in Gluon (Triton 3.6 and later).

A block goes through tiles of ROWS query rows and CONSUMERS · 128 keys, with many rows through one tile:

    producer     one warp: a tile's keys, then the heads and weights of its rows, by TMA into two rings of buffers
    consumer c   one warp group: holds 128 keys in registers, and multiplies them with the heads of row after row

The heads are a product's columns, so a thread adds up most of a key's heads by itself; while one warp group adds, the
others have the tensor cores. Keys are in registers, not in shared memory, from which a product of 64 columns would read
as much for its keys as for its heads.
"""

# No `from __future__ import annotations`: Triton's aggregates read the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import PropagateNan

from portattn.backends.cuda.gluon_names import aggregate, arrive, load, reinterpreted, sync
from portattn.backends.cuda.hopper_indexer import CONSUMERS, DIM, KEY_STAGES, KEYS, ROW_STAGES

# Named barriers of the hardware, of which there are 16. Triton's warp specialisation takes 0 to 4 (3.6).
_ROW_FREE: gl.constexpr = gl.constexpr(5)  # 5..12   a row's heads may be loaded into this buffer again
_KEYS_FREE: gl.constexpr = gl.constexpr(5 + ROW_STAGES)  # 13..15   keys

_NAN: gl.constexpr = gl.constexpr(PropagateNan.ALL)
_KEYS: gl.constexpr = gl.constexpr(KEYS)
_DIM: gl.constexpr = gl.constexpr(DIM)
_CONSUMERS: gl.constexpr = gl.constexpr(CONSUMERS)
_ROW_STAGES: gl.constexpr = gl.constexpr(ROW_STAGES)
_KEY_STAGES: gl.constexpr = gl.constexpr(KEY_STAGES)
_THREADS: gl.constexpr = gl.constexpr(CONSUMERS * 128 + 32)  # participants of ROW_FREE and KEYS_FREE


@aggregate
class IndexerSharedMemory:
    """Rings of buffers in shared memory, and the barriers at which their loads arrive."""

    q: gl.shared_memory_descriptor  # [ROW_STAGES][1, 1, heads, DIM]
    weights: gl.shared_memory_descriptor  # [ROW_STAGES][1, 1, heads] float32
    k: gl.shared_memory_descriptor  # [part][1, keys of a load, DIM], the parts of a warp group's keys side by side
    row_full: gl.shared_memory_descriptor  # [ROW_STAGES] mbarriers
    keys_full: gl.shared_memory_descriptor  # [KEY_STAGES · CONSUMERS] mbarriers

    @gluon.constexpr_function
    def __init__(self, q, weights, k, row_full, keys_full):
        self.q, self.weights, self.k, self.row_full, self.keys_full = q, weights, k, row_full, keys_full


@aggregate
class IndexerSizes:
    seq_q: gl.tensor
    seq_k: gl.tensor
    row_tiles: gl.tensor
    key_tiles: gl.tensor
    tiles: gl.tensor
    pages: gl.tensor
    page_size: gl.tensor
    table_stride: gl.tensor

    @gluon.constexpr_function
    def __init__(self, seq_q, seq_k, row_tiles, key_tiles, tiles, pages, page_size, table_stride):
        self.seq_q, self.seq_k, self.row_tiles, self.key_tiles = seq_q, seq_k, row_tiles, key_tiles
        self.tiles, self.pages, self.page_size, self.table_stride = tiles, pages, page_size, table_stride


@aggregate
class IndexerTile:
    sequence: gl.tensor
    row: gl.tensor  # the first of the tile's rows in its sequence
    rows: gl.tensor
    key: gl.tensor  # the first of its keys

    @gluon.constexpr_function
    def __init__(self, sequence, row, rows, key):
        self.sequence, self.row, self.rows, self.key = sequence, row, rows, key


@gluon.jit
def _tile(number, sizes, ROWS: gl.constexpr):
    rest = number // sizes.key_tiles
    row = rest % sizes.row_tiles * ROWS
    rows = gl.minimum(ROWS, sizes.seq_q - row)
    return IndexerTile(rest // sizes.row_tiles, row, rows, number % sizes.key_tiles * (_CONSUMERS * _KEYS))


@gluon.jit
def _key_range(sequence, place, row_starts, row_ends, seqlens_k, sizes):
    """Return the first key that a row (or rows) sees and the end of its keys, as portattn/kernels/indexer.py does."""
    row = sequence * sizes.seq_q + place
    first, end = place - place, place - place + sizes.seq_k
    if seqlens_k is not None:
        length = gl.maximum(gl.load(seqlens_k + sequence), 0)
        end = gl.minimum(length - (sizes.seq_q - 1 - place), end)
    if row_starts is not None:
        first = gl.maximum(gl.load(row_starts + row), first)
    if row_ends is not None:
        end = gl.minimum(gl.load(row_ends + row), end)
    return first, end


@gluon.jit
def _seen(tile, row_starts, row_ends, seqlens_k, sizes, ROWS: gl.constexpr):
    """Return whether a row of the tile sees a key of it; rows behind the last repeat it."""
    # Each warp has all rows: to reduce them takes no barrier.
    layout: gl.constexpr = gl.BlockedLayout([ROWS // 32 if ROWS > 32 else 1], [32], [gl.num_warps()], [0])
    places = tile.row + gl.minimum(gl.arange(0, ROWS, layout), tile.rows - 1)
    first, end = _key_range(tile.sequence, places, row_starts, row_ends, seqlens_k, sizes)
    return (gl.min(first, 0) < tile.key + _CONSUMERS * _KEYS) & (gl.max(end, 0) > tile.key)


@gluon.jit
def _produce(q_desc, weights_desc, k_desc, page_table, row_starts, row_ends, seqlens_k, sizes, shared,
             HEADS: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Load the keys of the block's tiles, a descriptor's block of a page at a time, and the rows of each."""
    AT_ONCE: gl.constexpr = k_desc.block_shape[1]
    n, m = 0, 0  # rows and tiles so far
    for number in range(gl.program_id(0), sizes.tiles, gl.num_programs(0)):
        tile = _tile(number, sizes, ROWS)
        if _seen(tile, row_starts, row_ends, seqlens_k, sizes, ROWS):
            stage = m % _KEY_STAGES
            if m >= _KEY_STAGES:
                sync(_KEYS_FREE + stage, _THREADS)
            for group in gl.static_range(_CONSUMERS):
                slot = stage * _CONSUMERS + group
                full = shared.keys_full.index(slot)
                mbarrier.expect(full, _KEYS * _DIM)
                for part in gl.static_range(_KEYS // AT_ONCE):
                    # Behind the last key any page will do, and behind a page's end TMA writes zeros.
                    key = tile.key + group * _KEYS + part * AT_ONCE
                    page = key - key
                    if page_table is not None:
                        at = gl.minimum(key, sizes.seq_k - 1) // sizes.page_size
                        page = gl.load(page_table + tile.sequence.to(gl.int64) * sizes.table_stride + at)
                        page = gl.minimum(gl.maximum(page, 0), sizes.pages - 1)
                        key = key % sizes.page_size
                    load(k_desc, [page, key, 0], full, shared.k.index(slot * (_KEYS // AT_ONCE) + part))
            m += 1
            for i in range(tile.rows):
                buffer = n % _ROW_STAGES
                if n >= _ROW_STAGES:
                    sync(_ROW_FREE + buffer, _THREADS)
                full = shared.row_full.index(buffer)
                mbarrier.expect(full, HEADS * (_DIM + 4))
                load(q_desc, [tile.sequence, tile.row + i, 0, 0], full, shared.q.index(buffer))
                load(weights_desc, [tile.sequence, tile.row + i, 0], full, shared.weights.index(buffer))
                n += 1
    for i in range(gl.maximum(n - _ROW_STAGES, 0), n):  # the last arrivals, for which nothing is loaded
        sync(_ROW_FREE + i % _ROW_STAGES, _THREADS)
    for i in range(gl.maximum(m - _KEY_STAGES, 0), m):
        sync(_KEYS_FREE + i % _KEY_STAGES, _THREADS)


@gluon.jit
def _consume(k_scale, scale_stride_b, scale_stride_s, page_table, row_starts, row_ends, seqlens_k, result,
             result_stride_b, result_stride_s, sizes, shared, group: gl.constexpr, HEADS: gl.constexpr,
             ROWS: gl.constexpr):  # fmt: skip
    """Write the logits of 128 keys of each tile, by one warp group."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    k_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores, k_width=4)
    columns = gl.arange(0, _KEYS, gl.SliceLayout(1, scores))
    n, m = 0, 0
    for number in range(gl.program_id(0), sizes.tiles, gl.num_programs(0)):
        tile = _tile(number, sizes, ROWS)
        keys = tile.key + group * _KEYS + columns
        inside = keys < sizes.seq_k
        to = result + tile.sequence.to(gl.int64) * result_stride_b + tile.row.to(gl.int64) * result_stride_s
        if _seen(tile, row_starts, row_ends, seqlens_k, sizes, ROWS):
            if k_scale is not None:
                at = gl.minimum(keys, sizes.seq_k - 1)
                places = k_scale + (at % sizes.page_size).to(gl.int64) * scale_stride_s
                if page_table is not None:
                    table = page_table + tile.sequence.to(gl.int64) * sizes.table_stride
                    page = gl.load(table + at // sizes.page_size)
                    places += gl.minimum(gl.maximum(page, 0), sizes.pages - 1).to(gl.int64) * scale_stride_b
                scales = gl.load(places)
            slot = m % _KEY_STAGES * _CONSUMERS + group
            mbarrier.wait(shared.keys_full.index(slot), m // _KEY_STAGES & 1)
            k = reinterpreted(shared.k, gl.float8e4nv, [_KEY_STAGES * _CONSUMERS, _KEYS, _DIM], k_layout)
            k = k.index(slot).load(operand)
            arrive(_KEYS_FREE + m % _KEY_STAGES, _THREADS)
            m += 1
            for i in range(tile.rows):
                buffer = n % _ROW_STAGES
                first, end = _key_range(tile.sequence, tile.row + i, row_starts, row_ends, seqlens_k, sizes)
                mbarrier.wait(shared.row_full.index(buffer), n // _ROW_STAGES & 1)
                q = shared.q.index(buffer).reshape([HEADS, _DIM])
                q = reinterpreted(q, gl.float8e4nv, [HEADS, _DIM], k_layout).permute((1, 0))
                s = gl.zeros([_KEYS, HEADS], gl.float32, scores)
                s = warpgroup_mma(k, q, s, use_acc=False, max_num_imprecise_acc=_DIM, is_async=True)
                weights = shared.weights.index(buffer).reshape([HEADS]).load(gl.SliceLayout(0, scores))
                s = warpgroup_mma_wait(0, deps=[s])
                arrive(_ROW_FREE + buffer, _THREADS)
                n += 1
                s = gl.maximum(s, 0.0, propagate_nan=_NAN)
                logits = gl.sum(s * weights[None, :], 1)
                if k_scale is not None:
                    logits = logits * scales
                logits = gl.where((keys >= first) & (keys < end), logits, -float("inf"))
                gl.store(to + keys, logits, mask=inside)
                to += result_stride_s
        else:
            for _ in range(tile.rows):
                gl.store(to + keys, gl.full([_KEYS], -float("inf"), gl.float32, columns.type.layout), mask=inside)
                to += result_stride_s


# Callers pass parts of longer tensors, at any place: to specialise on it would compile the kernel again.
@gluon.jit(
    do_not_specialize=[
        "scale_stride_b", "result_stride_b", "result_stride_s", "seq_q", "seq_k", "row_tiles",
        "key_tiles", "tiles", "pages", "page_size", "table_stride",
    ],
    do_not_specialize_on_alignment=["k_scale", "page_table", "row_starts", "row_ends", "seqlens_k", "result"],
)  # fmt: skip
def scheduled_index_scores(
    q_desc, weights_desc, k_desc, k_scale, scale_stride_b, scale_stride_s, page_table, row_starts, row_ends, seqlens_k,
    result, result_stride_b, result_stride_s, seq_q, seq_k, row_tiles, key_tiles, tiles, pages, page_size, table_stride,
    HEADS: gl.constexpr, ROWS: gl.constexpr, CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    """Write result (B, Sq, Sk), float32: one block goes through every num_programs-th tile.

    q and weights by descriptors of (B, Sq, HEADS, DIM) and (B, Sq, HEADS), a row each. k by a descriptor of (pages,
    page size, DIM), as many keys of a page as lie in one tile; packed keys are one page. k_scale is None or has a scale
    for each key. Other tensors as in index_scores (portattn/kernels/indexer.py), None where a form has none.
    CONSUMER, PRODUCER: registers of a thread.
    """
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    AT_ONCE: gl.constexpr = k_desc.block_shape[1]
    shared = IndexerSharedMemory(
        gl.allocate_shared_memory(q_desc.dtype, [_ROW_STAGES, 1, 1, HEADS, _DIM], q_desc.layout),
        gl.allocate_shared_memory(gl.float32, [_ROW_STAGES, 1, 1, HEADS], weights_desc.layout),
        gl.allocate_shared_memory(
            k_desc.dtype, [_KEY_STAGES * _CONSUMERS * _KEYS // AT_ONCE, 1, AT_ONCE, _DIM], k_desc.layout
        ),
        gl.allocate_shared_memory(gl.int64, [_ROW_STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [_KEY_STAGES * _CONSUMERS, 1], barriers),
    )
    for j in gl.static_range(_ROW_STAGES):
        mbarrier.init(shared.row_full.index(j), count=1)
    for j in gl.static_range(_KEY_STAGES * _CONSUMERS):
        mbarrier.init(shared.keys_full.index(j), count=1)
    fence_async_shared()
    sizes = IndexerSizes(seq_q, seq_k, row_tiles, key_tiles, tiles, pages, page_size, table_stride)
    gl.warp_specialize(
        [
            (_consume, (k_scale, scale_stride_b, scale_stride_s, page_table, row_starts, row_ends, seqlens_k, result,
                        result_stride_b, result_stride_s, sizes, shared, 0, HEADS, ROWS)),
            (_consume, (k_scale, scale_stride_b, scale_stride_s, page_table, row_starts, row_ends, seqlens_k, result,
                        result_stride_b, result_stride_s, sizes, shared, 1, HEADS, ROWS)),
            (_consume, (k_scale, scale_stride_b, scale_stride_s, page_table, row_starts, row_ends, seqlens_k, result,
                        result_stride_b, result_stride_s, sizes, shared, 2, HEADS, ROWS)),
            (_produce, (q_desc, weights_desc, k_desc, page_table, row_starts, row_ends, seqlens_k, sizes, shared, HEADS,
                        ROWS)),
        ],
        [4, 4, 1],
        [CONSUMER, CONSUMER, PRODUCER],
    )  # fmt: skip
