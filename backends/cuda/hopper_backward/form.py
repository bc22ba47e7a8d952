"""What the pieces of the Hopper backward share: Form, the constants of a compilation, and the records passed on."""

# No `from __future__ import annotations`: Triton's aggregates read the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.gluon_names import aggregate


@aggregate
class BackwardForm:
    """What is compiled in. Everything is a constant.

    ROWS, KEYS, DIM, STAGES  query rows and keys of a tile, padded head dimension, buffers of a loop's loads
    MESSAGES  number of parts in which a tile of dQ is added to memory; 0: another kernel computes dQ
    LATE      dQ of a tile is computed during the next tile's exponentials
    STAGGER   query tiles between the first tiles of a head's neighbouring blocks, so that they add to other parts of dQ
    TURNS     blocks add to a tile of dQ in the order of their keys (warpgroup_ping_pong.py): deterministic
    GROUPED   query heads share a key head
    RIGHT, LEFT   queries see keys up to `right` after, and from `left` before, their own position
    TOP_LEFT      query i's position is key i; otherwise the last query's is the last key
    RAGGED        the last key tile is not full
    VARYING       "none", "packed" (first rows of sequences are given) or "padded" (their lengths are), "padded_q" or
                  "padded_k" (lengths of queries or keys only)
    EDGES         the tensors may have rows that attend nothing or follow a sequence's last row: tiles that mix them
                  with others come from copies without them
    UNSEEN        the tensor may have keys that no query sees
    """

    ROWS: gl.constexpr
    KEYS: gl.constexpr
    DIM: gl.constexpr
    STAGES: gl.constexpr
    MESSAGES: gl.constexpr
    LATE: gl.constexpr
    STAGGER: gl.constexpr
    TURNS: gl.constexpr
    GROUPED: gl.constexpr
    RIGHT: gl.constexpr
    LEFT: gl.constexpr
    TOP_LEFT: gl.constexpr
    RAGGED: gl.constexpr
    VARYING: gl.constexpr
    EDGES: gl.constexpr
    UNSEEN: gl.constexpr
    MASKED: gl.constexpr  # some tile needs a mask
    BESIDE: (
        gl.constexpr
    )  # the two warp groups have half the columns each, not half the keys: products read shared memory
    SCORES: gl.constexpr  # layouts: of transposed scores [KEYS, ROWS],
    WEIGHTS: gl.constexpr  # of those as an operand in registers,
    SUMS: gl.constexpr  # of dK and dV [KEYS, DIM],
    QUERIES: gl.constexpr  # of dQ [ROWS, DIM]

    @gluon.constexpr_function
    def __init__(self, ROWS, KEYS, DIM, STAGES, MESSAGES, LATE, STAGGER, TURNS, GROUPED, RIGHT, LEFT, TOP_LEFT,
                 RAGGED, VARYING, EDGES, UNSEEN):  # fmt: skip
        self.ROWS, self.KEYS, self.DIM, self.STAGES = map(gl.constexpr, (ROWS, KEYS, DIM, STAGES))
        self.MESSAGES, self.LATE, self.STAGGER = map(gl.constexpr, (MESSAGES, LATE, STAGGER))
        self.TURNS, self.GROUPED = map(gl.constexpr, (TURNS, GROUPED))
        self.RIGHT, self.LEFT = map(gl.constexpr, (RIGHT, LEFT))
        self.TOP_LEFT, self.RAGGED, self.VARYING = map(gl.constexpr, (TOP_LEFT, RAGGED, VARYING))
        self.EDGES, self.UNSEEN = map(gl.constexpr, (EDGES, UNSEEN))
        self.MASKED = gl.constexpr(RIGHT or LEFT or RAGGED or UNSEEN)
        beside = KEYS == 64
        self.BESIDE = gl.constexpr(beside)
        warps, share = ([4, 2], 2) if beside else ([8, 1], 1)
        sums = gl.NVMMADistributedLayout([3, 0], warps, [16, DIM // share, 16])
        self.SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps, [16, ROWS // share, 16]))
        self.WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2))
        self.SUMS = gl.constexpr(sums)
        self.QUERIES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16]))


