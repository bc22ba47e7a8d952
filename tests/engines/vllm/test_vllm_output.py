"""forward writes into vLLM's output: what kernels would allocate themselves, and any other memory."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.v1.attention.backend import AttentionType
from vllm_batches import DECODE, DIM, HEADS, MIXED, Batch, Layer, check

import portattn
from portattn.integrations.vllm.backend import PortattnBackend

INTO = importlib.import_module("portattn.api.out_argument")
BEHIND = 3  # rows of output behind the batch's
ENCODER = {"attn_type": AttentionType.ENCODER_ONLY}
EACH = torch.tensor([1, 0, 1, 0, 1], dtype=torch.int32)


def made(kind: str) -> tuple[Layer, Batch, Any]:
    """A layer with a batch's keys in its cache, the batch, and its causality."""
    if kind == "encoder":
        requests = [(9, 9), (1, 1), (5, 5)]
        return Layer(create_encoder_only_attention_backend(PortattnBackend), arguments=ENCODER), Batch(requests), False
    layer, batch = Layer(window=7), Batch(DECODE if kind == "decode" else MIXED)
    return layer, batch, EACH if kind == "each" else True


def expected(kind: str) -> dict[str, Any]:
    if kind == "encoder":
        return {"causal": False}
    return {"window": (6, 6 if kind == "each" else 0), "causal": EACH.bool().tolist() if kind == "each" else True}


@pytest.mark.parametrize("kind", ["decode", "mixed", "each", "encoder"])
def test_what_is_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the batch alone; and the place that each call gets is as its kernel would allocate it."""
    places: list[tuple[int, bool]] = []
    real = INTO._as_allocated

    def seen(place: torch.Tensor, *others: Any) -> bool:
        places.append((place.untyped_storage().data_ptr(), real(place, *others)))
        return places[-1][1]

    layer, batch, causal = made(kind)
    right = layer.run(batch, causal)  # by vLLM's custom ops, and with the keys written
    check(right, batch, **expected(kind))
    rows = right.shape[0]
    nothing = torch.full((BEHIND, HEADS, DIM), math.nan, dtype=right.dtype)
    q, k, v = (torch.cat([*x, nothing[:, : x[0].shape[1]]]) for x in (batch.q, batch.k, batch.v))
    metadata = layer.builder.build(0, batch.common(causal))
    monkeypatch.setattr(INTO, "_as_allocated", seen)

    def run(output: torch.Tensor) -> torch.Tensor:
        given = layer.layer.impl.forward(layer.layer, q, k, v, layer.layer.kv_cache, metadata, output)
        assert given is output
        assert torch.equal(output[:rows], right)
        assert torch.equal(output[rows:], torch.full_like(output[rows:], 5.0))
        return output

    with torch.inference_mode():
        plain = run(torch.full((rows + BEHIND, HEADS, DIM), 5.0, dtype=right.dtype))
        assert places == ([] if kind == "each" else [(plain.untyped_storage().data_ptr(), True)])
        places.clear()
        # One that no kernel takes: memory behind each row is left as it is, too.
        wide = torch.full((rows + BEHIND, HEADS, 2 * DIM), 5.0, dtype=right.dtype)
        run(wide[..., 1 : DIM + 1])
        assert places == ([] if kind == "each" else [(wide.untyped_storage().data_ptr(), False)])
        assert wide[..., 0].eq(5.0).all()
        assert wide[..., DIM + 1 :].eq(5.0).all()


def test_kernels() -> None:
    """Interpreted, on a CPU: from there the result is copied, of the first call as of one like it."""
    layer, batch = Layer(), Batch([(1, 20), (1, 3)])
    layer.run(batch)
    metadata = layer.builder.build(0, batch.common())
    with portattn.settings(backend="interpreter"), torch.inference_mode():
        for _ in range(2):
            output = torch.full((4, HEADS, DIM), math.nan, dtype=torch.bfloat16)
            layer.layer.impl.forward(
                layer.layer, torch.cat(batch.q), None, None, layer.layer.kv_cache, metadata, output
            )
            assert portattn.last_plan().path == "interpreter"
            check(output[:2], batch)
            assert output[2:].isnan().all()
