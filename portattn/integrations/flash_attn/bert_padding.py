"""flash_attn.bert_padding's functions: pack padded batches and pad them again. Plain torch, differentiable."""

from __future__ import annotations

import torch


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Select rows (M,) of the first axis of (N, ...).

    Returns:
        (M, ...).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn.bert_padding import index_first_axis
        >>> index_first_axis(torch.arange(8).view(4, 2), torch.tensor([2, 0])).tolist()
        [[4, 5], [0, 1]]
    """
    return input[indices]


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Set rows (M,), no two alike, of zeros to values (M, ...).

    Returns:
        (first_axis_dim, ...).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn.bert_padding import index_put_first_axis
        >>> index_put_first_axis(torch.ones(2, 1), torch.tensor([2, 0]), 3).flatten().tolist()
        [1.0, 0.0, 1.0]
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def index_first_axis_residual(input: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Select rows of the first axis, and return the whole too: the gradients of both add up.

    Returns:
        (M, ...) and (N, ...).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn.bert_padding import index_first_axis_residual
        >>> [tuple(t.shape) for t in index_first_axis_residual(torch.zeros(4, 2), torch.tensor([2]))]
        [(1, 2), (4, 2)]
    """
    return input[indices], input.view_as(input)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Pack the rows of a padded batch (B, S, ...) one after the other. Reads the mask back.

    Args:
        attention_mask: (B, S) bool or integers: 1 for a valid row
        unused_mask: (B, S), likewise: 1 for a row that gets a place without being valid

    Returns:
        Packed (T, ...), the rows' indices (T,) in the flattened batch, cu_seqlens (B + 1,) int32, the longest
        sequence's
        rows, and seqused (B,) int32, the valid rows of each.

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn.bert_padding import unpad_input
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> packed, indices, cu_seqlens, longest, used = unpad_input(torch.ones(2, 3, 4), mask)
        >>> tuple(packed.shape), indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()
        ((3, 4), [0, 1, 3], [0, 2, 3], 2, [2, 1])
    """
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(dim=-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices), indices, _beginnings(lengths), _longest(lengths),
        attention_mask.sum(dim=-1, dtype=torch.int32),
    )  # fmt: skip


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pack a batch (B, S, ...) whose rows each hold several short sequences. Reads the lengths back.

    Args:
        attention_mask_in_length: (B, S) integers: the lengths of a row's sequences, then zeros

    Returns:
        Packed (T, ...), the rows' indices (T,) in the flattened batch, cu_seqlens int32 of all sequences, and the
        longest
        one's rows.

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn.bert_padding import unpad_input_for_concatenated_sequences
        >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
        >>> _, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(torch.ones(2, 4, 1), lengths)
        >>> indices.tolist(), cu_seqlens.tolist(), longest
        ([0, 1, 2, 4, 5, 6], [0, 2, 3, 6], 3)
    """
    rows = torch.arange(attention_mask_in_length.shape[-1], device=attention_mask_in_length.device)
    indices = (rows < attention_mask_in_length.sum(dim=-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0]
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices), indices, _beginnings(lengths), _longest(lengths)
    )  # fmt: skip


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Put packed rows (T, ...) at indices (T,) of `unpad_input` back into a padded batch, with zeros elsewhere.

    Returns:
        (batch, seqlen, ...).

    Examples:
        >>> import torch
        >>> from portattn.integrations.flash_attn.bert_padding import pad_input
        >>> pad_input(torch.ones(3, 1), torch.tensor([0, 1, 3]), 2, 3)[..., 0].tolist()
        [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _beginnings(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