@aggregate
class BackwardSharedMemory:
    """What lies in shared memory."""

    q: gl.shared_memory_descriptor  # [STAGES][1, 1, ROWS, DIM]
    do: gl.shared_memory_descriptor  # [STAGES][1, 1, ROWS, DIM]
    k: gl.shared_memory_descriptor  # [1, 1, KEYS, DIM]
    v: gl.shared_memory_descriptor  # [1, 1, KEYS, DIM]
    statistics: gl.shared_memory_descriptor  # [STAGES][2, ROWS] float32: LSE in powers of 2, delta
    p: gl.shared_memory_descriptor  # [KEYS, ROWS], where warp groups have half the columns each
    ds: gl.shared_memory_descriptor  # [KEYS, ROWS]
    dq: gl.shared_memory_descriptor  # [DIM/4, 256] float32, in the order of `put`
    kv_full: gl.shared_memory_descriptor  # [2] mbarriers: K, V
    q_full: gl.shared_memory_descriptor  # [STAGES]: Q and the statistics
    do_full: gl.shared_memory_descriptor  # [STAGES]
    block: gl.shared_memory_descriptor  # [1] int32: the block's number, where blocks draw it (warpgroup_ping_pong.py)

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, statistics, p, ds, dq, kv_full, q_full, do_full, block):
        self.q, self.do, self.k, self.v, self.statistics, self.block = q, do, k, v, statistics, block
        self.p, self.ds, self.dq, self.kv_full, self.q_full, self.do_full = p, ds, dq, kv_full, q_full, do_full


@aggregate
class BackwardSizes:
    """The numbers of the call.

    lengths_q, lengths_k  (B,) int32 lengths, or (B + 1,) int32 first rows of packed sequences; else anything
    """

    lengths_q: gl.tensor
    lengths_k: gl.tensor
    batches: gl.tensor
    heads: gl.tensor  # heads whose tiles are numbered: key heads, or query heads in the kernel of dQ
    share: gl.tensor  # query heads of a key head
    seq_q: gl.tensor  # rows of the query tensor
    seq_k: gl.tensor  # rows of the key tensor
    left: gl.tensor
    right: gl.tensor
    tiles: gl.tensor  # the kernel's own tiles of a head of a sequence; of a head of all packed ones
    query_tiles: gl.tensor  # the same of 64 query rows, by which the statistics and dQ's sums are stored
    together: gl.tensor  # causal or packed: heads that are worked on at a time

    @gluon.constexpr_function
    def __init__(self, lengths_q, lengths_k, batches, heads, share, seq_q, seq_k, left, right, tiles, query_tiles,
                 together):  # fmt: skip
        self.lengths_q, self.lengths_k, self.batches, self.heads = lengths_q, lengths_k, batches, heads
        self.share, self.seq_q, self.seq_k, self.left, self.right = share, seq_q, seq_k, left, right
        self.tiles, self.query_tiles, self.together = tiles, query_tiles, together


@aggregate
class BackwardWork:
    """What a block works on. Rows and keys count from the sequence's first."""

    start: gl.tensor  # first key of the block, or first query row in the kernel of dQ
    rows: gl.tensor  # rows to be written from there on; none or fewer: no block
    head: gl.tensor
    slot: gl.tensor  # of the first axis of the tensors
    sequence: gl.tensor
    q_first: gl.tensor  # row of the tensors at which the sequence begins
    q_length: gl.tensor
    k_first: gl.tensor
    k_length: gl.tensor
    tile: gl.tensor  # number of the sequence's first tile of 64 query rows among a head's

    @gluon.constexpr_function
    def __init__(self, start, rows, head, slot, sequence, q_first, q_length, k_first, k_length, tile):
        self.start, self.rows, self.head, self.slot, self.sequence = start, rows, head, slot, sequence
        self.q_first, self.q_length, self.k_first, self.k_length = q_first, q_length, k_first, k_length
        self.tile = tile


@aggregate
class Tiles:
    """Query tiles that see a block's keys: [begin, end), of which [clean, unclean) need no mask."""

    begin: gl.tensor
    clean: gl.tensor
    unclean: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, begin, clean, unclean, end):
        self.begin, self.clean, self.unclean, self.end = begin, clean, unclean, end


@aggregate
class BackwardState:
    """Between two steps of a loop over query tiles."""

    s: gl.tensor  # the tile's scores, complete; with plain steps anything
    dk: gl.tensor  # [KEYS, DIM] float32
    dv: gl.tensor  # [KEYS, DIM] float32
    slot: gl.tensor  # of the buffers
    phase: gl.tensor

    @gluon.constexpr_function
    def __init__(self, s, dk, dv, slot, phase):
        self.s, self.dk, self.dv, self.slot, self.phase = s, dk, dv, slot, phase
