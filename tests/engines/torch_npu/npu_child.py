"""The real torch_npu in a process of its own: portattn's calls go through its registered schemas and autograd formulas.
The kernels beneath them are the stand-in's, on the CPU. Prints one line of JSON: the finding of each case."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import msgspec
import torch
import torch_npu
from oracle64 import LOSSES, gradients, oracle, random_call
from recorded_torch_npu import RecordedTorchNpu, fusion_gradients, seen_keys
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from portattn.backends.ascend import AscendBackend, NpuFusedInferAttentionScore, NpuFusionAttention
from portattn.schema.problem import Problem

BASE = Problem(
    batch=2, heads_q=4, heads_k=2, seq_q=5, seq_k=7, head_dim=16, head_dim_v=16, dtype="fp32", return_lse=True,
    needs_grad=True,
)  # fmt: skip


class NpuTensor(torch.Tensor):
    """A tensor of the device npu:0, whose numbers lie in a tensor on the CPU."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> NpuTensor:
        made: NpuTensor = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), dtype=numbers.dtype, device="npu:0"
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_cpu(function, args, kwargs or {})


class NpuFactories(TorchDispatchMode):
    """Inside the block, tensors that are made on the device are NpuTensors."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_cpu(function, args, kwargs or {})


def run_on_cpu(function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator beneath autograd: torch's on the CPU, torch_npu's by the stand-in."""
    args, kwargs = tree_map(on_cpu, args), tree_map(on_cpu, kwargs)
    kernel = KERNELS.get(function._schema.name)
    if kernel is None:
        found = function(*args, **kwargs)
    else:
        names = [argument.name for argument in function._schema.arguments]
        found = kernel(**dict(zip(names, args, strict=False)), **kwargs)
    return tree_map_only(torch.Tensor, NpuTensor, found)


def on_cpu(value: Any) -> Any:
    if isinstance(value, NpuTensor):
        return value.numbers
    return torch.device("cpu") if isinstance(value, torch.device) else value


def fusion_attention_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor | None, *, scale_value: float = 1.0,
    sparse_mode: int = 0, atten_mask: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    if dy is None:
        raise RuntimeError("npu_fusion_attention_grad: dy is an undefined tensor")
    seen = seen_keys(query, key, sparse_mode, atten_mask)
    return *fusion_gradients(query, key, value, dy, scale_value, seen), torch.empty(0), torch.empty(0)


STAND_IN = RecordedTorchNpu()
KERNELS = {
    "npu::npu_fusion_attention": STAND_IN.npu_fusion_attention, "npu::npu_fusion_attention_grad": fusion_attention_grad,
    "npu::npu_fused_infer_attention_score": STAND_IN.npu_fused_infer_attention_score,
}  # fmt: skip


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference from a float64 result; infinities must be equal."""
    numbers = on_cpu(found.detach()).double()
    assert torch.equal(numbers.isinf(), exact.isinf())
    return float((numbers - exact).nan_to_num(0.0).abs().max())


def on_npu(call: Any) -> Any:
    tensors = {name: NpuTensor(getattr(call, name).detach()) for name in "qkv"}
    return dataclasses.replace(call, **{name: t.requires_grad_(call.problem.needs_grad) for name, t in tensors.items()})


def fusion_errors(causal: str, loss: str) -> dict[str, float]:
    """Errors of NpuFusionAttention: its results, and the gradients of a loss."""
    call = random_call(msgspec.structs.replace(BASE, causal=causal))
    exact = oracle(call)
    there = on_npu(call)
    with NpuFactories():
        out, lse = NpuFusionAttention().run(there)
    assert lse is not None
    found = torch.autograd.grad(LOSSES[loss](out, lse), [there.q, there.k, there.v], allow_unused=True)
    errors = {"out": error(out, exact[0]), "lse": error(lse, exact[1])}
    for name, gradient, reference in zip("qkv", found, gradients(call, loss), strict=True):
        errors[f"grad_{name}"] = float(reference.abs().max()) if gradient is None else error(gradient, reference)
    return errors


def formula_errors() -> dict[str, float]:
    """Errors of the vendor's own gradients of q, with the LSE computed from its statistics by autograd."""
    call = random_call(BASE)
    there = on_npu(call)
    with NpuFactories():
        out, largest, total, *_ = torch_npu.npu_fusion_attention(
            there.q, there.k, there.v, 4, "BNSD", scale=float(call.scale)
        )
        lse = (largest + total.log())[..., 0]
    (found,) = torch.autograd.grad(LOSSES["out and lse"](out, lse), there.q)
    return {loss: error(found, gradients(call, loss)[0]) for loss in ("out", "out and lse")}


def infer_errors(causal: str, seqlens_k: list[int] | None) -> dict[str, float]:
    """Errors of NpuFusedInferAttentionScore's results."""
    changes = {"causal": causal, "dtype": "fp16", "needs_grad": False, "seqlens_k": seqlens_k is not None}
    call = random_call(msgspec.structs.replace(BASE, **changes), seqlens_k=seqlens_k)
    there = on_npu(call)
    with NpuFactories():
        out, lse = NpuFusedInferAttentionScore().run(there)
    assert lse is not None
    exact, exact_lse = oracle(call)
    return {"out": error(out, exact), "lse": error(lse, exact_lse)}


def main() -> None:
    kinds = ("none", "top_left", "bottom_right")
    found = {
        "version": torch_npu.__version__, "arch": AscendBackend().detect(0), "formula": formula_errors(),
        "fusion": {f"{causal}, {loss}": fusion_errors(causal, loss) for causal in kinds for loss in LOSSES},
        "infer": {f"{causal}, {keys}": infer_errors(causal, keys) for causal in kinds for keys in (None, [7, 3])},
    }  # fmt: skip
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # torch_npu ends a process without CANN by an abort
