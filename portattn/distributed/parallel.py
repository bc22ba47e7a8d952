"""Context parallel: attention of sequences that several ranks share, for training and for prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from portattn.api.autocast import is_on
from portattn.api.request import Result, Window
from portattn.api.transform_checks import leave_out, left_out
from portattn.distributed.arguments import (
    DTensorLayout,
    are_placed,
    axes,
    check_arguments,
    check_rows,
    description,
    documents_of,
    dtensor_layout,
)
from portattn.distributed.collectives import Ranks, agree, dimensions
from portattn.distributed.execution import Execution
from portattn.distributed.sharding import LAYOUTS, Documents, Shards
from portattn.errors import ArgumentError

OP = "context_parallel"
METHODS = ("ring", "ulysses")
CHECKS = ("always", "first")
_KINDS = 4096  # kinds of calls that check="first" remembers: a packed call's documents are part of its kind


def context_parallel(
    mesh: Any = None, *, method: str | None = None, layout: str | None = None, check: str = "always"
) -> ContextParallel:
    """Share sequences among the ranks of a process group or a mesh. Every rank must make this call.

    Args:
        mesh: a torch.distributed ProcessGroup, a DeviceMesh of one or two dimensions, or None for all processes. Of two
            dimensions the inner one exchanges heads (Ulysses) and the outer one is the ring
        method: for one dimension: "ring" (default; keys and values go round) or "ulysses" (heads are exchanged for
            rows)
        layout: "zigzag" (default; each rank has a piece of the first half of a sequence and its counterpart of the
            second, so that causal work is even) or "contiguous"
        check: "always": ranks compare each call in one small message from host to host; "first": only the first call of
            each kind, so that ranks which disagree later wait until the process group's time-out

    Returns:
        A ContextParallel, which cuts sequences and attends.

    Raises:
        ArgumentError: torch.distributed is not initialised, an argument is unknown, or ranks disagree.

    Examples:
        >>> import torch, portattn, torch.distributed as dist
        >>> from portattn.distributed import context_parallel
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # of one process; torchrun starts more
        >>> shared = context_parallel(layout="contiguous")
        >>> q, k, v = torch.randn(3, 1, 4, 64, 32).unbind()
        >>> out = shared.unshard(shared.attention(shared.shard(q), shared.shard(k), shared.shard(v), causal=True))
        >>> torch.allclose(out, portattn.attention(q, k, v, causal=True), atol=1e-5)
        True
        >>> dist.destroy_process_group()
    """
    dims = dimensions(OP, mesh)
    problem = None
    try:
        shards = _shards(dims, method, layout)
        if check not in CHECKS:
            raise ArgumentError(OP, "check", check, f"must be one of {', '.join(CHECKS)}")
    except ArgumentError as error:
        problem = error
    agree(OP, dims, {"method": method, "layout": layout, "check": check}, problem)
    return ContextParallel(dims, shards, check)


def _shards(dims: Sequence[Ranks], method: str | None, layout: str | None) -> Shards:
    layout = "zigzag" if layout is None else layout
    if layout not in LAYOUTS:
        raise ArgumentError(OP, "layout", layout, f"must be one of {', '.join(LAYOUTS)}")
    if method not in (None, *METHODS):
        raise ArgumentError(OP, "method", method, f"must be one of {', '.join(METHODS)}")
    if len(dims) > 2:
        raise ArgumentError(
            OP, "mesh", f"of {len(dims)} dimensions", "must have one or two (hint: a slice of the mesh)"
        )
    if len(dims) == 2:
        if method is not None:
            limit = "must be None of a mesh of two dimensions, which is a ring of Ulysses groups"
            raise ArgumentError(OP, "method", method, limit)
        return Shards(layout, dims[0].size, dims[1].size)
    return Shards(layout, 1, dims[0].size) if method == "ulysses" else Shards(layout, dims[0].size)


class ContextParallel:
    """Sequences that several ranks share; made by `context_parallel`.

    Attributes:
        shards: how a sequence is cut (portattn.distributed.sharding.Shards)
        dims: the ranks, by dimension (portattn.distributed.collectives.Ranks)

    Examples:
        >>> import torch.distributed as dist
        >>> from portattn.distributed import context_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> context_parallel(method="ulysses").shards
        Shards(layout='zigzag', ring=1, inner=1)
        >>> dist.destroy_process_group()
    """

    def __init__(self, dims: Sequence[Ranks], shards: Shards, check: str) -> None:
        self.dims, self.shards, self._check = tuple(dims), shards, check
        self._execution = Execution(shards, self._ring, self._inner)
        self._seen: set[str] = set()

    def __repr__(self) -> str:
        return f"ContextParallel({self.shards}, rank {self._place} of {self.shards.ring, self.shards.inner})"

    @property
    def _ring(self) -> Ranks | None:
        return self.dims[0] if self.shards.ring > 1 else None

    @property
    def _inner(self) -> Ranks | None:
        return self.dims[-1] if self.shards.inner > 1 else None

    @property
    def _place(self) -> tuple[int, int]:
        return (self._ring.rank if self._ring else 0), (self._inner.rank if self._inner else 0)

    def _rows(self, length: int, place: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        return list(self.shards.rows(length, *(self._place if place is None else place)))

    def positions(self, length: int, device: Any = None) -> torch.Tensor:
        """Return the positions in the whole sequence of this rank's rows, in their order: for rotary embeddings.

        Args:
            length: of the whole sequence
            device: of the result; None for torch's default

        Returns:
            (length / ranks,) int64.

        Raises:
            ArgumentError: The length does not divide.

        Examples:
            >>> import torch.distributed as dist
            >>> from portattn.distributed import context_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> context_parallel().positions(4)
            tensor([0, 1, 2, 3])
            >>> dist.destroy_process_group()
        """
        self._check_length("positions", "length", length)
        return torch.cat([torch.arange(*rows, device=device) for rows in self._rows(length)])

    def shard(self, tensor: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """Return this rank's rows of a tensor that every rank has whole. Nothing is sent.

        Args:
            tensor: any shape and dtype, as q (B, H, S, D)
            dim: the axis of the sequence's rows; 0 for packed rows (T, H, D)

        Returns:
            (…, S / ranks, …), contiguous; differentiable.

        Raises:
            ArgumentError: The length does not divide.

        Examples:
            >>> import torch, torch.distributed as dist
            >>> from portattn.distributed import context_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> context_parallel().shard(torch.zeros(1, 8, 64, 32)).shape
            torch.Size([1, 8, 64, 32])
            >>> dist.destroy_process_group()
        """
        dim = _axis("shard", tensor, dim)
        self._check_length("shard", f"tensor.shape[{dim}]", tensor.shape[dim])
        return torch.cat([tensor.narrow(dim, a, b - a) for a, b in self._rows(tensor.shape[dim])], dim)

    def unshard(self, tensor: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """Return the whole tensor from the ranks' parts, to look at results. Every rank must make this call.

        Args:
            tensor: this rank's, as out (B, H, S / ranks, D), detached or under torch.no_grad()
            dim: the axis of the sequence's rows

        Returns:
            (…, S, …), contiguous, on every rank.

        Raises:
            ArgumentError: The tensor requires gradients, or ranks disagree.

        Examples:
            >>> import torch, torch.distributed as dist
            >>> from portattn.distributed import context_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> shared, x = context_parallel(), torch.randn(1, 8, 64, 32)
            >>> torch.equal(shared.unshard(shared.shard(x)), x)
            True
            >>> dist.destroy_process_group()
        """
        op, problem = f"{OP}.unshard", None
        try:
            dim = _axis("unshard", tensor, dim)
            length = tensor.shape[dim] * self.shards.ranks
            self._check_length("unshard", f"tensor.shape[{dim}]·ranks", length)
            if tensor.requires_grad and torch.is_grad_enabled():
                limit = "must be False: call it under torch.no_grad(), or detach() (a loss is computed of local rows)"
                raise ArgumentError(op, "tensor.requires_grad", True, limit)
        except ArgumentError as error:
            problem = error
        same = {} if problem else {"tensor.shape": tuple(tensor.shape), "tensor.dtype": tensor.dtype, "dim": dim}
        agree(op, self.dims, same, problem)
        found = {self._place: tensor.detach().contiguous()}
        for axis, ranks in ((1, self._inner), (0, self._ring)):
            if ranks is not None:
                found = _gathered(found, ranks, axis)
        whole = tensor.new_empty((*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]))
        for place, part in found.items():
            at = 0
            for start, stop in self._rows(length, place):
                whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, at, stop - start))
                at += stop - start
        return whole

    def _check_length(self, name: str, argument: str, length: int) -> None:
        if length % self.shards.unit:
            limit = (
                f"must be a multiple of {self.shards.unit}: {self.shards.layout} shards over {self.shards.ranks} ranks"
            )
            raise ArgumentError(f"{OP}.{name}", argument, length, limit)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        causal: bool | str = False,
        window: Window | None = None,
        chunk: None = None,
        softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        bias: None = None,
        mask: None = None,
        seqlens_q: None = None,
        seqlens_k: None = None,
        dropout_p: float = 0.0,
        return_lse: bool = False,
        layout: str = "bhsd",
        backend: str | None = None,
    ) -> Result:
        """Attend this rank's rows to the keys of all ranks, like `portattn.attention` of the whole sequence.

        Gradients of q, k and v equal the whole call's. Gradients of sinks and slopes are parts of this rank's rows or
        heads: sum them over the ranks, as for any replicated parameter.

        Args:
            q: (B, Hq, S, D) of this rank's S rows, as `shard` cuts them
            k, v: (B, Hk, S, D) and (B, Hk, S, Dv) of the same rows. DTensors may be Shard(rows) over these ranks, or
                Shard(heads), which needs no messages
            scale, causal, window, softcap, return_lse, backend: as of portattn.attention; distances are the whole
                sequence's. Only attended keys are sent
            alibi_slopes: (Hq,) or (B, Hq) float32. A ring refuses to compute their gradient
            sinks: (Hq,): counted once, for any number of ranks
            layout: "bhsd", or "bshd": q, k, v and out are (B, S, H, D)
            chunk, bias, mask, seqlens_q, seqlens_k, dropout_p: refused

        Returns:
            out as q, (B, Hq, S, Dv) of q's dtype; with return_lse, (out, lse (B, Hq, S) float32).

        Raises:
            ArgumentError: Ranks disagree, or a rank refuses its call. Every rank raises.
            RuntimeError: A rank is gone, or does not answer within the process group's time-out (torch.distributed's
                own).

        Examples:
            >>> import torch, torch.distributed as dist
            >>> from portattn.distributed import context_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> q, k, v = torch.randn(1, 8, 64, 32), torch.randn(1, 2, 64, 32), torch.randn(1, 2, 64, 32)
            >>> context_parallel().attention(q, k, v, causal=True).shape
            torch.Size([1, 8, 64, 32])
            >>> dist.destroy_process_group()
        """
        given = {
            "q": q, "k": k, "v": v, "scale": scale, "causal": causal, "window": window, "chunk": chunk,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes, "sinks": sinks, "bias": bias, "mask": mask, "seqlens_q": seqlens_q,
            "seqlens_k": seqlens_k, "dropout_p": dropout_p, "return_lse": return_lse, "layout": layout,
            "backend": backend,
        }  # fmt: skip
        return left_out["context parallel"](self, given, None)

    def varlen_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int] | Documents,
        *,
        scale: float | None = None,
        causal: bool | str = False,
        window: Window | None = None,
        chunk: None = None,
        softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        return_lse: bool = False,
        backend: str | None = None,
    ) -> Result:
        """Attend packed documents that are cut across ranks, like `portattn.varlen_attention` of all their rows.

        Args:
            q: (T, Hq, D): this rank's T of the packed rows, as `shard(packed, dim=0)` cuts them
            k, v: (T, Hk, D) and (T, Hk, Dv) of the same rows
            cu_seqlens: (documents + 1,) int32 or int64 of all packed rows, the same on every rank; rows behind the last
                offset are padding and may hold anything. A device's tensor is read back in each call: pass a host's, or
                the result of `documents` for all layers
            scale, causal, window, softcap, sinks, dropout_p, return_lse, backend: as of `attention`
            alibi_slopes: (Hq,) or (documents, Hq) float32
            chunk: refused

        Returns:
            out (T, Hq, Dv) in q's dtype; with return_lse, (out, lse (Hq, T) float32). Padding gives 0 and -inf.

        Examples:
            >>> import torch, torch.distributed as dist
            >>> from portattn.distributed import context_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> q, k, v = torch.randn(44, 8, 32), torch.randn(44, 2, 32), torch.randn(44, 2, 32)
            >>> context_parallel().varlen_attention(q, k, v, [0, 5, 40], causal=True).shape
            torch.Size([44, 8, 32])
            >>> dist.destroy_process_group()
        """
        given = {
            "q": q, "k": k, "v": v, "scale": scale, "causal": causal, "window": window, "chunk": chunk,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes, "sinks": sinks, "dropout_p": dropout_p, "return_lse": return_lse,
            "backend": backend,
        }  # fmt: skip
        return left_out["context parallel"](self, given, (cu_seqlens,))

    def documents(self, cu_seqlens: torch.Tensor | Sequence[int]) -> Documents:
        """Read and check cu_seqlens once for the calls of all layers.

        Args:
            cu_seqlens: (B + 1,) int32 or int64, or integers: as of `varlen_attention`

        Returns:
            A Documents, which `varlen_attention` takes as its cu_seqlens.

        Raises:
            ArgumentError: The first offset is not 0, or offsets fall.

        Examples:
            >>> import torch, torch.distributed as dist
            >>> from portattn.distributed import context_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> context_parallel().documents(torch.tensor([0, 5, 40])).cu
            (0, 5, 40)
            >>> dist.destroy_process_group()
        """
        return documents_of(f"{OP}.documents", cu_seqlens)

    def _call(self, given: dict[str, Any], packed: tuple[Any] | None) -> Result:
        op = f"{OP}.attention" if packed is None else f"{OP}.varlen_attention"
        problem = lying = documents = None
        said: dict[str, Any] = {}
        try:
            given, lying = self._local(op, given, packed is not None)
            documents = None if packed is None else documents_of(op, packed[0])
            by_heads = lying is not None and lying.by_heads
            found = check_arguments(op, self.shards, given, documents, by_heads)
            self._execution.refuse_what_cannot_run(op, found, by_heads)
            said = description(given, documents, (("placements", None if lying is None else lying.by_heads),))
        except ArgumentError as error:
            problem = error
            if problem.op != op:
                problem = ArgumentError(op, error.argument, error.value, error.limit)
        kind = repr((op, said))
        if problem is not None or self._check == "always" or kind not in self._seen:
            agree(op, self.dims, said, problem)
            self._note(kind)
        out, lse = self._execution.run(found, by_heads)
        if packed is not None:
            out, lse = out[0].transpose(0, 1), lse[0]
        elif given["layout"] == "bshd":
            out = out.transpose(1, 2)
        if lying is not None:
            out, lse = lying.out(out), lying.lse(lse)
        return (out, lse) if given["return_lse"] else out

    def _note(self, kind: str) -> None:
        """Store an agreed kind of call for check="first"; all ranks forget their kinds after the same call."""
        if self._check == "first":
            if len(self._seen) >= _KINDS:
                self._seen.clear()
            self._seen.add(kind)

    def _local(self, op: str, given: dict[str, Any], packed: bool) -> tuple[dict[str, Any], DTensorLayout | None]:
        tensors = {name: given[name] for name in "qkv"}
        lying = None
        if are_placed(list(tensors.values())):
            at = (-1, 1, 0) if packed else axes(op, given["layout"])
            lying = dtensor_layout(op, self.dims, tensors, at)
            tensors = {name: tensor.to_local() for name, tensor in tensors.items()}
        if is_on(tensors["q"]):
            dtype = torch.get_autocast_dtype(tensors["q"].device.type)
            tensors = {n: t.to(dtype) if isinstance(t, torch.Tensor) else t for n, t in tensors.items()}
        if not packed:
            axes(op, given["layout"])
        given = given | tensors
        check_rows(op, given, packed)
        return given, lying


leave_out(
    "context parallel",
    lambda shared, given, packed: shared._call(given, packed),
    "context parallel calls torch.distributed from host to host before it sends anything",
)


def _axis(name: str, tensor: torch.Tensor, dim: int) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{OP}.{name}", "tensor", type(tensor).__name__, "must be a torch.Tensor")
    if not isinstance(dim, int):
        raise ArgumentError(f"{OP}.{name}", "dim", dim, "must be an integer")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ArgumentError(f"{OP}.{name}", "dim", dim, f"must be an axis of the tensor, which has {tensor.ndim}")
    return dim % tensor.ndim


def _gathered(
    parts: dict[tuple[int, int], torch.Tensor], ranks: Ranks, axis: int
) -> dict[tuple[int, int], torch.Tensor]:
    found = {}
    for place, part in parts.items():
        several = [torch.empty_like(part) for _ in range(ranks.size)]
        dist.all_gather(several, part, group=ranks.group)
        for rank, one in enumerate(several):
            found[(rank, place[1]) if axis == 0 else (place[0], rank)] = one
    return found
