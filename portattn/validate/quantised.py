"""Quantised queries, keys and values of attention and varlen_attention: formats, scales, and the results' dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from portattn.errors import ArgumentError
from portattn.schema.tensors import KV_FORMAT
from portattn.validate.checks import check_done, check_like, other_dtype, shape_or_value
from portattn.validate.stored import ScaleShapes, as_stored

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
FLOAT8_RESULTS = torch.bfloat16  # of float8 operands, where the caller names no dtype


def result_dtype(q: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the results: the caller's, or bfloat16 of float8 operands, and the values' beside int8 ones."""
    kind = KV_FORMAT.get(q.dtype)
    if kind is None:
        return q.dtype
    return out_dtype or (v.dtype if kind == "int8" else FLOAT8_RESULTS)


class Operands:
    """q, k and v of one call, checked: all of q's dtype, all of one float8 format, or int8 with values of 16 bits.

    kind   Problem.kv_format
    dtype  of the results

    Raises ArgumentError.
    """

    def __init__(self, op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_dtype: Any) -> None:
        self.op, self.device = op, q.device
        if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
            raise ArgumentError(op, "out_dtype", out_dtype, "must be a torch.dtype, or None")
        self.kind = KV_FORMAT.get(q.dtype, "as_q")
        _like(op, "k", k, q)
        if self.kind == "int8" and v.dtype not in SIXTEEN_BITS:
            limit = f"must be {_either(SIXTEEN_BITS)} with q and k of torch.int8"
            raise ArgumentError(op, "v.dtype", v.dtype, limit)
        if self.kind != "int8":
            _like(op, "v", v, q)
        elif v.device != q.device:
            raise ArgumentError(op, "v.device", str(v.device), f"must be q's, {q.device}")
        self.dtype = result_dtype(q, v, out_dtype)
        allowed = {"as_q": (q.dtype,), "int8": (v.dtype,)}.get(self.kind, SIXTEEN_BITS)
        if out_dtype is not None and out_dtype not in allowed:
            whose = {"as_q": "q's, ", "int8": "v's, "}.get(self.kind, "")
            raise ArgumentError(op, "out_dtype", out_dtype, f"must be {whose}{_either(allowed)} with q of {q.dtype}")

    def stored(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors as a Call has them: float8 numbers as their bytes."""
        return as_stored(q, self.kind), as_stored(k, self.kind), v if self.kind == "int8" else as_stored(v, self.kind)

    def scales(
        self, given: Mapping[str, Any], shapes: Mapping[str, ScaleShapes]
    ) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the unit of the scales (Problem.kv_scales), and each scale as the Call has it, by its name there.

        given   scales by tensor: q, k or v; None without one
        shapes  allowed shapes of q's and k's scales
        """
        op, scaled = self.op, ("q", "k") if self.kind == "int8" else ("q", "k", "v")
        present = [f"{name}_scale" for name, scale in given.items() if scale is not None]
        if not present and self.kind != "int8":
            return "none", {}
        if self.kind == "as_q":
            limit = f"goes with q and k of one of {', '.join(map(str, KV_FORMAT))}"
            raise ArgumentError(op, present[0], shape_or_value(given[present[0][0]]), limit)
        if self.kind == "int8" and given["v"] is not None:
            limit = "must be None with q and k of torch.int8, whose values are of 16 bits"
            raise ArgumentError(op, "v_scale", shape_or_value(given["v"]), limit)
        views = {}
        by_token = self._by_token([(given[name], shapes[name]) for name in scaled if name in shapes])
        for name in scaled:
            scale = given[name]
            if not isinstance(scale, torch.Tensor):
                why = "with q and k of torch.int8" if self.kind == "int8" else f"as {present[0]} is given"
                limit = f"must be a float32 torch.Tensor, {why}"
                shown = None if scale is None else type(scale).__name__
                raise ArgumentError(op, f"{name}_scale", shown, limit)
            if scale.dtype != torch.float32:
                raise ArgumentError(op, f"{name}_scale.dtype", scale.dtype, "must be torch.float32")
            check_done(op, f"{name}_scale", scale)
            if scale.device != self.device:
                raise ArgumentError(op, f"{name}_scale.device", str(scale.device), f"must be q's, {self.device}")
            of = shapes["q" if name == "q" else "k"]
            views[f"{name}_scale"] = of.of_tokens(scale) if by_token else self._view(f"{name}_scale", scale, of)
        ranks = {view.ndim for view in views.values()}
        if len(ranks) > 1:
            name = next(name for name, view in views.items() if view.ndim == 2)
            tokens = shapes[name[0]].tokens
            limit = f"must have a scale for each token, as the other has: {tokens}"
            raise ArgumentError(op, f"{name}.shape", tuple(given[name[0]].shape), limit)
        return "head" if ranks == {2} else "token", views

    def _by_token(self, scales: Sequence[tuple[Any, ScaleShapes]]) -> bool:
        """Return whether scales of packed rows are for tokens: q's and k's both have such a shape.

        With as many tokens as sequences a shape may be read as (B, Hk) too, as `view` does for a single one; if both
        may be either, they are for tokens, as `quantize` makes them for int8 rows.
        """
        if self.kind != "int8" or not all(shapes.packed for _, shapes in scales):
            return False
        return all(isinstance(one, torch.Tensor) and tuple(one.shape) == shapes.tokens for one, shapes in scales)

    def _view(self, name: str, scale: torch.Tensor, shapes: ScaleShapes) -> torch.Tensor:
        by_head = (shapes.batch, shapes.heads)
        shape = tuple(scale.shape)
        if self.kind != "int8" and shape not in ((), (1,), (shapes.heads,), by_head):
            limit = f"must be (), (1,), (heads_k,) or (batch, heads_k): (), (1,), ({shapes.heads},) or {by_head}"
            raise ArgumentError(self.op, f"{name}.shape", shape, limit)
        return shapes.view(self.op, name, scale)


def _like(op: str, name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    if tensor.dtype != q.dtype and q.dtype not in KV_FORMAT:
        limit = f"must be q's, {q.dtype}" + other_dtype(tensor.dtype, ())
        raise ArgumentError(op, f"{name}.dtype", tensor.dtype, limit)
    check_like(op, name, tensor, "q", q)


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))
