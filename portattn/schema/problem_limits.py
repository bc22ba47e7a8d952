"""The values that a Problem's fields can have: names, limits, cache formats, and which op has which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from portattn.schema.ops import FEATURES, ROWS
from portattn.schema.symbolic_int import is_size

Op = Literal[
    "attention", "varlen_attention", "attention_backward", "varlen_attention_backward", "decode_attention",
    "paged_attention", "sparse_attention", "block_sparse_attention", "block_sparse_attention_backward",
    "mla_attention", "append_kv", "write_pages",
    "indexer_logits", "topk_indices",
]  # fmt: skip
Dtype = Literal["fp16", "bf16", "fp32"]
Causal = Literal["none", "bottom_right", "top_left"]
# Rows of FORMATS, or the dtype of q; and the unit of their scales.
KvFormat = Literal["as_q", "e4m3", "e5m2", "e4m3fnuz", "int8", "int4", "nvfp4", "fp8_ds_mla"]
KvScales = Literal["none", "head", "token"]
# Which columns of a new key a rotary embedding turns together: halves (NeoX), or neighbours (GPT-J).
Rotary = Literal["none", "neox", "interleaved"]
Layout = Literal["bhsd", "bshd"]
PageLayout = Literal["phd", "hpd"]

OPS: tuple[str, ...] = get_args(Op)
DTYPES: tuple[str, ...] = get_args(Dtype)
DS_GROUP = 128  # numbers of a latent row that share a scale inside it


@dataclass(frozen=True)
class CacheFormat:
    """The storage of a quantised cache's numbers, or of quantised q, k and v."""

    dtype: str = ""  # of the caller's tensors, a name of torch's; empty: the dtype of q
    largest: float = 0.0  # the largest magnitude; of packed integers, counted from `zero`
    ops: tuple[str, ...] = ()  # operations that take the format
    scales: tuple[KvScales, ...] = ("none", "head", "token")  # the units that its scales may have
    canary: KvScales = "none"  # the unit of the scales of its canary (testing/canary.py)
    per_byte: int = 1  # numbers in a byte, the first in its lowest bits
    zero: int = 0  # zero point of unsigned integers; the lowest bits of a token's scale may replace it
    block: int = 0  # neighbours in a row that share one e4m3 number of k_block_scale or v_block_scale
    latent: bool = False  # whole latent rows, with their scales and numbers of bfloat16
    dtypes: tuple[Dtype, ...] = ("fp16", "bf16")  # of the queries
    words: bool = True  # kernels/attend_packed16.py reads it

    @property
    def bits(self) -> int:
        return 8 // self.per_byte

    @property
    def default_scales(self) -> KvScales:
        return "none" if "none" in self.scales else self.scales[-1]

    @property
    def row_multiple(self) -> int:
        """Return the number of which a row's width is a multiple."""
        return self.block or self.per_byte

    @property
    def count(self) -> str:
        """Return how many numbers a byte holds, as a word."""
        return {1: "one", 2: "two", 4: "four"}.get(self.per_byte, str(self.per_byte))

    def width_limit(self, storage: str) -> str:
        """Return an error's limit for a width that is no `row_multiple`; `storage` is the format or the dtype."""
        multiple = "even" if self.row_multiple == 2 else f"a multiple of {self.row_multiple}"
        why = "whose blocks share a scale" if self.block else f"{self.count} numbers a byte"
        return f"must be {multiple} with {storage}, {why}"


_CACHES = ("decode_attention", "paged_attention", "append_kv", "write_pages")
_CHOSEN = (*_CACHES, "sparse_attention")
_ALL = (*_CHOSEN, "mla_attention", "attention", "varlen_attention")
# The formats of caches in the order in which errors and tables list them. docs/adding-an-op.md names the places of one.
FORMATS: Mapping[str, CacheFormat] = MappingProxyType(
    {
        "e4m3": CacheFormat("float8_e4m3fn", 448.0, (*_ALL, "indexer_logits"), canary="token"),
        "e5m2": CacheFormat("float8_e5m2", 57344.0, _ALL),
        "e4m3fnuz": CacheFormat("float8_e4m3fnuz", 240.0, _ALL, canary="head"),
        "int8": CacheFormat("int8", 127.0, _ALL, ("head", "token"), "token"),
        "int4": CacheFormat("uint8", 7.0, _CHOSEN, ("head", "token"), "token", per_byte=2, zero=8),
        "nvfp4": CacheFormat("uint8", 6.0, _CACHES, ("none", "head"), "head", per_byte=2, block=16),
        "fp8_ds_mla": CacheFormat("uint8", 448.0, ("mla_attention",), ("none",), latent=True, dtypes=("bf16",)),
    }
)
AS_Q = CacheFormat(words=False)
assert get_args(KvFormat) == ("as_q", *FORMATS)
# Formats whose caches have at most one scale for each number.
ONE_SCALE = tuple(name for name, row in FORMATS.items() if not row.block and not row.latent)


