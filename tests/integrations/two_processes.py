"""Two processes of torch.distributed with gloo on this CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


def outputs(program: Path, folder: Path) -> list[str]:
    """What each rank printed. The program gets its rank, and a file in the folder by which the ranks find each other.
    Skips where this torch has no gloo."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    ranks = [subprocess.Popen([sys.executable, str(program), str(rank), str(folder / "file")], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True) for rank in range(2)]  # fmt: skip
    done = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors for _, errors in done)
    return [output for output, _ in done]
