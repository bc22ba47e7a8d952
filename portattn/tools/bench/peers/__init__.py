"""Peers: other libraries' attention, if this machine happens to have it. None of them is a dependency."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from portattn.errors import ArgumentError
from portattn.tools.bench.backward import with_gradients
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build
from portattn.tools.bench.peers import (
    fa3,
    flaggems,
    flash_packages,
    flashinfer,
    flashmla,
    flex,
    sage,
    sdpa,
    torch_functions,
    unquantised,
    xformers,
)
from portattn.tools.bench.peers.libraries import load as load
from portattn.tools.bench.tensors import Tensors


class Peer(Protocol):
    """What an adapter has. A contender's name is the library's, and after a slash the way in which it is called."""

    def absent(self) -> str:
        """Why the library cannot be used in this process; an empty text where it can."""
        ...

    def contenders(self, case: Case, t: Tensors) -> dict[str, Build]:
        """Its ways to compute the case, by contender's name; none where the case is not its subject.

        A layout that it asks for is made before the timed call; what the call itself converts is timed. Of a backward
        case they compute the forward, from tensors that require gradients: `with_gradients` does the rest.
        """
        ...


PEERS: dict[str, Peer] = {
    "sdpa": sdpa,
    "torch": torch_functions,
    "flex": flex,
    "fa3": fa3,
    "flashmla": flashmla,
    "flash_attn": flash_packages.FA2,
    "flash_attn_interface": flash_packages.FA3,
    "flashinfer": flashinfer,
    "xformers": xformers,
    "flag_gems": flaggems,
    "sage": sage,
    "unquantised": unquantised,
}
# Whose calls autograd records: the others have no part in backward cases. A file's peer is asked for all cases.
DIFFERENTIABLE = ("sdpa", "torch", "flex", "flash_attn", "flash_attn_interface")
# Who reads quantised caches: the others have no part in such cases. A file's peer is asked for all cases.
QUANTISED = ("flashinfer", "unquantised")
# Who is given a quantised cache's numbers in the queries' dtype, and reads so many more bytes.
UNQUANTISED = ("unquantised",)
# Who takes long before anything is timed, and why.
SLOW = {"flex": "compiled by torch for this case, which takes tens of seconds"}
# Timed to be seen beside the others: never the best peer, and no goal is held against them.
REFERENCES = (sdpa.MATH,)


def library(name: str) -> str:
    """The library of a contender's name."""
    return name.partition("/")[0]


def contenders(
    case: Case, t: Tensors, wanted: Sequence[str] = tuple(PEERS), others: Mapping[str, Peer] | None = None
) -> dict[str, Build]:
    """Every contender of the wanted peers that are here; others: peers that files have brought, by name."""
    found: dict[str, Build] = {}
    asked = [name for name in wanted if name in DIFFERENTIABLE or not case.backward]
    asked = [name for name in asked if name in QUANTISED or not case.quantised]
    given = t.leaves() if case.backward else t
    for peer in (*(PEERS[name] for name in asked), *(others or {}).values()):
        if not peer.absent():
            found |= peer.contenders(case, given)
    return with_gradients(given, found, case.deterministic) if case.backward else found


def presence(wanted: Iterable[str], others: Mapping[str, Peer]) -> dict[str, str]:
    """Of each peer "here", or why it is absent. Imports those that are installed."""
    named = {name: PEERS[name] for name in wanted} | dict(others)
    return {name: peer.absent() or "here" for name, peer in named.items()}


def from_file(path: Path) -> tuple[str, Peer]:
    """A peer that is a Python file with `contenders(case, t)`, and `absent()` if it can be; its name is the file's.

    Raises ArgumentError when the file is no such program.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ArgumentError("bench", "--peer-file", path.name, "must be a Python file")
    program: Any = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(program)
    except Exception as failure:
        raise ArgumentError("bench", "--peer-file", path.name, f"cannot be imported: {failure!r}") from failure
    if not callable(getattr(program, "contenders", None)):
        raise ArgumentError("bench", "--peer-file", path.name, "must define contenders(case, t)")
    if not hasattr(program, "absent"):
        program.absent = lambda: ""
    return path.stem, program
