"""The oracle: attention by its definition, in float64, with the whole score matrix. For tests and canaries only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from portattn.reference.dropout import keep_mask
from portattn.reference.score_functions import call_mod
from portattn.schema.call import Call
from portattn.schema.ops import BACKWARD, FEATURES
from portattn.schema.problem_limits import DS_GROUP
from portattn.schema.tensors import KV_DTYPE

SERIES_TERMS = 20  # leave less than float64's last place where the series is used


def log_sampling_probability(cosine: torch.Tensor, bits: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Return log u of u = 1 − (1−x)^L − L·x·(1−x)^(L−1) with x = (1 − acos(c)/π)^K, in the dtype of `cosine`.

    u is the probability that a key at cosine c falls into the query's bucket in at least two of L hash tables of K bits
    (Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation", arXiv 2410.16179). For L·x < 1 the formula
    cancels, so the equal sum over k ≥ 2 of (−1)^k·(k−1)·C(L, k)·x^k replaces it; u is at least float32's smallest
    normal number."""
    count, like = tables.to(cosine.dtype), cosine.clamp(-1.0, 1.0)
    x = (1.0 - torch.acos(like) / math.pi) ** bits.to(cosine.dtype)
    direct = 1.0 - (1.0 - x) ** count - count * x * (1.0 - x) ** (count - 1.0)
    series, term = torch.zeros_like(x), count * x  # C(L, 1)·x
    for k in range(2, 2 + SERIES_TERMS):
        term = term * (count - (k - 1)) / k * x
        series = series + (-1) ** k * (k - 1) * term
    u = torch.where(count * x < 1.0, series, direct)
    return torch.log(u.clamp(min=torch.finfo(torch.float32).tiny))


@dataclass(frozen=True, slots=True)
class Bounds:
    q_first: torch.Tensor
    q_end: torch.Tensor
    k_first: torch.Tensor
    k_end: torch.Tensor

    def query_positions(self, causal: str, rows: torch.Tensor) -> torch.Tensor:
        shift = self.k_first - self.q_first if causal == "top_left" else self.k_end - self.q_end
        return rows[None] + shift[:, None]


