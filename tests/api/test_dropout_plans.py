"""Plans of calls with dropout."""

import pytest
import torch
from support import Device

import portattn

KERNELS = "interpreter"


@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_planning_a_call_that_drops_needs_no_seed_and_draws_none(device: Device, backend: str) -> None:
    if device.path != KERNELS:
        pytest.skip("on an accelerator another path has its kernels")
    q, k, v = (torch.randn(1, 2, rows, 16, requires_grad=True) for rows in (9, 13, 13))
    state = torch.get_rng_state()
    plans = [portattn.plan("attention", q, k, v, dropout_p=0.1, backend=backend) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert plans[0] == plans[1]
    assert plans[0].problem.dropout
    assert plans[0].path == backend
    given = torch.tensor([7])
    assert portattn.plan("attention", q, k, v, dropout_p=0.1, dropout_seed=given, backend=backend) == plans[0]
