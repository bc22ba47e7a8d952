"""Gradients of dense and of packed attention, and what their kernels have in common: probabilities anew from scores and
LSE, in either order of rows and keys.

row_gradients.py    backward_delta, backward_rows
key_gradients.py    backward_keys
gradients.py        backward_bias: the gradient of a bias, summed over every axis that it was broadcast over. A program
                    computes a tile of the bias's own elements, and goes through all scores that they were added to

No program adds to another's results, so they repeat bit by bit; gradients of captured tensors alone are added up.

P = exp(S - LSE), dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P·(dP - delta), dQ = scale·dS·K, dK = scale·dSᵀ·Q.
Source: Dao, "FlashAttention-2" (2023), algorithm 2.

Rows and keys come as [N, 1] and [1, N] tiles, or the other way round: each kernel holds the one and goes through the
other.
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import ScoreMods
from portattn.kernels.attend import in_chunk
from portattn.kernels.dropout import head_words, kept_tile
from portattn.kernels.softmax import apply_softcap, call_mod, exponential, softmax_scale
from portattn.kernels.split_bf16 import dot
from portattn.kernels.tiles import describe_numbers, load_query_rows, sequence_bounds


@triton.jit
def number_source(tensor, first, end, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """Return a descriptor of one head's row numbers, or a pointer to the first, through which tiles are read.

    tensor  (B, Hq, Sq) float32
    first   index of the head's first number; for a descriptor a multiple of 4, as `start` of its tiles is
    """
    source = tensor + first
    if NUMBERS == "descriptor":
        source = describe_numbers(source, end, BLOCK)
    return source


@triton.jit
def load_numbers(source, start, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """Load a tile of numbers, all of them inside the tensor, from row `start` on."""
    if NUMBERS == "descriptor":
        numbers = source.load([start])
    else:
        numbers = tl.load(source + start + tl.arange(0, BLOCK))
    return numbers


@triton.jit
def load_row_numbers(lse, delta, rows, valid):
    """Load LSE and delta of rows; an LSE of -inf and invalid rows give +inf, which makes each probability 0."""
    sums = tl.load(lse + rows, mask=valid, other=float("inf"))
    sums = tl.where(sums == float("-inf"), float("inf"), sums)
    return sums, tl.load(delta + rows, mask=valid, other=0.0)


@triton.jit
def load_attending(lse, q, grad_out, start, valid, q_stride_s, q_stride_d, do_stride_s, do_stride_d,
                   COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, COLS_V: tl.constexpr, BLOCK_COLS_V: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Load the tiles of q and of the gradient from row `start` on; rows that attend nothing are 0."""
    rows = tl.arange(0, BLOCK)
    attends = tl.load(lse + start + rows, mask=valid, other=float("-inf")) != float("-inf")
    at = start.to(tl.int64)
    q_tile = load_query_rows(q + at * q_stride_s + rows * q_stride_s, attends, q_stride_d, COLS, BLOCK_COLS, False)
    do_tile = load_query_rows(grad_out + at * do_stride_s + rows * do_stride_s, attends, do_stride_d, COLS_V,
                              BLOCK_COLS_V, False)  # fmt: skip
    return q_tile, do_tile


@triton.jit
def score_tile(values, batch, head, rows, keys, there, other, stride_b, stride_h, stride_q, stride_k):
    """Load a tile of a tensor with a value for each score; `other` outside `there`."""
    base = values + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return tl.load(base + rows.to(tl.int64) * stride_q + keys * stride_k, mask=there, other=other)


