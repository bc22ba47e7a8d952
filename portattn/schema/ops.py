"""The table of operations: one row each, with everything about an operation that is data.

What the library must know of an operation is read from its row: the command line's options, the vocabulary of
conditions, requests, validation, launches, canaries. A row names functions as "package.module:function", because they
lie in rooms above this one. A test compares the rows with the public functions' signatures.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# Tensors whose presence is a field of the Problem under another name.
_FIELD_OF = {
    "cu_seqlens_q": "total_q", "cu_seqlens_k": "total_k", "page_table": "page_size", "indices": "tokens",
    "magicpig_bits": "magicpig", "k_scale": "kv_format", "v_scale": "kv_scales",
    "k_block_scale": "kv_format", "v_block_scale": "kv_format", "cos": "rotary", "sin": "rotary_dim",
    "slots": "page_size",
}  # fmt: skip
# Arguments that are no option of an operation: each has them, or they decide nothing that can be planned for.
_NO_OPTION = frozenset({
    "q", "k", "v", "q_scale", "q_rope", "counts", "magicpig_tables", "scale", "out_dtype", "return_lse", "dropout_p",
    "dropout_seed",
    "forward_out", "forward_lse", "grad_out", "grad_lse", "grad_q", "grad_k", "grad_v", "grad_bias", "grad_slopes",
    "deterministic", "new_v", "positions", "block_size",
})  # fmt: skip


@dataclass(frozen=True)
class OpRow:
    """One operation: a public function, or the gradients of one.

    name, title  the function's name, and its name in reports
    gradient_of  the operation whose gradients it computes, which is no function of its own; empty for public ones
    tensors      its tensors in the order of a Request: the name in a Call and in kernels' arguments -> the parameter
    words        messages' names for tensors that are no parameters themselves
    values       its other parameters that decide a plan, in the order of a Request. `backend` and `validate` follow
    lengths      the `values` that are sizes, as the tensors' sizes are
    arguments    the function that replaces parameters for several tensors (a PageTable) by these tensors; "" for none
    validate     the function that checks a Request's tensors and values and builds the Call
    launches     the function that builds the core kernel's launches
    needs, takes fields of a Problem among total_q, total_k, page_size and tokens: always given (tokens may be 0 all the
                 same), and optional
    packs_heads  whether its kernel packs the query heads of one key/value head into the rows of a tile
    latent       whether one latent row is key and value
    trained_by   of an operation without a gradient: one that has it, for the text of the error; "" if it has one
    writes       whether it fills a cache in place and returns nothing: k and v are then the cache, q and new_v the new
                 rows, and heads_q is heads_k
    canaries     fields of the Problems that its canaries run
    """

    name: str
    title: str
    tensors: Mapping[str, str]
    values: tuple[str, ...]
    validate: str
    launches: str
    lengths: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    arguments: str = ""
    gradient_of: str = ""
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    packs_heads: bool = False
    latent: bool = False
    trained_by: str = ""
    writes: bool = False
    canaries: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        """Fields of a Problem that its parameters decide; `window` stands for window_left and window_right."""
        found = dict.fromkeys(_FIELD_OF.get(name, name) for name in (*self.values, *self.tensors))
        return tuple(name for name in found if name not in _NO_OPTION and name not in self.lengths)

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """The parameters of its tensors, in their order."""
        return tuple(self.tensors.values())

    @functools.cached_property
    def called(self) -> Mapping[str, str]:
        """What messages call each tensor."""
        return {**self.tensors, **self.words}

    @property
    def always_lengths(self) -> bool:
        """Whether a call always has its sequences' key lengths: those over pages, and what appends after them."""
        return "seqlens_k" in self.tensors and ("page_size" in self.needs or self.writes)

    @functools.cached_property
    def fixed(self) -> tuple[str, ...]:
        """Return the `values` that are no sizes: they are part of the call key."""
        return tuple(name for name in self.values if name not in self.lengths)

    def load(self, what: str) -> Callable[..., Any]:
        """The function that a column of the row names."""
        path = getattr(self, what)
        found = _loaded.get(path)
        if found is None:
            module, _, function = path.partition(":")
            found = _loaded[path] = getattr(importlib.import_module(module), function)
        return found


