"""Collectives: process groups, a check that all ranks make the same call, merges by LSE, and sums of gradients.

A collective carries 32-bit words, so that neither NaN nor -inf changes. Sums of up to two parts are rounded to q's
dtype at once, like a rounded float32 sum; sums of more are float32."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.util
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from portattn.errors import ArgumentError, FallbackWarning, UnknownArgument
from portattn.launch.run import device_guard, load_kernels
from portattn.schema.lowering import FUSED

_DIGEST = 16  # bytes


@dataclass(frozen=True, slots=True)
class Ranks:
    """One dimension over which ranks share a call."""

    group: Any  # torch's process group; its collectives move the tensors
    rank: int  # this process among the members
    members: tuple[int, ...]  # global ranks, in the group's order
    name: str  # the mesh dimension's name, or "group"

    @property
    def size(self) -> int:
        return len(self.members)

    @classmethod
    def of_group(cls, group: Any, name: str = "group") -> Ranks:
        return cls(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)), name)


def dimensions(op: str, mesh: Any) -> tuple[Ranks, ...]:
    """Return the dimensions of a ProcessGroup, a DeviceMesh or all processes (None), outermost first."""
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
    """Return a group of the same ranks for host messages, its own or a new gloo one: all ranks must come together."""
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
    """Run one small collective per group and device, before only some of its ranks exchange tensors.

    torch's note on batch_isend_irecv (2.13): with NCCL, "if this API is the first collective call in the group […], all
    ranks of the group must participate in this API call; otherwise, the behavior is undefined". No rank may do so later
    than the others. gloo needs nothing of the kind, so no test with gloo can show it."""
    if device.type == "cpu":
        return
    done = _connected.setdefault(ranks.group, set())
    if device.type in done:
        return
    dist.all_reduce(torch.zeros(1, device=device), group=ranks.group)
    done.add(device.type)


class ByRank(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def agree(op: str, dims: Sequence[Ranks], values: Mapping[str, object], problem: ArgumentError | None = None) -> None:
    """Return if all ranks of all dimensions give the same values; otherwise raise one ArgumentError on every rank.

    `problem` is this rank's refusal, which then all ranks raise: every rank must come here, also to refuse. One message
    of 16 bytes goes to each other rank of each dimension; values (with a short repr) follow only if they differ."""
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
    """Format ranks: 1 -> "rank 1"; 0, 1, 2, 5 -> "ranks 0 to 2, 5"."""
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


WORD = torch.int32
WORD_BYTES = 4
Heads = Literal["all", "shard"]


def row_words(width: int, dtype: torch.dtype) -> int:
    """Return the words of one row: `width` elements, padded to whole words, and the LSE."""
    return -(-width * dtype.itemsize // WORD_BYTES) + 1


def packed(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Pack out (H, …, Dv) and lse (H, …) as (H, …, words), contiguous."""
    width = out.shape[-1]
    words = torch.empty(*out.shape[:-1], row_words(width, out.dtype), dtype=WORD, device=out.device)
    words.view(out.dtype)[..., :width].copy_(out)
    words[..., -1].copy_(lse.view(WORD))
    return words


def unpack_rows(words: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of (…, words): out (…, Dv) and lse (…)."""
    return words.view(dtype)[..., :width], words[..., -1].view(torch.float32)


def exchange_rows(words: torch.Tensor, group: Any, world_size: int, heads: Heads) -> torch.Tensor:
    """Exchange (H, …, words) in one collective: (N, H, …, words), or (N, H / N, …, words) with heads="shard"."""
    if world_size == 1:
        return words[None]
    if heads == "shard":
        found = torch.empty_like(words)
        dist.all_to_all_single(found, words, group=group)
        return found.unflatten(0, (world_size, words.shape[0] // world_size))
    found = words.new_empty((world_size * words.shape[0], *words.shape[1:]))
    dist.all_gather_into_tensor(found, words, group=group)
    return found.unflatten(0, (world_size, words.shape[0]))


def merge_partials(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge outs (N, …, Dv) and lses (N, …) into out (…, Dv), float32, and lse (…).

    Like portattn.merge_states in fewer launches: a part that attended nothing counts nothing, whatever its out holds.
    The order of sums is fixed: every rank has the same bits."""
    largest = lses.amax(0)
    base = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = torch.exp(lses - base)
    total = weights.sum(0)
    nothing = torch.isneginf(lses)[..., None]
    out = (outs.float().masked_fill(nothing, 0.0) * weights[..., None]).sum(0)
    empty = total == 0.0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, float("-inf"), base + torch.log(total))
    return out / total[..., None], lse


Rows = tuple[int, int]  # from the first on, up to the last, exclusive
BLOCK = 16  # rows of a program of merge_rows
OLDEST = (8, 0)  # compute capability from which on Triton compiles for NVIDIA's GPUs
PARTS = 2  # of a row, whose sum needs no float32 memory


