"""Problems that the forward kernels of sm_90 are tested with."""

from typing import Any

import msgspec

from portattn import Problem
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.backends.cuda.schedules import ALIBI, DOCUMENTS, LISTED, PREFIX

VARIANT = ForwardVariant()
BASE = Problem(
    batch=2, heads_q=4, heads_k=2, seq_q=333, seq_k=333, head_dim=128, dtype="bf16", return_lse=True,
)  # fmt: skip
PACKED = Problem(
    op="varlen_attention", batch=4, heads_q=4, heads_k=2, seq_q=300, seq_k=300, total_q=700, total_k=700, head_dim=128,
    dtype="bf16", return_lse=True,
)  # fmt: skip
CAUSAL = ("none", "bottom_right", "top_left")
HIDING = "t0 i sub q_idx kv_idx\nt1 i abs t0\nt2 b gt t1 90\nt3 f where t2 score -inf\nout t3"


def problem(base: Problem = BASE, **fields: Any) -> Problem:
    return msgspec.structs.replace(base, **fields)


SIZES: dict[str, dict[str, Any]] = {
    "square": {}, "one row": {"seq_q": 1}, "one key": {"seq_k": 1}, "few keys": {"seq_q": 200, "seq_k": 70},
    "more queries": {"seq_q": 700, "seq_k": 130}, "more keys": {"seq_q": 100, "seq_k": 1111},
    "whole tiles": {"seq_q": 384, "seq_k": 512}, "no lse": {"return_lse": False},
    "bshd": {"layout": "bshd", "batch": 3}, "one key head": {"heads_k": 1},
    "many tiles": {"batch": 3, "heads_q": 40, "heads_k": 8, "seq_q": 769, "seq_k": 769}, "fp16": {"dtype": "fp16"},
    "lengths": {"seqlens_q": True, "seqlens_k": True, "batch": 5}, "key lengths": {"seqlens_k": True, "batch": 5},
    "query lengths": {"seqlens_q": True, "batch": 5}, "softcap": {"softcap": True}, "sinks": {"sinks": True},
    "function": {"score_mod": ALIBI}, "hiding function": {"score_mod": HIDING, "sinks": True, "seqlens_k": True},
    "lists": LISTED | {"causal": "none", "layout": "bshd"},
    "documents": LISTED | {"causal": "none", "mask_mod": DOCUMENTS, "sinks": True, "seq_q": 520},
    "prefix and function": LISTED | {"causal": "none", "mask_mod": PREFIX, "score_mod": ALIBI, "seq_k": 1536},
    "wide blocks": LISTED | {"causal": "none", "mask_mod": PREFIX, "block_q": 256, "block_k": 384, "seq_k": 1100},
    "everything": {"softcap": True, "sinks": True, "seqlens_k": True, "seqlens_q": True, "window_left": 40, "batch": 4},
}  # fmt: skip
FEW_TILES: dict[str, dict[str, Any]] = {
    "whole": {"seq_q": 128, "seq_k": 4096}, "ragged": {"seq_q": 77, "seq_k": 3001},
    "more splits than a row's tiles": {"seq_q": 400, "seq_k": 700},
    "window": {"seq_q": 100, "seq_k": 3000, "window_left": 700},
    "lengths": {"seq_q": 100, "seq_k": 3000, "batch": 3, "seqlens_q": True, "seqlens_k": True},
    "softcap": {"seq_q": 100, "seq_k": 3000, "softcap": True, "return_lse": False},
    "function": {"seq_q": 100, "seq_k": 3000, "score_mod": HIDING},
}  # fmt: skip
WINDOWS = [(0, -1), (100, -1), (-1, 30), (17, 5), (300, 200)]
ROWS: dict[str, tuple[tuple[int, int], ...]] = {
    "random": ((100, 100), (1, 300), (299, 257), (300, 43)),
    "ends of tiles": ((128, 128), (64, 64), (192, 192), (127, 129)), "none": ((3, 0), (0, 5), (0, 0), (200, 20)),
    "one": ((512, 512),), "nothing at all": ((0, 0), (0, 0)),
    "many": tuple((1 + 7 * i % 50, 1 + 11 * i % 90) for i in range(100)),
}  # fmt: skip
UNSEEN: dict[str, tuple[dict[str, Any], slice]] = {
    "behind the last query": ({"causal": "top_left", "seq_q": 100, "seq_k": 333}, slice(100, None)),
    "behind a window": ({"causal": "top_left", "seq_q": 70, "seq_k": 333, "window_left": 9}, slice(70, None)),
    "before the window": ({"causal": "bottom_right", "seq_q": 70, "seq_k": 533, "window_left": 30}, slice(0, 433)),
    "before both sides": ({"seq_q": 200, "seq_k": 500, "window_left": 77, "window_right": 9}, slice(0, 223)),
    "before one row": ({"causal": "bottom_right", "seq_q": 1, "seq_k": 200, "window_left": 0}, slice(0, 199)),
}
