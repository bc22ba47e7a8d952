"""transformers models with portattn give what they give with `eager`: logits, greedy tokens and gradients; and what
lengths cannot say raises.

`validate="always"` reads masks back, as is done on a CPU; "never" takes the way that decoding on an accelerator takes.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import portattn
from portattn import ops
from portattn.config import Settings

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")

import transformers  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache  # noqa: E402
from transformers import masking_utils as hf  # noqa: E402

from portattn.integrations import transformers_mask  # noqa: E402
from portattn.integrations.transformers import Registration, register  # noqa: E402
from portattn.integrations.transformers_mask import LengthMask, length_mask  # noqa: E402

# Both implementations compute in float32 on a CPU, in different orders of summation. Logits are of size 1 to 5, seen
# differences below 5e-6; the planted errors below differ by more than 0.05.
TOLERANCE = 2e-5
PLANTED = 0.05
VOCABULARY, BATCH, LENGTH = 64, 3, 11
# initializer_range makes scores vary by several units: with the default 0.02 every key would weigh the same, and no
# error in a mask could be seen.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = ("Llama", "Qwen3")
PADDINGS = {
    "none": None,
    "ones": ((0, 0), (0, 0), (0, 0)),
    "left": ((4, 0), (0, 0), (1, 0)),
    "right": ((0, 3), (0, 0), (0, 6)),
    "both": ((2, 3), (0, 0), (5, 1)),
    "an empty row": ((0, 0), (11, 0), (3, 0)),
}


def build(family: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are an order of magnitude slower when threads share them out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {family: build(family) for family in FAMILIES}


@pytest.fixture(autouse=True)
def registration() -> Iterator[Registration]:
    handle = register()
    yield handle
    handle.remove()


@contextlib.contextmanager
def using(model: Any, implementation: str) -> Iterator[Any]:
    model.set_attn_implementation(implementation)
    yield model
    model.set_attn_implementation("eager")


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


# ---------------------------------------------------------------- logits


@pytest.mark.parametrize("validate", ["always", "never"])
@pytest.mark.parametrize("name", PADDINGS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_of_a_dense_forward(models: dict[str, Any], family: str, name: str, validate: str) -> None:
    model, ids, mask = models[family], tokens(), padding(name)
    arguments = {"attention_mask": mask, "position_ids": positions(mask), "use_cache": False}
    eager = model(ids, **arguments).logits
    with using(model, "portattn"), portattn.settings(validate=validate):
        ours = model(ids, **arguments).logits
    assert difference(ours, eager, mask) < TOLERANCE
    plan = portattn.last_plan()
    assert plan.problem.op == "attention"
    # Read back, a mask of ones is no padding at all, and the plain causal kernels may run.
    assert plan.problem.padded == (name != "none" and (name != "ones" or validate == "never"))


@pytest.mark.parametrize(
    "plant",
    [{"leftpad_k": None, "leftpad_q": None}, {"causal": False}, {"scale": 1.0}, {"seqlens_k": None}],
    ids=lambda plant: next(iter(plant)),
)
@torch.no_grad()
def test_planted_errors_show_in_a_dense_forward(
    models: dict[str, Any], plant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, mask = models["Llama"], tokens(), padding("both")
    eager = model(ids, attention_mask=mask).logits
    real = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *args, **kwargs: real(*args, **{**kwargs, **plant}))
    with using(model, "portattn"):
        try:
            ours = model(ids, attention_mask=mask).logits
        except portattn.ArgumentError:  # lengths that no longer fit are refused by the op itself
            assert "leftpad_k" in plant or "seqlens_k" in plant
        else:
            assert difference(ours, eager, mask) > PLANTED


@torch.no_grad()
def test_lengths_are_computed_once_a_forward(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = transformers_mask._runs
    monkeypatch.setattr(transformers_mask, "_runs", lambda mask: seen.append(mask.shape) or real(mask))
    model = models["Llama"]
    assert model.config.num_hidden_layers == 2
    with using(model, "portattn"):
        model(tokens(), attention_mask=padding("left"))
    assert seen == [(BATCH, LENGTH)]


@torch.no_grad()
def test_bfloat16_keeps_its_dtype() -> None:
    model = build("Llama").to(torch.bfloat16)
    mask = padding("left")
    eager = model(tokens(), attention_mask=mask).logits
    with using(model, "portattn"):
        ours = model(tokens(), attention_mask=mask).logits
    assert ours.dtype == torch.bfloat16
    exact = build("Llama")(tokens(), attention_mask=mask).logits
    # The budget of every op: no further from exact arithmetic than twice torch's own distance in this dtype.
    assert difference(ours.float(), exact, mask) <= 2 * difference(eager.float(), exact, mask)


# ---------------------------------------------------------------- caches


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


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=LENGTH + 6),
}


@pytest.mark.parametrize("validate", ["always", "never"])
@pytest.mark.parametrize("name", ["none", "left"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_chunked_prefill_and_decode(models: dict[str, Any], family: str, cache: str, name: str, validate: str) -> None:
    model, ids, mask = models[family], tokens(), padding(name)
    eager = model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    with using(model, "portattn"), portattn.settings(validate=validate):
        ours = in_chunks(model, ids, mask, CACHES[cache](model), (5, 4, 1, 1))
    assert difference(ours, eager, mask) < TOLERANCE
    plan = portattn.last_plan()
    assert plan.problem.op == "decode_attention"
    # A static cache hands over all its rows. Where nothing is read back, lengths on the device say what is in use.
    device_lengths = validate == "never" and (cache == "static" or name == "left")
    assert plan.problem.seqlens_k == (device_lengths or name == "left")
    assert plan.problem.seq_k == (LENGTH + 6 if cache == "static" and validate == "never" else LENGTH)


@torch.no_grad()
def test_a_planted_alignment_error_shows_in_chunked_prefill(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, mask = models["Llama"], tokens(), padding("left")
    eager = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    real = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *args, **kwargs: real(*args, **{**kwargs, "causal": "top_left"}))
    with using(model, "portattn"):
        ours = in_chunks(model, ids, mask, CACHES["dynamic"](model), (5, 6))
    assert difference(ours[:, :5], eager[:, :5], mask[:, :5]) < TOLERANCE  # there both alignments are one
    assert difference(ours, eager, mask) > PLANTED


@pytest.mark.parametrize("cache", CACHES)
@torch.no_grad()
def test_a_few_queries_over_a_longer_cache_are_decoding(models: dict[str, Any], cache: str) -> None:
    model, ids = models["Llama"], tokens()
    eager = model(ids).logits
    with using(model, "portattn"):
        ours = in_chunks(model, ids, padding("ones"), CACHES[cache](model), (7, 4))
    assert difference(ours, eager, None) < TOLERANCE
    problem = portattn.last_plan().problem
    assert (problem.op, problem.seq_q, problem.causal) == ("decode_attention", 4, "bottom_right")


STATIC, CHUNKS = {"cache_implementation": "static"}, {"prefill_chunk_size": 4}
GREEDY = [
    *[(f, o, "left", v) for f in FAMILIES for o in ({}, STATIC) for v in ("always", "never")],
    ("Llama", {}, "ones", "never"),
    ("Qwen3", STATIC, "ones", "always"),
    ("Llama", CHUNKS, "left", "always"),  # generate() compiles a chunk's forward, which takes seconds
]


@pytest.mark.parametrize(("family", "options", "name", "validate"), GREEDY)
@torch.no_grad()
def test_greedy_tokens(models: dict[str, Any], family: str, options: dict[str, Any], name: str, validate: str) -> None:
    model, mask = models[family], padding(name)
    ids = tokens().masked_fill(mask == 0, 0)
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **options}
    eager = model.generate(ids, **arguments)
    with using(model, "portattn"), portattn.settings(validate=validate):
        ours = model.generate(ids, **arguments)
    assert ours.shape == (BATCH, LENGTH + 8)
    assert torch.equal(ours, eager)
    assert len(set(eager[:, LENGTH:].flatten().tolist())) > 6  # not one token over and over
    assert portattn.last_plan().problem.op == "decode_attention"


@torch.no_grad()
def test_left_padding_changes_no_tokens(models: dict[str, Any]) -> None:
    """A padded row continues as it does alone: seen from outside, without `eager` as the judge."""
    model, mask = models["Llama"], padding("left")
    ids = tokens().masked_fill(mask == 0, 0)
    with using(model, "portattn"):
        batch = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        alone = model.generate(ids[:1, 4:], max_new_tokens=8, do_sample=False)
    assert torch.equal(batch[0, LENGTH:], alone[0, LENGTH - 4 :])


# ---------------------------------------------------------------- windows


WINDOW = 14


@pytest.mark.parametrize("validate", ["always", "never"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_window_that_its_cache_keeps(cache: str, validate: str) -> None:
    """The prompt fits the window; decoding runs past it, with a cache that drops what the window hides."""
    model, mask = build("Mistral", sliding_window=WINDOW), padding("left")
    options = {"cache_implementation": "static"} if cache == "static" else {}
    arguments = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, **options}
    eager = model.generate(tokens(), **arguments)
    with using(model, "portattn"), portattn.settings(validate=validate):
        ours = model.generate(tokens(), **arguments)
    assert torch.equal(ours, eager)
    assert LENGTH + 10 > WINDOW
    assert portattn.last_plan().problem.seq_k == WINDOW


@torch.no_grad()
def test_a_window_that_hides_keys_raises() -> None:
    model = build("Mistral", sliding_window=8)
    with using(model, "portattn"):
        model(tokens(8))
        with pytest.raises(portattn.ArgumentError, match=r"sliding_window is 8, but there are 9 keys.*'eager'"):
            model(tokens(9))
        with pytest.raises(portattn.ArgumentError, match="sliding_window is 8"):
            in_chunks(model, tokens(), None, DynamicCache(), (8, 3))  # a cache that keeps everything


@torch.no_grad()
def test_patterns_wide_enough_to_hide_nothing() -> None:
    pattern = hf.chunked_causal_mask_function(12, torch.zeros(BATCH, dtype=torch.long))
    assert not length_mask(BATCH, 12, 12, mask_function=pattern).padded
    with pytest.raises(portattn.ArgumentError, match="attention_chunk_size is 12, but there are 13 keys"):
        length_mask(BATCH, 13, 13, mask_function=pattern)
    with pytest.raises(portattn.ArgumentError, match="attention_chunk_size is 12, but there are 13 keys"):
        length_mask(BATCH, 1, 12, q_offset=12, kv_offset=1, mask_function=pattern)
    with pytest.raises(portattn.ArgumentError, match=r"mask is '.*sliding_window_overlay.*', but only causal masks"):
        length_mask(BATCH, 12, 12, mask_function=hf.sliding_window_overlay(99))  # a window, and no causality


# ---------------------------------------------------------------- the lengths themselves


@pytest.mark.parametrize("validate", ["always", "never"])
def test_lengths_say_what_the_boolean_mask_says(validate: str) -> None:
    """Random offsets, caches and paddings: the pairs that lengths allow are sdpa_mask's, on rows of valid queries."""
    generator = torch.Generator().manual_seed(2)
    checked = 0
    for _ in range(200):
        past, q_length, spare = (int(torch.randint(0, 6, (), generator=generator)) for _ in range(3))
        q_length += 1
        kv_offset = int(torch.randint(0, past + 1, (), generator=generator))
        stop = past + q_length
        kv_length = stop - kv_offset + spare
        valid = torch.zeros(BATCH, stop + spare, dtype=torch.bool)
        for row in range(BATCH):
            first, end = torch.randint(0, stop + spare + 1, (2,), generator=generator).sort().values.tolist()
            valid[row, first : max(end, past + 1)] = True
        tensor_offset = torch.tensor(past) if spare else past
        expected = hf.sdpa_mask(
            BATCH, q_length, kv_length, past, kv_offset, attention_mask=valid, allow_is_causal_skip=False
        )[:, 0]
        with portattn.settings(validate=validate):
            mask = length_mask(BATCH, q_length, kv_length, tensor_offset, kv_offset, attention_mask=valid)
        i, j = torch.arange(q_length)[None, :, None], torch.arange(kv_length)[None, None, :]
        zero = torch.zeros(BATCH, dtype=torch.int32)

        def bounds(pad: Any, count: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            first = zero if pad is None else pad  # noqa: B023
            end = torch.full_like(zero, size) if count is None else first + count  # noqa: B023
            return first[:, None, None], end[:, None, None]

        k_first, k_end = bounds(mask.leftpad_k, mask.seqlens_k, mask.kv_used)
        q_first, q_end = bounds(mask.leftpad_q, mask.seqlens_q, q_length)
        allowed = (j >= k_first) & (j < k_end) & (j <= i + k_end - q_end)
        rows = valid[:, past:stop]
        assert torch.equal(allowed[rows], expected[rows])
        assert torch.equal(((i >= q_first) & (i < q_end))[:, :, 0], rows)
        checked += int(rows.sum())
    assert checked > 1000


def test_a_decoding_step_reads_nothing_back() -> None:
    """On the meta device there is nothing to read: any synchronisation would raise."""
    mask = torch.ones(BATCH, 20, dtype=torch.bool, device="meta")
    offset = torch.tensor(19, device="meta")
    made = length_mask(BATCH, 1, 32, offset, attention_mask=mask, device="meta")
    assert made.seqlens_k.shape == made.leftpad_k.shape == (BATCH,)
    assert length_mask(BATCH, 1, 32, offset, device="meta").seqlens_k.dtype == torch.int32
    with pytest.raises((RuntimeError, NotImplementedError)):  # so the line above can fail
        length_mask(BATCH, 2, 32, offset, attention_mask=mask, device="meta")


def test_when_masks_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    seen = {}
    for validate in ("auto", "always", "never"):
        monkeypatch.setattr(transformers_mask, "current", lambda value=validate: Settings(validate=value))
        asked = [(cpu, 1), (cpu, 5), (gpu, 1), (gpu, 5)]
        seen[validate] = [transformers_mask.reads_back(device, queries) for device, queries in asked]
    assert seen == {"auto": [True, True, False, True], "always": [True] * 4, "never": [False] * 4}


@torch.no_grad()
def test_a_broken_mask_that_is_not_read_back_gives_nan(models: dict[str, Any]) -> None:
    model, mask = models["Llama"], torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 5] = 0
    eager = model(tokens(), attention_mask=mask).logits
    with using(model, "portattn"), portattn.settings(validate="never"):
        ours = model(tokens(), attention_mask=mask).logits
        # A static cache's offset is not known on the host, so a mask too short for it shows on the device only.
        ones = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        flaws = [length_mask(BATCH, 1, 16, torch.tensor(past), attention_mask=ones).flaw for past in (10, 11)]
    assert ours[1].isnan().all()
    assert difference(ours[::2], eager[::2], None) < TOLERANCE
    assert [flaw.isnan().all().item() for flaw in flaws] == [False, True]


