"""The tables of features and of operations: one row each. A feature is a flag of a Problem beyond plain attention.

Rows of operations name functions as "package.module:function", because they lie in rooms above this one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from portattn.kernels import score_program

FeatureKind = Literal["lengths", "tokens", "scores", "row", "result"]


@dataclass(frozen=True)
class Feature:
    help: str  # of its command-line option
    # the part that it changes: valid positions (lengths), chosen tokens (tokens), every score (scores), each row's
    # softmax (row), the results (result)
    kind: FeatureKind
    # Axes of its tensor in a Call: b batch, h query heads, q query rows, k keys, t chosen tokens; s and r batch and
    # rows of the query tensor, 1 and all rows if packed; m blocks of queries, n places of a list. Empty: no tensor.
    axes: str = ""
    dtype: str = ""  # of that tensor, a name of torch's; empty: q's
    narrow: bool = False  # whether float32 and q's dtype are both taken
    title: str = ""  # its name in reports; empty: its own name

    @property
    def floating(self) -> bool:
        """Return whether its tensor holds floating-point numbers: added in float32, and differentiable."""
        return bool(self.axes) and self.dtype in ("", "float32")


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """The features: a Problem's flags, each with its row of FEATURES."""

    seqlens_q: Annotated[bool, Feature("Query lengths are given per sequence", "lengths", "b", "int32")] = False
    seqlens_k: Annotated[
        bool, Feature("Key lengths are given per sequence; of pages they always are", "lengths", "b", "int32")
    ] = False
    leftpad_q: Annotated[bool, Feature("Queries are padded on the left", "lengths", "b", "int32")] = False
    leftpad_k: Annotated[bool, Feature("Keys are padded on the left", "lengths", "b", "int32")] = False
    log_weights: Annotated[bool, Feature("Chosen tokens have weights", "tokens", "bht", "float32")] = False
    magicpig: Annotated[bool, Feature("Chosen tokens were sampled by MagicPIG", "tokens")] = False
    softcap: Annotated[bool, Feature("Scores are capped", "scores")] = False
    alibi_slopes: Annotated[bool, Feature("ALiBi slopes are given", "scores", "bh", "float32", title="ALiBi")] = False
    sinks: Annotated[bool, Feature("Attention sinks are given", "row", "h", "float32", narrow=True)] = False
    bias: Annotated[bool, Feature("A bias is given", "scores", "bhqk", narrow=True)] = False
    mask: Annotated[bool, Feature("A boolean mask is given", "scores", "bhqk", "bool")] = False
    tree_mask: Annotated[
        bool, Feature("A tree mask of the new tokens is given", "scores", "sr", "int64", title="tree mask")
    ] = False
    block_mask: Annotated[bool, Feature("A block mask is given", "scores", "bhmn", "int32", title="block mask")] = False
    return_lse: Annotated[bool, Feature("The log-sum-exp is returned as well", "result")] = False


FEATURES: Mapping[str, Feature] = MappingProxyType(
    {field.name: field.type.__metadata__[0] for field in msgspec.structs.fields(Flags)}
)


def of_kinds(*kinds: FeatureKind) -> tuple[str, ...]:
    return tuple(name for name, feature in FEATURES.items() if feature.kind in kinds)


# Features that change every score of a tile, which takes registers; a window and a chunk are numbers of a Problem.
EVERY_SCORE = ("window", "chunk", *of_kinds("scores"))
# Features that most operations have beside their masks.
COMMON = of_kinds("scores", "row")
# Tensors that are added to scores.
ADDED = tuple(name for name in of_kinds("tokens", "scores") if FEATURES[name].floating)
# Tensors that a call's score and mask functions read (kernels/score_program.py).
MODS = ("score_mod", "mask_mod")
CAPTURED = tuple(f"captured_{number}" for number in range(score_program.CAPTURES))
CAPTURED_GRADIENTS = tuple(f"grad_{name}" for name in CAPTURED)
# A Call's tensors that can have gradients.
DIFFERENTIABLE = ("q", "k", "v", "q_rope", *CAPTURED, *(name for name, feature in FEATURES.items() if feature.floating))


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
    "deterministic", "new_v", "positions", "block_size", "weights", "row_starts", "row_ends", "result", "sorted",
    "block_rows", "block_starts", "block_chunks", "block_queries", "score_mod", "mask_mod", *CAPTURED,
    *CAPTURED_GRADIENTS,
})  # fmt: skip

