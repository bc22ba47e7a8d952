"""Op libraries: files that register peers' kernels under torch.ops, from a folder or from installed packages."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import torch

from portattn.tools.bench.gate import FAILURES, reason
from portattn.tools.bench.peers.availability import has_op

# (namespace of torch.ops, op) -> the package that may bring it, and the library's place there.
_INSTALLED = {
    ("_vllm_fa3_C", "fwd"): ("vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
    ("_flashmla_C", "dense_decode_fwd"): ("vllm", "_flashmla_C*.so"),
    ("flash_attn_3", "fwd"): ("flash_attn_3", "_C*.so"),
}
# A CUDA runtime of another release than torch's, for libraries that were linked to it: found by its name once loaded.
_RUNTIMES = "libcudart.so.*"


def load(folder: Path | None) -> dict[str, str]:
    """Load op libraries, each *.so of the folder and what installed packages have: {file's name: "loaded", or why not}.

    Paths are left out of the names: what a result says must not depend on where files lie.
    """
    seen: dict[str, str] = {}
    if folder:
        for file in sorted(folder.glob(_RUNTIMES)):
            try:
                ctypes.CDLL(str(file), mode=ctypes.RTLD_LOCAL)
            except OSError as failure:
                seen[file.name] = reason(failure)
        seen |= {file.name: _loaded(file) for file in sorted(folder.glob("*.so"))}
    for (namespace, op), (package, pattern) in _INSTALLED.items():
        if has_op(namespace, op):
            continue
        spec = importlib.util.find_spec(package)  # of a package without dots: nothing is imported
        for place in (spec and spec.submodule_search_locations) or ():
            seen |= {file.name: _loaded(file) for file in sorted(Path(place).glob(pattern))}
    return seen


def _loaded(file: Path) -> str:
    try:
        torch.ops.load_library(str(file))
    except FAILURES as failure:
        return reason(failure.__cause__ or failure)  # torch's own message leaves out why
    return "loaded"
