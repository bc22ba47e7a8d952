"""Values of e4m3 transposed for the Hopper forward, whose products read them along the keys.

The kernel reads (B, Hk, S, Dv) and writes (B, Hk, Dv, S), S in whole tiles of keys, with zeros for keys that no query
of the sequence sees: their probability is 0, and 0·NaN is NaN. Packed sequences each begin at a tile's edge: sequence b
at tile cu_seqlens_k[b] // KEYS + b.

Of each 16 keys the order is 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15 (fp8_forward.py says why). Four
of them are a 32-bit word, so that no single byte goes through shared memory.
"""

import triton
import triton.language as tl


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
