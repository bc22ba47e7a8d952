"""Small problems of every op and feature."""

from typing import Any

import torch
from support import poisoned

from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.schema.problem import Problem

SMALL = {"batch": 3, "heads_q": 4, "heads_k": 2, "head_dim": 16, "head_dim_v": 24, "dtype": "fp32", "return_lse": True}
PAGED = {"seq_k": 40, "page_size": 8, "seqlens_k": True}
LATENT = PAGED | {"op": "mla_attention", "heads_k": 1, "head_dim": 24, "head_dim_v": 16}
OPS: dict[str, dict[str, Any]] = {
    "dense": {"op": "attention", "seq_q": 13, "seq_k": 29},
    "padded": {
        "op": "attention", "seq_q": 13, "seq_k": 29, "seqlens_q": True, "seqlens_k": True, "leftpad_q": True,
        "leftpad_k": True,
    },
    "varlen": {"op": "varlen_attention", "seq_q": 13, "seq_k": 29, "total_q": 22, "total_k": 50},
    "decode": {"op": "decode_attention", "seq_q": 3, "seq_k": 29, "seqlens_k": True, "leftpad_k": True},
    "paged": PAGED | {"op": "paged_attention", "seq_q": 3},
    "paged_packed": PAGED | {"op": "paged_attention", "seq_q": 13, "total_q": 22, "page_layout": "hpd"},
    "sparse": {"op": "sparse_attention", "seq_q": 1, "seq_k": 29, "tokens": 12, "seqlens_k": True},
    "sparse_paged": PAGED | {"op": "sparse_attention", "seq_q": 1, "tokens": 12}, "mla": LATENT | {"seq_q": 3},
    "mla_packed": LATENT | {"seq_q": 13, "total_q": 22},
}  # fmt: skip
TERMS: dict[str, dict[str, Any]] = {
    "plain": {}, "softcap": {"softcap": True}, "alibi": {"alibi_slopes": True}, "sinks": {"sinks": True},
}  # fmt: skip
PLACED: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"}, "top_left": {"causal": "top_left"},
    "window": {"window_left": 4, "window_right": 2}, "window_before": {"window_left": 3},
    "window_after": {"window_right": 1}, "window_of_itself": {"window_left": 0, "window_right": 0},
    "causal_window": {"causal": "bottom_right", "window_left": 5},
    "top_left_window": {"causal": "top_left", "window_left": 5}, "chunk": {"chunk": 5},
    "causal_chunk": {"causal": "bottom_right", "chunk": 4}, "top_left_chunk": {"causal": "top_left", "chunk": 6},
    "chunk_window": {"window_left": 3, "window_right": 2, "chunk": 7}, "bias": {"bias": True}, "mask": {"mask": True},
    "all": {
        "causal": "bottom_right", "window_left": 9, "softcap": True, "alibi_slopes": True, "sinks": True, "bias": True,
        "mask": True,
    },
}  # fmt: skip
TREES: dict[str, dict[str, Any]] = {
    "tree": {"tree_mask": True}, "tree_causal_window": {"tree_mask": True, "causal": "bottom_right", "window_left": 9},
}  # fmt: skip
OF_OPS = {"decode": TREES, "paged": TREES, "paged_packed": TREES}
CHOSEN: dict[str, dict[str, Any]] = {
    "log_weights": {"log_weights": True}, "magicpig": {"magicpig": True},
    "all": {"magicpig": True, "softcap": True, "alibi_slopes": True, "sinks": True},
}  # fmt: skip
# (op, feature), for parametrize
CASES = [
    (op, feature)
    for op in OPS
    for feature in (*TERMS, *(CHOSEN if op.startswith("sparse") else PLACED), *OF_OPS.get(op, {}))
]  # fmt: skip


def problem(op: str, feature: str = "plain", **fields: Any) -> Problem:
    features = TERMS | (CHOSEN if op.startswith("sparse") else PLACED) | OF_OPS.get(op, {})
    return Problem(**(SMALL | OPS[op] | features[feature] | fields))


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    with poisoned(), torch.no_grad():
        return blockwise.run(call)
