"""What each public operation can be asked for beside shapes and dtype: data for the command line and for witnesses."""

from __future__ import annotations

# Fields of a Problem that an operation's parameters decide (ops.py). `window` stands for window_left and window_right.
_SCORES = ("causal", "window", "softcap", "alibi_slopes", "sinks")
_PAGED = (*_SCORES, "bias", "mask", "seqlens_k", "total_q", "page_size", "num_splits", "layout")
TAKES: dict[str, tuple[str, ...]] = {
    "attention": (*_SCORES, "bias", "mask", "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k", "layout"),
    "varlen_attention": (*_SCORES, "total_q", "total_k"),
    "decode_attention": (*_SCORES, "bias", "mask", "seqlens_k", "leftpad_k", "num_splits", "layout"),
    "paged_attention": (*_PAGED, "page_layout"),
    "sparse_attention": (
        "softcap", "alibi_slopes", "sinks", "seqlens_k", "page_size", "page_layout", "tokens", "log_weights",
        "magicpig", "num_splits", "layout",
    ),
    "mla_attention": _PAGED,
}  # fmt: skip
HAS_LENGTHS = ("paged_attention", "mla_attention")  # calls over pages always have their sequences' lengths
