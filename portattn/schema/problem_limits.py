"""What a Problem's fields can hold: names, limits, which op has which, and what counts as plain attention."""

from __future__ import annotations

from typing import Any, Literal, get_args

from portattn.schema.features import FEATURES
from portattn.schema.ops import ROWS
from portattn.schema.symbolic_int import is_size

Op = Literal[
    "attention", "varlen_attention", "attention_backward", "varlen_attention_backward", "decode_attention",
    "paged_attention", "sparse_attention", "mla_attention", "append_kv", "write_pages",
]  # fmt: skip
Dtype = Literal["fp16", "bf16", "fp32"]
Causal = Literal["none", "bottom_right", "top_left"]
# How a cache is stored where that is not q's dtype, and what its scales belong to (schema/tensors.py).
KvFormat = Literal["as_q", "e4m3", "e5m2", "e4m3fnuz", "int8", "int4", "nvfp4", "fp8_ds_mla"]
KvScales = Literal["none", "head", "token"]
# Which columns of a new key a rotary embedding turns together: halves (NeoX), or neighbours (GPT-J).
Rotary = Literal["none", "neox", "interleaved"]
DS_MLA, DS_GROUP = "fp8_ds_mla", 128  # and how many of its numbers share a scale
INTEGERS = ("int8", "int4")  # formats that mean nothing without scales
NVFP4, NV_BLOCK = "nvfp4", 16  # e2m1 numbers, and how many neighbours of a row share a scale, which is e4m3
PAIRED = ("int4", "nvfp4")  # formats with two numbers in a byte
Layout = Literal["bhsd", "bshd"]
PageLayout = Literal["phd", "hpd"]

OPS: tuple[str, ...] = get_args(Op)
DTYPES: tuple[str, ...] = get_args(Dtype)

MAX_HEAD_DIM = 576  # the widest head in use: DeepSeek's latent cache, 512 + 64
MAX_SIZE = 2**31 - 1  # kernels count batches and heads in int32
MAX_LENGTH = 2**29  # and rows and keys too: a position, a window's sides and a tile's width are added up
MAX_TREE = 64  # new tokens of a tree mask: the bits of a query's word
MAX_SPLITS = 128  # programs that share one row's keys
ANY_LENGTH = 2**20  # stands for the rows of packed sequences where their real number may decide nothing
QUERY_TILE = 128  # rows: what the condition `query_tiles` counts in
SAGE_BLOCK = 64  # tokens that share a scale where `quantize` makes int8 ones. Source: SageAttention's blocks of keys
WORD_ALIGNMENT = 4  # bytes: of the float32 scales that engines keep in a cache's rows (Problem.word_aligned)
UNLIMITED = -1  # a side of a window that hides nothing

# Field -> (least, most).
LIMITS = {
    "batch": (0, MAX_SIZE),
    "heads_q": (1, MAX_SIZE),
    "heads_k": (1, MAX_SIZE),
    "seq_q": (0, MAX_LENGTH),
    "seq_k": (0, MAX_LENGTH),
    "head_dim": (1, MAX_HEAD_DIM),
    "head_dim_v": (1, MAX_HEAD_DIM),
    "window_left": (UNLIMITED, MAX_SIZE),
    "window_right": (UNLIMITED, MAX_SIZE),
    "chunk": (0, MAX_LENGTH),
    "total_q": (0, MAX_LENGTH),
    "total_k": (0, MAX_LENGTH),
    "page_size": (0, MAX_SIZE),
    "block_q": (1, MAX_LENGTH),
    "block_k": (1, MAX_LENGTH),
    "tokens": (0, MAX_LENGTH),
    "num_splits": (0, MAX_SPLITS),
    "rotary_dim": (0, MAX_HEAD_DIM),
}
# Sizes, types, places in memory, and what only refines another field: no demands.
PLAIN = frozenset(
    {
        "op", "batch", "heads_q", "heads_k", "seq_q", "seq_k", "head_dim", "dtype", "layout", "page_layout",
        "pages_in_line", "bias_by_key", "mask_by_key", "block_q", "block_k", "aligned", "word_aligned", "large",
        "kv_scales", "rotary_dim",
    }
)  # fmt: skip
# Fields that an op is not called without.
OPS_OWN = {op: row.needs for op, row in ROWS.items()}
# How keys and queries are stored, and what says that they are not stored so.
STORAGE: dict[str, int | None] = {"total_q": None, "total_k": None, "page_size": 0, "tokens": 0}
# What a field's demand is called, where not as the field is.
DEMAND_NAMES = {
    "window_left": "window", "window_right": "window", "total_q": "packed", "total_k": "packed", "page_size": "paged",
}  # fmt: skip
# Flags that a caller asks for: named where a problem is shown, and by conditions.
ASKED = tuple(FEATURES)
# Those that no Problem of an op can have. What is not among an op's options and allowed all the same: the log-sum-exp,
# which is a result, and a bias and a mask, which oracle and reference define for packed rows, though no call has them.
FOREIGN = {
    op: tuple(name for name in FEATURES if name not in (*row.options, "bias", "mask", "return_lse"))
    for op, row in ROWS.items()
}


def chunk_or_none(chunk: int, causal: str, rows: Any, keys: Any) -> int:
    """Return the field of a Problem for chunks of so many keys: 0 where they hide nothing that is not hidden anyway.

    causal      the alignment of the causal mask, or "none"
    rows, keys  of the longest sequence; a torch.SymInt is not compared, so that no graph depends on it

    >>> chunk_or_none(8192, "bottom_right", 4096, 4096), chunk_or_none(8192, "bottom_right", 1, 10000)
    (0, 8192)
    """
    if causal == "none" and is_size(rows) and rows == 1:
        causal = "bottom_right"  # its query sees all keys
    end: Any = {"bottom_right": keys, "top_left": rows}.get(causal)  # positions of queries that see a key are below it
    return 0 if is_size(end) and chunk >= end else min(chunk, MAX_LENGTH)


def ds_row_bytes(head_dim: int, head_dim_v: int) -> int:
    """Bytes of a latent row in vLLM's fp8_ds_mla: e4m3 numbers, a float32 scale for each 128, bfloat16 rotary numbers.

    >>> ds_row_bytes(576, 512)
    656
    """
    return head_dim_v + head_dim_v // DS_GROUP * 4 + 2 * (head_dim - head_dim_v)
