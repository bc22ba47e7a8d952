"""Masks in few numbers: what they say, when they are read back, and what raises because it cannot be said."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import BATCH, LENGTH, TOLERANCE, build, difference, padding, tokens, using
from transformers import AttentionInterface
from transformers import masking_utils as hf

import portattn
from portattn.config import Settings
from portattn.integrations import transformers_mask
from portattn.integrations.transformers_mask import CompactMask, compact_mask

pytestmark = pytest.mark.transformers


@pytest.fixture(autouse=True)
def no_holes_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_mask, "_with_holes", set())


def allowed(mask: CompactMask) -> torch.Tensor:
    """(B, Sq, Sk): what the ops make of the mask, by their documentation."""
    i, j = torch.arange(mask.q_length)[None, :, None], torch.arange(mask.kv_length)[None, None, :]
    zero = torch.zeros(mask.batch, dtype=torch.int32)

    def bounds(pad: Any, count: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = zero if pad is None else pad
        end = torch.full_like(zero, size) if count is None else first + count
        return first[:, None, None], end[:, None, None]

    k_first, k_end = bounds(mask.leftpad_k, mask.seqlens_k, mask.kv_used)
    q_first, q_end = bounds(mask.leftpad_q, mask.seqlens_q, mask.q_length)
    before = i + k_end - q_end - j  # keys from key j to the query's own position
    seen = (j >= k_first) & (j < k_end) & (i >= q_first) & (i < q_end)
    if mask.left is not None:
        seen = seen & (before <= mask.left)
    if mask.right is not None:
        seen = seen & (-before <= mask.right)
    if mask.chunk is not None:
        own = j + before - k_first  # the query's position, from the sequence's first key on
        seen = seen & (own // mask.chunk == (j - k_first) // mask.chunk)
    if mask.written is not None:
        written = mask.written.expand(mask.batch, 1, mask.q_length, -1)[:, 0]
        seen = seen & torch.nn.functional.pad(written, (0, mask.kv_length - written.shape[2]))
    return seen


def prefix(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv < 3


def all_but_two(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv != 2


ZERO = torch.zeros(BATCH, dtype=torch.long)
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, 2, 2, 2, 2, -1, -1, 3, 3, 3, -1, -1, -1]]).expand(BATCH, -1)
# Mask function -> whether causality and lengths say it, so that nothing is written out for it.
PATTERNS: dict[str, tuple[Callable[..., Any], bool]] = {
    "causal": (hf.causal_mask_function, True), "sliding": (hf.sliding_window_causal_mask_function(4), True),
    "bidirectional": (hf.bidirectional_mask_function, True),
    "bidirectional sliding": (hf.sliding_window_bidirectional_mask_function(3), True),
    "a window without causality": (hf.sliding_window_overlay(4), True),
    "chunked": (hf.chunked_causal_mask_function(4, ZERO), False),
    "a prefix": (hf.or_masks(hf.causal_mask_function, prefix), False),
    "an intersection": (hf.and_masks(hf.sliding_window_causal_mask_function(4), all_but_two), False),
    "blocks": (hf.or_masks(hf.causal_mask_function, lambda b, h, q, kv: BLOCKS[b, q] == BLOCKS[b, kv]), False),
}  # fmt: skip


@pytest.mark.parametrize("validate", ["always", "never", "never, holes seen"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_they_say_what_the_boolean_mask_says(pattern: str, validate: str) -> None:
    """Random offsets, caches and paddings, with holes and without: the pairs that a mask allows are sdpa_mask's, on
    rows of valid queries."""
    generator = torch.Generator().manual_seed(2)
    function, whole = PATTERNS[pattern]
    decoder = not pattern.startswith(("bidirectional", "a window"))
    checked = written_out = 0
    for trial in range(60):
        past, q_length, spare = (int(torch.randint(0, 6, (), generator=generator)) for _ in range(3))
        q_length += 1
        kv_offset = int(torch.randint(0, past + 1, (), generator=generator))
        if not decoder:
            past, kv_offset, spare = 0, 0, spare if pattern == "bidirectional" else 0  # spare: cross-attention
        stop = past + q_length
        kv_length, valid = stop - kv_offset + spare, torch.zeros(BATCH, stop + spare, dtype=torch.bool)
        for row in range(BATCH):
            first, end = torch.randint(0, stop + spare + 1, (2,), generator=generator).sort().values.tolist()
            valid[row, first : max(end, past + 1)] = True
        if trial % 3 == 1:
            valid &= torch.rand(valid.shape, generator=generator) < 0.8
        given = None if trial % 3 == 2 else valid
        offset = torch.tensor(past) if spare and decoder else past
        expected = hf.sdpa_mask(BATCH, q_length, kv_length, past, kv_offset, function, given,
            allow_is_causal_skip=False).expand(BATCH, 1, q_length, kv_length)[:, 0]  # fmt: skip
        if validate == "never, holes seen":
            transformers_mask._with_holes.add(id(None))
        with portattn.settings(validate=validate.split(",")[0]):
            mask = compact_mask(BATCH, q_length, kv_length, offset, kv_offset, function, given)
        rows = torch.ones(BATCH, q_length, dtype=torch.bool)
        if given is not None and pattern != "bidirectional":
            rows = valid[:, past:stop]
        if mask.flaw is not None:
            rows = rows & ~mask.flaw[:, 0, 0].isnan()
        else:
            assert validate != "never" or given is None or not whole
        assert torch.equal(allowed(mask)[rows], expected[rows])
        checked += int(rows.sum())
        written_out += mask.written_out
    assert checked > 200
    assert written_out == 0 if whole else written_out > 30


@pytest.mark.parametrize("inner", ["causal", "sliding", "chunked", "a prefix"])
@pytest.mark.parametrize("early", [False, True], ids=["remapped", "transformers 5.4"])
def test_packed_rows(inner: str, early: bool) -> None:
    function, whole = PATTERNS[inner]
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1], [4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 1]])
    numbers = hf.find_packed_sequence_indices(position_ids)
    if early:
        packed = hf.and_masks(function, hf.packed_sequence_mask_function(numbers))
    elif not hasattr(hf, "remap_positions_for_packed_sequence"):
        pytest.skip("this transformers does not remap positions")
    else:
        packed = hf.packed_sequence_compatibility_function(function, position_ids, numbers)
    mask = compact_mask(2, LENGTH, LENGTH, mask_function=packed)
    expected = hf.sdpa_mask(2, LENGTH, LENGTH, 0, 0, packed, allow_is_causal_skip=False)[:, 0]
    assert torch.equal(allowed(mask), expected)
    assert (mask.packed is not None) == whole
    if whole:
        begins, longest, *keys = mask.sequences()
        assert (begins.tolist(), longest, keys) == ([0, 6, 9, 11, 20, 22], 9, [begins, longest])


@pytest.mark.parametrize("validate", ["always", "never"])
def test_chunks_count_from_the_first_valid_token(validate: str) -> None:
    """As transformers makes the mask: nothing is written out for left padding, which portattn's chunks follow. Holes,
    a cache that has dropped keys, and masks that nobody reads back are written out."""
    valid = torch.ones(BATCH, 14, dtype=torch.bool)
    valid[0, :3], valid[-1, 12:] = False, False
    holes = valid.clone()
    holes[0, 7] = False
    for given, past, kv_offset, plain in ((valid, 0, 0, True), (None, 0, 0, True), (valid, 9, 0, True),
                                          (holes, 0, 0, False), (valid, 9, 2, False)):  # fmt: skip
        first = torch.zeros(BATCH, dtype=torch.long) if given is None else (given.cumsum(-1) == 0).sum(-1)
        function = hf.chunked_causal_mask_function(4, first)
        sizes = BATCH, 14 - past, 14 - kv_offset, past, kv_offset, function, given
        with portattn.settings(validate=validate):
            mask = compact_mask(*sizes)
        expected = hf.sdpa_mask(*sizes, allow_is_causal_skip=False).expand(BATCH, 1, -1, -1)[:, 0]
        rows = torch.ones(BATCH, 14 - past, dtype=torch.bool) if given is None else given[:, past:]
        assert torch.equal(allowed(mask)[rows], expected[rows])
        assert (mask.chunk, mask.written_out) == ((4, False) if plain and validate == "always" else (None, True))


def test_what_hides_nothing_is_not_said() -> None:
    pattern = hf.chunked_causal_mask_function(12, ZERO)
    assert not compact_mask(BATCH, 12, 12, mask_function=pattern).written_out
    chunked = compact_mask(BATCH, 13, 13, mask_function=pattern)
    assert (chunked.written_out, chunked.chunk, chunked.causal) == (False, 12, True)
    assert compact_mask(BATCH, 1, 12, q_offset=12, kv_offset=1, mask_function=pattern).written_out
    windows = [compact_mask(BATCH, length, length, mask_function=hf.sliding_window_causal_mask_function(12)).window
        for length in (12, 13)]  # fmt: skip
    assert windows == [None, (11, None)]
    # A cache that drops what the window hides hands over 12 keys and one query: nothing is left to hide.
    late = hf.sliding_window_causal_mask_function(12)
    assert compact_mask(BATCH, 1, 12, q_offset=40, kv_offset=29, mask_function=late).window is None
    assert compact_mask(BATCH, 2, 13, q_offset=40, kv_offset=29, mask_function=late).window == (11, None)
    both = hf.sliding_window_bidirectional_mask_function(11)
    assert compact_mask(BATCH, 12, 12, mask_function=both).window is None
    assert compact_mask(BATCH, 13, 13, mask_function=both).window == (11, 11)


def test_a_decoding_step_reads_nothing_back() -> None:
    """On the meta device there is nothing to read: any synchronisation would raise."""
    mask = torch.ones(BATCH, 20, dtype=torch.bool, device="meta")
    offset = torch.tensor(19, device="meta")
    made = compact_mask(BATCH, 1, 32, offset, attention_mask=mask, device="meta")
    assert made.seqlens_k.shape == made.leftpad_k.shape == (BATCH,)
    assert made.flaw is not None
    assert compact_mask(BATCH, 1, 32, offset, device="meta").seqlens_k.dtype == torch.int32
    window = hf.sliding_window_causal_mask_function(4)
    assert compact_mask(BATCH, 1, 32, offset, mask_function=window, device="meta").window == (3, None)
    with pytest.raises((RuntimeError, NotImplementedError)):  # so the lines above can fail
        compact_mask(BATCH, 2, 32, offset, attention_mask=mask, device="meta")


@pytest.mark.parametrize("prompt", [[1, 0, 1], [1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]])
@torch.no_grad()
def test_after_holes_decoding_steps_go_by_the_mask(prompt: list[int]) -> None:
    """Right padding becomes a hole with the first new token; left padding and rows of nothing yet do not."""
    one, other = object(), object()
    read = compact_mask(1, 3, 3, attention_mask=torch.tensor([prompt]).bool(), config=one)
    assert (read.mask is not None) == (prompt == [1, 0, 1])
    step = torch.ones(1, 4, dtype=torch.bool, device="meta")
    late = {"q_offset": 3, "attention_mask": step, "device": "meta"}
    by_mask = compact_mask(1, 1, 4, config=one, **late)
    assert (by_mask.mask is not None) == (by_mask.flaw is None) == (prompt in ([1, 0, 1], [1, 1, 0]))
    by_lengths = compact_mask(1, 1, 4, config=other, **late)
    assert by_lengths.mask is None
    assert by_lengths.flaw is not None


def test_right_padding_in_training_is_no_hole_to_come() -> None:
    compact_mask(1, 3, 3, attention_mask=torch.tensor([[1, 1, 0]]).bool(), config=object())
    assert not transformers_mask._with_holes


def test_when_masks_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    seen = {}
    for validate in ("auto", "always", "never"):
        monkeypatch.setattr(transformers_mask, "current", lambda value=validate: Settings(validate=value))
        asked = [(cpu, 1), (cpu, 5), (gpu, 1), (gpu, 5)]
        seen[validate] = [transformers_mask.reads_back(device, queries) for device, queries in asked]
    assert seen == {"auto": [True, True, False, True], "always": [True] * 4, "never": [False] * 4}


@torch.no_grad()
def test_holes_that_are_not_read_back_give_nan(models: dict[str, Any]) -> None:
    model, mask = models["Llama"], torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 5] = 0
    eager = model(tokens(), attention_mask=mask).logits
    with using(model, "portattn"), portattn.settings(validate="never"):
        ours = model(tokens(), attention_mask=mask).logits
        # A static cache's offset is not known on the host, so a mask too short for it shows on the device only.
        ones = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        flaws = [compact_mask(BATCH, 1, 16, torch.tensor(past), attention_mask=ones).flaw for past in (10, 11)]
    assert ours[1].isnan().all()
    assert difference(ours[::2], eager[::2], None) < TOLERANCE
    assert [flaw.isnan().all().item() for flaw in flaws] == [False, True]


def test_a_mask_moves_between_devices() -> None:
    mask = compact_mask(BATCH, LENGTH, LENGTH, attention_mask=padding("left").bool())
    moved = mask.to("meta", non_blocking=True)
    assert moved.seqlens_k.device.type == moved.leftpad_q.device.type == "meta"
    assert mask.seqlens_k.device.type == "cpu"
    assert moved.shape == mask.shape == (BATCH, 1, LENGTH, LENGTH)
    assert mask.to(torch.float16) is mask
    assert mask.contiguous() is mask


def test_a_model_that_computes_with_its_mask_must_not_go_on() -> None:
    mask, scores = compact_mask(BATCH, LENGTH, LENGTH), torch.zeros(BATCH, 1, LENGTH, LENGTH)
    with pytest.raises(portattn.ArgumentError, match="takes slices of its mask; use attn_implementation='eager'"):
        mask[:, :, :, :2]
    for compute in (lambda: scores + mask, lambda: torch.where(mask, scores, 0.0), lambda: scores.masked_fill(mask, 0)):
        with pytest.raises(portattn.ArgumentError, match=r"computes with its mask \(\w+\); use attn_implementation="):
            compute()


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH - 1, dtype=torch.bool)},
     r"shape is \(3, 1, 11, 10\), but must broadcast to this layer's scores, \(3, 4, 11, 11\).*'eager'"),
    ({"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.long)},
     r"attention_mask.dtype is torch.int64, but must be bool \(True attends\) or floating \(added\)"),
    ({"cu_seq_lens_q": torch.tensor([0, 5, 33]), "attention_mask": padding("left")},
     r"cu_seq_lens_q is 'tensor of shape \(3,\)', but packed sequences go without a cache and without"),
    ({"output_attentions": True}, "output_attentions is True, but weights are never written out"),
    ({"attention_mask": torch.ones(BATCH, LENGTH - 1, dtype=torch.long)},
     r"attention_mask.shape\[1\] is 10, but the cache and this input hold 11 tokens"),
    ({"attention_mask": torch.ones(1, LENGTH, dtype=torch.long)},
     r"attention_mask.shape is \(1, 11\), but must be \(3, tokens so far\)"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: str(case[1]))
@torch.no_grad()
def test_refusals(models: dict[str, Any], case: tuple[Any, ...]) -> None:
    arguments, message = case
    with using(models["Llama"], "portattn") as model, pytest.raises(portattn.ArgumentError, match=message):
        model(tokens(), **arguments)


def test_packed_sequences_with_a_bias_need_position_ids() -> None:
    layer, forward = build("Llama").model.layers[0].self_attn, AttentionInterface()["portattn"]
    q, kv, bias = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 4, 9, 9)
    packed = {"cu_seq_lens_q": torch.tensor([0, 5, 9]), "cu_seq_lens_k": torch.tensor([0, 5, 9])}
    whole = compact_mask(1, 9, 9)
    with pytest.raises(portattn.ArgumentError, match="takes no bias; pack by position_ids"):
        forward(layer, q, kv, kv, whole, position_bias=bias, **packed)
    out, _ = forward(layer, q, kv, kv, whole, dropout=0.5, **packed)
    assert portattn.last_plan().problem.op == "varlen_attention"
    assert portattn.last_plan().problem.dropout
    assert out.shape == (1, 9, 4, 8)


def test_a_layer_without_a_mask_or_with_another_raises(models: dict[str, Any]) -> None:
    layer, forward = models["Llama"].model.layers[0].self_attn, AttentionInterface()["portattn"]
    q, kv = torch.randn(BATCH, 4, 5, 8), torch.randn(BATCH, 2, 5, 8)
    with pytest.raises(portattn.ArgumentError, match="does not make its masks through AttentionMaskInterface"):
        forward(layer, q, kv, kv, None)
    with pytest.raises(portattn.ArgumentError,
            match=r"made for \(3, 1, 5, 6\)', but this layer's scores are \(3, 1, 5, 5\)"):  # fmt: skip
        forward(layer, q, kv, kv, compact_mask(BATCH, 5, 6, 1))
    whole = compact_mask(BATCH, 5, 5)
    with pytest.raises(portattn.ArgumentError, match=r"sliding_window is 4, but this layer's mask was made without it"):
        forward(layer, q, kv, kv, whole, sliding_window=4)
    forward(layer, q, kv, kv, whole, sliding_window=5)
    wider = compact_mask(BATCH, 5, 5, mask_function=hf.sliding_window_bidirectional_mask_function(4))
    assert wider.window is None
    forward(layer, q, kv, kv, wider, sliding_window=4)  # the mask's own window counts
    for feature in ("sinks", "indices", "block_indices", "cache"):
        more = {"read_index": None} if feature == "indices" else {}  # of continuous batching
        with pytest.raises(portattn.ArgumentError, match=rf"{feature} is 'tensor of shape \(1,\)', but .*'eager'"):
            forward(layer, q, kv, kv, whole, **{feature: torch.zeros(1)}, **more)
