"""torch's own context_parallel with portattn inside, on gloo processes."""

from collections.abc import Callable

import pytest
import torch
import torch_ranks
from rank_processes import Ranks

from portattn.errors import PortattnError

Start = Callable[[int], Ranks]
pytestmark = pytest.mark.skipif(not torch.__version__.startswith(tuple(torch_ranks.inside.SEEN)),
    reason="private names of another release of torch")  # fmt: skip


@pytest.mark.parametrize(
    ("world", "heads_k", "length", "dtype", "is_causal", "scale", "order"),
    [
        (2, 4, 32, torch.float32, True, None, "around"), (4, 4, 64, torch.bfloat16, True, 0.3, "inside"),
        (2, 2, 24, torch.float32, True, None, "around"), (2, 4, 20, torch.float32, False, None, "around"),
    ],
    ids=["causal", "four-bf16", "gqa", "full"],
)  # fmt: skip
def test_unmodified_sdpa_is_right_forward_and_backward(ranks, world, heads_k, length, dtype, is_causal, scale, order):
    for found in ranks(world).run(torch_ranks.unmodified, heads_k, length, dtype, is_causal, scale, order):
        assert max(found["shares"]) <= 1.0, found


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_operators_of_gpus_run_portattn_over_the_ring(ranks: Start, name: str) -> None:
    """As far as a CPU shows it: called as SDPA calls them on a GPU, they have the same handlers."""
    for found in ranks(2).run(torch_ranks.operators, f"_scaled_dot_product_{name}_attention"):
        assert max(found["shares"]) <= 1.0, found
        assert found["calls"] == ["forward"] * 2 + ["backward"] * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [({"dropout_p": 0.1, "is_causal": True}, "dropout_p is 0.1, but must be 0"), ({"attn_mask": 1}, "attn_mask")],
    ids=["dropout", "mask"],
)
def test_what_cannot_be_done_is_refused_by_name(ranks: Start, options: dict[str, object], text: str) -> None:
    for found in ranks(2).run(torch_ranks.refused, options):
        assert text in found


def test_torch_has_its_own_handlers_again_afterwards(ranks: Start) -> None:
    for before, after in ranks(2).run(torch_ranks.torch_alone):
        assert before == after
        assert "_scaled_dot_product_flash_attention_for_cpu" in before


@pytest.mark.parametrize("release", ["2.12.1", "2.14.0+cu128"])
def test_other_releases_of_torch_are_refused(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    with pytest.raises(PortattnError, match=r"its context_parallel is known in 2.11, 2.13 alone"):
        torch_ranks.torch_context_parallel().__enter__()


def test_a_missing_name_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_ranks.inside._private(), "_templated_ring_attention_backward")
    with pytest.raises(PortattnError, match=r"has no torch.*_templated_ring_attention_backward"):
        torch_ranks.torch_context_parallel().__enter__()
