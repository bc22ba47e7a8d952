"""The problems that CI runs in the model on every arch: every core kernel, every lowering that a plan for AMD chooses.

The canaries (ragged tails, grouped heads, masks, windows, sinks, keys split over programs, rows with nothing to attend,
NaN where nothing is attended), and what they leave out. The matrix's quick set is run in the model besides, by
`make demo DEMO='*'`."""

from portattn import Problem
from portattn.testing import canary

_COMMON = {"batch": 2, "heads_q": 4, "heads_k": 2, "return_lse": True}
_GRADIENTS = {"batch": 2, "heads_q": 2, "heads_k": 1, "head_dim": 64, "dtype": "fp32"}
_CANARIES = {f"{op} {n}": case for op, cases in canary.CASES.items() for n, case in enumerate(cases)}
SLICE: dict[str, Problem] = _CANARIES | {
    # Exact fp32 products, and every feature that adds to a score.
    "attention fp32": Problem(
        op="attention", **_COMMON, seq_q=45, seq_k=83, head_dim=64, dtype="fp32", causal="top_left", softcap=True,
        alibi_slopes=True, bias=True,
    ),
    "attention_backward fp32": Problem(
        op="attention_backward", **_GRADIENTS, seq_q=45, seq_k=83, causal="top_left", softcap=True, alibi_slopes=True,
    ),
    "varlen_attention_backward fp32": Problem(
        op="varlen_attention_backward", **_GRADIENTS, seq_q=45, seq_k=83, total_q=80, total_k=150,
        causal="bottom_right",
    ),
    # Pages larger than a tile of keys: its rows lie in one page.
    "paged_attention page 256": Problem(
        op="paged_attention", **_COMMON, seq_q=3, seq_k=512, head_dim=64, dtype="fp16", causal="bottom_right",
        page_size=256, seqlens_k=True, softcap=True,
    ),
    # And smaller ones, whatever the tile: each of its rows has a page of its own.
    "mla_attention page 1": Problem(
        op="mla_attention", **_COMMON | {"heads_q": 16, "heads_k": 1}, seq_q=2, seq_k=90, head_dim=576, head_dim_v=512,
        dtype="bf16", causal="bottom_right", page_size=1, seqlens_k=True,
    ),
    "mla_attention page 64": Problem(
        op="mla_attention", **_COMMON | {"heads_q": 16, "heads_k": 1}, seq_q=1, seq_k=128, head_dim=576, head_dim_v=512,
        dtype="bf16", page_size=64, seqlens_k=True,
    ),
}  # fmt: skip
