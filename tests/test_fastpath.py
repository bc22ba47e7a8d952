"""What a kept call is found by: everything that decides its plan and its kernels' specialisation."""

from __future__ import annotations

import torch

from portattn.fastpath import key_of


def test_the_alignment_of_every_pointer_is_part_of_the_key() -> None:
    """Triton compiles another kernel for a base that is no multiple of 16 bytes, lengths' bases included."""
    memory, lengths = torch.zeros(2 * 64 + 8), torch.zeros(8, dtype=torch.int32)
    aligned, shifted = memory[:128].view(1, 1, 2, 64), memory[1:129].view(1, 1, 2, 64)

    def key(k: torch.Tensor, seqlens_k: torch.Tensor) -> object:
        return key_of("attention", {"q": aligned, "k": k, "v": aligned, "leftpad_k": None, "seqlens_k": seqlens_k}, {})

    plain = key(aligned, lengths[:1])
    assert plain == key(aligned, lengths[4:5])
    assert plain != key(aligned, lengths[1:2])
    assert plain != key(shifted, lengths[:1])


def test_values_of_different_types_are_different_calls() -> None:
    given = dict.fromkeys("qkv", torch.zeros(1, 1, 2, 64))
    assert key_of("attention", given, {"causal": True}) != key_of("attention", given, {"causal": 1})