# Optional arguments in the order in which errors name them: first without sizes, then compared with the scores' sizes.
# `window` comes first of the latter, since it decides the causal mask.
_NUMBERS = ("causal", "scale", "dropout_p", "dropout_seed", "return_lse", "num_splits")
_SCORED = ("window", *(n for n in COMMON if FEATURES[n].axes), "chunk", "softcap", "block_size", *CAPTURED, *MODS)


@dataclass(frozen=True)
class Expansion:
    """A parameter that stands for several tensors (a PageTable, say), and the function that returns them."""

    parameter: str
    function: str  # "package.module:function"; its parameters have the operation's names
    results: tuple[str, ...]  # parameters, or tensors and values of the row that are no parameters
    or_tensor: bool = False  # the parameter may also be a tensor of the call


@dataclass(frozen=True)
class OpRow:
    """One operation: a public function, or the gradients of one."""

    name: str
    title: str  # its name in reports
    tensors: Mapping[str, str]  # in a Request's order: the name in a Call and in kernels' arguments -> the parameter
    # other parameters that decide a plan, in a Request's order; `backend` and `validate` follow
    values: tuple[str, ...]
    validate: str  # function that checks a Request and builds the Call
    launches: str  # function that builds the core kernel's launches
    lengths: tuple[str, ...] = ()  # the `values` that are sizes
    words: Mapping[str, str] = field(default_factory=dict)  # messages' names for tensors that are no parameters
    expansions: tuple[Expansion, ...] = ()
    gradient_of: str = ""  # the operation whose gradients it computes; empty: a public function
    # fields among total_q, total_k, page_size and tokens that are always given (tokens may be 0)
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()  # fields among the same that may be given
    packs_heads: bool = False  # its kernel packs the query heads of one key/value head into a tile's rows
    latent: bool = False  # one latent row is key and value
    trained_by: str = ""  # for the error about gradients that it lacks: an operation that has them
    # fills tensors in place and returns nothing: a cache (k, v) with new rows (q, new_v), heads_q is heads_k; or `out`
    writes: bool = False
    # functions of the public function's parameters, of rows that fill `out`: memory for it, and the function's result
    allocates: str = ""
    returns: str = ""
    canaries: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)  # fields of the canaries' Problems

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        """Return the Problem's fields that its parameters decide; `window` stands for window_left and window_right."""
        found = dict.fromkeys(_FIELD_OF.get(name, name) for name in (*self.values, *self.tensors))
        found |= dict.fromkeys((*self.needs, *(("kv_scales",) if "kv_format" in found else ())))
        return tuple(name for name in found if name not in _NO_OPTION and name not in self.lengths)

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.tensors.values())

    @functools.cached_property
    def called(self) -> Mapping[str, str]:
        """Return the messages' name for each tensor."""
        return {**self.tensors, **self.words}

    @property
    def always_lengths(self) -> bool:
        """Return whether every call has its sequences' key lengths: over pages, and to append after them."""
        paged_or_appended = "page_size" in self.needs or (self.writes and "page_size" not in self.takes)
        return "seqlens_k" in self.tensors and paged_or_appended

    @functools.cached_property
    def fixed(self) -> tuple[str, ...]:
        """Return the `values` that are no sizes: they are part of the call key."""
        return tuple(name for name in self.values if name not in self.lengths)

    @functools.cached_property
    def numbers(self) -> tuple[str, ...]:
        """Return the arguments that are checked before sizes are known, in the order of their errors."""
        return tuple(name for name in _NUMBERS if name in self.tensors or name in self.values)

    @functools.cached_property
    def scored(self) -> tuple[str, ...]:
        """Return the features that are checked against the scores' sizes, in the order of their errors."""
        return tuple(name for name in _SCORED if name in self.tensors or name in self.values)

    def load(self, what: str) -> Callable[..., Any]:
        return load_function(getattr(self, what))