def cache_format(name: str) -> CacheFormat:
    return FORMATS.get(name, AS_Q)


def formats_of(op: str) -> dict[str, CacheFormat]:
    return {name: row for name, row in FORMATS.items() if op in row.ops}


MAX_HEAD_DIM = 576  # the widest head in use: DeepSeek's latent cache, 512 + 64
MAX_SIZE = 2**31 - 1  # kernels count batches and heads in int32
MAX_LENGTH = 2**29  # and rows and keys too: a position, a window's sides and a tile's width are added up
MAX_TREE = 64  # new tokens of a tree mask: the bits of a query's word
MAX_SPLITS = 128  # programs that share one row's keys
ANY_LENGTH = 2**20  # stands for the rows of packed sequences where their real number may decide nothing
KEY_BLOCKS = (16, 32, 64, 128)  # keys of a block that block_sparse_attention lists: whole tiles of keys
QUERY_TILE = 128  # rows: the unit of the condition `query_tiles`
SAGE_BLOCK = 64  # tokens that share an int8 scale of `quantize`. Source: SageAttention's blocks of keys
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
# Sizes, types, places in memory, and fields that refine another field: no demands.
PLAIN = frozenset(
    {
        "op", "batch", "heads_q", "heads_k", "seq_q", "seq_k", "head_dim", "dtype", "layout", "page_layout",
        "pages_in_line", "bias_by_key", "mask_by_key", "block_q", "block_k", "aligned", "word_aligned", "large",
        "kv_scales", "rotary_dim", "function_note",
    }
)  # fmt: skip
# Fields that an op is not called without.
OPS_OWN = {op: row.needs for op, row in ROWS.items()}
# Fields that say how keys and queries are stored, and the value of absence.
STORAGE: dict[str, int | None] = {"total_q": None, "total_k": None, "page_size": 0, "tokens": 0}
# Fields whose demand has another name.
DEMAND_NAMES = {
    "window_left": "window", "window_right": "window", "total_q": "packed", "total_k": "packed", "page_size": "paged",
}  # fmt: skip
# Demands that need keys in the order of a sequence, which a list of slots does not have.
BY_POSITION = frozenset(
    {"causal", "causal_top_left", "window", "chunk", "alibi_slopes", "bias", "mask", "tree_mask", "leftpad_k"}
)
# Flags that a caller asks for: named where a problem is shown, and by conditions.
ASKED = tuple(FEATURES)
# Flags that no Problem of an op can have. Allowed though they are no options of an op: the log-sum-exp,
# which is a result, and a bias and a mask, which oracle and reference define for packed rows, though no call has them.
FOREIGN = {
    op: tuple(name for name in FEATURES if name not in (*row.options, "bias", "mask", "return_lse"))
    for op, row in ROWS.items()
}


def chunk_or_none(chunk: int, causal: str, rows: Any, keys: Any) -> int:
    """Return a Problem's `chunk`: 0 if chunks of so many keys hide nothing that is not hidden anyway.

    Args:
        causal: alignment of the causal mask, or "none"
        rows, keys: of the longest sequence; a torch.SymInt is not compared, so that no graph depends on it
    """
    if causal == "none" and is_size(rows) and rows == 1:
        causal = "bottom_right"  # its query sees all keys
    end: Any = {"bottom_right": keys, "top_left": rows}.get(causal)  # positions of queries that see a key are below it
    return 0 if is_size(end) and chunk >= end else min(chunk, MAX_LENGTH)


def ds_row_bytes(head_dim: int, head_dim_v: int) -> int:
    """Return the bytes of a latent row in vLLM's fp8_ds_mla: e4m3 numbers, float32 scales, bfloat16 rotary numbers."""
    return head_dim_v + head_dim_v // DS_GROUP * 4 + 2 * (head_dim - head_dim_v)
