"""The public operations: a signature and a docstring each, from which `@operation` makes the function."""

from portattn.api.ops.decode import decode_attention, mla_attention, paged_attention, sparse_attention
from portattn.api.ops.dense import attention, block_sparse_attention, varlen_attention
from portattn.api.ops.write import append_kv, indexer_logits, topk_indices, write_pages
from portattn.api.prepare import explain, make_request, plan, prepare

__all__ = [
    "append_kv",
    "attention",
    "block_sparse_attention",
    "decode_attention",
    "explain",
    "indexer_logits",
    "make_request",
    "mla_attention",
    "paged_attention",
    "plan",
    "prepare",
    "sparse_attention",
    "topk_indices",
    "varlen_attention",
    "write_pages",
]