@records.jit
def score_gradients(products, lse, positions, keys, row_start, row_end, slope, added, shown, scale, softcap,
                    mods: ScoreMods, LIMITED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                    EXP: tl.constexpr):  # fmt: skip
    """Return the probabilities of raw products Q·K, the derivative of the cap, and which scores are attended.

    lse  of each row, +inf where it attends nothing
    When LIMITED, a row attends the keys before row_end and, with WINDOW, from row_start on. The derivative is the
    products themselves where there is no cap, and `keep` where nothing is masked: both are then not to be used.
    """
    bend = products
    keep = products == products
    if SOFTCAP or (slope is not None or (added is not None or mods.SCORE is not None)):
        x = products * scale
        if mods.SCORE is not None:
            x = call_mod(x, positions, keys, mods, mods.SCORE)
        if SOFTCAP:
            x = apply_softcap(x, softcap)
            share = x / softcap
            bend = 1.0 - share * share
        if slope is not None:
            x = x - slope * tl.abs(positions - keys).to(tl.float32)
        if added is not None:
            x = x + added
        p = exponential(x - lse, EXP, True)
    else:
        p = exponential(products * softmax_scale(scale, EXP, False) - softmax_scale(lse, EXP, False), EXP, False)
    if LIMITED or (added is not None or shown is not None):
        if LIMITED:
            keep = keys < row_end
            if WINDOW:
                keep = keep & (keys >= row_start)
            if added is not None:
                keep = keep & (added != float("-inf"))
            if shown is not None:
                keep = keep & shown
            if mods.MASK is not None:
                keep = keep & call_mod(products, positions, keys, mods, mods.MASK)
        elif added is not None:
            keep = added != float("-inf")
            if shown is not None:
                keep = keep & shown
        else:
            keep = shown
        p = tl.where(keep, p, 0.0)
    return p, bend, keep


