"""The named problem sets that `portattn bench` times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from portattn.bench.cases import Case
from portattn.problem import Dtype

WIDTH = 2048  # heads · head_dim of the dense shapes, as FlashAttention's papers time them
TOKENS = 16384  # batch · seq of the dense shapes
HEADS: dict[str, Any] = {"heads_q": 32, "heads_k": 8, "head_dim": 128}  # a common model's: 8 billion parameters
PAGES = (16, 64, 256)
# Drawn evenly from 256..4096 (random.Random(34)), the last one made 379 so that they sum up to 16384.
LENGTHS = (2422, 1718, 2655, 369, 3710, 1195, 3936, 379)
ROOM = 4096  # rows of a slot for any of them
MAGICPIG = (10, 150)  # K and L of the paper's main setting
LATENT: dict[str, Any] = {
    "op": "mla_attention", "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "page_size": 64,
    "scale": 192**-0.5,  # DeepSeek-V3's heads are 128 + 64 wide before absorption
}  # fmt: skip


def _causal(wanted: bool) -> dict[str, Any]:
    return {"causal": "bottom_right" if wanted else "none"}


def _dense(seqs: Sequence[int], dims: Sequence[int]) -> list[Case]:
    """B·S = 16k and H·D = 2048."""
    return [
        Case(
            name=f"dense bf16 D={dim} S={seq}" + " causal" * causal,
            op="attention",
            batch=max(TOKENS // seq, 1),
            heads_q=WIDTH // dim,
            heads_k=WIDTH // dim,
            seq_q=seq,
            seq_k=seq,
            head_dim=dim,
            **_causal(causal),
        )
        for dim in dims
        for seq in seqs
        for causal in (False, True)
    ]


# (batch, query heads, key/value heads, keys, head_dim) with one query token a sequence.
_DECODE = (
    (8, 64, 16, 1024, 64),
    (1, 32, 8, 1024, 128),
    (1, 32, 8, 32000, 128),
    (128, 32, 8, 2048, 128),
    (64, 32, 8, 8192, 128),
    (16, 64, 8, 32768, 128),
)


def _decode(pages: Iterable[int]) -> list[Case]:
    """The decode shapes over a contiguous cache (page size 0) or pages, all full."""
    return [
        Case(
            name=(
                f"paged B={b} H={hq}/{hk} S={s} D={d} page={page}" if page else f"decode B={b} H={hq}/{hk} S={s} D={d}"
            ),
            op="paged_attention" if page else "decode_attention",
            batch=b,
            heads_q=hq,
            heads_k=hk,
            seq_q=1,
            seq_k=s,
            head_dim=d,
            page_size=page,
        )
        for b, hq, hk, s, d in _DECODE
        for page in pages
    ]


def _small(dtype: Dtype) -> list[Case]:
    sizes: dict[str, Any] = {"batch": 2, "heads_q": 8, "heads_k": 8, "head_dim": 64, "dtype": dtype}
    return [
        Case(name=f"small {dtype} S={seq}", op="attention", seq_q=seq, seq_k=seq, **sizes) for seq in (64, 256, 512)
    ]


def _ragged(kind: str) -> list[Case]:
    """Sequences of LENGTHS padded or packed, or full ones with as many FLOPs in all as those have."""
    lengths: dict[str, Any] = {"lengths_q": LENGTHS, "lengths_k": LENGTHS, "seq_q": ROOM, "seq_k": ROOM}
    fields: dict[str, dict[str, Any]] = {
        "padded": {"op": "attention", **lengths},
        "packed": {"op": "varlen_attention", "packed": True, **lengths},
    }
    # Of the same squares' sum, and a whole number of tiles: FLOPs differ by 2 %, which rates allow for.
    side = 64 * round(math.sqrt(sum(n * n for n in LENGTHS) / len(LENGTHS)) / 64)
    fields["dense"] = {"op": "attention", "seq_q": side, "seq_k": side}
    titles = {"padded": "padded D={}", "packed": "packed D={}", "dense": f"dense, packed's FLOPs D={{}} S={side}"}
    return [
        Case(
            name=titles[kind].format(dim) + " causal" * causal,
            batch=len(LENGTHS),
            heads_q=WIDTH // dim,
            heads_k=WIDTH // dim,
            head_dim=dim,
            **_causal(causal),
            **fields[kind],
        )
        for dim in (64, 128)
        for causal in (False, True)
    ]


def _mla() -> list[Case]:
    shapes = ((128, 128, 4096, 1), (128, 128, 4096, 2), (64, 16, 4096, 1), (16, 128, 8192, 1), (1, 128, 32768, 1))
    return [
        Case(
            name=f"mla B={b} H={h} S={s}" + f" Sq={rows}" * (rows > 1),
            batch=b,
            heads_q=h,
            seq_q=rows,
            seq_k=s,
            **_causal(rows > 1),
            **LATENT,
        )
        for b, h, s, rows in shapes
    ]


def _sparse() -> list[Case]:
    """About 2 % and 6 % of the tokens, chosen by each query head, bf16."""
    cases = []
    for batch, keys, tokens in ((1, 32000, 640), (16, 32768, 640), (16, 32768, 2048), (64, 8192, 512)):
        for page, magicpig in ((0, None), (16, None), (0, MAGICPIG)):
            name = f"sparse B={batch} H=32/8 S={keys} D=128 tokens={tokens}"
            cases.append(
                Case(
                    name=name + f" page={page}" * (page > 0) + " magicpig" * (magicpig is not None),
                    op="sparse_attention", batch=batch, seq_q=1, seq_k=keys, tokens=tokens, page_size=page,
                    magicpig=magicpig, **HEADS,
                )
            )  # fmt: skip
    return cases


def _window() -> list[Case]:
    """A window of 1024 keys with the query's own among them, as models count it."""
    return [
        Case(
            name="window S=16384 D=128 window=1024 causal",
            op="attention",
            batch=1,
            heads_q=16,
            heads_k=16,
            seq_q=TOKENS,
            seq_k=TOKENS,
            head_dim=128,
            window=(1023, 0),
            **_causal(True),
        )
    ]


