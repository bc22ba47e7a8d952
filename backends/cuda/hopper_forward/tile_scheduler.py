"""Records that the functions of the Hopper forward exchange (constants of a compilation, shared memory, tiles), and a
scheduler: which rows a tile has, and which key tiles they see. Producer and consumers ask alike.

The producer sends each tile's Work to its consumers through a queue in shared memory (send, read).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from portattn.backends.cuda.gluon_names import aggregate
from portattn.backends.cuda.hopper_forward import GROUP_ROWS
from portattn.backends.cuda.hopper_forward.block_lists import listed_tiles
from portattn.backends.cuda.hopper_forward.fragments import FunctionTensors, following

# No `from __future__ import annotations`: Triton's aggregates read the types of their fields.


@aggregate
class Form:
    """Constants of a compiled kernel.

    GROUPS, KEYS, DIM, STAGES  warp groups of 64 rows, keys of a tile, padded head dimension, buffers for K and for V
    RIGHT, LEFT   queries see keys up to `right` after, and from `left` before, their own position
    TOP_LEFT      query i's position is key i; otherwise the last query's is the last key
    RAGGED        the last key tile is not full
    VARYING       "none", "packed" (first rows of sequences are given) or "padded" (their lengths are), "padded_q" or
                  "padded_k" (lengths of queries or keys only), "packed_q" (first rows of queries, lengths of keys)
    UNSEEN        the tensor may have keys behind the last that a query sees
    SOFTCAP       scores are capped
    SPLIT         several blocks share a tile's keys, and their results are merged afterwards
    TURNS         consumers issue their products in turns
    LATE          the accumulator is rescaled after the next scores have been issued, not before
    EARLY         consumers wait for the values' product before the exponentials, not after
    PAIRS         probabilities cross the loop's edge as 16-bit pairs in 32-bit registers, not as float32
    OWN_OUT       the output leaves through shared memory of its own, not through that of Q
    QUERIES       buffers for Q: with two, the next tile's rows are loaded while this one's are in use
    PARTS         parts of columns in which the output leaves, through the room of one part; with OWN_OUT
    REG_Q         Q is read from registers, so that score products read only keys from shared memory; with OWN_OUT
    PAGE          tokens of a page of keys, a multiple of 16; of a contiguous cache a multiple of KEYS; 0 for other keys
    HEADS         query heads of one key head whose rows a tile has, side by side: a power of two; of a cache
    PIECE, WIDE   keys and columns of one load: all of a tile's without a table
    FP8           q, k, v and probabilities are e4m3; V is transposed (../auxiliary_kernels.py). With OWN_OUT no pages
    SCALED        with FP8 or a FORMAT: there are scales
    COLUMNS       with FP8: columns of a product of values; fewer than DIM if sums of all do not fit (products.py)
    USED          with fewer COLUMNS: DIM without the parts that are all padding; else DIM
    KEPT          with FP8: keys' buffers are returned after the exponentials, not after the scores
                  (low_precision_products.py)
    HALVED        with KEPT: the preceding tile's values are added between the exponentials of a tile's halves
                  (low_precision_products.py)
    INT8          q and k are int8, a scale for each row (low_precision_products.py); v and probabilities of 16 bits.
                  With OWN_OUT, not over pages, without SOFTCAP
    SIDE          with INT8: scales of keys lie side by side
    LAZY          the accumulator is rescaled only if a row's maximum has grown much (fragments.py); not with FP8
    FORMAT        "as_q", or the storage of quantised pages, which warps of their own dequantize
    TREE          of a cache, without LEFT: each query's word says which of its sequence's last keys it sees
    TABLE         a table names each sequence's pages; else with a PAGE the cache is contiguous
    SCORE_MOD     a Gluon function of a program of scores (kernels/score_program.py), or None: of dense 16-bit tensors,
                  without SOFTCAP
    LISTED_Q, LISTED_K  queries and keys of the blocks that lists name (block_lists.py), multiples of a tile's; 0
                  without lists: of dense 16-bit tensors, without other masks
    MASK_MOD      with lists: a function that masks the blocks which are not whole, or None
    """

    GROUPS: gl.constexpr
    KEYS: gl.constexpr
    DIM: gl.constexpr
    STAGES: gl.constexpr
    RIGHT: gl.constexpr
    LEFT: gl.constexpr
    TOP_LEFT: gl.constexpr
    RAGGED: gl.constexpr
    VARYING: gl.constexpr
    UNSEEN: gl.constexpr
    SOFTCAP: gl.constexpr
    SPLIT: gl.constexpr
    TURNS: gl.constexpr
    LATE: gl.constexpr
    EARLY: gl.constexpr
    PAIRS: gl.constexpr
    OWN_OUT: gl.constexpr
    QUERIES: gl.constexpr
    REG_Q: gl.constexpr
    PARTS: gl.constexpr
    PAGE: gl.constexpr
    HEADS: gl.constexpr
    PIECE: gl.constexpr
    WIDE: gl.constexpr
    FP8: gl.constexpr
    SCALED: gl.constexpr
    COLUMNS: gl.constexpr
    USED: gl.constexpr
    KEPT: gl.constexpr
    HALVED: gl.constexpr
    INT8: gl.constexpr
    SIDE: gl.constexpr
    LAZY: gl.constexpr
    FORMAT: gl.constexpr
    TREE: gl.constexpr
    TABLE: gl.constexpr
    SCORE_MOD: gl.constexpr
    LISTED_Q: gl.constexpr
    LISTED_K: gl.constexpr
    MASK_MOD: gl.constexpr
    DEQUANTIZE: gl.constexpr  # there is a FORMAT
    BLOCKS: gl.constexpr  # with INT8: a tile's keys may be two blocks, whose tokens share a scale each
    BYTES: gl.constexpr  # of a number of q and k,
    V_BYTES: gl.constexpr  # and of v
    PACKED: gl.constexpr  # queries of all sequences lie one after the other
    LINES: gl.constexpr  # queries of a warp group: its rows, by HEADS
    PIECES: gl.constexpr  # of a tile's keys
    PARTY: gl.constexpr  # threads that meet at FREE: the consumers, and the producer or the dequantizer
    SCORES: gl.constexpr  # layouts: of scores,
    OUTPUT: gl.constexpr  # of the accumulator,
    PART: gl.constexpr  # of COLUMNS of it,
    QROWS: gl.constexpr  # of Q as an operand in registers,
    PROBS: gl.constexpr  # of P as an operand,
    ROW: gl.constexpr  # of a vector with one element a row
    TILE: gl.constexpr  # of a tile of K or V that several loads bring

    @gluon.constexpr_function
    def __init__(self, GROUPS, KEYS, DIM, STAGES, RIGHT, LEFT, TOP_LEFT, RAGGED, VARYING, UNSEEN, SOFTCAP, SPLIT, TURNS,
                 LATE, EARLY, PAIRS, OWN_OUT, QUERIES, REG_Q, PARTS, PAGE, HEADS, PIECE, WIDE, FP8, SCALED, COLUMNS,
                 USED, KEPT, HALVED, INT8, SIDE, LAZY, FORMAT, TREE, TABLE, SCORE_MOD, LISTED_Q, LISTED_K,
                 MASK_MOD):  # fmt: skip
        self.GROUPS, self.KEYS, self.DIM, self.STAGES = map(gl.constexpr, (GROUPS, KEYS, DIM, STAGES))
        self.RIGHT, self.LEFT, self.TOP_LEFT, self.SPLIT = map(gl.constexpr, (RIGHT, LEFT, TOP_LEFT, SPLIT))
        self.RAGGED, self.VARYING, self.UNSEEN = map(gl.constexpr, (RAGGED, VARYING, UNSEEN))
        self.SOFTCAP, self.TURNS, self.LATE, self.EARLY = map(gl.constexpr, (SOFTCAP, TURNS, LATE, EARLY))
        self.PAIRS, self.OWN_OUT, self.QUERIES = map(gl.constexpr, (PAIRS, OWN_OUT, QUERIES))
        self.REG_Q, self.PARTS, self.PAGE, self.HEADS = map(gl.constexpr, (REG_Q, PARTS, PAGE, HEADS))
        self.PACKED, self.LINES = gl.constexpr(VARYING in ("packed", "packed_q")), gl.constexpr(GROUP_ROWS // HEADS)
        self.PIECE, self.PIECES, self.WIDE = map(gl.constexpr, (PIECE, KEYS // PIECE, WIDE))
        self.FP8, self.SCALED = map(gl.constexpr, (FP8, SCALED))
        self.COLUMNS, self.USED, self.KEPT, self.HALVED = map(gl.constexpr, (COLUMNS, USED, KEPT, HALVED))
        self.INT8, self.SIDE, self.LAZY = map(gl.constexpr, (INT8, SIDE, LAZY))
        self.FORMAT, self.DEQUANTIZE = gl.constexpr(FORMAT), gl.constexpr(FORMAT != "as_q")
        self.TREE, self.TABLE, self.SCORE_MOD = map(gl.constexpr, (TREE, TABLE, SCORE_MOD))
        self.LISTED_Q, self.LISTED_K, self.MASK_MOD = map(gl.constexpr, (LISTED_Q, LISTED_K, MASK_MOD))
        self.BLOCKS = gl.constexpr(INT8 and SIDE and KEYS == 128)
        size, deep, wide = (1, 32, 4) if FP8 else (2, 16, 2)
        self.BYTES, self.V_BYTES = gl.constexpr(1 if INT8 else size), gl.constexpr(size)
        scores = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32 if INT8 else deep])
        output = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, deep])
        part = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, deep])
        self.PARTY = gl.constexpr(GROUPS * 128 + (32 if FORMAT == "as_q" else 128))
        self.SCORES, self.OUTPUT, self.PART = map(gl.constexpr, (scores, output, part))
        self.QROWS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=scores, k_width=4 if INT8 else wide))
        self.PROBS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=part, k_width=wide))
        self.ROW = gl.constexpr(gl.SliceLayout(1, scores))
        self.TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))


@aggregate
class ForwardSharedMemory:
    q: gl.shared_memory_descriptor  # [QUERIES·GROUPS][1, 1, 64, DIM]; over pages [1, LINES, HEADS, DIM], the same bytes
    k: gl.shared_memory_descriptor  # [STAGES][1, 1, KEYS, DIM]
    v: gl.shared_memory_descriptor  # [STAGES][1, 1, KEYS, DIM]; with FP8 [1, 1, DIM, KEYS]
    out: gl.shared_memory_descriptor  # [GROUPS][1, 1, 64, DIM/PARTS]; over pages as q
    q_full: gl.shared_memory_descriptor  # [QUERIES·GROUPS] mbarriers
    q_free: gl.shared_memory_descriptor  # [QUERIES·GROUPS]
    k_full: gl.shared_memory_descriptor  # [STAGES]
    v_full: gl.shared_memory_descriptor  # [STAGES]
    raw: gl.shared_memory_descriptor  # with a FORMAT [2][1, 1, KEYS, DIM] int8: a tile of keys and one of values
    raw_full: gl.shared_memory_descriptor  # [2]
    raw_free: gl.shared_memory_descriptor  # [2]
    mail: gl.shared_memory_descriptor  # [2·FIELDS][1] int32: two messages of the producer to the consumers
    mail_full: gl.shared_memory_descriptor  # [2]
    mail_free: gl.shared_memory_descriptor  # [2]

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, out, q_full, q_free, k_full, v_full, raw, raw_full, raw_free, mail, mail_full, mail_free
    ):
        self.q, self.k, self.v, self.out = q, k, v, out
        self.q_full, self.q_free, self.k_full, self.v_full = q_full, q_free, k_full, v_full
        self.raw, self.raw_full, self.raw_free = raw, raw_full, raw_free
        self.mail, self.mail_full, self.mail_free = mail, mail_full, mail_free


@aggregate
class Sizes:
    """The numbers of the call.

    lengths_q, lengths_k  (B,) int32 lengths, or (B + 1,) int32 first rows of packed sequences; else anything
    heads, share  with HEADS: heads count HEADS at a time
    """

    lengths_q: gl.tensor
    lengths_k: gl.tensor
    batches: gl.tensor
    heads: gl.tensor
    share: gl.tensor  # query heads of a key head
    seq_q: gl.tensor  # rows of the query tensor
    seq_k: gl.tensor  # rows of the key tensor; of pages the most that a sequence can have
    left: gl.tensor
    right: gl.tensor
    row_tiles: gl.tensor  # of a head of a sequence; of a head of all packed ones
    together: gl.tensor  # causal or packed: heads that are worked on at a time
    splits: gl.tensor  # blocks that share a tile's keys
    tree_mask: gl.tensor  # with TREE (B, Sq) int64, packed (1, rows); else anything
    tree_stride: gl.tensor
    tensors: FunctionTensors
    lists: gl.tensor  # with LISTED_K lists of blocks, and their strides along sequences, heads and blocks of queries
    list_b: gl.tensor
    list_h: gl.tensor
    list_q: gl.tensor
    shown: gl.tensor  # with MASK_MOD what find_hidden_keys (block_lists.py) found, by steps of its heads
    shown_b: gl.tensor
    shown_h: gl.tensor

    @gluon.constexpr_function
    def __init__(self, lengths_q, lengths_k, batches, heads, share, seq_q, seq_k, left, right, row_tiles, together,
                 splits, tree_mask, tree_stride, tensors, lists, list_b, list_h, list_q, shown, shown_b,
                 shown_h):  # fmt: skip
        self.lengths_q, self.lengths_k, self.batches, self.heads, self.share = (
            lengths_q, lengths_k, batches, heads, share,
        )  # fmt: skip
        self.seq_q, self.seq_k, self.left, self.right = seq_q, seq_k, left, right
        self.row_tiles, self.together, self.splits = row_tiles, together, splits
        self.tree_mask, self.tree_stride, self.tensors = tree_mask, tree_stride, tensors
        self.lists, self.list_b, self.list_h, self.list_q = lists, list_b, list_h, list_q
        self.shown, self.shown_b, self.shown_h = shown, shown_b, shown_h


@aggregate
class Work:
    """A tile of query rows. Rows and keys count from the sequence's first."""

    row: gl.tensor  # the tile's first; negative when there is no tile
    head: gl.tensor  # with HEADS: the number of its HEADS heads
    slot: gl.tensor  # of the first axis of the tensors
    q_first: gl.tensor  # row of the tensors at which the sequence begins
    q_length: gl.tensor
    k_first: gl.tensor  # as q_first; of a cache the sequence; of lists how many key tiles they have
    k_length: gl.tensor  # -1 for rows of no sequence
    split: gl.tensor  # of lists how many of the key tiles are whole

    @gluon.constexpr_function
    def __init__(self, row, head, slot, q_first, q_length, k_first, k_length, split):
        self.row, self.head, self.slot, self.split = row, head, slot, split
        self.q_first, self.q_length, self.k_first, self.k_length = q_first, q_length, k_first, k_length


