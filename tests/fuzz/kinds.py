"""Kinds of calls, and shapes in which each is made: lengths, batches, strides, alignment, page tables, splits."""

import functools
import itertools
import random
from typing import Any

import msgspec
import torch

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POOL = 2**26  # elements of which all tensors of a dtype are views
LARGE_POOL = 2**31 + 2**26  # with these, strides can pass 2 GiB: where no memory is touched
EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1023, 1024, 1025)
FORMS = ("contiguous", "bshd", "sliced", "fused", "spare", "expanded", "large")
# Values that are equal and of other types are other arguments.
ALIKE: dict[str, tuple[Any, ...]] = {
    "scale": (None, 1, 1.0, True, 0.125), "window": ((5, 1), (5, True), (5.0, 1), (None, 0), (5, None), None),
    "chunk": (None, 2, 2.0, True), "causal": (True, 1, False, 0, "bottom_right"), "return_lse": (True, 1, False),
}  # fmt: skip


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same while shapes change."""

    name: str
    op: str
    dtype: str = "bf16"
    heads: tuple[int, int] = (8, 2)
    width: int = 64
    page: int = 0
    packed: bool = False
    layout: str = "bhsd"
    lengths: bool = False
    options: dict[str, Any] = {}
    backend: str = "auto"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What changes. The fields that an op does not have say nothing.

    form     how keys and values lie in memory (FORMS)
    room     rows of the larger cache that a sliced one lies in, beyond the keys
    shift    elements by which addresses are moved
    spare    columns of a page table, and pages, beyond those needed; what hints of the longest sequence say too much
    twice    k is v, the same tensor
    grad     "", "no_grad", "inference", "wanted" (q requires gradients)
    alike    one of ALIKE's arguments and which of its values; ("", 0) for none
    data     seed of lengths and page tables"""

    batch: int = 1
    rows: int = 16
    keys: int = 64
    form: str = "contiguous"
    room: int = 0
    shift: int = 0
    spare: int = 0
    splits: int | None = None
    twice: bool = False
    grad: str = ""
    alike: tuple[str, int] = ("", 0)
    data: int = 0


DENSE: dict[str, Any] = {"op": "attention"}
KINDS = (
    Kind(name="prefill", **DENSE, options={"causal": True}),
    Kind(name="prefill of the core", **DENSE, options={"causal": True}, backend="triton"),
    Kind(name="prefill 128", **DENSE, width=128, options={"causal": True, "return_lse": True}),
    Kind(name="prefill 72", **DENSE, dtype="fp16", width=72, heads=(4, 4)),
    Kind(name="prefill 40, bshd", **DENSE, width=40, layout="bshd", options={"window": (40, 0)}),
    Kind(name="lengths", **DENSE, dtype="fp16", width=80, lengths=True),
    Kind(name="fp32", **DENSE, dtype="fp32", width=64, heads=(4, 2), options={"causal": "top_left"}),
    Kind(name="D 256", **DENSE, width=256, heads=(4, 2), lengths=True),
    Kind(name="D 8", **DENSE, width=8, heads=(4, 1), options={"softcap": 20.0}),
    Kind(name="packed", op="varlen_attention", packed=True, width=128, options={"causal": True}),
    Kind(name="packed by the core", op="varlen_attention", packed=True, options={"causal": True}, backend="triton"),
    Kind(name="decode", op="decode_attention", width=128, heads=(32, 8), lengths=True),
    Kind(name="decode, full caches", op="decode_attention", dtype="fp16", heads=(16, 2), options={"return_lse": True}),
    Kind(name="decode 72", op="decode_attention", width=72, heads=(4, 4), lengths=True),
    Kind(name="paged", op="paged_attention", page=16, width=128, lengths=True),
    Kind(name="paged, packed", op="paged_attention", page=64, packed=True, lengths=True, options={"causal": True}),
    Kind(name="paged 3", op="paged_attention", dtype="fp16", page=3, width=40, lengths=True),
    Kind(name="sparse", op="sparse_attention", lengths=True),
    Kind(name="mla", op="mla_attention", page=64, width=576, heads=(16, 1), lengths=True, options={"scale": 0.1}),
)  # fmt: skip


