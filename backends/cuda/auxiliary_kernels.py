"""Triton kernels before and after the Hopper kernels: e4m3 values transposed, row statistics, dQ from its float32 sums.

transpose_values reads (B, Hk, S, Dv) and writes (B, Hk, Dv, S), S in whole tiles of keys, with zeros for keys that no
query of the sequence sees: their probability is 0, and 0·NaN is NaN. Packed sequences each begin at a tile's edge:
sequence b at tile cu_seqlens_k[b] // KEYS + b. Of each 16 keys the order is 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6,
7, 14, 15 (hopper_forward/low_precision_products.py says why). Four of them are a 32-bit word, so that no single byte
goes through shared memory.
"""

import triton
import triton.language as tl

from portattn.kernels.tiles import packed_bounds, packed_tile


@triton.jit
def _first_row(first_rows, sequence, batches, total):
    return tl.minimum(tl.maximum(tl.load(first_rows + tl.minimum(sequence, batches)), 0), total)


@triton.jit
def _bytes(pointers, there):
    return tl.load(pointers, mask=there, other=0).to(tl.int32) & 0xFF


@triton.jit(do_not_specialize=["heads", "seq_q", "seq_k", "columns", "key_tiles", "batches", "left", "right"])
def transpose_values(
    v, out, lengths_q, lengths_k, stride_b, stride_h, stride_s, heads, seq_q, seq_k, columns, key_tiles, batches, left,
    right,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, RIGHT: tl.constexpr, LEFT: tl.constexpr,
    TOP_LEFT: tl.constexpr,
):  # fmt: skip
    """A tile of KEYS keys and BLOCK columns of one head.

    v        bytes, (B, Hk, S, Dv) by its strides; packed one sequence of seq_k rows
    out      (B, Hk, Dv, KEYS·key_tiles) bytes, contiguous
    lengths_q, lengths_k  (B,) int32 lengths, or None; packed (B + 1,) first rows
    columns  Dv, a multiple of 16; left, right as the forward has them
    """
    tile, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks = tl.cdiv(columns, BLOCK)
    slot, column = block // blocks, block % blocks * BLOCK
    base = v + slot.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    if PACKED:
        sequence = 0
        for b in range(batches + 1):
            first = _first_row(lengths_k, b, batches, seq_k)
            sequence = tl.where(first // KEYS + b <= tile, b, sequence)
        k_first = _first_row(lengths_k, sequence, batches, seq_k)
        length = tl.maximum(_first_row(lengths_k, sequence + 1, batches, seq_k) - k_first, 0)
        q_first = _first_row(lengths_q, sequence, batches, seq_q)
        q_length = tl.maximum(_first_row(lengths_q, sequence + 1, batches, seq_q) - q_first, 0)
        begin = (tile - k_first // KEYS - sequence) * KEYS
        base += k_first.to(tl.int64) * stride_s
    else:
        length, q_length, begin = seq_k, seq_q, tile * KEYS
        if lengths_k is not None:
            length = tl.minimum(tl.maximum(tl.load(lengths_k + slot), 0), seq_k)
        if lengths_q is not None:
            q_length = tl.minimum(tl.maximum(tl.load(lengths_q + slot), 0), seq_q)
    position = length - q_length
    if TOP_LEFT:
        position = 0
    seen, unseen = length, 0
    if RIGHT:
        seen = tl.minimum(seen, tl.maximum(q_length + position + right, 0))
    if LEFT:
        unseen = tl.maximum(position - left, 0)
    word = tl.arange(0, KEYS // 4)
    key = begin + word // 4 * 16 + word % 4 * 2
    cols = column + tl.arange(0, BLOCK)
    pointers = base + key.to(tl.int64)[:, None] * stride_s + cols[None, :]
    inside = cols[None, :] // 16 < columns // 16  # 16 columns are one load
    there = (key >= unseen) & (key < seen)
    next_there = (key + 1 >= unseen) & (key + 1 < seen)
    far = (key + 8 >= unseen) & (key + 8 < seen)
    next_far = (key + 9 >= unseen) & (key + 9 < seen)
    found = _bytes(pointers, there[:, None] & inside)
    found |= _bytes(pointers + stride_s, next_there[:, None] & inside) << 8
    found |= _bytes(pointers + 8 * stride_s, far[:, None] & inside) << 16
    found |= _bytes(pointers + 9 * stride_s, next_far[:, None] & inside) << 24
    rows = (slot * heads + head).to(tl.int64) * columns + cols
    places = (
        out.to(tl.pointer_type(tl.int32))
        + rows[:, None] * key_tiles * (KEYS // 4)
        + (tile * (KEYS // 4) + word)[None, :]
    )
    tl.store(places, tl.trans(found), mask=cols[:, None] < columns)


_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows_of(tile, lengths_q, slot, seq_q, batches, ROWS: tl.constexpr, VARYING: tl.constexpr):
    """A tile of query rows: (its sequence, its first row there, rows that the sequence has in the tensors, rows that
    count, the tensors' row at which the sequence begins)."""
    if VARYING == "packed":
        sequence, number = packed_tile(lengths_q, tile, batches, seq_q, 1, ROWS, 32)
        first, end = packed_bounds(lengths_q, sequence, batches, seq_q)
        rows = end - first
        length = tl.where(sequence == batches, 0, rows)
    else:
        sequence, number, rows, first = slot, tile, seq_q, 0
        length = seq_q
        if VARYING == "padded" or VARYING == "padded_q":
            length = tl.minimum(tl.maximum(tl.load(lengths_q + slot), 0), seq_q)
    return sequence, number * ROWS, rows, length, first


@triton.jit(
    do_not_specialize=["heads", "seq_q", "batches", "tiles", "grad_lse_stride_b", "grad_lse_stride_h"],
)
def row_statistics(
    forward_out, forward_lse, grad_out, grad_lse, q, statistics, delta, sums, turns, edge_q, edge_do, lengths_q,
    o_stride_b, o_stride_h, o_stride_s, do_stride_b, do_stride_h, do_stride_s, q_stride_b, q_stride_h, q_stride_s,
    lse_stride_b, lse_stride_h, grad_lse_stride_b, grad_lse_stride_h, delta_stride_b, delta_stride_h,
    heads, seq_q, batches, tiles, D: tl.constexpr, D_V: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, VARYING: tl.constexpr, IDLE: tl.constexpr,
):  # fmt: skip
    """A program for each tile of ROWS query rows of a head.

    forward_out, grad_out (B, H, S, D_V), forward_lse, grad_lse (or None), delta (B, H, S) float32: packed ones have
                one batch. delta = rowsum(forward_out·grad_out) - grad_lse; 0 where a row attends nothing
    statistics  (2·tiles, ROWS) float32: of each tile LSE in powers of 2, inf where a row attends nothing (its P is then
                0), and delta
    sums        (tiles, ROWS·DIM) float32, set to 0; or None
    turns       (1 + tiles,) int32, set to 0, with IDLE to 1 after the first for tiles with a row that attends nothing;
                or None
    edge_q, edge_do  (2·B, H, ROWS, D or D_V): of each sequence a tile whose first row attends nothing, and one whose
                last row attends nothing or is not there, if other rows of them do, with 0 in such rows; or None
    """
    block = tl.program_id(0)
    head, slot = block // tiles % heads, block // tiles // heads
    sequence, row, rows, length, first = _rows_of(block % tiles, lengths_q, slot, seq_q, batches, ROWS, VARYING)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, DIM)
    there = row + r < length
    at, of_head = (first + row + r).to(tl.int64), head.to(tl.int64)
    inside = there[:, None] & (c < D_V)[None, :]
    of_do = grad_out + slot.to(tl.int64) * do_stride_b + of_head * do_stride_h + at[:, None] * do_stride_s + c[None, :]
    of_o = forward_out + slot.to(tl.int64) * o_stride_b + of_head * o_stride_h + at[:, None] * o_stride_s + c[None, :]
    do = tl.load(of_do, mask=inside, other=0.0)
    o = tl.load(of_o, mask=inside, other=0.0)
    lse = tl.load(
        forward_lse + slot.to(tl.int64) * lse_stride_b + of_head * lse_stride_h + at, mask=there, other=-float("inf")
    )
    nothing = lse == -float("inf")
    found = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        of_lse = grad_lse + slot.to(tl.int64) * grad_lse_stride_b + of_head * grad_lse_stride_h + at
        found -= tl.load(of_lse, mask=there, other=0.0)
    found = tl.where(nothing, 0.0, found)
    place = statistics + block.to(tl.int64) * (2 * ROWS) + r
    tl.store(place, tl.where(nothing, float("inf"), lse * _LOG2E))
    tl.store(place + ROWS, found)
    of_delta = delta + slot.to(tl.int64) * delta_stride_b + of_head * delta_stride_h + at
    tl.store(of_delta, found, mask=row + r < rows)
    if sums is not None:
        whole = tl.arange(0, ROWS * DIM)
        tl.store(sums + block.to(tl.int64) * (ROWS * DIM) + whole, tl.zeros([ROWS * DIM], tl.float32))
    if turns is not None:
        idle = 0
        if IDLE:
            idle = tl.max(tl.where(nothing & there, 1, 0), 0)
        tl.store(turns + 1 + block, idle)
        tl.store(turns, 0, mask=block == 0)
    if edge_q is not None:
        first_missing = tl.max(tl.where(nothing & (r == 0), 1, 0), 0)
        last_missing = tl.max(tl.where(nothing & (r == ROWS - 1), 1, 0), 0)
        if (tl.min(nothing.to(tl.int32), 0) == 0) & (first_missing + last_missing > 0):
            clean = tl.where(nothing[:, None], 0.0, do).to(do.dtype)
            of_q = q + slot.to(tl.int64) * q_stride_b + of_head * q_stride_h + at[:, None] * q_stride_s + c[None, :]
            clean_q = tl.load(of_q, mask=(nothing == 0)[:, None] & (c < D)[None, :], other=0.0)
            edge = ((sequence * 2).to(tl.int64) * heads + head) * ROWS + r
            wanted = first_missing > 0
            tl.store(edge_do + edge[:, None] * D_V + c[None, :], clean, mask=wanted & (c < D_V)[None, :])
            tl.store(edge_q + edge[:, None] * D + c[None, :], clean_q, mask=wanted & (c < D)[None, :])
            edge += heads * ROWS
            wanted = last_missing > 0
            tl.store(edge_do + edge[:, None] * D_V + c[None, :], clean, mask=wanted & (c < D_V)[None, :])
            tl.store(edge_q + edge[:, None] * D + c[None, :], clean_q, mask=wanted & (c < D)[None, :])


@triton.jit(do_not_specialize=["scale", "heads", "seq_q", "batches", "tiles"])
def query_gradients(
    sums, out, lengths_q, out_stride_b, out_stride_h, out_stride_s, scale, heads, seq_q, batches, tiles,
    D: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, VARYING: tl.constexpr,
):  # fmt: skip
    """Write dQ of a head's query rows from sums (tiles, ROWS·DIM) in consumer.put's order; a program a tile."""
    block = tl.program_id(0)
    head, slot = block // tiles % heads, block // tiles // heads
    _sequence, row, rows, length, first = _rows_of(block % tiles, lengths_q, slot, seq_q, batches, ROWS, VARYING)
    if row < rows:
        x = tl.load(sums + block.to(tl.int64) * (ROWS * DIM) + tl.arange(0, ROWS * DIM))
        x = (x * scale).to(out.dtype.element_ty)
        x = tl.permute(tl.reshape(x, [ROWS // 64, 2, DIM // 16, 4, 8, 4, 2, 2]), (0, 3, 6, 4, 1, 2, 5, 7))
        x = tl.reshape(x, [ROWS, DIM])
        r = tl.arange(0, ROWS)
        c = tl.arange(0, DIM)
        x = tl.where((row + r < length)[:, None], x, 0.0).to(out.dtype.element_ty)
        at = out + slot.to(tl.int64) * out_stride_b + head.to(tl.int64) * out_stride_h
        at += (first + row + r).to(tl.int64)[:, None] * out_stride_s
        tl.store(at + c[None, :], x, mask=(row + r < rows)[:, None] & (c < D)[None, :])
