"""Fixtures of the transformers and SDPA tests: models built once, portattn registered for one test, one thread.
transformers is imported inside: without the package the test files skip themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from portattn.integrations.transformers import Registration


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are an order of magnitude slower when threads share them out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    from tiny_models import FAMILIES, build

    return {family: build(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def t5() -> Any:
    from tiny_models import build_t5

    return build_t5()


@pytest.fixture(autouse=True)
def registration(request: pytest.FixtureRequest) -> Iterator[Registration | None]:
    """portattn in transformers, for the tests of that; the others do without the package."""
    if request.node.get_closest_marker("transformers") is None:
        yield None
        return
    from portattn.integrations.transformers import register

    handle = register()
    yield handle
    handle.remove()


@pytest.fixture(autouse=True)
def sdpa_says_all(request: pytest.FixtureRequest) -> None:
    """The SDPA tests start without a last route, with the same random numbers, and every cause is warned of again."""
    torch.manual_seed(0)
    if request.node.get_closest_marker("transformers") is None:
        from portattn.integrations import sdpa_mapping

        sdpa_mapping.forget_warnings()
        sdpa_mapping._last_route.set(None)
