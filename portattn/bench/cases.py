"""The named problem sets that `portattn bench` times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from portattn.launch.kernelcall import TORCH_DTYPE
from portattn.problem import Causal, Dtype, Problem


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One timed problem.

    lengths   valid keys (and queries) of each sequence as fractions of the capacity; empty for full sequences
    """

    name: str
    op: str
    batch: int
    heads_q: int
    heads_k: int
    seq_q: int
    seq_k: int
    head_dim: int
    dtype: Dtype = "bf16"
    causal: Causal = "none"
    lengths: tuple[float, ...] = ()

    def seqlens(self, capacity: int) -> list[int]:
        """Valid rows of each sequence of a (capacity)-row slot."""
        if not self.lengths:
            return [capacity] * self.batch
        return [max(round(self.lengths[i % len(self.lengths)] * capacity), 1) for i in range(self.batch)]

    def flops(self) -> int:
        """Floating-point operations of what is attended: padding counts nothing, causal half the square."""
        total = 0
        for q, k in zip(self.seqlens(self.seq_q), self.seqlens(self.seq_k), strict=True):
            rows = q if self.op == "attention" else self.seq_q
            total += Problem(
                batch=1,
                heads_q=self.heads_q,
                heads_k=self.heads_k,
                seq_q=rows,
                seq_k=k,
                head_dim=self.head_dim,
                dtype=self.dtype,
                causal=self.causal,
            ).flops()
        return total

    def cache_bytes(self) -> int:
        """Bytes of valid keys and values: the least that has to be read."""
        size = TORCH_DTYPE[self.dtype].itemsize
        return 2 * sum(self.seqlens(self.seq_k)) * self.heads_k * self.head_dim * size


def _dense(seqs: Sequence[int], dims: Sequence[int], dtype: Dtype = "bf16") -> list[Case]:
    """B·S = 16k and H·D = 2048, as FlashAttention's papers time it."""
    cases = []
    for dim in dims:
        for seq in seqs:
            for causal in ("none", "bottom_right"):
                cases.append(
                    Case(
                        name=f"dense {dtype} D={dim} S={seq}" + (" causal" if causal != "none" else ""),
                        op="attention",
                        batch=max(16384 // seq, 1),
                        heads_q=2048 // dim,
                        heads_k=2048 // dim,
                        seq_q=seq,
                        seq_k=seq,
                        head_dim=dim,
                        dtype=dtype,
                        causal=causal,
                    )
                )
    return cases


def _decode(shapes: Sequence[tuple[int, int, int, int, int]]) -> list[Case]:
    return [
        Case(
            name=f"decode B={b} H={hq}/{hk} S={s} D={d}",
            op="decode_attention",
            batch=b,
            heads_q=hq,
            heads_k=hk,
            seq_q=1,
            seq_k=s,
            head_dim=d,
        )
        for b, hq, hk, s, d in shapes
    ]


def _small(dtype: Dtype) -> list[Case]:
    sizes: dict[str, Any] = {"batch": 2, "heads_q": 8, "heads_k": 8, "head_dim": 64, "dtype": dtype}
    return [
        Case(name=f"small {dtype} S={seq}", op="attention", seq_q=seq, seq_k=seq, **sizes) for seq in (64, 256, 512)
    ]


# The shapes at which the project's seed kernels were timed: grouped prefill, the same with padding, and decode.
_SEED: dict[str, Any] = {"batch": 8, "heads_q": 64, "heads_k": 16, "seq_k": 1024, "head_dim": 64}
# Sequence lengths of a padded batch, spread evenly from 1/8 to all of the capacity.
_SPREAD = tuple((i + 1) / 8 for i in range(8))

SETS: dict[str, list[Case]] = {
    "seed": [
        Case(name="seed prefill causal", op="attention", seq_q=1024, causal="bottom_right", dtype="fp16", **_SEED),
        Case(
            name="seed prefill padded",
            op="attention",
            seq_q=1024,
            causal="bottom_right",
            dtype="fp16",
            lengths=_SPREAD,
            **_SEED,
        ),
        Case(name="seed decode", op="decode_attention", seq_q=1, dtype="fp16", **_SEED),
    ],
    "dense": _dense((1024, 4096, 16384), (64, 128, 256)),
    "decode": _decode(
        [
            (8, 64, 16, 1024, 64),
            (1, 32, 8, 1024, 128),
            (1, 32, 8, 32000, 128),
            (128, 32, 8, 2048, 128),
            (64, 32, 8, 8192, 128),
            (16, 64, 8, 32768, 128),
        ]
    ),
    "small": _small("fp32") + _small("fp16"),
}
