"""The arguments of a flash_attn_with_kvcache call, and their checks, which come before any write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from portattn.config import current
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn.core import ScoreArguments, lengths_of, size_of
from portattn.schema.tensors import INT32_MAX, KV_FORMAT
from portattn.validate.checks import as_int32, check_dense, check_size, has_no_data
from portattn.validate.values import cu_seqlens, reads


def rotary_style(interleaved: bool) -> str:
    return "interleaved" if interleaved else "neox"


def check_tables(op: str, cos: Any, sin: Any, q: torch.Tensor) -> None:
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, torch.Tensor) or table.ndim != 2:
            given = tuple(table.shape) if isinstance(table, torch.Tensor) else type(table).__name__
            raise ArgumentError(op, name, given, "must be a torch.Tensor (positions, rotary_dim / 2)")
        if not table.dtype.is_floating_point:
            raise ArgumentError(op, f"{name}.dtype", table.dtype, "must be a floating-point dtype")
        if table.device != q.device:
            raise ArgumentError(op, f"{name}.device", str(table.device), f"must be q's, {q.device}")
    if cos.shape != sin.shape:
        raise ArgumentError(op, "rotary_sin.shape", tuple(sin.shape), f"must be rotary_cos's, {tuple(cos.shape)}")
    if not cos.shape[0] or not 2 <= 2 * cos.shape[1] <= q.shape[-1]:
        limit = f"must have a row for each position and 1..{q.shape[-1] // 2} columns, half of head_dim at most"
        raise ArgumentError(op, "rotary_cos.shape", tuple(cos.shape), limit)


def as_written(table: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return a table in a dtype that the writing operations take: k's and float32 stay, others become float32."""
    return table if table.dtype in (torch.float32, k.dtype) else table.float()


