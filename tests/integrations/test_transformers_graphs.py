"""torch.compile without graph breaks, generate() with a static cache and a compiled forward, and torch.export: each
equal to the eager model, bit for bit where the same operations run."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import BATCH, LENGTH, TOLERANCE, VOCABULARY, WINDOW, build, difference, padding, plant, tokens, using
from tiny_models import transformers as transformers
from transformers import AttentionInterface
from transformers import masking_utils as hf

import portattn
from portattn.api import ops
from portattn.integrations.transformers_mask import compact_mask

pytestmark = pytest.mark.transformers
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model: Any) -> Any:
    """Without inductor, which would take minutes and change nothing of what is traced."""
    return torch.compile(model, fullgraph=True, backend="eager", dynamic=False)


@pytest.mark.parametrize(("family", "name"), [
    ("Llama", "none"), ("Llama", "both"), ("Mistral", "left"), ("Gemma2", "left"), ("GptOss", "none")
])  # fmt: skip
@torch.no_grad()
def test_a_compiled_forward(models: dict[str, Any], family: str, name: str) -> None:
    """Windows, caps and sinks; with a cache, and without, where transformers looks for packed rows."""
    model, mask = models[family], padding(name)
    eager = model(tokens(), attention_mask=mask).logits
    with using(model, "portattn"):
        ours = model(tokens(), attention_mask=mask).logits
        for use_cache in (True, False):
            torch._dynamo.reset()
            out = compiled(model)(tokens(), attention_mask=mask, use_cache=use_cache).logits
            assert difference(out, eager, mask) < TOLERANCE
            if use_cache:  # or a written mask stands for what causality says
                assert torch.equal(out, ours)


@pytest.mark.parametrize("cache", [True, False])
@torch.no_grad()
def test_chunks_in_a_compiled_forward(cache: bool) -> None:
    model, mask = build("Llama4"), padding("left")
    eager = model(tokens(), attention_mask=mask).logits
    with using(model, "portattn"):
        out = compiled(model)(tokens(), attention_mask=mask, use_cache=cache).logits
    assert difference(out, eager, mask) < TOLERANCE


@torch.no_grad()
def test_packed_rows_in_a_compiled_forward(models: dict[str, Any]) -> None:
    model, where = models["Llama"], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]]).expand(BATCH, -1)
    eager = model(tokens(), position_ids=where, use_cache=False).logits
    with using(model, "portattn"):
        out = compiled(model)(tokens(), position_ids=where, use_cache=False).logits
    assert difference(out, eager, None) < TOLERANCE


@pytest.mark.parametrize("name", ["none", "right"])
@torch.no_grad()
def test_a_compiled_encoder(name: str) -> None:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **SMALL)).eval()
    mask = padding(name)
    model.set_attn_implementation("eager")
    eager = model(tokens(), attention_mask=mask).last_hidden_state
    model.set_attn_implementation("portattn")
    assert difference(compiled(model)(tokens(), attention_mask=mask).last_hidden_state, eager, mask) < TOLERANCE


def test_gradients_of_a_compiled_model() -> None:
    model, mask = build("Llama").train(), padding("left")
    labels = tokens().masked_fill(mask.cumsum(1) < 2, -100)  # a row of padding, which differs, predicts nothing
    found = {}
    for implementation in ("eager", "portattn"):
        model.zero_grad()
        with using(model, implementation):
            run = model if implementation == "eager" else torch.compile(model, fullgraph=True, backend="aot_eager")
            run(tokens(), attention_mask=mask, labels=labels).loss.backward()
        found[implementation] = [p.grad.clone() for p in model.parameters()]
    for eager, ours in zip(found["eager"], found["portattn"], strict=True):
        assert (ours - eager).abs().max() <= 1e-4 * eager.abs().max() + 1e-6


@torch.no_grad()
def test_holes_in_a_compiled_forward_give_nan(models: dict[str, Any]) -> None:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 5] = 0
    with using(models["Llama"], "portattn") as model:
        out = compiled(model)(tokens(), attention_mask=mask).logits
    assert out.isnan().flatten(1).all(1).tolist() == [False, True, False]


# Mask function -> whether it is causal and its window; None for what is written out.
WINDOWS: dict[str, tuple[Any, tuple[bool, Any] | None]] = {
    "sliding": (hf.sliding_window_causal_mask_function(4), (True, (3, None))),
    "bidirectional sliding": (hf.sliding_window_bidirectional_mask_function(3), (False, (3, 3))),
    "a window without causality": (hf.sliding_window_overlay(4), (False, (3, None))),
    "causal": (hf.causal_mask_function, (True, None)), "both ways": (hf.bidirectional_mask_function, (False, None)),
    "two windows": (
        hf.and_masks(hf.sliding_window_causal_mask_function(6), hf.sliding_window_overlay(3)), (True, (2, None)),
    ),
    "an offset": (hf.add_offsets_to_mask_function(hf.causal_mask_function, 2, 1), (False, (None, 1))),
    "a union": (hf.or_masks(hf.sliding_window_overlay(4), hf.causal_mask_function), None),
    "a part of somebody's": (hf.and_masks(hf.causal_mask_function, lambda b, h, q, kv: q - kv == 1), None),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_masks_are_read_in_a_graph_as_outside(name: str) -> None:
    """What dynamo cannot look into is found out by calling it; what is not understood is written out."""
    function, expected = WINDOWS[name]
    made: list[Any] = []

    def make(zeros: torch.Tensor) -> torch.Tensor:
        mask = compact_mask(1, 12, 12, mask_function=function, use_vmap=False, allow_is_causal_skip=True)
        made.append(None if mask.written_out else (mask.causal, mask.window))
        return zeros if mask.mask is None else zeros + mask.mask

    out = torch.compile(make, fullgraph=True, backend="eager")(torch.zeros(1, 1, 12, 12))
    assert made == [expected]
    if expected is None:
        assert torch.equal(out.bool(), hf.sdpa_mask(1, 12, 12, mask_function=function, allow_is_causal_skip=False))


@pytest.mark.parametrize(("family", "name"), [("Llama", "none"), ("Llama", "left"), ("Mistral", "left")])
@torch.no_grad()
def test_generate_with_a_static_cache_and_a_compiled_forward(models: dict[str, Any], family: str, name: str,
        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The tokens of `sdpa`, by no more graphs."""
    model = models[family]
    arguments: dict[str, Any] = {
        "attention_mask": padding(name), "max_new_tokens": 4, "do_sample": False, "cache_implementation": "static",
    }  # fmt: skip
    with using(model, "sdpa"):
        expected = model.generate(tokens(), disable_compile=True, **arguments)
    graphs = {}
    for implementation in ("sdpa", "portattn"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        config = transformers.CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=False)
        config._compile_all_devices = True  # by itself only on accelerators
        for attribute in ("_compiled_call", "_last_compile_config"):
            monkeypatch.delattr(model, attribute, raising=False)
        with using(model, implementation):
            out = model.generate(tokens(), compile_config=config, **arguments)
        assert torch.equal(out, expected)
        assert not torch._dynamo.utils.counters["graph_break"]
        graphs[implementation] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # A static cache with a window counts its steps on the host.
    assert 1 <= graphs["portattn"] <= graphs["sdpa"]


