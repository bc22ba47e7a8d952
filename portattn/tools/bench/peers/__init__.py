"""Peers: other libraries' attention, if this machine has it. `PEERS` has a row for each; none is a dependency."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portattn.errors import ArgumentError
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, ours, with_gradients
from portattn.tools.bench.peers import flash, packages, torch_functions
from portattn.tools.bench.peers.packages import missing
from portattn.tools.bench.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Peer:
    """A library's adapter: `contenders` returns its ways to compute a case by name, `library/way`; none if not covered.

    Layouts are made before the timed call. It computes a backward case's forward; `with_gradients` does the rest."""

    contenders: Callable[[Case, Tensors], dict[str, Build]]
    absent: Callable[[], str] = str  # returns why the library cannot be used in this process, or ""
    differentiable: bool = False  # autograd records its calls: the peer takes part in backward cases
    quantised: bool = False  # it reads quantised caches: the peer takes part in such cases
    distribution: str = ""  # the distribution whose version a result records
    slow: str = ""  # why the peer takes long before anything is timed


def _unquantised(case: Case, t: Tensors) -> dict[str, Build]:
    return {"unquantised": lambda: ours(case.unquantised(), t.unquantised())} if case.quantised else {}


_FA2 = ("flash_attn",)
_FA3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")  # a module by itself, or in a build's package
PEERS = {
    "sdpa": Peer(torch_functions.sdpa, differentiable=True), "torch": Peer(torch_functions.others, differentiable=True),
    "flex": Peer(
        torch_functions.flex, differentiable=True, slow="compiled by torch for this case, which takes tens of seconds"
    ),
    "fa3": Peer(flash.fa3, flash.fa3_absent), "flashmla": Peer(flash.flashmla, flash.flashmla_absent),
    "flash_attn": Peer(
        functools.partial(flash.package, "flash_attn", _FA2, pages="block_table", page=256, dropout=True),
        functools.partial(flash.package_absent, _FA2), differentiable=True, distribution="flash-attn",
    ),
    "flash_attn_interface": Peer(
        functools.partial(flash.package, "fa3/interface", _FA3, pages="page_table"),
        functools.partial(flash.package_absent, _FA3), differentiable=True, distribution="flash-attn-3",
    ),
    "flashinfer": Peer(
        packages.flashinfer, functools.partial(missing, "flashinfer"), quantised=True, distribution="flashinfer-python"
    ),
    "xformers": Peer(packages.xformers, functools.partial(missing, "xformers.ops"), distribution="xformers"),
    "flag_gems": Peer(packages.flag_gems, functools.partial(missing, "flag_gems"), distribution="flag-gems"),
    "sage": Peer(packages.sage, functools.partial(missing, "sageattention"), distribution="sageattention"),
    "unquantised": Peer(_unquantised, quantised=True),
}  # fmt: skip
# Libraries that are given a quantised cache's numbers in the queries' dtype, and read so many more bytes.
UNQUANTISED = ("unquantised",)
# Contenders that are timed to be seen beside the others: never the best peer, and no goal is held against them.
REFERENCES = (torch_functions.MATH,)


def library(name: str) -> str:
    return name.partition("/")[0]


def contenders(
    case: Case, t: Tensors, wanted: Sequence[str] = tuple(PEERS), others: Mapping[str, Peer] | None = None
) -> dict[str, Build]:
    """Return every contender of the wanted peers that are here; others: peers from files, asked for all cases."""
    chosen = [
        peer
        for peer in map(PEERS.__getitem__, wanted)
        if (peer.differentiable or not case.backward) and (peer.quantised or not case.quantised)
    ]
    given = t.leaves() if case.backward else t
    found: dict[str, Build] = {}
    for peer in (*chosen, *(others or {}).values()):
        if not peer.absent():
            found |= peer.contenders(case, given)
    return with_gradients(given, found, case.deterministic) if case.backward else found


def presence(wanted: Iterable[str], others: Mapping[str, Peer]) -> dict[str, str]:
    """Return "here" for each peer, or why it is absent. Imports the installed ones."""
    return {name: peer.absent() or "here" for name, peer in ({n: PEERS[n] for n in wanted} | dict(others)).items()}


def from_file(path: Path) -> tuple[str, Peer]:
    """Return a Python file's name and peer: its `contenders(case, t)`, and `absent()` if any. Raises ArgumentError."""
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
    return path.stem, Peer(program.contenders, getattr(program, "absent", str))
