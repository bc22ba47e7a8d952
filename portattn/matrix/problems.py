"""The problems that the matrix asks about: a quick set for every day, and a full one."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from portattn.problem import DTYPES, Problem

SetName = Literal["quick", "full"]
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)  # those of published models, and two that are no power of two

# Sizes that fill a large chip. What is compiled depends on them through strides and the split over keys only.
DENSE: dict[str, Any] = {"op": "attention", "batch": 4, "heads_q": 16, "heads_k": 16, "seq_q": 2048, "seq_k": 2048}
DECODE: dict[str, Any] = {
    "op": "decode_attention", "batch": 16, "heads_q": 32, "heads_k": 8, "seq_q": 1, "seq_k": 8192, "seqlens_k": True,
}  # fmt: skip
PADDED: dict[str, Any] = {"seqlens_q": True, "seqlens_k": True}
MASK_WORDS = {"none": "full", "bottom_right": "causal", "top_left": "causal top-left"}


class Named(msgspec.Struct, frozen=True):
    """A problem and the words for it in reports."""

    name: str
    problem: Problem


def dense(words: str = "", **changes: Any) -> Named:
    problem = Problem(**(DENSE | changes))
    shape = f"D={problem.head_dim}" + (f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    return Named(
        " ".join(["dense", MASK_WORDS[problem.causal], problem.dtype, shape, *([words] if words else [])]), problem
    )


def decode(words: str = "", **changes: Any) -> Named:
    problem = Problem(**(DECODE | changes))
    return Named(" ".join(["decode", problem.dtype, f"D={problem.head_dim}", *([words] if words else [])]), problem)


def quick() -> list[Named]:
    """A handful that touches every kernel, every dtype and every kind of masking."""
    return [
        dense(dtype="fp16", head_dim=64, causal="bottom_right"),
        dense("GQA", dtype="bf16", head_dim=128, causal="bottom_right", heads_k=4),
        dense("padded, LSE", dtype="fp16", head_dim=80, return_lse=True, **PADDED),
        dense(dtype="fp32", head_dim=64),
        decode("GQA", dtype="bf16", head_dim=128),
    ]


def full() -> list[Named]:
    """Every dtype × head_dim × mask of the dense kernel, every dtype × head_dim of decode, and each feature once."""
    found = [
        dense(dtype=dtype, head_dim=dim, causal=causal)
        for dtype in DTYPES
        for causal in MASK_WORDS
        for dim in HEAD_DIMS
    ]
    found += [
        dense("padded", dtype=dtype, head_dim=dim, causal="bottom_right", **PADDED)
        for dtype in DTYPES
        for dim in HEAD_DIMS
    ]
    for dtype in DTYPES:
        causal: dict[str, Any] = {"dtype": dtype, "head_dim": 128, "causal": "bottom_right"}
        found += [
            dense("GQA", **causal, heads_k=4),
            dense("MQA", **causal, heads_k=1),
            dense("LSE", **causal, return_lse=True),
            dense("left-padded", **causal, **PADDED, leftpad_q=True, leftpad_k=True),
            dense("bshd", **causal, layout="bshd"),
            dense("unaligned", **causal, aligned=False),
            dense("", **causal | {"head_dim": 192}, head_dim_v=128),
            dense("short queries", **causal | {"seq_q": 16}),
        ]
    found += [decode("GQA", dtype=dtype, head_dim=dim) for dtype in DTYPES for dim in HEAD_DIMS]
    for dtype in DTYPES:
        wide: dict[str, Any] = {"dtype": dtype, "head_dim": 128}
        found += [
            decode("one head a group", **wide, heads_k=32),
            decode("MQA", **wide, heads_k=1),
            decode("no lengths", **wide, seqlens_k=False),
            decode("left-padded, LSE", **wide, leftpad_k=True, return_lse=True),
            decode("4 queries, causal", **wide, seq_q=4, causal="bottom_right"),
        ]
    return found


SETS = {"quick": quick, "full": full}
