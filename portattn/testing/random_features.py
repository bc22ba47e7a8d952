"""Random biases, masks, slopes and chosen tokens of a call, and which keys they leave to be attended."""

from __future__ import annotations

import torch

from portattn.schema.features import COMMON, FEATURES
from portattn.schema.problem import Problem
from portattn.schema.tensors import collapse_broadcast
from portattn.testing.random_lengths import GARBAGE_IDS, Lengths

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MASKED = 0.1  # share of entries that a bias or mask hides
LARGEST_FULL = 2**24  # elements; a larger bias or mask is the same for all sequences and heads
PIG_BITS, PIG_TABLES = (4, 10), (20, 150)  # MagicPIG's K and L, both ends included


def choices(
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


def drawn_features(p: Problem, generator: torch.Generator, seed: int) -> dict[str, torch.Tensor | None]:
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


def attended_keys(p: Problem, lengths: Lengths, features: dict[str, torch.Tensor | None]) -> torch.Tensor:
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
    if p.chunk:  # the chunks from the first query's to the last's
        origin = torch.zeros_like(lengths.k) if p.packed else lengths.first_k
        begin = origin + (first - origin) // p.chunk * p.chunk
        end = origin + ((first + lengths.q - 1 - origin) // p.chunk + 1) * p.chunk
        places = torch.arange(p.seq_k)
        attended &= ((places >= begin[:, None]) & (places < end[:, None]) & (lengths.q > 0)[:, None])[:, None]
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
            shown = collapse_broadcast(values) if name == "mask" else collapse_broadcast(values) != float("-inf")
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
