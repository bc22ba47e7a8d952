"""Launches give each kernel the arguments that it has. Triton's interpreter passes over others; a compiler does not."""

from __future__ import annotations

import importlib

import pytest
import support
from opcalls import CALLS, problem
from support import Device

from portattn.launch.meta_tensors import meta_call
from portattn.launch.run import kernel_calls


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_the_kernels_parameters(name: str, splits: int, device: Device) -> None:
    made = support.core_plan(support.CPU, problem(name), launch={"splits": splits} if splits > 1 else {})
    launches, _, _ = kernel_calls(made, meta_call(made.problem), 3)
    assert launches
    for launch in launches:
        kernel = getattr(importlib.import_module(launch.module), launch.function)
        # In the kernel's order: a compile passes them by position (compile/compile_check.py).
        assert list(launch.arguments) == [
            argument for argument in kernel.arg_names if argument not in launch.constexprs
        ]
        assert set(launch.constexprs) <= set(kernel.arg_names)
