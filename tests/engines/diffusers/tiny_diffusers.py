"""Models of diffusers with few and random weights, and inputs for them."""

from collections.abc import Callable
from typing import Any

import torch

TEXT, SIDE = 5, 4  # tokens of text; images of SIDE x SIDE tokens
Inputs = dict[str, Any]


def numbers_in(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip


def flux_inputs(dtype: torch.dtype = torch.float32, side: int = SIDE, batch: int = 2, text: int = TEXT) -> Inputs:
    numbers = numbers_in(dtype)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    return {
        "hidden_states": numbers(batch, side * side, 4), "encoder_hidden_states": numbers(batch, text, 32),
        "pooled_projections": numbers(batch, 32), "timestep": torch.full((batch,), 0.5, dtype=dtype),
        "img_ids": torch.cat([torch.zeros(side * side, 1), places], dim=1).to(dtype),
        "txt_ids": torch.zeros(text, 3, dtype=dtype), "return_dict": False,
    }  # fmt: skip


def qwen() -> Any:
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    ).eval()  # fmt: skip


def qwen_inputs(dtype: torch.dtype = torch.float32, masked: bool = True) -> Inputs:
    """Two prompts, the second of which is shorter where they are masked."""
    numbers = numbers_in(dtype)
    mask = torch.ones(2, TEXT, dtype=torch.long)
    if masked:
        mask[1, 2:] = 0
    return {
        "hidden_states": numbers(2, SIDE * SIDE, 16), "encoder_hidden_states": numbers(2, TEXT, 16),
        "encoder_hidden_states_mask": mask, "timestep": torch.full((2,), 0.5, dtype=dtype),
        "img_shapes": [(1, SIDE, SIDE)] * 2, "return_dict": False,
    }  # fmt: skip


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), norm_num_groups=4,
        layers_per_block=1, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16, attention_head_dim=2,
    ).eval()  # fmt: skip


def unet_inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    numbers = numbers_in(dtype)
    return {
        "sample": numbers(2, 4, 8, 8), "timestep": torch.tensor([10]), "encoder_hidden_states": numbers(2, TEXT, 16),
        "return_dict": False,
    }  # fmt: skip
