"""Calls of torch_npu's attention for every documented feature, for the kernels here and for torch_npu's own library."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from portattn.backends.ascend import NpuFusedInferAttentionScore, NpuFusionAttention
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.oracle import oracle
from portattn.testing.random_calls import random_call

FUSION, INFER = NpuFusionAttention(), NpuFusedInferAttentionScore()
DENSE: dict[str, Any] = {
    "batch": 2, "heads_q": 4, "heads_k": 2, "seq_q": 5, "seq_k": 7, "head_dim": 16, "return_lse": True,
}  # fmt: skip
PACKED = DENSE | {"op": "varlen_attention", "batch": 4, "seq_q": 9, "seq_k": 12, "total_q": 30, "total_k": 40}
WIDE = PACKED | {"dtype": "bf16", "head_dim": 128}
TRAIN = {"needs_grad": True, "dtype": "fp32"}
DECODE = DENSE | {"op": "decode_attention", "seq_q": 1, "seqlens_k": True}
PAGED = DECODE | {"op": "paged_attention", "batch": 3, "seq_k": 64, "page_size": 16, "pages_in_line": True}
PREFILL = PAGED | {"seq_q": 3, "seq_k": 256, "page_size": 128, "causal": "bottom_right"}
INT8 = {"kv_format": "int8", "kv_scales": "token"}
RIGHT, TOP = {"causal": "bottom_right"}, {"causal": "top_left"}
# The feature -> (path, fields of its Problem)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (FUSION, DENSE | TRAIN), "dense, top left": (FUSION, DENSE | TRAIN | {"causal": "top_left"}),
    "dense, lower right": (FUSION, DENSE | TRAIN | RIGHT), "dense, 72 wide": (FUSION, DENSE | {"head_dim": 72}),
    "dense, many rows": (FUSION, DENSE | TRAIN | RIGHT | {"seq_q": 33, "seq_k": 65, "negative_scale": True}),
    "packed": (FUSION, PACKED | TRAIN), "packed, top left": (FUSION, PACKED | TRAIN | {"causal": "top_left"}),
    "packed, lower right": (FUSION, PACKED | TRAIN | RIGHT),
    "window": (FUSION, DENSE | TRAIN | {"window_left": 2, "window_right": 1, "seq_k": 17}),
    "window, causal": (FUSION, DENSE | TRAIN | RIGHT | {"window_left": 1}),
    "window, top left": (FUSION, DENSE | TRAIN | {"window_left": 2, "causal": "top_left", "seq_q": 7}),
    "window, one row": (FUSION, DENSE | TRAIN | {"window_left": 2, "seq_q": 1}),
    "window, packed": (FUSION, PACKED | TRAIN | RIGHT | {"window_left": 3}),
    "window, packed, two sides": (FUSION, PACKED | TRAIN | {"window_left": 3, "window_right": 2}),
    "sinks": (FUSION, DENSE | TRAIN | {"sinks": True}),
    "sinks, packed": (FUSION, PACKED | TRAIN | RIGHT | {"sinks": True}),
    "ALiBi": (FUSION, DENSE | RIGHT | {"alibi_slopes": True}),
    "ALiBi, top left": (FUSION, DENSE | {"alibi_slopes": True, "causal": "top_left", "dtype": "fp32"}),
    "bias": (FUSION, DENSE | {"bias": True, "dtype": "bf16"}),
    "bias, ALiBi, sinks": (FUSION, DENSE | RIGHT | dict.fromkeys(("bias", "alibi_slopes", "sinks"), True)),
    "bias, window": (FUSION, DENSE | {"bias": True, "window_left": 1, "window_right": 0, "dtype": "fp32"}),
    "narrow values": (FUSION, DENSE | TRAIN | {"head_dim_v": 8}),
    "narrow values, packed": (FUSION, PACKED | TRAIN | {"head_dim_v": 8}), "inference": (INFER, DENSE),
    "inference, top left": (INFER, DENSE | {"causal": "top_left", "layout": "bshd"}),
    "inference, rows without a key": (INFER, DENSE | RIGHT | {"seq_q": 7, "seq_k": 3, "negative_scale": True}),
    "inference, lengths": (INFER, DENSE | RIGHT | {"seqlens_q": True, "seqlens_k": True}),
    "inference, lengths, top left": (INFER, DENSE | {"batch": 6, "seqlens_q": True, "seqlens_k": True} | TOP),
    "inference, window": (INFER, DENSE | RIGHT | {"window_left": 1, "layout": "bshd"}),
    "inference, one row, top left": (INFER, DENSE | {"seq_q": 1, "causal": "top_left"}),
    "inference, packed": (INFER, WIDE), "inference, packed, lower right": (INFER, WIDE | RIGHT),
    "inference, packed, window": (INFER, WIDE | RIGHT | {"window_left": 3}),
    "inference, packed, one row": (INFER, WIDE | RIGHT | {"window_left": 3, "seq_q": 1}),
    "inference, packed, 192": (INFER, WIDE | {"head_dim": 192, "head_dim_v": 128}),
    "decode": (INFER, DECODE | {"layout": "bshd"}),
    "decode, window": (INFER, DECODE | {"window_left": 2, "seqlens_k": False}), "decode, int8": (INFER, DECODE | INT8),
    "pages, heads first": (INFER, PAGED | {"page_layout": "hpd"}),
    "pages, tokens first": (INFER, PAGED | {"page_layout": "phd"}),
    "pages, apart": (INFER, PAGED | {"page_layout": "phd", "pages_in_line": False}),
    "pages, int8": (INFER, PAGED | INT8 | {"page_layout": "hpd", "page_size": 32}), "pages, rows": (INFER, PREFILL),
}  # fmt: skip
# Of older releases: the case -> why the plan refuses it
LACKS = {
    "2.7.1": {
        "sinks": "sinks asked for, and torch_npu 2.7.1 has no sink in npu_fusion_attention",
        "sinks, packed": "sinks asked for, and torch_npu 2.7.1 has no sink in npu_fusion_attention",
        "bias, ALiBi, sinks": "sinks asked for, and torch_npu 2.7.1 has no sink in npu_fusion_attention",
    }
}
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
# Losses of a call's results.
LOSSES = ("out", "out and lse", "lse")


def case(name: str, seed: int) -> tuple[Any, Call]:
    """Return the path of a case and a call of it, whose floating tensors require gradients if the case trains."""
    path, fields = CASES[name]
    call = random_call(Problem(**fields), seed, extremes=seed % 2 == 1)
    for tensor in trained(call).values():
        tensor.requires_grad_(call.problem.needs_grad)
    return path, call


def trained(call: Call) -> dict[str, torch.Tensor]:
    return {name: tensor for name in ("q", "k", "v", "sinks") if (tensor := getattr(call, name)) is not None}


def loss_of(kind: str, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    finite = lse.masked_fill(lse.isinf(), 0.0)
    parts = {"out": out.square().sum(), "lse": finite.sin().sum()}
    return sum(part for name, part in parts.items() if name in kind.split(" and "))  # type: ignore[return-value]


def exact_gradients(call: Call, kind: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss in float64, by autograd through the oracle."""
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in trained(call).items()}
    out, lse = oracle(dataclasses.replace(call, **leaves))
    found = torch.autograd.grad(loss_of(kind, out, lse), [*leaves.values()], allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if gradient is None else gradient for (name, leaf), gradient in pairs}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference; infinity if there is a NaN, or an infinity in one alone."""
    found, exact = found.detach().double(), exact.detach()
    if found.shape != exact.shape or not torch.equal(found.isinf(), exact.isinf()):
        return float("inf")
    return float((found - exact).masked_fill(exact.isinf(), 0.0).abs().nan_to_num(float("inf")).max())
