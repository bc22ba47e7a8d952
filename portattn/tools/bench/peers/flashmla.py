"""FlashMLA's dense decoding (torch.ops._flashmla_C): 16-bit latent rows of 512 + 64, pages of 64."""

from __future__ import annotations

import functools

import torch

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, transpose_heads
from portattn.tools.bench.peers.availability import has_op
from portattn.tools.bench.tensors import Tensors

ROW, RANK, PAGE = 576, 512, 64


def absent() -> str:
    return "" if has_op("_flashmla_C", "dense_decode_fwd") else "no library has registered torch.ops._flashmla_C"


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    if case.op != "mla_attention" or case.packed or case.dtype == "fp32":
        return {}
    if (case.head_dim, case.width_v, case.page_size) != (ROW, RANK, PAGE):
        return {}
    return {"flashmla": functools.partial(_build, case, t)}


def _build(case: Case, t: Tensors) -> Contender:
    op = torch.ops._flashmla_C.dense_decode_fwd
    fixed = (t.q, t.k[:, :, None], RANK, t.seqlens_k, t.page_table, case.scale, case.causal != "none")
    # The first call makes its schedule; later ones take it, as a model's layers do.
    _, _, schedule, splits = op(*fixed, None, None, None)
    return Contender(lambda: op(*fixed, schedule, splits, None)[0], transpose_heads)
