"""Cache writes in plain torch: new keys and values rotated, quantized and stored, with the kernel's bits."""

from __future__ import annotations

import torch

from portattn.reference.blocks import E2M1
from portattn.schema.call import Call
from portattn.schema.problem_limits import FORMATS
from portattn.schema.tensors import BLOCK_SCALES, KV_DTYPE, KV_STORED

NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e4m3fnuz": -0x80}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
NV_BLOCK, INT4 = FORMATS["nvfp4"].block, FORMATS["int4"]
MOST = 2**INT4.bits - 1  # the largest of int4's sixteen numbers


def run(call: Call) -> tuple[torch.Tensor, None]:
    """Fill the call's cache, and its scales of tokens and blocks, or its `result`; return (no elements, None)."""
    p = call.problem
    if call.result is not None:
        fill = _fill_logits if p.op == "indexer_logits" else _fill_indices
        fill(call, call.result)
        return call.new_out(), None
    block, at, there = _places(call)
    keys, values = call.q, call.new_v
    assert values is not None
    if p.rotary != "none":
        keys = _rotated(call, at)
    both = (keys, call.k, call.k_scale, call.k_block_scale), (values, call.v, call.v_scale, call.v_block_scale)
    for new, cache, scale, blocks in both:
        rows = new.transpose(1, 2)  # (B, Sq, Hk, D)
        numbers = rows
        if p.kv_format == "int4":
            assert scale is not None
            numbers = _four_bits(call, rows.float(), scale, (block, at, there))
        elif blocks is not None:
            numbers = rows.float() if scale is None else rows.float() / scale[: p.batch, None, :, None]
            numbers, own = in_blocks(numbers)
            _put(blocks, own, block, at, there)
        elif p.kv_format != "as_q":
            numbers = rows.float()
            if p.kv_scales == "head":
                assert scale is not None
                numbers = numbers / scale[: p.batch, None, :, None]
            elif p.kv_scales == "token":
                assert scale is not None
                own = token_scale(numbers, p.kv_format)
                _put(scale[..., None], own[..., None], block, at, there)
                numbers = numbers / own[..., None]
            numbers = eight_bits(numbers, p.kv_format)
        _put(cache, numbers, block, at, there)
    return call.new_out(), None


AT_ONCE = 2**24  # numbers of one step of the reference's loops over rows


def seen_keys(call: Call) -> torch.Tensor:
    """Return whether each row sees each key, (B, Sq, Sk) bool, by ranges of rows or lengths of sequences."""
    p, at = call.problem, torch.arange(call.problem.seq_k, device=call.q.device)
    shape = (p.batch, p.seq_q, 1)
    seen = torch.ones(*shape[:2], p.seq_k, dtype=torch.bool, device=call.q.device)
    if call.seqlens_k is not None:
        behind = torch.arange(p.seq_q - 1, -1, -1, device=at.device)  # rows after each
        seen &= at < (call.seqlens_k[:, None] - behind)[..., None]
    if call.row_starts is not None:
        seen &= at >= call.row_starts.view(shape)
    if call.row_ends is not None:
        seen &= at < call.row_ends.view(shape)
    return seen


