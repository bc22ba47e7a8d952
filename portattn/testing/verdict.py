"""Whether what an operation gave is right: results, or gradients."""

from __future__ import annotations

import torch

from portattn.schema.call import Call
from portattn.testing import tolerance
from portattn.testing.oracle_gradients import judge_backward
from portattn.testing.random_writing import judge_writing


def judge(
    call: Call, out: torch.Tensor, lse: torch.Tensor | None, precision: str = "ieee", probabilities: str = "as_q"
) -> dict[str, int | float]:
    """As tolerance.judge. Of gradients `out` is delta, and those that are judged lie in the call's own memory; of what
    fills a cache `out` is nothing, and the cache is judged."""
    if call.problem.writes:
        return judge_writing(call)
    if call.problem.backward:
        return judge_backward(call, out, precision)
    return tolerance.judge(call, out, lse, precision, probabilities)
