"""Blocks of query rows and of keys, dequantized, wherever they lie: contiguous, packed, on pages, or chosen by indices.

Ids and positions are clamped to the storage. Clamped reads are marked invalid, or, for garbage in a page table inside a
sequence, read at least the cache's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from portattn.schema.call import Call
from portattn.schema.problem_limits import DS_GROUP, FORMATS
from portattn.schema.tensors import BLOCK_SCALES, KV_DTYPE

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the code's lower three bits; the fourth is the sign


def dequantize(
    stored: torch.Tensor,
    kind: str,
    scale: torch.Tensor | None,
    by_token: bool = False,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return numbers (…, n, D) times their scales (…, n) or (…, 1) in float32; unchanged if `kind` is as_q.

    Args:
        kind: Problem.kv_format; `stored` of several numbers a byte is as much narrower.
        by_token: each token has a scale, whose lowest bits hold the number that stands for 0 if there is one.
        blocks: bytes of the scales of blocks, (…, n, D / 16).
    """
    if kind == "as_q":
        return stored
    row = FORMATS[kind]
    if blocks is not None:
        numbers = of_blocks(stored, blocks)
        return numbers if scale is None else numbers * scale[..., None]
    if row.per_byte > 1:
        assert scale is not None
        numbers = unpack(stored, row.bits).float()
        if by_token:
            scale, zero = split_scale(scale, row.bits)
            return (numbers - zero[..., None]) * scale[..., None]
        return (numbers - row.zero) * scale[..., None]
    numbers = stored.view(KV_DTYPE[kind]).float()
    return numbers if scale is None else numbers * scale[..., None]


