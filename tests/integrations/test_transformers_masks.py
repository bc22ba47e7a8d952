"""Masks as lengths: what they say, when they are read back, and what raises because lengths cannot say it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import portattn
from portattn.config import Settings

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")

from tiny_models import BATCH, LENGTH, TOLERANCE, build, difference, padding, tokens, using  # noqa: E402
from transformers import AttentionInterface  # noqa: E402
from transformers import masking_utils as hf  # noqa: E402

from portattn.integrations import transformers_mask  # noqa: E402
from portattn.integrations.transformers_mask import LengthMask, length_mask  # noqa: E402

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