_loaded: dict[str, Callable[..., Any]] = {}


def _tensors(text: str, **named: str) -> Mapping[str, str]:
    """Tensors whose parameters have their own names, but for those named."""
    return MappingProxyType({name: named.get(name, name) for name in text.split()})


# Problems of canaries: ragged tails, grouped heads, masks, windows, sinks, keys split over programs.
_COMMON: dict[str, Any] = {"batch": 3, "heads_q": 4, "heads_k": 2, "return_lse": True}
_PLAIN: dict[str, Any] = _COMMON | {"head_dim": 64, "dtype": "fp16", "causal": "bottom_right"}
_FEATURED: dict[str, Any] = _COMMON | {"head_dim": 128, "dtype": "bf16", "sinks": True, "window_left": 70}
_SINGLE: dict[str, Any] = _COMMON | {"head_dim": 64, "dtype": "fp32"}
_ROWS: dict[str, Any] = {"seq_q": 77, "seq_k": 141}
_LENGTHS: dict[str, Any] = _ROWS | {"seqlens_q": True, "seqlens_k": True}
_NO_LSE: dict[str, Any] = {"return_lse": False}
_PACKED: dict[str, Any] = _ROWS | {"total_q": 150, "total_k": 280}
_CACHE: dict[str, Any] = {"seq_q": 1, "seq_k": 301, "seqlens_k": True}
_PAGES: dict[str, Any] = {"seq_q": 3, "seq_k": 304, "page_size": 16, "seqlens_k": True}
_LATENT: dict[str, Any] = _COMMON | _PAGES | {
    "heads_q": 16, "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "dtype": "bf16",
}  # fmt: skip

_NEW: dict[str, Any] = {"batch": 1, "heads_q": 3, "heads_k": 3, "head_dim": 80, "dtype": "bf16", "seq_q": 77}
_ROTATED: dict[str, Any] = {"rotary": "neox", "rotary_dim": 64}
_PLACES: dict[str, Any] = {"seq_k": 240, "page_size": 16}

_SCORES = ("scale", "causal", "window", "chunk", "softcap")
# Inputs of the gradients, and memory for dQ, dK and dV (schema/call.py).
_GRADIENTS = "forward_out forward_lse grad_out grad_lse grad_q grad_k grad_v"
_OPERANDS = "q_scale k_scale v_scale"  # of quantised q, k and v
_STORED = "k_scale v_scale k_block_scale v_block_scale"  # of a quantised cache
_LENGTH_NAMES = "seqlens_q seqlens_k leftpad_q leftpad_k"

