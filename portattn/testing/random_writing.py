"""Random calls that fill a cache or a result with a pattern before, and checks by definition."""

from __future__ import annotations

import functools
from typing import Any

import torch

from portattn.schema.call import Call
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.schema.tensors import KV_DTYPE, KV_STORED, TORCH_DTYPE

BEFORE = 42.0  # what caches and scales of tokens hold before
BEYOND = (2**31 - 1, -(2**31), -1)  # what says that a token has no place, beside a place behind the last one
ANGLES = 64
# Formats: bits of the fraction, the exponent's bias, the largest number, and the code of NaN (kernels/dequantize.py).
_FLOATS = {"e4m3": (3, 7, 448.0, 0x7F), "e5m2": (2, 15, 57344.0, 0x7F), "e4m3fnuz": (3, 8, 240.0, 0x80)}
_LARGEST = {"int8": 127.0} | {name: form[2] for name, form in _FLOATS.items()}
_TINY = 2.0**-126  # a scale for a token is no smaller


def random_writing(p: Problem, seed: int = 0, *, device: str = "cpu", spare: bool = False) -> Call:
    """Return a call that writes rows which are hard to store: ties, too large and too small numbers, NaN, infinity."""
    generator = torch.Generator().manual_seed(seed)
    if ROWS[p.op].allocates:
        return (_random_choice if p.op == "topk_indices" else _random_logits)(p, generator, device, spare)
    dtype, kind = TORCH_DTYPE[p.dtype], p.cache_format
    stored = dtype if p.kv_format == "as_q" else KV_STORED
    pages = max(p.seq_k // p.page_size, 1) if p.page_size else p.batch
    rows = p.page_size or p.seq_k

    def new(width: int) -> torch.Tensor:
        made = _numbers((p.batch, p.seq_q, p.heads_k, width), p, generator).to(dtype)
        return made.to(device).transpose(1, 2)

    def cache(width: int) -> torch.Tensor:
        heads_last = (p.page_layout == "phd") if p.page_size else (p.layout == "bshd")
        shape = (pages, rows, p.heads_k) if heads_last else (pages, p.heads_k, rows)
        width = width // kind.per_byte if width > 1 else width  # 1: a scale
        memory = torch.full((pages * rows * p.heads_k * (width + spare) + spare,), BEFORE, dtype=stored, device=device)
        view = memory[int(spare) :].view(*shape, width + spare)[..., :width]
        return view.transpose(1, 2) if heads_last else view

    def scale() -> torch.Tensor | None:
        if p.kv_scales == "head":
            return (0.001 + torch.rand(p.batch, p.heads_k, generator=generator) / 8).to(device)
        return cache(1)[..., 0].to(torch.float32) if p.kv_scales == "token" else None

    call = Call(
        problem=p, q=new(p.head_dim), new_v=new(p.head_dim_v), k=cache(p.head_dim), v=cache(p.head_dim_v), scale=1.0,
        k_scale=scale(), v_scale=scale(),
    )  # fmt: skip
    if kind.block:
        call.k_block_scale, call.v_block_scale = (
            cache(width // kind.block * kind.per_byte) for width in (p.head_dim, p.head_dim_v)
        )
    if p.rotary_dim:
        angles = torch.rand(ANGLES, p.rotary_dim // 2, generator=generator) * 6.3
        call.cos, call.sin = angles.cos().to(device), angles.sin().to(device)
    if not p.page_size:
        room = max(p.seq_k - p.seq_q, 0)
        first = torch.randint(0, room + 1, (p.batch,), generator=generator, dtype=torch.int32)
        first[:1] = p.seq_k - p.seq_q // 2  # the last rows are beyond
        first[2::3] = -1
        call.seqlens_k = first.to(device)
        return call
    slots = torch.full((p.seq_q,), -1, dtype=torch.int64)
    placed = torch.randperm(p.seq_k, generator=generator)[: p.seq_q]
    slots[: len(placed)] = placed
    without = torch.tensor([*BEYOND, p.seq_k])
    lost = torch.rand(p.seq_q, generator=generator) < 0.2
    slots[lost] = without[torch.randint(len(without), (int(lost.sum()),), generator=generator)]
    call.slots = slots.to(device)
    if p.rotary_dim:
        call.positions = torch.randint(0, ANGLES, (p.seq_q,), generator=generator).to(device)
    return call


def _numbers(shape: tuple[int, ...], p: Problem, generator: torch.Generator) -> torch.Tensor:
    """Return float32 numbers: normal ones of many sizes, ones halfway between two of the format, and wild ones."""
    size = 2.0 ** torch.randint(-24, 18, shape, generator=generator)
    found = torch.randn(shape, generator=generator) * torch.where(torch.rand(shape, generator=generator) < 0.5, 1, size)
    if p.kv_format in _FLOATS and p.kv_scales == "none":
        values = _values(p.kv_format)
        middle = torch.cat(((values[1:] + values[:-1]) / 2, values)).float()
        drawn = middle[torch.randint(len(middle), shape, generator=generator)]
        found = torch.where(torch.rand(shape, generator=generator) < 0.5, drawn, found)
    wild = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -6e4])
    drawn = wild[torch.randint(len(wild), shape, generator=generator)]
    found = torch.where(torch.rand(shape, generator=generator) < 0.05, drawn, found)
    found[:, 1:2] = 0.0  # a row of zeros
    return found


def _out(shape: tuple[int, ...], dtype: torch.dtype, device: str, spare: bool) -> torch.Tensor:
    fill = float("nan") if dtype.is_floating_point else int(BEFORE)
    return torch.full((*shape[:-1], shape[-1] + spare), fill, dtype=dtype, device=device)[..., : shape[-1]]


def _ranges(p: Problem, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return ranges of rows inside the first 7/8 of the keys; the first row's is empty, and the second's too long."""
    rows, most = p.batch * p.seq_q, p.seq_k * 7 // 8
    starts, ends = torch.randint(0, most + 1, (2, rows), generator=generator, dtype=torch.int32).sort(dim=0).values
    starts[:1], ends[:1] = most, most // 2
    starts[1:2], ends[1:2] = -3, most
    return {"row_starts": starts, "row_ends": ends}


def _spread(tensor: torch.Tensor, device: str, spare: bool) -> torch.Tensor:
    """Return a copy on the device; with `spare` its rows are one element longer."""
    memory = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + spare)).to(device)
    view = memory[..., : tensor.shape[-1]]
    return view.copy_(tensor)


def _random_logits(p: Problem, generator: torch.Generator, device: str, spare: bool) -> Call:
    """Return a call of indexer_logits. Keys that no row sees are NaN, with wild scales and page ids."""
    paged, pages = p.page_size > 0, p.batch * (p.seq_k // p.page_size) + 2 if p.page_size else 1
    rows = pages * (p.page_size or p.seq_k)
    q = torch.randn(p.batch, p.seq_q, p.heads_q, p.head_dim, generator=generator)
    k = torch.randn(rows, p.head_dim, generator=generator)
    weights = torch.randn(p.batch, p.seq_q, p.heads_q, generator=generator)
    scale = 0.01 + torch.rand(rows, generator=generator)
    given: dict[str, Any] = {} if paged else _ranges(p, generator)
    if paged:
        lengths = torch.randint(0, p.seq_k + 1, (p.batch,), generator=generator, dtype=torch.int32)
        lengths[:1] = p.seq_k
        table = torch.randperm(pages, generator=generator)[: p.batch * (p.seq_k // p.page_size)]
        table = table.view(p.batch, -1).int()
        at = torch.arange(p.seq_k)
        seen = at < lengths[:, None]
        used = torch.zeros(rows, dtype=torch.bool)
        used[(table[:, at // p.page_size] * p.page_size + at % p.page_size)[seen].long()] = True
        table[torch.arange(table.shape[1]) * p.page_size >= lengths[:, None]] = BEYOND[0]
        given = {"seqlens_k": lengths, "page_table": table}
    else:
        used = torch.arange(rows) < max(given["row_ends"].tolist(), default=0)
    k[~used], scale[~used] = float("nan"), float("nan")
    dtype = TORCH_DTYPE[p.dtype] if p.kv_format == "as_q" else KV_DTYPE[p.kv_format]
    q, k = q.to(dtype), k.to(dtype).view(pages, -1, p.head_dim)
    if p.kv_format != "as_q":
        q, k = q.view(KV_STORED), k.view(KV_STORED)
    scale, given = scale.view(pages, -1), {name: tensor.to(device) for name, tensor in given.items()}
    k = _spread(k, device, spare)[:, None]
    return Call(
        problem=p, q=_spread(q, device, spare).transpose(1, 2), k=k, v=k, scale=1.0, weights=weights.to(device),
        k_scale=_spread(scale, device, spare)[:, None] if p.kv_scales == "token" else None,
        result=_out((p.batch, p.seq_q, p.seq_k), torch.float32, device, spare),
        **given,
    )  # fmt: skip


def _random_choice(p: Problem, generator: torch.Generator, device: str, spare: bool) -> Call:
    """Return a call of topk_indices with many equal logits, NaN and infinities, and a row of -inf alone."""
    logits = torch.randn(p.batch, p.seq_q, p.seq_k, generator=generator)
    coarse = torch.rand(p.batch, p.seq_q, 1, generator=generator) < 0.6
    logits = torch.where(coarse, (logits * 3).round() / 3, logits)
    wild = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    drawn = wild[torch.randint(len(wild), logits.shape, generator=generator)]
    logits = torch.where(torch.rand(logits.shape, generator=generator) < 0.2, drawn, logits)
    logits[:, 2:3] = -float("inf")
    logits = _spread(logits.to(TORCH_DTYPE[p.dtype]), device, spare)[:, None]
    ranges: dict[str, Any] = {name: tensor.to(device) for name, tensor in _ranges(p, generator).items()}
    out = _out((p.batch, p.seq_q, p.tokens), torch.int32, device, spare)
    return Call(problem=p, q=logits, k=logits, v=logits, scale=1.0, result=out, **ranges)


def _row_range(call: Call, b: int, i: int) -> range:
    p, row = call.problem, b * call.problem.seq_q + i
    end = p.seq_k if call.seqlens_k is None else int(call.seqlens_k[b]) - (p.seq_q - 1 - i)
    end = end if call.row_ends is None else min(end, int(call.row_ends.flatten()[row]))
    return range(max(0 if call.row_starts is None else int(call.row_starts.flatten()[row]), 0), max(end, 0))


def _judge_choice(call: Call) -> dict[str, int | float]:
    p, wrong = call.problem, 0
    assert call.result is not None
    for b in range(p.batch):
        for i in range(p.seq_q):
            numbers = call.q[b, 0, i].detach().cpu().double().tolist()
            order = sorted((-numbers[j], j) for j in _row_range(call, b, i) if numbers[j] > -float("inf"))
            chosen = sorted(j for _, j in order[: p.tokens])
            chosen += [-1] * (p.tokens - len(chosen))
            wrong += int((call.result[b, i].cpu() != torch.tensor(chosen)).sum())
    return {"error": 0.0, "budget": 0.0, "wrong": wrong}


# Relative errors of products, beside the errors of sums in float32. A chip's sums of 8-bit products may have 14 bits.
_IMPRECISE = {"tf32": 2.0**-10, "hf32": 2.0**-10, "tf32x3": 2.0**-20, "bf16x6": 2.0**-20}


def _judge_logits(call: Call, precision: str) -> dict[str, int | float]:
    """Return the largest error as a share of the sum of all terms' magnitudes, which sums in float32 bound."""
    p, wrong, error = call.problem, 0, 0.0
    assert call.result is not None
    assert call.weights is not None
    q, k, weights, out = (tensor.detach().cpu() for tensor in (call.q, call.k, call.weights, call.result))
    if p.kv_format != "as_q":
        q, k = (tensor.contiguous().view(KV_DTYPE[p.kv_format]) for tensor in (q, k))
    for b in range(p.batch):
        at = torch.arange(p.seq_k)
        page = at * 0 if call.page_table is None else call.page_table.cpu()[b, at // p.page_size]
        at = at % p.page_size if p.page_size else at
        for i in range(p.seq_q):
            seen = _row_range(call, b, i)
            places = page[seen.start : seen.stop].long(), at[seen.start : seen.stop]
            keys = k[places[0], 0, places[1]].double()
            factor = 1.0 if call.k_scale is None else call.k_scale.cpu()[places[0], 0, places[1]].double()
            terms = weights[b, i].double()[:, None] * (q[b, :, i].double() @ keys.t()).clamp(min=0.0)
            sizes = q[b, :, i].double().abs() @ keys.abs().t()
            most = (weights[b, i].double().abs()[:, None] * sizes).sum(0) * factor
            ours = out[b, i].double()
            inside = torch.zeros(p.seq_k, dtype=torch.bool)
            inside[seen.start : seen.stop] = True
            wrong += int((ours[~inside] != -torch.inf).sum() + (~ours[inside].isfinite()).sum())
            off = (ours[inside] - terms.sum(0) * factor).abs() / most
            error = max(error, float(off.nan_to_num(0.0).max()) if off.numel() else 0.0)
    budget = (p.head_dim + p.heads_q + 2) * 2.0**-24 + _IMPRECISE.get(precision, 0.0)
    return {"error": error, "budget": budget + (2.0**-13 if p.kv_format != "as_q" else 0.0), "wrong": wrong}


def judge_writing(call: Call, precision: str = "ieee") -> dict[str, int | float]:
    """Return {error, budget, wrong}: the largest difference, 0, and places wrongly NaN, infinite or changed."""
    if call.result is not None:
        return _judge_choice(call) if call.problem.op == "topk_indices" else _judge_logits(call, precision)
    error, wrong = 0.0, 0
    for name, expected in expected_cache(call).items():
        ours = getattr(call, name).detach().cpu().double()
        expected = expected.double()
        same = (ours == expected) | (ours.isnan() & expected.isnan())
        both = ours.isfinite() & expected.isfinite()
        wrong += int((~same & ~both).sum())
        error = max(error, float((ours - expected).abs()[both & ~same].max()) if (both & ~same).any() else 0.0)
    return {"error": error, "budget": 0.0, "wrong": wrong}


def expected_cache(call: Call) -> dict[str, torch.Tensor]:
    """Return the numbers that k, v and token scales must hold, as the Call has them, row by row, on the CPU."""
    p = call.problem
    found = {
        name: torch.full(getattr(call, name).shape, BEFORE, dtype=getattr(call, name).dtype) for name in ("k", "v")
    }
    if p.kv_scales == "token":
        found |= {name: torch.full(getattr(call, name).shape, BEFORE) for name in ("k_scale", "v_scale")}
    if p.cache_format.block:
        names = "k_block_scale", "v_block_scale"
        found |= {name: torch.full(getattr(call, name).shape, BEFORE, dtype=KV_STORED) for name in names}
    for b in range(p.batch):
        for i in range(p.seq_q):
            place = _place(call, b, i)
            if place is None:
                continue
            block, at, position = place
            assert call.new_v is not None
            for name, new in (("k", call.q), ("v", call.new_v)):
                rows = new[b, :, i].detach().cpu()
                if name == "k" and p.rotary_dim:
                    rows = _turned(call, rows, position)
                scale = getattr(call, f"{name}_scale")
                factor = None if scale is None or p.kv_scales == "token" else scale[b].detach().cpu()[:, None]
                if p.kv_format == "int4":
                    rows, own = _pairs(rows.float(), factor)
                    if own is not None:
                        found[f"{name}_scale"][block, :, at] = own
                    found[name][block, :, at] = rows
                    continue
                if p.kv_format == "nvfp4":
                    numbers = rows.float() if factor is None else rows.float() / factor
                    found[name][block, :, at], found[f"{name}_block_scale"][block, :, at] = _blocks(numbers)
                    continue
                if p.kv_format != "as_q":
                    numbers = rows.float()
                    if p.kv_scales == "token":
                        finite = numbers.abs().masked_fill(~numbers.isfinite(), 0.0)
                        factor = (finite.amax(1, keepdim=True) / torch.tensor(_LARGEST[p.kv_format])).clamp(min=_TINY)
                        found[f"{name}_scale"][block, :, at] = factor[:, 0]
                    rows = nearest(numbers if factor is None else numbers / factor, p.kv_format)
                found[name][block, :, at] = rows.to(found[name].dtype)
    return found


def _pairs(rows: torch.Tensor, factor: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return float32 rows (Hk, D) as bytes of int4 pairs, and their scales (Hk,) if `factor` (Hk, 1) is None."""
    scales = None
    if factor is None:
        finite = [[x for x in row if abs(x) < float("inf")] for row in rows.tolist()]
        ends = torch.tensor([[max([0.0, *row]), -min([0.0, *row])] for row in finite])
        factor = (ends / torch.tensor(15.0)).sum(1, keepdim=True).clamp(min=_TINY)
        factor = (factor.view(torch.int32) // 16 * 16).view(torch.float32)
        zero = (ends[:, 1:] / factor).round().clamp(max=15)
        scales = (factor.view(torch.int32) + zero.int()).view(torch.float32)[:, 0]
    else:
        zero = torch.full((rows.shape[0], 1), 8.0)
    levels = torch.arange(16) - zero.double()  # (Hk, 16): the numbers in units of the scale
    exact = (rows / factor).double()
    # What is beyond all levels, and infinity, is nearest to the last on its side. Of two equally near, the even one.
    away = (exact.nan_to_num(0.0).clamp(-99.0, 99.0)[..., None] - levels[:, None]).abs()
    code = (away + (levels.long() % 2)[:, None] * 1e-9).argmin(-1)
    code = torch.where(exact.isnan(), zero.long(), code)
    return (code[:, 0::2] + 16 * code[:, 1::2]).to(torch.uint8).view(KV_STORED), scales


def _blocks(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 rows (Hk, D) as bytes of nvfp4 pairs and their e4m3 scales (Hk, D / 16), by exhaustive search."""
    blocks = rows.unflatten(-1, (-1, 16))
    widest = blocks.abs().masked_fill(~blocks.isfinite(), 0.0).amax(-1)
    scales = nearest(widest / torch.tensor(6.0), "e4m3")
    factor = scales.view(torch.float8_e4m3fn).float()[..., None].expand_as(blocks)
    exact = torch.where(factor > 0, blocks / factor, 0.0).double().flatten(-2)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    away = (exact.abs().nan_to_num(0.0).clamp(max=99.0)[..., None] - levels).abs()
    code = (away + (torch.arange(8) % 2) * 1e-9).argmin(-1)  # of two equally near, the even code
    code = torch.where(torch.signbit(exact), code + 8, code)
    code = torch.where(exact.isnan(), 0, code)
    return (code[:, 0::2] + 16 * code[:, 1::2]).to(torch.uint8).view(KV_STORED), scales


def _place(call: Call, b: int, i: int) -> tuple[int, int, int] | None:
    """Return (sequence or page, row in it, row of the rotary tables) of a new token, or None if it has no place."""
    p = call.problem
    if call.slots is not None:
        slot = int(call.slots[i])
        if not 0 <= slot < p.seq_k:
            return None
        return slot // p.page_size, slot % p.page_size, 0 if call.positions is None else int(call.positions[i])
    assert call.seqlens_k is not None
    first = int(call.seqlens_k[b])
    at = first + i
    return (b, at, min(at, ANGLES - 1)) if first >= 0 and at < p.seq_k else None


def _turned(call: Call, rows: torch.Tensor, position: int) -> torch.Tensor:
    """Rotate keys (Hk, D) of one token, column by column; each product and sum is rounded to float32."""
    p, cos, sin = call.problem, call.cos, call.sin
    assert cos is not None
    assert sin is not None
    made, half = rows.clone(), p.rotary_dim // 2
    for pair in range(half):
        i, j = (pair, pair + half) if p.rotary == "neox" else (2 * pair, 2 * pair + 1)
        c, s = (table[position, pair].detach().cpu().double() for table in (cos, sin))
        x, y = rows[:, i].double(), rows[:, j].double()

        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a * b).float().double()

        made[:, i] = (product(x, c) - product(y, s)).float().to(rows.dtype)
        made[:, j] = (product(y, c) + product(x, s)).float().to(rows.dtype)
    return made


@functools.cache
def _values(kind: str) -> torch.Tensor:
    """Return the nonnegative finite numbers of a float8 format, in float64, by code."""
    bits, bias, largest, _ = _FLOATS[kind]
    found = []
    for code in range(128):
        exponent, fraction = code >> bits, (code & ((1 << bits) - 1)) / (1 << bits)
        found.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    return torch.tensor([value for value in found if value <= largest], dtype=torch.float64)


def nearest(numbers: torch.Tensor, kind: str) -> torch.Tensor:
    """Return float32 numbers in a format as int8, rounded to nearest even by exhaustive search."""
    exact = numbers.double()
    size = exact.abs().nan_to_num(0.0, posinf=torch.inf)
    whole = torch.arange(128, dtype=torch.float64) if kind == "int8" else _values(kind)
    middle = (whole[1:] + whole[:-1]) / 2
    below = torch.searchsorted(middle, size.contiguous())  # middles that are smaller: the code, unless it is a tie
    tie = (below < len(middle)) & (size == middle[below.clamp(max=len(middle) - 1)])
    code = torch.where(tie & (below % 2 == 1), below + 1, below)
    if kind == "int8":
        return torch.where(exact.isnan(), 0, torch.where(exact < 0, -code, code)).to(KV_STORED)
    negative = torch.signbit(numbers) & ((code > 0) | (kind != "e4m3fnuz"))
    code = torch.where(negative, code | 0x80, code)
    code = torch.where(exact.isnan(), _FLOATS[kind][3], code)
    return torch.where(code > 127, code - 256, code).to(KV_STORED)