@functools.cache
def load_function(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _tensors(text: str, **named: str) -> Mapping[str, str]:
    """Map tensors to their parameters, which have the same names unless `named` says otherwise."""
    return MappingProxyType({name: named.get(name, name) for name in text.split()})


def _pages(function: str) -> Expansion:
    return Expansion("page_table", f"portattn.api.signatures:{function}", ("page_table", "seqlens_k"), or_tensor=True)


_MAGICPIG = Expansion(
    "magicpig", "portattn.api.signatures:magicpig_tensors", ("magicpig", "magicpig_bits", "magicpig_tables")
)

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
_BLOCKS: dict[str, Any] = _ROWS | {"causal": "bottom_right", "tokens": 5, "block_k": 32, "seqlens_k": True}
_LATENT: dict[str, Any] = _COMMON | _PAGES | {
    "heads_q": 16, "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "dtype": "bf16",
}  # fmt: skip

_NEW: dict[str, Any] = {"batch": 1, "heads_q": 3, "heads_k": 3, "head_dim": 80, "dtype": "bf16", "seq_q": 77}
_ROTATED: dict[str, Any] = {"rotary": "neox", "rotary_dim": 64}
_PLACES: dict[str, Any] = {"seq_k": 240, "page_size": 16}

_INDEXER: dict[str, Any] = {"heads_q": 5, "heads_k": 1, "head_dim": 40, "dtype": "bf16"}
_ONE_HEAD: dict[str, Any] = {"heads_q": 1, "heads_k": 1, "head_dim": 1}

_SCORES = ("scale", "causal", "window", "chunk", "softcap")
_CAPTURED = " ".join(CAPTURED)
# Inputs of the gradients, and memory for dQ, dK and dV (schema/call.py).
_GRADIENTS = "forward_out forward_lse grad_out grad_lse grad_q grad_k grad_v"
_OPERANDS = "q_scale k_scale v_scale"  # of quantised q, k and v
_STORED = "k_scale v_scale k_block_scale v_block_scale"  # of a quantised cache
_FUNCTIONS = tuple(Expansion(name, f"portattn.api.score_functions:traced_{name}", (name, *CAPTURED)) for name in MODS)
_BLOCK_LISTS = {"indices": "block_indices", "counts": "block_counts"}
_INVERTED = "block_rows block_starts block_chunks"  # the rows that list each block
_LENGTH_NAMES = "seqlens_q seqlens_k leftpad_q leftpad_k"

ROWS: Mapping[str, OpRow] = MappingProxyType(
    {
        row.name: row
        for row in (
            OpRow(
                name="attention",
                title="Dense",
                tensors=_tensors(
                    f"q k v {_OPERANDS} alibi_slopes sinks bias mask block_mask {_CAPTURED} {_LENGTH_NAMES}"
                    " dropout_seed"
                ),
                values=(*_SCORES, *MODS, "block_size", "dropout_p", "out_dtype", "return_lse", "layout"),
                expansions=(
                    Expansion(
                        "block_mask",
                        "portattn.api.masks:block_tensors",
                        ("block_mask", "mask", "block_size", "mask_mod"),
                    ),
                    *_FUNCTIONS,
                    Expansion(
                        "mask_mod",
                        "portattn.api.score_functions:mask_blocks",
                        ("block_mask", "block_size"),
                    ),
                ),
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
                tensors=_tensors(
                    f"q k v {_OPERANDS} cu_seqlens_q cu_seqlens_k alibi_slopes sinks {_CAPTURED} dropout_seed"
                ),
                values=("max_seqlen_q", "max_seqlen_k", *_SCORES, *MODS, "dropout_p", "out_dtype", "return_lse"),
                lengths=("max_seqlen_q", "max_seqlen_k"),
                expansions=_FUNCTIONS,
                validate="portattn.validate.dense:varlen_call",
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
                    f"q k v {_GRADIENTS} alibi_slopes grad_slopes sinks bias grad_bias mask block_mask block_queries"
                    f" {_CAPTURED} {' '.join(CAPTURED_GRADIENTS)} {_LENGTH_NAMES} dropout_seed"
                ),
                values=(*_SCORES, *MODS, "block_size", "dropout_p", "deterministic", "return_lse", "layout"),
                validate="portattn.validate.backward:dense_backward_call",
                launches="portattn.launch.backward:calls",
                canaries=(_PLAIN | _LENGTHS | _NO_LSE | {"mask": True}, _FEATURED | _LENGTHS | _NO_LSE),
            ),
            OpRow(
                name="varlen_attention_backward",
                title="Gradients of packed",
                gradient_of="varlen_attention",
                tensors=_tensors(
                    f"q k v {_GRADIENTS} cu_seqlens_q cu_seqlens_k alibi_slopes grad_slopes sinks {_CAPTURED}"
                    f" {' '.join(CAPTURED_GRADIENTS)} dropout_seed"
                ),
                values=("max_seqlen_q", "max_seqlen_k", *_SCORES, *MODS, "dropout_p", "deterministic", "return_lse"),
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
                    f"q k v {_STORED} alibi_slopes sinks bias mask tree_mask {_CAPTURED} seqlens_k leftpad_k",
                    **{"k": "k_cache", "v": "v_cache"},
                ),
                values=(*_SCORES, *MODS, "num_splits", "return_lse", "layout"),
                expansions=_FUNCTIONS,
                validate="portattn.validate.dense:decode_call",
                launches="portattn.launch.decode:calls",
                packs_heads=True,
                trained_by="attention, which takes the same tensors (a tree_mask written out as its mask)",
                canaries=(
                    _PLAIN | _CACHE | {"mask": True, "num_splits": 3},
                    _FEATURED | _CACHE | {"bias": True},
                    _PLAIN | _CACHE | {"num_splits": 3},  # chips have other loops for it
                ),
            ),
            OpRow(
                name="paged_attention",
                title="Pages",
                tensors=_tensors(
                    f"q k v {_STORED} page_table seqlens_k alibi_slopes sinks bias mask tree_mask {_CAPTURED}"
                    " cu_seqlens_q",
                    k="k_pages",
                    v="v_pages",
                ),
                values=("max_seqlen_q", *_SCORES, *MODS, "num_splits", "return_lse", "layout", "page_layout"),
                lengths=("max_seqlen_q",),
                expansions=(_pages("paged_table"), *_FUNCTIONS),
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
                    **{"k": "k_cache", "v": "v_cache"},
                ),
                words={"magicpig_bits": "magicpig's K", "magicpig_tables": "magicpig's L"},
                values=("scale", "softcap", "num_splits", "return_lse", "layout", "page_layout", "magicpig"),
                expansions=(_pages("sparse_table"), _MAGICPIG),
                validate="portattn.validate.sparse:sparse_call",
                launches="portattn.launch.decode:sparse_calls",
                needs=("tokens",),
                takes=("page_size", "tokens"),
                trained_by="attention, with the chosen tokens as its mask",
                canaries=(
                    _COMMON | _CACHE | {"head_dim": 64, "tokens": 100, "num_splits": 2},
                    _COMMON | _PAGES | {"seq_q": 1, "head_dim": 128, "dtype": "bf16", "tokens": 50, "sinks": True},
                ),
            ),
            OpRow(
                name="block_sparse_attention",
                title="Chosen blocks",
                tensors=_tensors("q k v indices counts seqlens_k sinks", **_BLOCK_LISTS),
                values=("block_size", "scale", "causal", "num_splits", "return_lse", "layout"),
                validate="portattn.validate.sparse:block_call",
                launches="portattn.launch.decode:block_calls",
                needs=("tokens",),
                takes=("tokens",),
                packs_heads=True,
                canaries=(_PLAIN | _BLOCKS, _SINGLE | _BLOCKS | {"sinks": True, "num_splits": 2}),
            ),
            OpRow(
                name="block_sparse_attention_backward",
                title="Gradients of chosen blocks",
                gradient_of="block_sparse_attention",
                tensors=_tensors(f"q k v {_GRADIENTS} indices counts {_INVERTED} seqlens_k sinks", **_BLOCK_LISTS),
                values=("block_size", "scale", "causal", "deterministic", "return_lse", "layout"),
                validate="portattn.validate.backward:block_backward_call",
                launches="portattn.launch.backward:block_calls",
                needs=("tokens",),
                takes=("tokens",),
                canaries=(_PLAIN | _BLOCKS | _NO_LSE, _SINGLE | _BLOCKS | _NO_LSE | {"sinks": True}),
            ),
            OpRow(
                name="mla_attention",
                title="Latent cache",
                tensors=_tensors(
                    "q q_rope k v k_scale v_scale page_table seqlens_k indices counts alibi_slopes sinks bias mask"
                    " tree_mask cu_seqlens_q",
                    **{"q": "q_nope", "k": "kv_pages", "v": "kv_pages", "k_scale": "kv_scale", "v_scale": "kv_scale"},
                    counts="topk_length",
                ),
                values=("max_seqlen_q", *_SCORES, "num_splits", "return_lse", "layout"),
                lengths=("max_seqlen_q",),
                expansions=(_pages("latent_table"),),
                validate="portattn.validate.latent:mla_call",
                launches="portattn.launch.decode:calls",
                needs=("page_size",),
                takes=("page_size", "total_q", "tokens"),
                packs_heads=True,
                latent=True,
                trained_by="attention, rows as keys and their columns as values (a tree_mask written out as its mask)",
                canaries=(
                    _LATENT | {"causal": "bottom_right", "num_splits": 2},
                    _LATENT | {"seq_k": 100, "tokens": 100, "sinks": True, "num_splits": 2},
                ),
            ),
            OpRow(
                name="append_kv",
                title="Appending to a contiguous cache",
                tensors=_tensors(
                    f"q new_v k v seqlens_k {_STORED} cos sin", q="k", new_v="v", k="k_cache", v="v_cache"
                ),
                values=("rotary", "layout"),
                validate="portattn.validate.write:append_call",
                launches="portattn.launch.write:calls",
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
                    **{"q": "k", "new_v": "v", "k": "k_pages", "v": "v_pages", "slots": "slot_mapping"},
                ),
                values=("rotary", "page_layout"),
                validate="portattn.validate.write:pages_call",
                launches="portattn.launch.write:calls",
                needs=("page_size",),
                takes=("page_size",),
                writes=True,
                canaries=(_NEW | _PLACES | {"dtype": "fp16"}, _NEW | _PLACES | _ROTATED),
            ),
            OpRow(
                name="indexer_logits",
                title="Logits of an indexer",
                tensors=_tensors("q k weights k_scale row_starts row_ends page_table seqlens_k result", result="out"),
                values=(),
                expansions=(_pages("indexer_table"),),
                validate="portattn.validate.indexer:logits_call",
                launches="portattn.launch.write:logits_calls",
                takes=("page_size",),
                writes=True,
                allocates="portattn.validate.indexer:new_logits",
                canaries=(
                    _INDEXER | {"batch": 1, "seq_q": 37, "seq_k": 301},
                    _INDEXER | {"batch": 3, "seq_q": 3, "seq_k": 304, "page_size": 16, "seqlens_k": True},
                ),
            ),
            OpRow(
                name="topk_indices",
                title="Largest logits",
                tensors=_tensors("q row_starts row_ends result", q="logits", result="out"),
                values=("k", "sorted"),
                validate="portattn.validate.indexer:topk_call",
                launches="portattn.launch.write:topk_calls",
                needs=("tokens",),
                takes=("tokens",),
                writes=True,
                allocates="portattn.validate.indexer:new_indices",
                returns="portattn.validate.indexer:in_order",
                canaries=(
                    {"batch": 2, "seq_q": 3, "seq_k": 1501, "tokens": 64, "dtype": "fp32"} | _ONE_HEAD,
                    {"batch": 1, "seq_q": 2, "seq_k": 9001, "tokens": 300, "dtype": "fp32"} | _ONE_HEAD,
                    {"batch": 1, "seq_q": 3, "seq_k": 70, "tokens": 100, "dtype": "fp32"} | _ONE_HEAD,
                ),
            ),
        )
    }
)
PUBLIC = tuple(name for name, row in ROWS.items() if not row.gradient_of)
WRITERS = tuple(name for name, row in ROWS.items() if row.writes)
BACKWARD = {row.gradient_of: name for name, row in ROWS.items() if row.gradient_of}  # its gradients' op
