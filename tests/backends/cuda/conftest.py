"""The releases of Triton whose code for sm_90 is tested: the installed one, and those of this machine's lab."""

from collections.abc import Iterator

import pytest
import support
from fakedriver import triton_folders

from portattn.planning.registry import parse_target
from portattn.schema.target import Target
from portattn.worker.client import Worker

TRITONS = triton_folders()


@pytest.fixture(scope="module", params=("3.6.0", "3.7.1", "3.8.0", "3.9.0"))
def release(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    if version not in TRITONS:
        pytest.skip(f"no Triton {version} for this Python: `portattn lab create triton=={version}` makes one")
    return version


@pytest.fixture(scope="module")
def release_target(release: str) -> Target:
    return parse_target("cuda:sm_90", f"triton=={release}")


@pytest.fixture(scope="module")
def release_compiler(release_target: Target) -> Iterator[Worker]:
    with support.compiler_of(str(release_target.toolchain)) as worker:
        yield worker
