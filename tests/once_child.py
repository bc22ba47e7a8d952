"""Run by test_kinds.py, with fakedriver's library: first calls on CPU tensors that count as an H100's. Compiled
in a child process first, as on any device. Prints as JSON how often each kernel was compiled, and which of Triton's own
launchers were made: before 3.7 it has a C compiler make one for each kernel, which takes longer than all else that this
process does."""

# ruff: noqa: E402 - the driver comes before Triton

import collections
import json
import os
from pathlib import Path
from typing import Any

import fakedriver
import torch

fake = fakedriver.install()
import fakechip
import triton
from triton.runtime import driver

import portattn

launchers: list[str] = []
make = driver.active.launcher_cls


def launcher(source: Any, metadata: Any) -> Any:
    launchers.append(metadata.name)
    return make(source, metadata)


driver.active.launcher_cls = launcher
fakechip.pretend()


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def call() -> None:
    """Arguments that are aligned and those that are not, numbers that are multiples of 16 and others, strings, None."""
    portattn.attention(zeros(2, 8, 100, 64), zeros(2, 2, 130, 64), zeros(2, 2, 130, 64), causal=True)
    shifted = zeros(2, 8, 101, 65)[..., 1:]
    portattn.attention(shifted, zeros(2, 2, 131, 64), zeros(2, 2, 131, 64), softcap=30.0, return_lse=True)
    lengths = torch.full((2,), 4000, dtype=torch.int32)
    portattn.decode_attention(zeros(2, 8, 1, 128), zeros(2, 2, 4096, 128), zeros(2, 2, 4096, 128), lengths)
    indices, counts = torch.zeros(1, 8, 128, dtype=torch.int32), torch.full((1, 8), 128, dtype=torch.int32)
    portattn.sparse_attention(zeros(1, 8, 1, 64), zeros(1, 2, 2048, 64), zeros(1, 2, 2048, 64), indices, counts)


found: dict[str, Any] = {"paths": []}
with portattn.settings(isolate="auto", canary="never", fallback="silent", backend="triton"):
    call()
if triton.__version__ == "3.6.0":
    with portattn.settings(isolate="auto", canary="never"):
        portattn.attention(zeros(2, 8, 512, 128), zeros(2, 2, 512, 128), zeros(2, 2, 512, 128), causal=True)
        plan = portattn.last_plan()
        found["paths"].append(plan.path if plan else "")
cache = Path(os.environ["TRITON_CACHE_DIR"])
found["compiled"] = collections.Counter(path.stem for path in cache.rglob("*.cubin"))
found["launchers"] = launchers
print(json.dumps(found))
