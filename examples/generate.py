"""A decoding loop with a growing cache: attention for the prompt, decode_attention for each token."""

import torch

import portattn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
batch, heads, kv_heads, width, room = 2, 8, 2, 64, 64
lengths = torch.tensor([17, 9], dtype=torch.int32, device=device)  # the prompts'; they stay on the device
longest = int(lengths.max())

k_cache = torch.full((batch, kv_heads, room, width), torch.nan, device=device)  # what nobody wrote may be anything
v_cache = k_cache.clone()
prompt = torch.randn(batch, heads, longest, width, device=device)
for b, length in enumerate(lengths.tolist()):
    k_cache[b, :, :length] = torch.randn(kv_heads, length, width, device=device)
    v_cache[b, :, :length] = torch.randn(kv_heads, length, width, device=device)

# The prompt: right-padded rows and keys. Rows of padding are not computed.
out = portattn.attention(
    prompt, k_cache[:, :, :longest], v_cache[:, :, :longest], causal=True, seqlens_q=lengths, seqlens_k=lengths
)
print("prompt:", tuple(out.shape), bool(out[1, :, :9].isfinite().all()))

for step in range(4):
    rows = torch.arange(batch, device=device)
    k_cache[rows, :, lengths.long()] = torch.randn(batch, kv_heads, width, device=device)
    v_cache[rows, :, lengths.long()] = torch.randn(batch, kv_heads, width, device=device)
    lengths += 1
    query = torch.randn(batch, heads, 1, width, device=device)
    out = portattn.decode_attention(query, k_cache, v_cache, lengths)
    print(f"token {step}:", lengths.tolist(), bool(out.isfinite().all()))
