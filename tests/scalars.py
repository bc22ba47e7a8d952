"""Attention one number at a time, in Python floats: what the oracle itself is compared with. Shares no code with it."""

import math
from typing import NamedTuple

import torch

from portattn.schema.call import Call

INF = float("inf")


class Slot(NamedTuple):
    """One sequence: rows [q_first, q_end) and keys [k_first, k_end) of its slot; row 0 lies at `q_origin`."""

    q_origin: int
    q_first: int
    q_end: int
    k_origin: int
    k_first: int
    k_end: int


def scalars(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE in float64, shaped as the oracle's."""
    p = call.problem
    batch, rows = p.query_rows
    out = torch.zeros(batch, p.heads_q, rows, p.head_dim_v, dtype=torch.float64)
    lse = torch.full((batch, p.heads_q, rows), -INF, dtype=torch.float64)
    for b in range(p.batch):
        slot = slot_of(call, b)
        for h in range(p.heads_q):
            for i in range(slot.q_first, slot.q_end):
                values, log_sum = row(call, slot, b, h, i)
                where = (0, h, slot.q_origin + i) if p.packed else (b, h, i)
                out[where] = torch.tensor(values, dtype=torch.float64)
                lse[where] = log_sum
    return out, lse


def slot_of(call: Call, b: int) -> Slot:
    p = call.problem

    def side(cu, length, pad, size):
        if cu is not None:
            return int(cu[b]), 0, int(cu[b + 1]) - int(cu[b])
        first = 0 if pad is None else int(pad[b])
        return 0, first, size if length is None else first + int(length[b])

    return Slot(
        *side(call.cu_seqlens_q, call.seqlens_q, call.leftpad_q, p.seq_q),
        *side(call.cu_seqlens_k, call.seqlens_k, call.leftpad_k, p.seq_k),
    )


def row(call: Call, slot: Slot, b: int, h: int, i: int) -> tuple[list[float], float]:
    """The output and LSE of query row i of sequence b and head h."""
    p = call.problem
    at = i + (slot.k_first - slot.q_first if p.causal == "top_left" else slot.k_end - slot.q_end)
    query = (0, h, slot.q_origin + i) if p.packed else (b, h, i)
    q = call.q[query].tolist() + ([] if call.q_rope is None else call.q_rope[query].tolist())
    seen: list[tuple[float, list[float]]] = []
    for place, j in candidates(call, slot, b, h):
        if (p.causal != "none" and j > at) or (p.window_right >= 0 and j > at + p.window_right):
            continue
        if p.window_left >= 0 and j < at - p.window_left:
            continue
        if p.chunk and math.floor((at - slot.k_first) / p.chunk) != math.floor((j - slot.k_first) / p.chunk):
            continue
        if call.mask is not None and not call.mask[b, h, i, j]:
            continue
        node = j - (slot.k_end - (slot.q_end - slot.q_first))
        if call.tree_mask is not None and node >= 0 and not int(call.tree_mask[query[0], query[2]]) >> node & 1:
            continue
        if call.bias is not None and call.bias[b, h, i, j] == -INF:
            continue
        key = stored(call, slot, b, h, j)
        k, v = call.k[key].tolist(), call.v[key].tolist()
        seen.append((score(call, b, h, i, j, at, place, q, k), v))
    scores = [s for s, _ in seen] + ([] if call.sinks is None else [float(call.sinks[h])])
    if not scores:
        return [0.0] * p.head_dim_v, -INF
    top = max(scores)
    total = sum(math.exp(s - top) for s in scores)
    weights = [math.exp(s - top) / total for s, _ in seen]
    return [
        sum(w * v[d] for w, (_, v) in zip(weights, seen, strict=False)) for d in range(p.head_dim_v)
    ], top + math.log(total)


def candidates(call: Call, slot: Slot, b: int, h: int) -> list[tuple[int, int]]:
    """(place, position) of the keys that there are for this head."""
    if call.indices is None:
        return [(0, j) for j in range(slot.k_first, slot.k_end)]
    tokens = call.indices[b, h, : int(call.counts[b, h])].tolist()
    found = [(place, j) for place, j in enumerate(tokens) if 0 <= j < slot.k_end]
    if call.log_weights is None:
        return found
    return [(place, j) for place, j in found if call.log_weights[b, h, place] != float("-inf")]  # masked: may be NaN


def stored(call: Call, slot: Slot, b: int, h: int, j: int) -> tuple[int, int, int]:
    head = h // call.problem.group
    if call.page_table is not None:
        page = call.problem.page_size
        return int(call.page_table[b, j // page]), head, j % page
    return (0, head, slot.k_origin + j) if call.cu_seqlens_k is not None else (b, head, j)


def score(call: Call, b: int, h: int, i: int, j: int, at: int, place: int, q: list[float], k: list[float]) -> float:
    product = sum(x * y for x, y in zip(q, k, strict=True))
    s = call.scale * product
    if call.problem.softcap:
        s = call.softcap * math.tanh(s / call.softcap)
    if call.alibi_slopes is not None:
        s -= float(call.alibi_slopes[b, h]) * abs(at - j)
    if call.bias is not None:
        s += float(call.bias[b, h, i, j])
    if call.log_weights is not None:
        s += float(call.log_weights[b, h, place])
    if call.magicpig_bits is not None:
        cosine = product / (math.hypot(*q) * math.hypot(*k))
        s -= math.log(sampled(cosine, int(call.magicpig_bits[h]), int(call.magicpig_tables[h])))
    return s


def sampled(cosine: float, bits: int, tables: int) -> float:
    """Probability that two or more of `tables` tables hold the key: the sum of the binomial distribution's terms."""
    x = (1.0 - math.acos(min(max(cosine, -1.0), 1.0)) / math.pi) ** bits
    found = sum(math.comb(tables, n) * x**n * (1.0 - x) ** (tables - n) for n in range(2, tables + 1))
    return max(found, 2.0**-126)