@aggregate
class Keys:
    """The key tiles of a warp group's rows: [begin, end), of which [clean, unclean) need no mask."""

    begin: gl.tensor
    clean: gl.tensor
    unclean: gl.tensor
    end: gl.tensor
    after: gl.tensor  # tiles before `begin`, which other warp groups need

    @gluon.constexpr_function
    def __init__(self, begin, clean, unclean, end, after):
        self.begin, self.clean, self.unclean, self.end, self.after = begin, clean, unclean, end, after


@aggregate
class State:
    """A warp group's running result, and the pending work of the next step."""

    acc: gl.tensor  # [64, DIM] float32
    held: gl.tensor  # probabilities whose values are not added yet
    alpha: gl.tensor  # [64] factor that makes acc one of the new maximum
    row_max: gl.tensor  # [64], in powers of 2
    row_sum: gl.tensor  # a lane's own share of the row sum

    @gluon.constexpr_function
    def __init__(self, acc, held, alpha, row_max, row_sum):
        self.acc, self.held, self.alpha, self.row_max, self.row_sum = acc, held, alpha, row_max, row_sum


@aggregate
class BufferRing:
    """A consumer's place in the buffers: of this tile, and of the values that are not added yet."""

    slot: gl.tensor
    phase: gl.tensor
    v_slot: gl.tensor
    v_phase: gl.tensor

    @gluon.constexpr_function
    def __init__(self, slot, phase, v_slot, v_phase):
        self.slot, self.phase, self.v_slot, self.v_phase = slot, phase, v_slot, v_phase


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
    """Find a tile's work like packed_tile (kernels/tiles.py): sequence b begins at number cu_seqlens[b] // rows + b."""
    rows: gl.constexpr = form.GROUPS * form.LINES
    split = tile - tile
    if form.SPLIT:
        tile, split = tile // sizes.splits, tile % sizes.splits
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
    if form.FP8:  # keys are not split: the sequence, which has scales of its own
        split = gl.minimum(sequence, sizes.batches - 1)
    return Work(row, head, head - head, q_first, q_end - q_first, k_first, k_length, split)


