"""Case: one timed problem as data; the named sets of sets.toml; the order in which a budget measures their cases."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from portattn.schema import toml_reader
from portattn.schema.problem_limits import Causal, Dtype, KvFormat, KvScales, Op, cache_format
from portattn.schema.tensors import CACHE_DTYPE, TORCH_DTYPE

Window = tuple[int | None, int | None]
Timing = Literal["hot", "cold", "do_bench"]
SCALE_BYTES = 4  # of a float32
STORED_OPS = ("decode_attention", "paged_attention")  # whose caches a case may have quantised
CACHE_OPS = ("decode_attention", "paged_attention", "sparse_attention", "mla_attention")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    op: Op
    batch: int
    heads_q: int
    heads_k: int
    # seq_q, seq_k: rows and keys of a sequence; with lengths given, of the longest sequence's slot
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int = 0  # width of V; 0 for head_dim. mla_attention: the part of a latent row that is V
    dtype: Dtype = "bf16"
    causal: Causal = "none"
    window: Window = (None, None)  # keys before and after its own position that a query sees
    # lengths_q, lengths_k: rows and keys of each sequence; empty for full slots
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    packed: bool = False  # queries, and the keys of varlen_attention, are packed
    page_size: int = 0  # tokens a page; 0 for a contiguous cache
    tokens: int = 0  # tokens chosen by each query head of sparse_attention
    magicpig: tuple[int, int] | None = None  # MagicPIG's K and L, if it sampled the chosen tokens
    kv_format: KvFormat = "as_q"  # number format of the cache: as_q (dtype), or a narrower one
    # granularity of the cache's scales: none, head (here one for the whole cache), token (and head)
    kv_scales: KvScales = "none"
    inline_scales: bool = False  # a token's scale lies behind its numbers, in the same row of memory
    scale: float | None = None  # None for 1/√head_dim
    backward: bool = False  # the gradients of q, k and v are timed; the forward runs once before
    dropout: float = 0.0  # probability with which an attended pair is left out of a training call
    deterministic: bool = False  # gradients under torch.use_deterministic_algorithms: the same bits in every run
    # how rounds.py takes device time: calls back to back, each after an L2 flush, or triton.testing.do_bench
    timing: Timing = "hot"

    @property
    def queries(self) -> tuple[int, ...]:
        return self.lengths_q or (self.seq_q,) * self.batch

    @property
    def keys(self) -> tuple[int, ...]:
        return self.lengths_k or (self.seq_k,) * self.batch

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_k

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def windowed(self) -> bool:
        return self.window != (None, None)

    @property
    def reads_cache(self) -> bool:
        """Return whether bytes limit the op as well as FLOPs: it decodes from a cache."""
        return self.op in CACHE_OPS

    @property
    def quantised(self) -> bool:
        return self.kv_format != "as_q"

    def unquantised(self) -> "Case":
        return msgspec.structs.replace(self, kv_format="as_q", kv_scales="none", inline_scales=False)

    def flops(self) -> int:
        """Return FLOPs of attended pairs; a backward counts 2.5 times as many (FlashAttention-2's paper, section 4)."""
        pairs = self.batch * self.tokens or sum(seen[0] for seen in self._seen())
        forward = 2 * self.heads_q * pairs * (self.head_dim + self.width_v)
        return forward * 5 // 2 if self.backward else forward

    def read_bytes(self) -> int:
        """Return bytes of the attended keys and values, each read once a group; a backward moves more.

        Chosen tokens count as often as they differ on average among a group's heads, which choose at random."""
        row = self.head_dim if self.op == "mla_attention" else self.head_dim + self.width_v
        if self.tokens:
            rows = round(sum(keys * (1 - (1 - self.tokens / keys) ** self.group) for keys in self.keys))
        else:
            rows = sum(seen[1] for seen in self._seen())
        dtype = CACHE_DTYPE[self.kv_format] if self.quantised else TORCH_DTYPE[self.dtype]
        kind = cache_format(self.kv_format)
        scales = 2 * SCALE_BYTES if self.kv_scales == "token" else 0
        scales += row // kind.block if kind.block else 0
        return rows * self.heads_k * (row // kind.per_byte * dtype.itemsize + scales)

    def _seen(self) -> list[tuple[int, int]]:
        return [count_attended(q, k, self.causal, self.window) for q, k in zip(self.queries, self.keys, strict=True)]


@functools.cache
def count_attended(queries: int, keys: int, causal: Causal, window: Window) -> tuple[int, int]:
    """Return, for one sequence and head, the attended pairs and the keys that any query attends."""
    shift = 0 if causal == "top_left" else keys - queries
    left, right = window
    if causal != "none":
        right = 0 if right is None else min(right, 0)
    pairs, first, end = 0, keys, 0
    for row in range(queries):
        low = 0 if left is None else max(row + shift - left, 0)
        high = keys if right is None else min(row + shift + right + 1, keys)
        if high > low:
            pairs, first, end = pairs + high - low, min(first, low), max(end, high)
    return pairs, max(end - first, 0)


Cell = tuple[str, Case]  # a set's name and one of its cases


def plain(chosen: Mapping[str, Sequence[Case]]) -> list[Cell]:
    return [(name, case) for name, cases in chosen.items() for case in cases]


def covering(chosen: Mapping[str, Sequence[Case]]) -> list[Cell]:
    """Return one cell of every set, then the next of every set: any prefix has about equally many of each set."""
    columns = [[(name, case) for case in spread(cases)] for name, cases in chosen.items()]
    return [cell for row in itertools.zip_longest(*columns) for cell in row if cell is not None]


def spread(cases: Sequence[Case]) -> list[Case]:
    """Return the cases in the order of their places' reversed bits: first, middle, quarters, …"""
    bits = max(len(cases) - 1, 1).bit_length()
    places = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [cases[place] for place in places if place < len(cases)]


WIDTH = 2048  # heads · head_dim of cases without heads, as FlashAttention's papers time them
TOKENS = 16384  # batch · seq of cases without a batch


def _read(path: Path) -> dict[str, list[Case]]:
    data, _ = toml_reader.read(path)
    shapes = data["shapes"]
    return {
        name: [case for group in made["cases"] for case in _expand(shapes, **group)]
        for name, made in data["set"].items()
    }


def _expand(
    shapes: dict[str, list[dict[str, Any]]], each: dict[str, Any] | None = None, **fixed: Any
) -> Iterator[Case]:
    """Yield a case for each combination of the axes whose fields do not contradict each other."""
    axes = []
    for name, values in (each or {}).items():
        values = shapes[values] if isinstance(values, str) else values
        axes.append([value if isinstance(value, dict) else {name: value} for value in values])
    for combination in itertools.product(*axes):
        fields = dict(fixed)
        for part in combination:
            if any(fields.setdefault(name, value) != value for name, value in part.items()):
                break
        else:
            yield _case(**fields)


def _case(
    *, name: str, op: str = "attention", causal: bool = False, seq: int = 1, group: int = 1, lengths: Any = (),
    text: str = "", head_dim: int, **fields: Any,
) -> Case:  # fmt: skip
    heads = fields.setdefault("heads_q", WIDTH // head_dim)
    for field, value in {
        "seq_q": seq, "seq_k": seq, "batch": max(TOKENS // seq, 1), "heads_k": heads // group, "lengths_q": lengths,
        "lengths_k": lengths, "dtype": "bf16",
    }.items():  # fmt: skip
        fields.setdefault(field, value)
    for field in ("lengths_q", "lengths_k"):
        runs = ([run] if isinstance(run, int) else run[:0:-1] * run[0] for run in fields[field])
        fields[field] = tuple(itertools.chain.from_iterable(runs))
    words = fields | {"head_dim": head_dim, "seq": seq, "causal": " causal" * causal}
    fields |= {"name": name.format(**words, text=text.format(**words)), "op": op, "head_dim": head_dim}
    fields["causal"] = "bottom_right" if causal else "none"
    return msgspec.convert(msgspec.to_builtins(Case(**fields)), Case)  # no unknown field, and tuples of the right types


SETS = _read(Path(__file__).with_name("sets.toml"))