def _fill_logits(call: Call, out: torch.Tensor) -> None:
    p, seen = call.problem, seen_keys(call)
    assert call.weights is not None
    out.fill_(-torch.inf)
    if not p.seq_k:
        return
    at = torch.arange(p.seq_k, device=out.device)
    for b in range(p.batch):
        k, k_scale = call.k[0, 0], call.k_scale
        if call.page_table is not None:
            page = call.page_table[b, at // p.page_size].long().clamp(0, call.k.shape[0] - 1)
            k = call.k[page, 0, at % p.page_size]
            k_scale = None if k_scale is None else k_scale[page, 0, at % p.page_size]
        elif k_scale is not None:
            k_scale = k_scale[0, 0]
        keys = _floats(k, p.kv_format)
        step = max(AT_ONCE // (p.heads_q * p.seq_k), 1)
        for first in range(0, p.seq_q, step):
            rows = slice(first, first + step)
            scores = torch.einsum("hsd,kd->shk", _floats(call.q[b, :, rows], p.kv_format), keys).relu()
            logits = torch.einsum("shk,sh->sk", scores, call.weights[b, rows])
            logits = logits if k_scale is None else logits * k_scale
            out[b, rows] = torch.where(seen[b, rows], logits, -torch.inf)


def _floats(numbers: torch.Tensor, kind: str) -> torch.Tensor:
    return (numbers if kind == "as_q" else numbers.contiguous().view(KV_DTYPE[kind])).float()


def _fill_indices(call: Call, out: torch.Tensor) -> None:
    # A stable sort puts equal logits in the order of their keys.
    p, logits, seen = call.problem, call.q[:, 0], seen_keys(call)
    out.fill_(-1)
    kept = min(p.tokens, p.seq_k)
    step = max(AT_ONCE // max(p.seq_k, 1), 1)
    for b in range(p.batch):
        for first in range(0, p.seq_q, step):
            rows = slice(first, first + step)
            numbers = logits[b, rows].float()
            counts = seen[b, rows] & (numbers > -torch.inf)  # NaN is not
            numbers = numbers.masked_fill(~counts, -torch.inf)
            keys = numbers.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
            keys = keys.masked_fill(~counts.gather(-1, keys), p.seq_k).sort(dim=-1).values
            out[b, rows, :kept] = keys.masked_fill(keys == p.seq_k, -1).to(out.dtype)


def _four_bits(
    call: Call, numbers: torch.Tensor, scale: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return rows (B, Sq, Hk, D) as bytes (B, Sq, Hk, D / 2); store a scale for each token."""
    if call.problem.kv_scales == "head":
        return four_bits(numbers / scale[: call.problem.batch, None, :, None], torch.full((), INT4.zero))
    step, zero = int4_step(numbers)
    own = (step.view(torch.int32) | zero).view(torch.float32)
    _put(scale[..., None], own[..., None], *places)
    return four_bits(numbers / step[..., None], zero[..., None])


def _places(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each token's sequence or page, its row there, and whether there is such a place: (B, Sq) each."""
    p = call.problem
    if call.slots is not None:
        slots = call.slots.long()[None]
        there = (slots >= 0) & (slots < p.seq_k)
        slots = slots.masked_fill(~there, 0)
        return slots // p.page_size, slots % p.page_size, there
    assert call.seqlens_k is not None
    first = call.seqlens_k.long()[:, None]
    at = first + torch.arange(p.seq_q, device=first.device)
    there = (first >= 0) & (at < p.seq_k)
    return torch.arange(p.batch, device=first.device)[:, None].expand_as(at), at, there


def _put(cache: torch.Tensor, rows: torch.Tensor, block: torch.Tensor, at: torch.Tensor, there: torch.Tensor) -> None:
    """Write rows (B, Sq, Hk, D) that have a place into a cache (…, Hk, …, D) at (block, at)."""
    if cache.device.type == "cpu":
        chosen = there.nonzero(as_tuple=True)
        cache.transpose(1, 2)[block[chosen], at[chosen]] = rows[chosen].to(cache.dtype)
        return
    # How many tokens have a place is not known without waiting for the device: all of them write.
    _put_all(cache.transpose(1, 2), rows.to(cache.dtype), block, at, there)


def _put_all(
    cache: torch.Tensor, rows: torch.Tensor, block: torch.Tensor, at: torch.Tensor, there: torch.Tensor
) -> None:
    if not cache.shape[0] or not cache.shape[1] or not there.numel():
        return
    size = cache.shape[1]
    wanted = torch.where(there, block * size + at, -1).flatten()
    # Tokens without a place repeat the first token that has one; without any, place 0 keeps its content.
    first = there.flatten().to(torch.int8).argmax()
    some = there.any()
    place = torch.where(wanted >= 0, wanted, torch.where(some, wanted[first], 0))
    flat = rows.flatten(0, 1)
    mine = torch.where(there.flatten()[:, None, None], flat, flat[first])
    block, at = place // size, place % size
    cache[block, at] = torch.where(some, mine, cache[block, at])


def _rotated(call: Call, at: torch.Tensor) -> torch.Tensor:
    p, cos, sin = call.problem, call.cos, call.sin
    assert cos is not None
    assert sin is not None
    angle = (at if call.positions is None else call.positions.long()[None]).clamp(0, cos.shape[0] - 1)
    c, s = (table[angle].float()[:, None] for table in (cos, sin))  # (B, 1, Sq, rotary_dim / 2)
    turned, rest = call.q[..., : p.rotary_dim], call.q[..., p.rotary_dim :]
    if p.rotary == "neox":
        first, second = turned.float().chunk(2, dim=-1)
    else:
        first, second = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    both = first * c - second * s, second * c + first * s
    found = torch.cat(both, dim=-1) if p.rotary == "neox" else torch.stack(both, dim=-1).flatten(-2)
    return torch.cat((found.to(call.q.dtype), rest), dim=-1)


def token_scale(numbers: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the scale of each row (…, D), by which its largest finite number fills the format; never 0."""
    size = numbers.abs()
    widest = torch.where(size < torch.inf, size, 0.0).amax(-1)
    # By a tensor: a number would be inverted first on some devices.
    return (widest / torch.full_like(widest, FORMATS[kind].largest)).clamp_min(SMALLEST_SCALE)


def eight_bits(numbers: torch.Tensor, kind: str) -> torch.Tensor:
    """Return float32 numbers in a format as a Call has them: to the nearest, ties to even, saturated."""
    limit = FORMATS[kind].largest
    inside = numbers.clamp(-limit, limit)
    if kind == "int8":
        return inside.round().nan_to_num(0.0).to(KV_STORED)
    stored = inside.to(KV_DTYPE[kind]).view(KV_STORED)
    return torch.where(numbers.isnan(), NAN_CODE[kind], stored)


def in_blocks(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 rows (…, D) as nvfp4 bytes (…, D / 2), and the scales (…, D / 16) of their blocks.

    A scale is a sixth of the block's largest finite number, in e4m3. Quotients are rounded to the nearest, ties to the
    even code, and saturated; NaN is 0, and so are all numbers under a scale of 0."""
    blocks = numbers.unflatten(-1, (-1, NV_BLOCK))
    size = blocks.abs()
    widest = torch.where(size < torch.inf, size, 0.0).amax(-1)
    stored = eight_bits(widest / torch.full_like(widest, E2M1[-1]), "e4m3")
    scale = stored.view(BLOCK_SCALES).float()[..., None]
    divided = torch.where(
        scale == 0.0, torch.zeros_like(blocks), blocks / scale.masked_fill(scale == 0.0, 1.0)
    ).flatten(-2)
    levels = torch.tensor(E2M1, device=numbers.device)
    middle = (levels[1:] + levels[:-1]) / 2
    size = divided.abs().nan_to_num(0.0, posinf=2 * E2M1[-1]).contiguous()
    below, at_most = torch.bucketize(size, middle), torch.bucketize(size, middle, right=True)
    code = torch.where(below % 2 == 0, below, at_most)  # they differ where it is a tie
    code = torch.where(divided.signbit() & ~divided.isnan(), code + 8, code).unflatten(-1, (-1, 2))
    return (code[..., 0] | code[..., 1] << 4).to(torch.uint8).view(KV_STORED), stored


def int4_step(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's step between two of the sixteen numbers, and the one that stands for 0 (int32).

    They cover 0 and the row's finite numbers. The step's lowest four bits are 0: the other number's place."""
    finite = torch.where(numbers.abs() < torch.inf, numbers, 0.0)
    low, high = finite.amin(-1).clamp_max(0.0), finite.amax(-1).clamp_min(0.0)
    most = torch.full_like(low, MOST)  # divided by each, so that no difference is infinite
    step = (high / most - low / most).clamp_min(SMALLEST_SCALE)
    step = (step.view(torch.int32) & ~MOST).view(torch.float32)
    return step, (-low / step).round().clamp_max(MOST).int()


def four_bits(numbers: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return scaled float32 numbers (…, D) as int4 bytes (…, D / 2): nearest-even, saturated, NaN as 0, plus `zero`."""
    low, high = -zero.float(), MOST - zero.float()
    whole = torch.where(numbers > high, high, torch.where(numbers < low, low, numbers)).round().nan_to_num(0.0)
    code = (whole.int() + zero).unflatten(-1, (-1, 2))
    return (code[..., 0] | code[..., 1] << 4).to(torch.uint8).view(KV_STORED)
