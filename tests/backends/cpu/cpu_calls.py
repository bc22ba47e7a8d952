"""SDPA on the CPU, for the tests beside this file: the calls that it takes, and how one is run."""

import torch
from reference_cases import CASES
from support import poisoned

from portattn.backends.cpu import CpuSdpaPath
from portattn.planning.registry import parse_target
from portattn.schema.call import Call

CPU = parse_target("cpu:generic", "none")
PATH = CpuSdpaPath()
# Sparse attention, trees, and what changes a score by more than an addition, are the reference's.
NOT_TAKEN = ("softcap", "alibi", "tree", "tree_causal_window")
TAKEN = [(op, f) for op, f in CASES if not op.startswith("sparse") and f not in (*NOT_TAKEN, "all")]
NAN, INF = float("nan"), float("inf")
LEFT = [(op, f) for op, f in CASES if op.startswith("sparse") or f in NOT_TAKEN]


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    with poisoned(), torch.no_grad():
        return PATH.run(call)
