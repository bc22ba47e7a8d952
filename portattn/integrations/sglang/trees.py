"""Trees of drafted tokens: SGLang's flat boolean masks as a word of bits for each token, on the device.

SGLang's `custom_mask` is flat. Where it is full, each of a sequence's n drafted tokens has a row of `length + n` bools,
and the sequences follow each other; otherwise each has n, of the drafted tokens alone. The columns before the drafted
tokens are True in all of them, so only the n × n part is read.
"""

from __future__ import annotations

import torch

from portattn.api.tree_mask import tree_mask


def words_of(mask: torch.Tensor, lengths: torch.Tensor, drafted: int, full: bool) -> torch.Tensor:
    """Which drafted tokens each drafted token attends.

    mask     bool or uint8, flat. Sequences that it ends before (those that pad a CUDA graph's batch) get any words
    lengths  (B,) keys of each sequence before its drafted tokens
    drafted  tokens of each sequence, n
    full     the mask has the columns of earlier keys

    Returns (B, n) int64 words as `portattn.paged_attention` takes them (`tree_mask`). Nothing waits for the device, and
    shapes depend on B and n alone, so a CUDA graph can hold it.
    """
    count = lengths.shape[0]
    number = torch.arange(drafted, device=mask.device)
    before = lengths.long() if full else torch.zeros_like(lengths, dtype=torch.int64)
    row = before + drafted  # bools of one token's row
    first = (row * drafted).cumsum(0) - row * drafted  # where a sequence's rows begin
    place = first[:, None, None] + row[:, None, None] * number[:, None] + before[:, None, None] + number
    if mask.numel() == 0:
        return chain(count, drafted, mask.device)
    tree = mask[place.clamp_(max=mask.numel() - 1)].bool()
    return tree_mask(tree)


def chain(count: int, drafted: int, device: torch.device | str) -> torch.Tensor:
    """The words of drafted tokens each of which attends all before it: (count, drafted) int64."""
    rows = torch.ones(drafted, drafted, dtype=torch.bool, device=device).tril()
    return tree_mask(rows).expand(count, drafted).contiguous()
