"""decode_split: a few query rows a sequence over a long cache, contiguous or paged, plain or latent. block_forward:
each query row over the blocks of keys that it lists for a key/value head.

The rows of one key/value head's whole group are packed into one tile, so that the cache is read once. Where there
are fewer such tiles than cores, the keys are split over programs, and combine.py merges the partial results.
"""

import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import (
    Dropout,
    KeyRows,
    LoopShape,
    Output,
    Pages,
    Query,
    Rows,
    Scales,
    ScoreMods,
    ScoreTerms,
    TileRange,
)
from portattn.kernels.attend import attend, in_chunk, kv_tile_range, listed_keys
from portattn.kernels.attend_packed16 import attend_packed16
from portattn.kernels.attend_packed16_swap_ab import attend_packed16_swap_ab
from portattn.kernels.combine import store_rows, with_sink
from portattn.kernels.dequantize import DS_GROUP, head_scale
from portattn.kernels.score_program import with_functions  # noqa: F401 - compilers look it up here
from portattn.kernels.softmax import init_softmax, tree_bits
from portattn.kernels.tiles import (
    let_next_kernel_begin,
    of_a_sequence,
    packed_bounds,
    packed_tile,
    row_source,
    sequence_bounds,
)


@records.jit(
    do_not_specialize=[
        "heads_k", "seq_q", "seq_k", "pages", "row_tiles", "splits", "tiles", "batches", "left", "right", "chunk",
        "size_0", "size_1", "size_2", "size_3", "size_4", "size_5", "size_6", "size_7",
    ]
)  # fmt: skip
def decode_split(
    q, q_rope, k, v, k_scale, v_scale, k_block_scale, v_block_scale, out, lse,
    seqlens_k, leftpad_k, cu_seqlens_q, page_table, indices, counts,
    alibi_slopes, sinks, bias, mask, tree_mask, captured_0, captured_1, captured_2, captured_3,
    scale, softcap,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    rope_stride_b, rope_stride_h, rope_stride_s, rope_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    k_scale_stride_b, k_scale_stride_h, k_scale_stride_s, v_scale_stride_b, v_scale_stride_h, v_scale_stride_s,
    k_block_scale_stride_b, k_block_scale_stride_h, k_block_scale_stride_s,
    v_block_scale_stride_b, v_block_scale_stride_h, v_block_scale_stride_s,
    o_stride_p, o_stride_b, o_stride_h, o_stride_s,
    table_stride_b, alibi_stride_b,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    tree_mask_stride_b,
    heads_k, seq_q, seq_k, pages, row_tiles, splits, tiles, batches, left, right, chunk,
    size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, LATENT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MAIN: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS_BY_KEY: tl.constexpr,
    MASK_BY_KEY: tl.constexpr, NEGATED: tl.constexpr, SEARCH: tl.constexpr,
    LOAD: tl.constexpr, K_TILE: tl.constexpr, BLOCK_ORDER: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, DOT_PRECISION: tl.constexpr, GRID: tl.constexpr, PAGE_LOOP: tl.constexpr,
    Q_OPERAND: tl.constexpr, PIPELINE: tl.constexpr, READS: tl.constexpr, KV_FORMAT: tl.constexpr,
    KV_SCALES: tl.constexpr, UNPACK: tl.constexpr, ALIGNED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    FOLLOWED: tl.constexpr, PER: tl.constexpr, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Attend one share of the keys for up to BLOCK_M packed rows of one key/value head: one program.

    Row r of a sequence is query r // GROUP of head r % GROUP in the group. Queries are (B, Hq, Sq, D), or with
    cu_seqlens_q packed: seq_q is then the rows of the packed tensor, seqlens_k is given, and leftpad_k is not.
    PAGE_SIZE: k and v are caches of `pages` pages, k_stride_b the distance between two, seq_k a sequence's capacity.
    LATENT: V is the first HEAD_DIM_V columns of K, and the columns of Q that go with the rest are in q_rope.
    indices: None, or with PAGE_LOOP "slots" a row for each query, the slots of its keys (tiles.is_key); counts has how
    many of its places count, or is None. The table's stride is that of indices.
    HEADS_FIRST: programs that are neighbours attend the same keys of neighbouring heads, which lie side by side.
    KV_FORMAT, KV_SCALES: how keys and values are stored, and what each of k_scale and v_scale belongs to (Problem's
    kv_format and kv_scales). The scales' strides are None where there are none. UNPACK: `bytes`, or how words of a
    quantised cache are widened (kernels/attend_packed16.py); its rows' addresses are then multiples of ALIGNED bytes.
    PER: numbers of a byte.
    FOLLOWED: a kernel that merges follows, which may begin before this one ends.
    k_block_scale, v_block_scale: of nvfp4 its blocks' scales, (…, D / 16) bytes whose last stride is 1, else None.
    SPLIT: `out` is (splits, B, Hq, Sq, Dv) float32 and `lse` (splits, B, Hq, Sq, 2) float32, the state of each row's
    softmax (store_state), to be merged. Otherwise `out` is the result and `lse` (B, Hq, Sq) may be None. Other
    optional arguments as in dense_forward.
    SCORE_MOD, MASK_MOD: a query counts as its own key does, from the sequence's first.
    tree_mask: (B, Sq) int64, of packed queries one row of them all, or None: bit j of a query's word says whether it
    sees the key that is number j of its sequence's last ones, of which there are as many as queries. It sees all keys
    before those, as far as nothing else hides them. Its rows are contiguous; the stride is None where it is.
    """
    if FOLLOWED:
        let_next_kernel_begin()
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    NATURAL: tl.constexpr = alibi_slopes is not None or (bias is not None or SCORE_MOD is not None)
    LISTED: tl.constexpr = indices is not None
    # Packed rows are gathered, and a compiler that masks what it has gathered reads rows that are not there.
    CLAMPED: tl.constexpr = READS == "inside" and GROUP > 1
    # Words of at most 8 rows and nothing but lengths: keys are the rows of products
    # (kernels/attend_packed16_swap_ab.py). For int4 rows of 40 numbers in tiles of 16 keys that loop gave wrong results
    # on an H200 (Triton 3.6.0, 2026-11-26; cause unknown): it takes only the cases seen to be right, whole tiles of
    # columns and at least 32 keys. Triton 3.2 takes two conditions at a time.
    WHOLE: tl.constexpr = (BLOCK_M < 16 and BLOCK_N >= 32) and (HEAD_DIM % 64 == 0 and HEAD_DIM_V % 64 == 0)
    LENGTHS: tl.constexpr = (not WINDOW and not SOFTCAP) and (alibi_slopes is None and bias is None)
    ALL: tl.constexpr = (mask is None and tree_mask is None) and (UNPACK != "bytes" and KV_FORMAT != "nvfp4")
    PLAIN: tl.constexpr = SCORE_MOD is None and MASK_MOD is None
    FEW: tl.constexpr = (WHOLE and LENGTHS) and (ALL and PLAIN)
    heads_q = heads_k * GROUP
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        if HEADS_FIRST:
            kv_head = tile % heads_k
            split = tile // heads_k % splits
            row_tile = tile // heads_k // splits % row_tiles
            batch = tile // heads_k // splits // row_tiles
        else:
            split = tile % splits
            row_tile = tile // splits % row_tiles
            kv_head = tile // splits // row_tiles % heads_k
            batch = tile // splits // row_tiles // heads_k
        slot = batch  # packed queries are one slot, which all sequences share
        if cu_seqlens_q is not None:
            batch, row_tile = packed_tile(cu_seqlens_q, row_tile, batches, seq_q, GROUP, BLOCK_M, SEARCH)
            q_first, q_end = packed_bounds(cu_seqlens_q, batch, batches, seq_q)
            sequence = batch  # rows after the last sequence are sequence `batches`, which has no keys and no arguments
            k_first = seq_k - seq_k
            k_end = tl.load(seqlens_k + tl.minimum(sequence, batches - 1), mask=sequence < batches, other=0)
            k_end = tl.minimum(tl.maximum(k_end, 0), seq_k)
        elif LISTED:  # a tile's rows are heads of one query, whose list is a sequence
            sequence = batch
            q_first = row_tile // tl.cdiv(GROUP, BLOCK_M)
            q_end = q_first + 1
            row_tile = row_tile % tl.cdiv(GROUP, BLOCK_M)
            k_first, k_end = sequence_bounds(counts, None, batch * seq_q + q_first, seq_k)
        else:
            sequence = batch
            q_first, q_end = seq_q - seq_q, seq_q
            k_first, k_end = sequence_bounds(seqlens_k, leftpad_k, batch, seq_k)
        queries = q_end - q_first
        row_0 = row_tile * BLOCK_M
        rows = row_0 + tl.arange(0, BLOCK_M)  # [BLOCK_M] packed: (query, head in group)
        query = rows // GROUP  # [BLOCK_M]
        head = kv_head * GROUP + rows % GROUP  # [BLOCK_M]
        row_valid = rows < queries * GROUP

        first, last = row_0 // GROUP, tl.minimum((row_0 + BLOCK_M - 1) // GROUP, queries - 1)
        if CAUSAL == "top_left":
            shift = k_first
        else:
            shift = k_end - queries
        positions = query + shift  # [BLOCK_M]
        if CAUSAL != "none":
            row_end = tl.minimum(positions + right + 1, k_end)
            near, far = tl.minimum(first + shift + right + 1, k_end), tl.minimum(last + shift + right + 1, k_end)
        else:
            row_end = tl.full([BLOCK_M], 0, tl.int32) + k_end
            near, far = k_end, k_end
        tree_first = None
        if tree_mask is not None:
            tree_first = k_end - queries
            near = tl.minimum(near, tree_first)
        far = tl.where(last >= first, far, k_first)  # a tile without rows attends nothing
        row_start = tl.maximum(positions - left, k_first)
        low_near, low_far = first + shift - left, last + shift - left
        if chunk is not None:
            row_start, row_end = in_chunk(row_start, row_end, positions, k_first, chunk)
            low_near, near = in_chunk(low_near, near, first + shift, k_first, chunk)
            low_far, far = in_chunk(low_far, far, last + shift, k_first, chunk)
        first_step, full_begin, full_end, last_step = kv_tile_range(
            near, far, low_near, low_far, k_first, BLOCK_N, WINDOW
        )
        # Whole key tiles a share, so that only the ends of the attended range are ragged.
        share = tl.cdiv(last_step - first_step, splits)
        first_step = tl.minimum(first_step + split * share, last_step)
        last_step = tl.minimum(first_step + share, last_step)
        full_begin = tl.minimum(tl.maximum(full_begin, first_step), last_step)
        full_end = tl.minimum(tl.maximum(full_end, full_begin), last_step)
        if PIPELINE == "masked" or MASK_MOD is not None:
            full_end = full_begin  # every tile is one of the edges

        slot_0 = slot.to(tl.int64)
        q_row = (q_first + query).to(tl.int64)  # [BLOCK_M]
        read_query, read_row = query, q_row
        if CLAMPED:
            read_query = tl.minimum(query, tl.maximum(queries, 1) - 1)
            read_row = tl.minimum(q_first + query, seq_q - 1).to(tl.int64)
        q_pointers = q + slot_0 * q_stride_b + head.to(tl.int64) * q_stride_h + read_row * q_stride_s
        if LATENT and q_rope is not None:
            rope_rows = head.to(tl.int64) * rope_stride_h + read_row * rope_stride_s
            tail_pointers = q_rope + slot_0 * rope_stride_b + rope_rows
        else:
            tail_pointers = q_pointers + MAIN * q_stride_d
        k_base = k + kv_head.to(tl.int64) * k_stride_h
        v_base = v + kv_head.to(tl.int64) * v_stride_h
        if PAGE_SIZE == 0:
            table = None
            k_base += slot_0 * k_stride_b
            v_base += slot_0 * v_stride_b
            source_rows = far
        else:
            if LISTED:
                table = indices + (sequence * seq_q + q_first).to(tl.int64) * table_stride_b
            else:
                table = page_table + sequence.to(tl.int64) * table_stride_b
            source_rows = pages * PAGE_SIZE
        k_token_scales = None  # one by one, as below
        v_token_scales = None
        score_scale = scale
        if KV_SCALES == "head":
            owner = tl.minimum(sequence, batches - 1)
            score_scale = scale * head_scale(
                k_scale, owner, kv_head, k_scale_stride_b, k_scale_stride_h, sequence < batches
            )
        if KV_SCALES == "token":
            k_token_scales = k_scale + kv_head.to(tl.int64) * k_scale_stride_h
            v_token_scales = v_scale + kv_head.to(tl.int64) * v_scale_stride_h
            if PAGE_SIZE == 0:
                k_token_scales += slot_0 * k_scale_stride_b
                v_token_scales += slot_0 * v_scale_stride_b
        # What the loop reads a token's scale by, or with nvfp4 a token's row of scales.
        k_scale_page = k_scale_stride_b
        k_scale_row = k_scale_stride_s
        v_scale_page = v_scale_stride_b
        v_scale_row = v_scale_stride_s
        if KV_FORMAT == "nvfp4":
            k_token_scales = k_block_scale + kv_head.to(tl.int64) * k_block_scale_stride_h
            v_token_scales = v_block_scale + kv_head.to(tl.int64) * v_block_scale_stride_h
            if PAGE_SIZE == 0:
                k_token_scales += slot_0 * k_block_scale_stride_b
                v_token_scales += slot_0 * v_block_scale_stride_b
            k_scale_page = k_block_scale_stride_b
            k_scale_row = k_block_scale_stride_s
            v_scale_page = v_block_scale_stride_b
            v_scale_row = v_block_scale_stride_s
        k_rows = row_source(k_base, source_rows, k_stride_s, MAIN // PER, BLOCK_N, BLOCK_D // PER, LOAD)
        k_tail_rows, v_rows = k_rows, k_rows
        if KV_FORMAT == "fp8_ds_mla":
            # The offset follows the cast: see widened_groups.
            k_tail_rows = k_base.to(tl.pointer_type(tl.bfloat16)) + (MAIN + MAIN // DS_GROUP * 4) // 2
        elif BLOCK_TAIL != 0:
            k_tail_rows = row_source(k_base + MAIN // PER * k_stride_d, source_rows, k_stride_s,
                                     (HEAD_DIM - MAIN) // PER, BLOCK_N, BLOCK_TAIL // PER, LOAD)  # fmt: skip
        if not LATENT:
            v_rows = row_source(v_base, source_rows, v_stride_s, HEAD_DIM_V // PER, BLOCK_N, BLOCK_DV // PER, LOAD)
        slopes = None  # one by one: Triton 3.3.1 assigns no tuple of None
        bias_rows = None
        mask_rows = None
        if alibi_slopes is not None:
            there = row_valid & of_a_sequence(sequence, batches, BLOCK_M)
            slope_rows = alibi_slopes + tl.minimum(sequence, batches - 1).to(tl.int64) * alibi_stride_b
            slopes = tl.load(slope_rows + head, mask=there, other=0)
        if bias is not None:
            bias_rows = bias + slot_0 * bias_stride_b
            if not BIAS_BY_KEY:
                bias_rows += head.to(tl.int64) * bias_stride_h + read_query.to(tl.int64) * bias_stride_q
        if mask is not None:
            mask_rows = mask + slot_0 * mask_stride_b
            if not MASK_BY_KEY:
                mask_rows += head.to(tl.int64) * mask_stride_h + read_query.to(tl.int64) * mask_stride_q
        tree_low = None
        tree_high = None
        if tree_mask is not None:
            words = tree_mask + slot_0 * tree_mask_stride_b + read_row
            tree_low, tree_high = tree_bits(tl.load(words, mask=row_valid, other=0))
        query_rows = Query(
            q_pointers, tail_pointers, q_stride_d, rope_stride_d if LATENT else q_stride_d, None,
            MAIN, BLOCK_D, HEAD_DIM - MAIN, BLOCK_TAIL, NEGATED,
        )  # fmt: skip
        keys = KeyRows(
            Rows(k_rows, k_stride_b, k_stride_s, k_stride_d, MAIN // PER, BLOCK_D // PER, LOAD, KV_FORMAT,
                 Scales(k_token_scales, k_scale_page, k_scale_row)),
            Rows(k_tail_rows, k_stride_b, k_stride_s, k_stride_d, (HEAD_DIM - MAIN) // PER, BLOCK_TAIL // PER, LOAD,
                 KV_FORMAT),
        )  # fmt: skip
        values = Rows(v_rows, v_stride_b, v_stride_s, v_stride_d, HEAD_DIM_V // PER, BLOCK_DV // PER, LOAD, KV_FORMAT,
                      Scales(v_token_scales, v_scale_page, v_scale_row))  # fmt: skip
        cache = Pages(table, pages, PAGE_SIZE, PAGE_LOOP, READS)
        steps = TileRange(k_first, first_step, full_begin, full_end, last_step, far)
        slots = None
        if LISTED:
            slots = table
        scores = ScoreTerms(
            row_valid, row_start, row_end, positions, slopes, bias_rows, bias_stride_k, mask_rows, mask_stride_k,
            score_scale, softcap, tree_low, tree_high, tree_first,
            WINDOW, SOFTCAP, BIAS_BY_KEY, MASK_BY_KEY, EXP, MASK_VALUE, CLAMPED, slots, READS,
            ScoreMods(sequence, head[:, None], k_first, k_end - k_first, k_first, k_end - k_first,
                      captured_0, captured_1, captured_2, captured_3, size_0, size_1, size_2, size_3,
                      size_4, size_5, size_6, size_7, SCORE_MOD, MASK_MOD),
        )  # fmt: skip
        if UNPACK == "bytes":
            acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
            row_max, row_sum = init_softmax(sinks, head, split == 0, BLOCK_M, EXP, NATURAL, MASK_VALUE)
            acc, row_max, row_sum = attend(
                acc, row_max, row_sum, query_rows, keys, values, cache, steps, scores, Dropout(),
                LoopShape(BLOCK_N, K_TILE, BLOCK_ORDER, DOT_PRECISION, PIPELINE, Q_OPERAND, LATENT, True),
            )  # fmt: skip
        else:
            row_max, row_sum = init_softmax(None, head, split == 0, BLOCK_M, EXP, NATURAL, MASK_VALUE)
            if FEW:
                acc, row_max, row_sum = attend_packed16_swap_ab(
                    row_max, query_rows, keys.main, values, cache, steps, scores, BLOCK_M, BLOCK_N, ALIGNED, UNPACK
                )
            else:
                acc, row_max, row_sum = attend_packed16(
                    row_max, row_sum, query_rows, keys.main, values, cache, steps, scores,
                    BLOCK_M, BLOCK_N, ALIGNED, UNPACK,
                )  # fmt: skip
            if sinks is not None:
                acc, row_max, row_sum = with_sink(acc, row_max, row_sum, sinks, head, split == 0, EXP, NATURAL)

        if cu_seqlens_q is not None:
            row_sum = tl.where(batch < batches, row_sum, 0.0)  # a row of no sequence has no sink either
        if KV_SCALES == "head":
            owner = tl.minimum(sequence, batches - 1)
            keys_there = (sequence < batches) & (k_end > k_first)  # a sequence without keys may have any scale
            acc = acc * head_scale(v_scale, owner, kv_head, v_scale_stride_b, v_scale_stride_h, keys_there)
        sequences = batches
        if cu_seqlens_q is not None:
            sequences = 1
        store_rows(
            acc, row_max, row_sum,
            Output(out, lse, o_stride_p, o_stride_b, o_stride_h, o_stride_s, HEAD_DIM_V, BLOCK_DV, SPLIT),
            sinks, split, slot, sequences, head, heads_q, q_row, seq_q, row_valid, EXP, NATURAL,
        )  # fmt: skip


@records.jit(do_not_specialize=["heads_k", "seq_q", "seq_k", "places", "row_tiles", "splits", "tiles", "batches"])
def block_forward(
    q, k, v, out, lse, seqlens_k, indices, counts, sinks,
    scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    o_stride_p, o_stride_b, o_stride_h, o_stride_s,
    list_stride_b, list_stride_h, list_stride_s, count_stride_b, count_stride_h, count_stride_s,
    heads_k, seq_q, seq_k, places, row_tiles, splits, tiles, batches,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, BLOCK_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, NEGATED: tl.constexpr, LOAD: tl.constexpr, K_TILE: tl.constexpr,
    BLOCK_ORDER: tl.constexpr, EXP: tl.constexpr, MASK_VALUE: tl.constexpr, DOT_PRECISION: tl.constexpr,
    GRID: tl.constexpr, Q_OPERAND: tl.constexpr,
):  # fmt: skip
    """Attend one share of the blocks that one query row lists, for up to BLOCK_M heads of a group: one program.

    indices  (B, Hk, Sq, places) int32, the last axis contiguous: blocks of BLOCK_KEYS keys, a multiple of BLOCK_N
    counts   (B, Hk, Sq) int32 or None: how many places count
    Other arguments as of decode_split.
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        split = tile % splits
        part = tile // splits % row_tiles
        query = tile // splits // row_tiles % seq_q
        kv_head = tile // splits // row_tiles // seq_q % heads_k
        batch = tile // splits // row_tiles // seq_q // heads_k
        rows = part * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M] heads of the group
        row_valid = rows < GROUP
        head = kv_head * GROUP + rows % GROUP
        end, listed, count = listed_keys(
            seqlens_k, indices, counts, list_stride_b, list_stride_h, list_stride_s, count_stride_b, count_stride_h,
            count_stride_s, batch, kv_head, query, seq_q, seq_k, places, CAUSAL,
        )  # fmt: skip
        steps = count * (BLOCK_KEYS // BLOCK_N)
        share = tl.cdiv(steps, splits)
        first_step = tl.minimum(split * share, steps)
        last_step = tl.minimum(first_step + share, steps)
        slot = batch.to(tl.int64)
        q_row = tl.full([BLOCK_M], 0, tl.int64) + query
        q_pointers = q + slot * q_stride_b + head.to(tl.int64) * q_stride_h + q_row * q_stride_s
        k_base = k + slot * k_stride_b + kv_head.to(tl.int64) * k_stride_h
        v_base = v + slot * v_stride_b + kv_head.to(tl.int64) * v_stride_h
        k_rows = row_source(k_base, end, k_stride_s, HEAD_DIM, BLOCK_N, BLOCK_D, LOAD)
        v_rows = row_source(v_base, end, v_stride_s, HEAD_DIM_V, BLOCK_N, BLOCK_DV, LOAD)
        query_rows = Query(q_pointers, q_pointers, q_stride_d, q_stride_d, None, HEAD_DIM, BLOCK_D, 0, 0, NEGATED)
        main = Rows(k_rows, k_stride_b, k_stride_s, k_stride_d, HEAD_DIM, BLOCK_D, LOAD, "as_q")
        values = Rows(v_rows, v_stride_b, v_stride_s, v_stride_d, HEAD_DIM_V, BLOCK_DV, LOAD, "as_q")
        row_end = tl.full([BLOCK_M], 0, tl.int32) + end
        scores = ScoreTerms(
            row_valid, row_end, row_end, row_end, None, None, 0, None, 0, scale, 0.0, None, None, None,
            False, False, False, False, EXP, MASK_VALUE, False,
        )  # fmt: skip
        acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
        row_max, row_sum = init_softmax(sinks, head, split == 0, BLOCK_M, EXP, False, MASK_VALUE)
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, query_rows, KeyRows(main, main), values, Pages(),
            TileRange(end - end, first_step, first_step, first_step, last_step, end, listed, BLOCK_KEYS), scores,
            Dropout(), LoopShape(BLOCK_N, K_TILE, BLOCK_ORDER, DOT_PRECISION, "masked", Q_OPERAND, False, True),
        )  # fmt: skip
        store_rows(
            acc, row_max, row_sum,
            Output(out, lse, o_stride_p, o_stride_b, o_stride_h, o_stride_s, HEAD_DIM_V, BLOCK_DV, SPLIT),
            sinks, split, slot, batches, head, heads_k * GROUP, q_row, seq_q, row_valid, EXP, False,
        )  # fmt: skip
