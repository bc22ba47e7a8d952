"""Tiny random-weight models, batches with padding, and how far two sets of logits differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers package is not installed")

import transformers

# Both implementations compute in float32 on a CPU, in different orders of summation. Logits are of size 1 to 5, seen
# differences below 5e-6; the planted errors below differ by more than 0.05.
TOLERANCE = 2e-5
PLANTED = 0.05
VOCABULARY, BATCH, LENGTH = 64, 3, 11
# initializer_range makes scores vary by several units: with the default 0.02 every key would weigh the same, and no
# error in a mask could be seen.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = ("Llama", "Qwen3")
PADDINGS = {
    "none": None,
    "ones": ((0, 0), (0, 0), (0, 0)),
    "left": ((4, 0), (0, 0), (1, 0)),
    "right": ((0, 3), (0, 0), (0, 6)),
    "both": ((2, 3), (0, 0), (5, 1)),
    "an empty row": ((0, 0), (11, 0), (3, 0)),
}


def build(family: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@contextlib.contextmanager
def using(model: Any, implementation: str) -> Iterator[Any]:
    model.set_attn_implementation(implementation)
    yield model
    model.set_attn_implementation("eager")


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(1))


def padding(name: str) -> torch.Tensor | None:
    sides = PADDINGS[name]
    if sides is None:
        return None
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for row, (left, right) in enumerate(sides):
        mask[row, :left] = 0
        mask[row, LENGTH - right :] = 0
    return mask


def positions(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)


def difference(ours: torch.Tensor, eager: torch.Tensor, mask: torch.Tensor | None) -> float:
    assert torch.isfinite(ours).all()
    valid = torch.ones(ours.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    assert valid.any()
    return (ours - eager)[valid].abs().max().item()
