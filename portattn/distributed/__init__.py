"""Attention over several ranks of torch.distributed (docs/context-parallel.md); `import portattn` loads none of it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> module.
_PUBLIC = {
    "context_parallel": "portattn.distributed.parallel",
    "ContextParallel": "portattn.distributed.parallel",
    "decode_parallel": "portattn.distributed.decode",
    "DecodeParallel": "portattn.distributed.decode",
    "CacheShard": "portattn.distributed.cache_shard",
    "context_parallel_cost": "portattn.distributed.cost",
    "decode_parallel_cost": "portattn.distributed.cost",
    "Rates": "portattn.distributed.cost_report",
    "Cost": "portattn.distributed.cost_report",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from portattn.distributed.cache_shard import CacheShard as CacheShard
    from portattn.distributed.cost import context_parallel_cost as context_parallel_cost
    from portattn.distributed.cost import decode_parallel_cost as decode_parallel_cost
    from portattn.distributed.cost_report import Cost as Cost
    from portattn.distributed.cost_report import Rates as Rates
    from portattn.distributed.decode import DecodeParallel as DecodeParallel
    from portattn.distributed.decode import decode_parallel as decode_parallel
    from portattn.distributed.parallel import ContextParallel as ContextParallel
    from portattn.distributed.parallel import context_parallel as context_parallel


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'portattn.distributed' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
