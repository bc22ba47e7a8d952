"""Small problems of every op and feature for the kernels, calls with lengths of one's own, and running them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support import TILE, Device, assert_right, run_core

from portattn.schema.call import Call
from portattn.schema.problem import Problem

CAUSAL = ("none", "bottom_right", "top_left")
SMALL = {"batch": 2, "heads_q": 4, "heads_k": 2, "head_dim": 16, "dtype": "fp32", "return_lse": True}
PAGED = {"seq_k": 40, "page_size": 8, "seqlens_k": True}
LATENT = PAGED | {"op": "mla_attention", "heads_k": 1, "head_dim": 24, "head_dim_v": 16}
# Every op with two or three tiles of keys, the last one ragged.
OPS: dict[str, dict[str, Any]] = {
    "dense": {"op": "attention", "heads_q": 2, "heads_k": 1, "seq_q": 19, "seq_k": 37},
    "padded": {
        "op": "attention", "heads_q": 2, "heads_k": 1, "seq_q": 19, "seq_k": 37, "seqlens_q": True, "seqlens_k": True,
        "leftpad_q": True, "leftpad_k": True,
    },
    "varlen": {
        "op": "varlen_attention", "batch": 3, "heads_q": 2, "heads_k": 1, "seq_q": 19, "seq_k": 37, "total_q": 33,
        "total_k": 70,
    },
    "decode": {"op": "decode_attention", "seq_q": 3, "seq_k": 37, "seqlens_k": True, "leftpad_k": True},
    "paged": PAGED | {"op": "paged_attention", "seq_q": 3},
    "whole pages": PAGED | {"op": "paged_attention", "seq_q": 3, "page_size": 16, "seq_k": 48, "page_layout": "hpd"},
    "ragged": PAGED | {
        "op": "paged_attention", "batch": 3, "heads_q": 2, "heads_k": 1, "seq_q": 19, "total_q": 22,
    },
    "sparse": {"op": "sparse_attention", "seq_q": 1, "seq_k": 37, "tokens": 20, "seqlens_k": True},
    "sparse paged": PAGED | {"op": "sparse_attention", "seq_q": 1, "tokens": 20}, "mla": LATENT | {"seq_q": 3},
    "mla ragged": LATENT | {"batch": 3, "heads_q": 2, "seq_q": 19, "total_q": 22},
}  # fmt: skip
SPLITTING = [name for name in OPS if name not in ("dense", "padded", "varlen")]


def problem(name: str, **fields: Any) -> Problem:
    return Problem(**(SMALL | OPS[name] | fields))


def page_loops(p: Problem) -> tuple[str, ...]:
    """The values of `page_loop` that are legal with tiles of TILE keys."""
    return ("flat_masked",) if p.page_size % TILE else ("per_page", "flat_masked")


def run(device: Device, call: Call, splits: int = 1, **lowering: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernel on tiles of 16 × 16; pages that hold no whole tile are read as they must be."""
    return run_core(device, call, {"page_loop": page_loops(call.problem)[0]} | lowering, {"splits": splits})


def check(device: Device, call: Call, splits: int = 1, extra: float = 0.0, **lowering: str) -> None:
    assert_right(call, *run(device, call, splits, **lowering), extra)


NAN_BYTE = 0x7F  # e4m3's and e5m2's; of int8 the largest number


def _without_nan(tensor: torch.Tensor) -> None:
    """In place. Tensors of bytes hold float8 numbers, or int8, of which some change as well."""
    if tensor.dtype == torch.int8:
        tensor.masked_fill_((tensor & NAN_BYTE) >= 0x7C, 0x30)  # of e5m2 the infinite ones as well
    else:
        tensor.nan_to_num_(0.5)


def _fill_with_nan(tensor: torch.Tensor) -> None:
    tensor.fill_(NAN_BYTE if tensor.dtype == torch.int8 else float("nan"))


def with_lengths(call: Call, keys: Sequence[int], queries: Sequence[int] | None = None) -> Call:
    """The call with these numbers of keys and, of packed sequences, queries. NaN is only behind the packed rows. Pages
    are given out anew, in order from the last; what a sequence does not need of its table is -1."""
    p = call.problem
    for name in ("q", "k", "v", "q_rope"):
        if getattr(call, name) is not None:
            _without_nan(getattr(call, name))

    def int32(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=call.q.device)

    if queries is not None:
        call.cu_seqlens_q = int32([0, *itertools.accumulate(queries)])
        _fill_with_nan(call.q[:, :, sum(queries) :])
    if p.total_k is not None:
        call.cu_seqlens_k = int32([0, *itertools.accumulate(keys)])
        for tensor in (call.k, call.v):
            _fill_with_nan(tensor[:, :, sum(keys) :])
        return call
    call.seqlens_k = int32(keys)
    if p.page_size:
        owned = torch.arange(p.seq_k // p.page_size)[None] * p.page_size < torch.tensor(keys)[:, None]
        assert call.k.shape[0] >= int(owned.sum()), "the call has too few pages"
        table = torch.full(owned.shape, -1)
        table[owned] = call.k.shape[0] - 1 - torch.arange(int(owned.sum()))
        call.page_table = table.int().to(call.q.device)
    return call


def picker(seed: int) -> Callable[..., Any]:
    """Return a function that picks one of its arguments, as the seed says."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *values: values[int(torch.randint(len(values), (1,), generator=generator))]
