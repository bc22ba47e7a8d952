"""The Python packages of FlashAttention: flash_attn (2) and flash_attn_interface (3), by the functions they document.

github.com/Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py. Both align
causal masks bottom-right, take (B, S, H, D) or packed (T, H, D) with any strides but along D, and head_dim up to 256.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, as_is, transpose_heads
from portattn.tools.bench.peers.availability import missing, module
from portattn.tools.bench.tensors import Tensors

WIDEST = 256


@dataclass(frozen=True, slots=True)
class Package:
    """One of the two.

    places   where its module may be; the first that is installed counts
    pages    its name for a page table
    page     tokens of which a page has a multiple
    dropout  whether its functions have dropout_p
    """

    name: str
    places: tuple[str, ...]
    pages: str
    page: int
    dropout: bool = False

    def absent(self) -> str:
        """Of several places the first one's reason."""
        return "" if self._place() else missing(self.places[0])

    def _place(self) -> str:
        return next((place for place in self.places if not missing(place)), "")

    def contenders(self, case: Case, t: Tensors) -> dict[str, Build]:
        latent_or_chosen = case.op in ("mla_attention", "sparse_attention")
        if latent_or_chosen or case.dtype == "fp32" or case.head_dim > WIDEST or case.page_size % self.page:
            return {}
        if case.dropout and not self.dropout:
            return {}
        if case.op == "attention" and case.lengths_q:  # padded queries: neither has lengths of queries for full slots
            return {}
        return {self.name: functools.partial(self._build, case, t)}

    def _build(self, case: Case, t: Tensors) -> Contender:
        functions: Any = module(self._place())
        left, right = (-1 if side is None else side for side in case.window)
        options: dict[str, Any] = {
            "softmax_scale": case.scale, "causal": case.causal != "none", "window_size": (left, right),
        }  # fmt: skip
        if case.dropout:
            options["dropout_p"] = case.dropout
        if case.deterministic:
            options["deterministic"] = True
        longest = max(case.queries), max(case.keys)
        if case.op == "attention":
            given = tuple(transpose_heads(x) for x in (t.q, t.k, t.v))
            return Contender(lambda: _out(functions.flash_attn_func(*given, **options)), transpose_heads)
        if case.op == "varlen_attention":
            packed = (t.q, t.k, t.v, t.cu_seqlens_q, t.cu_seqlens_k, *longest)
            return Contender(lambda: _out(functions.flash_attn_varlen_func(*packed, **options)), as_is)
        used = t.seqlens_k
        if used is None:
            used = torch.full((case.batch,), case.seq_k, dtype=torch.int32, device=t.q.device)
        options["cache_seqlens"] = used
        if not case.page_size:
            given = tuple(transpose_heads(x) for x in (t.q, t.k, t.v))
            return Contender(lambda: _out(functions.flash_attn_with_kvcache(*given, **options)), transpose_heads)
        options[self.pages] = t.page_table
        if case.packed:
            return self._packed_pages(functions, case, t, options)
        cache = (transpose_heads(t.q), t.k, t.v)
        return Contender(lambda: _out(functions.flash_attn_with_kvcache(*cache, **options)), transpose_heads)

    def _packed_pages(self, functions: Any, case: Case, t: Tensors, options: dict[str, Any]) -> Contender:
        """3 takes packed queries over pages as they are; 2 by its function of packed sequences, which reads as many
        keys as cu_seqlens_k says."""
        if self.pages == "page_table":
            options |= {"cu_seqlens_q": t.cu_seqlens_q, "max_seqlen_q": max(case.queries)}
            return Contender(lambda: _out(functions.flash_attn_with_kvcache(t.q, t.k, t.v, **options)), as_is)
        used = options.pop("cache_seqlens")
        cu = torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(torch.int32)
        given = (t.q, t.k, t.v, t.cu_seqlens_q, cu, max(case.queries), max(case.keys))
        return Contender(lambda: _out(functions.flash_attn_varlen_func(*given, **options)), as_is)


def _out(result: Any) -> torch.Tensor:
    """Early releases of 3 return (out, LSE)."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


FA2 = Package("flash_attn", ("flash_attn",), "block_table", 256, dropout=True)
# Its module is one by itself; some builds have it in their package.
FA3 = Package("fa3/interface", ("flash_attn_interface", "flash_attn_3.flash_attn_interface"), "page_table", 1)
