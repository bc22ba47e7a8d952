"""Continuous batching: generate_batch gives the tokens of `sdpa`, on the paged operation where pages are in order."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import portattn
from portattn.api import ops

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")

import transformers  # noqa: E402
from tiny_models import VOCABULARY, WINDOW, build, tokens, using  # noqa: E402
from transformers import AttentionInterface  # noqa: E402

from portattn.integrations.transformers_mask import compact_mask  # noqa: E402

LENGTHS, NEW = (9, 2, 5, 1, 14), 7
CALLS = ("attention", "decode_attention", "varlen_attention", "paged_attention")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def generate(model: Any, **settings: Any) -> list[list[int]]:
    """Of all prompts together: more than a batch takes, so that prompts are cut and mixed with decoding."""
    if "page_size" not in inspect.signature(transformers.ContinuousBatchingConfig).parameters:
        pytest.skip("this transformers has no page_size of continuous batching")
    config = transformers.ContinuousBatchingConfig(
        **{"num_blocks": 48, "page_size": 4, "max_batch_tokens": 12, **settings}
    )
    found = model.generate_batch(
        prompts(),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=config,
        progress_bar=False,
    )
    assert len(found) == len(LENGTHS)
    assert [one.error for one in found.values()] == [None] * len(LENGTHS)
    order = {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
    return [order[tuple(prompt)] for prompt in prompts()]


def recorded(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> list[tuple[str, dict[str, Any]]]:
    """The operations that are called from now on, with their arguments by name, some of them changed."""
    called = []

    def recording(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append((name, kwargs))
            return real(*args, **{k: changed.get(k, v) for k, v in kwargs.items()})

        return call

    for name in CALLS:
        monkeypatch.setattr(ops, name, recording(name, getattr(ops, name)))
    return called


@pytest.mark.parametrize("sharing", [True, False])
@torch.no_grad()
def test_generate_batch(models: dict[str, Any], sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with using(models["Llama"], "sdpa") as model:
        expected = generate(model)
        alone = [model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0, len(p) :] for p in prompts()]
    assert expected == [row.tolist() for row in alone]
    called = recorded(monkeypatch)
    with using(models["Llama"], "portattn") as model:
        assert generate(model, allow_block_sharing=sharing) == expected
        assert model.config._attn_implementation == "portattn"
    names = [name for name, _ in called]
    # Batches that read nothing of the cache, whole prompts, are packed; all others read pages.
    assert set(names) == {"paged_attention", "varlen_attention"}
    paged = [kwargs for name, kwargs in called if name == "paged_attention"]
    assert {"cu_seqlens_q" in kwargs for kwargs in paged} == {True, False}
    assert len(paged) > names.count("varlen_attention")


@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "GptOss"])
@torch.no_grad()
def test_windows_caps_and_sinks(models: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against each prompt alone: `sdpa` has neither caps nor sinks."""
    model = models[family]
    expected = [model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0, len(p) :] for p in prompts()]
    called = recorded(monkeypatch)
    with using(model, "portattn"):
        found = generate(model)
    assert found == [row.tolist() for row in expected]
    windows = {(name, kwargs["window"]) for name, kwargs in called}
    assert ("varlen_attention", (WINDOW - 1, 0)) in windows
    assert (("paged_attention", None) in windows) == (family != "Mistral")  # all of whose layers have a window


@pytest.mark.parametrize(("family", "error"), [("Mistral", {"window": None}), ("Llama", {"causal": False})])
@torch.no_grad()
def test_planted_errors_show(
    models: dict[str, Any], family: str, error: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with using(models[family], "portattn") as model:
        right = generate(model)
        recorded(monkeypatch, **error)
        assert generate(model) != right


@torch.no_grad()
def test_pages_are_looked_up_once_a_forward(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[torch.Tensor] = []
    real = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", lambda *a, **k: tables.append(a[3]) or real(*a, **k))
    with using(models["Llama"], "portattn") as model:
        generate(model)
    assert len(tables) > 4
    assert len(tables) % 2 == 0
    pairs = list(zip(tables[::2], tables[1::2], strict=True))  # two layers
    assert all(first is second for first, second in pairs)
    assert len({id(first) for first, _ in pairs}) == len(pairs)


@torch.no_grad()
def test_the_cache_of_a_forward_that_is_run_again_is_looked_up_again() -> None:
    """As a CUDA graph is captured: the same arguments, whose positions have changed in place."""
    from portattn.integrations.transformers_batching import _pages_of

    class Allocator:
        tokens_per_page, layer_indices = 4, (0, 1)

    allocator, begin = Allocator(), torch.tensor([0, 5, 6], dtype=torch.int32)
    positions = torch.tensor([8, 9, 10, 11, 20, 32])
    first = _pages_of(allocator, 0, positions, begin, 5)
    assert first.table.tolist() == [[2, 5], [8, 8]]
    assert first.lengths.tolist() == [5, 1]
    positions += 4
    assert _pages_of(allocator, 1, positions, begin, 5) is first
    assert _pages_of(allocator, 0, positions, begin, 5).table.tolist() == [[3, 6], [9, 9]]


def test_what_a_batch_cannot_have_is_refused(models: dict[str, Any]) -> None:
    layer, forward = models["Llama"].model.layers[0].self_attn, AttentionInterface()["portattn"]
    q, kv, mask = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), compact_mask(1, 5, 5)

    class Cache:
        layer_to_allocator = None

        def update(self) -> None: ...

    lengths = torch.tensor([0, 5])
    batch = {
        "cache": Cache(), "cu_seq_lens_q": lengths, "cu_seq_lens_k": {"full_attention": lengths}, "max_length_q": 5,
        "max_length_k": {"full_attention": 5},
    }  # fmt: skip
    written = compact_mask(1, 5, 5, mask_function=lambda b, h, q, kv: kv != 2)
    for changed, message in (
        ({"block_table": torch.zeros(1, 1, 1)}, "block_table .* is for FlashAttention alone"),
        ({"dropout": 0.5}, "cache is 'Cache', but continuous batching has no biases or dropout"),
        ({"cu_seq_lens_k": lengths}, "cu_seq_lens_k .* gives lengths of each kind of layer"),
        ({"attention_mask": written}, "attention_mask .* is causal and has no mask functions"),
    ):
        arguments = {**batch, "attention_mask": mask, **changed}
        with pytest.raises(portattn.ArgumentError, match=message):
            forward(layer, q, kv, kv, arguments.pop("attention_mask"), **arguments)


def test_other_implementations_are_judged_as_ever() -> None:
    model = build("Llama")
    AttentionInterface.register("somebody", AttentionInterface()["sdpa"])
    try:
        with using(model, "somebody"), pytest.raises(ValueError, match=r"somebody.* is not supported"):
            model.generate_batch([tokens()[0].tolist()], progress_bar=False)
    finally:
        del AttentionInterface._global_mapping["somebody"]
