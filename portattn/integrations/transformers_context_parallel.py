"""transformers' models with sequences shared by several ranks: `register_parallel(shared)` and `shard_batch`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import masking_utils

from portattn.distributed.collectives import agree
from portattn.distributed.parallel import OP, ContextParallel
from portattn.errors import ArgumentError
from portattn.integrations.transformers import Registration, check_free, check_name
from portattn.integrations.transformers_mask import CompactMask, read_pattern, reads_back, refuse

IGNORED = -100  # a label that counts in no loss
HINT = "not with sequences that ranks share"


class _ShardMask(CompactMask):
    """The mask of a rank's rows by positions in the whole sequence; `checked`: position_ids match the rows."""

    checked = False


def register_parallel(
    shared: ContextParallel, name: str = "portattn_parallel", backend: str | None = None
) -> Registration:  # fmt: skip
    """Make `shared` an attention implementation of transformers: `attn_implementation="portattn_parallel"`.

    Each rank calls its model with its own rows and their positions, as shard_batch makes them. Causal models, windows,
    caps and sinks; no padding, packing, caches or attention dropout.

    Args:
        shared: the result of portattn.distributed.context_parallel
        name: its name in transformers; not transformers' own, nor a part of one
        backend: as in portattn.attention: a path that every local call must take, or None for the setting

    Returns:
        A Registration, a handle with remove().

    Raises:
        ArgumentError: The name is taken. In a forward: a feature is unsupported, or position_ids do not match the
            rank's rows (read back once a forward); every rank raises.
    """
    if not isinstance(shared, ContextParallel):
        limit = "must be what portattn.distributed.context_parallel returns"
        raise ArgumentError("register_parallel", "shared", type(shared).__name__, limit)
    check_name(name)
    check_free(name)

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        with _told(shared):
            check(query, key, attention_mask, dropout, sliding_window, position_ids, kwargs)
        out: Any = shared.attention(
            query, key, value, scale=scaling, causal=attention_mask.causal, window=attention_mask.window,
            softcap=softcap, sinks=s_aux, backend=backend,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    def check(
        query: torch.Tensor, key: torch.Tensor, attention_mask: Any, dropout: float, sliding_window: int | None,
        position_ids: torch.Tensor | None, kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        if not isinstance(attention_mask, _ShardMask):
            raise refuse("attention_mask", attention_mask, f"must be made by AttentionMaskInterface; {HINT}")
        for feature in _OTHERS:
            value_of = kwargs.get(feature)
            if value_of is not None and value_of is not False:
                raise refuse(feature, value_of, f"is not supported; {HINT}")
        if dropout > 0.0:
            raise refuse("attention_dropout", dropout, f"must be 0; {HINT}")
        if key.shape[2] != query.shape[2]:
            raise refuse("past_key_values", key.shape[2] - query.shape[2], f"must be empty: use_cache=False; {HINT}")
        if sliding_window is not None and not attention_mask.windowed:
            raise refuse("sliding_window", sliding_window, "this layer's mask was made without it")
        if position_ids is not None and not attention_mask.checked:
            _check_positions(shared, position_ids, query.shape[2])
            attention_mask.checked = True

    registration = Registration(name, f"{shared!r}", forward, _mask_of(shared))
    registration.install()
    return registration


# Arguments of attention functions that change the result, and that are not done here.
_OTHERS = (
    "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "cache", "sinks", "indices", "block_indices",
    "output_attentions",
)  # fmt: skip


def shard_batch(
    shared: ContextParallel, input_ids: torch.Tensor, labels: torch.Tensor | None = None
) -> dict[str, torch.Tensor | bool]:  # fmt: skip
    """Return this rank's arguments of a causal language model: `model(**shard_batch(shared, input_ids, labels))`.

    A row's label is the next token, which may be another rank's: labels are shifted before they are cut. A rank's loss
    is the sum over its rows divided by the labels of the whole batch, so that the ranks' losses and gradients add up to
    one process's: all-reduce them with a sum.

    Args:
        shared: the result of portattn.distributed.context_parallel
        input_ids: (B, S) int64, whole, the same on every rank; S must divide as shared.shard says
        labels: (B, S) int64 as transformers takes them, -100 for none; None without a loss

    Returns:
        input_ids, position_ids, use_cache=False, and with labels also labels, shift_labels and num_items_in_batch.

    Raises:
        ArgumentError: Shapes differ from the ones above, or S does not divide.
    """
    if input_ids.ndim != 2:
        raise ArgumentError("shard_batch", "input_ids.shape", tuple(input_ids.shape), "must be (B, S)")
    if labels is not None and labels.shape != input_ids.shape:
        limit = f"must be input_ids', {tuple(input_ids.shape)}"
        raise ArgumentError("shard_batch", "labels.shape", tuple(labels.shape), limit)
    positions = shared.positions(input_ids.shape[1], input_ids.device)
    found: dict[str, torch.Tensor | bool] = {
        "input_ids": shared.shard(input_ids, dim=1),
        "position_ids": positions[None].expand(input_ids.shape[0], -1),
        "use_cache": False,
    }
    if labels is not None:
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        found["labels"] = found["shift_labels"] = shared.shard(shifted, dim=1)
        found["num_items_in_batch"] = (shifted != IGNORED).sum()
    return found


def _mask_of(shared: ContextParallel) -> Callable[..., _ShardMask]:
    def shard_mask(*args: Any, **kwargs: Any) -> _ShardMask:
        with _told(shared):
            return made(*args, **kwargs)

    def made(
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
        attention_mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> _ShardMask:
        """Return the mask of a rank's rows: transformers' mask interface, whose own masks assume whole sequences."""
        if isinstance(attention_mask, _ShardMask):
            return attention_mask
        if attention_mask is not None and (attention_mask.ndim != 2 or not bool(attention_mask.all())):
            raise refuse("attention_mask", attention_mask, f"must be None, or all ones; {HINT}")
        if kv_length != q_length:
            raise refuse("past_key_values", kv_length - q_length, f"must be empty: use_cache=False; {HINT}")
        pattern = read_pattern(mask_function, kv_length)
        if not pattern.whole or pattern.chunk is not None:
            raise refuse("mask_function", mask_function, f"must be causal, with a window or without one; {HINT}")
        mask = _ShardMask(batch_size, q_length, kv_length, kv_length, pattern.left, pattern.right)
        mask.windowed = pattern.left is not None
        expected = masking_utils.find_packed_sequence_indices(_places(shared, q_length)[None])
        # Where a rank's rows lie in pieces, transformers takes them for several sequences. Others are not done.
        if pattern.packed is not None and reads_back(torch.device(device), q_length):
            mine = pattern.packed.cpu()
            if expected is None or not bool((mine == expected).all()):
                raise refuse(
                    "position_ids", mine, f"are of packed sequences, or of other rows than this rank's; {HINT}"
                )
        return mask

    return shard_mask


@contextlib.contextmanager
def _told(shared: ContextParallel) -> Iterator[None]:
    """Tell this rank's refusals to the others in their next message, so that all raise; without one they time out."""
    try:
        yield
    except ArgumentError as error:
        if shared._check == "always":
            agree(f"{OP}.attention", shared.dims, {}, error)
        raise


def _places(shared: ContextParallel, rows: int) -> torch.Tensor:
    return shared.positions(rows * shared.shards.ranks)


def _check_positions(shared: ContextParallel, position_ids: torch.Tensor, rows: int) -> None:
    if not reads_back(position_ids.device, rows):
        return
    places = _places(shared, rows)
    if position_ids.shape[-1] != rows or not bool((position_ids.cpu() == places).all()):
        given = position_ids.flatten()[:4].tolist()
        limit = f"must be those of this rank's rows, shared.positions(S), which begin with {places[:4].tolist()}"
        raise refuse("position_ids", f"{given}…", limit)