@dataclass(frozen=True, slots=True)
class DenseView:
    """A call with B sequences of `rows` queries and `keys` keys; H is Hk, or Hq if heads chose their tokens."""

    call: Call
    q: torch.Tensor  # (B, Hq, rows, D), 0 in rows that attend nothing
    k: torch.Tensor  # (B, H, keys, D), 0 in unattended keys, whose memory can hold anything
    v: torch.Tensor  # (B, H, keys, Dv), likewise
    keep: torch.Tensor  # (B, 1 or Hq, rows, keys) bool
    inside: torch.Tensor  # (B, 1, rows) bool: the row belongs to its sequence
    distance: torch.Tensor  # (B, 1 or Hq, rows, keys) int64: |position of the query − position of the key|
    rows: torch.Tensor  # (rows,) int64: indices of the query rows
    # Numbers of the queries (B or 1, rows) and keys (B or 1, keys) in their sequences, for score and mask functions.
    numbers: tuple[torch.Tensor, torch.Tensor]
    slots: int = 0  # batch of the query tensor, if each of its rows is a sequence here

    @property
    def some(self) -> torch.Tensor:
        return self.keep.any(dim=3)

    @property
    def has_terms(self) -> bool:
        call = self.call
        tensors = (getattr(call, name) for name, feature in FEATURES.items() if feature.floating)
        given = call.problem.softcap or call.problem.magicpig or bool(call.problem.score_mod)
        return given or any(tensor is not None for tensor in tensors)

    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        b, heads, rows, width = q.shape
        grouped = q.reshape(b, k.shape[1], heads // k.shape[1] * rows, width)
        return (grouped @ k.transpose(-1, -2)).reshape(b, heads, rows, k.shape[2])

    def dropped(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Return probabilities after dropout; the counter's third word is b·Hq + h with b the sequence."""
        call, p = self.call, self.call.problem
        if call.dropout_seed is None:
            return probabilities
        device = probabilities.device
        heads = torch.arange(p.batch * p.heads_q, device=device).view(p.batch, p.heads_q, 1, 1)
        keys = torch.arange(probabilities.shape[3], device=device)
        kept = keep_mask(call.dropout_seed, call.dropout_p, heads, self.rows[:, None], keys)
        return torch.where(kept, probabilities / (1.0 - call.dropout_p), 0.0)

    def mixed(self, probabilities: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, heads, rows, keys = probabilities.shape
        grouped = probabilities.reshape(b, v.shape[1], heads // v.shape[1] * rows, keys)
        return (grouped @ v).reshape(b, heads, rows, v.shape[3])

    def with_terms(
        self, scores: torch.Tensor, products: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        """Return scaled products (B, Hq, rows, keys) with softcap and all additive terms; -inf for unattended keys."""
        call, dtype = self.call, scores.dtype
        if call.problem.score_mod:
            scores = call_mod(call, call.problem.score_mod, *self.numbers, scores)
        if call.problem.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.alibi_slopes is not None:
            scores = scores - call.alibi_slopes.to(dtype)[:, :, None, None] * self.distance
        if call.bias is not None:
            scores = scores + call.bias[:, :, self.rows].to(dtype)
        if call.log_weights is not None:
            scores = scores + call.log_weights[:, :, None].to(dtype)
        if (hashing := call.hashing()) is not None:
            norms = q.to(dtype).norm(dim=-1)[..., None] * k.to(dtype).norm(dim=-1)[:, :, None]
            # A vector of zeros has no direction: it counts as orthogonal to all.
            cosine = torch.where(norms > 0, products / norms.masked_fill(norms == 0, 1.0), 0.0)
            bits, tables = (t[None, :, None, None] for t in hashing)
            scores = scores - log_sampling_probability(cosine, bits, tables)
        return scores.masked_fill(~self.keep, float("-inf"))

    def with_sinks(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, with the sinks (if any) as one more column, which has no value."""
        if self.call.sinks is None:
            return scores
        sinks = self.call.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1)

    def lse(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the LSE (B, Hq, rows) of scores and sinks; -inf in rows of no sequence, whatever the sinks."""
        return torch.logsumexp(self.with_sinks(scores), dim=-1).masked_fill(~self.inside, float("-inf"))

    def by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Return values in the queries' layout as (B, Hq, rows, …), 0 behind packed sequences; undone by `restored`."""
        if self.call.cu_seqlens_q is None:
            return values[:, :, self.rows]
        padded = _padded(values.reshape(*values.shape[:3], -1), self.call.cu_seqlens_q, self.call.problem.seq_q)
        return padded.reshape(*padded.shape[:3], *values.shape[3:])

    def restored(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        """Return values (B, Hq, rows, …) in the queries' layout, with `fill` in rows that belong to no sequence."""
        if self.call.problem.has_lists:
            return values[:, :, 0].unflatten(0, (self.slots, -1)).transpose(1, 2)
        cu, total = self.call.cu_seqlens_q, self.call.q.shape[2]
        if cu is None:
            return values
        packed = values.new_full((1, values.shape[1], total, *values.shape[3:]), fill)
        for b, (first, length) in enumerate(zip(*_packed(cu, total, self.call.problem.seq_q), strict=True)):
            packed[0, :, first : first + length] = values[b, :, :length]
        return packed


def allowed_keys(call: Call, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return the keys that each query may attend: bool (B, rows, Sk), False outside a sequence.

    Lengths, causal mask, window, chunk and tree mask count; mask, bias and chosen tokens do not."""
    p, b = call.problem, bounds(call)
    i = torch.arange(p.seq_q, device=call.q.device) if rows is None else rows
    j = torch.arange(p.seq_k, device=call.q.device)[None, None]
    at = b.query_positions(p.causal, i)[:, :, None]
    keep = _inside(b, i)[:, :, None] & (j >= b.k_first[:, None, None]) & (j < b.k_end[:, None, None])
    if p.causal != "none":
        keep &= j <= at
    if p.window_right != -1:
        keep &= j <= at + p.window_right
    if p.window_left != -1:
        keep &= j >= at - p.window_left
    if p.chunk:
        first = b.k_first[:, None, None]
        begin = first + torch.div(at - first, p.chunk, rounding_mode="floor") * p.chunk
        keep &= (j >= begin) & (j < begin + p.chunk)
    if call.tree_mask is not None:
        keep &= _in_tree(call, b)[:, i]
    return keep


def _in_tree(call: Call, b: Bounds) -> torch.Tensor:
    p = call.problem
    assert call.tree_mask is not None
    words = call.tree_mask.tolist()
    shown = torch.ones(p.batch, p.seq_q, p.seq_k, dtype=torch.bool)
    ends = zip(b.q_first.tolist(), b.q_end.tolist(), b.k_end.tolist(), strict=True)
    starts = None if call.cu_seqlens_q is None else _packed(call.cu_seqlens_q, call.q.shape[2], p.seq_q)[0]
    for n, (q_first, q_end, k_end) in enumerate(ends):
        count = q_end - q_first
        for i in range(count):
            word = words[n][i] if starts is None else words[0][starts[n] + i]
            bits = format(word % 2**64, "064b")[::-1]
            for j in range(count):
                key = k_end - count + j
                if key >= 0:
                    shown[n, q_first + i, key] = bits[j] == "1"
    return shown.to(call.q.device)


def bounds(call: Call) -> Bounds:
    p = call.problem

    def of(
        cu: torch.Tensor | None, length: torch.Tensor | None, pad: torch.Tensor | None, total: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cu is not None:
            ends = torch.tensor(_packed(cu, total, size)[1], dtype=torch.long, device=call.q.device)
            return torch.zeros_like(ends), ends
        first = torch.zeros(p.batch, dtype=torch.long, device=call.q.device) if pad is None else pad.long()
        end = torch.full_like(first, size) if length is None else (first + length.long()).clamp(max=size)
        return first, end

    return Bounds(
        *of(call.cu_seqlens_q, call.seqlens_q, call.leftpad_q, call.q.shape[2], p.seq_q),
        *of(call.cu_seqlens_k, call.seqlens_k, call.leftpad_k, call.k.shape[2], p.seq_k),
    )


def dense_view(call: Call, rows: torch.Tensor | None = None) -> DenseView:
    """Return the call as dense attention, of all query rows or, unless packed, of only `rows` (int64 indices)."""
    if call.problem.has_lists:
        chosen = call if rows is None else replace(call, **_listed_rows(call, rows))
        view = _dense_view(chosen.by_query(), None)
        return replace(view, slots=call.q.shape[0])
    return _dense_view(call, rows)


def _listed_rows(call: Call, rows: torch.Tensor) -> dict[str, Any]:
    names = {"q": 2, "q_rope": 2, "indices": -2, "counts": -1}
    given = {name: getattr(call, name) for name in names}
    found = {n: t.index_select(names[n], rows) for n, t in given.items() if t is not None}
    packed = {"total_q": len(rows)} if call.problem.packed else {}
    return found | {"problem": msgspec.structs.replace(call.problem, seq_q=len(rows), **packed)}


def _dense_view(call: Call, rows: torch.Tensor | None) -> DenseView:
    p, b = call.problem, bounds(call)
    if rows is not None and p.packed:
        raise ValueError("rows of packed queries are of many sequences: only all of them can be asked for")
    i = torch.arange(p.seq_q, device=call.q.device) if rows is None else rows
    q = _queries(call) if call.q_rope is None else torch.cat([call.q, call.q_rope], dim=3)
    q = _padded(q, call.cu_seqlens_q, p.seq_q) if p.packed else q[:, :, i]
    if p.cache_format.latent:
        k = _dequantised_rows(call)
        v = k[..., : p.head_dim_v]
    else:
        k = _dequantised(call, call.k, p.kv_format, call.k_scale, call.k_block_scale)
        v = _dequantised(call, call.v, p.v_format, call.v_scale, call.v_block_scale)
    j = torch.arange(p.seq_k, device=call.q.device)[None, None, None]
    keep = allowed_keys(call, i)[:, None]
    if p.has_lists and call.page_table is not None:
        keep = keep & (call.page_table >= 0)[:, None, None]
    if p.has_blocks:
        keep = keep & _listed(call, i)
    elif call.indices is not None and call.counts is not None:
        token = call.indices.long()  # (B, Hq, Lmax)
        place = torch.arange(p.tokens, device=call.q.device)
        real = (place < call.counts[..., None]) & (token >= 0) & (token < b.k_end[:, None, None])
        token = torch.where(real, token, 0)
        if p.seq_k:
            chosen = token[..., None].expand(-1, -1, -1, max(p.head_dim, p.head_dim_v))
            k, v = (x.repeat_interleave(p.group, dim=1).gather(2, chosen[..., : x.shape[3]]) for x in (k, v))
        else:
            k, v = (x.new_zeros(p.batch, p.heads_q, p.tokens, x.shape[3]) for x in (k, v))
        if call.log_weights is not None:
            real = real & (call.log_weights != float("-inf"))
        keep, j = real[:, :, None], token[:, :, None]
    whole = None
    if call.mask is not None:
        keep = keep & call.mask[:, :, i]
    if call.block_mask is not None:
        counts, ids = call.block_mask[..., :2].cumsum(-1)[..., None, None, :], call.block_mask[..., 2:]
        place = torch.arange(ids.shape[3], device=ids.device)
        named = ids[..., None] == place  # (B, Hq, R, places, C)
        listed, whole = (
            (named & (place[:, None] < counts[..., n])).any(dim=3)
            .repeat_interleave(p.block_q, dim=2).repeat_interleave(p.block_k, dim=3)[:, :, i][..., : p.seq_k]
            for n in (1, 0)
        )  # fmt: skip
        keep = keep & listed
    if call.bias is not None:
        keep = keep & (call.bias[:, :, i] != float("-inf"))
    numbers = _numbers(call, b, i)
    if p.mask_mod:
        shown = call_mod(call, p.mask_mod, *numbers)
        keep = keep & (shown if whole is None else shown | whole)
    used = keep.any(dim=2)  # (B, 1 or Hq, keys)
    if used.shape[1] not in (1, k.shape[1]):
        used = used.reshape(p.batch, k.shape[1], p.group, k.shape[2]).any(dim=2)
    return DenseView(
        call=call,
        q=q.masked_fill(~keep.any(dim=3)[..., None], 0.0),
        k=k.masked_fill(~used[..., None], 0.0),
        v=v.masked_fill(~used[..., None], 0.0),
        keep=keep,
        inside=_inside(b, i)[:, None],
        distance=(b.query_positions(p.causal, i)[:, None, :, None] - j).abs(),
        rows=i,
        numbers=numbers,
    )


def _numbers(call: Call, b: Bounds, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = call.problem
    if p.backward or p.op in BACKWARD:
        position = rows - b.q_first[:, None]
    else:  # over a cache a query counts as its own key does
        position = b.query_positions(p.causal, rows) - b.k_first[:, None]
    return position, torch.arange(p.seq_k, device=call.q.device) - b.k_first[:, None]


def _listed(call: Call, rows: torch.Tensor) -> torch.Tensor:
    """Return the keys that lie in a block of each row's list: bool (B, Hq, rows, keys)."""
    p = call.problem
    assert call.indices is not None
    own = torch.arange(p.seq_k, device=call.q.device) // p.block_k
    listed = torch.zeros(p.batch, p.heads_k, len(rows), p.seq_k, dtype=torch.bool, device=call.q.device)
    for place in range(p.tokens):
        counts = True if call.counts is None else (call.counts[:, :, rows] > place)[..., None]
        listed |= (call.indices[:, :, rows, place, None] == own) & counts
    return listed.repeat_interleave(p.group, dim=1)


def _inside(b: Bounds, rows: torch.Tensor) -> torch.Tensor:
    return (rows >= b.q_first[:, None]) & (rows < b.q_end[:, None])


def _packed(cu_seqlens: torch.Tensor, total: int, longest: int) -> tuple[list[int], list[int]]:
    cu = cu_seqlens.long().clamp(0, total)
    return cu[:-1].tolist(), (cu[1:] - cu[:-1]).clamp(0, longest).tolist()


def _padded(packed: torch.Tensor, cu_seqlens: torch.Tensor | None, longest: int) -> torch.Tensor:
    assert cu_seqlens is not None
    padded = packed.new_zeros(len(cu_seqlens) - 1, packed.shape[1], longest, packed.shape[3])
    for b, (first, length) in enumerate(zip(*_packed(cu_seqlens, packed.shape[2], longest), strict=True)):
        padded[b, :, :length] = packed[0, :, first : first + length]
    return padded


def _queries(call: Call) -> torch.Tensor:
    p, scale = call.problem, call.q_scale
    if p.q_format == "as_q":
        return call.q
    numbers = call.q.view(KV_DTYPE[p.q_format]).double()
    if scale is None:
        return numbers
    if scale.ndim == 3:
        return numbers * scale.double()[..., None]
    by_head = scale.double().repeat_interleave(p.group, dim=1)  # (B, Hq)
    if not p.packed:
        return numbers * by_head[:, :, None, None]
    assert call.cu_seqlens_q is not None
    scaled = numbers.clone()
    for b, (first, length) in enumerate(zip(*_packed(call.cu_seqlens_q, call.q.shape[2], p.seq_q), strict=True)):
        scaled[0, :, first : first + length] *= by_head[b][:, None, None]
    return scaled


def _dequantised(
    call: Call, storage: torch.Tensor, kind: str, scale: torch.Tensor | None, blocks: torch.Tensor | None
) -> torch.Tensor:
    """Return keys or values (B, Hk, Sk, X) by position; quantized ones times their scales, in float64."""
    if kind == "as_q":
        return _in_order(call, storage)
    ordered = _in_order(call, storage)
    if blocks is not None:
        numbers = _of_blocks(ordered, _in_order(call, blocks))
        return numbers if scale is None else numbers * scale.double()[:, :, None, None]
    if scale is None:
        return ordered.view(KV_DTYPE[kind]).double()
    by_token = scale[:, :, None] if scale.ndim == 2 else _in_order(call, scale[..., None])[..., 0]
    if call.problem.cache_format.per_byte > 1:
        return _of_bytes(ordered, by_token, scale.ndim == 3, 2**call.problem.cache_format.bits)
    return ordered.view(KV_DTYPE[kind]).double() * by_token.double()[..., None]


def _of_bytes(stored: torch.Tensor, scale: torch.Tensor, by_token: bool, base: int) -> torch.Tensor:
    """Return values (B, Hk, Sk, X), float64, of bytes whose digits in `base` are numbers, the last digit first.

    The last such digit of a token's float32 scale is the zero point, and no part of the scale."""
    codes, zero = stored.to(torch.int64) % 256, torch.full_like(scale, base / 2, dtype=torch.float64)
    if by_token:
        word = scale.contiguous().view(torch.int32).to(torch.int64)
        zero = (word % base).double()
        scale = (word - word % base).to(torch.int32).view(torch.float32)
    places = [place for place in range(8) if base**place < 256]
    values = torch.stack([(codes // base**place % base).double() for place in places], dim=-1).flatten(-2)
    return (values - zero[..., None]) * scale.double()[..., None]


def _of_blocks(pairs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float64 values (B, Hk, Sk, X) of bytes (B, Hk, Sk, X / 2) of nvfp4 pairs and their blocks' scale bytes.

    A number is (-1)^s · 2^(e - 1) · (1 + f / 2), or f / 2 for e = 0."""
    codes = pairs.to(torch.int64) % 256
    values = codes.new_zeros((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=torch.float64)
    factors = scales.contiguous().view(KV_DTYPE["e4m3"]).double()
    for column in range(values.shape[-1]):
        code = codes[..., column // 2] // (16 if column % 2 else 1) % 16
        exponent, fraction = code // 2 % 4, (code % 2).double() / 2
        size = torch.where(exponent > 0, torch.exp2(exponent.double() - 1) * (1 + fraction), fraction)
        values[..., column] = torch.where(code < 8, size, -size) * factors[..., column // 16]
    return values


def _dequantised_rows(call: Call) -> torch.Tensor:
    """Return latent rows (B, 1, Sk, D) of fp8_ds_mla bytes by position, in float64."""
    p = call.problem
    rows = _in_order(call, call.k).contiguous()
    found = rows.new_zeros(*rows.shape[:3], p.head_dim, dtype=torch.float64)
    scales_at, rotary_at = p.head_dim_v, p.head_dim_v + p.head_dim_v // DS_GROUP * 4
    for group in range(p.head_dim_v // DS_GROUP):
        columns = slice(group * DS_GROUP, (group + 1) * DS_GROUP)
        scale = rows[..., scales_at + 4 * group : scales_at + 4 * group + 4].clone().view(torch.float32)
        found[..., columns] = rows[..., columns].clone().view(KV_DTYPE["e4m3"]).double() * scale
    found[..., p.head_dim_v :] = rows[..., rotary_at:].clone().view(torch.bfloat16)
    return found


def _in_order(call: Call, storage: torch.Tensor) -> torch.Tensor:
    p = call.problem
    if call.cu_seqlens_k is not None:
        return _padded(storage, call.cu_seqlens_k, p.seq_k)
    if call.page_table is None:
        return storage
    if not storage.numel():
        return storage.new_zeros(p.batch, p.heads_k, p.seq_k, storage.shape[3])
    if p.has_lists:  # a slot for each key
        slots = storage.transpose(1, 2).flatten(0, 1)  # (P · page, Hk, X)
        return slots[call.page_table.long().clamp(0, len(slots) - 1)].transpose(1, 2)
    pages = storage[call.page_table.long().clamp(0, storage.shape[0] - 1)]  # (B, pages, Hk, page, X)
    return pages.transpose(1, 2).flatten(2, 3)


__all__ = ["allowed_keys", "oracle"]


def oracle(call: Call, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and LSE of any op in float64, shaped as Call.new_out and Call.new_lse.

    Dropout needs a dropout_seed and leaves the LSE alone. Rows with nothing to attend get 0, and -inf or their sink;
    rows of no sequence 0 and -inf. `rows` (int64 indices) limits the query rows; not for packed queries."""
    view = dense_view(call, rows)
    q, k = view.q.double(), view.k.double()
    products = view.products(q, k)
    scores = view.with_terms(products * call.scale, products, q, k)
    lse = view.lse(scores)
    # Around 1e38 an LSE in float64 is the row's maximum: what it has lost of the sum's logarithm is `rest`.
    base = lse.masked_fill(lse.isinf(), 0.0)[..., None]
    rest = torch.logsumexp(view.with_sinks(scores) - base, dim=-1)
    rest = rest.masked_fill(rest == float("-inf"), 0.0)[..., None]
    probabilities = torch.exp(scores - base - rest)
    out = view.mixed(view.dropped(probabilities), view.v.double())
    return view.restored(out, 0.0), view.restored(lse, float("-inf"))
