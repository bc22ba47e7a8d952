"""The real torch_npu in a process of its own: portattn's calls go through its registered schemas, autograd formulas and
meta functions. The kernels beneath them are vendor_kernels.py's, on the CPU. Prints one line of JSON, its findings."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from vendor_cases import CASES, LACKS, LOSSES, TOLERANCE, case, error, exact_gradients, loss_of, trained
from vendor_kernels import KERNELS, SCHEMAS, bind

from portattn.backends.ascend import AscendBackend, registered_arguments
from portattn.backends.ascend.vendor import _sink
from portattn.planning.registry import parse_target
from portattn.testing.oracle import oracle

differences: list[str] = []  # results of kernels whose shapes or dtypes the vendor's meta functions give otherwise


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

    def tolist(self) -> Any:
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_cpu(function, args, kwargs or {})


class NpuFactories(TorchDispatchMode):
    """Inside the block, tensors that are made on the device are NpuTensors."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_cpu(function, args, kwargs or {})


def run_on_cpu(function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator beneath autograd: torch's on the CPU, torch_npu's by vendor_kernels.py."""
    args, kwargs = tree_map(on_cpu, args), tree_map(on_cpu, kwargs)
    name = function._schema.name
    if name in KERNELS:
        found = KERNELS[name](**bind(function._schema, args, kwargs))[: len(function._schema.returns)]
        compare_with_meta(function, args, kwargs, found)
    elif name == "npu::_npu_dtype_cast":  # Tensor.to in torch_npu 2.7.1
        found = args[0].to(*args[1:], **kwargs)
    else:
        found = function(*args, **kwargs)
    return tree_map_only(torch.Tensor, NpuTensor, found)


def on_cpu(value: Any) -> Any:
    if isinstance(value, NpuTensor):
        return value.numbers
    return torch.device("cpu") if isinstance(value, torch.device) else value


def compare_with_meta(function: Any, args: Any, kwargs: Any, found: Any) -> None:
    """Compare shapes and dtypes with the vendor's meta function, which gives None for a bias's gradient."""
    there, named_there = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    try:
        meta = function(*there, **named_there)
    except TypeError as error:  # of the meta function's own
        differences.append(f"{function._schema.name}: {error}")
        return
    for place, (ours, theirs) in enumerate(zip(found, meta, strict=True)):
        if isinstance(theirs, torch.Tensor) and (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            named = f"{function._schema.name}[{place}]"
            differences.append(f"{named}: {list(ours.shape)} {ours.dtype}, not {list(theirs.shape)} {theirs.dtype}")


def on_npu(call: Any) -> Any:
    values = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    moved = {name: NpuTensor(value.detach()) for name, value in values.items() if isinstance(value, torch.Tensor)}
    for name in trained(call):
        moved[name].requires_grad_(call.problem.needs_grad)
    return dataclasses.replace(call, **moved)


def refusal(name: str) -> str:
    path, call = case(name, 1)
    rejection = path.rejects(call.problem, parse_target("ascend:ascend910b2", toolchain="triton-ascend==3.2.0"))
    return rejection.reason if rejection else ""


def errors(name: str, loss: str) -> dict[str, float]:
    """Errors of a case: its results, and the gradients of a loss if it trains."""
    path, call = case(name, 1)
    wanted = exact_gradients(call, loss) if call.problem.needs_grad else {}
    there, exact = on_npu(call), oracle(call)
    with NpuFactories():
        out, lse = path.run(there)
        gradients: tuple[Any, ...] = ()
        if call.problem.needs_grad:
            gradients = torch.autograd.grad(loss_of(loss, out, lse), [*trained(there).values()], allow_unused=True)
    found = {"out": error(on_cpu(out.detach()), exact[0]), "lse": error(on_cpu(lse.detach()), exact[1])}
    found["allowed"] = TOLERANCE[call.problem.dtype]  # of the output, rounded to the dtype
    for (tensor, reference), gradient in zip(wanted.items(), gradients, strict=True):
        given = torch.zeros_like(reference) if gradient is None else on_cpu(gradient)
        found[f"grad_{tensor}"] = error(given, reference)
    return found


def formulas() -> dict[str, Any]:
    """What the vendor's formulas alone give: errors of the gradients of q and of a sink, and a bias's gradient."""
    _, call = case("sinks" if "sink" in registered_arguments("npu_fusion_attention") else "dense", 1)
    learnt = [name for name in ("q", "sinks") if getattr(call, name) is not None]
    there, heads, scale = on_npu(call), call.problem.heads_q, float(call.scale)
    exact = {loss: exact_gradients(call, loss) for loss in LOSSES}
    bias = NpuTensor(torch.zeros(1, heads, call.problem.seq_q, call.problem.seq_k)).requires_grad_()
    gradients: dict[str, Any] = {}
    with NpuFactories():
        out, largest, total, *_ = torch_npu.npu_fusion_attention(
            there.q, there.k, there.v, heads, "BNSD", scale=scale, **_sink(there.sinks)
        )
        for loss in ("out", "out and lse"):
            value = loss_of(loss, out, (largest + total.log())[..., 0])
            leaves = [getattr(there, name) for name in learnt]
            gradients[loss] = torch.autograd.grad(value, leaves, retain_graph=True)
        out = torch_npu.npu_fusion_attention_v2(
            there.q, there.k, there.v, heads, "BNSD", scale=scale, pse=bias, pse_type=0
        )[0]
        (through,) = torch.autograd.grad(out.square().sum(), bias)
    found: dict[str, Any] = {
        f"{loss}: {name}": error(on_cpu(gradient), exact[loss][name])
        for loss in gradients for name, gradient in zip(learnt, gradients[loss], strict=True)
    }  # fmt: skip
    operands = [tensor.detach().to("meta") for tensor in (call.q, call.k, call.v, call.q)]
    meta = torch.ops.npu.npu_fusion_attention_grad(*operands, heads, "BNSD", pse=bias.numbers.to("meta"))
    return found | {"bias by the kernel alone": bool(on_cpu(through).isnan().all()), "bias by meta": repr(meta[3])}


def main() -> None:
    refused = {name: reason for name in CASES if (reason := refusal(name))}
    found = {
        "arch": AscendBackend().detect(0), "formulas": formulas(), "refused": refused,
        "lacks": LACKS.get(torch_npu.__version__.partition("+")[0], {}),
        "schemas": [str(getattr(torch.ops.npu, n.removeprefix("npu::")).default._schema) for n in SCHEMAS],
        "cases": {
            f"{name}: {loss}": errors(name, loss) for name in CASES if name not in refused
            for loss in (LOSSES if "needs_grad" in CASES[name][1] else LOSSES[:1])
        },
        "differences": sorted(set(differences)),
    }  # fmt: skip
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # torch_npu ends a process without CANN by an abort