@gluon.jit
def padded_lengths(slot, sizes, form):
    """Return a sequence's rows of queries and of keys, padding left out."""
    q_length, k_length = sizes.seq_q, sizes.seq_k
    if form.VARYING == "padded" or form.VARYING == "padded_q":
        q_length = gl.minimum(gl.maximum(gl.load(sizes.lengths_q + slot), 0), q_length)
    if form.VARYING == "padded" or form.VARYING == "padded_k":
        k_length = gl.minimum(gl.maximum(gl.load(sizes.lengths_k + slot), 0), k_length)
    return q_length, k_length


@gluon.jit
def work_of(tile, sizes, form):
    """Return the tile of a number; its row is negative if that number has none."""
    rows: gl.constexpr = form.GROUPS * form.LINES
    if form.PACKED:
        work = _packed_work(tile, sizes, form)
    else:
        split = tile - tile
        if form.SPLIT:
            tile, split = tile // sizes.splits, tile % sizes.splits
        if form.RIGHT or form.LISTED_K:  # longest rows first
            number, head = in_turn(tile, sizes.row_tiles, sizes.batches * sizes.heads, sizes)
            row = (sizes.row_tiles - 1 - number) * rows
        else:
            row, head = tile % sizes.row_tiles * rows, tile // sizes.row_tiles
        slot = head // sizes.heads
        q_length, k_length = padded_lengths(slot, sizes, form)
        if form.VARYING != "none":
            k_length = gl.where(row < q_length, k_length, 0)  # a tile of padding rows sees nothing
        if form.PAGE:
            work = Work(row, head % sizes.heads, slot, row - row, q_length, slot, k_length, split)
        elif form.LISTED_K:
            head = head % sizes.heads
            tiles, whole = listed_tiles(slot, head, row, sizes, form)
            work = Work(row, head, slot, row - row, q_length, tiles, k_length, whole)
        else:
            work = Work(row, head % sizes.heads, slot, row - row, q_length, row - row, k_length, split)
    return work


