"""What errors advise must be an argument of the function that was called; and sizes that nobody else looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn_oracle import ints

from portattn.errors import ArgumentError
from portattn.integrations import flash_attn, flash_attn_interface

Q, K = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 9, 16)  # as (batch, heads, seq, head_dim)
MODULES = pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["2", "3"])


@MODULES
def test_tensors_in_the_other_order(module: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^flash_attn_func: heads_q is 6") as raised:
        module.flash_attn_func(Q, K, K)
    assert str(raised.value).endswith("the shapes agree: give q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)")
    module.flash_attn_func(Q.transpose(1, 2), K.transpose(1, 2), K.transpose(1, 2))


def test_packed_keys_in_the_other_order() -> None:
    packed = torch.stack([K, K], 2)
    with pytest.raises(ArgumentError, match=r"give q\.transpose\(1, 2\), kv\.transpose\(1, 3\)$"):
        flash_attn.flash_attn_kvpacked_func(Q, packed)
    with pytest.raises(ArgumentError, match=r"give kv\.transpose\(1, 3\)$"):
        flash_attn.flash_attn_kvpacked_func(Q.transpose(1, 2), packed)
    flash_attn.flash_attn_kvpacked_func(Q.transpose(1, 2), packed.transpose(1, 3))


def paged(**changed: Any) -> torch.Tensor:
    call: dict[str, Any] = {
        "q": torch.ones(5, 4, 16), "k": torch.ones(4, 4, 2, 16), "v": torch.ones(4, 4, 2, 16),
        "cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 3, 9), "max_seqlen_q": 3, "max_seqlen_k": 6,
        "block_table": ints(0, 1, 2, 3).view(2, 2),
    }  # fmt: skip
    return flash_attn.flash_attn_varlen_func(**call | changed)


@pytest.mark.parametrize("size", ["6", -3, None, 2.5, 2**40])
def test_a_longest_sequence_of_pages_that_is_no_size(size: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^flash_attn_varlen_func: max_seqlen_k is .*, but must be an integer in"):
        paged(max_seqlen_k=size)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"cu_seqlens_k": ints(2, 5, 9)}, r"cu_seqlens_k\[0\] is 2, but must be 0"),
        ({"cu_seqlens_k": ints(0, 5, 3)}, r"cu_seqlens_k\[2\] is 3, but must be at least cu_seqlens_k\[1\], 5"),
        ({"cu_seqlens_k": ints(0, 3, 9).long()}, r"cu_seqlens_k is .*\(hint: cu_seqlens_k\.int\(\)\)"),
        ({"max_seqlen_k": 5}, r"cu_seqlens_k\[2\] - cu_seqlens_k\[1\] is 6, but must be at most max_seqlen_k, 5"),
    ],
)
def test_beginnings_beside_a_table(changed: dict[str, Any], text: str) -> None:
    assert paged(max_seqlen_k=torch.tensor(6)).shape == (5, 4, 16)
    with pytest.raises(ArgumentError, match=rf"^flash_attn_varlen_func: {text}"):
        paged(**changed)


@pytest.mark.parametrize("given", [{"window_size": (2**70, -1)}, {"window_size": (-1, 2**70)}])
def test_probabilities_of_windows_past_every_integer(given: dict[str, Any]) -> None:
    """They hide nothing, with S_dmask as without."""
    x = torch.randn(1, 5, 4, 16)
    found = []
    for more in (given, {}):
        torch.manual_seed(0)
        found.append(flash_attn.flash_attn_func(x, x, x, 0.5, return_attn_probs=True, **more))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_probabilities_of_a_scale_that_is_a_large_integer() -> None:
    x = torch.randn(1, 5, 4, 16)
    found = []
    for scale in (2**70, 2.0**70):
        torch.manual_seed(0)
        found.append(flash_attn.flash_attn_func(x, x, x, 0.5, scale, return_attn_probs=True))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
