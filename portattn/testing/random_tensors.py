"""Random biases, masks, slopes, lengths and chosen tokens of a call, and the keys that they leave to be attended."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portattn.kernels.score_program import parse
from portattn.reference.score_functions import PART, block_lists, listed_marks
from portattn.schema.ops import CAPTURED, COMMON, FEATURES
from portattn.schema.problem import Problem
from portattn.schema.tensors import collapse_broadcast

SPARE_PAGES = 3  # pages that no sequence owns
SPARE_ROWS = 3  # rows behind the last packed sequence
GARBAGE_IDS = (-7, 2**30, -(2**31), 2**31 - 1)  # what a page table or an index list holds where nothing may look


@dataclass(frozen=True)
class Lengths:
    """First row and length of each sequence's queries and keys, (B,) int32: inside its slot, or a packed tensor."""

    first_q: torch.Tensor
    q: torch.Tensor
    first_k: torch.Tensor
    k: torch.Tensor

    def given(self, p: Problem) -> dict[str, torch.Tensor | None]:
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
    """Memory of keys: `batch` × `rows` places a head, of sequences, one packed tensor, or pages."""

    batch: int
    rows: int

    def unused(self, attended: torch.Tensor, places: torch.Tensor, shared: bool) -> torch.Tensor:
        """Return the places without an attended key, (batch, Hk, rows) bool; `places` (B, Sk) has positions' places."""
        exists = places >= 0
        used = torch.zeros(self.batch * self.rows, attended.shape[1], dtype=torch.bool)
        used[places[exists]] = attended.transpose(1, 2)[exists]
        used = used.view(self.batch, self.rows, attended.shape[1]).transpose(1, 2)
        return ~used.any(dim=0, keepdim=True).expand_as(used) if shared else ~used


def drawn_lengths(p: Problem, generator: torch.Generator, extremes: bool) -> Lengths:
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
    """Return (B,) int32 lengths up to `longest` that add up to `total` rows if possible."""
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
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])


def query_rows(p: Problem, lengths: Lengths) -> torch.Tensor:
    row = torch.arange(p.query_rows[1])
    if p.has_lists:
        return torch.ones(p.query_rows, dtype=torch.bool)
    if p.packed:
        return (row < lengths.q.sum())[None]
    return (row >= lengths.first_q[:, None]) & (row < (lengths.first_q + lengths.q)[:, None])