@gluon.jit
def position_of(work, form):
    """Return the position, in keys, of the sequence's query 0."""
    if form.TOP_LEFT:
        position = work.k_length - work.k_length
    else:
        position = work.k_length - work.q_length
    return position


@gluon.jit
def last_seen(work, sizes, form):
    """Return the end of the keys that some query of the sequence sees."""
    end = work.k_length
    if form.RIGHT:
        end = gl.minimum(end, gl.maximum(work.q_length + position_of(work, form) + sizes.right, 0))
    return end


@gluon.jit
def attention_mask(keys, rows, work, sizes, form):
    """Return whether rows attend keys, numbers that broadcast, of a sequence: by its length, causality and window."""
    position = position_of(work, form)
    keep = keys >= 0
    if form.RAGGED or form.UNSEEN:
        keep = keys < last_seen(work, sizes, form)
    if form.RIGHT:
        keep = keep & (keys <= rows + (position + sizes.right))
    if form.LEFT:
        keep = keep & (keys >= rows + (position - sizes.left))
    return keep


@gluon.jit
def key_tiles(row, rows: gl.constexpr, work, sizes, form):
    """Return the key tiles of rows [row, row + rows): [begin, end), at least one; [clean, unclean) need no mask."""
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
    """Return the block's key tiles: (first, end, whether there are any). A split without any brings one."""
    begin, _c, _u, end = key_tiles(work.row, form.GROUPS * form.LINES, work, sizes, form)
    if form.LISTED_K:
        end = gl.maximum(work.k_first, 1)  # without a key a tile behind the last
    some = end > begin
    if form.SPLIT:
        count = end - begin
        first = count * work.split // sizes.splits
        end = begin + count * (work.split + 1) // sizes.splits
        begin += first
        some = end > begin
        end = gl.maximum(end, begin + 1)
    return begin, end, some