@functools.cache
def can_fuse(device: torch.device) -> bool:
    """Return whether merge kernels run on this device (a host may lack a C compiler): tried once, warns if not."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        memory = torch.zeros(1, device=device)
        kernels: Any = load_kernels("portattn.kernels.combine", False)
        with device_guard(memory):
            kernels.pause[(1,)](memory, 0.0, 1, num_warps=1, **FUSED)
    except Exception as error:  # noqa: BLE001 whatever a compiler or a driver raises: the call goes on without
        text = f"partial results are merged by torch's operations: kernels do not run on {device}: {error}"
        warnings.warn(text, FallbackWarning, stacklevel=2)
        return False
    return True


def most_parts(rows: Iterable[Rows]) -> int:
    edges = sorted((place, step) for start, stop in rows if start < stop for place, step in ((start, 1), (stop, -1)))
    most = now = 0
    for _, step in edges:  # at one place ends come before beginnings
        now += step
        most = max(most, now)
    return most


class StateMerger:
    """Merge partial results as they come, at most `parts` of one row; out may be float32 until the end."""

    __slots__ = ("_device", "_dtype", "_made", "_sizes", "lse", "out")
    out: torch.Tensor
    lse: torch.Tensor

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, parts: int) -> None:
        self._dtype = dtype if parts <= PARTS else torch.float32
        self._sizes, self._device, self._made = tuple(sizes), device, False

    def add(self, rows: Rows, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result of the rows from rows[0] on; `out` may be kept or overwritten.

        Rows with an LSE of -inf may hold anything, except in the first part, which must hold 0, as calls return it."""
        if not self._made and rows == (0, self._sizes[2]):
            self.out, self.lse, self._made = out.to(self._dtype), lse, True
            return
        self.finish()
        at = slice(*rows)
        merge(self.out[:, :, at], self.lse[:, :, at], out, lse)

    def finish(self) -> None:
        if not self._made:
            self.out = torch.zeros(self._sizes, dtype=self._dtype, device=self._device)
            self.lse = torch.full(self._sizes[:3], float("-inf"), dtype=torch.float32, device=self._device)
            self._made = True

    def count_sinks(self, sinks: torch.Tensor, real: Rows | None) -> None:
        """Count the sinks (Hq,) once, for any number of ranks, in the `real` rows before padding (None for all)."""
        self.finish()
        at = slice(*real) if real is not None else slice(None)
        mine, before = self.out[:, :, at], self.lse[:, :, at]
        with_sink = torch.logaddexp(before, sinks.float()[None, :, None])
        nothing = with_sink == -torch.inf  # a sink of -inf, and no key: the difference of two infinities is NaN
        mine.mul_(torch.where(nothing, 1.0, torch.exp(before - with_sink))[..., None])
        before.copy_(with_sink)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge part (B, H, S, D) into out in place, with their LSEs; a part's rows at -inf may hold anything."""
    if not out.numel():
        return
    if can_fuse(out.device) and out.stride(3) == part.stride(3) == 1:
        _launch(out, lse, part, part_lse)
        return
    largest = torch.maximum(lse, part_lse)
    base = largest.masked_fill(torch.isneginf(largest), 0.0)
    kept, added = torch.exp(lse - base), torch.exp(part_lse - base)
    total = kept + added
    share = 1.0 / total.masked_fill(total == 0.0, 1.0)
    theirs = part.masked_fill_(torch.isneginf(part_lse)[..., None], 0.0).float()
    out.copy_(out.float().mul_((kept * share)[..., None]).addcmul_(theirs, (added * share)[..., None]))
    lse.copy_(base + torch.log(total))


def _launch(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    _, heads, rows, width = out.shape
    count = out.numel() // width
    strides = (stride for tensor in (out, lse, part, part_lse) for stride in tensor.stride()[:3])
    kernels: Any = load_kernels("portattn.kernels.combine", False)
    with device_guard(out):
        kernels.merge_rows[(-(-count // BLOCK),)](
            out, lse, part, part_lse, *strides, heads, rows, count,
            WIDTH=width, BLOCK_WIDTH=_power(width), BLOCK=BLOCK, **FUSED,
        )  # fmt: skip


def merge_words(words: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the ranks' packed partial results (N, …, words) in one order, so that all ranks have the same bits."""
    if torch.compiler.is_compiling() or not can_fuse(words.device):
        found, lse = merge_partials(*unpack_rows(words, width, dtype))
        return found.to(dtype), lse
    words = words.contiguous()
    out = torch.empty(*words.shape[1:-1], width, dtype=dtype, device=words.device)
    lse = torch.empty(words.shape[1:-1], dtype=torch.float32, device=words.device)
    if not lse.numel():
        return out, lse
    kernels: Any = load_kernels("portattn.kernels.combine", False)
    values, states = words.view(dtype), words.view(torch.float32)
    with device_guard(words):
        kernels.merge_parts[(lse.numel(),)](
            values, states, out, lse, lse.numel(),
            PARTS=words.shape[0], WIDTH=width, BLOCK_WIDTH=_power(width), VALUES=values.shape[-1],
            STATES=states.shape[-1], **FUSED,
        )  # fmt: skip
    return out, lse


def _power(width: int) -> int:
    return 1 << max(width - 1, 0).bit_length()


class Sum:
    """Sum of parts of a gradient (B, H, S, D) as they come; `parts` is the most of one row."""

    __slots__ = ("_dtype", "_found", "_sizes", "_wide")

    def __init__(self, like: torch.Tensor, parts: int) -> None:
        self._dtype, self._sizes = like.dtype, like.shape
        self._wide = like.dtype if parts <= PARTS else torch.float32
        self._found: torch.Tensor | None = None

    def add(self, rows: Rows, part: torch.Tensor) -> None:
        if self._found is None and rows == (0, self._sizes[2]):
            self._found = part.to(self._wide)
            return
        if self._found is None:
            self._found = torch.zeros(self._sizes, dtype=self._wide, device=part.device)
        self._found[:, :, slice(*rows)] += part

    def result(self, device: torch.device) -> torch.Tensor:
        if self._found is None:
            return torch.zeros(self._sizes, dtype=self._dtype, device=device)
        return self._found.to(self._dtype)
