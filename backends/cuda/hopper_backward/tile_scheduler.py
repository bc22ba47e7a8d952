"""Which keys a block of the Hopper backward has, and which query tiles see them. All of a block's warps ask alike."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.hopper_backward.form import BackwardWork, Tiles
from portattn.backends.cuda.hopper_forward.work import first_row, in_turn, last_seen, position_of
from portattn.backends.cuda.sizes import STATISTICS_ROWS

_ROWS: gl.constexpr = gl.constexpr(STATISTICS_ROWS)


@gluon.jit
def _sequence_of(number, lengths, total, size: gl.constexpr, batches, WARPS: gl.constexpr):
    """As kernels/tiles.py packed_tile: sequence b's tiles begin at number lengths[b] // size + b. Rows after the last
    sequence are sequence number `batches`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    sequence = batches - batches
    for chunk in range(gl.cdiv(batches + 1, 32)):
        b = chunk * 32 + gl.arange(0, 32, layout)
        first = gl.load(lengths + gl.minimum(b, batches))
        first = gl.minimum(gl.maximum(first, 0), total)
        begun = (first // size + b <= number) & (b <= batches)
        sequence = gl.maximum(sequence, gl.max(gl.where(begun, b, 0), 0))
    return sequence


@gluon.jit
def _bounds(lengths, sequence, batches, total):
    first = first_row(lengths, sequence, batches, total)
    end = gl.where(sequence == batches, total, first_row(lengths, sequence + 1, batches, total))
    return first, gl.maximum(end, first) - first


@gluon.jit
def _rising_bounds(lengths, sequence, batches, total, WARPS: gl.constexpr):
    """_bounds where no sequence begins before the one before it, as of valid lengths: of others too each tile of rows
    is then one sequence's, and blocks that add in turns do not wait for what another sequence's blocks count."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    first, end = sequence - sequence, sequence - sequence
    for chunk in range(gl.cdiv(batches + 1, 32)):
        b = chunk * 32 + gl.arange(0, 32, layout)
        row = gl.load(lengths + gl.minimum(b, batches))
        row = gl.minimum(gl.maximum(row, 0), total)
        first = gl.maximum(first, gl.max(gl.where(b <= sequence, row, 0), 0))
        end = gl.maximum(end, gl.max(gl.where(b <= sequence + 1, row, 0), 0))
    return first, gl.where(sequence == batches, total, end) - first


@gluon.jit
def _packed(number, head, sizes, size: gl.constexpr, by_keys: gl.constexpr, reverse: gl.constexpr,
            rising: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    if by_keys:
        sequence = _sequence_of(number, sizes.lengths_k, sizes.seq_k, size, sizes.batches, WARPS)
    else:
        sequence = _sequence_of(number, sizes.lengths_q, sizes.seq_q, size, sizes.batches, WARPS)
    if rising:
        q_first, q_length = _rising_bounds(sizes.lengths_q, sequence, sizes.batches, sizes.seq_q, WARPS)
    else:
        q_first, q_length = _bounds(sizes.lengths_q, sequence, sizes.batches, sizes.seq_q)
    k_first, k_length = _bounds(sizes.lengths_k, sequence, sizes.batches, sizes.seq_k)
    first, length = q_first, q_length
    if by_keys:
        first, length = k_first, k_length
    number -= first // size + sequence
    if reverse:  # longest rows first
        number = gl.where(number * size < length, gl.cdiv(length, size) - 1 - number, number)
    after = sequence == sizes.batches  # rows of no sequence: nothing sees them, and they see nothing
    q_length, k_length = gl.where(after, 0, q_length), gl.where(after, 0, k_length)
    tile = q_first // _ROWS + sequence
    start = number * size
    return BackwardWork(start, length - start, head, head - head, sequence, q_first, q_length, k_first, k_length, tile)


@gluon.jit
def work_of(block, sizes, form, size: gl.constexpr, by_keys: gl.constexpr, WARPS: gl.constexpr):
    """The work of a block: `size` keys, or where not `by_keys` query rows. WARPS: those that ask together."""
    reverse: gl.constexpr = form.RIGHT and not by_keys  # later rows see more keys; earlier keys are seen by more rows
    heads = sizes.heads
    if form.VARYING != "packed":
        heads = heads * sizes.batches
    if form.RIGHT or form.TURNS or form.VARYING == "packed":
        number, head = in_turn(block, sizes.tiles, heads, sizes)
    else:
        number, head = block % sizes.tiles, block // sizes.tiles
    if form.VARYING == "packed":
        work = _packed(number, head, sizes, size, by_keys, reverse, form.TURNS, WARPS)
    else:
        if reverse:
            number = sizes.tiles - 1 - number
        slot = head // sizes.heads
        q_length, k_length = sizes.seq_q, sizes.seq_k
        if form.VARYING == "padded" or form.VARYING == "padded_q":
            q_length = gl.minimum(gl.maximum(gl.load(sizes.lengths_q + slot), 0), q_length)
        if form.VARYING == "padded" or form.VARYING == "padded_k":
            k_length = gl.minimum(gl.maximum(gl.load(sizes.lengths_k + slot), 0), k_length)
        rows = sizes.seq_q
        if by_keys:
            rows = sizes.seq_k
        zero, start = number - number, number * size
        work = BackwardWork(start, rows - start, head % sizes.heads, slot, slot, zero, q_length, zero, k_length, zero)
    return work


@gluon.jit
def first_seen(work, sizes, form):
    """The first key that some query of the sequence sees."""
    first = work.start - work.start
    if form.LEFT:
        first = gl.maximum(position_of(work, form) - sizes.left, 0)
    return first


@gluon.jit
def attending(work, sizes, form):
    """The sequence's query rows that see a key: (first, end)."""
    position = position_of(work, form)
    first, end = work.start - work.start, work.q_length
    if form.RIGHT:
        first = gl.maximum(-(position + sizes.right), 0)
    if form.LEFT:
        end = gl.minimum(end, work.k_length - position + sizes.left)
    return first, end


@gluon.jit
def query_tiles(work, sizes, form):
    """Query tiles that see the block's keys."""
    keys: gl.constexpr = form.KEYS
    rows: gl.constexpr = form.ROWS
    position = position_of(work, form)
    seen_begin, seen_end = first_seen(work, sizes, form), last_seen(work, sizes, form)
    first, end = gl.maximum(work.start, seen_begin), gl.minimum(work.start + keys, seen_end)
    row, row_end = work.start - work.start, work.q_length
    if form.RIGHT:
        row = gl.maximum(first - position - sizes.right, 0)
    if form.LEFT:
        row_end = gl.minimum(row_end, end - position + sizes.left)
    begin = row // rows
    last = gl.where((end > first) & (row_end > row), gl.cdiv(row_end, rows), begin)
    clean, unclean = begin, last
    if form.RIGHT:
        clean = gl.cdiv(gl.maximum(work.start + keys - 1 - position - sizes.right, 0), rows)
        clean = gl.minimum(gl.maximum(clean, begin), last)
    if form.LEFT:
        unclean = gl.maximum(work.start - position + sizes.left + 1, 0) // rows
        unclean = gl.minimum(gl.maximum(unclean, clean), last)
    if form.RAGGED or form.UNSEEN:
        whole = (work.start >= seen_begin) & (work.start + keys <= seen_end)
        clean, unclean = gl.where(whole, clean, last), gl.where(whole, unclean, last)
    return Tiles(begin, clean, unclean, last)


@gluon.jit
def place_of(i, count, sizes, form):
    """Which of its `count` query tiles a block visits in step i, for tile_at."""
    if form.TURNS:  # heads side by side: one after the other, blocks of few tiles would wait at each one's first tile
        place = i // sizes.share
    else:
        place = i % count
    return place


@gluon.jit
def member_of(i, count, sizes, form):
    """Which query head of its key head's group a block visits in step i."""
    if form.TURNS:
        member = i % sizes.share
    else:
        member = i // count
    return member


@gluon.jit
def tile_at(place, tiles, block, form):
    """The query tile that is visited in this place: in order, those without a mask turned by the block's number."""
    tile = tiles.begin + place
    if form.TURNS:  # from the last one back
        tile = tiles.end - 1 - place
    if form.STAGGER:
        among = tile - tiles.clean
        count = tiles.unclean - tiles.clean
        if (among >= 0) & (among < count):
            tile = tiles.clean + (among + block * form.STAGGER) % count
    return tile
