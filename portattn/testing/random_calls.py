"""Random calls of every op and feature, with NaN wherever nothing may be read or may count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from portattn.schema.call import Call
from portattn.schema.features import COMMON, FEATURES
from portattn.schema.problem import Problem
from portattn.testing.random_stored import stored
from portattn.validate.checks import WORD_ALIGNMENT, aligned

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SOFTCAP = 5.0  # scores are about normal: it bends the larger ones
DROPPED = 0.1  # share of the probabilities that dropout sets to 0
MASKED = 0.1  # share of entries that a bias or mask hides
LARGEST_FULL = 2**24  # elements; a larger bias or mask is the same for all sequences and heads
SPARE_PAGES = 3  # pages that no sequence owns
SPARE_ROWS = 3  # rows behind the last packed sequence
GARBAGE_IDS = (-7, 2**30, -(2**31), 2**31 - 1)  # what a page table or an index list holds where nothing may look
PIG_BITS, PIG_TABLES = (4, 10), (20, 150)  # MagicPIG's K and L, both ends included
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

    lengths = _lengths(p, generator, extremes)
    storage = _key_storage(p, lengths)
    q = _normal(p, (p.query_rows[0], p.heads_q, p.query_rows[1], p.head_dim), generator)
    k = _normal(p, (storage.batch, p.heads_k, storage.rows, p.head_dim), generator)
    v = _normal(p, (storage.batch, p.heads_k, storage.rows, p.head_dim_v), generator)
    table, places = _page_table(p, lengths, storage, generator)
    features = _choices(p, lengths, generator, seed, extremes) | _features(p, generator, seed)
    if p.magicpig:
        _make_alike(p, q, k, places, generator)

    spoilt = ~_query_rows(p, lengths) & (torch.rand(p.query_rows, generator=generator) < NAN_ROWS[poison])
    q.masked_fill_(spoilt[:, None, :, None], float("nan"))
    unused = storage.unused(_attended(p, lengths, features), places, shared=strides == "expanded")
    _poison(p, k, v, unused, poison, generator)
    q_scale = k_scale = v_scale = None
    if p.kv_format != "as_q":
        k, k_scale = stored(p, k, unused, generator)
        v, v_scale = stored(p, v, unused, generator) if p.v_format != "as_q" else (v, None)
        if p.op == "mla_attention":  # a latent row is key and value
            v, v_scale = k[..., : p.head_dim_v], k_scale
    if p.q_format != "as_q":
        q, q_scale = stored(p, q, spoilt[:, None].expand(q.shape[:3]), generator)
    queries, (k, v) = _queries(p, q, strides, device), _caches(p, k, v, strides, device)
    if k_scale is not None and p.kv_scales == "token":  # laid out as the cache is
        scales = k_scale if v_scale is None else v_scale
        k_scale, scales = (t[..., 0] for t in _caches(p, k_scale[..., None], scales[..., None], strides, device))
        v_scale = None if v_scale is None else scales
        q_scale = None if q_scale is None else _queries(p, q_scale[..., None], strides, device)[0][..., 0]
    call = Call(problem=p, q=queries[0], k=k, v=v, scale=scale, softcap=SOFTCAP if p.softcap else 0.0)
    call.q_rope = queries[1] if len(queries) > 1 else None
    for name, numbers in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        setattr(call, name, None if numbers is None else numbers.to(device))
    for name, value in (lengths.given(p) | {"page_table": table} | features).items():
        setattr(call, name, None if value is None else _moved(value, device))
    if p.dropout:
        call.dropout_p = DROPPED
        call.dropout_seed = torch.randint(2**62, (1,), generator=generator).to(device)
    known = {f"{name}_by_key": _same_for_all_rows(getattr(call, name)) for name in ("bias", "mask")}
    if p.kv_format != "as_q":
        known["word_aligned"] = p.word_aligned and all(aligned(x, WORD_ALIGNMENT) for x in (call.k, call.v))
    call.problem = msgspec.structs.replace(p, **known)
    return call


def _same_for_all_rows(scores: torch.Tensor | None) -> bool:
    """Whether a (B, Hq, Sq, Sk) view is one row for all heads and queries of a sequence."""
    if scores is None:
        return False
    return all(scores.stride(axis) == 0 or scores.shape[axis] == 1 for axis in (1, 2))


@dataclass(frozen=True)
class Lengths:
    """First row and length of each sequence's queries and keys, (B,) int32: inside its slot, or a packed tensor."""

    first_q: torch.Tensor
    q: torch.Tensor
    first_k: torch.Tensor
    k: torch.Tensor

    def given(self, p: Problem) -> dict[str, torch.Tensor | None]:
        """What of them the call has, by its name there."""
        return {
            "seqlens_q": self.q if p.seqlens_q else None,
            "seqlens_k": self.k if p.seqlens_k else None,
            "leftpad_q": self.first_q if p.leftpad_q else None,
            "leftpad_k": self.first_k if p.leftpad_k else None,
            "cu_seqlens_q": _cumulative(self.q) if p.packed else None,
            "cu_seqlens_k": _cumulative(self.k) if p.total_k is not None else None,
        }


