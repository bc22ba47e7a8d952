"""Which rows a tile of the Hopper forward has, and which key tiles they see. Producer and consumers ask alike."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.hopper_forward.form import Work


@gluon.jit
def first_row(first_rows, sequence, batches, total):
    return gl.minimum(gl.maximum(gl.load(first_rows + gl.minimum(sequence, batches)), 0), total)


@gluon.jit
def in_turn(tile, row_tiles, all_heads, sizes):
    """(row tile, head): some heads at a time, whose keys and values share the L2, of each row tile one after the other.

    What ends a launch is then the last rows of many heads, not all rows of the last head, which would keep few blocks
    busy for long.
    """
    per = row_tiles * sizes.together
    first, rest = tile // per * sizes.together, tile % per
    heads = gl.minimum(sizes.together, all_heads - first)
    return rest // heads, first + rest % heads


@gluon.jit
def _packed_work(tile, sizes, form):
    """As kernels/tiles.py packed_tile: sequence b's tiles begin at number cu_seqlens[b] // rows + b."""
    rows: gl.constexpr = form.GROUPS * form.LINES
    number, head = in_turn(tile, sizes.row_tiles, sizes.heads, sizes)
    if form.PAGE:  # engines put sequences of one new token first: last here, they fill what longer ones leave
        number = sizes.row_tiles - 1 - number
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    sequence = sizes.batches - sizes.batches
    for chunk in range(gl.cdiv(sizes.batches + 1, 32)):
        b = chunk * 32 + gl.arange(0, 32, layout)
        first = gl.load(sizes.lengths_q + gl.minimum(b, sizes.batches))
        first = gl.minimum(gl.maximum(first, 0), sizes.seq_q)
        begun = (first // rows + b <= number) & (b <= sizes.batches)
        sequence = gl.maximum(sequence, gl.max(gl.where(begun, b, 0), 0))
    q_first = first_row(sizes.lengths_q, sequence, sizes.batches, sizes.seq_q)
    q_end = first_row(sizes.lengths_q, sequence + 1, sizes.batches, sizes.seq_q)
    q_end = gl.maximum(gl.where(sequence == sizes.batches, sizes.seq_q, q_end), q_first)
    if form.VARYING == "packed":
        k_first = first_row(sizes.lengths_k, sequence, sizes.batches, sizes.seq_k)
        k_end = gl.maximum(first_row(sizes.lengths_k, sequence + 1, sizes.batches, sizes.seq_k), k_first)
        k_length = gl.where(sequence == sizes.batches, -1, k_end - k_first)  # rows after the last sequence have no sink
    else:
        k_first = gl.minimum(sequence, sizes.batches - 1)
        k_length = gl.minimum(gl.maximum(gl.load(sizes.lengths_k + k_first), 0), sizes.seq_k)
        k_length = gl.where(sequence == sizes.batches, -1, k_length)
    number -= q_first // rows + sequence
    if form.RIGHT and not form.PAGE:  # longest rows first
        number = gl.where(number * rows < q_end - q_first, gl.cdiv(q_end - q_first, rows) - 1 - number, number)
    row = gl.where(number * rows < q_end - q_first, number * rows, -1)
    split = head - head
    if form.FP8:  # keys are not split: the sequence, which has scales of its own
        split = gl.minimum(sequence, sizes.batches - 1)
    return Work(row, head, head - head, q_first, q_end - q_first, k_first, k_length, split)


@gluon.jit
def work_of(tile, sizes, form):
    """The tile of a number; its row is negative where that number has none."""
    rows: gl.constexpr = form.GROUPS * form.LINES
    if form.PACKED:
        work = _packed_work(tile, sizes, form)
    else:
        split = tile - tile
        if form.SPLIT:
            tile, split = tile // sizes.splits, tile % sizes.splits
        if form.RIGHT:  # longest rows first
            number, head = in_turn(tile, sizes.row_tiles, sizes.batches * sizes.heads, sizes)
            row = (sizes.row_tiles - 1 - number) * rows
        else:
            row, head = tile % sizes.row_tiles * rows, tile // sizes.row_tiles
        slot = head // sizes.heads
        q_length, k_length = sizes.seq_q, sizes.seq_k
        if form.VARYING == "padded" or form.VARYING == "padded_q":
            q_length = gl.minimum(gl.maximum(gl.load(sizes.lengths_q + slot), 0), q_length)
        if form.VARYING == "padded" or form.VARYING == "padded_k":
            k_length = gl.minimum(gl.maximum(gl.load(sizes.lengths_k + slot), 0), k_length)
        if form.VARYING != "none":
            k_length = gl.where(row < q_length, k_length, 0)  # a tile of padding rows sees nothing
        if form.PAGE:
            work = Work(row, head % sizes.heads, slot, row - row, q_length, slot, k_length, split)
        else:
            work = Work(row, head % sizes.heads, slot, row - row, q_length, row - row, k_length, split)
    return work


@gluon.jit
def position_of(work, form):
    """The position, in keys, of the sequence's query 0."""
    if form.TOP_LEFT:
        position = work.k_length - work.k_length
    else:
        position = work.k_length - work.q_length
    return position


@gluon.jit
def last_seen(work, sizes, form):
    """End of the keys that some query of the sequence sees."""
    end = work.k_length
    if form.RIGHT:
        end = gl.minimum(end, gl.maximum(work.q_length + position_of(work, form) + sizes.right, 0))
    return end


@gluon.jit
def key_tiles(row, rows: gl.constexpr, work, sizes, form):
    """Key tiles that rows [row, row + rows) see: [begin, end), at least one, of which [clean, unclean) need no mask."""
    keys: gl.constexpr = form.KEYS
    seen, position = last_seen(work, sizes, form), position_of(work, form) + row
    end, unclean = gl.cdiv(seen, keys), seen // keys
    if form.RIGHT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(position + rows + sizes.right, 0), keys))
        unclean = gl.minimum(unclean, gl.maximum(position + 1 + sizes.right, 0) // keys)
    end = gl.maximum(end, 1)
    unclean = gl.minimum(unclean, end)
    begin, clean = end - end, end - end
    if form.LEFT:
        begin = gl.minimum(gl.maximum(position - sizes.left, 0) // keys, end - 1)
        clean = gl.minimum(gl.cdiv(gl.maximum(position + rows - 1 - sizes.left, 0), keys), unclean)
        clean = gl.maximum(clean, begin)
    return begin, gl.minimum(clean, end), gl.maximum(unclean, begin), end


@gluon.jit
def tile_keys(work, sizes, form):
    """Key tiles that the block brings: (first, end, whether there are any). Where a split has none it brings one."""
    begin, _c, _u, end = key_tiles(work.row, form.GROUPS * form.LINES, work, sizes, form)
    some = end > begin
    if form.SPLIT:
        count = end - begin
        first = count * work.split // sizes.splits
        end = begin + count * (work.split + 1) // sizes.splits
        begin += first
        some = end > begin
        end = gl.maximum(end, begin + 1)
    return begin, end, some
