"""Case: one timed problem as data."""

from __future__ import annotations

import functools
from typing import Literal

import msgspec

from portattn.schema.problem_limits import NV_BLOCK, NVFP4, PAIRED, Causal, Dtype, KvFormat, KvScales, Op
from portattn.schema.tensors import CACHE_DTYPE, PACKED, TORCH_DTYPE

Window = tuple[int | None, int | None]
Timing = Literal["hot", "cold", "do_bench"]
SCALE_BYTES = 4  # of a float32
STORED_OPS = ("decode_attention", "paged_attention")  # whose caches a case may have quantised
CACHE_OPS = ("decode_attention", "paged_attention", "sparse_attention", "mla_attention")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One timed problem.

    seq_q, seq_k   rows and keys of a sequence; where lengths are given, of the longest one's slot
    lengths_q, lengths_k  rows and keys of each sequence; empty for full slots
    head_dim_v     width of V; 0 for head_dim. mla_attention: the part of a latent row that is V
    packed         queries lie one sequence after the other, and so do the keys of varlen_attention
    page_size      tokens a page; 0 for a contiguous cache
    tokens         tokens that each query head of sparse_attention has chosen
    magicpig       its K and L, if the chosen tokens were sampled so
    kv_format      format of the numbers that the cache holds: as_q (dtype), or a narrower one
    kv_scales      what a scale of such numbers belongs to: none, head (here one for the whole cache), token (each token
                   and key/value head)
    inline_scales  a token's scale lies behind its numbers, in the same row of memory
    window         keys before and after its own position that a query sees
    scale          None for 1/√head_dim
    backward       the gradients of q, k and v are what is computed and timed, the forward once before
    dropout        probability with which an attended pair is left out of a training call
    deterministic  gradients under torch.use_deterministic_algorithms: the same bits in every run
    timing         how device time is taken (clock.py): calls back to back, each after the L2 was flushed, or as
                   triton.testing.do_bench defines it
    """

    name: str
    op: Op
    batch: int
    heads_q: int
    heads_k: int
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int = 0
    dtype: Dtype = "bf16"
    causal: Causal = "none"
    window: Window = (None, None)
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    packed: bool = False
    page_size: int = 0
    tokens: int = 0
    magicpig: tuple[int, int] | None = None
    kv_format: KvFormat = "as_q"
    kv_scales: KvScales = "none"
    inline_scales: bool = False
    scale: float | None = None
    backward: bool = False
    dropout: float = 0.0
    deterministic: bool = False
    timing: Timing = "hot"

    @property
    def queries(self) -> tuple[int, ...]:
        """Query rows of each sequence."""
        return self.lengths_q or (self.seq_q,) * self.batch

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return self.lengths_k or (self.seq_k,) * self.batch

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads_q // self.heads_k

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def windowed(self) -> bool:
        return self.window != (None, None)

    @property
    def reads_cache(self) -> bool:
        """Whether the op is one of decoding, for which bytes count as well as FLOPs."""
        return self.op in CACHE_OPS

    @property
    def quantised(self) -> bool:
        """Whether the cache's numbers are narrower than the queries'."""
        return self.kv_format != "as_q"

    def unquantised(self) -> Case:
        """The same over a cache whose numbers are of the queries' dtype."""
        return msgspec.structs.replace(self, kv_format="as_q", kv_scales="none", inline_scales=False)

    def flops(self) -> int:
        """Operations on what is attended: 2·D a score and 2·Dv a value. Padding and what is masked count nothing.

        A backward has 2.5 times as many: five products where the forward has two (FlashAttention-2's paper, section 4).
        """
        pairs = self.batch * self.tokens or sum(seen[0] for seen in self._seen())
        forward = 2 * self.heads_q * pairs * (self.head_dim + self.width_v)
        return forward * 5 // 2 if self.backward else forward

    def read_bytes(self) -> int:
        """Bytes of the keys and values that are attended: the least that has to be read, but for the queries.

        Each counts once for all query heads of its group, and a latent row once; a token's scales with it. Of a
        backward, which reads and writes more than these, they are a part. Chosen tokens count as often as they differ
        on average among the heads of a group, each of which chooses at random.
        """
        row = self.head_dim if self.op == "mla_attention" else self.head_dim + self.width_v
        if self.tokens:
            rows = round(sum(keys * (1 - (1 - self.tokens / keys) ** self.group) for keys in self.keys))
        else:
            rows = sum(seen[1] for seen in self._seen())
        dtype = (CACHE_DTYPE | {NVFP4: PACKED})[self.kv_format] if self.quantised else TORCH_DTYPE[self.dtype]
        scales = 2 * SCALE_BYTES if self.kv_scales == "token" else 0
        if self.kv_format == NVFP4:
            scales += row // NV_BLOCK
        row = row // 2 if self.kv_format in PAIRED else row
        return rows * self.heads_k * (row * dtype.itemsize + scales)

    def _seen(self) -> list[tuple[int, int]]:
        return [count_attended(q, k, self.causal, self.window) for q, k in zip(self.queries, self.keys, strict=True)]


@functools.cache
def count_attended(queries: int, keys: int, causal: Causal, window: Window) -> tuple[int, int]:
    """Of one sequence and head: pairs of a query and a key it attends, and keys that any query attends."""
    shift = 0 if causal == "top_left" else keys - queries
    left, right = window
    if causal != "none":
        right = 0 if right is None else min(right, 0)
    pairs, first, end = 0, keys, 0
    for row in range(queries):
        low = 0 if left is None else max(row + shift - left, 0)
        high = keys if right is None else min(row + shift + right + 1, keys)
        if high > low:
            pairs, first, end = pairs + high - low, min(first, low), max(end, high)
    return pairs, max(end - first, 0)
