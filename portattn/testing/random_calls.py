"""Random calls of every op and feature, with NaN wherever nothing may be read or may count."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import DS_GROUP, DS_MLA, NV_BLOCK, NVFP4, SAGE_BLOCK, WORD_ALIGNMENT
from portattn.schema.tensors import INT4, KV_DTYPE, KV_STORED, collapse_broadcast
from portattn.testing.random_features import DTYPES, attended_keys, choices, drawn_features
from portattn.testing.random_lengths import drawn_lengths, key_storage, page_table, query_rows
from portattn.validate.checks import words_aligned

SPREAD = 2.0  # scales differ by factors up to this from the one that fills the format's range
_LARGEST = {"int8": 127.0}


def store_values(
    p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator, block: int = 1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys or values (batch, Hk, rows, D) in the problem's format, as a Call has them, and their scales.

    block   tokens of the first head that share a scale, with scales for each token: as `quantize` makes them, for which
            some kernels have a path of their own

    unused  (batch, Hk, rows) bool: no attended key lies there. A NaN in `values` there stays NaN if the format has one;
            for integers, and with a scale for each token, the scale is NaN, infinite, negative or 0 instead

    Scales are (B, Hk), or (batch, Hk, rows) for each token; None without scales, and the numbers are the values.
    """
    if p.kv_format == DS_MLA:
        return _latent_rows(p, values, unused, generator), None
    if p.kv_format == INT4:
        return _pairs(p, values, unused, generator)
    kind, dtype = p.kv_format, KV_DTYPE[p.kv_format]
    largest = _LARGEST.get(kind) or torch.finfo(dtype).max
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
    if kind == "int8":
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
    """As `stored`, in nvfp4: beside bytes and scales the bytes of the blocks' scales (batch, Hk, rows, D / 16).

    A row without an attended key has scales that are NaN, negative or 448, and any numbers.
    """
    assert p.kv_format == NVFP4
    scale, by_row = None, torch.ones(())
    if p.kv_scales == "head":
        scale = 0.01 + torch.rand((p.batch, p.heads_k), generator=generator)
        by_row = scale.max() if scale.numel() else by_row  # a page's tokens may be any sequence's
    blocks = (values.nan_to_num(0.0).float() / by_row).unflatten(-1, (-1, NV_BLOCK))
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


