"""The sets of prefill: full slots, grouped heads, packed and padded lengths, windows, short queries, chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from portattn.schema.problem_limits import Dtype
from portattn.tools.bench.cases import Case

WIDTH = 2048  # heads · head_dim of the dense shapes, as FlashAttention's papers time them
TOKENS = 16384  # batch · seq of the dense shapes
DIMS = (64, 128, 256)
SEQS = (1024, 4096, 16384)
GROUP = 8  # query heads that share a key/value head, in the grouped set
# Drawn evenly from 256..4096 (random.Random(34)), the last one made 379 so that they sum up to 16384: 2048 on average.
LENGTHS = (2422, 1718, 2655, 369, 3710, 1195, 3936, 379)
ROOM = 4096  # rows of a slot for any of them
WINDOW = (1023, 0)  # 1024 keys with the query's own among them, as models count it
SHORT = 128  # query rows at the end of TOKENS keys


def causality(wanted: bool) -> dict[str, Any]:
    return {"causal": "bottom_right" if wanted else "none"}


def heads(dim: int, group: int = 1) -> dict[str, Any]:
    return {"heads_q": WIDTH // dim, "heads_k": WIDTH // dim // group, "head_dim": dim}


def dense(seqs: Sequence[int] = SEQS, dims: Sequence[int] = DIMS, dtype: Dtype = "bf16", group: int = 1) -> list[Case]:
    """B·S = 16k, or one sequence where it is longer, and H·D = 2048; full and causal."""
    kind = f"gqa {group}:1" if group > 1 else "dense"
    return [
        Case(
            name=f"{kind} {dtype} D={dim} S={seq}" + " causal" * causal,
            op="attention", batch=max(TOKENS // seq, 1), seq_q=seq, seq_k=seq, dtype=dtype, **heads(dim, group),
            **causality(causal),
        )
        for dim in dims
        for seq in seqs
        for causal in (False, True)
    ]  # fmt: skip


def beyond() -> list[Case]:
    """Shorter and longer than the dense set, and its shapes in fp16."""
    return dense((256, 512, 65536, 131072)) + dense(dtype="fp16")


def ragged(kind: str, dims: Sequence[int] = DIMS) -> list[Case]:
    """Sequences of LENGTHS padded or packed, or full ones with as many FLOPs in all as those have."""
    lengths: dict[str, Any] = {"lengths_q": LENGTHS, "lengths_k": LENGTHS, "seq_q": ROOM, "seq_k": ROOM}
    fields: dict[str, dict[str, Any]] = {
        "padded": {"op": "attention", **lengths},
        "packed": {"op": "varlen_attention", "packed": True, **lengths},
    }
    # Of the same squares' sum, and a whole number of tiles: FLOPs differ by 2 %, which rates allow for.
    side = 64 * round(math.sqrt(sum(n * n for n in LENGTHS) / len(LENGTHS)) / 64)
    fields["even"] = {"op": "attention", "seq_q": side, "seq_k": side}
    titles = {"padded": "padded D={}", "packed": "packed D={}", "even": f"even, packed's FLOPs D={{}} S={side}"}
    return [
        Case(
            name=titles[kind].format(dim) + " causal" * causal,
            batch=len(LENGTHS), **heads(dim), **causality(causal), **fields[kind],
        )
        for dim in dims
        for causal in (False, True)
    ]  # fmt: skip


def window() -> list[Case]:
    return [
        Case(
            name=f"window D={dim} S={seq} window={WINDOW[0] + 1} causal",
            op="attention", batch=TOKENS // seq, seq_q=seq, seq_k=seq, window=WINDOW, **heads(dim), **causality(True),
        )
        for dim in DIMS
        for seq in (4096, TOKENS)
    ]  # fmt: skip


def short_queries() -> list[Case]:
    return [
        Case(
            name=f"short queries D={dim} Sq={SHORT} Sk={TOKENS}" + " causal" * causal,
            op="attention", batch=1, seq_q=SHORT, seq_k=TOKENS, **heads(dim), **causality(causal),
        )
        for dim in DIMS
        for causal in (False, True)
    ]  # fmt: skip


def prefill() -> list[Case]:
    """Return chunks of 512 queries at the end of the tokens in pages: alone, and beside decoding sequences."""
    chunk, decodes, chunks = 512, 64, 4
    paged: dict[str, Any] = {
        "op": "paged_attention", "seq_q": chunk, "seq_k": 8192, "page_size": 64,
        "heads_q": 32, "heads_k": 8, "head_dim": 128, **causality(True),
    }  # fmt: skip
    return [
        Case(name="prefill B=4 Sq=512 S=8192 D=128 page=64 causal", batch=chunks, **paged),
        Case(
            name="prefill mixed 64×1 + 4×512 S=4096/8192 D=128 page=64 causal",
            batch=decodes + chunks,
            packed=True,
            lengths_q=(1,) * decodes + (chunk,) * chunks,
            lengths_k=(4096,) * decodes + (8192,) * chunks,
            **paged,
        ),
    ]
