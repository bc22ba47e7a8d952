"""diffusers: a double-stream and a single-stream block of Flux with random weights, and the attention of both alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import portattn
from engine_parts.measure import OURS, Absent, Measure, judged

HEADS, DIM, IMAGE, TEXT = 24, 128, 4096, 512
NATIVE = "native"


def rows(measure: Measure) -> Iterator[dict[str, Any]]:
    try:
        from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
        from diffusers.models.transformers import transformer_flux as flux
    except ModuleNotFoundError as error:
        raise Absent(str(error)) from None
    from portattn.integrations.diffusers import register

    register()
    torch.manual_seed(0)
    normal = measure.normal
    heads, drawn, written = (2, IMAGE // 64, TEXT // 64) if measure.tiny else (HEADS, IMAGE, TEXT)
    width = heads * DIM

    def tables() -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.rand(written + drawn, DIM // 2, device=measure.device).mul(6.28).repeat_interleave(2, 1)
        return angles.cos(), angles.sin()

    image, text, temb, rope = normal(1, drawn, width), normal(1, written, width), normal(1, width), tables()
    q, k, v = (normal(1, written + drawn, heads, DIM) for _ in range(3))

    def block(kind: Any) -> Callable[[], Any]:
        with torch.device(measure.device):
            made = kind(dim=width, num_attention_heads=heads, attention_head_dim=DIM).bfloat16().eval()
        return lambda: made(hidden_states=image, encoder_hidden_states=text, temb=temb, image_rotary_emb=rope)

    cases: dict[str, Callable[[], Callable[[], Any]]] = {
        "FluxTransformerBlock, 4096 + 512": lambda: block(flux.FluxTransformerBlock),
        "FluxSingleTransformerBlock, 4096 + 512": lambda: block(flux.FluxSingleTransformerBlock),
        "attention alone, 24 heads of 128": lambda: lambda: dispatch_attention_fn(q, k, v),
    }
    for name, make in cases.items():
        if measure.wanted(name):
            with torch.inference_mode():
                yield from _compared(measure, name, make(), attention_backend)


def _compared(measure: Measure, name: str, call: Callable[[], Any], attention_backend: Any) -> Iterator[dict[str, Any]]:
    def chosen(backend: str) -> Callable[[], Any]:
        def run() -> Any:
            with attention_backend(backend):
                return call()

        return run

    runs = {OURS: chosen("portattn"), NATIVE: chosen("native")}

    def flat(found: Any) -> torch.Tensor:
        return torch.cat([part.flatten() for part in (found if isinstance(found, tuple) else (found,))])

    def judge() -> dict[str, Any]:
        """Against the native backend's own error: what float64 would give is the unfused formula in float32 here."""
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            exact = flat(runs[NATIVE]())
        found = judged(flat(runs[OURS]()), exact.double(), flat(runs[NATIVE]()))
        # Rounding to bfloat16 after each layer of the block moves single elements: the whole must be as near, too.
        ours, native = ((flat(runs[one]()).double() - exact.double()).norm() for one in (OURS, NATIVE))
        found["right"] = found["right"] and bool(ours <= 1.25 * native + 1e-3 * exact.double().norm())
        return found | {"path": portattn.last_plan().path, "norm_of_native": float(ours / native)}

    yield from measure.rows(name, runs, {OURS: judge}, peer=NATIVE)
