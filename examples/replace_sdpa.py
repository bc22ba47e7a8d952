"""portattn in the place of torch's scaled_dot_product_attention, in code that is not changed."""

import torch

from portattn.integrations import sdpa

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device=device)
x = torch.randn(2, 10, 64, device=device)
padding = torch.tensor([[False] * 10, [False] * 7 + [True] * 3], device=device)

# A model calls torch.nn.functional.scaled_dot_product_attention: inside the block that is portattn.
theirs = layer(x, src_key_padding_mask=padding)
with sdpa.replacement():
    ours = layer(x, src_key_padding_mask=padding)
route = sdpa.last_route()
print("layer:", torch.allclose(ours, theirs, atol=1e-3), route and route.path)

# What portattn does not take is torch's own, with a reason that can be asked for.
q = torch.randn(1, 4, 10, 16, device=device, dtype=torch.float64)
print(sdpa.explain(q, q, q))

# SDPA's flash kernel can be portattn's for the whole process. On a GPU the dtype must be one of that kernel's.
q = q.to(torch.bfloat16)
theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
with sdpa.flash_impl(device), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
    ours = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
route = sdpa.last_route()
print("flash kernel:", torch.allclose(ours, theirs, atol=2e-2), route and route.path)