def test_a_length_mask_moves_between_devices() -> None:
    mask = length_mask(BATCH, LENGTH, LENGTH, attention_mask=padding("left").bool())
    moved = mask.to("meta", non_blocking=True)
    assert moved.seqlens_k.device.type == moved.leftpad_q.device.type == "meta"
    assert mask.seqlens_k.device.type == "cpu"
    assert moved.shape == mask.shape == (BATCH, 1, LENGTH, LENGTH)
    assert mask.to(torch.float16) is mask
    assert mask.contiguous() is mask
    with pytest.raises(TypeError):
        mask[:, :, :, :2]  # a model that slices its mask must not go on


# ---------------------------------------------------------------- refusals


def holes() -> torch.Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 5] = 0
    return mask


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "holes": (
        {"attention_mask": holes()},
        r"attention_mask\[1\] is '11111011111', but must be one run of ones.*attn_implementation='eager' or 'sdpa'",
    ),
    "4-D mask": (
        {"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
        r"attention_mask is 'tensor of shape \(3, 1, 11, 11\)', but a mask of one's own .*'eager' or 'sdpa'",
    ),
    "packed": (
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]]), "use_cache": False},
        r"mask is 'packed sequences \(position_ids that start again.*only causal masks are supported",
    ),
    "packed with lengths": (
        {"cu_seq_lens_q": torch.tensor([0, 5, 11])},
        r"cu_seq_lens_q is 'tensor of shape \(3,\)', but packed sequences are not supported",
    ),
    "weights": ({"output_attentions": True}, "output_attentions is True, but weights are never written out"),
    "short mask": (
        {"attention_mask": torch.ones(BATCH, LENGTH - 1, dtype=torch.long)},
        r"attention_mask.shape\[1\] is 10, but the cache and this input hold 11 tokens",
    ),
    "batch": (
        {"attention_mask": torch.ones(1, LENGTH, dtype=torch.long)},
        r"attention_mask.shape is \(1, 11\), but must be \(3, tokens so far\)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
@torch.no_grad()
def test_refusals(models: dict[str, Any], case: str) -> None:
    arguments, message = REFUSALS[case]
    with using(models["Llama"], "portattn") as model, pytest.raises(portattn.ArgumentError, match=message):
        model(tokens(), **arguments)


@torch.no_grad()
def test_generating_from_a_right_padded_prompt_raises(models: dict[str, Any]) -> None:
    with using(models["Llama"], "portattn") as model, pytest.raises(portattn.ArgumentError, match="pad it left"):
        model.generate(tokens(), attention_mask=padding("right"), max_new_tokens=3, do_sample=False)


@torch.no_grad()
def test_softcap_raises() -> None:
    model = build("Gemma2", attn_logit_softcapping=50.0)
    message = r"softcap is 50\.0, but capped scores are not supported yet; use attn_implementation='eager'$"
    with using(model, "portattn"), pytest.raises(portattn.ArgumentError, match=message):
        model(tokens())


@torch.no_grad()
def test_sinks_raise() -> None:
    model = build("GptOss", num_local_experts=2, num_experts_per_tok=1)
    message = r"s_aux is 'tensor of shape \(4,\)', but attention sinks are not supported yet"
    with using(model, "portattn"), pytest.raises(portattn.ArgumentError, match=message):
        model(tokens())


@torch.no_grad()
def test_attention_in_both_directions_raises() -> None:
    model = build("Llama", is_causal=False)
    message = "mask is 'attention in both directions', but only causal masks are supported"
    with using(model, "portattn"), pytest.raises(portattn.ArgumentError, match=message):
        model(tokens())


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"or_mask_function": lambda b, h, q, kv: kv < 3}, "a union of masks"),
        ({"and_mask_function": lambda b, h, q, kv: kv > 3}, "<lambda>"),
    ],
    ids=["or", "and"],
)
def test_overlays_raise(models: dict[str, Any], overlay: dict[str, Any], message: str) -> None:
    with using(models["Llama"], "portattn") as model, pytest.raises(portattn.ArgumentError, match=message):
        hf.create_causal_mask(
            config=model.config,
            inputs_embeds=torch.empty(BATCH, LENGTH, 32),
            attention_mask=None,
            past_key_values=None,
            **overlay,
        )


