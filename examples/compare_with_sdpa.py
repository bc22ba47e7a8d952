"""attention beside torch's scaled_dot_product_attention: the same numbers, and what is called otherwise."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import portattn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q = torch.randn(2, 8, 64, 64, device=device)
k, v = (torch.randn(2, 2, 64, 64, device=device) for _ in range(2))

# is_causal=True is causal=True where there are as many queries as keys. GQA needs no flag.
ours = portattn.attention(q, k, v, causal=True)
theirs = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
print("causal, GQA:", torch.allclose(ours, theirs, atol=1e-3))

# With fewer queries than keys SDPA's is_causal lets query i see keys 0..i; portattn calls that "top_left".
# causal=True is what a cache needs: the last query sees every key.
few = q[:, :, -8:]
ours = portattn.attention(few, k, v, causal="top_left")
theirs = scaled_dot_product_attention(few, k, v, is_causal=True, enable_gqa=True)
print("top-left:", torch.allclose(ours, theirs, atol=1e-3))

# attn_mask is two arguments: `mask` (True = attend) and `bias` (added to the scores).
mask = torch.rand(2, 1, 64, 64, device=device) < 0.8
mask[..., 0] = True
ours = portattn.attention(q, k, v, mask=mask)
theirs = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
print("mask:", torch.allclose(ours, theirs, atol=1e-3))

# SDPA has no log-sum-exp, window, softcap, sinks or ALiBi slopes.
out, lse = portattn.attention(q, k, v, causal=True, window=(15, 0), softcap=30.0, return_lse=True)
print("LSE:", tuple(lse.shape))
