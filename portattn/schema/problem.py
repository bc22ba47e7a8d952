"""Problem: what a call asks for, validated once. It holds shapes and features, never data."""

from __future__ import annotations

import functools
from typing import Any, get_args

import msgspec

from portattn.errors import ArgumentError
from portattn.schema.features import EVERY_SCORE
from portattn.schema.ops import ROWS
from portattn.schema.problem_limits import (
    ANY_LENGTH,
    ASKED,
    DEMAND_NAMES,
    DS_GROUP,
    DS_MLA,
    DTYPES,
    FOREIGN,
    INTEGERS,
    LIMITS,
    MAX_TREE,
    NV_BLOCK,
    NVFP4,
    OPS,
    OPS_OWN,
    PAIRED,
    PLAIN,
    QUERY_TILE,
    STORAGE,
    UNLIMITED,
    Causal,
    Dtype,
    KvFormat,
    KvScales,
    Layout,
    Op,
    PageLayout,
    Rotary,
)
from portattn.schema.symbolic_int import is_size

_Struct: Any = type(msgspec.Struct)


class _ByKeyword(_Struct):
    """Names the keywords in the error of a positional argument."""

    def __call__(cls, *positional: Any, **fields: Any) -> Any:  # noqa: N805 - a metaclass
        if positional:
            words = "Problem(batch=1, heads_q=8, heads_k=8, seq_q=128, seq_k=128, head_dim=64)"
            raise TypeError(f"{len(positional)} positional arguments, but Problem takes keywords only: {words}")
        return super().__call__(**fields)


def check_groups(op: str, heads_q: int, heads_k: int, hint: str = "") -> None:
    """Raise ArgumentError where no whole number of query heads shares a key/value head; `hint` ends its text."""
    if heads_k > 0 and heads_q % heads_k:
        limit = f"must be a multiple of the {heads_k} key/value heads (heads_k){hint}"
        raise ArgumentError(op, "heads_q", heads_q, limit)