def _prefill() -> list[Case]:
    """Chunks of 512 queries at the end of what is in pages already; alone, and in one call with decoding sequences."""
    chunk, decodes, chunks = 512, 64, 4
    paged: dict[str, Any] = {
        "op": "paged_attention",
        "seq_q": chunk,
        "seq_k": 8192,
        "page_size": 64,
        **HEADS,
        **_causal(True),
    }
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


# The shapes at which the project's seed kernels were timed.
_SEED: dict[str, Any] = {"batch": 8, "heads_q": 64, "heads_k": 16, "seq_k": 1024, "head_dim": 64, "dtype": "fp16"}
# Sequence lengths of a padded batch, spread evenly from 1/8 to all of the capacity.
_SPREAD = tuple(128 * (i + 1) for i in range(8))
_CHOSEN: dict[str, Any] = {"op": "sparse_attention", "seq_q": 1, "dtype": "fp16"}  # 2 % of the tokens


def _seed() -> list[Case]:
    prefill: dict[str, Any] = {"op": "attention", "seq_q": 1024, **_causal(True), **_SEED}
    sparse = {"batch": 1, "seq_k": 32000, "tokens": 640, **HEADS, **_CHOSEN}
    return [
        Case(name="seed prefill causal", **prefill),
        Case(name="seed prefill padded", lengths_q=_SPREAD, lengths_k=_SPREAD, **prefill),
        Case(name="seed decode", op="decode_attention", seq_q=1, **_SEED),
        Case(
            name="seed paged decode", op="paged_attention", batch=3, heads_q=4, heads_k=4, seq_q=1, seq_k=1024,
            lengths_k=(1000, 937, 1011), head_dim=64, page_size=16, dtype="fp16",
        ),
        Case(name="seed sparse", **sparse),
        Case(name="seed sparse magicpig", magicpig=MAGICPIG, **sparse),
        Case(
            name="seed sparse paged", batch=3, heads_q=32, heads_k=32, seq_k=80000, head_dim=256, page_size=16,
            tokens=1600, **_CHOSEN,
        ),
    ]  # fmt: skip


SETS: dict[str, list[Case]] = {
    "seed": _seed(),
    "dense": _dense((1024, 4096, 16384), (64, 128, 256)),
    "decode": _decode((0,)),
    "small": _small("fp32") + _small("fp16"),
    "paged": _decode(PAGES),
    "padded": _ragged("padded"),
    "packed": _ragged("packed") + _ragged("dense"),
    "mla": _mla(),
    "sparse": _sparse(),
    "window": _window(),
    "prefill": _prefill(),
}
