"""FlashAttention-3 in vllm's build, called as vLLM calls it: by position, into a tensor that is given."""

from __future__ import annotations

from typing import Any

import torch

from portattn.tools.bench.peers import fa3
from portattn.tools.bench.peers.availability import has_op

SPLITS_IN_GRAPHS = 32  # vLLM's default of flash_attn_max_num_splits_for_cuda_graph


def here() -> bool:
    return has_op("_vllm_fa3_C", "fwd")


class Forward:
    """One call with its arguments in the operator's order."""

    def __init__(self, **given: Any) -> None:
        self.op = torch.ops._vllm_fa3_C.fwd.default
        self.given = fa3.neutral() | given

    def __call__(self, **now: Any) -> Any:
        given = self.given | now if now else self.given
        return self.op(*(given[argument.name] for argument in self.op._schema.arguments))

    def prepared(self) -> Any:
        """The call with all arguments fixed: what Python adds to the operator's own cost is one call."""
        op, values = self.op, [self.given[argument.name] for argument in self.op._schema.arguments]
        return lambda: op(*values)

    def schedule(self, batch: int, page_size: int | None) -> torch.Tensor:
        """What vLLM's builder computes once a step."""
        return fa3.schedule(self.given, batch, page_size)