FIELDS: gl.constexpr = gl.constexpr(8)  # of a message, as many as Work has
BOXES: gl.constexpr = gl.constexpr(2)


@gluon.jit
def send(work, box, phase, shared, form):
    """Send a tile's Work to the consumers."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(shared.mail_free.index(box), phase)
    at = box * FIELDS
    shared.mail.index(at).store(gl.full([1], 0, gl.int32, one) + work.row)
    shared.mail.index(at + 1).store(gl.full([1], 0, gl.int32, one) + work.head)
    shared.mail.index(at + 2).store(gl.full([1], 0, gl.int32, one) + work.slot)
    shared.mail.index(at + 3).store(gl.full([1], 0, gl.int32, one) + work.q_first)
    shared.mail.index(at + 4).store(gl.full([1], 0, gl.int32, one) + work.q_length)
    shared.mail.index(at + 5).store(gl.full([1], 0, gl.int32, one) + work.k_first)
    shared.mail.index(at + 6).store(gl.full([1], 0, gl.int32, one) + work.k_length)
    shared.mail.index(at + 7).store(gl.full([1], 0, gl.int32, one) + work.split)
    mbarrier.arrive(shared.mail_full.index(box), count=1)
    return following(box, phase, BOXES)


@gluon.jit
def read(box, shared):
    """Read the message in a box."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = box * FIELDS
    return Work(
        gl.max(shared.mail.index(at).load(one), 0),
        gl.max(shared.mail.index(at + 1).load(one), 0),
        gl.max(shared.mail.index(at + 2).load(one), 0),
        gl.max(shared.mail.index(at + 3).load(one), 0),
        gl.max(shared.mail.index(at + 4).load(one), 0),
        gl.max(shared.mail.index(at + 5).load(one), 0),
        gl.max(shared.mail.index(at + 6).load(one), 0),
        gl.max(shared.mail.index(at + 7).load(one), 0),
    )
