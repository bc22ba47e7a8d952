"""The named problem sets that `portattn bench` times: one for every line of the goals (goals.py), and some more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from portattn.schema.problem_limits import Dtype
from portattn.tools.bench import sets_dense
from portattn.tools.bench.cases import Case, Timing
from portattn.tools.bench.firstcall import CASES as FIRST_CALLS
from portattn.tools.bench.firstcall import COLD_START
from portattn.tools.bench.sets_dense import GROUP, LENGTHS, ROOM, WINDOW, causality

HEADS: dict[str, Any] = {"heads_q": 32, "heads_k": 8, "head_dim": 128}  # a common model's: 8 billion parameters
PAGES = (16, 64, 256)
MAGICPIG = (10, 150)  # K and L of the paper's main setting
LATENT: dict[str, Any] = {
    "op": "mla_attention", "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "page_size": 64,
    "scale": 192**-0.5,  # DeepSeek-V3's heads are 128 + 64 wide before absorption
}  # fmt: skip
# (batch, query heads, key/value heads, keys, head_dim) with one query token a sequence.
_DECODE = (
    (8, 64, 16, 1024, 64),
    (1, 32, 8, 1024, 128),
    (1, 32, 8, 32000, 128),
    (128, 32, 8, 2048, 128),
    (64, 32, 8, 8192, 128),
    (16, 64, 8, 32768, 128),
)


def decode(pages: Iterable[int] = (0,)) -> list[Case]:
    """The decode shapes over a contiguous cache (page size 0) or pages, all full."""
    return [
        Case(
            name=(
                f"paged B={b} H={hq}/{hk} S={s} D={d} page={page}" if page else f"decode B={b} H={hq}/{hk} S={s} D={d}"
            ),
            op="paged_attention" if page else "decode_attention",
            batch=b, heads_q=hq, heads_k=hk, seq_q=1, seq_k=s, head_dim=d, page_size=page,
        )
        for b, hq, hk, s, d in _DECODE
        for page in pages
    ]  # fmt: skip


# Of quantised caches, by the name's ending: a format, and what a scale belongs to.
_STORED: dict[str, dict[str, Any]] = {
    "e4m3 scales=tensor": {"kv_format": "e4m3", "kv_scales": "head"},
    "e4m3 scales=token": {"kv_format": "e4m3", "kv_scales": "token"},
    "int8 scales=token": {"kv_format": "int8", "kv_scales": "token"},
    "int4 scales=token": {"kv_format": "int4", "kv_scales": "token"},
}
# As vLLM's caches with a scale for each token and head have them, in its pages of 16 tokens.
_INLINE: dict[str, dict[str, Any]] = {
    f"{fields['kv_format']} scales=inline": {**fields, "inline_scales": True}
    for fields in _STORED.values()
    if fields["kv_scales"] == "token"
}


def quantized_decode(pages: Iterable[int] = (0,), inline_page: int = 16) -> list[Case]:
    """The decode shapes in every format of _STORED, and over pages of `inline_page` tokens in those of _INLINE."""
    return [
        msgspec.structs.replace(case, name=f"{case.name} {ending}", **fields)
        for case in decode(pages)
        for ending, fields in (_STORED | _INLINE if case.page_size == inline_page else _STORED).items()
    ]


def in_blocks(pages: Iterable[int] = (0, 16)) -> list[Case]:
    """Return the decode shapes in NVFP4, with scales of blocks beside the tensor's scale: contiguous, and in pages."""
    return [
        msgspec.structs.replace(case, name=f"{case.name} nvfp4 scales=tensor", kv_format="nvfp4", kv_scales="head")
        for case in decode(pages)
    ]


def latent() -> list[Case]:
    shapes = ((128, 128, 4096, 1), (128, 128, 4096, 2), (64, 16, 4096, 1), (16, 128, 8192, 1), (1, 128, 32768, 1))
    return [
        Case(
            name=f"mla B={b} H={h} S={s}" + f" Sq={rows}" * (rows > 1),
            batch=b, heads_q=h, seq_q=rows, seq_k=s, **causality(rows > 1), **LATENT,
        )
        for b, h, s, rows in shapes
    ]  # fmt: skip


def sparse() -> list[Case]:
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


def small(dtype: Dtype) -> list[Case]:
    sizes: dict[str, Any] = {"batch": 2, "heads_q": 8, "heads_k": 8, "head_dim": 64, "dtype": dtype}
    return [
        Case(name=f"small {dtype} S={seq}", op="attention", seq_q=seq, seq_k=seq, **sizes) for seq in (64, 256, 512)
    ]


def host() -> list[Case]:
    """Calls that the device ends before the host has made the next: what counts is the time to enqueue one."""
    cache: dict[str, Any] = {"batch": 1, "seq_q": 1, "seq_k": 1024, **HEADS}
    return [
        Case(name="host attention", op="attention", batch=2, heads_q=8, heads_k=8, seq_q=64, seq_k=64, head_dim=64),
        Case(name="host decode", op="decode_attention", **cache),
        Case(name="host paged", op="paged_attention", page_size=16, **cache),
    ]


