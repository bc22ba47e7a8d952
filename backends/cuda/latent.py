"""The explicitly scheduled latent (MLA) kernel for Hopper as a path: what it takes, and how it is launched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from portattn.backends.base import Variant
from portattn.core import ceil_div, next_power_of_two
from portattn.planned import Rejection

if TYPE_CHECKING:
    import torch

    from portattn.call import Call
    from portattn.problem import Problem
    from portattn.target import Target

RANK, ROPE = 512, 64  # columns of a latent row: V, which is the first part of K, and the rest of K
ROWS, KEYS = 64, 64  # query rows of a block, and keys of its tiles
MOST_BLOCKS = 65_535  # of a grid's second and third axis
# Gluon's interface moves between releases, and the kernel uses hardware barriers that Triton 3.6 leaves free.
TRITON = "3.6.0"
# 3 × 128 threads (one warp counts as four) with 168 registers each, which the kernel's three roles then share out anew.
REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 168, 240, 24
FEW_SPLITS = 16  # that the merging kernel reads in one chunk, with four warps
_FEATURES = ("softcap", "alibi_slopes", "sinks", "bias", "mask", "window", "packed", "negative_scale", "needs_grad")


class LatentVariant(Variant):
    """mla_attention on sm_90: dense queries, pages of a multiple of 64 latent rows of 512 + 64, fp16 and bf16."""

    name = "gluon_mla"
    op = "mla_attention"
    arches = ("sm_90",)

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        """Why the kernel cannot run the problem; None when it can."""
        p, found = problem, target.toolchain
        asked = [name for name in _FEATURES if getattr(p, name)]
        empty = [name for name in ("batch", "seq_q", "seq_k") if getattr(p, name) == 0]
        reasons = {
            f"is for {', '.join(self.arches)}, and this is {target.arch.name}": target.arch.name not in self.arches,
            f"needs Triton {TRITON}, and this is {found}": str(found) != f"triton=={TRITON}",
            f"is for {self.op}": p.op != self.op,
            f"takes rows of {RANK} + {ROPE} columns, not {p.head_dim_v} + {p.head_dim - p.head_dim_v}": (
                (p.head_dim_v, p.head_dim) != (RANK, RANK + ROPE)
            ),
            f"takes fp16 and bf16, not {p.dtype}": p.dtype == "fp32",
            f"takes pages of a multiple of {KEYS} rows, not {p.page_size}": p.page_size % KEYS != 0,
            f"takes no {', '.join(asked)}": bool(asked),
            f"aligns causal masks at the bottom right, not {p.causal}": p.causal == "top_left",
            "reads through descriptors: contiguous rows, bases and strides of 16 bytes": not p.aligned,
            "takes pages that follow each other in memory": not p.pages_in_line,
            f"takes at most {MOST_BLOCKS} sequences": p.batch > MOST_BLOCKS,
            f"{', '.join(empty)} is 0: there is nothing to read through a descriptor": bool(empty),
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        return None if reason is None else Rejection(path=self.name, reason=reason)

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        """What runs calls like this one: given q, q_rope, k (P, 1, page, 576), page_table, seqlens_k, out and lse."""
        import torch

        p = call.problem
        heads, queries = row_tile(p.seq_q)
        row_tiles = ceil_div(p.heads_q, heads) * ceil_div(p.seq_q, queries)
        cores = torch.cuda.get_device_properties(call.q.device).multi_processor_count
        splits = min(p.num_splits or split_count(row_tiles, p.batch, p.seq_k, cores), ceil_div(p.seq_k, KEYS))
        return functools.partial(_launch, p, call.scale, heads, queries, row_tiles, splits)

    def views(self, problem: Problem, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The caller's tensors as a Call has them."""
        swapped = problem.layout == "bshd"
        rows = {name: inputs[name].transpose(1, 2) if swapped else inputs[name] for name in ("q", "q_rope")}
        tables = {name: inputs[name] for name in ("page_table", "seqlens_k")}
        return {**rows, "k": inputs["k"][:, None], **tables}


def row_tile(seq_q: int) -> tuple[int, int]:
    """(heads, queries) of a block: 64 rows, the queries of a head side by side."""
    queries = min(next_power_of_two(seq_q), ROWS)
    return ROWS // queries, queries


