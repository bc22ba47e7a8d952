"""One small legal call of every op, to be spoiled in one place, and what the error about that place must say."""

from typing import Any

import pytest
import torch

import portattn

NAN = float("nan")
OPS = ("attention", "varlen_attention", "decode_attention", "paged_attention", "sparse_attention", "mla_attention")
WINDOWED = ("attention", "varlen_attention", "decode_attention", "paged_attention", "mla_attention")
BIASED = ("attention", "decode_attention", "paged_attention", "mla_attention")
SPLIT = ("decode_attention", "paged_attention", "sparse_attention", "mla_attention")
LAID_OUT = ("attention", "decode_attention", "paged_attention", "sparse_attention", "mla_attention")
PAGED = ("paged_attention", "mla_attention")
# (B, Hq, Sq, Sk) of the good calls: what bias and mask broadcast to.
SCORES ={
    "attention": (2, 4, 5, 7), "decode_attention": (2, 4, 1, 7), "paged_attention": (2, 4, 1, 12),
    "mla_attention": (2, 4, 1, 12),
}  # fmt: skip


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good(op: str) -> dict[str, Any]:
    """Arguments by name: two sequences, four query heads, two of keys (one of latent rows), head_dim 16."""
    table = {"page_table": int32([0, 1, 2], [3, 4, 0]), "seqlens_k": int32(10, 8)}
    cache = {"k_cache": torch.zeros(2, 2, 7, 16), "v_cache": torch.zeros(2, 2, 7, 16)}
    chosen = {"indices": int32(*[[[0, 2, -1]] * 4] * 2), "counts": int32(*[[3] * 4] * 2)}
    return {
        "attention": {"q": torch.zeros(2, 4, 5, 16), "k": torch.zeros(2, 2, 7, 16), "v": torch.zeros(2, 2, 7, 16)},
        "varlen_attention": {
            "q": torch.zeros(9, 4, 16), "k": torch.zeros(12, 2, 16), "v": torch.zeros(12, 2, 16),
            "cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(0, 5, 12), "max_seqlen_q": 5, "max_seqlen_k": 7,
        },
        "decode_attention": {"q": torch.zeros(2, 4, 1, 16), **cache, "seqlens_k": int32(7, 3)},
        "paged_attention": {
            "q": torch.zeros(2, 4, 1, 16), "k_pages": torch.zeros(5, 4, 2, 16), "v_pages": torch.zeros(5, 4, 2, 16),
            **table,
        },
        "sparse_attention": {"q": torch.zeros(2, 4, 1, 16), **cache, **chosen},
        "mla_attention": {
            "q_nope": torch.zeros(2, 4, 1, 16), "q_rope": torch.zeros(2, 4, 1, 8), "kv_pages": torch.zeros(5, 4, 24),
            **table, "scale": 0.25,
        },
    }[op]  # fmt: skip


def ragged(op: str) -> dict[str, Any]:
    """The good call of an op over pages, with packed queries: sequences of two rows and of one."""
    parts = {"q": (3, 4, 16)} if op == "paged_attention" else {"q_nope": (3, 4, 16), "q_rope": (3, 4, 8)}
    return good(op) | {name: torch.zeros(shape) for name, shape in parts.items()} | {"cu_seqlens_q": int32(0, 2, 3)}


def sparse_paged() -> dict[str, Any]:
    """The good call of sparse_attention over pages of 4 tokens."""
    pages = {"k_cache": torch.zeros(5, 4, 2, 16), "v_cache": torch.zeros(5, 4, 2, 16)}
    return good("sparse_attention") | pages | {"page_table": int32([0, 1, 2], [3, 4, 0]), "seqlens_k": int32(10, 8)}


CALLS = {op: (op, good(op)) for op in OPS} | {
    "ragged": ("paged_attention", ragged("paged_attention")), "ragged mla": ("mla_attention", ragged("mla_attention")),
    "sparse over pages": ("sparse_attention", sparse_paged()),
}  # fmt: skip


def indices(*first: int) -> torch.Tensor:
    """(2, 4, 3): these for the second sequence's third head, 0 elsewhere."""
    made = torch.zeros(2, 4, 3, dtype=torch.int32)
    made[1, 2] = torch.tensor(first, dtype=torch.int32)
    return made


def counts(value: int) -> torch.Tensor:
    made = torch.full((2, 4), 3, dtype=torch.int32)
    made[1, 2] = value
    return made


def perform(op: str, arguments: dict[str, Any], **changes: Any) -> Any:
    return getattr(portattn, op)(**(arguments | changes))


def assert_refused(op: str, arguments: dict[str, Any], what: str, *limits: str) -> None:
    """The call raises an ArgumentError that says `what` ("argument is value") first, and then each of the limits."""
    with pytest.raises(portattn.ArgumentError) as error:
        perform(op, arguments)
    message = str(error.value)
    assert message.startswith(f"{op}: {what}"), message
    _, _, limit = message.partition(", but ")
    for part in limits:
        assert part in limit, message
