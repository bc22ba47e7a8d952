"""SageAttention (sageattention 1.0.6): scores of 8-bit integers. Not what attention computes to the last bits of 16:
the gate tells whether it is inside the budget, and it is timed only then."""

from __future__ import annotations

import functools
from typing import Any

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender
from portattn.tools.bench.peers.availability import missing, module
from portattn.tools.bench.tensors import Tensors

PACKAGE = "sageattention"
WIDTHS = (64, 96, 128)


def absent() -> str:
    return missing(PACKAGE)


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    square = case.seq_q == case.seq_k or case.causal == "none"
    if case.op != "attention" or case.lengths_q or case.windowed or case.head_dim not in WIDTHS or not square:
        return {}
    return {"sage": functools.partial(_build, case, t)}


def _build(case: Case, t: Tensors) -> Contender:
    function: Any = module(PACKAGE).sageattn
    # smooth_k subtracts the keys' mean in place: the next contender would be given other keys.
    options = {
        "tensor_layout": "HND", "is_causal": case.causal != "none", "sm_scale": case.scale, "smooth_k": False,
    }  # fmt: skip
    return Contender(lambda: function(t.q, t.k, t.v, **options))
