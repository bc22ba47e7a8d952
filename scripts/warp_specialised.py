"""A plain attention kernel whose loop asks Triton to specialise warps: a peer of `portattn bench`, for sm_90.

    python -m portattn bench --set dense18 --core-only --peer sdpa --peer-file scripts/warp_specialised.py

docs/performance.md says how fast it is with each release. It takes dense attention whose rows and keys are whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from portattn.tools.bench.cases import Case
    from portattn.tools.bench.contenders import Contender
    from portattn.tools.bench.tensors import Tensors

LOG2E = 1.4426950408889634
ROWS = 128
# Whether warps are specialised, keys of a tile, warps, stages, and the widths whose tiles fit.
FORMS = {
    "specialised": (True, 128, 4, 2, (64, 128)),
    "specialised 64": (True, 64, 4, 2, (64, 128)),
    "specialised 64, 3 stages": (True, 64, 4, 3, (64, 128)),
    "specialised 32": (True, 32, 4, 2, (256,)),
    "plain": (False, 128, 8, 2, (64, 128)),
}


@triton.jit
def attend(q, k, v, out, factor, seq, rows_in_all, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
           CAUSAL: tl.constexpr, SPECIALISED: tl.constexpr):  # fmt: skip
    """One tile of rows of one head. q, k, v and out are (rows_in_all, D): heads one after the other.

    Descriptors are made here: tiles of the host's are not divided among the consumers (3.6.0).
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first = tl.program_id(1) * seq
    dq = tl.make_tensor_descriptor(q, [rows_in_all, D], [D, 1], [M, D])
    dk = tl.make_tensor_descriptor(k, [rows_in_all, D], [D, 1], [N, D])
    dv = tl.make_tensor_descriptor(v, [rows_in_all, D], [D, 1], [N, D])
    do = tl.make_tensor_descriptor(out, [rows_in_all, D], [D, 1], [M, D])
    row = tile * M
    rows = row + tl.arange(0, M)
    queries = dq.load([first + row, 0])
    acc = tl.zeros((M, D), tl.float32)
    top = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    end = row + M if CAUSAL else seq
    for i in tl.range(0, end, N, warp_specialize=SPECIALISED):
        scores = tl.dot(queries, dk.load([first + i, 0]).T) * factor
        if CAUSAL:  # throughout: a second loop makes the compiler's pass fail
            scores = tl.where(rows[:, None] >= (i + tl.arange(0, N))[None, :], scores, -1e30)
        new = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        rescale = tl.exp2(top - new)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(p.to(queries.dtype), dv.load([first + i, 0]), acc)
        top = new
    do.store([first + row, 0], (acc / total[:, None]).to(queries.dtype))


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def contenders(case: Case, t: Tensors) -> dict[str, Callable[[], Contender]]:
    """A contender for each form whose tiles fit."""
    from portattn.tools.bench.contenders import Contender

    whole = case.seq_q == case.seq_k and case.seq_q % ROWS == 0 and not case.lengths_k
    if case.op != "attention" or case.backward or case.window != (None, None) or not whole:
        return {}
    triton.set_allocator(_scratch)
    batch, heads, seq, dim = t.q.shape

    def made(form: tuple[Any, ...]) -> Contender:
        specialised, keys, warps, stages, _ = form
        out = torch.empty_like(t.q)

        def call() -> torch.Tensor:
            attend[(seq // ROWS, batch * heads)](
                t.q, t.k, t.v, out, dim**-0.5 * LOG2E, seq, batch * heads * seq, ROWS, keys, dim,
                case.causal != "none", specialised, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            return out

        return Contender(call)

    return {
        f"warp_specialised/{name}": lambda form=form: made(form)  # type: ignore[misc]
        for name, form in FORMS.items()
        if dim in form[-1] and case.heads_q == case.heads_k
    }
