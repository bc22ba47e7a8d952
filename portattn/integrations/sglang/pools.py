"""SGLang's pools as pages and page tables.

`req_to_token` (rows, context) holds the slot of each token of a request. Its allocator gives whole pages, so a page's
id is the slot of its first token divided by the page size; with pages of one token it is the slot itself.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool


class Pools:
    """The pools of one model runner."""

    def __init__(self, runner: Any) -> None:
        self.page_size: int = runner.page_size
        self.kv = runner.token_to_kv_pool
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.context: int = self.req_to_token.shape[1]
        self.has_window_pool = isinstance(self.kv, SWAKVPool) and self.kv.swa_layer_nums > 0

    def columns(self, tokens: int) -> int:
        """Return the columns of a page table with room for so many tokens, at most a request's row."""
        return -(-min(max(tokens, 1), self.context) // self.page_size)

    def in_window_pool(self, layer_id: int) -> bool:
        """Whether a layer's keys lie in the pool of sliding windows, which numbers its slots itself."""
        return self.has_window_pool and bool(self.kv.layers_mapping[layer_id][1])

    def fill_table(self, out: torch.Tensor, requests: torch.Tensor, start: torch.Tensor | None = None) -> None:
        """Write the requests' page ids to `out` (B, columns) int32, of which none is beyond the request's row.

        requests  (B,) rows of req_to_token
        start     (B,) the token that the first column is to hold: an encoder-decoder request has its encoder's tokens
                  first. Pages of one token only
        """
        if start is None:
            firsts = self.req_to_token[:, :: self.page_size][:, : out.shape[1]]
            torch.index_select(firsts, 0, requests, out=out)
        else:
            columns = start.long()[:, None] + torch.arange(out.shape[1], device=out.device)
            out.copy_(self.req_to_token[requests.long()[:, None], columns.clamp_(max=self.context - 1)])
        if self.page_size > 1:
            out.div_(self.page_size, rounding_mode="floor")

    def fill_window_table(self, out: torch.Tensor, table: torch.Tensor) -> None:
        """Write to `out` where the window pool has the pages of `table`; page 0 for one it dropped, unseen by all."""
        slots = self.kv.translate_loc_from_full_to_swa(table.long() * self.page_size)
        out.copy_(slots.div(self.page_size, rounding_mode="floor").clamp_(min=0))

    def pages(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Keys and values of a layer, (P, page, Hk, D) and (P, page, Hk, Dv) or heads first, and the page_layout."""
        keys, values = self.kv.get_kv_buffer(layer_id)
        if keys.ndim == 4:
            return keys, values, "hpd"
        return self._in_pages(keys), self._in_pages(values), "phd"

    def latent_pages(self, layer_id: int) -> torch.Tensor:
        """The latent rows of a layer, (P, page, R + E)."""
        return self._in_pages(self.kv.get_key_buffer(layer_id).squeeze(1))

    def _in_pages(self, slots: torch.Tensor) -> torch.Tensor:
        # A pool's size need not be a multiple of its pages'; no page of its allocator begins in the rest.
        whole = slots.shape[0] // self.page_size
        return slots[: whole * self.page_size].unflatten(0, (whole, self.page_size))
