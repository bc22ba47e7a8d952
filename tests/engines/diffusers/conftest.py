"""portattn registered in diffusers for one test: by the setting, or by its kernels alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import support
import torch

if TYPE_CHECKING:
    from portattn.integrations.diffusers import DiffusersRegistration


@pytest.fixture
def registered() -> Iterator[DiffusersRegistration]:
    from portattn.integrations.diffusers import register

    handle = register()
    yield handle
    handle.remove()


@pytest.fixture
def kernels(device: support.Device) -> Iterator[DiffusersRegistration]:
    """By portattn's Triton kernels: on the accelerator, or under the interpreter."""
    from portattn.integrations.diffusers import register

    handle = register("portattn_kernels", backend=device.path)
    yield handle
    handle.remove()


@pytest.fixture(autouse=True)
def quiet() -> None:
    """set_attention_backend warns at each call that backends are experimental. And the same numbers in every test."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    torch.manual_seed(0)
