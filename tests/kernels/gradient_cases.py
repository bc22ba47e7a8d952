"""Small problems of gradients, and comparing what the kernels make of them with float64."""

from __future__ import annotations

from typing import Any

from support import Device, random_call, run_core

from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.verdict import judge

DENSE: dict[str, Any] = {
    "op": "attention_backward", "batch": 2, "heads_q": 2, "heads_k": 2, "seq_q": 19, "seq_k": 37, "head_dim": 16,
    "dtype": "fp32",
}  # fmt: skip
PACKED = DENSE | {"op": "varlen_attention_backward", "batch": 3, "total_q": 33, "total_k": 70}
GRADIENTS = ("grad_q", "grad_k", "grad_v", "grad_bias", "grad_slopes")


def check(device: Device, call: Call, lowering: dict[str, str] | None = None, cores: int = 3, **tile: int) -> None:
    delta, _ = run_core(device, call, lowering, tile, cores)
    assert delta.shape == call.new_out().shape
    # The interpreter multiplies in float32 whatever it is told.
    asked = (lowering or {}).get("dot_precision", "ieee")
    facts = judge(call, delta, None, "tf32" if device.name != "cpu" and asked == "tf32" else "ieee")
    assert not facts["wrong"], f"{facts['wrong']} elements are not finite, or not 0 in padding"
    assert facts["error"] <= facts["budget"], f"error {facts['error']:.3g}, budget {facts['budget']:.3g}"


def random(device: Device, seed: int = 0, base: dict[str, Any] = DENSE, **fields: Any) -> Call:
    options = {name: fields.pop(name) for name in ("strides", "poison", "extremes", "scale") if name in fields}
    return random_call(Problem(**(base | fields)), seed, device=device.name, **options)
