"""sparse_split: one query row a head over the tokens that were chosen for it, in a contiguous or paged cache.

Every head has tokens of its own, so nothing is shared between heads and there is no matrix product: chosen rows are
gathered whole, and products are sums along them, in float32.
"""

import triton
import triton.language as tl

from portattn.kernels.dequantize import dequantize, head_scale, widened_pairs, without_zero
from portattn.kernels.softmax import (
    apply_softcap,
    exponential,
    lowest,
    natural_lse,
    sink_score,
    store_state,
)
from portattn.kernels.tiles import sequence_bounds

PI: tl.constexpr = tl.constexpr(3.141592653589793)
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # float32
FEW_HITS: tl.constexpr = tl.constexpr(0.5)  # expected number of tables hit, below which the series is taken


@triton.jit
def arc_cosine(x):
    """Return acos on [-1, 1], absolute error 2e-8 (Abramowitz and Stegun, 4.4.46)."""
    a = tl.abs(x)
    series = -0.0012624911
    series = series * a + 0.0066700901
    series = series * a - 0.0170881256
    series = series * a + 0.0308918810
    series = series * a - 0.0501743046
    series = series * a + 0.0889789874
    series = series * a - 0.2145988016
    series = series * a + 1.5707963050
    positive = tl.sqrt(tl.maximum(1.0 - a, 0.0)) * series
    return tl.where(x < 0.0, PI - positive, positive)


@triton.jit
def log_sampling_probability(cosine, bits, tables):
    """Return the log of the probability that a key at this cosine shares the query's bucket in two hash tables or more.

    Chen et al., "MagicPIG" (arXiv 2410.16179): one random hyperplane leaves both on one side with probability
    p = 1 − acos(cosine)/π, all `bits` of a table with x = pᵇ, and two tables of `tables` or more with
    1 − (1−x)ᴸ − L·x·(1−x)ᴸ⁻¹. Where few tables are hit those terms cancel, and the binomial series of the same
    probability, Σₖ₌₂ (−1)ᵏ (k−1) C(L,k) xᵏ, is summed to x⁹ instead (relative error below 1e-7).
    """
    side = tl.maximum(1.0 - arc_cosine(cosine) * (1.0 / PI), SMALLEST_NORMAL)
    log_x = bits * tl.log(side)
    x = tl.exp(log_x)
    t = tables
    hits = t * x
    series = 1.0 - (t - 8.0) * x * (8.0 / 63.0)
    series = 1.0 - (t - 7.0) * x * (7.0 / 48.0) * series
    series = 1.0 - (t - 6.0) * x * (6.0 / 35.0) * series
    series = 1.0 - (t - 5.0) * x * (5.0 / 24.0) * series
    series = 1.0 - (t - 4.0) * x * (4.0 / 15.0) * series
    series = 1.0 - (t - 3.0) * x * (3.0 / 8.0) * series
    series = 1.0 - (t - 2.0) * x * (2.0 / 3.0) * series
    pairs = tl.maximum(t * (t - 1.0) * 0.5, SMALLEST_NORMAL)
    rare = 2.0 * log_x + tl.log(pairs) + tl.log(tl.maximum(series, SMALLEST_NORMAL))
    # log(1 − x) for small x too: L times what rounding 1 − x leaves out would be much (Kahan's log1p).
    other = 1.0 - x
    taken = 1.0 - other
    log_other = tl.log(tl.maximum(other, SMALLEST_NORMAL)) * (x / tl.where(taken > 0.0, taken, 1.0))
    missed = tl.exp((t - 1.0) * log_other)  # no table, but for one
    often = tl.log(tl.maximum(1.0 - missed * (other + hits), SMALLEST_NORMAL))
    return tl.maximum(tl.where(hits < FEW_HITS, rare, often), -87.33654475055310)  # log of SMALLEST_NORMAL