@dataclass(frozen=True)
class Storage:
    """Keys lie in `batch` × `rows` places a head: of sequences, of one packed tensor, or of pages."""

    batch: int
    rows: int

    def unused(self, attended: torch.Tensor, places: torch.Tensor, shared: bool) -> torch.Tensor:
        """(batch, Hk, rows) bool: no attended key lies there.

        attended  (B, Hk, Sk) bool, by position
        places    (B, Sk) int64: where a position lies; -1 where it does not exist
        shared    all of `batch` lie in the same memory
        """
        exists = places >= 0
        used = torch.zeros(self.batch * self.rows, attended.shape[1], dtype=torch.bool)
        used[places[exists]] = attended.transpose(1, 2)[exists]
        used = used.view(self.batch, self.rows, attended.shape[1]).transpose(1, 2)
        return ~used.any(dim=0, keepdim=True).expand_as(used) if shared else ~used


def _lengths(p: Problem, generator: torch.Generator, extremes: bool) -> Lengths:
    def padded(size: int, sized: bool, padding: bool) -> tuple[torch.Tensor, torch.Tensor]:
        pad = torch.randint(0, size // 2 + 1, (p.batch,), generator=generator, dtype=torch.int32)
        room = size - pad if padding else torch.full_like(pad, size)
        length = (torch.rand(p.batch, generator=generator) * (room + 1)).int()
        if extremes:
            length[:1] = room[:1]
            length[2::3] = 0
        return pad if padding else torch.zeros_like(pad), length if sized else room

    def packed(total: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = _shares(p.batch, total - min(SPARE_ROWS, total // 4) * extremes, longest, generator, extremes)
        return _cumulative(length)[:-1], length

    first_q, length_q = padded(p.seq_q, p.seqlens_q, p.leftpad_q) if p.total_q is None else packed(p.total_q, p.seq_q)
    if p.total_k is not None:
        return Lengths(first_q, length_q, *packed(p.total_k, p.seq_k))
    first_k, length_k = padded(p.seq_k, p.seqlens_k, p.leftpad_k)
    if p.packed and not extremes:  # three of four sequences have a key for every query, as calls in use do
        enough = (length_q + torch.rand(p.batch, generator=generator) * (p.seq_k - length_q + 1)).int()
        keep = (torch.rand(p.batch, generator=generator) < 0.25) | (length_q > p.seq_k)
        length_k = torch.where(keep, length_k, enough.clamp(max=p.seq_k))
    return Lengths(first_q, length_q, first_k, length_k)


def _shares(batch: int, total: int, longest: int, generator: torch.Generator, extremes: bool) -> torch.Tensor:
    """(B,) int32 lengths up to `longest`, which together have `total` rows if they can."""
    lengths: list[int] = torch.randint(0, longest + 1, (batch,), generator=generator).tolist()
    fixed = set()
    if extremes and batch:
        lengths[0] = min(longest, total)
        fixed = {0, *range(2, batch, 3)}
        lengths[2::3] = [0] * len(lengths[2::3])
    free = [b for b in range(batch) if b not in fixed]
    rest = total - sum(lengths[b] for b in fixed)
    drawn = sum(lengths[b] for b in free)
    for b in free:
        lengths[b] = min(lengths[b] * rest // max(drawn, 1), longest)
    for b in free:
        lengths[b] += min(longest - lengths[b], total - sum(lengths))
    return torch.tensor(lengths, dtype=torch.int32)


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """cu_seqlens (B + 1,) int32."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])


def _query_rows(p: Problem, lengths: Lengths) -> torch.Tensor:
    """Rows of the query tensor that belong to a sequence: (B, Sq) bool, or (1, Tq)."""
    row = torch.arange(p.query_rows[1])
    if p.packed:
        return (row < lengths.q.sum())[None]
    return (row >= lengths.first_q[:, None]) & (row < (lengths.first_q + lengths.q)[:, None])


def _key_storage(p: Problem, lengths: Lengths) -> Storage:
    if p.page_size:
        return Storage(int((-(-lengths.k // p.page_size)).sum()) + SPARE_PAGES, p.page_size)
    return Storage(p.batch, p.seq_k) if p.total_k is None else Storage(1, p.total_k)


def _page_table(
    p: Problem, lengths: Lengths, storage: Storage, generator: torch.Generator
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The page table (B, pages a sequence) int32, if any, and where each position lies: (B, Sk) int64, or -1."""
    j = torch.arange(p.seq_k)[None]
    if not p.page_size:
        inside = (j >= lengths.first_k[:, None]) & (j < (lengths.first_k + lengths.k)[:, None])
        if p.total_k is None:
            return None, torch.where(inside, torch.arange(p.batch)[:, None] * p.seq_k + j, -1)
        return None, torch.where(j < lengths.k[:, None], lengths.first_k[:, None] + j, -1)
    columns = p.seq_k // p.page_size
    owned = torch.arange(columns)[None] * p.page_size < lengths.k[:, None]
    garbage = torch.tensor(GARBAGE_IDS).repeat(-(-p.batch * columns // len(GARBAGE_IDS)))
    table = garbage[: p.batch * columns].reshape(p.batch, columns)
    table[owned] = torch.randperm(storage.batch, generator=generator)[: int(owned.sum())]
    places = table[:, j[0] // p.page_size] * p.page_size + j % p.page_size if columns else j.expand(p.batch, 0)
    return table.int(), torch.where(j < lengths.k[:, None], places, -1)


def _choices(
    p: Problem, lengths: Lengths, generator: torch.Generator, seed: int, extremes: bool
) -> dict[str, torch.Tensor | None]:
    """Chosen tokens of sparse_attention, and what weighs them.

    Each head has a random subset in random order. Odd seeds repeat its first token in its second place. Where there
    are fewer tokens than places, and in one place of eight besides, stands an id that does not count; behind `counts`
    stand garbage and, to be told from it by `counts` alone, tokens that exist.
    """
    if p.op != "sparse_attention":
        return {}
    shape = (p.batch, p.heads_q, p.tokens)
    counts = torch.randint(0, p.tokens + 1, shape[:2], generator=generator)
    if extremes:
        counts.flatten()[-1:] = 0
        counts.flatten()[:1] = p.tokens
    ignored = torch.tensor([-1, *GARBAGE_IDS])
    indices = ignored[torch.randint(len(ignored), shape, generator=generator)]
    for b, length in enumerate(lengths.k.tolist()):
        beyond = torch.rand(p.heads_q, p.tokens, generator=generator) < 0.125
        indices[b] = torch.where(beyond & (length < p.seq_k), length, indices[b])
        for h in range(p.heads_q):
            chosen = torch.randperm(length, generator=generator)[: p.tokens]
            if seed % 2:
                chosen[1:2] = chosen[:1]
            real = torch.rand(len(chosen), generator=generator) >= 0.125
            indices[b, h, : len(chosen)][real] = chosen[real]
    place = torch.arange(p.tokens)
    counted = (place < counts[..., None]) & (indices >= 0) & (indices < lengths.k[:, None, None])
    weights = bits = tables = None
    if p.log_weights:  # of probabilities from 5% to 100%
        weights = -torch.log(0.05 + 0.95 * torch.rand(shape, generator=generator))
        masked = torch.rand(shape, generator=generator) < MASKED
        weights = weights.masked_fill(masked, float("-inf")).masked_fill(~counted, float("nan"))
    if p.magicpig:
        bits = torch.randint(PIG_BITS[0], PIG_BITS[1] + 1, (p.heads_q,), generator=generator, dtype=torch.int32)
        tables = torch.randint(PIG_TABLES[0], PIG_TABLES[1] + 1, (p.heads_q,), generator=generator, dtype=torch.int32)
    return {
        "indices": indices.int(),
        "counts": counts.int(),
        "log_weights": weights,
        "magicpig_bits": bits,
        "magicpig_tables": tables,
    }


def _features(p: Problem, generator: torch.Generator, seed: int) -> dict[str, torch.Tensor | None]:
    """Tensors of features that most operations have, as the call has them: normal numbers unless drawn otherwise."""
    sizes = {"b": p.batch, "h": p.heads_q, "q": p.seq_q, "k": p.seq_k}
    found: dict[str, torch.Tensor | None] = {}
    for name in COMMON:
        feature = FEATURES[name]
        if feature.axes and getattr(p, name):
            draw = _DRAWN.get(name)
            if draw is not None:
                found[name] = draw(p, generator, seed)
            else:
                found[name] = torch.randn([sizes[axis] for axis in feature.axes], generator=generator)
    return found


def _slopes(p: Problem, generator: torch.Generator, seed: int) -> torch.Tensor:
    slopes = (2.0 ** (-8.0 * torch.arange(1, p.heads_q + 1) / p.heads_q)).expand(p.batch, p.heads_q)
    if seed % 2:
        slopes = slopes * (0.5 + torch.rand(p.batch, p.heads_q, generator=generator))
    return slopes


def _bias(p: Problem, generator: torch.Generator, seed: int) -> torch.Tensor:
    hidden = _hidden(p, generator, seed)
    bias = torch.randn(hidden.shape, generator=generator).to(DTYPES[p.dtype])
    return bias.masked_fill_(hidden, float("-inf")).expand(p.batch, p.heads_q, p.seq_q, p.seq_k)


def _mask(p: Problem, generator: torch.Generator, seed: int) -> torch.Tensor:
    return (~_hidden(p, generator, seed + 1)).expand(p.batch, p.heads_q, p.seq_q, p.seq_k)


def _tree(p: Problem, generator: torch.Generator, seed: int) -> torch.Tensor:
    """Words of random bits, of which some are set in none of them, and some words that are 0."""
    halves = torch.randint(2**32, (2, *p.query_rows), generator=generator)
    words = halves[0] | halves[1] << 32
    for bit in torch.randint(64, (24,), generator=generator).tolist():
        words &= ~(torch.tensor(1) << bit)
    return words.masked_fill(torch.rand(words.shape, generator=generator) < MASKED, 0)


def _blocks(p: Problem, generator: torch.Generator, seed: int) -> torch.Tensor:
    """Half of all pairs of blocks, none of one block of queries' and of one block of keys'; for odd seeds the same for
    all heads."""
    shape = (p.batch, 1 if seed % 2 else p.heads_q, -(-p.seq_q // p.block_q), -(-p.seq_k // p.block_k))
    listed = torch.rand(shape, generator=generator) < 0.5
    listed[:, :, 2:3] = False
    listed[..., 1:2] = False
    return listed.expand(p.batch, p.heads_q, *shape[2:])


_DRAWN = {"alibi_slopes": _slopes, "bias": _bias, "mask": _mask, "tree_mask": _tree, "block_mask": _blocks}


def _hidden(p: Problem, generator: torch.Generator, seed: int) -> torch.Tensor:
    """Which scores a bias or mask hides, in one of four broadcast shapes: some anywhere, all of some keys' (or, where
    the shape has no keys, of a head's), and all of a row's."""
    full, rows = (p.batch, p.heads_q, p.seq_q, p.seq_k), (1, 1, p.seq_q, p.seq_k)
    if p.batch * p.heads_q * p.seq_q * p.seq_k > LARGEST_FULL:
        full = rows
    shape = (full, rows, (p.batch, 1, 1, p.seq_k), (1, p.heads_q, 1, 1))[seed % 4]
    if shape[3] == 1 != p.seq_k:
        hidden = torch.zeros(shape, dtype=torch.bool)
        hidden[:, 1:2] = True
        return hidden
    hidden = torch.rand(shape, generator=generator) < MASKED
    hidden |= torch.rand(*shape[:2], 1, shape[3], generator=generator) < MASKED
    if shape[2] > 1:
        hidden[:, :, shape[2] // 2] = True
    return hidden


def _attended(p: Problem, lengths: Lengths, features: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """Keys of a sequence that are not poisoned, by position: (B, Hk, Sk) bool."""
    attended = torch.ones(p.batch, p.heads_k, p.seq_k, dtype=torch.bool)
    # Queries and keys end together, or with top_left begin together.
    shift = torch.zeros_like(lengths.k) if p.packed else lengths.first_k - lengths.first_q
    if p.causal != "top_left":
        shift = shift + lengths.k - lengths.q
    first = (0 if p.packed else lengths.first_q) + shift  # the position of the first query
    if p.window_left >= 0:
        attended &= (torch.arange(p.seq_k) >= (first - p.window_left)[:, None])[:, None]
    right = 0 if p.causal != "none" else p.window_right
    if right >= 0:
        attended &= (torch.arange(p.seq_k) < (first + lengths.q + right)[:, None])[:, None]
    blocks = features.get("block_mask")
    if blocks is not None:
        shown = blocks.any(dim=2).repeat_interleave(p.block_k, dim=2)[..., : p.seq_k]
        attended &= shown.reshape(p.batch, p.heads_k, p.group, p.seq_k).any(dim=2)
    words = features.get("tree_mask")
    if words is not None:
        attended &= _in_some_tree(p, lengths, words)[:, None]
    for name in ("mask", "bias"):
        values = features.get(name)
        if values is not None:
            shown = _held(values) if name == "mask" else _held(values) != float("-inf")
            shown = shown.any(dim=2).expand(p.batch, p.heads_q, p.seq_k)
            attended &= shown.reshape(p.batch, p.heads_k, p.group, p.seq_k).any(dim=2)
    indices, counts = features.get("indices"), features.get("counts")
    if indices is not None and counts is not None:
        token = indices.long()
        counted = (torch.arange(p.tokens) < counts[..., None]) & (token >= 0) & (token < lengths.k[:, None, None])
        weights = features.get("log_weights")
        if weights is not None:
            counted &= weights != float("-inf")
        chosen = torch.zeros(p.batch, p.heads_q, p.seq_k + 1, dtype=torch.bool)
        chosen.scatter_(2, torch.where(counted, token, p.seq_k), True)
        attended &= chosen[..., :-1].view(p.batch, p.heads_k, p.group, p.seq_k).any(dim=2)
    return attended


def _in_some_tree(p: Problem, lengths: Lengths, words: torch.Tensor) -> torch.Tensor:
    """Keys that some query's tree mask shows, and all before the new ones: (B, Sk) bool."""
    shown = torch.ones(p.batch, p.seq_k, dtype=torch.bool)
    for b in range(p.batch):
        count, end = int(lengths.q[b]), int(lengths.first_k[b] * (not p.packed) + lengths.k[b])
        first = int(lengths.first_q[b])
        own = words[0, first : first + count] if p.packed else words[b, first : first + count]
        for j in range(max(count - end, 0), count):
            shown[b, end - count + j] = bool((own >> j & 1).any())
    return shown


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
    return _held(values).to(device).expand_as(values)


def _held(values: torch.Tensor) -> torch.Tensor:
    """What memory really holds of broadcast values: dimensions with a stride of 0 are 1 long."""
    return values[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in values.stride())]
