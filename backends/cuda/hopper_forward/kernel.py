"""Attention forward for sm_90a, explicitly scheduled in Gluon (Triton 3.6 and later).

A persistent block per multiprocessor draws tiles of GROUPS × 64 query rows of one head, until none are left:

    producer     one warp: says which tile is next, and brings Q, then tile after tile of K and V, through TMA
    dequantizer  four warps, over quantised pages: convert the bytes of K and V to numbers that consumers multiply
    consumer w   one warp group, w = 0 .. GROUPS - 1: 64 of the rows, over their keys from the last tile to the first

A consumer's step has two products under way while it computes a softmax: this tile's scores and the tile before's
values. So a tile's probabilities are held over the edge of the loop. Consumers may issue their products in turns, and
then one is in its softmax while another has the tensor cores. The idea of both is FlashAttention-3's (arXiv 2407.08608,
section 3); which of the choices below helps depends on the head and on the mask, and is tuned (tuning/sm_90.toml).

Key tiles that some row does not see whole are masked, in loops of their own. Values that no row of the sequence may
see (behind its last key, before its first window) are cleared in shared memory: their weight is 0, and 0·NaN is NaN.

TMA brings the bytes of quantised pages as they are: a tile of keys and a tile of values have room as bytes beside the
buffers. The dequantizer reads them part by part, each lane 8 numbers of a row, converts them, and stores them to a
buffer as TMA would have; the bytes of the next tile come during a whole step of the consumers. Keys get the queries'
dtype. Values are float16, which holds every number of the formats exactly, at half the conversions that bfloat16 costs,
and probabilities are rounded to it. Scales of a head are factors on the scores and on the output.
"""

# No `from __future__ import annotations`: Triton reads the annotations of constants.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from portattn.backends.cuda.gluon_names import argument_or, load, reinterpreted, sync
from portattn.backends.cuda.hopper_forward import GROUP_ROWS
from portattn.backends.cuda.hopper_forward.block_lists import first_tile, listed_tile
from portattn.backends.cuda.hopper_forward.consumer import consume
from portattn.backends.cuda.hopper_forward.fragments import (
    following,
    function_tensors,
    list_of,
    score_function,
)
from portattn.backends.cuda.hopper_forward.low_precision_products import transposed_first
from portattn.backends.cuda.hopper_forward.products import FREE
from portattn.backends.cuda.hopper_forward.tile_scheduler import (
    BOXES,
    FIELDS,
    Form,
    ForwardSharedMemory,
    Sizes,
    Work,
    read,
    send,
    tile_keys,
    work_of,
)
from portattn.kernels.tiles import let_next_kernel_begin


