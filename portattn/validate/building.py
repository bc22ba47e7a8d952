"""The last step of every validator: its tensors as kernels can reach them, and the Problem and Call of all it found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.validate.checks import DTYPES, in_line, is_large, reachable, rows_aligned, wants_gradients, words_aligned
from portattn.validate.features import Features
from portattn.validate.stored import BLOCKS


def build(
    op: str,
    tensors: Mapping[str, torch.Tensor],
    features: Features,
    *,
    scale: float,
    problem: Mapping[str, Any],
    call: Mapping[str, Any],
    differentiable: tuple[torch.Tensor | None, ...],
    dtype: torch.dtype | None = None,
) -> Call:
    """The Call of checked arguments.

    tensors         q, k, v and q_rope by the Call's names, with the axes that a Call has; without v it is the first
                    head_dim_v columns of k
    problem, call   the other fields of either that are this op's own
    differentiable  what gradients could be asked for, beside the features
    dtype           of the results; None for q's
    """
    views: dict[str, Any] = {name: reachable(tensor.resolve_neg()) for name, tensor in tensors.items()}
    copied = features.copied or any(views[name] is not tensor for name, tensor in tensors.items())
    columns = [*views.values()]
    if "v" not in views:
        views["v"] = views["k"][..., : problem["head_dim_v"]]
    paged = bool(problem.get("page_size")) and op != "sparse_attention"  # whose tokens lie anywhere
    stored = problem.get("kv_format", "as_q") != "as_q"
    made = Problem(
        op=op,  # type: ignore[arg-type]
        dtype=DTYPES[dtype or views["q"].dtype],  # type: ignore[arg-type]
        pages_in_line=paged and in_line(views["k"]) and in_line(views["v"]),
        aligned=all(rows_aligned(tensor) for tensor in columns),
        word_aligned=not stored or words_aligned((views["k"], views["v"]), (call.get(name) for name in BLOCKS)),
        large=is_large(*columns),
        needs_grad=wants_gradients(*differentiable, *features.floating),
        negative_scale=scale < 0.0,
        **problem,
        **features.problem,
    )
    if made.needs_grad and made.kv_format != "as_q":
        whose = "a cache" if made.q_format == "as_q" else "queries and keys"
        limit = f"{op} has no gradient with {whose} of {made.kv_format}: call it under torch.no_grad()"
        raise ArgumentError(op, "requires_grad", True, limit)
    return Call(problem=made, scale=scale, copied=copied, **views, **call, **features.call)