@records.jit(
    do_not_specialize=[
        "heads_q", "group", "seq_q", "seq_k", "row_tiles", "key_tiles", "own_batches", "own_heads", "own_rows",
        "own_keys", "tiles",
        "batches", "left", "right", "chunk", "threshold",
    ]
)  # fmt: skip
def backward_bias(
    q, k, v, grad_out, forward_lse, delta, grad_bias,
    seqlens_q, seqlens_k, leftpad_q, leftpad_k,
    alibi_slopes, bias, mask, dropout_seed,
    scale, softcap, keep_scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    do_stride_b, do_stride_h, do_stride_s, do_stride_d,
    alibi_stride_b,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    heads_q, group, seq_q, seq_k, row_tiles, key_tiles, own_batches, own_heads, own_rows, own_keys, tiles, batches,
    left, right, chunk, threshold,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_ROW: tl.constexpr, BY_KEY: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    EXP: tl.constexpr, DOT_PRECISION: tl.constexpr, GRID: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Compute grad_bias (own_batches, own_heads, own_rows, own_keys) float32, contiguous: each size 1 or the scores'.

    row_tiles, key_tiles  of all scores
    BY_ROW, BY_KEY        the bias has an element for each row, and for each key
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        own_key_tiles = key_tiles if BY_KEY else key_tiles * 0 + 1
        own_row_tiles = row_tiles if BY_ROW else row_tiles * 0 + 1
        key_tile, rest = tile % own_key_tiles, tile // own_key_tiles
        row_tile, rest = rest % own_row_tiles, rest // own_row_tiles
        own_head, own_batch = rest % own_heads, rest // own_heads
        # What is summed up over: 1 along every axis that the bias has.
        of_batches, of_heads = batches // own_batches, heads_q // own_heads
        of_rows, of_keys = row_tiles // own_row_tiles, key_tiles // own_key_tiles
        acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        for i in range(of_batches * of_heads * of_rows * of_keys):
            n, others = i % of_keys, i // of_keys
            m, others = others % of_rows, others // of_rows
            head, batch = own_head + others % of_heads, own_batch + others // of_heads
            row_0, key_0 = (row_tile + m) * BLOCK_M, (key_tile + n) * BLOCK_N
            q_first, q_end = sequence_bounds(seqlens_q, leftpad_q, batch, seq_q)
            k_first, k_end = sequence_bounds(seqlens_k, leftpad_k, batch, seq_k)
            rows, keys = row_0 + tl.arange(0, BLOCK_M), key_0 + tl.arange(0, BLOCK_N)
            row_valid = (rows >= q_first) & (rows < q_end)
            key_valid = (keys >= k_first) & (keys < k_end)
            if CAUSAL == "top_left":
                shift = k_first - q_first
            else:
                shift = k_end - q_end
            positions = rows + shift
            row_start = tl.maximum(positions - left, k_first)
            if CAUSAL != "none":
                row_end = tl.minimum(positions + right + 1, k_end)
            else:
                row_end = tl.full([BLOCK_M], 0, tl.int32) + k_end
            if chunk is not None:
                row_start, row_end = in_chunk(row_start, row_end, positions, k_first, chunk)
            slot, kv_head = batch.to(tl.int64), (head // group).to(tl.int64)
            q_rows = q + slot * q_stride_b + head.to(tl.int64) * q_stride_h + rows.to(tl.int64) * q_stride_s
            do_rows = grad_out + slot * do_stride_b + head.to(tl.int64) * do_stride_h + rows.to(tl.int64) * do_stride_s
            k_rows = k + slot * k_stride_b + kv_head * k_stride_h + keys.to(tl.int64) * k_stride_s
            v_rows = v + slot * v_stride_b + kv_head * v_stride_h + keys.to(tl.int64) * v_stride_s
            q_tile = load_query_rows(q_rows, row_valid, q_stride_d, HEAD_DIM, BLOCK_D, False)
            do_tile = load_query_rows(do_rows, row_valid, do_stride_d, HEAD_DIM_V, BLOCK_DV, False)
            k_tile = load_query_rows(k_rows, key_valid, k_stride_d, HEAD_DIM, BLOCK_D, False)
            v_tile = load_query_rows(v_rows, key_valid, v_stride_d, HEAD_DIM_V, BLOCK_DV, False)
            numbers = (slot * heads_q + head) * seq_q
            lse, row_delta = load_row_numbers(forward_lse + numbers, delta + numbers, rows, row_valid)
            there = row_valid[:, None] & key_valid[None, :]
            added = score_tile(bias, batch, head, rows[:, None], keys[None, :], there, float("-inf"), bias_stride_b,
                               bias_stride_h, bias_stride_q, bias_stride_k).to(tl.float32)  # fmt: skip
            shown = None
            if mask is not None:
                shown = score_tile(mask, batch, head, rows[:, None], keys[None, :], there, 0, mask_stride_b,
                                   mask_stride_h, mask_stride_q, mask_stride_k).to(tl.int32) != 0  # fmt: skip
            slope = None
            if alibi_slopes is not None:
                slope = tl.load(alibi_slopes + slot * alibi_stride_b + head)
            products = dot(q_tile, tl.trans(k_tile), DOT_PRECISION)
            dp = dot(do_tile, tl.trans(v_tile), DOT_PRECISION)
            p, _, keep = score_gradients(
                products, lse[:, None], positions[:, None], keys[None, :], row_start[:, None], row_end[:, None], slope,
                added, shown, scale, softcap, ScoreMods(), True, WINDOW, SOFTCAP, EXP,
            )  # fmt: skip
            if dropout_seed is not None:
                drop_word, drop_turn = head_words(dropout_seed, batch * heads_q + head, DROPS)
                kept = kept_tile(drop_word, drop_turn, key_0, row_0, threshold, BLOCK_N, BLOCK_M, False, DROPS)
                dp = tl.where(kept, dp * keep_scale, 0.0)
            acc += tl.where(keep, p * (dp - row_delta[:, None]), 0.0)
        base = grad_bias + (own_batch * own_heads + own_head).to(tl.int64) * own_rows * own_keys
        rows, keys = row_tile * BLOCK_M + tl.arange(0, BLOCK_M), key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if BY_ROW and BY_KEY:
            there = (rows < own_rows)[:, None] & (keys < own_keys)[None, :]
            tl.store(base + rows.to(tl.int64)[:, None] * own_keys + keys[None, :], acc, mask=there)
        elif BY_ROW:
            tl.store(base + rows, tl.sum(acc, 1), mask=rows < own_rows)
        elif BY_KEY:
            tl.store(base + keys, tl.sum(acc, 0), mask=keys < own_keys)
        else:
            tl.store(base, tl.sum(tl.sum(acc, 1), 0))
