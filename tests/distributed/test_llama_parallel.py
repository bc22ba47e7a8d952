"""Models of transformers whose sequences gloo processes share: loss and gradients are those of one process."""

from collections.abc import Callable
from typing import Any

import pytest
from rank_processes import Ranks

pytest.importorskip("transformers")

import llama_ranks

pytestmark = pytest.mark.transformers
Start = Callable[[int], Ranks]
FACTOR = 4.0  # our distance to float64 may be as many times that of one process in float32: sums run in another order


@pytest.mark.parametrize(
    ("world", "kind", "options", "checkpointing"),
    [
        (2, "llama", {}, False), (2, "llama", {"layout": "contiguous"}, True),
        (2, "llama", {"method": "ulysses"}, False), (4, "mistral", {}, False),
    ],
    ids=["zigzag", "contiguous-checkpointing", "ulysses", "mistral-window"],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_one_process(ranks, world, kind, options, checkpointing):
    for found in ranks(world).run(llama_ranks.trained, kind, options, 32, checkpointing):
        assert found["loss"] <= FACTOR * found["loss of one"] + 1e-6, found
        assert found["gradients"] <= FACTOR * found["of one"] + 1e-6, found


@pytest.mark.parametrize(("change", "text"), [
    ("packed", "position_ids"),
    ("padding", "attention_mask is 'tensor of shape (2, 8)', but must be None, or all ones"),
    ("padding of one", "attention_mask is 'tensor of shape (2, 8)', but must be None, or all ones"),
    ("positions of one", "must be those of this rank's rows"), ("dropout", "attention_dropout is 0.1, but must be 0"),
    ("length", "must be a multiple of 4"), ("cache", "past_key_values is 3, but must be empty: use_cache=False"),
    ("no positions, zigzag", "must be those of this rank's rows"),
])  # fmt: skip
def test_what_needs_other_ranks_rows_is_refused(ranks: Start, change: str, text: str) -> None:
    for found in ranks(2).run(llama_ranks.refused, change):
        assert text in found, found


def test_the_name_is_given_back(ranks: Start) -> None:
    assert ranks(2).run(llama_ranks.refused, "") == ["nothing"] * 2


@pytest.mark.parametrize("wrap", [llama_ranks.replicated, llama_ranks.sharded])
def test_a_padded_model_under_ddp_and_fsdp2_is_trained_as_with_eager(ranks: Start, wrap: Callable[[Any], Any]) -> None:
    ours, eager = (ranks(2).run(llama_ranks.wrapped, wrap, attention) for attention in ("portattn", "eager"))
    for mine, theirs in zip(ours, eager, strict=True):
        assert mine == pytest.approx(theirs, abs=0, rel=1e-5)
        assert abs(theirs[0] - theirs[1]) > 1e-3
    assert ours[0][-1] == pytest.approx(ours[1][-1], rel=1e-6)  # the weights
    assert ours[0][0] != pytest.approx(ours[1][0], rel=1e-3)  # the batches
