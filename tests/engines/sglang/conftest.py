"""SGLang on a CPU: the stub of torchvision, and the process-wide configuration that its classes read."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "stubs"))  # after site-packages: a real torchvision wins


@pytest.fixture(scope="session", autouse=True)
def published() -> None:
    """The configuration of a server on a CPU with nothing set, as a scheduler publishes it."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    from portattn.integrations.sglang import activate

    activate()
    publish(ServerArgs(model_path="none", device="cpu", attention_backend="portattn"), role="scheduler")
