"""Problem: the shapes and features of a call, validated once, without data."""

from __future__ import annotations

import functools
from typing import Any, get_args

import msgspec

from portattn.errors import ArgumentError
from portattn.schema.ops import EVERY_SCORE, FEATURES, MODS, ROWS, Flags
from portattn.schema.problem_limits import (
    ANY_LENGTH,
    ASKED,
    BY_POSITION,
    DEMAND_NAMES,
    DS_GROUP,
    DTYPES,
    FOREIGN,
    KEY_BLOCKS,
    LIMITS,
    MAX_TREE,
    OPS,
    OPS_OWN,
    PLAIN,
    QUERY_TILE,
    STORAGE,
    UNLIMITED,
    CacheFormat,
    Causal,
    Dtype,
    KvFormat,
    KvScales,
    Layout,
    Op,
    PageLayout,
    Rotary,
    cache_format,
)
from portattn.schema.symbolic_int import is_size

_Struct: Any = type(msgspec.Struct)


class _ByKeyword(_Struct):
    """A metaclass whose error about positional arguments names the keywords."""

    def __call__(cls, *positional: Any, **fields: Any) -> Any:  # noqa: N805 - a metaclass
        if positional:
            words = "Problem(batch=1, heads_q=8, heads_k=8, seq_q=128, seq_k=128, head_dim=64)"
            raise TypeError(f"{len(positional)} positional arguments, but Problem takes keywords only: {words}")
        return super().__call__(**fields)


def check_groups(op: str, heads_q: int, heads_k: int, hint: str = "") -> None:
    """Raise ArgumentError unless heads_q is a multiple of heads_k; `hint` ends its text."""
    if heads_k > 0 and heads_q % heads_k:
        limit = f"must be a multiple of the {heads_k} key/value heads (heads_k){hint}"
        raise ArgumentError(op, "heads_q", heads_q, limit)