def _pairs(
    p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (…, D) as bytes of two int4 numbers each, and their scales, under which the largest values are too large.

    A token's scale holds the number that stands for 0, any of the sixteen; so some rows have numbers of one sign.
    """
    filling = float(values.nan_to_num(0.0).abs().max()) / 15.0 if values.numel() else 1.0
    shape = (p.batch, p.heads_k) if p.kv_scales == "head" else values.shape[:3]
    scale = max(filling, 1e-6) * (1.0 + (SPREAD - 1.0) * torch.rand(shape, generator=generator))
    zero = torch.full((1, 1, 1), 8)
    by_row = scale.max().expand(1, 1, 1) if p.kv_scales == "head" and scale.numel() else scale
    if p.kv_scales == "token":
        middle = torch.rand(shape, generator=generator) < 0.7  # most have room on both sides of 0
        any_ = torch.randint(16, shape, generator=generator)
        zero = torch.where(middle, 6 + any_ % 4, any_)
        scale = ((scale.view(torch.int32) & ~15) | zero.int()).view(torch.float32)
    elif not scale.numel():
        by_row = torch.ones(1, 1, 1)
    numbers = (values.float() / by_row[..., None]).round() + zero[..., None]
    codes = numbers.clamp(0, 15).nan_to_num(15.0).to(torch.int32)
    stored = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(KV_STORED)
    return stored, _wild(scale, unused, generator) if p.kv_scales == "token" else scale


def _wild(scale: torch.Tensor, unused: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The scales, but where they are unused what no scale may be."""
    wild = torch.tensor([float("nan"), float("inf"), -1.0, 0.0, -float("inf")])
    return torch.where(unused, wild[torch.randint(len(wild), scale.shape, generator=generator)], scale)


def _latent_rows(p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Latent rows (P, 1, page, D) as the bytes of fp8_ds_mla rows.

    Each group has a scale of its own, a power of two: with such scales kernels' rows are exact in bfloat16, as the
    budget of an LSE asks (docs/low-precision.md).
    """
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
    """Normal random q, k and v, random lengths and left paddings where the problem has them, and its features.

    NaN is in all padding: before and after a sequence's rows, on pages and in places that no sequence owns, in tokens
    before every window, in new tokens that no tree mask shows, in tokens that no head of their group chose, and in
    keys and values that a mask or a bias of -inf hides from all rows. Ids that nothing may follow are garbage, and so
    are a tree mask's bits behind its sequence's new tokens. Bias and mask have another broadcast shape for each of four
    seeds in a row; ALiBi slopes are per head for even seeds, and per sequence and head for odd ones. paged_attention
    and mla_attention always have seqlens_k.

    strides   plain; spare (rows one element longer than wide, a base off by one element; of a quantised cache that is
              aligned by words, rows up to the next word); transposed (the head dimension is not the contiguous one);
              sliced (every second row of a larger tensor); expanded (k and v share one batch, or all pages one page,
              stride 0); combined (pages: k and v are the halves of one tensor (P, 2, …))
    poison    apart: where nothing is attended NaN is in the key, in the value, or in both, by chance, and in half
              of the queries of padding: a NaN in one can keep one in another from doing harm. k: in all these keys and
              queries and no values; v: in all these values, and nowhere else. A latent row's values are a part of its
              key; its key alone has NaN in the rest
    extremes  the first sequence is as long as it can be, and of three the last is empty; a few rows of a packed tensor
              belong to no sequence; the first head has chosen all tokens that it can and the last none

    Raises ValueError where the strides do not exist for the problem, or its pages do not make up its capacity.
    """
    if problem.writes:
        from portattn.testing.random_writing import random_writing

        return random_writing(problem, seed, device=device, spare=strides != "plain")
    if problem.backward:
        from portattn.testing.random_gradients import random_gradients  # which computes the forward

        def forward(of: Problem) -> Call:
            return random_call(of, seed, device=device, scale=scale, strides=strides, extremes=extremes, poison=poison)

        return random_gradients(problem, forward, seed, device)
    generator = torch.Generator().manual_seed(seed)
    if scale is None:
        scale = (-1.0 if problem.negative_scale else 1.0) * problem.head_dim**-0.5
    p = msgspec.structs.replace(problem, negative_scale=scale < 0.0)
    if p.op in ("paged_attention", "mla_attention"):
        p = msgspec.structs.replace(p, seqlens_k=True)
    if p.page_size and p.seq_k % p.page_size:
        raise ValueError(f"seq_k {p.seq_k} is the capacity of whole pages, of {p.page_size} tokens each")
    if strides == "combined" and (not p.page_size or p.op == "mla_attention" or p.head_dim != p.head_dim_v):
        raise ValueError("combined caches are pages of keys and values of one width")

    lengths = drawn_lengths(p, generator, extremes)
    storage = key_storage(p, lengths)
    q = _normal(p, (p.query_rows[0], p.heads_q, p.query_rows[1], p.head_dim), generator)
    k = _normal(p, (storage.batch, p.heads_k, storage.rows, p.head_dim), generator)
    v = _normal(p, (storage.batch, p.heads_k, storage.rows, p.head_dim_v), generator)
    table, places = page_table(p, lengths, storage, generator)
    features = choices(p, lengths, generator, seed, extremes) | drawn_features(p, generator, seed)
    if p.magicpig:
        _make_alike(p, q, k, places, generator)

    spoilt = ~query_rows(p, lengths) & (torch.rand(p.query_rows, generator=generator) < NAN_ROWS[poison])
    q.masked_fill_(spoilt[:, None, :, None], float("nan"))
    unused = storage.unused(attended_keys(p, lengths, features), places, shared=strides == "expanded")
    _poison(p, k, v, unused, poison, generator)
    q_scale = k_scale = v_scale = None
    if p.kv_format == NVFP4:
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
    if p.kv_format == NVFP4:
        call.k_block_scale, call.v_block_scale = _caches(p, k_blocks, v_blocks, apart, device)
    for name, numbers in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        setattr(call, name, None if numbers is None else numbers.to(device))
    for name, value in (lengths.given(p) | {"page_table": table} | features).items():
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
    """Whether a (B, Hq, Sq, Sk) view is one row for all heads and queries of a sequence."""
    if scores is None:
        return False
    return all(scores.stride(axis) == 0 or scores.shape[axis] == 1 for axis in (1, 2))


def _poison(
    p: Problem, k: torch.Tensor, v: torch.Tensor, unused: torch.Tensor, poison: Poison, generator: torch.Generator
) -> None:
    """NaN into unused keys and values, as random_call says."""
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
    """Give every key something of one of the queries that may choose it: else nearly all have a probability near 0."""
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
    """q, or for mla_attention q and q_rope, as the call has them."""
    parts = [q] if p.op != "mla_attention" else [q[..., : p.head_dim_v], q[..., p.head_dim_v :]]
    return [_laid_out(part, "bshd" if p.packed else p.layout, strides, False, device) for part in parts]


def _caches(
    p: Problem, k: torch.Tensor, v: torch.Tensor, strides: str, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v as the call has them; of latent rows, v is a part of k."""
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
    """The values as a (B, H, S, D) view with the strides asked for; memory between them holds NaN.

    multiple  what spare rows and their base are multiples of, in bytes, beyond an element
    """
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
    """Keys and values as halves of one cache: (P, 2, Hk, page, D), or (P, 2, page, Hk, D) where tokens come first."""
    both = torch.stack([x.transpose(1, 2) if layout == "bshd" else x for x in (k, v)], dim=1).contiguous().to(device)
    first, second = both[:, 0], both[:, 1]
    return (first.transpose(1, 2), second.transpose(1, 2)) if layout == "bshd" else (first, second)


def _moved(values: torch.Tensor, device: str) -> torch.Tensor:
    """On the device, with strides of 0 where they are."""
    return collapse_broadcast(values).to(device).expand_as(values)