@triton.jit(do_not_specialize=["heads_q", "group", "seq_k", "pages", "places", "splits", "tiles", "batches"])
def sparse_split(
    q, k, v, k_scale, v_scale, out, lse,
    indices, counts, log_weights, magicpig_bits, magicpig_tables, seqlens_k, page_table,
    alibi_slopes, sinks,
    scale, softcap,
    q_stride_b, q_stride_h, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    k_scale_stride_b, k_scale_stride_h, k_scale_stride_s, v_scale_stride_b, v_scale_stride_h, v_scale_stride_s,
    o_stride_p, o_stride_b, o_stride_h,
    indices_stride_b, indices_stride_h, counts_stride_b, counts_stride_h, weights_stride_b, weights_stride_h,
    table_stride_b, alibi_stride_b,
    heads_q, group, seq_k, pages, places, splits, tiles, batches,
    SPLIT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr, NEGATED: tl.constexpr,
    PIG_BITS: tl.constexpr, PIG_TABLES: tl.constexpr,
    EXP: tl.constexpr, MASK_VALUE: tl.constexpr, GRID: tl.constexpr,
    KV_FORMAT: tl.constexpr, KV_SCALES: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Attend one share of the tokens chosen for one head: one program.

    indices (B, Hq, places) int32 and counts (B, Hq) int32: the first counts places hold token positions, in any order;
    what is negative, or not before the sequence's end, is passed over. k and v as in decode_split, their scales,
    KV_FORMAT, KV_SCALES, PER, SPLIT and the optional arguments too. log_weights (B, Hq, places) float32 is added to the
    scores, -inf passes a token over; magicpig_bits and magicpig_tables (Hq,) int32, or PIG_BITS and PIG_TABLES for all
    heads, ask for the sampling correction.
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    # Places of a row, each of PER numbers.
    at_k = tl.arange(0, BLOCK_D // PER)
    at_v = tl.arange(0, BLOCK_DV // PER)
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        split = tile % splits
        head = tile // splits % heads_q
        batch = (tile // splits // heads_q).to(tl.int64)
        kv_head = (head // group).to(tl.int64)
        _, end = sequence_bounds(seqlens_k, None, batch, seq_k)
        count = tl.load(counts + batch * counts_stride_b + head * counts_stride_h)
        count = tl.minimum(tl.maximum(count, 0), places)
        share = tl.cdiv(tl.cdiv(count, BLOCK_N), splits) * BLOCK_N
        begin = split * share
        stop = tl.minimum(begin + share, count)

        query = tl.load(
            q + batch * q_stride_b + head.to(tl.int64) * q_stride_h + columns * q_stride_d,
            mask=columns < HEAD_DIM, other=0.0,
        ).to(tl.float32)  # fmt: skip
        if NEGATED:
            query = -query
        k_base = k + kv_head * k_stride_h
        v_base = v + kv_head * v_stride_h
        if PAGE_SIZE == 0:
            k_base += batch * k_stride_b
            v_base += batch * v_stride_b
        chosen = indices + batch * indices_stride_b + head.to(tl.int64) * indices_stride_h
        score_scale = scale
        if KV_SCALES == "head":
            score_scale = scale * head_scale(k_scale, batch, kv_head, k_scale_stride_b, k_scale_stride_h, count > 0)
        acc = tl.full([BLOCK_DV], 0.0, tl.float32)
        row_sum = (split - split).to(tl.float32)
        row_max = row_sum + lowest(MASK_VALUE)
        if sinks is not None:
            sink = sink_score(tl.load(sinks + head).to(tl.float32), EXP, True)
            row_max = tl.where(split == 0, sink, row_max)
            row_sum = tl.where(split == 0, 1.0, row_sum)
        for i in tl.range(0, tl.cdiv(tl.maximum(stop - begin, 0), BLOCK_N), num_stages=STAGES):
            place = begin + i * BLOCK_N + tl.arange(0, BLOCK_N)
            token = tl.load(chosen + place, mask=place < stop, other=-1)
            keep = (place < stop) & ((token >= 0) & (token < end))
            if log_weights is not None:
                weights = log_weights + batch * weights_stride_b + head.to(tl.int64) * weights_stride_h
                weight = tl.load(weights + place, mask=place < stop, other=0.0)
                keep = keep & (weight != float("-inf"))  # a token that is masked may hold NaN
            row = tl.where(keep, token, 0)
            if PAGE_SIZE == 0:
                slot, within = batch, row.to(tl.int64)
                k_offsets = within * k_stride_s
                v_offsets = within * v_stride_s
            else:
                page = tl.load(page_table + batch * table_stride_b + row // PAGE_SIZE, mask=keep, other=0)
                slot = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
                within = (row % PAGE_SIZE).to(tl.int64)
                k_offsets = slot * k_stride_b + within * k_stride_s
                v_offsets = slot * v_stride_b + within * v_stride_s
            keys = tl.load(
                k_base + k_offsets[:, None] + at_k[None, :] * k_stride_d,
                mask=keep[:, None] & (at_k < HEAD_DIM // PER)[None, :], other=0.0,
            )  # fmt: skip
            raw_k = None
            raw_v = None
            if PER > 1:
                if KV_SCALES == "token":
                    raw_k = tl.load(k_scale + slot * k_scale_stride_b + kv_head * k_scale_stride_h
                                    + within * k_scale_stride_s, mask=keep, other=1.0)  # fmt: skip
                    raw_v = tl.load(v_scale + slot * v_scale_stride_b + kv_head * v_scale_stride_h
                                    + within * v_scale_stride_s, mask=keep, other=1.0)  # fmt: skip
                keys = widened_pairs(keys, query, raw_k)
                # Where there is no byte the number is no 0: MagicPIG takes the lengths of whole rows.
                keys = tl.where((columns < HEAD_DIM)[None, :], keys, 0.0)
            else:
                keys = dequantize(keys, query, KV_FORMAT).to(tl.float32)
            values = tl.load(
                v_base + v_offsets[:, None] + at_v[None, :] * v_stride_d,
                mask=keep[:, None] & (at_v < HEAD_DIM_V // PER)[None, :], other=0.0,
            )  # fmt: skip
            products = tl.sum(keys * query[None, :], 1)  # [BLOCK_N] of the cache's numbers
            scores = products * score_scale
            if PER > 1 and KV_SCALES == "token":
                scores = scores * without_zero(raw_k)
                value_scales = without_zero(raw_v)
            elif KV_SCALES == "token":
                places_k = slot * k_scale_stride_b + kv_head * k_scale_stride_h + within * k_scale_stride_s
                places_v = slot * v_scale_stride_b + kv_head * v_scale_stride_h + within * v_scale_stride_s
                scores = scores * tl.load(k_scale + places_k, mask=keep, other=1.0)
                value_scales = tl.load(v_scale + places_v, mask=keep, other=1.0)
            if SOFTCAP:
                scores = apply_softcap(scores, softcap)
            if alibi_slopes is not None:
                slope = tl.load(alibi_slopes + batch * alibi_stride_b + head)
                scores -= slope * (end - 1 - row).to(tl.float32)
            if log_weights is not None:
                scores += weight
            if PIG_BITS != 0 or magicpig_bits is not None:
                lengths = tl.sqrt(tl.sum(keys * keys, 1)) * tl.sqrt(tl.sum(query * query, 0))
                cosine = products / tl.where(lengths > 0.0, lengths, 1.0)
                if NEGATED:
                    cosine = -cosine
                cosine = tl.minimum(tl.maximum(cosine, -1.0), 1.0)
                if PIG_BITS != 0:
                    bits = (head - head).to(tl.float32) + PIG_BITS
                    tables = (head - head).to(tl.float32) + PIG_TABLES
                else:
                    bits = tl.load(magicpig_bits + head).to(tl.float32)
                    tables = tl.load(magicpig_tables + head).to(tl.float32)
                scores -= log_sampling_probability(cosine, bits, tables)
            scores = tl.where(keep, scores, lowest(MASK_VALUE))
            new_max = tl.maximum(row_max, tl.max(scores, 0))
            if MASK_VALUE == "finite":
                base = new_max
            else:
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.where(keep, exponential(scores - base, EXP, True), 0.0)
            correction = exponential(row_max - base, EXP, True)
            row_sum = row_sum * correction + tl.sum(p, 0)
            if PER > 1:
                values = widened_pairs(values, query, raw_v)
            else:
                values = dequantize(values, query, KV_FORMAT).to(tl.float32)
            if KV_SCALES == "token":
                values = values * value_scales[:, None]
            acc = acc * correction + tl.sum(p[:, None] * values, 0)
            row_max = new_max

        if KV_SCALES == "head":
            acc = acc * head_scale(v_scale, batch, kv_head, v_scale_stride_b, v_scale_stride_h, count > 0)
        empty = row_sum == 0.0  # a NaN sum stays NaN, as in `normalised`
        acc = tl.where(empty, 0.0, acc * (1.0 / tl.where(empty, 1.0, row_sum)))
        o_base = out + batch * o_stride_b + head.to(tl.int64) * o_stride_h
        if SPLIT:
            o_base += split.to(tl.int64) * o_stride_p
        tl.store(o_base + columns_v, acc.to(out.dtype.element_ty), mask=columns_v < HEAD_DIM_V)
        if lse is not None:
            row = (split.to(tl.int64) * batches + batch) * heads_q + head
            if SPLIT:
                store_state(lse, row, row_max, row_sum, None)
            else:
                tl.store(lse + row, natural_lse(row_max, row_sum, sinks, head, EXP, True))
