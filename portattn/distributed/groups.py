"""Process groups, dimensions of a DeviceMesh, and the check that all ranks make one and the same call.

A rank that refuses its call, or that makes another one than the others, would leave these waiting for messages that
never come. So every rank first tells all others, in a few bytes from host to host, what it is about to do; a
difference is one error on every rank.
"""

from __future__ import annotations

import datetime
import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from portattn.errors import ArgumentError, UnknownArgument

_DIGEST = 16  # bytes


@dataclass(frozen=True, slots=True)
class Ranks:
    """One dimension over which ranks share a call: a process group.

    group    torch's process group; its collectives move the tensors
    rank     this process among the members
    members  global ranks, in the group's order
    name     the mesh dimension's name, or "group"
    """

    group: Any
    rank: int
    members: tuple[int, ...]
    name: str

    @property
    def size(self) -> int:
        return len(self.members)

    @classmethod
    def of_group(cls, group: Any, name: str = "group") -> Ranks:
        return cls(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)), name)


def dimensions(op: str, mesh: Any) -> tuple[Ranks, ...]:
    """Return the dimensions of a caller's mesh, outermost first.

    mesh  a ProcessGroup, a DeviceMesh of any number of dimensions, or None for all processes

    Raises ArgumentError for another type, if torch.distributed is absent or not initialised, or if this process is not
    one of the ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(op, "mesh", mesh, "torch.distributed is not initialised: call init_process_group first")
    if mesh is None:
        return (Ranks.of_group(dist.group.WORLD),)
    if isinstance(mesh, dist.ProcessGroup):
        if dist.get_rank() not in dist.get_process_group_ranks(mesh):
            raise ArgumentError(op, "mesh", mesh, "this process is not a member of it")
        return (Ranks.of_group(mesh),)
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, DeviceMesh):
        if mesh.get_coordinate() is None:
            raise ArgumentError(op, "mesh", mesh, "this process is not one of its ranks")
        names = mesh.mesh_dim_names or tuple(f"dim{place}" for place in range(mesh.ndim))
        return tuple(Ranks.of_group(mesh.get_group(place), name) for place, name in enumerate(names))
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(op, "mesh", mesh, "this process is not a member of it")
    raise ArgumentError(op, "mesh", mesh, "must be a ProcessGroup, a DeviceMesh or None for all processes")


def control_group(ranks: Ranks) -> Any:
    """A group of the same ranks whose messages go from host to host: the group itself where it has gloo on the CPU.

    A group of a device's backend alone gets one of gloo beside it, once, with its time-out: all its ranks must come
    here together.
    """
    group = ranks.group
    if _has_host_messages(group):
        return group
    if group not in _made:
        _made[group] = _control(group, ranks.members)
    return _made[group]


# Weakly: a group that is destroyed must not be kept, nor its threads and connections.
_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _has_host_messages(group: Any) -> bool:
    return torch.device("cpu") in group._device_types and "gloo" in dist.get_backend_config(group).lower()


def _control(group: Any, members: tuple[int, ...]) -> Any:
    timeout = datetime.timedelta(minutes=10)
    if torch.device("cpu") not in group._device_types:
        device = next(iter(group._device_types))
        timeout = getattr(group._get_backend(device).options, "_timeout", timeout)
    return dist.new_group(list(members), backend="gloo", timeout=timeout, use_local_synchronization=True)


_connected: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def connect(ranks: Ranks, device: torch.device) -> None:
    """What a group needs before some of its ranks, and not others, send one another tensors of a device: once.

    torch's note on batch_isend_irecv (2.13): with NCCL, "if this API is the first collective call in the group […], all
    ranks of the group must participate in this API call; otherwise, the behavior is undefined". Nor may a rank do so
    later than the others. So each rank comes here first, for one small collective. gloo needs nothing of the kind, and
    no test with gloo can show it.
    """
    if device.type == "cpu":
        return
    done = _connected.setdefault(ranks.group, set())
    if device.type in done:
        return
    dist.all_reduce(torch.zeros(1, device=device), group=ranks.group)
    done.add(device.type)


class ByRank(str):
    """Values by rank, as an error prints them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def agree(op: str, dims: Sequence[Ranks], values: Mapping[str, object], problem: ArgumentError | None = None) -> None:
    """Return where all ranks of all dimensions give the same values; raise one ArgumentError on every rank otherwise.

    values   what must be the same everywhere, by the name of the argument: small things with a repr
    problem  why this rank refuses its call, if it does: then all ranks raise that, which names the rank

    Every rank must come here, also with a call that it is going to refuse. One message of 16 bytes goes to each other
    rank of each dimension; the values themselves follow only where they differ.
    """
    said: Any = {name: repr(value) for name, value in values.items()}
    if problem is not None:
        unknown = isinstance(problem, UnknownArgument)
        said = (problem.op, problem.argument, repr(problem.value), problem.limit, unknown)
    digest = hashlib.blake2b(repr(said).encode(), digest_size=_DIGEST).digest()
    same = True
    for ranks in reversed(dims):
        found = _gather_digest(ranks, digest)
        same = same and len(set(found)) == 1
        # Of a group that differs inside, something that no other group has: all of them learn of it.
        digest = found[0] if same else hashlib.blake2b(b"".join(found), digest_size=_DIGEST).digest()
    if same and problem is None:
        return
    told: dict[int, Any] = {dist.get_rank(): said}
    for ranks in reversed(dims):
        gathered: list[Any] = [None] * ranks.size
        dist.all_gather_object(gathered, told, group=control_group(ranks))
        told = {rank: what for part in gathered for rank, what in part.items()}
    _raise(op, told)


def _gather_digest(ranks: Ranks, digest: bytes) -> list[bytes]:
    mine = torch.tensor(list(digest), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(found, mine, group=control_group(ranks))
    return [bytes(part.tolist()) for part in found]


def _raise(op: str, told: Mapping[int, Any]) -> NoReturn:
    refused = {rank: what for rank, what in sorted(told.items()) if isinstance(what, tuple)}
    if refused:
        first = next(iter(refused.values()))
        alike = [rank for rank, what in refused.items() if what == first]
        where = "" if len(alike) == len(told) else f" ({_ranks(alike)})"
        op, argument, value, limit, unknown = first
        if unknown:  # whose text has no value
            raise UnknownArgument(op, argument, limit + where)
        raise ArgumentError(op, argument, ByRank(value), limit + where)
    names = list(dict.fromkeys(name for what in told.values() for name in what))
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, what in sorted(told.items()):
            by_value.setdefault(what.get(name, "not given"), []).append(rank)
        if len(by_value) > 1:
            text = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            raise ArgumentError(op, name, ByRank(text), "must be the same on every rank")
    raise AssertionError("ranks differ in nothing that they told")


def _ranks(ranks: Sequence[int]) -> str:
    """1 -> "rank 1"; 0, 1, 2, 5 -> "ranks 0 to 2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
