"""Peers: other libraries' attention, if this machine happens to have it. None of them is a dependency."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from portattn.bench import peer_fa3, peer_flashmla, peer_flex, peer_sdpa, peer_torch
from portattn.bench.cases import Case
from portattn.bench.contenders import Build
from portattn.bench.gate import FAILURES, reason
from portattn.bench.tensors import Tensors


class Peer(Protocol):
    """What a peer_*.py has. A contender's name is the library's, and after a slash the way in which it is called."""

    def available(self) -> bool:
        """Whether the library is in this process."""
        ...

    def contenders(self, case: Case, t: Tensors) -> dict[str, Build]:
        """Its ways to compute the case, by contender's name; none where the case is not its subject."""
        ...


PEERS: dict[str, Peer] = {
    "sdpa": peer_sdpa,
    "torch": peer_torch,
    "flex": peer_flex,
    "fa3": peer_fa3,
    "flashmla": peer_flashmla,
}

# (namespace of torch.ops, op) -> the package that may bring it, and the library's place there.
_INSTALLED = {
    ("_vllm_fa3_C", "fwd"): ("vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
    ("_flashmla_C", "dense_decode_fwd"): ("vllm", "_flashmla_C*.so"),
    ("flash_attn_3", "fwd"): ("flash_attn_3", "_C*.so"),
}


def has_op(namespace: str, op: str) -> bool:
    """Whether torch.ops has this op, which a loaded library registers."""
    return hasattr(getattr(torch.ops, namespace), op)


def load(folder: Path | None) -> dict[str, str]:
    """Load op libraries, each *.so of the folder and what installed packages have: {file: "loaded", or why not}."""
    seen = {str(file): _loaded(file) for file in sorted(folder.glob("*.so"))} if folder else {}
    for (namespace, op), (package, pattern) in _INSTALLED.items():
        if has_op(namespace, op):
            continue
        spec = importlib.util.find_spec(package)  # of a package without dots: nothing is imported
        for place in (spec and spec.submodule_search_locations) or ():
            seen |= {str(file): _loaded(file) for file in sorted(Path(place).glob(pattern))}
    return seen


def _loaded(file: Path) -> str:
    try:
        torch.ops.load_library(str(file))
    except FAILURES as failure:
        return reason(failure.__cause__ or failure)  # torch's own message leaves out why
    return "loaded"


def contenders(case: Case, t: Tensors, wanted: Sequence[str] = tuple(PEERS)) -> dict[str, Build]:
    """Every contender of the wanted peers that are here."""
    found: dict[str, Build] = {}
    for name in wanted:
        if PEERS[name].available():
            found |= PEERS[name].contenders(case, t)
    return found