@gluon.jit
def _piece(n, j: gl.constexpr, length, form):
    """The number, among a sequence's, of key tile n's piece j. After the last one with a key the last one again: the
    table has no page there, and what is brought is masked."""
    return gl.minimum(n * form.PIECES + j, gl.maximum(length - 1, 0) // form.PIECE)


@gluon.jit
def pages_of(table, n, length, form):
    """Load the pages of key tile n's pieces. A missing one is brought as zeros. A contiguous cache is its slot."""
    if form.TABLE:
        pages = (gl.load(table + _piece(n, 0, length, form) // (form.PAGE // form.PIECE)),)
    else:
        pages = (table,)
    for j in gl.static_range(1, form.PIECES):
        page = gl.load(table + _piece(n, j, length, form) // (form.PAGE // form.PIECE))
        pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005  # Triton takes no other way to add to one
    return pages


@gluon.jit
def bring(desc, pages, n, length, head, barrier, buffers, slot, count: gl.constexpr, form):
    """Bring key tile n, piece by piece, into one of `count` buffers; the loads arrive at one barrier.

    A tile in shared memory is its blocks of 128 bytes of columns one after the other, each its rows one after the
    other, in patterns of 8 rows. So a piece of a block is whole patterns side by side, and an array of pieces has the
    tile's bytes.
    """
    parts: gl.constexpr = form.DIM // form.WIDE
    each: gl.constexpr = parts * form.PIECES
    shape: gl.constexpr = [count * each, 1, 1, form.PIECE, form.WIDE]
    if form.PIECES > 1:
        buffers = reinterpreted(buffers, buffers.dtype, shape, desc.layout)
    for j in gl.static_range(form.PIECES):
        if form.TABLE:
            row = _piece(n, j, length, form) % (form.PAGE // form.PIECE) * form.PIECE
        else:
            row = n * form.KEYS
        for c in gl.static_range(parts):
            place = buffers.index(slot * each + c * form.PIECES + j)
            load(desc, [pages[j], head, row, c * form.WIDE], barrier, place)


@gluon.jit
def bring_raw(desc, pages, n, length, head, place: gl.constexpr, phase, shared, form):
    """Bring key tile n of quantised keys (place 0) or values (1)."""
    full = shared.raw_full.index(place)
    mbarrier.wait(shared.raw_free.index(place), phase)
    mbarrier.expect(full, form.KEYS * form.DIM)
    bring(desc, pages, n, length, head, full, shared.raw, place, 2, form)


_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)


@gluon.jit
def draw_tile(counter, tiles):
    """Draw the number of the next tile. A launch's very last draw resets the counter to 0 for the next one."""
    blocks = gl.num_programs(0)
    tile = gl.atomic_add(counter, 1) + blocks
    if tile == tiles + blocks - 1:
        gl.store(counter, 0)
    return tile


@gluon.jit
def _produce(q_desc, k_desc, v_desc, counter, page_table, table_stride, sizes, shared, form):
    """Load the tiles of queries, keys and values."""
    tiles = sizes.row_tiles * sizes.heads
    if not form.PACKED:
        tiles *= sizes.batches
    if form.SPLIT:
        tiles *= sizes.splits
    slot, box, box_phase = 0, 0, 1
    buffer, q_phase, raw_phase = 0, 1, 1
    tile = gl.program_id(0)
    while tile < tiles:
        work = work_of(tile, sizes, form)
        if work.row < 0:
            tile = draw_tile(counter, tiles)
        else:
            box, box_phase = send(work, box, box_phase, shared, form)
            begin, end, _some = tile_keys(work, sizes, form)
            kv_head = work.head // sizes.share
            if form.TABLE:
                table = page_table + work.k_first.to(gl.int64) * table_stride
            else:
                table = work.slot
            if form.LISTED_K:
                count = gl.cdiv(sizes.seq_k, form.LISTED_K)
                blocks = list_of(work.slot, work.head, work.row, sizes, form)
                listed = first_tile(work, sizes, form)
            for n in range(end - 1, begin - 1, -1):
                if form.PAGE:  # asked for here, they come while the buffers are waited for
                    pages = pages_of(table, n, work.k_length, form)
                elif form.LISTED_K:  # asked for a step ahead
                    key = listed * form.KEYS
                    listed = listed_tile(blocks, gl.maximum(n - 1, 0), work.k_first, count, form)
                else:
                    key = work.k_first + n * form.KEYS
                if form.DEQUANTIZE:
                    bring_raw(k_desc, pages, n, work.k_length, kv_head, 0, raw_phase, shared, form)
                else:
                    sync(FREE + slot, form.PARTY)
                    k_full = shared.k_full.index(slot)
                    mbarrier.expect(k_full, form.KEYS * form.DIM * form.BYTES)
                    if form.PAGE:
                        bring(k_desc, pages, n, work.k_length, kv_head, k_full, shared.k, slot, form.STAGES, form)
                    else:
                        load(k_desc, [work.slot, kv_head, key, 0], k_full, shared.k.index(slot))
                if n == end - 1:
                    for w in gl.static_range(form.GROUPS):
                        q_row = work.q_first + work.row + w * form.LINES
                        place = buffer * form.GROUPS + w
                        q_full = shared.q_full.index(place)
                        mbarrier.wait(shared.q_free.index(place), q_phase)
                        mbarrier.expect(q_full, _ROWS * form.DIM * form.BYTES)
                        if form.PAGE:
                            load(q_desc, [work.slot, q_row, work.head * form.HEADS, 0], q_full, shared.q.index(place))
                        else:
                            load(q_desc, [work.slot, work.head, q_row, 0], q_full, shared.q.index(place))
                    buffer, q_phase = following(buffer, q_phase, form.QUERIES)
                # Late, so that what is left goes to who is free; not later, as it takes a tile's time, of lists two.
                if n == (gl.minimum(begin + 1, end - 1) if form.LISTED_K else begin):
                    tile = draw_tile(counter, tiles)
                if form.DEQUANTIZE:
                    bring_raw(v_desc, pages, n, work.k_length, kv_head, 1, raw_phase, shared, form)
                    raw_phase ^= 1
                else:
                    sync(FREE + form.STAGES + slot, form.PARTY)
                    v_full = shared.v_full.index(slot)
                    mbarrier.expect(v_full, form.KEYS * form.DIM * form.V_BYTES)
                    if form.PAGE:
                        bring(v_desc, pages, n, work.k_length, kv_head, v_full, shared.v, slot, form.STAGES, form)
                    elif form.FP8:
                        key = transposed_first(work, form) + n * form.KEYS
                        load(v_desc, [work.slot, kv_head, 0, key], v_full, shared.v.index(slot))
                    else:
                        load(v_desc, [work.slot, kv_head, key, 0], v_full, shared.v.index(slot))
                slot += 1
                if slot == form.STAGES:
                    slot = 0
    none = Work(tile - tile - 1, tile, tile, tile, tile, tile, tile, tile)
    send(none, box, box_phase, shared, form)
    if not form.DEQUANTIZE:
        for j in gl.static_range(2 * form.STAGES):  # the last arrivals, for which nothing is loaded
            sync(FREE + j, form.PARTY)


_PART = 8192  # bytes that the warps convert at a time: 16 registers of a lane

# Four numbers, the first lowest, to two pairs.
_PAIRS = {
    "e4m3": "cvt.rn.f16x2.e4m3x2 {0}, low; cvt.rn.f16x2.e4m3x2 {1}, high;",
    "e5m2": "cvt.rn.f16x2.e5m2x2 {0}, low; cvt.rn.f16x2.e5m2x2 {1}, high;",
}
# A pair of float16 to one of bfloat16, which holds every number of the formats too.
_BFLOAT = "mov.b32 {{a, b}}, {0}; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 {1}, y, x;"


def _code(kind: str, bfloat: bool) -> str:
    lines = ["{", ".reg .b16 low, high, a, b; .reg .b32 first, second; .reg .f32 x, y;", "mov.b32 {low, high}, $2;"]
    lines.append(_PAIRS[kind].format(*("first", "second") if bfloat else ("$0", "$1")))
    if bfloat:
        lines += [_BFLOAT.format("first", "$0"), _BFLOAT.format("second", "$1")]
    return "\n".join([*lines, "}"])


_CODE = {(kind, bfloat): _code(kind, bfloat) for kind in _PAIRS for bfloat in (False, True)}


@gluon.constexpr_function
def _converter(form, dtype):
    return _CODE[form.FORMAT.value, dtype == gl.bfloat16]


@gluon.constexpr_function
def _word_layout(form):
    """Return the layout of a tile's words of four numbers: two to a lane, which then stores 16 bytes."""
    lanes = form.DIM.value // 8
    return gl.BlockedLayout([1, 2], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def _part_rows(form):
    return min(_PART // form.DIM.value, form.KEYS.value)


@gluon.constexpr_function
def _byte_layout(form):
    """Return the layout of a tile of bytes that several loads bring."""
    return gl.NVMMASharedLayout(min(form.DIM.value, 128), 8, 4)


@gluon.jit
def _dequantize_tile(place: gl.constexpr, buffers, slot, full, shared, form):
    """Convert the tile of keys (place 0) or values (1) to the dtype of a buffer, store it and arrive at its barrier."""
    code: gl.constexpr = _converter(form, buffers.dtype)
    rows: gl.constexpr = _part_rows(form)
    words: gl.constexpr = _word_layout(form)
    quads: gl.constexpr = gl.NVMMASharedLayout(min(form.DIM, 128), 32, 2)
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    source = reinterpreted(shared.raw, gl.int32, [2, form.KEYS, form.DIM // 4], quads).index(place)
    target = reinterpreted(buffers, gl.int32, [form.STAGES, form.KEYS, form.DIM // 2], pairs).index(slot)
    for part in gl.static_range(form.KEYS // rows):
        held = source.slice(part * rows, rows, dim=0).load(words)
        first, second = gl.inline_asm_elementwise(
            code, "=r,=r,r", [held], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        found = gl.reshape(gl.join(first, second), [rows, form.DIM // 2])
        target.slice(part * rows, rows, dim=0).store(found)
    fence_async_shared()
    mbarrier.arrive(full.index(slot), count=1)
    mbarrier.arrive(shared.raw_free.index(place), count=1)


@gluon.jit
def _dequantize(sizes, shared, form):
    """Dequantize the key tiles of each tile of rows, as the producer brings them."""
    slot, phase, box, box_phase = 0, 0, 0, 0
    mbarrier.wait(shared.mail_full.index(box), box_phase)
    work = read(box, shared)
    while work.row >= 0:
        begin, end, _some = tile_keys(work, sizes, form)
        mbarrier.arrive(shared.mail_free.index(box), count=1)
        for _ in range(end - begin):
            sync(FREE + slot, form.PARTY)
            mbarrier.wait(shared.raw_full.index(0), phase)
            _dequantize_tile(0, shared.k, slot, shared.k_full, shared, form)
            sync(FREE + form.STAGES + slot, form.PARTY)
            mbarrier.wait(shared.raw_full.index(1), phase)
            _dequantize_tile(1, shared.v, slot, shared.v_full, shared, form)
            phase ^= 1
            slot += 1
            if slot == form.STAGES:
                slot = 0
        box, box_phase = following(box, box_phase, BOXES)
        mbarrier.wait(shared.mail_full.index(box), box_phase)
        work = read(box, shared)
    for j in gl.static_range(2 * form.STAGES):  # the last arrivals, for which nothing is loaded
        sync(FREE + j, form.PARTY)


@gluon.jit(
    do_not_specialize=[
        "scale", "softcap", "stride_h", "stride_s", "batches", "heads", "share", "seq_q", "seq_k", "left", "right",
        "row_tiles", "together", "splits", "table_stride", "q_scale_b", "q_scale_h", "k_scale_b", "k_scale_h",
        "v_scale_b", "v_scale_h", "q_scale_s", "k_scale_s", "tree_stride", "list_b", "list_h", "list_q", "shown_b",
        "shown_h", "size_0", "size_1", "size_2", "size_3", "size_4", "size_5", "size_6", "size_7",
    ]
)  # fmt: skip
def scheduled_forward(
    q_desc, k_desc, v_desc, o_desc, out, lse, sinks, lengths_q, lengths_k, page_table, counter,
    scale, softcap, stride_h, stride_s, batches, heads, share, seq_q, seq_k, left, right, row_tiles, together,
    splits, table_stride, q_scale, k_scale, v_scale, q_scale_b, q_scale_h, k_scale_b, k_scale_h, v_scale_b, v_scale_h,
    q_scale_s, k_scale_s, tree_mask, tree_stride, lists, list_b, list_h, list_q, shown, shown_b, shown_h,
    captured_0, captured_1, captured_2, captured_3,
    size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    GROUPS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    LEFT: gl.constexpr, TOP_LEFT: gl.constexpr, RAGGED: gl.constexpr, VARYING: gl.constexpr, UNSEEN: gl.constexpr,
    SOFTCAP: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr, EARLY: gl.constexpr,
    PAIRS: gl.constexpr, OWN_OUT: gl.constexpr, QUERIES: gl.constexpr, REG_Q: gl.constexpr, PARTS: gl.constexpr,
    PAGE: gl.constexpr, HEADS: gl.constexpr, FP8: gl.constexpr, COLUMNS: gl.constexpr, USED: gl.constexpr,
    KEPT: gl.constexpr, HALVED: gl.constexpr, INT8: gl.constexpr, SIDE: gl.constexpr, LAZY: gl.constexpr,
    FORMAT: gl.constexpr, TREE: gl.constexpr, SCORE_MOD: gl.constexpr, LISTED_Q: gl.constexpr, LISTED_K: gl.constexpr,
    MASK_MOD: gl.constexpr, CONSUMER: gl.constexpr, PRODUCER: gl.constexpr, DEQUANTIZER: gl.constexpr,
):  # fmt: skip
    """A persistent block. The number of blocks is anything up to the number of tiles.

    q_desc, k_desc, v_desc, o_desc  (B, H, S, D) by blocks of 64, KEYS, KEYS and 64 rows and DIM columns, of o_desc
          DIM/PARTS; packed tensors are one batch. Over caches q and out are (B, S, H, D) by blocks of LINES and HEADS,
          k and v are (pages, H, PAGE, D), contiguous (B, H, S, D), by blocks of PIECE rows and WIDE columns
    out, stride_h, stride_s  the output again, and its strides in steps of 8 elements, for the last rows of packed
          sequences
    splits  blocks that share a tile's keys; with SPLIT `out` is (splits, B, Hq, Sq, DIM) float32 partial results, and
          `lse`, which must be there, (splits, B, Hq, Sq); packed queries, of a cache alone, are one batch
    lse   (B, Hq, Sq) float32, or None; sinks (Hq,) or None
    lengths_q, lengths_k  as VARYING says: (B,) lengths or (B + 1,) first rows, int32; None for those that are not given
    page_table, table_stride  (B, pages a sequence) int32 by rows so far apart; None without a table. What a length does
          not reach is not read
    q_scale, k_scale, v_scale, and their strides  (B, Hk) float32 with FP8, or None. Then q, k and v are bytes of e4m3
          numbers, and v_desc is of (B, H, DIM, S) by blocks of DIM and KEYS, in the order of auxiliary_kernels.py. With
          INT8 q_scale and k_scale are (B, Hq, Sq) and (B, Hk, Sk), packed (1, H, T). With a FORMAT k and v are bytes
          of its numbers, and have scales alone
    tree_mask, tree_stride  with TREE (B, Sq) int64 words by rows so far apart, of packed queries one row; else None
    counter  one int32, which is 0 and is left at 0; two launches that may overlap must not share it
    scale    the softmax scale times log2(e), positive; with SOFTCAP scale/softcap, with SCORE_MOD the scale alone
    lists, list_b, list_h, list_q  with LISTED_K (B, Hq, blocks of queries, 2 + blocks of keys) int32 by these strides
    shown, shown_b, shown_h  with MASK_MOD what find_hidden_keys (block_lists.py) found
    SCORE_MOD, MASK_MOD  None, or the source of a function of scores or of a mask (kernels/score_program.py)
    captured_0, …, size_0, …  the tensors that the functions read, and their sizes, or None
    softcap  with SOFTCAP log2(e)·softcap
    CONSUMER, PRODUCER, DEQUANTIZER  registers of a thread. The other constants: Form
    """
    form = Form(GROUPS, KEYS, DIM, STAGES, RIGHT, LEFT, TOP_LEFT, RAGGED, VARYING, UNSEEN, SOFTCAP, SPLIT, TURNS, LATE,
                EARLY, PAIRS, OWN_OUT, QUERIES, REG_Q, PARTS, PAGE, HEADS, k_desc.block_shape[2],
                k_desc.block_shape[3], FP8, k_scale is not None, COLUMNS, USED, KEPT, HALVED, INT8,
                SIDE, LAZY, FORMAT, TREE, page_table is not None, score_function(SCORE_MOD), LISTED_Q, LISTED_K,
                score_function(MASK_MOD))  # fmt: skip
    if SPLIT:
        let_next_kernel_begin()
    gl.static_assert(FORMAT == "as_q" or (PAGE > 0 and GROUPS == 2))
    gl.static_assert(not TREE or (PAGE > 0 and not LEFT))
    gl.static_assert(not (FP8 or INT8) or (OWN_OUT and PAGE == 0))
    gl.static_assert(SCORE_MOD is None or not (FP8 or INT8 or PAGE or SOFTCAP or form.PACKED))
    gl.static_assert(not LISTED_K or not (FP8 or INT8 or PAGE or SPLIT or RIGHT or LEFT or VARYING != "none"))
    gl.static_assert(not LISTED_K or (LISTED_Q % (GROUPS * _ROWS) == 0 and LISTED_K % KEYS == 0))
    gl.static_assert(MASK_MOD is None or LISTED_K > 0)
    gl.static_assert(not INT8 or not (FP8 or SOFTCAP))
    gl.static_assert(not FP8 or not LAZY, "weights of e4m3 have no room above 2^SHIFT")
    gl.static_assert((COLUMNS == DIM and USED == DIM) or (FP8 and DIM == 4 * COLUMNS and USED >= 3 * COLUMNS))
    gl.static_assert(not HALVED or (FP8 and KEPT and COLUMNS == DIM))
    gl.static_assert(OWN_OUT or (not REG_Q and PARTS == 1), "the next queries come to where the output would be staged")
    dtype: gl.constexpr = q_desc.dtype
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    queries: gl.constexpr = QUERIES * GROUPS
    lines: gl.constexpr = form.LINES if PAGE else 1
    last: gl.constexpr = HEADS if PAGE else _ROWS
    k_layout: gl.constexpr = form.TILE if form.PIECES > 1 or form.DEQUANTIZE else k_desc.layout
    v_dtype: gl.constexpr = gl.float16 if form.DEQUANTIZE else dtype
    q_smem = gl.allocate_shared_memory(dtype, [queries, 1, lines, last, DIM], q_desc.layout)
    if OWN_OUT:
        o_smem = gl.allocate_shared_memory(o_desc.dtype, [GROUPS, 1, lines, last, DIM // PARTS], o_desc.layout)
    else:
        o_smem = q_smem
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, DIM], k_layout)
    if FP8:
        v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, DIM, KEYS], v_desc.layout)
    elif INT8:
        v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, KEYS, DIM], v_desc.layout)
    else:
        v_smem = gl.allocate_shared_memory(v_dtype, [STAGES, 1, 1, KEYS, DIM], k_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    raw_smem, raw_full, raw_free = k_smem, k_full, k_full  # not used
    if form.DEQUANTIZE:
        raw_layout: gl.constexpr = _byte_layout(form) if form.PIECES > 1 else k_desc.layout
        raw_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, KEYS, DIM], raw_layout)
        raw_full = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
        raw_free = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    shared = ForwardSharedMemory(
        q_smem,
        k_smem,
        v_smem,
        o_smem,
        gl.allocate_shared_memory(gl.int64, [queries, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [queries, 1], barriers),
        k_full,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        raw_smem,
        raw_full,
        raw_free,
        gl.allocate_shared_memory(gl.int32, [BOXES * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [BOXES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [BOXES, 1], barriers),
    )
    for j in gl.static_range(queries):
        mbarrier.init(shared.q_full.index(j), count=1)
        mbarrier.init(shared.q_free.index(j), count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(j), count=1)
        mbarrier.init(shared.v_full.index(j), count=1)
    if form.DEQUANTIZE:
        for j in gl.static_range(2):
            mbarrier.init(shared.raw_full.index(j), count=1)
            mbarrier.init(shared.raw_free.index(j), count=1)
    for j in gl.static_range(BOXES):
        mbarrier.init(shared.mail_full.index(j), count=1)
        mbarrier.init(shared.mail_free.index(j), count=GROUPS + form.DEQUANTIZE)
    fence_async_shared()
    if lengths_q is None:
        lengths_q = counter  # not read
    if lengths_k is None:
        lengths_k = counter
    if tree_mask is None:
        tree_mask, tree_stride = counter, splits
    n = splits
    tensors = function_tensors(captured_0, captured_1, captured_2, captured_3, size_0, size_1, size_2, size_3, size_4,
                               size_5, size_6, size_7, counter, n)  # fmt: skip
    sizes = Sizes(lengths_q, lengths_k, batches, heads, share, seq_q, seq_k, left, right, row_tiles, together, splits,
                  tree_mask, tree_stride, tensors, argument_or(lists, counter), argument_or(list_b, n),
                  argument_or(list_h, n), argument_or(list_q, n), argument_or(shown, counter),
                  argument_or(shown_b, n), argument_or(shown_h, n))  # fmt: skip
    scales = (
        q_scale, q_scale_b, q_scale_h, k_scale, k_scale_b, k_scale_h, v_scale, v_scale_b, v_scale_h, q_scale_s,
        k_scale_s,
    )  # fmt: skip
    if form.DEQUANTIZE:
        gl.warp_specialize(
            [
                (
                    consume,
                    (o_desc, out, lse, sinks, stride_h, stride_s, scale, softcap, scales, sizes, shared, 0, form),
                ),
                (
                    consume,
                    (o_desc, out, lse, sinks, stride_h, stride_s, scale, softcap, scales, sizes, shared, 1, form),
                ),
                (_dequantize, (sizes, shared, form)),
                (_produce, (q_desc, k_desc, v_desc, counter, page_table, table_stride, sizes, shared, form)),
            ],
            [4, 4, 1],
            [CONSUMER, DEQUANTIZER, PRODUCER],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    consume,
                    (o_desc, out, lse, sinks, stride_h, stride_s, scale, softcap, scales, sizes, shared, 0, form),
                ),
                (
                    consume,
                    (o_desc, out, lse, sinks, stride_h, stride_s, scale, softcap, scales, sizes, shared, 1, form),
                ),
                (_produce, (q_desc, k_desc, v_desc, counter, page_table, table_stride, sizes, shared, form)),
            ],
            [4, 1],
            [CONSUMER, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consume,
                    (o_desc, out, lse, sinks, stride_h, stride_s, scale, softcap, scales, sizes, shared, 0, form),
                ),
                (
                    consume,
                    (o_desc, out, lse, sinks, stride_h, stride_s, scale, softcap, scales, sizes, shared, 1, form),
                ),
                (
                    consume,
                    (o_desc, out, lse, sinks, stride_h, stride_s, scale, softcap, scales, sizes, shared, 2, form),
                ),
                (_produce, (q_desc, k_desc, v_desc, counter, page_table, table_stride, sizes, shared, form)),
            ],
            [4, 4, 1],
            [CONSUMER, CONSUMER, PRODUCER],
        )
