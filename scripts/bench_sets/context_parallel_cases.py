"""Cases of the set context-parallel: results and gradients over several ranks, against float64.

Calls and judgement are those of tests/distributed/, at sizes that a GPU's kernels take. Memory that no call may read is
NaN: rows behind the last document, rows of a cache past its lengths."""

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from context_parallel_ranks import Run

BASE: dict[str, Any] = {
    "batch": 1, "heads_q": 8, "heads_k": 2, "length": 1024, "width": 128, "dtype": "bf16", "causal": True,
    "how": {"method": "ring"},
}  # fmt: skip
CUT = {"cu": (0, 96, 100, 470, 471, 800, 960), "poison": True}  # of 1024 rows; 64 are padding
CONTIGUOUS, ULYSSES = {"how": {"method": "ring", "layout": "contiguous"}}, {"how": {"method": "ulysses"}}
TRAINED: dict[str, dict[str, Any]] = {
    "ring, zigzag": {}, "ring, zigzag, without a mask": {"causal": False},
    "ring, zigzag, bshd, fp16, two sequences": {"bshd": True, "dtype": "fp16", "batch": 2, "width": 64},
    "ring, contiguous, gradient of the LSE": CONTIGUOUS | {"grad_lse": True},
    "ring, window": {"window": (100, 0), "causal": False}, "ring, sinks and softcap": {"sinks": True, "softcap": 3.0},
    "ring, ALiBi": {"alibi_slopes": 1},
    "ring, fp32, values of another width": {"dtype": "fp32", "width": 64, "width_v": 32},
    "ring, DTensors": {"dtensor": True}, "ring, packed": CUT,
    "ring, packed, contiguous, window": CUT | CONTIGUOUS | {"window": (150, 0), "causal": False}, "ulysses": ULYSSES,
    "ulysses, one key head": ULYSSES | {"heads_k": 1, "grad_lse": True},
    "ulysses, window, sinks": ULYSSES | {"window": (100, 0), "sinks": True}, "ulysses, packed": ULYSSES | CUT,
}  # fmt: skip
INTERLEAVE, PAGE = 16, 64
CACHE: dict[str, Any] = {
    "batch": 4, "heads_q": 8, "heads_k": 2, "seq_q": 1, "seq_k": 1024, "head_dim": 128, "head_dim_v": 128,
    "dtype": "bf16", "return_lse": True, "leftpad_k": False,
}  # fmt: skip
LATENT = {"heads_q": 16, "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "page_size": PAGE}
DECODED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # a call of tests/opcalls.py, its fields, the ranks'
    "decode, contiguous": ("decode", {}, {}),
    "decode, contiguous, compiled": ("decode", {}, {"compiled": True}),
    "decode, contiguous, own heads": ("decode", {}, {"heads": "shard"}),
    "decode, contiguous, window, four queries": ("decode", {"seq_q": 4, "window_left": 300, "window_right": 0}, {}),
    "decode, paged": ("paged", {"page_size": PAGE}, {}),
    "decode, paged, four queries": ("paged", {"page_size": PAGE, "seq_q": 4, "causal": "bottom_right"}, {}),
    "decode, latent": ("mla", LATENT, {}),
}
LENGTHS = [1000, 17, 0, 640]  # keys of the sequences of a cache


def groups() -> list[list[str]]:
    """Return names of cases that one process a rank runs; groups run side by side: most of their time is compiling."""
    trained, decoded = list(TRAINED), list(DECODED)
    return [[name] for name in trained[:11]] + [trained[11:13], trained[13:], decoded[:2], decoded[2:4], decoded[4:]]


def run(names: list[str], rank: Run) -> dict[str, list[str]]:
    """Return by case the results that are over their budget."""
    tests = Path(__file__).parents[2] / "tests"
    sys.path[:0] = [str(tests / "distributed"), str(tests)]
    import decode_ranks
    import rank_cases

    decode_ranks.GARBAGE_PAGE = PAGE
    found, device = {}, rank.device.type
    for seed, name in enumerate(names):
        if name in DECODED:
            call, fields, how = DECODED[name]
            how = {"heads": "all", "lengths": LENGTHS, "device": device} | how
            found[name] = over(decode_ranks.attend(call, CACHE | fields, seed, INTERLEAVE, **how))
            continue
        case = BASE | {"name": name} | TRAINED[name]
        if case.get("dtensor"):
            case["how"] = {"method": "ring", "mesh": (dist.get_world_size(),)}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, rank_cases.local_results(case, seed, device))
        found[name] = rank_cases.wrong(case, seed, parts, device) if dist.get_rank() == 0 else []
    return found


def over(facts: dict[str, Any]) -> list[str]:
    """Return the errors of a judged call that are over their budgets; NaN is."""
    named = (("out", "error", "budget"), ("lse", "lse_error", "lse_budget"), ("places that are finite", "wrong", ""))
    pairs = [(what, facts[error], facts.get(budget, 0)) for what, error, budget in named]
    return [f"{what}: {error:.3g} > {budget:.3g}" for what, error, budget in pairs if not error <= budget]