def exported(model: Any, strict: bool, lengths: dict[str, Any], **given: Any) -> Any:
    shapes = {name: lengths.get(name) for name in given}
    with torch.no_grad():
        program = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=strict)
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("portattn.attention.default") == 2  # layers
    return program.module()


@pytest.mark.parametrize(("family", "name", "strict"), [
    ("Llama", "none", False), ("Llama", "left", True), ("Mistral", "none", True), ("Mistral", "left", False)
])  # fmt: skip
@torch.no_grad()
def test_an_exported_model(models: dict[str, Any], family: str, name: str, strict: bool) -> None:
    model, mask = models[family], padding(name)
    other = tokens(21)[:2]
    given: dict[str, Any] = {"input_ids": tokens(), "use_cache": False}
    later: dict[str, Any] = {"input_ids": other, "use_cache": False}
    if mask is not None:
        given["attention_mask"], later["attention_mask"] = mask, torch.ones_like(other)
        later["attention_mask"][0, :6] = 0
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    lengths = {"input_ids": dynamic, "attention_mask": dynamic}
    with using(model, "portattn"):
        program = exported(model, strict, lengths, **given)
    for arguments in (given, later):
        eager = model(**arguments).logits
        assert difference(program(**arguments).logits, eager, arguments.get("attention_mask")) < TOLERANCE


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_an_exported_vision_model(strict: bool) -> None:
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **SMALL)).eval()
    model.set_attn_implementation("portattn")
    program = exported(model, strict, {"pixel_values": {0: torch.export.Dim.DYNAMIC}},
        pixel_values=torch.randn(2, 3, 16, 16))  # fmt: skip
    images = torch.randn(5, 3, 16, 16)
    model.set_attn_implementation("eager")
    assert difference(program(pixel_values=images).last_hidden_state, model(images).last_hidden_state, None) < TOLERANCE