def key_storage(p: Problem, lengths: Lengths) -> Storage:
    if p.has_lists:  # some slots are in no list, some in several
        return Storage(p.tokens * 3 // (2 * p.page_size) + SPARE_PAGES, p.page_size)
    if p.page_size:
        return Storage(int((-(-lengths.k // p.page_size)).sum()) + SPARE_PAGES, p.page_size)
    return Storage(p.batch, p.seq_k) if p.total_k is None else Storage(1, p.total_k)


def page_table(
    p: Problem, lengths: Lengths, storage: Storage, generator: torch.Generator
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the page table (B, pages a sequence) int32 or None, and each position's place: (B, Sk) int64, or -1."""
    j = torch.arange(p.seq_k)[None]
    if not p.page_size:
        inside = (j >= lengths.first_k[:, None]) & (j < (lengths.first_k + lengths.k)[:, None])
        if p.total_k is None:
            return None, torch.where(inside, torch.arange(p.batch)[:, None] * p.seq_k + j, -1)
        return None, torch.where(j < lengths.k[:, None], lengths.first_k[:, None] + j, -1)
    if p.has_lists:
        return _slots(p, lengths, storage, generator)
    columns = p.seq_k // p.page_size
    owned = torch.arange(columns)[None] * p.page_size < lengths.k[:, None]
    garbage = torch.tensor(GARBAGE_IDS).repeat(-(-p.batch * columns // len(GARBAGE_IDS)))
    table = garbage[: p.batch * columns].reshape(p.batch, columns)
    table[owned] = torch.randperm(storage.batch, generator=generator)[: int(owned.sum())]
    places = table[:, j[0] // p.page_size] * p.page_size + j % p.page_size if columns else j.expand(p.batch, 0)
    return table.int(), torch.where(j < lengths.k[:, None], places, -1)


def _slots(
    p: Problem, lengths: Lengths, storage: Storage, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each sequence's list of slots (B, tokens) int32, and the same with -1 for slots that do not count.

    One place in eight is a hole, a second list has nothing else, lists repeat slots, and any number follows a list.
    Slot 0, to which kernels clamp a hole, is in no list."""
    shape = p.batch, p.tokens
    slots = torch.randint(1, storage.batch * storage.rows * 3 // 4, shape, generator=generator)
    holes = torch.rand(shape, generator=generator) < 0.125
    holes[1:2] = p.batch > 2
    slots[holes] = torch.tensor(GARBAGE_IDS)[[0, 2]].repeat(slots.numel())[: int(holes.sum())]
    inside = torch.arange(p.tokens) < lengths.k[:, None]
    behind = torch.tensor([*GARBAGE_IDS, -1, 0]).repeat(slots.numel())[: slots.numel()].view(shape)
    slots = torch.where(inside, slots, behind)
    return slots.int(), torch.where(inside & (slots >= 0), slots, -1)


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MASKED = 0.1  # share of entries that a bias or mask hides
LARGEST_FULL = 2**24  # elements; a larger bias or mask is the same for all sequences and heads
PIG_BITS, PIG_TABLES = (4, 10), (20, 150)  # MagicPIG's K and L, both ends included


def chosen_tokens(
    p: Problem, lengths: Lengths, generator: torch.Generator, seed: int, extremes: bool
) -> dict[str, torch.Tensor | None]:
    """Return chosen tokens of sparse_attention, their counts and weights; chosen blocks of block_sparse_attention.

    Each head has a random subset in random order; odd seeds repeat the first token in the second place. Ids that do not
    count fill missing places and one place of eight; behind `counts` lie garbage and existing tokens."""
    if p.has_blocks:
        return _chosen_blocks(p, generator, extremes)
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


def _chosen_blocks(p: Problem, generator: torch.Generator, extremes: bool) -> dict[str, torch.Tensor | None]:
    """Return random lists of different blocks with holes, and their counts, behind which garbage lies.

    Block 1 is in no list; with `extremes` the first row lists nothing and the last as much as it can."""
    shape, blocks = (p.batch, p.heads_k, p.seq_q), -(-p.seq_k // p.block_k)
    order = torch.rand(*shape, max(blocks, p.tokens), generator=generator).argsort(dim=-1)[..., : p.tokens]
    ignored = torch.tensor(GARBAGE_IDS)
    hole = (order >= blocks) | (order == 1) | (torch.rand(order.shape, generator=generator) < 0.125)
    counts = torch.randint(0, p.tokens + 1, shape, generator=generator)
    if extremes:
        counts[..., :1] = 0
        counts[..., 1:][..., -1:] = p.tokens
    behind = torch.arange(p.tokens) >= counts[..., None]
    garbage = ignored[torch.randint(len(ignored), order.shape, generator=generator)]
    indices = torch.where(behind, garbage, torch.where(hole, -1 - garbage.clamp(0, 7), order))
    return {"indices": indices.int(), "counts": counts.int()}


def drawn_features(p: Problem, generator: torch.Generator, seed: int) -> dict[str, torch.Tensor | None]:
    """Return the tensors of common features, as the call has them: normal numbers unless drawn otherwise."""
    sizes = p.axis_sizes()
    found: dict[str, torch.Tensor | None] = {}
    for name in COMMON:
        feature = FEATURES[name]
        if feature.axes and getattr(p, name):
            draw = _DRAWN.get(name)
            if draw is not None:
                found[name] = draw(p, generator, seed)
            else:
                found[name] = torch.randn([sizes[axis] for axis in feature.axes], generator=generator)
    return found | _captured(p, generator)


def _captured(p: Problem, generator: torch.Generator) -> dict[str, torch.Tensor | None]:
    """Return the tensors that score and mask functions read, shorter and longer than the call's sizes."""
    shapes = {n: shape for text in (p.score_mod, p.mask_mod) if text for n, shape in parse(text).captures.items()}
    found: dict[str, torch.Tensor | None] = {}
    for number, (kind, rank, _) in sorted(shapes.items()):
        sizes = [(29, 350)[(number + axis) % 2] for axis in range(rank)]
        integers = torch.randint(-3, 6, sizes, generator=generator)
        made = torch.randn(sizes, generator=generator) if kind == "f" else integers
        dtype = {"f": torch.float32, "i": torch.int32, "l": torch.int64, "b": torch.bool}[kind]
        found[CAPTURED[number]] = made.to(dtype)
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
    """Return words of random bits, some bits set in no word, and some words 0."""
    halves = torch.randint(2**32, (2, *p.query_rows), generator=generator)
    words = halves[0] | halves[1] << 32
    for bit in torch.randint(64, (24,), generator=generator).tolist():
        words &= ~(torch.tensor(1) << bit)
    return words.masked_fill(torch.rand(words.shape, generator=generator) < MASKED, 0)


def _blocks(p: Problem, generator: torch.Generator, seed: int) -> torch.Tensor:
    """List half of all block pairs, some as whole, none of one block of queries and of one of keys; odd seeds: the same
    for all heads."""
    shape = (p.batch, 1 if seed % 2 else p.heads_q, -(-p.seq_q // p.block_q), -(-p.seq_k // p.block_k))
    marks = torch.randint(PART, PART + 2, shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.5)
    marks[:, :, 2:3] = 0
    marks[..., 1:2] = 0
    lists = block_lists(marks.to(torch.int8), (p.seq_q, p.seq_k), (p.block_q, p.block_k))
    return lists.expand(p.batch, p.heads_q, *lists.shape[2:])


_DRAWN = {"alibi_slopes": _slopes, "bias": _bias, "mask": _mask, "tree_mask": _tree, "block_mask": _blocks}


def _hidden(p: Problem, generator: torch.Generator, seed: int) -> torch.Tensor:
    """Return the scores that a bias or mask hides, of four shapes: some anywhere, some keys', and all of a row."""
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


def attended_keys(p: Problem, lengths: Lengths, features: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """Return the keys of a sequence that are not poisoned, by position: (B, Hk, Sk) bool."""
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
    if p.chunk:  # the chunks from the first query's to the last's
        origin = torch.zeros_like(lengths.k) if p.packed else lengths.first_k
        begin = origin + (first - origin) // p.chunk * p.chunk
        end = origin + ((first + lengths.q - 1 - origin) // p.chunk + 1) * p.chunk
        places = torch.arange(p.seq_k)
        attended &= ((places >= begin[:, None]) & (places < end[:, None]) & (lengths.q > 0)[:, None])[:, None]
    blocks = features.get("block_mask")
    if blocks is not None:
        marked = listed_marks(blocks, blocks.shape[3] - 2).any(dim=2)
        shown = marked.repeat_interleave(p.block_k, dim=2)[..., : p.seq_k]
        attended &= shown.reshape(p.batch, p.heads_k, p.group, p.seq_k).any(dim=2)
    words = features.get("tree_mask")
    if words is not None:
        attended &= _in_some_tree(p, lengths, words)[:, None]
    for name in ("mask", "bias"):
        values = features.get(name)
        if values is not None:
            shown = collapse_broadcast(values) if name == "mask" else collapse_broadcast(values) != float("-inf")
            shown = shown.any(dim=2).expand(p.batch, p.heads_q, p.seq_k)
            attended &= shown.reshape(p.batch, p.heads_k, p.group, p.seq_k).any(dim=2)
    indices, counts = features.get("indices"), features.get("counts")
    if p.has_blocks and indices is not None and counts is not None:
        counted = (torch.arange(p.tokens) < counts[..., None]) & (indices >= 0)
        count = -(-p.seq_k // p.block_k)
        named = torch.where(counted, indices.clamp(max=count), count).long().flatten(2)
        chosen = torch.zeros(p.batch, p.heads_k, count + 1, dtype=torch.bool).scatter_(2, named, True)
        attended &= chosen[..., :-1].repeat_interleave(p.block_k, dim=2)[..., : p.seq_k]
    elif indices is not None and counts is not None:
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
    shown = torch.ones(p.batch, p.seq_k, dtype=torch.bool)
    for b in range(p.batch):
        count, end = int(lengths.q[b]), int(lengths.first_k[b] * (not p.packed) + lengths.k[b])
        first = int(lengths.first_q[b])
        own = words[0, first : first + count] if p.packed else words[b, first : first + count]
        ahead = {"none": -count, "bottom_right": 0, "top_left": int(lengths.k[b]) - count}[p.causal]
        for j in range(max(count - end, 0), count):  # which a causal mask shows to rows from j + ahead on
            shown[b, end - count + j] = bool((own[max(j + ahead, 0) :] >> j & 1).any())
    return shown