ROWS: Mapping[str, OpRow] = MappingProxyType(
    {
        row.name: row
        for row in (
            OpRow(
                name="attention",
                title="Dense",
                tensors=_tensors(
                    f"q k v {_OPERANDS} alibi_slopes sinks bias mask block_mask {_LENGTH_NAMES} dropout_seed",
                ),
                values=(*_SCORES, "block_size", "dropout_p", "out_dtype", "return_lse", "layout"),
                arguments="portattn.api.block_mask:replace",
                validate="portattn.validate.dense:dense_call",
                launches="portattn.launch.dense:calls",
                canaries=(
                    _PLAIN | _LENGTHS | {"mask": True},
                    _FEATURED | _LENGTHS,
                    # float32 products are other code, and few keys of it other loops (docs/lowering.md).
                    _SINGLE | _ROWS | {"causal": "bottom_right"},
                    _SINGLE | {"heads_k": 4, "seq_q": 57, "seq_k": 61},
                ),
            ),
            OpRow(
                name="varlen_attention",
                title="Packed sequences",
                tensors=_tensors(f"q k v {_OPERANDS} cu_seqlens_q cu_seqlens_k alibi_slopes sinks dropout_seed"),
                values=("max_seqlen_q", "max_seqlen_k", *_SCORES, "dropout_p", "out_dtype", "return_lse"),
                lengths=("max_seqlen_q", "max_seqlen_k"),
                validate="portattn.validate.varlen:varlen_call",
                launches="portattn.launch.dense:calls",
                needs=("total_q", "total_k"),
                takes=("total_q", "total_k"),
                canaries=(_PLAIN | _PACKED, _FEATURED | _PACKED),
            ),
            OpRow(
                name="attention_backward",
                title="Gradients of dense",
                gradient_of="attention",
                tensors=_tensors(
                    f"q k v {_GRADIENTS} alibi_slopes grad_slopes sinks bias grad_bias mask {_LENGTH_NAMES}"
                    " dropout_seed",
                ),
                values=(*_SCORES, "dropout_p", "deterministic", "return_lse", "layout"),
                validate="portattn.validate.backward:dense_backward_call",
                launches="portattn.launch.backward:calls",
                canaries=(_PLAIN | _LENGTHS | _NO_LSE | {"mask": True}, _FEATURED | _LENGTHS | _NO_LSE),
            ),
            OpRow(
                name="varlen_attention_backward",
                title="Gradients of packed",
                gradient_of="varlen_attention",
                tensors=_tensors(
                    f"q k v {_GRADIENTS} cu_seqlens_q cu_seqlens_k alibi_slopes grad_slopes sinks dropout_seed"
                ),
                values=("max_seqlen_q", "max_seqlen_k", *_SCORES, "dropout_p", "deterministic", "return_lse"),
                lengths=("max_seqlen_q", "max_seqlen_k"),
                validate="portattn.validate.backward:varlen_backward_call",
                launches="portattn.launch.backward:calls",
                needs=("total_q", "total_k"),
                takes=("total_q", "total_k"),
                canaries=(_PLAIN | _PACKED | _NO_LSE, _FEATURED | _PACKED | _NO_LSE),
            ),
            OpRow(
                name="decode_attention",
                title="Decode over a contiguous cache",
                tensors=_tensors(
                    f"q k v {_STORED} alibi_slopes sinks bias mask tree_mask seqlens_k leftpad_k",
                    k="k_cache",
                    v="v_cache",
                ),
                values=(*_SCORES, "num_splits", "return_lse", "layout"),
                validate="portattn.validate.dense:decode_call",
                launches="portattn.launch.decode:calls",
                packs_heads=True,
                trained_by="attention, which takes the same tensors (a tree_mask written out as its mask)",
                canaries=(
                    _PLAIN | _CACHE | {"mask": True, "num_splits": 3},
                    _FEATURED | _CACHE | {"bias": True},
                    _PLAIN | _CACHE | {"num_splits": 3},  # what chips have other loops for
                ),
            ),
            OpRow(
                name="paged_attention",
                title="Pages",
                tensors=_tensors(
                    f"q k v {_STORED} page_table seqlens_k alibi_slopes sinks bias mask tree_mask cu_seqlens_q",
                    k="k_pages",
                    v="v_pages",
                ),
                values=("max_seqlen_q", *_SCORES, "num_splits", "return_lse", "layout", "page_layout"),
                lengths=("max_seqlen_q",),
                arguments="portattn.api.arguments:paged",
                validate="portattn.validate.paged:paged_call",
                launches="portattn.launch.decode:calls",
                needs=("page_size",),
                takes=("page_size", "total_q"),
                packs_heads=True,
                trained_by="attention for dense keys and values (a tree_mask written out as its mask), "
                "varlen_attention for packed ones",
                canaries=(_PLAIN | _PAGES | {"num_splits": 2}, _FEATURED | _PAGES),
            ),
            OpRow(
                name="sparse_attention",
                title="Chosen tokens",
                tensors=_tensors(
                    "q k v indices counts k_scale v_scale page_table seqlens_k alibi_slopes sinks log_weights"
                    " magicpig_bits magicpig_tables",
                    k="k_cache",
                    v="v_cache",
                ),
                words={"magicpig_bits": "magicpig's K", "magicpig_tables": "magicpig's L"},
                values=("scale", "softcap", "num_splits", "return_lse", "layout", "page_layout", "magicpig"),
                arguments="portattn.api.arguments:sparse",
                validate="portattn.validate.sparse:sparse_call",
                launches="portattn.launch.sparse:calls",
                needs=("tokens",),
                takes=("page_size", "tokens"),
                trained_by="attention, with the chosen tokens as its mask",
                canaries=(
                    _COMMON | _CACHE | {"head_dim": 64, "tokens": 100, "num_splits": 2},
                    _COMMON | _PAGES | {"seq_q": 1, "head_dim": 128, "dtype": "bf16", "tokens": 50, "sinks": True},
                ),
            ),
            OpRow(
                name="mla_attention",
                title="Latent cache",
                tensors=_tensors(
                    "q q_rope k v k_scale v_scale page_table seqlens_k alibi_slopes sinks bias mask tree_mask"
                    " cu_seqlens_q",
                    q="q_nope",
                    k="kv_pages",
                    v="kv_pages",
                    k_scale="kv_scale",
                    v_scale="kv_scale",
                ),
                values=("max_seqlen_q", *_SCORES, "num_splits", "return_lse", "layout"),
                lengths=("max_seqlen_q",),
                arguments="portattn.api.arguments:latent",
                validate="portattn.validate.latent:mla_call",
                launches="portattn.launch.decode:calls",
                needs=("page_size",),
                takes=("page_size", "total_q"),
                packs_heads=True,
                latent=True,
                trained_by="attention for the keys and values of each head, or with a row as key and its first 512 "
                "columns as value (a tree_mask written out as its mask)",
                canaries=(_LATENT | {"causal": "bottom_right", "num_splits": 2},),
            ),
            OpRow(
                name="append_kv",
                title="Appending to a contiguous cache",
                tensors=_tensors(
                    f"q new_v k v seqlens_k {_STORED} cos sin", q="k", new_v="v", k="k_cache", v="v_cache"
                ),
                values=("rotary", "layout"),
                validate="portattn.validate.writing:append_call",
                launches="portattn.launch.writing:calls",
                writes=True,
                canaries=(
                    _NEW | {"batch": 3, "seq_q": 19, "seq_k": 90, "seqlens_k": True},
                    _NEW | _ROTATED | {"batch": 3, "seq_q": 19, "seq_k": 90, "seqlens_k": True, "dtype": "fp16"},
                ),
            ),
            OpRow(
                name="write_pages",
                title="Writing pages",
                tensors=_tensors(
                    f"q new_v k v slots {_STORED} cos sin positions",
                    q="k",
                    new_v="v",
                    k="k_pages",
                    v="v_pages",
                    slots="slot_mapping",
                ),
                values=("rotary", "page_layout"),
                validate="portattn.validate.writing:pages_call",
                launches="portattn.launch.writing:calls",
                needs=("page_size",),
                takes=("page_size",),
                writes=True,
                canaries=(_NEW | _PLACES | {"dtype": "fp16"}, _NEW | _PLACES | _ROTATED),
            ),
        )
    }
)
# The operations that are functions.
PUBLIC = tuple(name for name, row in ROWS.items() if not row.gradient_of)
# Those that fill a cache in place.
WRITERS = tuple(name for name, row in ROWS.items() if row.writes)
# Of an operation the one that computes its gradients.
BACKWARD = {row.gradient_of: name for name, row in ROWS.items() if row.gradient_of}