# The shapes at which the project's seed kernels were timed.
_SEED: dict[str, Any] = {"batch": 8, "heads_q": 64, "heads_k": 16, "seq_k": 1024, "head_dim": 64, "dtype": "fp16"}
# Sequence lengths of a padded batch, spread evenly from 1/8 to all of the capacity.
_SPREAD = tuple(128 * (i + 1) for i in range(8))
_CHOSEN: dict[str, Any] = {"op": "sparse_attention", "seq_q": 1, "dtype": "fp16"}  # 2 % of the tokens


def seed() -> list[Case]:
    """Six kernels; the sparse one twice, for it also weighs its tokens by how likely MagicPIG is to sample them."""
    prefill: dict[str, Any] = {"op": "attention", "seq_q": 1024, **causality(True), **_SEED}
    chosen = {"batch": 1, "seq_k": 32000, "tokens": 640, **HEADS, **_CHOSEN}
    return [
        Case(name="seed prefill causal", **prefill),
        Case(name="seed prefill padded", lengths_q=_SPREAD, lengths_k=_SPREAD, **prefill),
        Case(name="seed decode", op="decode_attention", seq_q=1, **_SEED),
        Case(
            name="seed paged decode", op="paged_attention", batch=3, heads_q=4, heads_k=4, seq_q=1, seq_k=1024,
            lengths_k=(1000, 937, 1011), head_dim=64, page_size=16, dtype="fp16",
        ),
        Case(name="seed sparse", **chosen),
        Case(name="seed sparse magicpig", magicpig=MAGICPIG, **chosen),
        Case(
            name="seed sparse paged", batch=3, heads_q=32, heads_k=32, seq_k=80000, head_dim=256, page_size=16,
            tokens=1600, **_CHOSEN,
        ),
    ]  # fmt: skip


DROPOUT = 0.1
_SHAPE: dict[str, Any] = {"seqs": (4096,), "dims": (128,)}  # of cases that are timed in one size alone


def backward() -> list[Case]:
    """Return gradients of the dense set: B·S = 16k and H·D = 2048, bf16, full and causal."""
    return _gradients(sets_dense.dense(), "dense")


def more() -> list[Case]:
    """Return cases of GQA 8:1, packed, a window, fp32, dropout; deterministic gradients, and gradients of any order."""
    packed = Case(
        name="packed D=128 causal", op="varlen_attention", packed=True, batch=len(LENGTHS), seq_q=ROOM, seq_k=ROOM,
        lengths_q=LENGTHS, lengths_k=LENGTHS, **sets_dense.heads(128), **causality(True),
    )  # fmt: skip
    window = [
        case for case in sets_dense.window() if (case.head_dim, case.seq_q, case.window) == (128, 16384, WINDOW)
    ]  # fmt: skip
    full, causal = sets_dense.dense(**_SHAPE)
    return [
        *_gradients(sets_dense.dense(group=GROUP, **_SHAPE)),
        *_gradients([packed, *window]),
        *_gradients(sets_dense.dense((2048,), (64, 128), "fp32"), "dense"),
        *_gradients([causal], "dense", f" dropout={DROPOUT}", dropout=DROPOUT),
        *_gradients([full, causal], "dense", " deterministic", deterministic=True),
    ]


def _gradients(cases: Iterable[Case], without: str = "", after: str = "", **fields: Any) -> list[Case]:
    """The backward of forward cases, named after them."""
    return [
        msgspec.structs.replace(
            case, name=f"backward {case.name.removeprefix(without).strip()}{after}", backward=True, **fields
        )
        for case in cases
    ]  # fmt: skip


def _timed(timing: Timing, cases: Sequence[Case]) -> list[Case]:
    return [msgspec.structs.replace(case, timing=timing) for case in cases]


# What a loop over layers finds in the L2 is its own keys; what a decoding step finds there is not: its weights went
# through in between. The small shapes and the seed's are timed as the seed's authors did.
SETS: dict[str, list[Case]] = {
    "dense18": sets_dense.dense(),
    "dense-gqa": sets_dense.dense(group=sets_dense.GROUP),
    "dense-packed": sets_dense.ragged("packed"),
    "dense-window": sets_dense.window(),
    "dense-short-q": sets_dense.short_queries(),
    "dense-beyond": sets_dense.beyond(),
    "decode": _timed("cold", decode()),
    "paged": _timed("cold", decode(PAGES)),
    "decode-quantised": _timed("cold", quantized_decode()),
    "paged-quantised": _timed("cold", quantized_decode(PAGES)),
    "decode-nvfp4": _timed("cold", in_blocks()),
    "sparse": _timed("cold", sparse()),
    "mla": _timed("cold", latent()),
    "seed": _timed("do_bench", seed()),
    "small": _timed("do_bench", small("fp32") + small("fp16")),
    "host": host(),
    COLD_START: list(FIRST_CALLS),
    "padded": sets_dense.ragged("padded") + sets_dense.ragged("even"),
    "prefill": sets_dense.prefill(),
    "backward18": backward(),
    "backward_more": more(),
}
