"""A batch over a paged cache: warmed up before the first request, then by a prepared handle."""

from typing import Any

import torch

import portattn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
batch, heads, kv_heads, width, page = 4, 8, 2, 64, 16
pages = torch.randn(32, 2, page, kv_heads, width, device=device)  # K and V of a page side by side: views, no copies
k_pages, v_pages = pages[:, 0], pages[:, 1]
table = torch.randperm(32, device=device).int().reshape(batch, 8)
lengths = torch.tensor([5, 40, 128, 77], dtype=torch.int32, device=device)
query = torch.randn(batch, heads, 1, width, device=device)

report = portattn.warmup(
    [
        {
            "op": "paged_attention", "q": query, "k_pages": k_pages, "v_pages": v_pages, "page_table": table,
            "seqlens_k": lengths,
        }
    ]
)  # fmt: skip
print("warmed up:", [one.failed or one.path for one in report.specs])

arguments: dict[str, Any] = {"k_pages": k_pages, "v_pages": v_pages, "page_table": table, "seqlens_k": lengths}
handle = portattn.prepare("paged_attention", query, **arguments)
out = handle.run(query, **arguments)
print("prepared:", torch.equal(out, portattn.paged_attention(query, **arguments)))
print("path:", handle.plan.path)