class Problem(Flags, metaclass=_ByKeyword, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attention problem: op, sizes, dtype and features (schema/ops.py). Hashable: plans are cached by it.

    Attributes:
        op, dtype: the operation; the dtype of queries and results, of results alone if queries are quantised
        batch, heads_q, heads_k, seq_q, seq_k: sizes; seq_k is a cache's capacity; of packed tensors seq_q and seq_k are
            the longest sequence's
        head_dim, head_dim_v: width of Q and K, and of V; for mla_attention of the latent row, and of its part that is
            also V
        causal: none; bottom_right (the last query sees the last key); top_left (query i sees keys 0..i)
        window_left, window_right: keys that a query sees before and after its own position; -1 for all of them. A right
            side of 0 is `causal`
        chunk: keys of a chunk, counted from the sequence's first key; a query sees its own position's. 0 for none
        total_q, total_k: rows of packed queries and keys; None if they are not packed
        page_size, page_layout: tokens a page of the cache (0: it is contiguous), and whether heads or tokens come first
        pages_in_line: pages follow each other at the distance of two rows: a head's rows of all pages are one matrix
        tokens: places for chosen tokens of each head (Lmax of sparse_attention), or of each query (mla_attention's
            indices: seq_k is always the same number), or for chosen blocks (block_sparse_attention)
        block_q, block_k: queries and keys of a block of block_mask; block_k also of a chosen block
        bias_by_key, mask_by_key: they are the same for every head and query of a sequence
        score_mod, mask_mod: programs of the caller's functions of scores and masks (kernels/score_program.py)
        function_note: names the options that stand for the caller's functions; a plan's first note
        num_splits: programs that share a row's keys, as the caller demands; 0: planning chooses
        aligned: rows are contiguous, and bases and outer strides are multiples of 16 bytes (for TMA)
        word_aligned: the same for a cache's rows, with 4 bytes (for a float32 scale inside them). For nvfp4 the blocks'
            scales too, with 2 or 1 if a row's scales are no multiple of 4 bytes
        kv_format: format of the numbers in the cache: as_q (q's dtype), or a narrower format that kernels dequantize in
            registers. attention and varlen_attention have queries in it too (q_format), and values except with int8
            (v_format)
        kv_scales: the unit of a scale of keys, values and queries: none, head (a key/value head of a sequence, also if
            all share one), token (a token and a head)
        rotary, rotary_dim: append and write: keys get a rotary embedding in their first rotary_dim columns
        large: a tensor spans 2 GiB or more, so 32-bit byte offsets do not reach all of it
        needs_grad, dropout: autograd will ask for gradients; dropout_p > 0
        grad_lse, grad_bias, grad_slopes, grad_captured: the LSE has a gradient; gradients of the bias, the slopes and
            captured tensors are requested, bit n for captured tensor n
        deterministic: results must repeat bit by bit (torch.use_deterministic_algorithms)
        invariant: a row's keys are summed in one order, whatever the call's sizes and its other rows are
        negative_scale: the scores' factor is below 0: kernels carry its sign in Q

    Raises:
        ArgumentError: A size is out of range; the error names the field.
        TypeError: A field is given by position.

    Examples:
        >>> import portattn
        >>> sizes = dict(batch=1, heads_q=8, heads_k=2, seq_q=128, seq_k=128, head_dim=64)
        >>> print(portattn.Problem(**sizes, causal="bottom_right", dtype="bf16"))
        attention q (1,8,128,64) kv (1,2,128,64) bf16 causal bottom-right
    """

    op: Op = "attention"
    batch: int
    heads_q: int
    heads_k: int
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int = 0
    dtype: Dtype = "fp16"
    causal: Causal = "none"
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    chunk: int = 0
    total_q: int | None = None
    total_k: int | None = None
    page_size: int = 0
    page_layout: PageLayout = "phd"
    pages_in_line: bool = False
    tokens: int = 0
    bias_by_key: bool = False
    mask_by_key: bool = False
    block_q: int = 128
    block_k: int = 128
    score_mod: str = ""
    mask_mod: str = ""
    function_note: str = ""
    grad_captured: int = 0
    num_splits: int = 0
    kv_format: KvFormat = "as_q"
    kv_scales: KvScales = "none"
    rotary: Rotary = "none"
    rotary_dim: int = 0
    layout: Layout = "bhsd"
    aligned: bool = True
    word_aligned: bool = True
    large: bool = False
    needs_grad: bool = False
    dropout: bool = False
    grad_lse: bool = False
    grad_bias: bool = False
    grad_slopes: bool = False
    deterministic: bool = False
    invariant: bool = False
    negative_scale: bool = False

    def __repr__(self) -> str:  # the base class's fields would come first
        names = (*(name for name in self.__struct_fields__ if name not in FEATURES), *FEATURES)
        return f"Problem({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("op", OPS),
            ("dtype", DTYPES),
            ("causal", get_args(Causal)),
            ("layout", get_args(Layout)),
            ("page_layout", get_args(PageLayout)),
            ("kv_format", get_args(KvFormat)),
            ("kv_scales", get_args(KvScales)),
            ("rotary", get_args(Rotary)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                limit = f"must be one of {', '.join(allowed)}"
                if name == "dtype" and value in get_args(KvFormat):
                    limit += f"; of quantised tensors it is the results' type, with kv_format={value!r}"
                raise ArgumentError(str(self.op), name, value, limit)
        if not self.head_dim_v:
            msgspec.structs.force_setattr(self, "head_dim_v", self.head_dim)
        if self.op in OPS and self.has_lists:  # a query's list is all that it can attend
            msgspec.structs.force_setattr(self, "seq_k", self.tokens)
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is None and name.startswith("total_"):
                continue
            if not is_size(value) or not least <= value <= most:
                raise ArgumentError(self.op, name, value, f"must be an integer from {least} to {most}")
        check_groups(self.op, self.heads_q, self.heads_k)
        self._check_op()

    def _check_op(self) -> None:
        """Raise ArgumentError for a field that the op lacks or needs; validation tells callers before."""
        row = ROWS[self.op]
        for name, absent in STORAGE.items():
            given = getattr(self, name)
            if given == absent and name in row.needs and name != "tokens":  # there may be none to choose from
                raise ArgumentError(self.op, name, given, f"must be given for {self.op}")
            if given != absent and name not in row.takes:
                raise ArgumentError(self.op, name, given, f"{self.op} has none")
        for name in FOREIGN[self.op]:
            if getattr(self, name):
                raise ArgumentError(self.op, name, True, f"{self.op} has none")
        if self.tree_mask and "tree_mask" in row.tensors and self.seq_q > MAX_TREE:
            raise ArgumentError(self.op, "seq_q", self.seq_q, f"must be at most {MAX_TREE} with a tree mask")
        if self.block_mask and (self.leftpad_q or self.leftpad_k):
            name = "leftpad_q" if self.leftpad_q else "leftpad_k"
            raise ArgumentError(self.op, name, True, "goes without block_mask, whose blocks count from the first row")
        if self.has_lists and (ordered := sorted(BY_POSITION & {*self.demands()})):
            raise ArgumentError(self.op, ordered[0], True, "goes without tokens, which have no order")
        if self.has_blocks and self.block_k not in KEY_BLOCKS:
            raise ArgumentError(self.op, "block_k", self.block_k, f"must be one of {', '.join(map(str, KEY_BLOCKS))}")
        self._check_cache()
        if "new_v" in row.tensors:
            self._check_written()
        if row.allocates and self.heads_k != 1:
            raise ArgumentError(self.op, "heads_k", self.heads_k, "must be 1: all heads of a row share the keys")
        for name in self.demands() if row.allocates else ():  # FOREIGN and STORAGE have the op's own
            if name in DEMANDS and name not in ("seqlens_k", "paged", "kv_format", "gqa", "invariant"):
                field = {"causal_top_left": "causal", "window": "window_left, window_right"}.get(name, name)
                value = tuple(getattr(self, one) for one in field.split(", "))
                raise ArgumentError(self.op, field, value if len(value) > 1 else value[0], f"{self.op} has none")
        if row.allocates and "k" not in row.tensors and (self.heads_q, self.head_dim) != (1, 1):
            raise ArgumentError(self.op, "heads_q, head_dim", (self.heads_q, self.head_dim), "must be 1, 1: of logits")
        if row.latent and (self.heads_k != 1 or self.head_dim_v > self.head_dim):
            raise ArgumentError(
                self.op, "heads_k, head_dim_v", (self.heads_k, self.head_dim_v), "must be 1, and at most head_dim"
            )

    def _check_cache(self) -> None:
        if self.kv_format == "as_q":
            if self.kv_scales != "none":
                raise ArgumentError(self.op, "kv_scales", self.kv_scales, "goes with a kv_format other than as_q")
            return
        if "k_scale" not in ROWS[self.op].tensors:
            raise ArgumentError(self.op, "kv_format", self.kv_format, f"{self.op} reads keys and values in q's dtype")
        row, kind, name = ROWS[self.op], self.cache_format, self.kv_format
        if self.op not in kind.ops:
            whose = "latent rows of " if row.latent else "operands of " if "q_scale" in row.tensors else ""
            takes = "reads no latent rows" if kind.latent else f"takes no {'' if kind.block else whose}{name}"
            raise ArgumentError(self.op, "kv_format", name, f"{self.op} {takes}")
        for field in ("head_dim", "head_dim_v"):
            if kind.row_multiple > 1 and getattr(self, field) % kind.row_multiple:
                raise ArgumentError(self.op, field, getattr(self, field), kind.width_limit(f"kv_format {name}"))
        if self.q_format not in ("as_q", "int8") and self.kv_scales == "token":
            limit = f"must be none or head with q, k and v of {name}"
            raise ArgumentError(self.op, "kv_scales", self.kv_scales, limit)
        if self.dtype not in kind.dtypes and not self.writes:
            limit = f"must be {' or '.join(kind.dtypes)} with kv_format {name}"
            raise ArgumentError(self.op, "dtype", self.dtype, limit)
        if self.kv_scales not in kind.scales:
            beside = (
                ", beside the scales of its blocks" if kind.block else ", whose rows hold them" if kind.latent else ""
            )
            limit = f"must be {' or '.join(kind.scales)} with kv_format {name}{beside}"
            raise ArgumentError(self.op, "kv_scales", self.kv_scales, limit)
        if kind.latent and self.head_dim_v % DS_GROUP:
            limit = f"must be a multiple of {DS_GROUP} with kv_format {name}"
            raise ArgumentError(self.op, "head_dim_v", self.head_dim_v, limit)

    def _check_written(self) -> None:
        if self.heads_q != self.heads_k:
            raise ArgumentError(self.op, "heads_q", self.heads_q, f"must be heads_k, {self.heads_k}")
        if (self.rotary == "none") != (self.rotary_dim == 0) or self.rotary_dim % 2:
            raise ArgumentError(self.op, "rotary_dim", self.rotary_dim, "must be even, and 0 exactly without rotary")
        if self.rotary_dim > self.head_dim:
            raise ArgumentError(self.op, "rotary_dim", self.rotary_dim, f"must be at most head_dim, {self.head_dim}")

    @property
    def group(self) -> int:
        """Return the number of query heads that share one key/value head."""
        return self.heads_q // self.heads_k

    @property
    def cache_format(self) -> CacheFormat:
        return cache_format(self.kv_format)

    @property
    def q_format(self) -> str:
        """Return the queries' format: as_q unless they are quantised as the keys are."""
        return self.kv_format if "q_scale" in ROWS[self.op].tensors else "as_q"

    @property
    def v_format(self) -> str:
        """Return the values' format: the keys', but as_q beside int8 queries and keys."""
        return "as_q" if self.q_format == "int8" else self.kv_format

    @property
    def padded(self) -> bool:
        """Return whether any per-sequence length or left padding is given."""
        return self.seqlens_q or self.seqlens_k or self.leftpad_q or self.leftpad_k

    @property
    def numbers_of_word(self) -> int:
        """Return how many numbers 16 bits of a quantised cache hold."""
        return 2 * self.cache_format.per_byte

    @property
    def words(self) -> bool:
        """Return whether a quantised cache's rows are whole 16-bit words at aligned addresses (attend_packed16.py)."""
        block = self.cache_format.block
        number = 2 * block or self.numbers_of_word  # a row's scales are words too
        whole = self.head_dim % number == 0 and self.head_dim_v % number == 0
        aligned = self.word_aligned or (self.aligned and not block)  # `aligned` does not cover the scales of blocks
        return self.cache_format.words and whole and aligned

    @property
    def packed(self) -> bool:
        """Return whether the queries of all sequences lie one after the other in one tensor."""
        return self.total_q is not None

    @property
    def has_lists(self) -> bool:
        """Return whether each query has a list of the slots of its keys, which all heads share."""
        return self.tokens > 0 and ROWS[self.op].latent

    @property
    def has_blocks(self) -> bool:
        """Return whether each query and key/value head has a list of blocks of keys."""
        return ROWS[self.op].tensors.get("indices") == "block_indices"

    @property
    def window(self) -> bool:
        return self.window_left != UNLIMITED or self.window_right != UNLIMITED

    @property
    def backward(self) -> bool:
        return bool(ROWS[self.op].gradient_of)

    @property
    def writes(self) -> bool:
        """Return whether a cache is written, and nothing attended."""
        return ROWS[self.op].writes

    @property
    def query_rows(self) -> tuple[int, int]:
        """Return (batch, rows) of the query tensor; packed queries are one batch of all rows."""
        return (self.batch, self.seq_q) if self.total_q is None else (1, self.total_q)

    @property
    def sums(self) -> bool:
        """Return whether results are sums, whose order of terms decides their last bits."""
        return not self.writes or self.op == "indexer_logits"

    def axis_sizes(self) -> dict[str, int]:
        """Return the size of each axis of a feature's tensor (Feature.axes)."""
        batch, rows = self.query_rows
        sizes = {"b": self.batch, "h": self.heads_q, "q": self.seq_q, "k": self.seq_k, "t": self.tokens}
        blocks = {"m": -(-self.seq_q // self.block_q), "n": -(-self.seq_k // self.block_k) + 2}
        return sizes | blocks | {"s": batch, "r": rows}

    def demands(self) -> tuple[str, ...]:
        """Return the names of demands beyond the op's plain attention over these sizes, features last.

        Every field without its default is a demand, a new field too, so that each path must declare it (`takes`);
        sizes, types and memory layout are no demands: each path checks them."""
        found: dict[str, None] = {}
        own = OPS_OWN.get(self.op, ())
        for name, default in _defaults(type(self)):
            value = getattr(self, name)
            if name in PLAIN or value is default or name in own:
                continue
            if value == (self.head_dim if name == "head_dim_v" else default):
                continue
            found["causal_top_left" if value == "top_left" else DEMAND_NAMES.get(name, name)] = None
        if self.group > 1:
            found["gqa"] = None
        return tuple(found)

    def features(self) -> dict[str, Any]:
        """Return the values of all names of conditions.py but `programs`. It is cached: callers must not change it."""
        global _last_features
        whose, found = _last_features
        if whose is not self:
            found = self._features()
            _last_features = self, found
        return found

    def _features(self) -> dict[str, Any]:
        seq_q = rows = self.seq_q
        seq_k = self.seq_k
        fixed = self.num_splits > 0 or self.invariant  # other sequences of the batch may decide nothing
        if self.invariant or (self.num_splits and self.op != "decode_attention"):
            seq_k = ANY_LENGTH  # a table has room for the longest sequence of the batch, or places for the most tokens
        batch = 1 if fixed else self.batch
        if self.has_lists:  # a query's list is a sequence
            batch, seq_q, rows = batch if fixed else batch * seq_q, 1, 1
        elif self.op == "topk_indices":  # each row is a program's, whatever sequence has it
            rows = self.batch * self.seq_q
        elif self.invariant or (self.packed and self.num_splits):
            # A demanded number of splits promises results that do not depend on the other sequences of the batch:
            # nothing may be chosen by how many or how long they are.
            seq_q = rows = ANY_LENGTH
        elif self.packed:
            # The lengths are on the device: only a sequence's average length is known.
            rows = -(-(self.total_q or 0) // max(self.batch, 1))
        return {
            **{name: getattr(self, name) for name in ASKED},
            "causal": self.causal != "none",
            "causal_align": self.causal,
            "gqa": self.group > 1,
            "paged": self.page_size > 0,
            "packed": self.packed,
            "window": self.window or self.chunk > 0,  # kernels mask a chunk by the code of a window
            "chunk": self.chunk > 0,
            # A change of every score of a tile takes registers.
            "featured": any(getattr(self, name) for name in (*EVERY_SCORE, *MODS)),
            "aligned": self.aligned,
            "words": self.words,
            "large": self.large,
            "dropout": self.dropout,
            "deterministic": self.deterministic,
            **{name: bool(getattr(self, name)) for name in (*MODS, "grad_captured")},
            "batch": batch,
            "heads_q": self.heads_q,
            "heads_k": self.heads_k,
            "group": self.group,
            "seq_q": seq_q,
            "seq_k": seq_k,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "widest": max(self.head_dim, self.head_dim_v),
            "page_size": self.page_size,
            "tokens": ANY_LENGTH if self.tokens and fixed else self.tokens,
            "rows": rows * self.group if ROWS[self.op].packs_heads else rows,
            # Tiles of 128 query rows of all heads and sequences: how much there is for a chip's cores to share.
            "query_tiles": batch * self.heads_q * -(-rows // QUERY_TILE),
            "dtype": self.dtype,
            "layout": self.layout,
            "page_layout": self.page_layout,
            "kv_format": self.kv_format,
            "kv_scales": self.kv_scales,
            "rotary": self.rotary,
        }

    def flops(self) -> int:
        """Return the floating-point operations: 2·D a score and 2·Dv a value; of gradients 2.5 times as many.

        A causal mask's hidden pairs do not count; windows, chunks and other masks count as if they hid nothing."""
        if self.writes and self.op != "indexer_logits":
            return 0
        pairs = self.seq_q * (self.seq_k if self.has_blocks else self.tokens or self.seq_k)
        if self.causal != "none":
            # Keys that row i sees: bottom_right i + 1 + (Sk - Sq), top_left i + 1, both clamped to 0..Sk.
            shift = self.seq_k - self.seq_q if self.causal == "bottom_right" else 0
            first, last = 1 + shift, self.seq_q + shift
            low, high = max(first, 0), min(last, self.seq_k)
            pairs = (low + high) * (high - low + 1) // 2 if high >= low else 0
            pairs += max(last - max(self.seq_k, first - 1), 0) * self.seq_k
        if self.has_blocks:
            pairs = min(pairs, self.seq_q * self.tokens * self.block_k)
        width = self.head_dim if self.writes else self.head_dim + self.head_dim_v
        forward = 2 * self.batch * self.heads_q * pairs * width
        return forward * 5 // 2 if self.backward else forward

    def __str__(self) -> str:
        rows, keys = self.query_rows, f"({self.batch},{self.heads_k},{self.seq_k},{self.head_dim})"
        if "new_v" in ROWS[self.op].tensors:
            return self._written(keys)
        shape = f"q ({rows[0]},{self.heads_q},{rows[1]},{self.head_dim})"
        if self.packed:
            shape = f"q ({self.total_q},{self.heads_q},{self.head_dim})"
        if self.total_k is not None:
            keys = f"({self.total_k},{self.heads_k},{self.head_dim})"
        whose = "cache" if self.q_format == "as_q" else "q,k" if self.q_format == "int8" else "q,k,v"
        stored = [f"{whose} {self.kv_format} scales {self.kv_scales}"] if self.kv_format != "as_q" else []
        sizes = [
            f"{name} {getattr(self, name)}" for name in ("page_size", "tokens", "num_splits") if getattr(self, name)
        ]
        if self.has_blocks:
            sizes.append(f"blocks of {self.block_k} keys")
        if self.packed:
            sizes.append(f"{self.batch} sequences")
        flags = [flag for flag in (*ASKED, "dropout", "invariant", *MODS) if getattr(self, flag)]
        causal = [f"causal {self.causal.replace('_', '-')}"] if self.causal != "none" else []
        right = self.window_right if self.causal == "none" else 0
        window = [f"window ({self.window_left},{right})"] if self.window else []
        chunk = [f"chunk {self.chunk}"] if self.chunk else []
        words = (*stored, *sizes, *causal, *window, *chunk, *flags)
        return " ".join([self.op, shape, f"kv {keys}", self.dtype, *words])

    def _written(self, cache: str) -> str:
        new = f"new ({self.batch},{self.heads_k},{self.seq_q},{self.head_dim})"
        stored = f"cache {self.kv_format} scales {self.kv_scales}" if self.kv_format != "as_q" else ""
        size = f"page_size {self.page_size}" if self.page_size else ""
        rotary = f"rotary {self.rotary} {self.rotary_dim}" if self.rotary_dim else ""
        return " ".join(filter(None, [self.op, new, cache, self.dtype, stored, size, rotary]))


@functools.lru_cache(maxsize=16)
def _defaults(kind: type[Problem]) -> tuple[tuple[str, Any], ...]:
    fields = sorted(msgspec.structs.fields(kind), key=lambda field: field.name in ASKED)
    return tuple((field.name, field.default) for field in fields)


# Every name that Problem.demands can give today.
DEMANDS = frozenset(
    {DEMAND_NAMES.get(name, name) for name, _ in _defaults(Problem)} - PLAIN | {"causal_top_left", "gqa"}
)
_last_features: tuple[Problem | None, dict[str, Any]] = (None, {})
