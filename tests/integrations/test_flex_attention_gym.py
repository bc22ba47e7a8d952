"""attention-gym's masks and score functions, from a checkout: ATTENTION_GYM names its folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flex_cases import HEADS, assert_right, qkv, theirs

import portattn
from portattn.integrations.flex_attention import AuxRequest, create_block_mask, flex_attention

CHECKOUT = os.environ.get("ATTENTION_GYM", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="ATTENTION_GYM names no checkout of attention-gym")
LENGTHS = [11, 1, 20, 32]
TOKENS = sum(LENGTHS)


def cases() -> Iterator[tuple[str, Any, Any]]:
    """Yield names, score functions and mask functions."""
    sys.path.insert(0, CHECKOUT)
    from attn_gym import masks, mods
    from attn_gym.masks.document_mask import length_to_offsets

    generator = torch.Generator().manual_seed(0)
    offsets = length_to_offsets(LENGTHS, "cpu")
    parents = [-1, *(n // 2 for n in range(TOKENS - 1))]
    far = torch.randint(0, TOKENS // 8, (2, HEADS, TOKENS // 8, 3), generator=generator)
    for name, mask in {
        "causal": masks.causal_mask,
        "batchify": masks.batchify_mask_mod(masks.causal_mask, 16),
        "block diffusion": masks.generate_block_diffusion_mask(TOKENS // 2, 8),
        "dilated": masks.generate_dilated_sliding_window(12, 3),
        "documents": masks.generate_doc_mask_mod(masks.causal_mask, offsets),
        "packed documents": masks.generate_packed_causal_doc_mask_mod(offsets),
        "flamingo": masks.generate_vision_cross_attention_mask_mod(torch.tensor([[0, 40], [9, 64]]), TOKENS // 2),
        "global": masks.generate_global_sliding_window(5, torch.arange(TOKENS) % 17 == 0),
        "tree": masks.generate_jetspec_tree_causal_mask_mod(0, masks.build_tree_ancestor_matrix(parents, "cpu")),
        "jetspec": masks.generate_jetspec_training_mask_mod(8, 7),
        "natten": masks.generate_natten(8, 8, 5, 3),
        "tiled natten": masks.generate_tiled_natten(8, 8, 5, 3, 4, 2),
        "morton natten": masks.generate_morton_natten(8, 8, 5, 3),
        "prefix": masks.generate_prefix_lm_mask(9),
        "shared prefix": masks.generate_shared_prefix_mask_mod(offsets, torch.tensor([0, 0, 2, 2])),
        "sliding": masks.generate_sliding_window(9),
        "sta 2d": masks.generate_sta_mask_mod_2d((8, 8), (4, 4), (2, 2)),
        "sta 3d": masks.generate_sta_mask_mod_3d((4, 4, 4), (2, 4, 2), (2, 2, 2)),
        "spatial": masks.generate_spatial_head_mask_mod(4, 5, 12, 2, True, 4),
        "temporal": masks.generate_temporal_head_mask_mod(4, 5, 12),
        "vsa": masks.generate_vsa_mask_mod(far, 8),
    }.items():
        yield name, None, mask
    adjacency = torch.rand(2, TOKENS, TOKENS, generator=generator) > 0.9
    kinds, lengths = mods.shortest_path_edge_types(adjacency, adjacency.int() * 2, 1)
    for name, mod in {
        "gelu": mods.generate_activation_score_mod(),
        "alibi": mods.generate_alibi_bias(HEADS),
        "graph": mods.generate_graphormer_spatial_bias(
            torch.randn(HEADS, 7, generator=generator), mods.shortest_path_distances(adjacency, 5)
        ),
        "edges": mods.generate_graphormer_edge_bias(torch.randn(HEADS, 1, 3, generator=generator), kinds, lengths),
        "rope": mods.generate_mla_rope_score_mod(
            torch.randn(2, HEADS, TOKENS, 4, generator=generator),
            torch.randn(2, 1, TOKENS, 4, generator=generator),
            HEADS,
        ),
        "sandwich": mods.generate_sandwich_bias(HEADS, TOKENS),
        "soft cap": mods.generate_tanh_softcap(2),
        "approximate soft cap": mods.generate_tanh_softcap(2, approx=True),
    }.items():
        yield name, mod, None


def test_results_are_right() -> None:
    refused = {}
    for name, score_mod, mask_mod in cases():
        q, k, v = qkv(rows=TOKENS, keys=TOKENS)
        mask = None if mask_mod is None else create_block_mask(mask_mod, 2, HEADS, TOKENS, TOKENS, "cpu", 16)
        try:
            out, aux = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_aux=AuxRequest(True, True))
        except portattn.ArgumentError as error:
            refused[name] = str(error)
            continue
        same = theirs(q, k, v, score_mod, mask)
        assert_right([out, *aux], theirs(q.double(), k.double(), v.double(), score_mod, mask), same, name)
    assert refused.keys() == {"edges"}
    assert "3 tensors of 9 axes" in refused["edges"]