def rotate_queries(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Return queries (..., H, D) with R columns rotated by positions (...), clamped to the tables; rounded once."""
    angle = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (table[angle].float().unsqueeze(-2) for table in (cos, sin))  # (..., 1, R / 2)
    width = 2 * cos.shape[1]
    turned, rest = q[..., :width].float(), q[..., width:]
    if interleaved:
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    both = first * c - second * s, second * c + first * s
    found = torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
    return torch.cat((found.to(q.dtype), rest), dim=-1)


@dataclass(frozen=True)
class CachedCall:
    """A call, by the arguments of FlashAttention-3 (generation 2 has a part of them)."""

    op: str
    table_name: str
    q: Any
    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    scores: ScoreArguments
    cos: Any = None
    sin: Any = None
    interleaved: bool = True
    cache_seqlens: Any = None
    batch_idx: Any = None
    leftpad: Any = None
    table: Any = None
    cu_seqlens_q: Any = None
    max_seqlen_q: Any = None
    cu_seqlens_k_new: Any = None
    rotary_seqlens: Any = None
    descales: tuple[Any, Any, Any] = (None, None, None)
    num_splits: int | None = None
    return_lse: bool = False
    sinks: Any = None
    narrow: bool = False  # q, k and v came in the float8 of the cache

    @property
    def appends(self) -> bool:
        return self.k is not None

    @property
    def batch(self) -> int:
        return int(self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1)

    @property
    def capacity(self) -> int:
        rows = self.k_cache.shape[1]
        return int(rows if self.table is None else rows * self.table.shape[1])

    @property
    def by_slots(self) -> bool:
        others = (self.table, self.batch_idx, self.cu_seqlens_q, self.cu_seqlens_k_new, self.rotation)
        return any(value is not None for value in others)

    @property
    def rotation(self) -> Any:
        """Return the first positions of the rotation, if not cache_seqlens: rotary_seqlens, but with tables only."""
        return None if self.cos is None else self.rotary_seqlens


def check(call: CachedCall) -> None:
    op = call.op
    _check_dense(call)
    axes = {"q": 4 if call.cu_seqlens_q is None else 3, "k_cache": 4, "v_cache": 4}
    if call.appends or call.v is not None:
        axes |= dict.fromkeys(("k", "v"), 4 if call.cu_seqlens_k_new is None else 3)
    for name, ndim in axes.items():
        tensor = getattr(call, name)
        if not isinstance(tensor, torch.Tensor):
            hint = "; k and v are given together" if name in ("k", "v") else ""
            raise ArgumentError(op, name, type(tensor).__name__, f"must be a torch.Tensor{hint}")
        if tensor.ndim != ndim:
            words = "(batch, seqlen, heads, head_dim)" if ndim == 4 else "(tokens, heads, head_dim)"
            raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), f"must be {words}")
    if call.appends and call.cache_seqlens is None:
        raise ArgumentError(op, "cache_seqlens", None, "must say where k and v go")
    if (call.cos is None) != (call.sin is None):
        name = "rotary_sin" if call.sin is None else "rotary_cos"
        raise ArgumentError(op, name, None, "must be given too: rotary_cos and rotary_sin go together")
    if call.cos is not None and not call.appends:
        raise ArgumentError(op, "rotary_cos", tuple(call.cos.shape), "goes with k and v, which are not given")
    if call.cu_seqlens_k_new is not None and call.k is None:
        raise ArgumentError(op, "cu_seqlens_k_new", tuple(call.cu_seqlens_k_new.shape), "goes with k and v")
    if call.cu_seqlens_q is not None:
        lengths_of(op, "cu_seqlens_q", call.cu_seqlens_q)
        if not call.cu_seqlens_q.shape[0]:
            raise ArgumentError(op, "cu_seqlens_q.shape", (0,), "must be (batch + 1,)")
    if call.cu_seqlens_k_new is not None:
        _check_new_beginnings(call)
    if call.cu_seqlens_q is not None and call.max_seqlen_q is None:
        raise ArgumentError(op, "max_seqlen_q", None, "must be given with cu_seqlens_q")
    if call.cu_seqlens_q is not None and call.leftpad is not None:
        check_size(op, "max_seqlen_q", size_of(call.max_seqlen_q))
    if call.table is None and call.batch_idx is None and call.k_cache.shape[0] != call.batch:
        raise ArgumentError(op, "k_cache's batch", call.k_cache.shape[0], f"must be q's, {call.batch}")
    if call.table is not None and (not isinstance(call.table, torch.Tensor) or call.table.ndim != 2):
        given = tuple(call.table.shape) if isinstance(call.table, torch.Tensor) else type(call.table).__name__
        raise ArgumentError(op, call.table_name, given, "must be an int32 torch.Tensor (batch, pages a sequence)")
    if call.table is not None and call.batch_idx is not None and call.batch and not call.table.shape[0]:
        limit = "must have a row for each sequence that cache_batch_idx names"
        raise ArgumentError(op, f"{call.table_name}.shape", tuple(call.table.shape), limit)
    _check_lengths(call)
    if call.cos is not None:
        check_tables(op, call.cos, call.sin, call.q if call.q.dtype not in KV_FORMAT else call.q.bfloat16())


def _check_dense(call: CachedCall) -> None:
    alone = {
        "rotary_cos": call.cos, "rotary_sin": call.sin, "rotary_seqlens": call.rotary_seqlens,
        "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k_new": call.cu_seqlens_k_new, "q_descale": call.descales[0],
        "k_descale": call.descales[1], "v_descale": call.descales[2],
    }  # fmt: skip
    others = {
        "q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, "k": call.k, "v": call.v,
        call.table_name: call.table, "cache_batch_idx": call.batch_idx, "cache_leftpad": call.leftpad,
        "cache_seqlens": call.cache_seqlens, "max_seqlen_q": call.max_seqlen_q,
    }  # fmt: skip
    for name, value in (alone | others).items():
        check_dense(call.op, name, value)
    for name, value in alone.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise ArgumentError(call.op, name, type(value).__name__, "must be a torch.Tensor")


def _check_new_beginnings(call: CachedCall) -> None:
    name, beginnings = "cu_seqlens_k_new", call.cu_seqlens_k_new
    if beginnings.dtype != torch.int32:
        limit = f"must be torch.int32{as_int32(name, beginnings.dtype)}"
        raise ArgumentError(call.op, f"{name}.dtype", beginnings.dtype, limit)
    if tuple(beginnings.shape) != (call.batch + 1,):
        limit = f"must be (batch + 1,), ({call.batch + 1},)"
        raise ArgumentError(call.op, f"{name}.shape", tuple(beginnings.shape), limit)
    if beginnings.device != call.q.device:
        raise ArgumentError(call.op, f"{name}.device", str(beginnings.device), f"must be q's, {call.q.device}")


def _check_lengths(call: CachedCall) -> None:
    if type(call.cache_seqlens) is int and not -INT32_MAX <= call.cache_seqlens <= INT32_MAX:
        limit = f"must be in 0..{call.capacity}, the rows there are"
        raise ArgumentError(call.op, "cache_seqlens", call.cache_seqlens, limit)
    named = {
        "cache_batch_idx": call.batch_idx, "cache_leftpad": call.leftpad, "rotary_seqlens": call.rotary_seqlens,
        "cache_seqlens": None if type(call.cache_seqlens) is int else call.cache_seqlens,
    }  # fmt: skip
    for name, tensor in named.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            other = "an integer, or " if name == "cache_seqlens" else ""
            limit = f"must be {other}an int32 torch.Tensor ({call.batch},)"
            raise ArgumentError(call.op, name, type(tensor).__name__, limit)
        if tensor.dtype != torch.int32:
            limit = f"must be torch.int32{as_int32(name, tensor.dtype)}"
            raise ArgumentError(call.op, f"{name}.dtype", tensor.dtype, limit)
        if tuple(tensor.shape) != (call.batch,):
            limit = f"must be (batch,), ({call.batch},)"
            raise ArgumentError(call.op, f"{name}.shape", tuple(tensor.shape), limit)
        if tensor.device != call.q.device:
            raise ArgumentError(call.op, f"{name}.device", str(tensor.device), f"must be q's, {call.q.device}")


def check_values(call: CachedCall, before: torch.Tensor) -> None:
    """Check lengths and indices, read back if the setting says so: on a CPU."""
    if torch.compiler.is_dynamo_compiling():
        return
    if not reads(current(), call.q):
        _check_longest(call, before)
        return
    if call.cu_seqlens_q is not None and call.leftpad is not None:
        cu_seqlens(call.op, "q", call.cu_seqlens_q, call.q.shape[0], call.max_seqlen_q)
    if call.cu_seqlens_k_new is not None:
        cu_seqlens(call.op, "k_new", call.cu_seqlens_k_new, call.k.shape[0], call.k.shape[0])
    rows = [0] * call.batch
    if call.appends:
        whole = call.k.shape[1] if call.cu_seqlens_k_new is None else 0
        rows = [whole] * call.batch if call.cu_seqlens_k_new is None else call.cu_seqlens_k_new.diff().tolist()
    pads = [0] * call.batch if call.leftpad is None else call.leftpad.tolist()
    for index, (length, new, pad) in enumerate(zip(before.tolist(), rows, pads, strict=True)):
        if length > call.capacity - new or (length < 0 and not call.appends):
            raise _no_room(call, f"cache_seqlens[{index}]", length, new)
        if not 0 <= pad <= max(length, 0):
            raise ArgumentError(
                call.op, f"cache_leftpad[{index}]", pad, f"must be in 0..{length}, cache_seqlens[{index}]"
            )
    whose = "the sequences of the cache" if call.table is None else f"the rows of {call.table_name}"
    sequences = (call.k_cache if call.table is None else call.table).shape[0]
    for index, place in enumerate([] if call.batch_idx is None else call.batch_idx.tolist()):
        if not 0 <= place < sequences:
            limit = f"must be in 0..{sequences - 1}, {whose}"
            raise ArgumentError(call.op, f"cache_batch_idx[{index}]", place, limit)
    if call.cos is not None and call.q.numel():
        positions = query_positions(call, before)
        most = int(positions.max()) if positions.numel() else 0
        if most >= call.cos.shape[0]:
            limit = f"must be more, a row for each position: the last query is at {most}"
            raise ArgumentError(call.op, "rotary_cos.shape[0]", call.cos.shape[0], limit)


def _check_longest(call: CachedCall, before: torch.Tensor) -> None:
    """Check that pages hold the longest sequence, on a GPU that waits for it: flash_attn's generation 2 does so."""
    if call.table_name != "block_table" or call.table is None or not before.numel() or call.q.device.type != "cuda":
        return
    # A graph under capture cannot read anything back; rows beyond the pages then go nowhere.
    if current().validate == "never" or has_no_data(call.q) or torch.cuda.is_current_stream_capturing():
        return
    longest, new = int(before.max()), call.k.shape[1] if call.appends else 0
    if longest > call.capacity - new:
        raise _no_room(call, "cache_seqlens.max()", longest, new)


def _no_room(call: CachedCall, name: str, length: int, new: int) -> ArgumentError:
    rows = f"for {new} new rows of {call.capacity}" if new else "the rows there are"
    limit = f"must be in 0..{call.capacity - new}, {rows}"
    if call.table is not None:
        limit += f" in {call.table_name}'s {call.table.shape[1]} pages of {call.k_cache.shape[1]}"
    return ArgumentError(call.op, name, length, limit)


def query_positions(call: CachedCall, before: torch.Tensor) -> torch.Tensor:
    first = before if call.rotation is None else call.rotation
    scores = call.scores
    # Without a mask that orders them, all queries of a sequence stand where its new keys begin.
    ordered = scores.causal or scores.window is not None or scores.chunk is not None
    if call.cu_seqlens_q is None:
        return first[:, None] + torch.arange(call.q.shape[1], device=first.device) * int(ordered)
    if not call.batch:
        return torch.zeros(call.q.shape[0], dtype=torch.int64, device=first.device)
    sequence, within = places(call.cu_seqlens_q, call.q.shape[0])
    return first[sequence] + within * int(ordered)


def places(beginnings: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each packed row's sequence and place there; rows after the last sequence count as the last one's."""
    at = torch.arange(rows, device=beginnings.device)
    sequence = torch.bucketize(at, beginnings[1:], right=True).clamp(max=beginnings.shape[0] - 2)
    return sequence, at - beginnings[sequence]