def split_count(row_tiles: int, batch: int, capacity: int, cores: int) -> int:
    """Over how many blocks to split a sequence's keys, one block a core at a time: least time, counted in tiles.

    capacity  the most keys that a sequence can have. The lengths themselves stay on the device
    """
    ends, merging = 4, 4  # a block's start and end, and the way of a partial result through memory, in tiles
    tiles = max(1, ceil_div(capacity, KEYS))

    def cost(splits: int) -> int:
        waves = ceil_div(row_tiles * batch * splits, cores)
        return waves * (ceil_div(tiles, splits) + ends + (merging if splits > 1 else 0))

    return min(range(1, min(tiles, 2 * cores) + 1), key=cost)


def _launch(
    p: Problem, scale: float, heads: int, queries: int, row_tiles: int, splits: int, tensors: Mapping[str, Any]
) -> None:
    """One kernel, and where keys are split a second that merges. Partial results are allocated here."""
    import torch

    from portattn.backends.cuda.latent_kernel import latent_decode
    from portattn.kernels.combine import combine

    q, table, out, lse = tensors["q"], tensors["page_table"], tensors["out"], tensors["lse"]
    if scale == 0.0:  # the row maximum is taken before scaling, and 0·inf is NaN
        tensors, scale = {**tensors, "q": q * 0.0, "q_rope": tensors["q_rope"] * 0.0}, 1.0
    partial, partial_lse = None, lse
    if splits > 1:
        shape = (splits, p.batch, p.heads_q, p.seq_q)
        partial, partial_lse = (q.new_empty(size, dtype=torch.float32) for size in ((*shape, RANK), shape))
    latent_decode[(row_tiles, splits, p.batch)](
        *_descriptors(tensors, heads, queries), partial, partial_lse, table, tensors["seqlens_k"],
        scale * math.log2(math.e), p.heads_q, p.seq_q, p.batch, ceil_div(p.heads_q, heads), p.page_size // KEYS,
        table.shape[1], table.stride(0), HEADS=heads, QUERIES=queries, CAUSAL=p.causal != "none", SPLIT=splits > 1,
        CONSUMER=CONSUMER_REGISTERS, PRODUCER=PRODUCER_REGISTERS, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    if partial is None:
        return
    rows, block, few = p.batch * p.heads_q * p.seq_q, next_power_of_two(splits), splits <= FEW_SPLITS
    combine[(rows,)](
        partial, partial_lse, out, lse, out.stride(0), out.stride(1), out.stride(2), p.heads_q, p.seq_q, rows, splits,
        HEAD_DIM_V=RANK, BLOCK_DV=RANK, BLOCK_SPLITS=block, CHUNK=block if few else 2 * FEW_SPLITS, GRID="full",
        DEPENDENT=True, num_warps=4 if few else 8, launch_pdl=True,
    )  # fmt: skip


def _descriptors(tensors: Mapping[str, Any], heads: int, queries: int) -> list[Any]:
    """Of q and q_rope (64 rows), of the latent rows (a chunk of their first 512 columns, and the rest), and of out."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from portattn.backends.cuda.latent_kernel import CHUNKS

    def describe(x: torch.Tensor, *block: int) -> Any:
        if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
            x = x.contiguous()  # broadcast queries: whether a descriptor takes a stride of 0 is not documented
        # The stride of an axis of one element is anything: descriptors want a multiple of 16 bytes there too.
        strides = [stride if size > 1 else x.shape[-1] for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]
        return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), _layout(block, str(x.dtype)))

    pages = tensors["k"][:, 0]
    latent = pages.as_strided((pages.shape[0] * pages.shape[1], RANK + ROPE), pages.stride()[1:])
    return [
        describe(tensors["q"], 1, heads, queries, RANK // CHUNKS),
        describe(tensors["q_rope"], 1, heads, queries, ROPE),
        describe(latent, KEYS, RANK // CHUNKS),
        describe(latent, KEYS, ROPE),
        describe(tensors["out"], 1, heads, queries, RANK // 2),
    ]


@functools.lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: str) -> Any:
    from triton.experimental.gluon import language as gl

    kind = gl.bfloat16 if dtype == "torch.bfloat16" else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), kind)