class Pool:
    """Memory that all tensors of shapes are views of: the same shape has the same addresses whenever it is made."""

    def __init__(self, device: str, large: bool) -> None:
        self.device, self.large = device, large
        self._of: dict[str, torch.Tensor] = {}

    @property
    def elements(self) -> int:
        return LARGE_POOL if self.large else POOL

    def view(self, dtype: str, third: int, shift: int, shape: tuple[int, ...],
            strides: tuple[int, ...]) -> torch.Tensor:  # fmt: skip
        if dtype not in self._of:
            self._of[dtype] = self._made(TORCH[dtype])
        # In a large pool the thirds are near each other, and overlap: one tensor alone spans it.
        first = third * (POOL // 3 // 1024 * 1024) + shift
        return self._of[dtype].as_strided(shape, strides, first)

    def _made(self, dtype: torch.dtype) -> torch.Tensor:
        if self.large:
            return torch.empty(self.elements, dtype=dtype, device=self.device)  # nobody touches it: no memory
        generator = torch.Generator(device=self.device).manual_seed(3)
        return torch.randn(self.elements, generator=generator, device=self.device, dtype=torch.float32).to(dtype)

    def fits(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
        return reach + 1024 < (self.elements - POOL if self.large else POOL // 3)


def strides_of(form: str, heads: int, rows: int, width: int, room: int) -> tuple[int, int, int, int]:
    cap = rows + room
    return {
        "contiguous": (heads * rows * width, rows * width, width, 1),
        "bshd": (rows * heads * width, width, heads * width, 1), "sliced": (heads * cap * width, cap * width, width, 1),
        "fused": (cap * heads * width * 3, width, heads * width * 3, 1),
        "spare": (heads * rows * (width + 1), rows * (width + 1), width + 1, 1),
        "expanded": (0, rows * width, width, 1), "large": (2**30, 2**29 // heads // 16 * 16, width, 1),
    }[form]  # fmt: skip


def arguments(kind: Kind, shape: Shape, pool: Pool) -> dict[str, Any] | None:
    """The call's arguments; None where this kind has no such shape, or the pool no room."""
    made = _MAKERS[kind.op](kind, shape, pool)
    if made is None:
        return None
    made |= kind.options | {"backend": kind.backend}
    name, which = shape.alike
    if name and not (kind.op == "sparse_attention" and name in ("window", "chunk", "causal")):
        made[name] = ALIKE[name][which % len(ALIKE[name])]
    if shape.grad == "wanted":
        made["q" if "q" in made else "q_nope"].requires_grad_()
    return made


def _numbers(shape: Shape) -> random.Random:
    return random.Random(f"{shape.data} {shape.batch} {shape.keys}")


def _int32(pool: Pool, values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(pool.device)


def _bhsd(kind: Kind, shape: Shape, pool: Pool) -> dict[str, Any] | None:
    """q, k and v of attention and decode_attention, as the kind's layout has them."""
    hq, hk = kind.heads
    decoding = kind.op == "decode_attention"
    rows = 1 + shape.rows % 3 * (shape.rows % 5 == 0) if decoding else shape.rows
    form, given = shape.form, []
    for third, (heads, length) in enumerate(((hq, rows), (hk, shape.keys), (hk, shape.keys))):
        own = form if third or form in ("bshd", "fused", "spare") else "contiguous"
        size = (shape.batch, heads, length, kind.width)
        strides = strides_of(own, heads, length, kind.width, shape.room)
        if not pool.fits(size, strides):
            return None
        tensor = pool.view(kind.dtype, third, shape.shift, size, strides)
        given.append(tensor.transpose(1, 2) if kind.layout == "bshd" else tensor)
    q, k, v = given
    names = ("k_cache", "v_cache") if decoding else ("k", "v")
    made = {"q": q, names[0]: k, names[1]: k if shape.twice else v}
    made |= {"layout": kind.layout} if kind.layout != "bhsd" else {}
    if decoding:
        made |= {"seqlens_k": None} | ({"num_splits": shape.splits} if shape.splits else {})
    if kind.lengths:
        r = _numbers(shape)
        made["seqlens_k"] = _int32(pool, [r.randint(0, shape.keys) for _ in range(shape.batch)])
    return made


def _beginnings(r: random.Random, batch: int, total: int) -> list[int]:
    return [0, *sorted(r.randint(0, total) for _ in range(batch - 1)), total][: batch + 1]


def _packed(kind: Kind, shape: Shape, pool: Pool) -> dict[str, Any] | None:
    r, batch = _numbers(shape), max(shape.batch, 1)
    totals = shape.rows, shape.keys, shape.keys
    made: dict[str, Any] = {}
    for third, (name, heads, total) in enumerate(zip("qkv", (kind.heads[0], *kind.heads[1:] * 2), totals, strict=True)):
        step = heads * kind.width + (kind.width if shape.form in ("fused", "sliced") else 0)
        size, strides = (total, heads, kind.width), (step, kind.width, 1)
        if not pool.fits(size, strides):
            return None
        made[name] = pool.view(kind.dtype, third, shape.shift, size, strides)
    if shape.twice:
        made["v"] = made["k"]
    beginnings = {name: _beginnings(r, batch, total) for name, total in (("q", shape.rows), ("k", shape.keys))}
    for name, begin in beginnings.items():
        made[f"cu_seqlens_{name}"] = _int32(pool, begin)
        longest = max((b - a for a, b in itertools.pairwise(begin)), default=0)
        made[f"max_seqlen_{name}"] = max(longest, 1) + shape.spare
    return made


def _paged(kind: Kind, shape: Shape, pool: Pool) -> dict[str, Any] | None:
    r, (hq, hk), width = _numbers(shape), kind.heads, kind.width
    lengths = [r.randint(0, shape.keys) for _ in range(shape.batch)]
    columns = -(-shape.keys // kind.page) + shape.spare
    pages = max(sum(-(-length // kind.page) for length in lengths), 1) + shape.spare
    latent = kind.op == "mla_attention"
    form = "sliced" if shape.form in ("sliced", "fused") else "contiguous"
    strides = strides_of("contiguous", kind.page, hk, width, 0)  # (P, page, Hk, D)
    strides = (strides[0] * (2 if form == "sliced" else 1), *strides[1:])
    size = (pages, kind.page, hk, width)
    rows = 1 + shape.rows % 3 * (shape.rows % 5 == 0)
    q_size = (shape.rows, hq, width) if kind.packed else (shape.batch, hq, rows, width)
    if not pool.fits(size, strides) or not pool.fits((*q_size, 1),
            (hq * rows * width * 2, rows * width, width, 1, 0)[: len(q_size) + 1]):  # fmt: skip
        return None
    q = pool.view(kind.dtype, 0, shape.shift, q_size, _contiguous(q_size))
    k, v = (pool.view(kind.dtype, third, shape.shift, size, strides) for third in (1, 2))
    order = list(range(pages))
    r.shuffle(order)
    table, left = [], iter(order)
    for length in lengths:
        own = [next(left) for _ in range(-(-length // kind.page))]
        table.append(own + [r.choice((-1, 2**30))] * (columns - len(own)))
    made: dict[str, Any] = {
        "page_table": _int32(pool, table).view(shape.batch, columns), "seqlens_k": _int32(pool, lengths)
    }  # fmt: skip
    if latent:
        rank = width - 64
        made |= {"q_nope": q[..., :rank], "q_rope": q[..., rank:], "kv_pages": k[:, :, 0]}
    else:
        made |= {"q": q, "k_pages": k, "v_pages": k if shape.twice else v}
    if kind.packed:
        made["cu_seqlens_q"] = _int32(pool, _beginnings(r, max(shape.batch, 1), shape.rows))
        made |= {"max_seqlen_q": shape.rows + 1 + shape.spare} if shape.spare else {}
    return made | ({"num_splits": shape.splits} if shape.splits else {})


def _sparse(kind: Kind, shape: Shape, pool: Pool) -> dict[str, Any] | None:
    once = msgspec.structs.replace(shape, rows=1)
    made = _bhsd(msgspec.structs.replace(kind, op="decode_attention", lengths=False), once, pool)
    if made is None or not shape.keys:
        return None
    generator, places = torch.Generator().manual_seed(shape.data), max(shape.rows, 1)
    size = (shape.batch, kind.heads[0], places)
    made["indices"] = torch.randint(0, shape.keys, size, generator=generator, dtype=torch.int32).to(pool.device)
    made["counts"] = torch.randint(0, places + 1, size[:2], generator=generator, dtype=torch.int32).to(pool.device)
    made["seqlens_k"] = _int32(pool, [shape.keys] * shape.batch)
    return made


_MAKERS = {
    "attention": _bhsd, "decode_attention": _bhsd, "varlen_attention": _packed, "paged_attention": _paged,
    "mla_attention": _paged, "sparse_attention": _sparse,
}  # fmt: skip


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides)


@functools.cache
def kind_of(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def following(kind: Kind, before: Shape, r: random.Random) -> Shape:
    """A shape after another: mostly one thing differs, as in a serving loop; now and then all."""
    change = functools.partial(msgspec.structs.replace, before)
    most = 1500 if kind.op == "attention" else 4000
    way = r.choice(("grow", "grow", "grow", "keys", "edge", "rows", "rows edge", "batch", "form", "shift", "spare",
        "splits", "twice", "grad", "alike", "data", "all"))  # fmt: skip
    drawn = {
        "grow": lambda: change(keys=before.keys + 1, twice=False, grad="", alike=("", 0)),
        "keys": lambda: change(keys=r.randint(1, most)), "edge": lambda: change(keys=r.choice(EDGES)),
        "rows": lambda: change(rows=r.randint(1, 600)), "rows edge": lambda: change(rows=r.choice(EDGES[:20])),
        "batch": lambda: change(batch=r.choice((0, 1, 1, 2, 3, 4, 7, 16))),
        "form": lambda: change(form=r.choice(FORMS), room=r.choice((0, 1, 8, 16, 100))),
        "shift": lambda: change(shift=r.choice((0, 0, 1, 4, 8, 16))),
        "spare": lambda: change(spare=r.choice((0, 1, 3, 15, 16))),
        "splits": lambda: change(splits=r.choice((None, None, 1, 2, 7))),
        "twice": lambda: change(twice=not before.twice),
        "grad": lambda: change(grad=r.choice(("", "", "no_grad", "inference", "wanted"))),
        "alike": lambda: change(alike=(r.choice((*ALIKE, "")), r.randrange(6))),
        "data": lambda: change(data=r.randrange(1000)),
        "all": lambda: Shape(batch=r.choice((1, 2, 4)), rows=r.randint(1, 300), keys=r.randint(1, most)),
    }  # fmt: skip
    found = drawn[way]()
    return msgspec.structs.replace(found, keys=1) if found.keys > 6000 else found
