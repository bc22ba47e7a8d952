"""Score and mask functions in every kernel that takes them, against the float64 oracle, which runs the programs too."""

from __future__ import annotations

from typing import Any

import gradient_cases
import pytest
from kernel_cases import CAUSAL, check, problem
from support import Device, random_call

# Programs of kernels/score_program.py: a table of heads and distances, a cap, and what all operations are made of.
TABLE = "c0 f 2 0\nt0 i sub q_idx kv_idx\nt1 i add t0 36\nt2 f load c0 h t1\nt3 f add score t2\nout t3"
CAPPED = "t0 f div score 3.0\nt1 f tanh t0\nt2 f mul t1 3.0\nt3 b lt q_idx 2\nt4 f where t3 score t2\nout t4"
WOVEN = (
    "c0 l 1 0\nc1 b 2 1\nt0 l load c0 kv_idx\nt1 f to_f t0\nt2 f exp t1\nt3 f mul score 0.25\nt4 f sigmoid t3\n"
    "t5 f div t4 t2\nt6 b load c1 b q_idx\nt7 f where t6 t5 -inf\nt8 f maximum t7 score\nt9 f abs t8\n"
    "t10 f add t9 1.5\nt11 f log t10\nt12 f sqrt t10\nt13 f mul t11 t12\nt14 f sub t13 score\nout t14"
)
BAND = "t0 i sub q_idx kv_idx\nt1 i abs t0\nt2 i positive_mod kv_idx 5\nt3 b le t1 t2\nt4 b eq h 1\nt5 b or t3 t4\nout t5"
DOCUMENTS = (
    "c1 i 1 2\nt0 i load c1 q_idx\nt1 i load c1 kv_idx\nt2 b eq t0 t1\nt3 i floordiv t0 -2\nt4 b ne t3 b\n"
    "t5 b and t2 t4\nout t5"
)
FUNCTIONS: dict[str, dict[str, Any]] = {
    "table": {"score_mod": TABLE},
    "capped": {"score_mod": CAPPED, "sinks": True},
    "woven": {"score_mod": WOVEN, "softcap": True},
    "band": {"mask_mod": BAND},
    "documents": {"score_mod": TABLE, "mask_mod": DOCUMENTS, "alibi_slopes": True},
}
OPS = ("dense", "padded", "varlen", "decode", "paged", "ragged")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_right(device: Device, op: str, name: str) -> None:
    for seed, causal in enumerate(CAUSAL):
        fields = FUNCTIONS[name] | ({"window_left": 9} if seed == 1 else {})
        call = random_call(problem(op, causal=causal, **fields), seed, device=device.name)
        check(device, call, 2 if op in ("decode", "paged") else 1)


@pytest.mark.parametrize("kind", ["e4m3", "int8", "int4", "nvfp4"])
def test_functions_over_quantised_caches(device: Device, kind: str) -> None:
    scales = "head" if kind == "nvfp4" else "token"
    stored = {"kv_format": kind, "kv_scales": scales, "dtype": "fp16", "head_dim": 32}
    for name in ("table", "documents"):
        for op in ("decode", "paged"):
            check(device, random_call(problem(op, **FUNCTIONS[name], **stored), 3, device=device.name), 2)


@pytest.mark.parametrize("base", [gradient_cases.DENSE, gradient_cases.PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_right(device: Device, base: dict, name: str) -> None:
    for seed, causal in enumerate(CAUSAL):
        fields = {"heads_q": 4} | FUNCTIONS[name] | ({"window_left": 9} if seed == 1 else {})
        call = gradient_cases.random(device, seed, base, causal=causal, **fields)
        gradient_cases.check(device, call)