@torch.no_grad()
def test_what_is_the_same_for_all_layers_is_put_together_once(models: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from portattn.integrations.transformers_mask import CompactMask

    lengths, real = [], ops.attention
    monkeypatch.setattr(ops, "attention", lambda *a, **k: lengths.append(k["seqlens_k"]) or real(*a, **k))
    asked, written = [], CompactMask.written.fget
    monkeypatch.setattr(CompactMask, "written", property(lambda mask: asked.append(mask) or written(mask)))
    with using(models["Llama"], "portattn") as model:
        model(tokens(), attention_mask=padding("left"))
    assert len(lengths) == 2
    assert lengths[0] is lengths[1]
    assert len(asked) == 1


# Continuous batching: generate_batch gives the tokens of `sdpa`, on the paged operation where pages are in order.
LENGTHS, NEW = (9, 2, 5, 1, 14), 7


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def generate(model: Any, **settings: Any) -> list[list[int]]:
    """Of all prompts together: more than a batch takes, so that prompts are cut and mixed with decoding."""
    of_page = {"page_size", "block_size"} & inspect.signature(transformers.ContinuousBatchingConfig).parameters.keys()
    sizes = {"num_blocks": 48, "max_batch_tokens": 12, max(of_page): 4}  # block_size is the name up to 5.17
    config = transformers.ContinuousBatchingConfig(**{**sizes, **settings})
    found = model.generate_batch(prompts(), generation_config=transformers.GenerationConfig(max_new_tokens=NEW,
        do_sample=False, eos_token_id=-1, pad_token_id=0), continuous_batching_config=config,
        progress_bar=False)  # fmt: skip
    assert (len(found), [one.error for one in found.values()]) == (len(LENGTHS), [None] * len(LENGTHS))
    order = {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
    return [order[tuple(prompt)] for prompt in prompts()]


@pytest.mark.parametrize("sharing", [True, False])
@torch.no_grad()
def test_generate_batch(models: dict[str, Any], sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with using(models["Llama"], "sdpa") as model:
        expected = generate(model)
        alone = [model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0, len(p) :] for p in prompts()]
    assert expected == [row.tolist() for row in alone]
    called = plant(monkeypatch)
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
    called = plant(monkeypatch)
    with using(model, "portattn"):
        found = generate(model)
    assert found == [row.tolist() for row in expected]
    windows = {(name, kwargs["window"]) for name, kwargs in called}
    assert ("varlen_attention", (WINDOW - 1, 0)) in windows
    assert (("paged_attention", None) in windows) == (family != "Mistral")  # all of whose layers have a window


@pytest.mark.parametrize(("family", "error"), [("Mistral", {"window": None}), ("Llama", {"causal": False})])
@torch.no_grad()
def test_planted_errors_show(models: dict[str, Any], family: str, error: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with using(models[family], "portattn") as model:
        right = generate(model)
        plant(monkeypatch, **error)
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
    from portattn.integrations.transformers import _Group, _pages_of

    cache, begin = torch.nn.Identity(), torch.tensor([0, 5, 6], dtype=torch.int32)
    of_first, of_second = (_Group(0, "full_attention", begins, 4, None) for begins in (True, False))
    positions = torch.tensor([8, 9, 10, 11, 20, 32])
    first = _pages_of(cache, of_first, positions, begin, 5)
    assert (first.table.tolist(), first.lengths.tolist()) == ([[2, 5], [8, 8]], [5, 1])
    positions += 4
    assert _pages_of(cache, of_second, positions, begin, 5) is first
    assert _pages_of(cache, of_first, positions, begin, 5).table.tolist() == [[3, 6], [9, 9]]


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
    for changed, message in (({"block_table": torch.zeros(1, 1, 1)}, "block_table .* is for FlashAttention alone"),
            ({"dropout": 0.5}, "cache is 'Cache', but continuous batching has no biases or dropout"),
            ({"cu_seq_lens_k": None}, "cu_seq_lens_k .* gives beginnings of queries and keys"),
            ({"attention_mask": written}, "attention_mask .* is causal and has no mask functions")):  # fmt: skip
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
