"""What the Hopper forward's pieces share: Form, the constants of a compilation, and the records that they pass on."""

# No `from __future__ import annotations`: Triton's aggregates read the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.gluon_names import aggregate
from portattn.backends.cuda.sizes import GROUP_ROWS


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
    PAGE          tokens of a page of keys, a multiple of 16; 0 without pages
    HEADS         query heads of one key head whose rows a tile has, side by side: a power of two; over pages
    PIECE, WIDE   keys and columns of one load: all of a tile's without pages
    FP8           q, k, v and probabilities are e4m3; V is transposed (transposed.py). With OWN_OUT, not over pages
    SCALED        with FP8: there are scales
    COLUMNS       with FP8: columns of a product of values; fewer than DIM if sums of all do not fit (head_dim_split.py)
    USED          with fewer COLUMNS: DIM without the parts that are all padding; else DIM
    KEPT          with FP8: keys' buffers are returned after the exponentials, not after the scores
                  (fp8_forward.returned)
    HALVED        with KEPT: the preceding tile's values are added between the exponentials of a tile's halves
                  (fp8_softmax_overlap.py)
    INT8          q and k are int8, with a scale for each row (int8_forward.py); v and probabilities of 16 bits. With
                  OWN_OUT, not over pages, without SOFTCAP
    SIDE          with INT8: scales of keys lie side by side
    LAZY          the accumulator is rescaled only if a row's maximum has grown much (lazy_rescale.py); not with FP8
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
    BLOCKS: gl.constexpr  # with INT8: a tile's keys may be two blocks, whose tokens share a scale each
    BYTES: gl.constexpr  # of a number of q and k,
    V_BYTES: gl.constexpr  # and of v
    PACKED: gl.constexpr  # queries of all sequences lie one after the other
    LINES: gl.constexpr  # queries of a warp group: its rows, by HEADS
    PIECES: gl.constexpr  # of a tile's keys
    PARTY: gl.constexpr  # threads that meet at FREE: the consumers and the producer
    SCORES: gl.constexpr  # layouts: of scores,
    OUTPUT: gl.constexpr  # of the accumulator,
    PART: gl.constexpr  # of COLUMNS of it,
    QROWS: gl.constexpr  # of Q as an operand in registers,
    PROBS: gl.constexpr  # of P as an operand,
    ROW: gl.constexpr  # of a vector with one element a row
    TILE: gl.constexpr  # of a tile of K or V that several loads bring

    @gluon.constexpr_function
    def __init__(self, GROUPS, KEYS, DIM, STAGES, RIGHT, LEFT, TOP_LEFT, RAGGED, VARYING, UNSEEN, SOFTCAP, SPLIT, TURNS,
                 LATE, EARLY, PAIRS, OWN_OUT, QUERIES, REG_Q, PARTS, PAGE, HEADS, PIECE, WIDE,
                 FP8, SCALED, COLUMNS, USED, KEPT, HALVED, INT8, SIDE, LAZY):  # fmt: skip
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
        self.BLOCKS = gl.constexpr(INT8 and SIDE and KEYS == 128)
        size, deep, wide = (1, 32, 4) if FP8 else (2, 16, 2)
        self.BYTES, self.V_BYTES = gl.constexpr(1 if INT8 else size), gl.constexpr(size)
        scores = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32 if INT8 else deep])
        output = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, deep])
        part = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, deep])
        self.PARTY = gl.constexpr(GROUPS * 128 + 32)
        self.SCORES, self.OUTPUT, self.PART = map(gl.constexpr, (scores, output, part))
        self.QROWS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=scores, k_width=4 if INT8 else wide))
        self.PROBS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=part, k_width=wide))
        self.ROW = gl.constexpr(gl.SliceLayout(1, scores))
        self.TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))


@aggregate
class ForwardSharedMemory:
    """What lies in shared memory."""

    q: gl.shared_memory_descriptor  # [QUERIES·GROUPS][1, 1, 64, DIM]; over pages [1, LINES, HEADS, DIM], the same bytes
    k: gl.shared_memory_descriptor  # [STAGES][1, 1, KEYS, DIM]
    v: gl.shared_memory_descriptor  # [STAGES][1, 1, KEYS, DIM]; with FP8 [1, 1, DIM, KEYS]
    out: gl.shared_memory_descriptor  # [GROUPS][1, 1, 64, DIM/PARTS]; over pages as q
    q_full: gl.shared_memory_descriptor  # [QUERIES·GROUPS] mbarriers
    q_free: gl.shared_memory_descriptor  # [QUERIES·GROUPS]
    k_full: gl.shared_memory_descriptor  # [STAGES]
    v_full: gl.shared_memory_descriptor  # [STAGES]
    mail: gl.shared_memory_descriptor  # [2·FIELDS][1] int32: two messages of the producer to the consumers
    mail_full: gl.shared_memory_descriptor  # [2]
    mail_free: gl.shared_memory_descriptor  # [2]

    @gluon.constexpr_function
    def __init__(self, q, k, v, out, q_full, q_free, k_full, v_full, mail, mail_full, mail_free):
        self.q, self.k, self.v, self.out = q, k, v, out
        self.q_full, self.q_free, self.k_full, self.v_full = q_full, q_free, k_full, v_full
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

    @gluon.constexpr_function
    def __init__(self, lengths_q, lengths_k, batches, heads, share, seq_q, seq_k, left, right, row_tiles, together,
                 splits):  # fmt: skip
        self.lengths_q, self.lengths_k, self.batches, self.heads, self.share = (
            lengths_q, lengths_k, batches, heads, share,
        )  # fmt: skip
        self.seq_q, self.seq_k, self.left, self.right = seq_q, seq_k, left, right
        self.row_tiles, self.together, self.splits = row_tiles, together, splits


@aggregate
class Work:
    """A tile of query rows. Rows and keys count from the sequence's first."""

    row: gl.tensor  # the tile's first; negative when there is no tile
    head: gl.tensor  # with HEADS: the number of its HEADS heads
    slot: gl.tensor  # of the first axis of the tensors
    q_first: gl.tensor  # row of the tensors at which the sequence begins
    q_length: gl.tensor
    k_first: gl.tensor  # as q_first; of pages the row of the page table
    k_length: gl.tensor  # -1 for rows of no sequence
    split: gl.tensor

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
    """A warp group's running result, and what the next step has to do for it."""

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
    """Where in the buffers a consumer is: this tile's, and that of the values that are not added yet."""

    slot: gl.tensor
    phase: gl.tensor
    v_slot: gl.tensor
    v_phase: gl.tensor

    @gluon.constexpr_function
    def __init__(self, slot, phase, v_slot, v_phase):
        self.slot, self.phase, self.v_slot, self.v_phase = slot, phase, v_slot, v_phase