class Problem(msgspec.Struct, metaclass=_ByKeyword, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attention problem: op, sizes, dtype and features. Hashable, so that plans are cached by it.

    op            the operation
    dtype         of queries and results; of results alone where queries are quantised
    batch, heads_q, heads_k, seq_q, seq_k   sizes; seq_k is a cache's capacity for the ops that read one, and of packed
                  tensors seq_q and seq_k are the longest sequence's
    head_dim, head_dim_v                    width of Q and K, and of V; for mla_attention of the latent row, and of its
                  part that is also V
    causal        none; bottom_right (the last query sees the last key); top_left (query i sees keys 0..i)
    window_left, window_right  keys that a query sees before and after its own position; -1 for all of them. A right
                  side of 0 is `causal`
    chunk         keys of a chunk, counted from the sequence's first key; a query sees its own position's chunk. 0 for
                  no chunks
    total_q, total_k  rows of packed queries, and of packed keys; None if they are not packed
    seqlens_q/k   per-sequence lengths are given, on the device
    leftpad_q/k   per-sequence left padding is given, on the device
    page_size, page_layout  tokens a page of the cache (0: it is contiguous), and whether heads or tokens come first
    pages_in_line  each page follows the page before it at the distance of two rows: a head's rows of all pages are one
                  matrix
    tokens        places for chosen tokens of each head (Lmax of sparse_attention)
    log_weights, magicpig  sparse_attention: logarithms added to the scores, given or computed from MagicPIG's K and L
    softcap, alibi_slopes, sinks, bias, mask, tree_mask, block_mask   those features are asked for
    block_q, block_k  queries and keys of a block of block_mask
    bias_by_key, mask_by_key   they are the same for every head and query of a sequence
    num_splits    programs that share a row's keys, as the caller demands; 0 for as many as planning finds best
    aligned       rows are contiguous, and bases and outer strides are multiples of 16 bytes (for TMA)
    word_aligned  the same for a cache's rows, with 4 bytes (for a float32 scale inside them). For nvfp4 the blocks'
                  scales too, with 2 or 1 if a row's scales are no multiple of 4 bytes
    kv_format     format of the numbers in the cache: as_q (q's dtype), or a narrower one, which kernels widen in
                  registers. attention and varlen_attention have queries in it too (q_format), and values except with
                  int8 (v_format)
    kv_scales     the unit of a scale of keys, values and queries: none, head (a key/value head of a sequence, also if
                  all share one), token (a token and a head)
    rotary, rotary_dim  append and write: keys get a rotary embedding on the way, in so many first columns
    large         a tensor spans 2 GiB or more, so 32-bit byte offsets do not reach all of it
    needs_grad    autograd will ask for gradients
    dropout       dropout_p > 0
    grad_lse, grad_bias, grad_slopes   of gradients: the LSE has one, and the bias's and the slopes' are asked for
    deterministic results must repeat bit by bit (torch.use_deterministic_algorithms)
    negative_scale  the factor on the scores is below 0: kernels carry its sign in Q

    Raises ArgumentError, naming the field, when a size is out of range, and TypeError for a positional argument.

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
    seqlens_q: bool = False
    seqlens_k: bool = False
    leftpad_q: bool = False
    leftpad_k: bool = False
    page_size: int = 0
    page_layout: PageLayout = "phd"
    pages_in_line: bool = False
    tokens: int = 0
    log_weights: bool = False
    magicpig: bool = False
    softcap: bool = False
    alibi_slopes: bool = False
    sinks: bool = False
    bias: bool = False
    bias_by_key: bool = False
    mask: bool = False
    mask_by_key: bool = False
    tree_mask: bool = False
    block_mask: bool = False
    block_q: int = 128
    block_k: int = 128
    num_splits: int = 0
    return_lse: bool = False
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
    negative_scale: bool = False

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
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is None and name.startswith("total_"):
                continue
            if not is_size(value) or not least <= value <= most:
                raise ArgumentError(self.op, name, value, f"must be an integer from {least} to {most}")
        check_groups(self.op, self.heads_q, self.heads_k)
        self._check_op()

    def _check_op(self) -> None:
        """What one op has and another has not. Callers meet these limits in validation; this guards the data."""
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
        self._check_cache()
        if row.writes:
            self._check_written()
        if row.latent and (self.heads_k != 1 or self.head_dim_v > self.head_dim):
            raise ArgumentError(
                self.op, "heads_k, head_dim_v", (self.heads_k, self.head_dim_v), "must be 1, and at most head_dim"
            )

    def _check_cache(self) -> None:
        """A cache of narrower numbers than q's: which op reads one, and what goes with which format."""
        if self.kv_format == "as_q":
            if self.kv_scales != "none":
                raise ArgumentError(self.op, "kv_scales", self.kv_scales, "goes with a kv_format other than as_q")
            return
        if "k_scale" not in ROWS[self.op].tensors:
            raise ArgumentError(self.op, "kv_format", self.kv_format, f"{self.op} reads keys and values in q's dtype")
        if self.kv_format == "int4":
            self._check_int4()
        if self.kv_format == NVFP4:
            self._check_nvfp4()
        if self.q_format not in ("as_q", "int8") and self.kv_scales == "token":
            limit = f"must be none or head with q, k and v of {self.kv_format}"
            raise ArgumentError(self.op, "kv_scales", self.kv_scales, limit)
        if self.dtype == "fp32" and not self.writes:
            raise ArgumentError(self.op, "dtype", self.dtype, f"must be fp16 or bf16 with kv_format {self.kv_format}")
        if self.kv_format in INTEGERS and self.kv_scales == "none":
            limit = f"must be head or token with kv_format {self.kv_format}"
            raise ArgumentError(self.op, "kv_scales", self.kv_scales, limit)
        if self.kv_format == DS_MLA:
            self._check_ds_mla()

    def _check_int4(self) -> None:
        """Two numbers a byte: of caches whose keys and values are rows of their own, and of an even width."""
        row = ROWS[self.op]
        if row.latent or "q_scale" in row.tensors:
            whose = "latent rows" if row.latent else "operands"
            raise ArgumentError(self.op, "kv_format", self.kv_format, f"{self.op} takes no {whose} of int4")
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) % 2:
                limit = "must be even with kv_format int4, two numbers a byte"
                raise ArgumentError(self.op, name, getattr(self, name), limit)

    def _check_nvfp4(self) -> None:
        """Blocks of numbers with a scale each: of caches whose rows are whole blocks, with no scale for each token."""
        if "k_block_scale" not in ROWS[self.op].tensors:
            raise ArgumentError(self.op, "kv_format", self.kv_format, f"{self.op} takes no {NVFP4}")
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) % NV_BLOCK:
                limit = f"must be a multiple of {NV_BLOCK} with kv_format {NVFP4}, whose blocks share a scale"
                raise ArgumentError(self.op, name, getattr(self, name), limit)
        if self.kv_scales == "token":
            limit = f"must be none or head with kv_format {NVFP4}, beside the scales of its blocks"
            raise ArgumentError(self.op, "kv_scales", self.kv_scales, limit)

    def _check_ds_mla(self) -> None:
        """Rows of numbers, scales and rotary numbers: of a latent cache alone, with queries of their rotary dtype."""
        if not ROWS[self.op].latent:
            raise ArgumentError(self.op, "kv_format", self.kv_format, f"{self.op} reads no latent rows")
        if self.kv_scales != "none":
            raise ArgumentError(self.op, "kv_scales", self.kv_scales, f"must be none: {DS_MLA} rows hold their scales")
        if self.dtype != "bf16":
            raise ArgumentError(self.op, "dtype", self.dtype, f"must be bf16 with kv_format {DS_MLA}")
        if self.head_dim_v % DS_GROUP:
            limit = f"must be a multiple of {DS_GROUP} with kv_format {DS_MLA}"
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
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_k

    @property
    def q_format(self) -> str:
        """Format of the queries: as_q unless they are quantised as the keys are."""
        return self.kv_format if "q_scale" in ROWS[self.op].tensors else "as_q"

    @property
    def v_format(self) -> str:
        """Format of the values: that of the keys, but for those beside quantised queries and keys of int8."""
        return "as_q" if self.q_format == "int8" else self.kv_format

    @property
    def padded(self) -> bool:
        """Whether any per-sequence length or left padding is given."""
        return self.seqlens_q or self.seqlens_k or self.leftpad_q or self.leftpad_k

    @property
    def numbers_of_word(self) -> int:
        """Numbers that 16 bits of a quantised cache hold."""
        return 4 if self.kv_format in PAIRED else 2

    @property
    def words(self) -> bool:
        """Whether rows of a quantised cache are whole 16-bit words at aligned addresses (attend_packed16.py)."""
        number = 2 * NV_BLOCK if self.kv_format == NVFP4 else self.numbers_of_word  # a row's scales are words too
        whole = self.head_dim % number == 0 and self.head_dim_v % number == 0
        # What is aligned says nothing of the scales of nvfp4's blocks.
        aligned = self.word_aligned or (self.aligned and self.kv_format != NVFP4)
        return self.kv_format != "as_q" and whole and aligned

    @property
    def packed(self) -> bool:
        """Whether queries of all sequences lie one after the other in one tensor."""
        return self.total_q is not None

    @property
    def window(self) -> bool:
        """Whether a window hides keys."""
        return self.window_left != UNLIMITED or self.window_right != UNLIMITED

    @property
    def backward(self) -> bool:
        """Whether it is the gradients of an operation."""
        return bool(ROWS[self.op].gradient_of)

    @property
    def writes(self) -> bool:
        """Whether a cache is written, and nothing attended."""
        return ROWS[self.op].writes

    @property
    def query_rows(self) -> tuple[int, int]:
        """(batch, rows) of the query tensor: packed queries are one batch of all rows."""
        return (self.batch, self.seq_q) if self.total_q is None else (1, self.total_q)

    def demands(self) -> tuple[str, ...]:
        """Return the names of demands beyond the op's plain attention over these sizes, in the fields' order.

        Every field without its default is a demand, a new field too: a path that does not declare it (`takes`) is not
        taken. Only sizes, types and places in memory are not, which each path checks.
        """
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
        """What conditions can ask about: every key of conditions.FLAGS, NUMBERS and WORDS but `programs`. Not to be
        changed: planning asks for them again and again, and the last ones are kept."""
        global _last_features
        whose, found = _last_features
        if whose is not self:
            found = self._features()
            _last_features = self, found
        return found

    def _features(self) -> dict[str, Any]:
        seq_q = rows = self.seq_q
        seq_k = self.seq_k
        if self.num_splits and self.op != "decode_attention":
            seq_k = ANY_LENGTH  # a table has room for the longest sequence of the batch, or places for the most tokens
        if self.packed and self.num_splits:
            # A demanded number of splits promises results that do not depend on the other sequences of the batch:
            # nothing may be chosen by how many or how long they are.
            seq_q = rows = ANY_LENGTH
        elif self.packed:
            # The lengths are on the device: what is known is how long a sequence is on average.
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
            # What is done to every score of a tile takes registers.
            "featured": any(getattr(self, name) for name in EVERY_SCORE),
            "aligned": self.aligned,
            "words": self.words,
            "large": self.large,
            "dropout": self.dropout,
            "deterministic": self.deterministic,
            "batch": 1 if self.num_splits else self.batch,
            "heads_q": self.heads_q,
            "heads_k": self.heads_k,
            "group": self.group,
            "seq_q": seq_q,
            "seq_k": seq_k,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "widest": max(self.head_dim, self.head_dim_v),
            "page_size": self.page_size,
            "tokens": ANY_LENGTH if self.tokens and self.num_splits else self.tokens,
            "rows": rows * self.group if ROWS[self.op].packs_heads else rows,
            # Tiles of 128 query rows of all heads and sequences: how much there is for a chip's cores to share.
            "query_tiles": (1 if self.num_splits else self.batch) * self.heads_q * -(-rows // QUERY_TILE),
            "dtype": self.dtype,
            "layout": self.layout,
            "page_layout": self.page_layout,
            "kv_format": self.kv_format,
            "kv_scales": self.kv_scales,
            "rotary": self.rotary,
        }

    def flops(self) -> int:
        """Floating-point operations: 2·D per score and 2·Dv per value, causal counting only what is
        attended (half the square when seq_q = seq_k). Windows, chunks and masks count as if they hid nothing. Of
        gradients 2.5 times as many: five products for two."""
        if self.writes:
            return 0
        pairs = self.seq_q * (self.tokens or self.seq_k)
        if self.causal != "none":
            # Keys that row i sees: bottom_right i + 1 + (Sk - Sq), top_left i + 1, both clamped to 0..Sk.
            shift = self.seq_k - self.seq_q if self.causal == "bottom_right" else 0
            first, last = 1 + shift, self.seq_q + shift
            low, high = max(first, 0), min(last, self.seq_k)
            pairs = (low + high) * (high - low + 1) // 2 if high >= low else 0
            pairs += max(last - max(self.seq_k, first - 1), 0) * self.seq_k
        forward = 2 * self.batch * self.heads_q * pairs * (self.head_dim + self.head_dim_v)
        return forward * 5 // 2 if self.backward else forward

    def __str__(self) -> str:
        rows, keys = self.query_rows, f"({self.batch},{self.heads_k},{self.seq_k},{self.head_dim})"
        if self.writes:
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
        if self.packed:
            sizes.append(f"{self.batch} sequences")
        flags = [flag for flag in (*ASKED, "dropout") if getattr(self, flag)]
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
    """Fields and their defaults."""
    return tuple((field.name, field.default) for field in msgspec.structs.fields(kind))


# Every name that Problem.demands can give today.
DEMANDS = frozenset(
    {DEMAND_NAMES.get(name, name) for name, _ in _defaults(Problem)} - PLAIN | {"causal_top_left", "gqa"}
)
_last_features: tuple[Problem | None, dict[str, Any]] = (None, {})