def of_blocks(stored: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return numbers (…, D) for nvfp4 bytes (…, D / 2) and the scales (…, D / 16) of their blocks of 16."""
    codes = unpack(stored, 4)
    numbers = torch.tensor(E2M1, device=stored.device)[(codes & 7).long()]
    numbers = torch.where(codes & 8 != 0, -numbers, numbers).unflatten(-1, (blocks.shape[-1], -1))
    return (numbers * blocks.view(BLOCK_SCALES).float()[..., None]).flatten(-2)


def unpack(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers without a sign of so many bits (…, D) in bytes as int8, each byte's lowest bits first."""
    return torch.stack([(stored >> place) & (2**bits - 1) for place in range(0, 8, bits)], dim=-1).flatten(-2)


def split_scale(scale: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a token's scale into the scale and, from its lowest bits, the number that stands for 0.

    Source: vLLM's int4_per_token_head, vllm/v1/attention/ops/int4_per_token_head.py."""
    word, mask = scale.view(torch.int32), 2**bits - 1
    return (word & ~mask).view(torch.float32), (word & mask).float()


def latent_rows(stored: torch.Tensor, rank: int) -> torch.Tensor:
    """Return float32 rows (…, n, rank + rope) of fp8_ds_mla bytes (…, n, width).

    A row holds `rank` e4m3 numbers, then their scales, then bfloat16 numbers."""
    groups = rank // DS_GROUP
    numbers = stored[..., :rank].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (groups, DS_GROUP))
    scales = stored[..., rank : rank + 4 * groups].contiguous().view(torch.float32)
    rotary = stored[..., rank + 4 * groups :].contiguous().view(torch.bfloat16)
    return torch.cat([(numbers * scales[..., None]).flatten(-2), rotary.float()], dim=-1)


@dataclass(frozen=True, slots=True)
class Extent:
    """Positions [first, end) of each sequence, 0 at row `origin`: (B,) int64, clamped to the storage as kernels do."""

    origin: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    alike: int | None = None  # without lengths: the end of every sequence, with first 0

    def longest(self, most: int) -> int:
        """Return a bound of all ends: the largest end if reading it back costs nothing, else `most`."""
        if self.end.device.type != "cpu" or not len(self.end):
            return most
        return min(int(self.end.max()), most)

    def numbers(self) -> list[tuple[int, int]] | None:
        """Return (first, end) of each sequence, one pair if all are alike; None where reading them back would wait."""
        if self.alike is not None:
            return [(0, self.alike)]
        if self.end.device.type != "cpu":
            return None
        return list(zip(self.first.tolist(), self.end.tolist(), strict=True))


def query_extent(call: Call) -> Extent:
    p = call.problem
    if call.cu_seqlens_q is not None:
        return _packed(call.cu_seqlens_q, call.q.shape[2], p.seq_q)
    return _padded(call.seqlens_q, call.leftpad_q, p.batch, p.seq_q, call.q.device)


def key_extent(call: Call) -> Extent:
    """Return the keys' extent; positions of a paged cache count along the sequence."""
    p = call.problem
    if call.cu_seqlens_k is not None:
        return _packed(call.cu_seqlens_k, call.k.shape[2], p.seq_k)
    return _padded(call.seqlens_k, call.leftpad_k, p.batch, p.seq_k, call.q.device)


def _padded(
    length: torch.Tensor | None, pad: torch.Tensor | None, batch: int, size: int, device: torch.device
) -> Extent:
    origin = torch.zeros(batch, dtype=torch.long, device=device)
    first = origin if pad is None else pad.long().clamp(0, size)
    end = torch.full_like(first, size)
    if length is not None:
        end = (first + length.long().clamp(min=0)).clamp(max=size)
    return Extent(origin, first, end, size if length is None and pad is None else None)


def _packed(cu_seqlens: torch.Tensor, rows: int, longest: int) -> Extent:
    cu = cu_seqlens.long().clamp(0, rows)
    return Extent(cu[:-1], torch.zeros_like(cu[:-1]), (cu[1:] - cu[:-1]).clamp(0, longest))


@dataclass(frozen=True, slots=True)
class Reach:
    """Key positions that a block of rows sees, by lengths, causal mask, window and chunks."""

    begin: int  # no row sees a position outside [begin, end)
    end: int
    all_begin: int  # every row of every sequence sees [all_begin, all_end)
    all_end: int


def reach(call: Call, queries: Extent, keys: Extent, start: int, stop: int, most: int) -> Reach:
    """Return the reach of rows [start, stop); if lengths lie on an accelerator, all `most` keys may be seen."""
    p = call.problem
    q_numbers, k_numbers = queries.numbers(), keys.numbers()
    if q_numbers is None or k_numbers is None or call.indices is not None or p.has_lists:
        return Reach(0, most, most, 0)
    count = max(len(q_numbers), len(k_numbers))
    right = 0 if p.causal != "none" else p.window_right
    begin, end, all_begin, all_end = most, 0, 0, most
    for (q_first, q_end), (k_first, k_end) in zip(
        _repeated(q_numbers, count), _repeated(k_numbers, count), strict=True
    ):
        first, last = max(start, q_first), min(stop, q_end)
        if (first, last) != (start, stop):
            all_end = 0  # rows of padding see nothing
        if first >= last:
            continue
        shift = k_first - q_first if p.causal == "top_left" else k_end - q_end
        low = (k_first, k_first)
        if p.window_left >= 0:
            low = max(k_first, first + shift - p.window_left), max(k_first, last - 1 + shift - p.window_left)
        high = (
            (k_end, k_end) if right < 0 else (min(k_end, first + shift + right + 1), min(k_end, last + shift + right))
        )
        if p.chunk:
            begins = [k_first + (row + shift - k_first) // p.chunk * p.chunk for row in (first, last - 1)]
            low = max(low[0], begins[0]), max(low[1], begins[1])
            high = min(high[0], begins[0] + p.chunk), min(high[1], begins[1] + p.chunk)
        begin, end = min(begin, low[0]), max(end, high[1])
        all_begin, all_end = max(all_begin, low[1]), min(all_end, high[0])
    return Reach(begin, min(end, most), all_begin, all_end)


def _repeated(numbers: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    return numbers * count if len(numbers) == 1 else numbers


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows [start, stop) of every sequence."""

    start: int
    stop: int
    q: torch.Tensor  # (B, Hq, n, D) in the compute dtype; 0 outside the sequences, whose padding can hold NaN
    position: torch.Tensor  # (1, n) int64
    inside: torch.Tensor  # (B, n) bool: the row belongs to its sequence
    storage: torch.Tensor | None  # packed: (B, n) int64 row; one past the last (thrown away) for rows of no sequence


def compute_dtype(call: Call) -> torch.dtype:
    return torch.float64 if call.q.dtype is torch.float64 else torch.float32


def load_rows(call: Call, extent: Extent, start: int, stop: int) -> RowBlock:
    i = torch.arange(start, stop, device=call.q.device)[None]
    inside = (i >= extent.first[:, None]) & (i < extent.end[:, None])
    storage = None
    parts = [call.q] if call.q_rope is None else [call.q, call.q_rope]
    if call.problem.packed:
        rows = extent.origin[:, None] + i
        total = call.q.shape[2]
        storage = rows.masked_fill(~inside, total)
        rows = rows.clamp(max=total - 1)
        parts = [part[0][:, rows].transpose(0, 1) for part in parts]
    else:
        parts = [part[:, :, start:stop] for part in parts]
    if call.problem.q_format != "as_q":
        parts = [_dequantized_rows(call, part, slice(start, stop) if storage is None else rows) for part in parts]
    parts = [part.to(compute_dtype(call)) for part in parts]
    q = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    return RowBlock(start, stop, q.masked_fill(~inside[:, None, :, None], 0.0), i, inside, storage)


def _dequantized_rows(call: Call, numbers: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return these rows of quantized queries, (B, Hq, n, D), dequantized; `rows` of packed queries are (B, n)."""
    scale = call.q_scale
    if scale is not None and scale.ndim == 2:
        scale = scale.repeat_interleave(call.problem.group, dim=1)[..., None]
    elif scale is not None:
        scale = scale[:, :, rows] if isinstance(rows, slice) else scale[0][:, rows].transpose(0, 1)
    return dequantize(numbers, call.problem.q_format, scale)


class RowBlockResults:
    """The results of row blocks, added in order, as the call's output and LSE."""

    def __init__(self, call: Call) -> None:
        self.call = call
        p = call.problem
        # Used with gradients: autograd would record every slice of an assembly in place.
        self.pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.storage: list[torch.Tensor] = []
        rows = p.query_rows[1] + p.packed  # packed: one row more, for results that are thrown away
        if p.packed:
            self.out = call.empty(rows, p.heads_q, p.head_dim_v).zero_()
            self.lse = call.empty(rows, p.heads_q, dtype=compute_dtype(call)).fill_(float("-inf"))
        else:
            self.out, self.lse = torch.zeros_like(call.new_out()), call.new_lse().to(compute_dtype(call))

    def add(self, rows: RowBlock, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add a block's out (B, Hq, n, Dv) and lse (B, Hq, n)."""
        if rows.storage is not None:
            self.storage.append(rows.storage)
        if self.call.problem.needs_grad:
            self.pieces.append((out, lse))
        elif rows.storage is not None:
            index = rows.storage.flatten()
            self.out.index_copy_(0, index, _by_row(out))
            self.lse.index_copy_(0, index, _by_row(lse))
        else:
            self.out[:, :, rows.start : rows.stop], self.lse[:, :, rows.start : rows.stop] = out, lse

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.out, self.lse
        if self.pieces:
            out, lse = (torch.cat(parts, dim=2) for parts in zip(*self.pieces, strict=True))
        if not self.call.problem.packed:
            return out, lse
        if self.pieces:
            index = torch.cat(self.storage, dim=1).flatten()
            out = self.out.index_copy(0, index, _by_row(out))
            lse = self.lse.index_copy(0, index, _by_row(lse))
        return out[:-1].transpose(0, 1)[None], lse[:-1].t().contiguous()[None]


def _by_row(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(1, 2).flatten(0, 1)


class RowTensor:
    """Rows (B, Hq, Sq, X), or packed (1, Hq, Tq + 1, X) with a last row that stands for rows of no sequence."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @classmethod
    def zeros(cls, call: Call, width: int) -> RowTensor:
        p = call.problem
        batch, count = p.query_rows
        return cls(call.empty(batch, p.heads_q, count + p.packed, width, dtype=compute_dtype(call)).zero_())

    @classmethod
    def of(cls, call: Call, values: torch.Tensor) -> RowTensor:
        """Wrap values laid out like the call's queries, (B, Hq, Sq, X) or (1, Hq, Tq, X)."""
        values = values.to(compute_dtype(call))
        return cls(torch.nn.functional.pad(values, (0, 0, 0, 1)) if call.problem.packed else values)

    def take(self, rows: RowBlock) -> torch.Tensor:
        """Return a block's rows, (B, Hq, n, X)."""
        if rows.storage is None:
            return self.values[:, :, rows.start : rows.stop]
        return self.values[0][:, rows.storage].transpose(0, 1)

    def put(self, rows: RowBlock, values: torch.Tensor) -> None:
        if rows.storage is None:
            self.values[:, :, rows.start : rows.stop] = values
        else:
            self.values[0].index_copy_(1, rows.storage.flatten(), values.transpose(0, 1).flatten(1, 2))

    def whole(self, call: Call) -> torch.Tensor:
        """Return (B, Hq, Sq, X) or (1, Hq, Tq, X)."""
        return self.values[:, :, : call.q.shape[2]]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The forward pass's numbers of each row, in the compute dtype."""

    largest: RowTensor  # score
    sum: RowTensor  # of exp(score − largest); 0 if nothing is attended
    out: RowTensor | None  # None if the call's output has the compute dtype

    @classmethod
    def empty(cls, call: Call) -> Statistics:
        rounded = call.dtype is not compute_dtype(call)
        out = RowTensor.zeros(call, call.problem.head_dim_v) if rounded else None
        return cls(RowTensor.zeros(call, 1), RowTensor.zeros(call, 1), out)

    def put(self, rows: RowBlock, largest: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> None:
        """Write a block's (B, Hq, n, 1), (B, Hq, n, 1) and (B, Hq, n, Dv)."""
        for where, values in ((self.largest, largest), (self.sum, total), (self.out, out)):
            if where is not None:
                where.put(rows, values)


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Places [start, stop) of all sequences' keys; H is Hk, or Hq if each query head has chosen its own tokens."""

    start: int
    stop: int
    k: torch.Tensor  # (B, H, n, D) as stored, or dequantized to float32
    v: torch.Tensor  # (B, H, n, Dv)
    position: torch.Tensor  # (1, 1, n) or (B, Hq, n) int64
    valid: torch.Tensor  # (B, 1 or Hq, n) bool; k and v can hold anything elsewhere


def key_heads(call: Call) -> int:
    return call.problem.heads_k if call.indices is None else call.problem.heads_q


def key_places(call: Call, extent: Extent) -> int:
    """Return the number of key places to visit; later places hold no valid key."""
    p = call.problem
    if p.seq_k == 0 or 0 in call.k.shape[:3]:
        return 0  # no storage, so nothing that an index could be clamped to
    if call.counts is None:
        return extent.longest(p.seq_k)
    if call.counts.device.type == "cpu" and call.counts.numel():
        return min(max(int(call.counts.max()), 0), p.tokens)
    return p.tokens


def block_size(call: Call, size: int, elements: int) -> int:
    """Return a block's places: `size`, or fewer if query heads gather their own tokens, over `elements` numbers."""
    p = call.problem
    if call.indices is None or p.invariant:
        return size
    return max(min(size, elements // max(p.batch * p.heads_q * max(p.head_dim, p.head_dim_v), 1)), 1)


def key_blocks(call: Call, extent: Extent, size: int, begin: int, end: int) -> Iterator[KeyBlock]:
    """Yield the keys at places [begin, end) in blocks from multiples of `size`: sums do not depend on `begin`."""
    for start in range(begin - begin % size, end, size):
        stop = min(start + size, end)
        yield _positions(call, extent, start, stop) if call.indices is None else _chosen(call, extent, start, stop)


def _positions(call: Call, extent: Extent, start: int, stop: int) -> KeyBlock:
    j = torch.arange(start, stop, device=call.q.device)
    valid = (j >= extent.first[:, None]) & (j < extent.end[:, None])  # (B, n)
    if call.page_table is not None:
        if call.problem.has_lists:
            valid = valid & (call.page_table[:, start:stop] >= 0)
        pages, offsets = _on_pages(call, j)
        k, v = _both(call, lambda storage: storage[pages, :, offsets].transpose(1, 2))
    elif call.cu_seqlens_k is not None:
        rows = (extent.origin[:, None] + j).clamp(max=call.k.shape[2] - 1)  # (B, n)
        k, v = _both(call, lambda storage: storage[0][:, rows].transpose(0, 1))
    else:
        k, v = call.k[:, :, start:stop], call.v[:, :, start:stop]
    if call.problem.cache_format.latent:
        k = latent_rows(k, call.problem.head_dim_v)
        v = k[..., : call.problem.head_dim_v]
    elif call.problem.kv_format != "as_q":
        k = _dequantized_keys(call, k, call.k_scale, call.k_block_scale, extent, start, stop)
        if call.problem.v_format != "as_q":
            v = _dequantized_keys(call, v, call.v_scale, call.v_block_scale, extent, start, stop)
    return KeyBlock(start, stop, k, v, j[None, None], valid[:, None])


def _dequantized_keys(
    call: Call,
    numbers: torch.Tensor,
    scale: torch.Tensor | None,
    blocks: torch.Tensor | None,
    extent: Extent,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Return numbers (B, H, n, D) at positions [start, stop), dequantized."""
    p = call.problem
    scale = None if scale is None else _of_tokens(call, scale, extent, start, stop)
    blocks = None if blocks is None else _of_tokens(call, blocks, extent, start, stop)
    return dequantize(numbers, p.kv_format, scale, p.kv_scales == "token", blocks)


def _of_tokens(call: Call, scale: torch.Tensor, extent: Extent, start: int, stop: int) -> torch.Tensor:
    """Return the scales at positions [start, stop): (B, H, n) or (B, H, 1), for nvfp4's blocks (B, H, n, D / 16)."""
    if scale.ndim == 2:
        scale = scale[:, :, None]
    elif call.cu_seqlens_k is not None:
        rows = extent.origin[:, None] + torch.arange(start, stop, device=scale.device)
        scale = scale[0][:, rows.clamp(max=scale.shape[2] - 1)].transpose(0, 1)
    elif call.page_table is None:
        scale = scale[:, :, start:stop]
    else:
        pages, offsets = _on_pages(call, torch.arange(start, stop, device=scale.device))
        scale = scale[pages, :, offsets].transpose(1, 2)
    return scale


def _on_pages(call: Call, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return page and row in it of each sequence's keys at these places, (B, n)."""
    assert call.page_table is not None
    page = call.problem.page_size
    if call.problem.has_lists:
        slots = call.page_table[:, places].long().clamp(min=0)
        pages, offsets = slots // page, slots % page
    else:
        pages = call.page_table[:, places // page].long()
        offsets = (places % page).expand_as(pages)
    return pages.clamp(0, call.k.shape[0] - 1), offsets


def _chosen(call: Call, extent: Extent, start: int, stop: int) -> KeyBlock:
    p, device = call.problem, call.q.device
    assert call.indices is not None
    assert call.counts is not None
    token = call.indices[:, :, start:stop].long()  # (B, Hq, n)
    place = torch.arange(start, stop, device=device)
    valid = (place < call.counts[..., None]) & (token >= extent.first[:, None, None])
    valid = valid & (token < extent.end[:, None, None])
    if call.log_weights is not None:  # a token without weight is not attended, whatever its key holds
        valid = valid & (call.log_weights[:, :, start:stop] != float("-inf"))
    token = token.clamp(0, p.seq_k - 1)
    sequence = torch.arange(p.batch, device=device)[:, None, None]
    head = (torch.arange(p.heads_q, device=device) // p.group)[None, :, None]
    slot, place = sequence, token
    if call.page_table is not None:
        slot = call.page_table[sequence, token // p.page_size].long().clamp(0, call.k.shape[0] - 1)
        place = token % p.page_size
    k, v = _both(call, lambda storage: storage[slot, head, place])
    if p.kv_format != "as_q":

        def chosen(scale: torch.Tensor | None) -> torch.Tensor | None:
            if scale is None or scale.ndim == 2:
                return None if scale is None else scale.repeat_interleave(p.group, dim=1)[..., None]
            return scale[slot, head, place]

        k, v = (
            dequantize(numbers, p.kv_format, chosen(scale), p.kv_scales == "token")
            for numbers, scale in ((k, call.k_scale), (v, call.v_scale))
        )
    return KeyBlock(start, stop, k, v, token, valid)


def _both(call: Call, gather: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gathered keys and values, from one gather for latent rows, whose first columns are the values."""
    k = gather(call.k)
    return k, k[..., : call.problem.head_dim_v] if call.problem.op == "mla_attention" else gather(call.v)
