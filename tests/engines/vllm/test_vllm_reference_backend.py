"""The same batches through vLLM's own TRITON_ATTN, whose kernels run under Triton's interpreter here. In float16 and
float32: interpreted products of bfloat16 are wrong there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.triton_utils
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionMetadataBuilder
from vllm_batches import DIM, HEADS, KV_HEADS, ON_GPU, Batch, Layer, check

from portattn.integrations.vllm.backend import PortattnBackend
from portattn.testing.tolerance import largest

works = pytest.mark.engine_feature
pytestmark = [
    pytest.mark.skipif(not vllm.triton_utils.HAS_TRITON, reason="vLLM does not use Triton in this environment"),
    works("equal to vLLM's own TRITON_ATTN"),
]
UNITS = 4  # in the last place: each rounds its probabilities and its result, at places of its own


class Builder(TritonAttentionMetadataBuilder):
    """vLLM's, for a configuration without a model: what it asks of one is answered here."""

    def __init__(self, spec: Any, names: list[str], config: Any, device: torch.device) -> None:
        model = SimpleNamespace(
            rswa_window=None, get_num_attention_heads=lambda _: HEADS, get_num_kv_heads=lambda _: KV_HEADS,
            get_head_size=lambda: DIM,
        )  # fmt: skip
        super().__init__(spec, names, SimpleNamespace(**{**vars(config), "model_config": model}), device)


class Theirs(TritonAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


@pytest.fixture(autouse=True)
def _capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cache writer asks CUDA for the chip, to choose a tile."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 7}, "softcap": {"arguments": {"logits_soft_cap": 2.0}},
    "alibi": {"arguments": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}},
    "sinks": {"arguments": {"sinks": torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.float16)}},
}  # fmt: skip
REQUESTS = [(1, 20), (9, 30), (3, 3)]  # few: interpreted, a row costs milliseconds


def compare(ours: torch.Tensor, theirs: torch.Tensor, unit: float = 0) -> None:
    assert ours.shape == theirs.shape
    unit = unit or torch.finfo(ours.dtype).eps
    assert largest(ours.double() - theirs.double()) <= UNITS * unit * max(1.0, largest(theirs.double()))


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str) -> None:
    batch = Batch(REQUESTS, torch.float16)
    mine, reference = (Layer(one, torch.float16, **FEATURES[feature]) for one in (PortattnBackend, Theirs))
    compare(mine.run(batch), reference.run(batch))
    written = [layer.layer.kv_cache.view(torch.int16) for layer in (mine, reference)]
    assert torch.equal(*written)


def test_decode() -> None:
    batch = Batch([(1, 33), (1, 5)], torch.float16)
    compare(*(Layer(one, torch.float16).run(batch) for one in (PortattnBackend, Theirs)))


@pytest.mark.parametrize("causal", [False, torch.tensor([0, 1, 0], dtype=torch.int32)], ids=["none", "each"])
def test_both_directions(causal: Any) -> None:
    """Without a window: of one in both directions their kernel loses values that later rows of its tile see."""
    batch = Batch(REQUESTS, torch.float16)
    mine, reference = (Layer(one, torch.float16) for one in (PortattnBackend, Theirs))
    theirs = reference.run(batch, causal=causal)
    compare(mine.run(batch, causal=causal), theirs)
    check(theirs, batch, causal=causal if causal is False else [False, True, False])


def test_encoders() -> None:
    batch = Batch([(20, 20), (1, 1), (9, 9)], torch.float16)
    more: dict[str, Any] = {"window": 6, "arguments": {"attn_type": "encoder_only"}}
    outs = [
        Layer(create_encoder_only_attention_backend(one), torch.float16, **more).run(batch)
        for one in (PortattnBackend, Theirs)
    ]
    compare(*outs)


@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"])
def test_quantised_caches(cache_dtype: str) -> None:
    """A cache that vLLM's own kernel has written is read alike by both. Its fp8 with one scale needs a GPU."""
    batch = Batch(REQUESTS, torch.float16)
    mine, reference = (Layer(one, torch.float16, cache_dtype=cache_dtype) for one in (PortattnBackend, Theirs))
    theirs = reference.run(batch)
    mine.layer.kv_cache.view(torch.uint8).copy_(reference.layer.kv_cache.view(torch.uint8))
    mine.layer.impl.do_kv_cache_update = lambda *_: None  # its own rows are there, as the other wrote them
    rotated_in_bf16 = ON_GPU and cache_dtype.startswith("int4")
    compare(mine.run(batch, write=False), theirs, 2.0**-7 if rotated_in_bf16 else 0)
