"""Problem: what a call asks for, validated once. It holds shapes and features, never data."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from portattn.errors import ArgumentError

Op = Literal["attention", "decode_attention"]
Dtype = Literal["fp16", "bf16", "fp32"]
Causal = Literal["none", "bottom_right", "top_left"]
Layout = Literal["bhsd", "bshd"]

OPS: tuple[str, ...] = get_args(Op)
DTYPES: tuple[str, ...] = get_args(Dtype)

MAX_HEAD_DIM = 576  # the widest head in use: DeepSeek's latent cache, 512 + 64
MAX_SIZE = 2**31 - 1  # kernels count rows, keys, batches and heads in int32


class Problem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attention problem: op, sizes, dtype and features. Hashable, so that plans are cached by it.

    batch, heads_q, heads_k, seq_q, seq_k   sizes; for decode, seq_k is the cache's capacity Smax
    head_dim, head_dim_v                    width of Q and K, and of V
    causal        none; bottom_right (the last query sees the last key); top_left (query i sees keys 0..i)
    seqlens_q/k   per-sequence lengths are given, on the device
    leftpad_q/k   per-sequence left padding is given, on the device
    aligned       rows are contiguous, and bases and outer strides are multiples of 16 bytes (what TMA asks for)
    large         a tensor spans 2 GiB or more, so 32-bit byte offsets do not reach all of it
    needs_grad    autograd will ask for gradients
    dropout       dropout_p > 0
    negative_scale  the factor on the scores is below 0: kernels carry its sign in Q

    Raises ArgumentError, naming the field, when a size is out of range.
    """

    op: Op = "attention"
    batch: int
    heads_q: int
    heads_k: int
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int = 0
    dtype: Dtype = "fp16"
    causal: Causal = "none"
    seqlens_q: bool = False
    seqlens_k: bool = False
    leftpad_q: bool = False
    leftpad_k: bool = False
    return_lse: bool = False
    layout: Layout = "bhsd"
    aligned: bool = True
    large: bool = False
    needs_grad: bool = False
    dropout: bool = False
    negative_scale: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("op", OPS),
            ("dtype", DTYPES),
            ("causal", get_args(Causal)),
            ("layout", get_args(Layout)),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(str(self.op), name, getattr(self, name), f"must be one of {', '.join(allowed)}")
        if not self.head_dim_v:
            msgspec.structs.force_setattr(self, "head_dim_v", self.head_dim)
        limits = {"batch": 0, "heads_q": 1, "heads_k": 1, "seq_q": 0, "seq_k": 0, "head_dim": 1, "head_dim_v": 1}
        for name, least in limits.items():
            most = MAX_HEAD_DIM if name.startswith("head_dim") else MAX_SIZE
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ArgumentError(self.op, name, value, f"must be an integer from {least} to {most}")
        if self.heads_q % self.heads_k:
            raise ArgumentError(
                self.op, "heads_q", self.heads_q, f"must be a multiple of the {self.heads_k} key/value heads (heads_k)"
            )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_k

    @property
    def padded(self) -> bool:
        """Whether any per-sequence length or left padding is given."""
        return self.seqlens_q or self.seqlens_k or self.leftpad_q or self.leftpad_k

    def features(self) -> dict[str, Any]:
        """What conditions can ask about: every key of conditions.FLAGS, NUMBERS and WORDS but `programs`."""
        return {
            "causal": self.causal != "none",
            "causal_align": self.causal,
            "gqa": self.group > 1,
            "seqlens_q": self.seqlens_q,
            "seqlens_k": self.seqlens_k,
            "leftpad_q": self.leftpad_q,
            "leftpad_k": self.leftpad_k,
            "return_lse": self.return_lse,
            "aligned": self.aligned,
            "large": self.large,
            "batch": self.batch,
            "heads_q": self.heads_q,
            "heads_k": self.heads_k,
            "group": self.group,
            "seq_q": self.seq_q,
            "seq_k": self.seq_k,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "rows": self.seq_q * self.group if self.op == "decode_attention" else self.seq_q,
            "dtype": self.dtype,
            "layout": self.layout,
        }

    def flops(self) -> int:
        """Floating-point operations of the forward: 2·D per score and 2·Dv per value, causal counting only what is
        attended (half the square when seq_q = seq_k)."""
        pairs = self.seq_q * self.seq_k
        if self.causal != "none":
            # Keys that row i sees: bottom_right i + 1 + (Sk - Sq), top_left i + 1, both clamped to 0..Sk.
            shift = self.seq_k - self.seq_q if self.causal == "bottom_right" else 0
            first, last = 1 + shift, self.seq_q + shift
            low, high = max(first, 0), min(last, self.seq_k)
            pairs = (low + high) * (high - low + 1) // 2 if high >= low else 0
            pairs += max(last - max(self.seq_k, first - 1), 0) * self.seq_k
        return 2 * self.batch * self.heads_q * pairs * (self.head_dim + self.head_dim_v)

    def __str__(self) -> str:
        shape = f"q ({self.batch},{self.heads_q},{self.seq_q},{self.head_dim})"
        cache = f"kv ({self.batch},{self.heads_k},{self.seq_k},{self.head_dim})"
        flags = [f for f in ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k", "return_lse") if getattr(self, f)]
        causal = [f"causal {self.causal.replace('_', '-')}"] if self.causal != "none" else []
        return " ".join([self.op, shape, cache, self.dtype, *causal, *flags])
