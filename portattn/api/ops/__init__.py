"""The public operations, one file each. Each looks for a cached launch; validation, planning and dispatch do the rest.

The tensors and values of `try_cached` stand in the order of the operation's row (schema/ops.py).
"""

from portattn.api.ops.append import append_kv
from portattn.api.ops.decode import decode_attention
from portattn.api.ops.dense import attention
from portattn.api.ops.inspect_calls import explain, make_request, plan, prepare
from portattn.api.ops.latent import mla_attention
from portattn.api.ops.paged import paged_attention
from portattn.api.ops.sparse import sparse_attention
from portattn.api.ops.varlen import varlen_attention
from portattn.api.ops.write import write_pages

__all__ = [
    "append_kv",
    "attention",
    "decode_attention",
    "explain",
    "make_request",
    "mla_attention",
    "paged_attention",
    "plan",
    "prepare",
    "sparse_attention",
    "varlen_attention",
    "write_pages",
]