def test_a_layer_without_a_mask_or_with_another_raises(models: dict[str, Any]) -> None:
    layer = models["Llama"].model.layers[0].self_attn
    forward = AttentionInterface()["portattn"]
    q, kv = torch.randn(BATCH, 4, 5, 8), torch.randn(BATCH, 2, 5, 8)
    with pytest.raises(portattn.ArgumentError, match="does not make its masks through AttentionMaskInterface"):
        forward(layer, q, kv, kv, None)
    with pytest.raises(
        portattn.ArgumentError, match=r"made for \(3, 1, 5, 6\)', but this layer's scores are \(3, 1, 5, 5\)"
    ):
        forward(layer, q, kv, kv, LengthMask(BATCH, 5, 6, 6))
    with pytest.raises(portattn.ArgumentError, match=r"position_bias is .*additive bias"):
        forward(layer, q, kv, kv, LengthMask(BATCH, 5, 5, 5), position_bias=torch.zeros(1, 4, 5, 5))


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["ones", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(models: dict[str, Any], family: str, name: str) -> None:
    model, ids, mask = models[family], tokens(), padding(name)
    # The token after left padding is predicted by a padding row, which means nothing in either implementation.
    predicted = mask.bool() & mask.roll(1, dims=1).bool()
    labels = ids.masked_fill(~predicted, -100)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(ids, attention_mask=mask, position_ids=positions(mask), labels=labels).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    eager = gradients()
    with using(model.train(), "portattn"):
        ours = gradients()
    model.eval().zero_grad()
    for parameter, gradient in ours.items():
        scale = eager[parameter].abs().max().item()
        assert scale > 1e-4, parameter  # a gradient that is zero would prove nothing
        torch.testing.assert_close(gradient, eager[parameter], rtol=0, atol=1e-4 * scale, msg=parameter)
    assert portattn.last_plan().problem.needs_grad


def test_training_on_a_gpu_says_that_it_falls_back(models: dict[str, Any]) -> None:
    """The plan for the very problem that a training step asks for, on a GPU: not the core kernel, and why."""
    with using(models["Llama"].train(), "portattn") as model:
        model(tokens(), attention_mask=padding("left"))
    models["Llama"].eval()
    h100 = portattn.Target.parse("cuda:sm_90", toolchain="triton==3.6.0")
    plan = portattn.plan(portattn.last_plan().problem, h100)
    assert plan.fell_back
    assert plan.rejected[0].path == "triton"
    assert "grad" in plan.rejected[0].reason


def test_dropout_is_applied_in_training_only() -> None:
    model = build("Llama", attention_dropout=0.5)
    with using(model, "portattn"), torch.no_grad():
        still = model(tokens()).logits
        model.train()
        torch.manual_seed(3)
        first, second = model(tokens()).logits, model(tokens()).logits
        torch.manual_seed(3)
        again = model(tokens()).logits
        several = in_chunks(model, tokens(), None, CACHES["dynamic"](model), (LENGTH - 1, 1))
        decoding = portattn.last_plan().problem
    assert difference(still, model.eval()(tokens()).logits, None) < TOLERANCE
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert decoding.dropout  # in a decoding step too
    assert decoding.seq_q == 1
    assert difference(several[:, -1:], still[:, -1:], None) > PLANTED


# ---------------------------------------------------------------- compiling, kernels


@torch.no_grad()
def test_a_compiled_model_steps_around_the_call() -> None:
    model, mask = build("Llama", num_hidden_layers=1), padding("left")
    eager = model(tokens(), attention_mask=mask, use_cache=False).logits
    with using(model, "portattn"):
        compiled = torch.compile(model.forward, backend="eager")
        ours = compiled(tokens(), attention_mask=mask, use_cache=False).logits
    torch.compiler.reset()
    assert difference(ours, eager, mask) < TOLERANCE


@pytest.mark.interpreter
@torch.no_grad()
def test_the_kernels_themselves(models: dict[str, Any]) -> None:
    """Under Triton's interpreter: left padding, a chunk, and a decoding step over a static cache."""
    pytest.importorskip("triton", reason="the triton package is not installed")
    model, ids, mask = models["Llama"], tokens(), padding("left")
    eager = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    handle = register("portattn_kernels", backend="interpreter")
    try:
        with using(model, "portattn_kernels"), portattn.settings(validate="never"):
            ours = in_chunks(model, ids, mask, CACHES["static"](model), (6, 4, 1))
    finally:
        handle.remove()
    assert portattn.last_plan().path == "interpreter"
    assert difference(ours, eager, mask) < TOLERANCE


# ---------------------------------------------------------------- registering


def test_register_twice_is_once(registration: Registration) -> None:
    assert register() is registration
    assert register("portattn", backend=None) is registration
    with pytest.raises(portattn.ArgumentError, match="'portattn' is registered with None: remove"):
        register(backend="reference")


def test_remove(models: dict[str, Any], registration: Registration) -> None:
    with using(models["Llama"], "portattn") as model:
        registration.remove()
        for interface in (AttentionInterface, AttentionMaskInterface):
            assert "portattn" not in interface._global_mapping
        with pytest.raises(KeyError, match="portattn"):
            model(tokens())
        assert repr(registration) == "Registration(name='portattn', backend=None, removed)"
        fresh = register()
        registration.remove()  # an old handle does not take away a new registration
        assert AttentionInterface()["portattn"] is not None
        fresh.remove()


def test_remove_leaves_what_somebody_else_has_put_there(registration: Registration) -> None:
    AttentionInterface.register("portattn", print)
    registration.remove()
    try:
        assert AttentionInterface._global_mapping["portattn"] is print
        assert "portattn" not in AttentionMaskInterface._global_mapping
        with pytest.raises(portattn.ArgumentError, match="'portattn', but is taken"):
            register()
    finally:
        del AttentionInterface._global_mapping["portattn"]


@pytest.mark.parametrize("name", ["my_flash", "sdpa", "flex_attention", "eager", "a/b", "paged|portattn", "", None])
def test_names_that_transformers_reads_otherwise_are_refused(name: Any) -> None:
    with pytest.raises(portattn.ArgumentError, match="name is "):
        register(name)


@torch.no_grad()
def test_a_backend_is_handed_to_every_call(models: dict[str, Any]) -> None:
    handle = register("portattn_reference", backend="reference")
    taken = []
    try:
        with using(models["Llama"], "portattn_reference") as model:
            for length in (LENGTH, 1):
                model(tokens(length))
                taken.append((portattn.last_plan().problem.op, portattn.last_plan().requested))
    finally:
        handle.remove()
    assert taken == [("attention", "reference"), ("decode_attention", "reference")]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def test_importing_registers_nothing_and_refuses_an_old_transformers() -> None:
    out = run_python(
        "import importlib, transformers\n"
        "import portattn.integrations.transformers as integration\n"
        "interfaces = transformers.AttentionInterface(), transformers.AttentionMaskInterface()\n"
        "print([name for interface in interfaces for name in interface if 'portattn' in name])\n"
        "transformers.masking_utils.sdpa_mask = lambda batch_size, cache_position, kv_length: None\n"
        "importlib.reload(integration)"
    )
    assert "[]" in out.splitlines()
    assert f"needs transformers 5.4 or later, found {transformers.__version__}" in out.splitlines()[-1]


def test_importing_without_transformers_says_so() -> None:
    out = run_python(
        "import sys; sys.modules['transformers'] = None\n"
        "import portattn.integrations\n"
        "import portattn.integrations.transformers"
    )
    assert "ImportError: portattn.integrations.transformers needs transformers, which is not installed" in out
    assert "pip install 'portattn[transformers]'" in out


def test_the_guide_runs(registration: Registration, capsys: pytest.CaptureFixture[str]) -> None:
    """Every example of docs/integrations.md, in one namespace and in order, prints what the guide says it prints."""
    registration.remove()
    text = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _ in blocks].count("python") >= 4
    namespace: dict[str, Any] = {}
    printed = ""
    for kind, block in blocks:
        if kind == "python":
            capsys.readouterr()
            exec(block, namespace)
            printed = capsys.readouterr().out
        else:
            assert " ".join(printed.split()) == " ".join(block.split())


def test_nothing_warns_on_a_plain_forward(models: dict[str, Any]) -> None:
    with using(models["Llama"], "portattn") as model, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", portattn.FallbackWarning)
        model(tokens(), attention_mask=padding("left"))
