"""Verification of drafted trees, and the extend of a draft, eagerly: against float64."""

import pytest
import torch
from served import Served, random_tree, verify_input
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative import eagle_utils

from portattn.integrations.sglang.backend import chain, words_of

VERIFY, DRAFT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2
FULL, SHORT = eagle_utils.TreeMaskMode.FULL_MASK, eagle_utils.TreeMaskMode.QLEN_ONLY


def trees(count: int, drafted: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [random_tree(drafted, generator) for _ in range(count)]


@pytest.fixture(params=["full", "short"])
def full(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both layouts of custom_mask: with the columns of earlier keys, as on a GPU, and without, as on a CPU."""
    mode = FULL if request.param == "full" else SHORT
    monkeypatch.setattr("portattn.integrations.sglang.backend.default_tree_mask_mode", lambda: mode)
    return bool(mode is FULL)


@pytest.mark.engine_feature("verification of drafted trees (custom_mask)")
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("drafted", [1, 5, 16])
def test_trees(page: int, drafted: int, full: bool) -> None:
    before = [17, 64, 1]
    served = Served([a + drafted for a in before], page=page)
    served.run(VERIFY, before, [drafted] * 3, tree=trees(3, drafted), full=full)


@pytest.mark.engine_feature("verification of drafted trees (custom_mask)")
def test_most_drafted_tokens(full: bool) -> None:
    """All 64 bits of a word, the sign's among them."""
    served = Served([20 + 64, 64], page=16)
    served.run(VERIFY, [20, 0], [64, 64], tree=trees(2, 64), full=full)


@pytest.mark.engine_feature("verification of drafted trees (custom_mask)")
@pytest.mark.parametrize("poison", ["k", "v"])
def test_trees_with_window_cap_and_sinks(poison: str, full: bool) -> None:
    served = Served([23, 48], page=16, dtype=torch.bfloat16, poison=poison)
    layer = served.layer(sliding_window_size=9, logit_cap=3.0)
    sinks = torch.tensor([1.0, -2.0, 0.5, 3.0])
    served.run(VERIFY, [17, 42], [6, 6], layer=layer, tree=trees(2, 6), full=full, sinks=sinks)


@pytest.mark.engine_feature("verification of a chain (no mask)")
def test_chain() -> None:
    chained = verify_input([17, 40], 4, None, False)
    Served([21, 44], page=16).run(VERIFY, [17, 40], [4, 4], spec_info=chained)


@pytest.mark.engine_feature("extend of a draft model (DRAFT_EXTEND_V2)")
def test_draft_extend() -> None:
    served = Served([21, 44], page=16)
    served.run(DRAFT, [17, 40], [4, 4])


def test_words_are_read_from_both_layouts() -> None:
    lengths, made = torch.tensor([3, 0, 7]), trees(3, 5, seed=4)
    expected = [[sum(int(bit) << place for place, bit in enumerate(row)) for row in tree.tolist()] for tree in made]
    for full in (True, False):
        mask = verify_input(lengths.tolist(), 5, made, full).custom_mask
        assert words_of(mask, lengths, 5, full).tolist() == expected
        assert words_of(mask.to(torch.uint8), lengths, 5, full).tolist() == expected
    assert chain(2, 3, "cpu").tolist() == [[1, 3, 7]] * 2


def test_a_padded_batch_reads_nothing_beyond_the_mask() -> None:
    """A graph's batch has more sequences than the mask: their words are anything, and no index is out of range."""
    made = trees(2, 4)
    for full in (True, False):
        mask = verify_input([6, 2], 4, made, full).custom_mask
        words = words_of(mask, torch.tensor([6, 2, 1, 1]), 4, full)
        assert torch.equal(words[:2], words_of(mask, torch.tensor([6, 2]), 4, full))
    assert words_of(mask[:0], torch.tensor([1]), 4, True).tolist() == chain(1, 4, "cpu").tolist()


@pytest.mark.engine_feature("the draft worker's trees in a buffer of the backend (verify_mask)")
def test_the_lent_buffer_has_the_layout_that_is_read() -> None:
    served = Served([21, 44])
    with get_spec().override(speculative_algorithm="EAGLE", speculative_num_draft_tokens=4):
        backend = served.backend
        backend.init_cuda_graph_state(3, 12)
    lent = backend.verify_mask
    assert (lent.mode, lent.buffer.numel(), lent.max_bs) == (SHORT, 3 * 4 * 4, 3)
    made = trees(2, 4)
    lent.buffer.fill_(True)
    lent.buffer[: 2 * 4 * 4] = torch.stack(made).flatten()
    info = verify_input([17, 40], 4, made, full=True)
    info.custom_mask = lent.buffer
    served.run(VERIFY, [17, 40], [4, 4], spec_info=info, tree=made, backend=backend)
