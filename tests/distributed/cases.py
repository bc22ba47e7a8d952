"""Calls over several ranks: their sizes, their features and how they are cut."""

import importlib.util
import os
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES: dict[str, Any] = {"batch": 2, "heads_q": 4, "heads_k": 2, "length": 48, "width": 16, "dtype": "fp32"}
CAUSAL = {"causal": True}
PACKED: dict[str, Any] = {"batch": 1, "cu": (0, 5, 5, 17, 40, 41, 48)}
PADDED: dict[str, Any] = {"batch": 1, "cu": (0, 3, 30, 37), "poison": True}
# What each feature changes, beside the sizes.
FEATURES: dict[str, dict[str, Any]] = {
    "full": {}, "causal": CAUSAL, "causal, top left, bshd": {"causal": True, "causal_word": "top_left", "bshd": True},
    "window": {"causal": True, "window": (5, 0)}, "window on both sides": {"window": (3, 4)},
    "wide window": {"causal": True, "window": (30, None)}, "window of the own key": {"window": (0, 0), "sinks": True},
    "window to the right": {"window": (None, 7)}, "softcap and scale": {"causal": True, "softcap": 3.0, "scale": 0.4},
    "sinks": {"causal": True, "sinks": True}, "sinks, window": {"window": (9, 2), "sinks": True, "grad_lse": True},
    "alibi": {"alibi_slopes": 1, "causal": True}, "alibi of both sides": {"alibi_slopes": 1, "grad_lse": True},
    "alibi per sequence, window": {"alibi_slopes": 2, "causal": True, "window": (20, 0)},
    "gradient of the LSE": {"causal": True, "grad_lse": True},
    "values of another width": {"causal": True, "width_v": 24, "strided": True},
    "bf16": {"causal": True, "dtype": "bf16", "length": 96, "width": 32}, "fp16": {"dtype": "fp16", "sinks": True},
    "packed": PACKED | CAUSAL, "packed, full": PACKED | {"grad_lse": True},
    "packed, window": PACKED | {"causal": True, "window": (4, 0), "strided": True},
    "packed, window on both sides": PACKED | {"window": (2, 3), "sinks": True},
    "packed, alibi": PACKED | {"causal": True, "alibi_slopes": 1},
    "packed, alibi per document": PACKED | {"alibi_slopes": 2},
    "packed, bf16": PACKED | {"causal": True, "dtype": "bf16"}, "padded": PADDED | CAUSAL,
    "padded, full, sinks": PADDED | {"sinks": True, "grad_lse": True},
    "one document": {"batch": 1, "cu": (0, 48), "causal": True}, "no rows": {"length": 0, "causal": True},
}  # fmt: skip
# By portattn's kernels, interpreted: their gradients take the result and the LSE of all ranks' keys.
KERNELS = {"batch": 1, "length": 16, "causal": True, "sinks": True, "grad_lse": True, "backend": "interpreter"}
INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
HEADS = {"heads_q": 8, "heads_k": 2}  # fewer key/value heads than ranks
# (ranks, name, what the ranks are)
RING = {"method": "ring"}
WORLDS: dict[int, list[tuple[str, dict[str, Any], list[str]]]] = {
    2: [
        ("ring, zigzag", RING | {"layout": "zigzag"}, list(FEATURES)),
        ("ring, contiguous", RING | {"layout": "contiguous"}, list(FEATURES)),
        ("ulysses, zigzag", {"method": "ulysses", "layout": "zigzag"}, list(FEATURES)),
        ("ulysses, contiguous", {"method": "ulysses", "layout": "contiguous"}, ["causal", "packed", "sinks", "bf16"]),
    ],
    4: [
        ("ring, zigzag", RING | {"layout": "zigzag"}, list(FEATURES)),
        ("ring, contiguous", RING | {"layout": "contiguous"}, ["causal", "window", "full", "packed", "padded"]),
        ("both, zigzag", {"mesh": (2, 2), "layout": "zigzag"}, list(FEATURES)),
        ("both, contiguous", {"mesh": (2, 2), "layout": "contiguous"}, ["causal", "packed, window", "sinks"]),
        ("ulysses", {"method": "ulysses", "sizes": HEADS}, ["causal", "gradient of the LSE", "packed", "alibi"]),
        ("ulysses, uneven groups", {"method": "ulysses", "sizes": {"heads_q": 12, "heads_k": 6}}, ["causal"]),
        ("ulysses, groups cut", {"method": "ulysses", "sizes": {"heads_q": 12, "heads_k": 3}}, ["causal"]),
        ("ulysses, heads cut unevenly", {"method": "ulysses", "sizes": {"heads_q": 20, "heads_k": 5}}, ["causal"]),
        ("a mesh of one dimension", {"mesh": (4,), "method": "ring"}, ["causal"]),
    ],
    8: [
        ("ring, zigzag", RING | {"layout": "zigzag"}, ["causal", "window", "packed", "alibi of both sides", "padded"]),
        ("ring, contiguous", RING | {"layout": "contiguous"}, ["causal", "window on both sides"]),
        ("both", {"mesh": (4, 2), "layout": "zigzag"}, ["causal", "packed", "sinks, window"]),
        ("both, one key head", {"mesh": (2, 4), "sizes": {"heads_k": 1}}, ["causal"]),
        ("ulysses, one key head", {"method": "ulysses", "sizes": {"heads_q": 8, "heads_k": 1}}, ["causal", "full"]),
    ],
}  # fmt: skip


def cases(world: int) -> list[dict[str, Any]]:
    found = []
    if world == 2 and INTERPRETED:
        found.append(SIZES | {"name": "ring, zigzag: kernels"} | KERNELS | {"how": RING | {"layout": "zigzag"}})
    for name, how, features in WORLDS[world]:
        for feature in features:
            case = SIZES | {"name": f"{name}: {feature}"} | how.get("sizes", {}) | FEATURES[feature]
            found.append(case | {"how": {key: value for key, value in how.items() if key != "sizes"}})
    return found


def tensors_of(case: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Numbers of a case in float64, rounded to its dtype: (B, H, S, D), alike on every rank."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, length, width = case["batch"], case["heads_q"], case["length"], case["width"]
    width_v = case.get("width_v", width)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(DTYPES[case["dtype"]]).double()

    found = {
        "q": random(batch, heads, length, width), "k": random(batch, case["heads_k"], length, width),
        "v": random(batch, case["heads_k"], length, width_v), "grad_out": random(batch, heads, length, width_v),
    }  # fmt: skip
    if case.get("grad_lse"):
        found["grad_lse"] = torch.randn(batch, heads, length, generator=generator).double()
    if case.get("sinks"):
        found["sinks"] = torch.randn(heads, generator=generator).double()
    if case.get("alibi_slopes"):
        several = len(case["cu"]) - 1 if "cu" in case else batch
        sizes = (heads,) if case["alibi_slopes"] == 1 else (several, heads)
        found["alibi_slopes"] = torch.rand(sizes, generator=generator).double() * 0.3
    return found
