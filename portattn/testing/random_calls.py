"""Random calls of every op and feature, with NaN wherever nothing may be read or may count."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch

from portattn.launch.backward import rows_by_block
from portattn.reference.score_functions import lists_by_key
from portattn.schema.call import Call
from portattn.schema.ops import CAPTURED, ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import DS_GROUP, SAGE_BLOCK, WORD_ALIGNMENT
from portattn.schema.tensors import KV_DTYPE, KV_STORED, collapse_broadcast
from portattn.testing.oracle import oracle
from portattn.testing.random_tensors import (
    DTYPES,
    attended_keys,
    chosen_tokens,
    drawn_features,
    drawn_lengths,
    key_storage,
    page_table,
    query_rows,
)
from portattn.validate.checks import words_aligned


def random_gradients(problem: Problem, forward: Any, seed: int, device: str) -> Call:
    """Return a random call of the problem's gradients, with NaN in the memory of results and for empty rows."""
    p = problem
    without = msgspec.structs.replace(
        p, op=ROWS[p.op].gradient_of, grad_lse=False, grad_bias=False, grad_slopes=False, grad_captured=0,
        deterministic=False,
    )  # fmt: skip
    call: Call = forward(without)
    generator = torch.Generator().manual_seed(seed + 1)
    out, lse = oracle(call)
    like = call.new_out()
    call.forward_out = like.copy_(out)
    call.forward_lse = lse.float().contiguous()
    grad = torch.randn(out.shape, generator=generator).to(device)
    nothing = torch.isneginf(lse)
    nothing[..., 1::2] = False
    call.grad_out = torch.empty_like(like).copy_(grad.masked_fill(nothing[..., None], float("nan")))
    if p.grad_lse:
        call.grad_lse = torch.randn(lse.shape, generator=generator).to(device)
    for name in ("q", "k", "v"):
        setattr(call, f"grad_{name}", _memory(getattr(call, name)))
    if p.has_blocks and call.indices is not None:
        blocks = -(-p.seq_k // p.block_k)
        lists = rows_by_block(call.indices, call.counts, blocks, p.group)
        call.block_rows, call.block_starts, call.block_chunks = lists
    if call.block_mask is not None:
        call.block_queries = lists_by_key(call.block_mask)
    if p.grad_bias and call.bias is not None:
        own = [1 if stride == 0 else size for size, stride in zip(call.bias.shape, call.bias.stride(), strict=True)]
        call.grad_bias = torch.full(own, float("nan"), device=device)
    if p.grad_slopes:
        call.grad_slopes = torch.full(lse.shape, float("nan"), device=device)
    for number, name in enumerate(CAPTURED):
        if p.grad_captured >> number & 1:
            setattr(call, f"grad_{name}", torch.zeros(getattr(call, name).shape, device=device))
    # As the forward's own call has it: NaN where nothing is attended, scores that all rows share.
    shared = {name: getattr(call.problem, name) for name in ("bias_by_key", "mask_by_key", "negative_scale")}
    call.problem = msgspec.structs.replace(p, **shared)
    return call


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty_like(tensor)
    if memory.stride(3) != 1:
        memory = tensor.new_empty(tensor.shape)
    return memory.fill_(float("nan"))


SPREAD = 2.0  # scales differ by factors up to this from the one that fills the format's range


def store_values(
    p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator, block: int = 1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys or values (batch, Hk, rows, D) in the problem's format, as a Call has them, and their scales or None.

    In `unused` places (batch, Hk, rows), without an attended key, a NaN in `values` stays NaN if the format has one;
    for integers and for token scales the scale is NaN, infinite, negative or 0 instead. `block` tokens of the first
    head share a token scale, as `quantize` makes them: some kernels have a path for it."""
    if p.cache_format.latent:
        return _latent_rows(p, values, unused, generator), None
    if p.cache_format.per_byte > 1:
        return _in_bytes(p, values, unused, generator)
    dtype, largest = KV_DTYPE[p.kv_format], p.cache_format.largest
    if p.kv_scales == "none":
        scale, by_row = None, torch.ones(())
    else:
        shape = (p.batch, p.heads_k) if p.kv_scales == "head" else values.shape[:3]
        if p.op == "mla_attention" and p.kv_scales == "head":
            shape = (1, 1)  # all latent rows have one
        filling = float(values.nan_to_num(0.0).abs().max()) / largest if values.numel() else 1.0
        scale = max(filling, 1e-6) * (1.0 + (SPREAD - 1.0) * torch.rand(shape, generator=generator))
        if p.kv_scales == "token" and block > 1:
            scale[:, :1] = scale[:, :1, ::block].repeat_interleave(block, dim=2)[..., : scale.shape[2]]
        by_row = scale[..., None]
        if p.kv_scales == "head":  # a page's tokens may be any sequence's: all numbers are stored under one scale
            by_row = scale.max().expand(1, 1, 1, 1) if scale.numel() else torch.ones(())
    numbers = (values.float() / by_row).clamp(-largest, largest)
    if not dtype.is_floating_point:
        numbers = numbers.round().nan_to_num(0.0)
    if p.kv_scales == "token":
        assert scale is not None
        scale = _wild(scale, unused, generator)
    if p.op == "mla_attention" and scale is not None and p.kv_scales == "head":
        scale = scale.expand(p.batch, 1)
    return numbers.to(dtype).view(KV_STORED), scale


def in_blocks(
    p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return values in e2m1, their scales, and bytes of blocks' scales: NaN, negative or 448 in unattended rows."""
    scale, by_row = None, torch.ones(())
    if p.kv_scales == "head":
        scale = 0.01 + torch.rand((p.batch, p.heads_k), generator=generator)
        by_row = scale.max() if scale.numel() else by_row  # a page's tokens may be any sequence's
    blocks = (values.nan_to_num(0.0).float() / by_row).unflatten(-1, (-1, p.cache_format.block))
    factors = (blocks.abs().amax(-1) / 6.0).to(torch.float8_e4m3fn)
    numbers = blocks / factors.float().clamp(min=2.0**-9)[..., None]
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (numbers.flatten(-2).abs()[..., None] - levels).abs().argmin(-1)
    codes = torch.where(values.nan_to_num(0.0) < 0, codes + 8, codes)
    wild = torch.tensor([0x7F, 0xFF, 0xC8, 0x7E], dtype=torch.uint8)
    drawn = wild[torch.randint(len(wild), factors.shape, generator=generator)]
    bytes_ = torch.where(unused[..., None], drawn, factors.view(torch.uint8)).view(KV_STORED)
    codes = torch.where(unused[..., None], torch.randint(16, codes.shape, generator=generator), codes)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(KV_STORED), scale, bytes_


def _in_bytes(
    p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (…, D) as bytes of several numbers each, and scales that saturate the largest values."""
    row, base = p.cache_format, 2**p.cache_format.bits
    filling = float(values.nan_to_num(0.0).abs().max()) / (base - 1) if values.numel() else 1.0
    shape = (p.batch, p.heads_k) if p.kv_scales == "head" else values.shape[:3]
    scale = max(filling, 1e-6) * (1.0 + (SPREAD - 1.0) * torch.rand(shape, generator=generator))
    zero = torch.full((1, 1, 1), row.zero)
    by_row = scale.max().expand(1, 1, 1) if p.kv_scales == "head" and scale.numel() else scale
    if p.kv_scales == "token":
        middle = torch.rand(shape, generator=generator) < 0.7  # most have room on both sides of 0
        any_ = torch.randint(base, shape, generator=generator)
        zero = torch.where(middle, row.zero - 2 + any_ % 4, any_)
        scale = ((scale.view(torch.int32) & -base) | zero.int()).view(torch.float32)
    elif not scale.numel():
        by_row = torch.ones(1, 1, 1)
    numbers = (values.float() / by_row[..., None]).round() + zero[..., None]
    codes = numbers.clamp(0, base - 1).nan_to_num(base - 1).to(torch.int32).unflatten(-1, (-1, row.per_byte))
    stored = (codes * base ** torch.arange(row.per_byte)).sum(-1).to(torch.uint8).view(KV_STORED)
    return stored, _wild(scale, unused, generator) if p.kv_scales == "token" else scale


def _wild(scale: torch.Tensor, unused: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    wild = torch.tensor([float("nan"), float("inf"), -1.0, 0.0, -float("inf")])
    return torch.where(unused, wild[torch.randint(len(wild), scale.shape, generator=generator)], scale)


def _latent_rows(p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return latent rows as fp8_ds_mla bytes; scales are powers of two: exact in bfloat16, for an LSE's budget."""
    numbers = values[..., : p.head_dim_v].float().unflatten(-1, (-1, DS_GROUP))
    largest = torch.finfo(torch.float8_e4m3fn).max
    spread = torch.randint(2, numbers.shape[:-1], generator=generator)
    scale = torch.exp2((numbers.nan_to_num(0.0).abs().amax(dim=-1) / largest).clamp(min=1e-6).log2().ceil() + spread)
    codes = (numbers / scale[..., None]).clamp(-largest, largest).to(torch.float8_e4m3fn).flatten(-2)
    scale = _wild(scale, unused[..., None].expand_as(scale), generator)
    rotary = values[..., p.head_dim_v :].to(torch.bfloat16).contiguous()
    parts = (codes.view(KV_STORED), scale.contiguous().view(KV_STORED), rotary.view(KV_STORED))
    return torch.cat(parts, dim=-1)


SOFTCAP = 5.0  # scores are about normal: it bends the larger ones
DROPPED = 0.1  # share of the probabilities that dropout sets to 0
Poison = Literal["apart", "k", "v"]
NAN_ROWS = {"apart": 0.5, "k": 1.0, "v": 0.0}  # share of the queries of padding that are NaN
LIKENESS = 0.6  # cosine between a key and the query that it was made for, where sampling depends on it


def random_call(
    problem: Problem,
    seed: int = 0,
    *,
    device: str = "cpu",
    scale: float | None = None,
    strides: str = "plain",
    extremes: bool = False,
    poison: Poison = "apart",
) -> Call:
    """Return a call with normal random q, k and v, random lengths and left paddings, and the problem's features.

    NaN is in all padding: before and after a sequence's rows, in unowned pages and places, in tokens before every
    window, in tokens that no tree mask shows or no head of their group chose, and in keys that a mask or a bias of -inf
    hides from all rows. Ids and tree mask bits that do not count are garbage. Broadcast shapes of bias and mask follow
    seed % 4; ALiBi slopes are per head for even seeds, per sequence and head for odd ones. Paged and latent calls
    always have seqlens_k.

    Args:
        strides: plain; spare (rows one element longer, a base off by one element; rows of a word-aligned quantized
            cache up to the next word); transposed (the head dimension is not contiguous); sliced (every second row of a
            larger tensor); expanded (one batch or page for all, stride 0); combined (k and v are halves of a tensor (P,
            2, …))
        extremes: the first sequence has the largest length, and of three the last is empty; a few packed rows belong to
            no sequence; the first head has chosen all tokens that it can and the last none
        poison: apart: NaN in unattended keys, values or both, by chance, and in half of the queries of padding, since a
            NaN in one can hide one in another. k: in all these keys and queries, and no values. v: in all these values
            alone. Values of a latent row are part of its key: k leaves NaN in the rest of the row
    """
    if problem.writes:
        from portattn.testing.random_writing import random_writing

        return random_writing(problem, seed, device=device, spare=strides != "plain")
    if problem.backward:

        def forward(of: Problem) -> Call:
            return random_call(of, seed, device=device, scale=scale, strides=strides, extremes=extremes, poison=poison)

        return random_gradients(problem, forward, seed, device)
    generator = torch.Generator().manual_seed(seed)
    if scale is None:
        scale = (-1.0 if problem.negative_scale else 1.0) * problem.head_dim**-0.5
    p = msgspec.structs.replace(problem, negative_scale=scale < 0.0)
    if p.op in ("paged_attention", "mla_attention") and not p.has_lists:
        p = msgspec.structs.replace(p, seqlens_k=True)
    if p.page_size and p.seq_k % p.page_size and not p.has_lists:
        raise ValueError(f"seq_k {p.seq_k} is the capacity of whole pages, of {p.page_size} tokens each")
    if strides == "combined" and (not p.page_size or p.op == "mla_attention" or p.head_dim != p.head_dim_v):
        raise ValueError("combined caches are pages of keys and values of one width")

    by_query = p
    if p.has_lists:
        batch, rows = p.query_rows
        by_query = msgspec.structs.replace(p, batch=batch * rows, seq_q=1, total_q=None)
    lengths = drawn_lengths(by_query, generator, extremes)
    storage = key_storage(p, lengths)
    q = _normal(p, (p.query_rows[0], p.heads_q, p.query_rows[1], p.head_dim), generator)
    k = _normal(p, (storage.batch, p.heads_k, storage.rows, p.head_dim), generator)
    v = _normal(p, (storage.batch, p.heads_k, storage.rows, p.head_dim_v), generator)
    table, places = page_table(by_query, lengths, storage, generator)
    features = chosen_tokens(p, lengths, generator, seed, extremes) | drawn_features(p, generator, seed)
    if p.magicpig:
        _make_alike(p, q, k, places, generator)

    spoilt = ~query_rows(p, lengths) & (torch.rand(p.query_rows, generator=generator) < NAN_ROWS[poison])
    q.masked_fill_(spoilt[:, None, :, None], float("nan"))
    unused = storage.unused(attended_keys(by_query, lengths, features), places, shared=strides == "expanded")
    _poison(p, k, v, unused, poison, generator)
    q_scale = k_scale = v_scale = None
    if p.cache_format.block:
        k, k_scale, k_blocks = in_blocks(p, k, unused, generator)
        v, v_scale, v_blocks = in_blocks(p, v, unused, generator)
        apart = "plain" if strides == "transposed" else strides  # of scales the last axis is contiguous
    elif p.kv_format != "as_q":
        k, k_scale = store_values(p, k, unused, generator, SAGE_BLOCK if p.q_format == "int8" else 1)
        v, v_scale = store_values(p, v, unused, generator) if p.v_format != "as_q" else (v, None)
        if p.op == "mla_attention":  # a latent row is key and value
            v, v_scale = k[..., : p.head_dim_v], k_scale
    if p.q_format != "as_q":
        q, q_scale = store_values(p, q, spoilt[:, None].expand(q.shape[:3]), generator)
    queries, (k, v) = _queries(p, q, strides, device), _caches(p, k, v, strides, device)
    if k_scale is not None and p.kv_scales == "token":  # laid out as the cache is
        scales = k_scale if v_scale is None else v_scale
        k_scale, scales = (t[..., 0] for t in _caches(p, k_scale[..., None], scales[..., None], strides, device))
        v_scale = None if v_scale is None else scales
        q_scale = None if q_scale is None else _queries(p, q_scale[..., None], strides, device)[0][..., 0]
    call = Call(problem=p, q=queries[0], k=k, v=v, scale=scale, softcap=SOFTCAP if p.softcap else 0.0)
    call.q_rope = queries[1] if len(queries) > 1 else None
    if p.cache_format.block:
        call.k_block_scale, call.v_block_scale = _caches(p, k_blocks, v_blocks, apart, device)
    for name, numbers in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        setattr(call, name, None if numbers is None else numbers.to(device))
    sizes = lengths.given(by_query)
    if p.has_lists and table is not None:
        shape = p.query_rows if not p.packed else p.query_rows[1:]
        counts = sizes.pop("seqlens_k")
        features |= {"indices": table.view(*shape, p.tokens), "counts": None if counts is None else counts.view(shape)}
        table = None
    for name, value in (sizes | {"page_table": table} | features).items():
        setattr(call, name, None if value is None else _moved(value, device))
    if p.dropout:
        call.dropout_p = DROPPED
        call.dropout_seed = torch.randint(2**62, (1,), generator=generator).to(device)
    known = {f"{name}_by_key": _same_for_all_rows(getattr(call, name)) for name in ("bias", "mask")}
    if p.kv_format != "as_q":
        blocks = call.k_block_scale, call.v_block_scale
        known["word_aligned"] = p.word_aligned and words_aligned((call.k, call.v), blocks)
    call.problem = msgspec.structs.replace(p, **known)
    return call


def _same_for_all_rows(scores: torch.Tensor | None) -> bool:
    if scores is None:
        return False
    return all(scores.stride(axis) == 0 or scores.shape[axis] == 1 for axis in (1, 2))


def _poison(
    p: Problem, k: torch.Tensor, v: torch.Tensor, unused: torch.Tensor, poison: Poison, generator: torch.Generator
) -> None:
    third = torch.randint(3, unused.shape, generator=generator)
    in_k = unused & (third != 0) if poison == "apart" else unused & (poison == "k")
    in_v = unused & (third != 1) if poison == "apart" else unused & (poison == "v")
    v.masked_fill_(in_v[..., None], float("nan"))
    if p.op == "mla_attention":
        k[..., p.head_dim_v :].masked_fill_(in_k[..., None], float("nan"))
        k[..., : p.head_dim_v].masked_fill_(in_v[..., None], float("nan"))
    else:
        k.masked_fill_(in_k[..., None], float("nan"))


def _make_alike(p: Problem, q: torch.Tensor, k: torch.Tensor, places: torch.Tensor, generator: torch.Generator) -> None:
    """Add to every key a part of a query that may choose it: else nearly all have a probability near 0."""
    head = torch.randint(p.group, (p.batch, p.heads_k, p.seq_k, 1), generator=generator)
    queries = q[:, :, 0].view(p.batch, p.heads_k, p.group, p.head_dim)
    model = queries.gather(2, head.expand(-1, -1, -1, p.head_dim))  # (B, Hk, Sk, D)
    exists = places >= 0
    flat = k.transpose(1, 2).flatten(0, 1).clone()  # (places, Hk, D)
    noise = flat[places[exists]]
    flat[places[exists]] = LIKENESS * model.transpose(1, 2)[exists] + (1.0 - LIKENESS**2) ** 0.5 * noise
    batch, heads, rows, width = k.shape
    k.copy_(flat.view(batch, rows, heads, width).transpose(1, 2))


def _normal(p: Problem, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(DTYPES[p.dtype])


def _queries(p: Problem, q: torch.Tensor, strides: str, device: str) -> list[torch.Tensor]:
    split = p.op == "mla_attention" and p.head_dim > p.head_dim_v
    parts = [q] if not split else [q[..., : p.head_dim_v], q[..., p.head_dim_v :]]
    return [_laid_out(part, "bshd" if p.packed else p.layout, strides, False, device) for part in parts]


def _caches(
    p: Problem, k: torch.Tensor, v: torch.Tensor, strides: str, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = p.layout
    if p.page_size:
        layout = {"phd": "bshd", "hpd": "bhsd"}[p.page_layout]  # type: ignore[assignment]
    elif p.total_k is not None:
        layout = "bshd"
    if strides == "combined":
        return _combined(k, v, layout, device)
    multiple = WORD_ALIGNMENT if p.word_aligned and p.kv_format != "as_q" else 1
    k = _laid_out(k, layout, strides, strides == "expanded", device, multiple)
    if p.op == "mla_attention":
        return k, k[..., : p.head_dim_v]
    return k, _laid_out(v, layout, strides, strides == "expanded", device, multiple)


def _laid_out(
    values: torch.Tensor, layout: str, strides: str, shared: bool, device: str, multiple: int = 1
) -> torch.Tensor:
    """Return the values as a (B, H, S, D) view with the given strides, and NaN in the memory between them.

    Spare rows and their base are multiples of `multiple` bytes beyond an element."""
    b, h, s, d = values.shape
    if shared:
        return values[:1].to(device).expand(b, h, s, d)

    def empty(*shape: int) -> torch.Tensor:
        fill = float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).max
        return torch.full(shape, fill, dtype=values.dtype, device=device)

    if strides == "spare":
        rows = (b, s, h) if layout == "bshd" else (b, h, s)
        step = max(multiple // values.element_size(), 1)
        width = d + step - d % step
        view = empty(b * h * s * width + step)[step:].view(*rows, width)[..., :d]
        view = view.transpose(1, 2) if layout == "bshd" else view
    elif strides == "transposed":
        view = empty(b, h, d, s).transpose(2, 3)
    elif strides == "sliced":
        view = empty(b, h, 2 * s, d)[:, :, ::2]
    elif layout == "bshd":
        view = empty(b, s, h, d).transpose(1, 2)
    else:
        view = empty(b, h, s, d)
    view.copy_(values)
    return view


def _combined(k: torch.Tensor, v: torch.Tensor, layout: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as halves of one cache: (P, 2, Hk, page, D), or (P, 2, page, Hk, D) for layout bshd."""
    both = torch.stack([x.transpose(1, 2) if layout == "bshd" else x for x in (k, v)], dim=1).contiguous().to(device)
    first, second = both[:, 0], both[:, 1]
    return (first.transpose(1, 2), second.transpose(1, 2)) if layout == "bshd" else (first, second)


def _moved(values: torch.Tensor, device: str) -> torch.Tensor:
    return collapse_broadcast(values).to(device).expand_as(values)
