# Written by scripts/typing_stubs.py from the signatures of the modules. Do not edit.
# fmt: off

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from portattn.api.request import Window as Window
from portattn.distributed.cache_shard import CacheShard as CacheShard
from portattn.distributed.collectives import Heads as Heads
from portattn.distributed.cost import context_parallel_cost as context_parallel_cost
from portattn.distributed.cost import decode_parallel_cost as decode_parallel_cost
from portattn.distributed.cost_report import Cost as Cost
from portattn.distributed.cost_report import Rates as Rates
from portattn.distributed.decode import DecodeParallel as _DecodeParallel
from portattn.distributed.parallel import ContextParallel as _ContextParallel
from portattn.distributed.sharding import Documents as Documents

class DecodeParallel(_DecodeParallel):
    @overload
    def decode_attention(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seqlens_k: torch.Tensor,
        *, return_lse: Literal[False] = False, **options: Any) -> torch.Tensor: ...
    @overload
    def decode_attention(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seqlens_k: torch.Tensor,
        *, return_lse: Literal[True], **options: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def decode_attention(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seqlens_k: torch.Tensor,
        *, return_lse: bool = False, **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def paged_attention(self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor,
        seqlens_k: torch.Tensor, *, return_lse: Literal[False] = False, **options: Any) -> torch.Tensor: ...
    @overload
    def paged_attention(self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor,
        seqlens_k: torch.Tensor, *, return_lse: Literal[True], **options: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def paged_attention(self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor,
        seqlens_k: torch.Tensor, *, return_lse: bool = False,
        **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def mla_attention(self, q_nope: torch.Tensor, q_rope: torch.Tensor, kv_pages: torch.Tensor,
        page_table: torch.Tensor, seqlens_k: torch.Tensor, *, return_lse: Literal[False] = False,
        **options: Any) -> torch.Tensor: ...
    @overload
    def mla_attention(self, q_nope: torch.Tensor, q_rope: torch.Tensor, kv_pages: torch.Tensor,
        page_table: torch.Tensor, seqlens_k: torch.Tensor, *, return_lse: Literal[True],
        **options: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def mla_attention(self, q_nope: torch.Tensor, q_rope: torch.Tensor, kv_pages: torch.Tensor,
        page_table: torch.Tensor, seqlens_k: torch.Tensor, *, return_lse: bool = False,
        **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def decode_parallel(mesh: Any = None, *, interleave: int = 1, heads: Heads = 'all',
    validate: bool | None = None) -> DecodeParallel: ...
class ContextParallel(_ContextParallel):
    @overload
    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        causal: bool | str = False, window: Window | None = None, chunk: None = None, softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: None = None,
        mask: None = None, seqlens_q: None = None, seqlens_k: None = None, dropout_p: float = 0.0,
        return_lse: Literal[False] = False, layout: str = 'bhsd', backend: str | None = None) -> torch.Tensor: ...
    @overload
    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        causal: bool | str = False, window: Window | None = None, chunk: None = None, softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: None = None,
        mask: None = None, seqlens_q: None = None, seqlens_k: None = None, dropout_p: float = 0.0,
        return_lse: Literal[True], layout: str = 'bhsd',
        backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        causal: bool | str = False, window: Window | None = None, chunk: None = None, softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, bias: None = None,
        mask: None = None, seqlens_q: None = None, seqlens_k: None = None, dropout_p: float = 0.0,
        return_lse: bool = False, layout: str = 'bhsd',
        backend: str | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def varlen_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int] | Documents, *, scale: float | None = None, causal: bool | str = False,
        window: Window | None = None, chunk: None = None, softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, dropout_p: float = 0.0,
        return_lse: Literal[False] = False, backend: str | None = None) -> torch.Tensor: ...
    @overload
    def varlen_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int] | Documents, *, scale: float | None = None, causal: bool | str = False,
        window: Window | None = None, chunk: None = None, softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, dropout_p: float = 0.0,
        return_lse: Literal[True], backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def varlen_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int] | Documents, *, scale: float | None = None, causal: bool | str = False,
        window: Window | None = None, chunk: None = None, softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, dropout_p: float = 0.0,
        return_lse: bool = False, backend: str | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def context_parallel(mesh: Any = None, *, method: str | None = None, layout: str | None = None,
    check: str = 'always') -> ContextParallel: ...
__all__ = ['CacheShard', 'ContextParallel', 'Cost', 'DecodeParallel', 'Rates', 'context_parallel',
    'context_parallel_cost', 'decode_parallel', 'decode_parallel_cost']
