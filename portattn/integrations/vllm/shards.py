"""Decode context parallelism: a request's keys lie in the caches of several ranks, turn by turn.

The ranks of a group have the same key head, and query heads of their own. What a rank's cache holds of the past it
attends with the query heads of all; vLLM's collectives merge the ranks' results by their LSE, and give each rank its
heads back. A step's new tokens are on every rank, with keys and values as the layer has just made them: attention among
them needs no cache. The two are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from portattn.errors import ArgumentError
from portattn.integrations.vllm import NAME


class LayerGroupShards:
    """How the caches of one group of layers are shared among ranks: world == 1 where they are not."""

    def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: torch.device) -> None:
        self.world, self.rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        # Of its own, and kept: a captured graph reads it at this address.
        most = vllm_config.scheduler_config.max_num_seqs if self.world > 1 else 0
        self._lens = torch.zeros(most, dtype=torch.int32, device=device)

    def context_lens(self, common: Any) -> torch.Tensor | None:
        """(requests,) int32: keys of each request's past in this rank's cache; None where caches are not shared.

        Raises ArgumentError where the requests differ in causality.
        """
        if self.world == 1:
            return None
        if isinstance(common.causal, torch.Tensor):
            limit = "must be a bool with decode context parallelism"
            raise ArgumentError(NAME, "causal", "a tensor", limit)
        count = common.seq_lens.shape[0]
        if count > self._lens.shape[0]:  # more than the scheduler's limit: only where no scheduler is
            self._lens = self._lens.new_zeros(count)
        rows = common.query_start_loc[1 : count + 1] - common.query_start_loc[:count]
        lens = get_dcp_local_seq_lens(common.seq_lens - rows, self.world, self.rank, self.interleave)
        return self._lens[:count].copy_(lens)


def no_request_has_a_past(common: Any) -> bool:
    """Whether a batch has prompts' beginnings alone, as the host knows it. All ranks find the same."""
    bound = common.seq_lens_cpu_upper_bound
    if bound is None:
        return False
    count = bound.shape[0]
    rows = common.query_start_loc_cpu[1 : count + 1] - common.query_start_loc_cpu[:count]
    return bool((bound <= rows).all())


def combine() -> Callable[..., Any]:
    """vLLM's merge of the ranks' results that its configuration chose. Its kernels are imported where ranks share."""
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

    config = get_current_vllm_config_or_none()
    by_all_to_all = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
    return dcp_a2a_lse_reduce if by_all_to_all else cp_lse_ag_out_rs


def refuse_features(**given: Any) -> None:
    """Refuse what needs a key's position, or keys that are not the layer's own.

    Raises ArgumentError for the first that is given.
    """
    for name, value in given.items():
        if value:
            raise ArgumentError(NAME, name, value, "is not supported with decode context parallelism")


def reasons(use_dcp: bool = False, head_size: int = 1, **asked: Any) -> list[str]:
    """Why a configuration cannot have decode context parallelism, as vLLM asks; empty where it can or does not ask."""
    if not use_dcp:
        return []
    names = {
        "has_sliding_window": "sliding windows", "use_non_causal": "attention in both directions",
        "use_mm_prefix": "partial multimodal token full attention",
    }  # fmt: skip
    found = [f"{what} with DCP not supported" for name, what in names.items() if asked.get(name)]
    if asked.get("attn_type") == AttentionType.ENCODER_DECODER:  # an encoder's keys are no past of the decoder's rows
        found.append("cross attention with DCP not supported")
    if head_size & (head_size - 1):  # vLLM's kernels that merge ranks have tiles of a head
        found.append(f"head size {head_size} with DCP not supported: no power of 2")
    return found
