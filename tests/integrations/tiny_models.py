"""Tiny random-weight models, batches with padding, and how far two sets of logits differ. A file that imports it first
is skipped where transformers is not installed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers package is not installed")

import transformers
from transformers import DynamicCache, StaticCache

# Both implementations compute in float32 on a CPU, in different orders of summation. Logits are of size 1 to 5, seen
# differences below 1e-5, below 3e-5 behind GPT-OSS's experts; the planted errors below differ by more than 0.05.
TOLERANCE = 6e-5
PLANTED = 0.05
VOCABULARY, BATCH, LENGTH = 64, 3, 11
# initializer_range makes scores vary by several units: with the default 0.02 every key would weigh the same, and no
# error in a mask could be seen.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# The window hides keys from most queries of LENGTH; caps and sinks are of the scores' size. With its tied embeddings
# Gemma would have every token follow itself.
WINDOW, SOFTCAP = 4, 3.0
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**ALTERNATING, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
CHANGES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {}, "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {**GEMMA, "attn_logit_softcapping": SOFTCAP}, "Gemma3": GEMMA,
    "GptOss": {
        **ALTERNATING, "num_local_experts": 3, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Llama4": {
        "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"], "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
    "DeepseekV32": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "index_topk": WINDOW, "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 2,
    },
}  # fmt: skip
FAMILIES = ("Llama", "Qwen3", "Mistral", "Gemma2", "Gemma3", "GptOss")
TEXT = ("Gemma3", "Llama4")  # whose configurations of the text model alone have a name of their own
PADDINGS = {
    "none": None, "ones": ((0, 0), (0, 0), (0, 0)), "left": ((4, 0), (0, 0), (1, 0)), "right": ((0, 3), (0, 0), (0, 6)),
    "both": ((2, 3), (0, 0), (5, 1)), "an empty row": ((0, 0), (11, 0), (3, 0)),
}  # fmt: skip


def build(family: str, **changes: Any) -> Any:
    config_name = f"{family}TextConfig" if family in TEXT else f"{family}Config"
    config = getattr(transformers, config_name)(**{**SIZES, **CHANGES[family], **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.set_attn_implementation("eager")
    return model


def build_t5() -> Any:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        initializer_factor=1.5, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
        tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.lm_head.weight.data /= 10  # logits of the size that TOLERANCE is meant for
    model.set_attn_implementation("eager")
    return model


def plant(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> list[tuple[str, dict[str, Any]]]:
    """Call every op with these arguments instead of its own, where it has any; return the ops called, and with what."""
    from portattn.api import ops  # not above: hub_child.py runs where no portattn is installed

    called = []

    def changing(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append((name, kwargs))
            return real(*args, **{k: changed.get(k, v) if v is not None else v for k, v in kwargs.items()})

        return call

    for name in ("attention", "decode_attention", "varlen_attention", "paged_attention"):
        monkeypatch.setattr(ops, name, changing(name, getattr(ops, name)))
    return called


@contextlib.contextmanager
def using(model: Any, implementation: str) -> Iterator[Any]:
    _set_everywhere(model, implementation)
    yield model
    _set_everywhere(model, "eager")


def _set_everywhere(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    for name in ("encoder", "decoder"):  # T5's have configurations of their own, which transformers 5.17 leaves alone
        part = getattr(model, name, None)
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(implementation)


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(1))


def padding(name: str) -> torch.Tensor | None:
    sides = PADDINGS[name]
    if sides is None:
        return None
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for row, (left, right) in enumerate(sides):
        mask[row, :left] = 0
        mask[row, LENGTH - right :] = 0
    return mask


def positions(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)


def difference(ours: torch.Tensor, eager: torch.Tensor, mask: torch.Tensor | None) -> float:
    assert torch.isfinite(ours).all()
    valid = torch.ones(ours.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    assert valid.any()
    return (ours - eager)[valid].abs().max().item()


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),  # drops what a window hides
    "caching all": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=LENGTH + 6),
}


def in_chunks(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Any, chunks: tuple[int, ...]) -> Any:
    """Logits of feeding `ids` piece by piece: prefill in chunks, and decoding where a chunk is one token."""
    pieces, start = [], 0
    for size in chunks:
        stop = start + size
        so_far = None if mask is None else mask[:, :stop]
        where = torch.arange(start, stop)[None] if mask is None else positions(mask)[:, start:stop]
        out = model(ids[:, start:stop], attention_mask=so_far, position_ids=where, past_key_values=cache)
        pieces.append(out.logits)
        start = stop
    assert start == ids.shape[1]
    return torch.cat(pieces, dim=1)
