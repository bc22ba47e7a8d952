"""Running a variant by itself in a test: on a device that it is for, with poisoned memory, against float64."""

import pytest
import torch
from support import Device

from portattn.api.dispatch import detect_target
from portattn.launch.run import run_variant
from portattn.planning.backend import Variant
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import judge


def device_for(variant: Variant, problem: Problem, device: Device) -> Device:
    """The device, where the variant takes the problem on it; elsewhere the test is skipped, with the reason."""
    if device.path == "interpreter":
        pytest.skip(f"needs an {' or '.join(variant.arches)}")
    target, _ = detect_target(torch.device(device.name).type, None)
    no = variant.rejects(problem, target)
    if no is not None:
        pytest.skip(no.reason)
    return device


def assert_variant_right(variant: Variant, call: Call) -> None:
    with nan_filled_memory():
        _, out, lse = run_variant(variant, call)
    facts = judge(call, out, lse, probabilities=variant.probabilities)
    said = f"{facts} of {call.problem}"
    assert not facts["wrong"], said
    assert facts["error"] <= facts["budget"], said
    assert facts.get("lse_error", 0.0) <= facts.get("lse_budget", 0.0) + 1e-30, said
