"""What makes a specialisation simpler: a fixed list of steps on the problem, the lowering and the launch, in order.

Each step offers values, simplest first; the reducer keeps the first one that still fails in the same way. Features
come first, for each takes code out of the kernel; then sizes, for a smaller tile is quicker to compile; choices and
options last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from portattn.errors import ArgumentError
from portattn.planning.kernel_specs import CORES
from portattn.schema.features import of_kinds
from portattn.schema.lowering import OF_ROWS, Lowering
from portattn.schema.ops import ROWS
from portattn.schema.problem_limits import UNLIMITED
from portattn.tools.quirks.lifecycle.specialised import Specialisation

_TILES = (16, 32, 64, 128, 256)
_WIDTHS = (16, 32, 64, 128, 256, 512)
_BY_KEY = ("bias", "mask")  # whose second flag, that all rows have the same, goes with them
_FLAGS = (
    *of_kinds("scores", "row", "tokens"), "leftpad_q", "leftpad_k", "seqlens_q", "seqlens_k", "return_lse", "large",
    "negative_scale", "needs_grad",
)  # fmt: skip
_DTYPES = ("fp16", "bf16", "fp32")


class Simplification(msgspec.Struct, frozen=True, kw_only=True):
    """One simplification that was offered: its name for people, and what comes out."""

    name: str
    result: Specialisation


Offer = Callable[[Specialisation], Iterator[Simplification]]


def changing_steps(offer: Offer, what: Specialisation) -> Iterator[Simplification]:
    """The steps of one simplification that change something, simplest first."""
    return (step for step in offer(what) if step.result != what)


def _problem(what: Specialisation, name: str, **changes: Any) -> Iterator[Simplification]:
    """The step to a changed problem; nothing where no call can have it."""
    try:
        problem = msgspec.structs.replace(what.problem, **changes)
    except ArgumentError:
        return
    yield Simplification(name=name, result=msgspec.structs.replace(what, problem=problem))


def _launch(what: Specialisation, name: str, **changes: Any) -> Iterator[Simplification]:
    yield Simplification(name=name, result=msgspec.structs.replace(what, launch=what.launch.changed(changes)))


def _flag_off(flag: str) -> Callable[[Specialisation], Iterator[Simplification]]:
    def offer(what: Specialisation) -> Iterator[Simplification]:
        if getattr(what.problem, flag) and not (flag == "seqlens_k" and ROWS[what.problem.op].always_lengths):
            by_key = {f"{flag}_by_key": False} if flag in _BY_KEY else {}
            yield from _problem(what, f"without {flag}", **{flag: False}, **by_key)

    return offer


def _no_window(what: Specialisation) -> Iterator[Simplification]:
    yield from _problem(what, "without window", window_left=UNLIMITED, window_right=UNLIMITED)
    yield from _problem(what, "without chunk", chunk=0)


def _not_causal(what: Specialisation) -> Iterator[Simplification]:
    if what.problem.op != "varlen_attention" or not what.problem.window:
        yield from _problem(what, "not causal", causal="none")


def _plain_memory(what: Specialisation) -> Iterator[Simplification]:
    yield from _problem(what, "aligned", aligned=True)
    yield from _problem(what, "layout bhsd", layout="bhsd")


def _one_split(what: Specialisation) -> Iterator[Simplification]:
    if what.launch.splits > 1 or what.problem.num_splits > 1:
        for step in _problem(what, "one split", num_splits=1):
            yield Simplification(name=step.name, result=_splits(step.result))


def _splits(what: Specialisation) -> Specialisation:
    return msgspec.structs.replace(what, launch=what.launch.changed({"splits": 1}))


def _dtype(what: Specialisation) -> Iterator[Simplification]:
    for dtype in _DTYPES[: _DTYPES.index(what.problem.dtype)]:
        yield from _problem(what, f"dtype {dtype}", dtype=dtype)


def _fewer_heads(what: Specialisation) -> Iterator[Simplification]:
    p = what.problem
    yield from _problem(what, "one head", heads_q=1, heads_k=1)
    yield from _problem(what, "one head a group", heads_q=p.heads_k)
    yield from _problem(what, "one group", heads_q=p.heads_q // p.heads_k, heads_k=1)


def _smaller(what: Specialisation) -> Iterator[Simplification]:
    """Sizes that the machine code does not depend on: small ones make the reproducer readable."""
    p, tile = what.problem, max(16, *(max(one.block_m, one.block_n) for one in what.launch.kernels()))
    sizes: dict[str, Any] = {"batch": 1}
    if p.seq_q > tile:
        sizes["seq_q"] = tile
    keys = -(-2 * tile // (p.page_size or 1)) * (p.page_size or 1)
    if p.seq_k > keys:
        sizes["seq_k"] = keys
    for name, rows in (("total_q", sizes.get("seq_q", p.seq_q)), ("total_k", sizes.get("seq_k", p.seq_k))):
        if getattr(p, name) is not None:
            sizes[name] = rows
    yield from _problem(what, "small sizes", **sizes)
    yield from _problem(what, "one batch", batch=1)


def _width(what: Specialisation) -> Iterator[Simplification]:
    p = what.problem
    if p.op == "mla_attention":
        for rank in (w for w in _WIDTHS if w < p.head_dim_v):
            yield from _problem(what, f"latent rank {rank}", head_dim=rank + min(64, rank), head_dim_v=rank)
        return
    for width in (w for w in _WIDTHS if w < max(p.head_dim, p.head_dim_v)):
        yield from _problem(what, f"head_dim {width}", head_dim=width, head_dim_v=width)
    yield from _problem(what, f"head_dim_v {p.head_dim}", head_dim_v=p.head_dim)


def _one_tile(what: Specialisation) -> Iterator[Simplification]:
    """Of gradients: both kernels as the one of keys, or as the one of rows."""
    of_rows = what.launch.of_rows()
    yield from _launch(what, "rows as keys", **{name: what.launch.get(name) for name in OF_ROWS})
    yield from _launch(what, "keys as rows", **{name: of_rows.get(name) for name in OF_ROWS})


def _tile(field: str) -> Callable[[Specialisation], Iterator[Simplification]]:
    def offer(what: Specialisation) -> Iterator[Simplification]:
        for size in (tile for tile in _TILES if tile < getattr(what.launch, field)):
            yield from _launch(what, f"{field} {size}", **{field: size})

    return offer


def _fewer(field: str) -> Callable[[Specialisation], Iterator[Simplification]]:
    def offer(what: Specialisation) -> Iterator[Simplification]:
        count = 1
        while count < getattr(what.launch, field):
            yield from _launch(what, f"{field} {count}", **{field: count})
            count = count * 2 if field == "num_warps" else count + 1

    return offer


def _option_off(what: Specialisation) -> Iterator[Simplification]:
    for name, _ in what.launch.options:
        kept = tuple(pair for pair in what.launch.options if pair[0] != name)
        launch = msgspec.structs.replace(what.launch, options=kept)
        yield Simplification(name=f"without option {name}", result=msgspec.structs.replace(what, launch=launch))


def _variable_off(what: Specialisation) -> Iterator[Simplification]:
    for name in what.env:
        kept = {key: value for key, value in what.env.items() if key != name}
        yield Simplification(name=f"without {name}", result=msgspec.structs.replace(what, env=kept))


def _usual_choice(what: Specialisation) -> Iterator[Simplification]:
    usual = Lowering()
    for name in CORES[what.problem.op].choices:
        value = getattr(usual, name)
        if getattr(what.lowering, name) != value:
            lowering = msgspec.structs.replace(what.lowering, **{name: value})
            yield Simplification(name=f"{name} {value}", result=msgspec.structs.replace(what, lowering=lowering))


# In the order in which they are tried.
OFFERS: tuple[Offer, ...] = (
    *(_flag_off(flag) for flag in _FLAGS),
    _no_window,
    _not_causal,
    _plain_memory,
    _one_split,
    _fewer_heads,
    _smaller,
    _dtype,
    _width,
    _one_tile,
    _tile("block_m"),
    _tile("block_n"),
    _fewer("num_warps"),
    _fewer("num_stages"),
    _option_off,
    _variable_off,
    _usual_choice,
)
