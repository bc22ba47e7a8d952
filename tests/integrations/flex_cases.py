"""Functions of scores and masks, random ones too, and the comparison with torch's flex_attention in float64.

torch computes gradients of flex_attention on no CPU: `theirs` is the function that its eager mode runs there.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as torchs

from portattn.testing.tolerance import budget, count_misplaced, largest, nan_filled_memory

ROWS, KEYS, HEADS = 37, 45, 4
Tensors = list[torch.Tensor]
Mod = Callable[..., torch.Tensor]


def theirs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Mod | None = None, block_mask: Any = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out, LSE and largest scores of torch's flex_attention, which autograd follows."""
    masks = (torchs.noop_mask,) if block_mask is None else block_mask.as_tuple()
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, lse, most = math_attention(q, k, v, score_mod or torchs._identity, masks, scale, {})
    return out, lse * math.log(2), most * math.log(2)


def qkv(
    batch: int = 2, heads: int = 2, rows: int = ROWS, keys: int = KEYS, width: int = 16, width_v: int = 16
) -> Tensors:
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = (2, HEADS, rows, width), (batch, heads, keys, width), (batch, heads, keys, width_v)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def results(
    run: Callable[..., Sequence[torch.Tensor]], given: Sequence[torch.Tensor], learned: bool = True, added: bool = False
) -> Tensors:
    """Return run's results for q, k, v and captured tensors, and the gradients of all floating-point tensors.

    Unless the captured tensors are learned, q, k and v alone have gradients. If these are added in any order, new
    memory holds anything in the backward pass: torch fills it in deterministic mode alone."""
    leaves = [t.detach().clone() for t in given]
    for leaf in leaves[: None if learned else 3]:
        leaf.requires_grad_(leaf.is_floating_point())
    with nan_filled_memory():
        found = list(run(*leaves))
    with contextlib.nullcontext() if added else nan_filled_memory():
        generator = torch.Generator().manual_seed(0)
        # Of a score function that reads no score, torch's LSE has no graph.
        pairs = [(t, torch.randn(t.shape, generator=generator).to(t.dtype)) for t in found[:2]]
        reached, grads = zip(*((t, grad) for t, grad in pairs if t.requires_grad), strict=True)
        inputs = [t for t in leaves if t.requires_grad]
        return found + list(torch.autograd.grad(reached, inputs, grads, allow_unused=True, materialize_grads=True))


def assert_right(
    ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], same: Sequence[torch.Tensor], about: str
) -> None:
    """Assert that results are within the error budget; `same` are torch's in the same dtype."""
    for place, (mine, right, other) in enumerate(zip(ours, expected, same, strict=True)):
        mine, right, other = mine.detach(), right.detach(), other.detach()
        assert mine.shape == right.shape
        assert not count_misplaced(mine, right), f"{about}: result {place}"
        finite = right.isfinite()
        error = largest((mine.double() - right).where(finite, 0.0))
        # Gradients are sums over thousands of terms.
        limit = budget(mine.dtype, right.where(finite, 0.0), other.where(finite, 0.0), least=1.0 if place < 3 else 4.0)
        assert error <= limit, f"{about}: result {place}: {error} > {limit}"


_generator = torch.Generator().manual_seed(5)
LENGTHS = torch.tensor([11, 1, 20, 13])
STARTS = torch.tensor([0, 11, 12, 32, 45])
DOCUMENT = torch.repeat_interleave(torch.arange(4), LENGTHS)  # of each of 45 tokens
PREFIX_OF = torch.tensor([0, 0, 2, 2])  # the document that holds the prompt of each
GLOBAL = torch.rand(KEYS, generator=_generator) > 0.9
ANCESTOR = torch.eye(ROWS, dtype=torch.bool) | (torch.rand(ROWS, ROWS, generator=_generator) > 0.7)
INTERVALS = torch.tensor([[0, 20], [3, 37], [20, 37]])
PADDING = torch.rand(2, KEYS, generator=_generator) > 0.3


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _both(coordinates: Callable[[Any], tuple[Any, Any]], reach: int, side: int) -> Mod:
    """Return a neighbourhood on a canvas of side × side, whose middle is kept inside."""

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        pairs = zip(coordinates(q), coordinates(kv), strict=True)
        x, y = ((at.clamp(reach, side - 1 - reach) - other).abs() <= reach for at, other in pairs)
        return x & y

    return near


def _tiled(token: Any) -> tuple[Any, Any]:
    tile, inside = token // 4, token % 4
    return tile % 4 * 2 + inside % 2, tile // 4 * 2 + inside // 2


def _morton(token: Any) -> tuple[Any, Any]:
    def every_second(bits: Any) -> Any:
        bits = bits & 0x55
        bits = (bits | (bits >> 1)) & 0x33
        return (bits | (bits >> 2)) & 0x0F

    return every_second(token), every_second(token >> 1)


def _diffusion(b: Any, h: Any, q: Any, kv: Any) -> Any:
    noised, other = q < 18, kv < 18
    block, of_key = q % 18 // 4, kv % 18 // 4
    own, before = (block == of_key) & (noised == other), (block > of_key) & noised & ~other
    return own | before | ((block >= of_key) & ~noised & ~other)


def _shared(b: Any, h: Any, q: Any, kv: Any) -> Any:
    own = DOCUMENT[q]
    prompt = PREFIX_OF[own]
    inside = (own != prompt) & (kv >= STARTS[prompt]) & (kv < STARTS[prompt + 1])
    return ((kv >= STARTS[own]) & (kv <= q)) | inside


def _documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
    own, other = DOCUMENT[q], DOCUMENT[kv]
    return (own == other) & causal(b, h, q - STARTS[own], kv - STARTS[other])


def _in_image(b: Any, h: Any, q: Any, kv: Any) -> Any:
    interval = INTERVALS[kv // 15]
    return (q >= interval[0]) & (q < interval[1])


def _batched(size: int, mask: Mod) -> Mod:
    return lambda b, h, q, kv: (q // size == kv // size) & mask(b, h, q % size, kv % size)


def _sliding_tiles(b: Any, h: Any, q: Any, kv: Any) -> Any:
    middle, text = (q // 5).clamp(1, 5), kv >= 40
    return (((kv // 5 >= middle - 1) & (kv // 5 <= middle + 1)) & ~text) | text


# Masks of published models, as attention-gym has them too.
MASKS: dict[str, Mod] = {
    "causal": causal,
    "window": torchs.and_masks(causal, lambda b, h, q, kv: q - kv <= 7),
    "dilated window": lambda b, h, q, kv: ((q - kv).abs() <= 12) & ((q - kv) % 3 == 0),
    "prefix": torchs.or_masks(causal, lambda b, h, q, kv: kv < 9),
    "documents": _documents,
    "packed documents": lambda b, h, q, kv: (kv >= STARTS[DOCUMENT[q]]) & (q >= kv),
    "shared prompts": _shared,
    "global tokens": lambda b, h, q, kv: ((q - kv).abs() <= 3) | GLOBAL[q] | GLOBAL[kv],
    "neighbours": _both(lambda t: (t // 7, t % 7), 2, 7),
    "tiled neighbours": _both(_tiled, 2, 8),
    "Morton neighbours": _both(_morton, 2, 8),
    "sliding tiles": _sliding_tiles,
    "block diffusion": _diffusion,
    "images": _in_image,
    "tree": lambda b, h, q, kv: (kv < 8) | ((kv >= 8) & ANCESTOR[q, (kv - 8).clamp(min=0, max=36)]),
    "draft blocks": lambda b, h, q, kv: (kv < 8) | ((q // 6 == (kv - 8) // 6) & ((kv - 8) % 6 <= q % 6)),
    "spatial heads": lambda b, h, q, kv: (q < 5) | (kv < 5) | (torch.abs(q - kv) < 8),
    "temporal heads": lambda b, h, q, kv: (q < 5) | (kv < 5) | (torch.abs((q - 5) % 7 - (kv - 5) % 7) < 2),
    "groups of tokens": _batched(10, causal),
    "padding": lambda b, h, q, kv: PADDING[b, kv] | (kv == 0),
    "heads": lambda b, h, q, kv: torch.where(h % 2 == 0, q >= kv, (q - kv).abs() < 5),
}
DISTANCES = torch.randint(0, 7, (2, ROWS, KEYS), generator=_generator, dtype=torch.int32)


def _buckets(score: Any, h: Any, q: Any, kv: Any, table: torch.Tensor) -> Any:
    """Add a bias by the distance's bucket, whose width grows as in T5."""
    far = (q - kv).abs()
    wide = 8 + (torch.log(far.clamp(min=1).float() / 8) / math.log(16) * 8).int()
    return score + table[h, torch.where(far < 8, far, wide.clamp(max=15))]


# Score functions, made of the captured tensors that TENSORS has.
MODS: dict[str, Callable[..., Mod]] = {
    "identity": lambda: lambda s, b, h, q, kv: s,
    "ALiBi": lambda: lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "soft cap": lambda: lambda s, b, h, q, kv: 2.0 * torch.tanh(s / 2.0),
    "causal": lambda: lambda s, b, h, q, kv: torch.where(q >= kv, s, float("-inf")),
    "square": lambda: lambda s, b, h, q, kv: s * s,
    "waves": lambda: lambda s, b, h, q, kv: torch.sin(torch.cos(s)) + torch.tan(b),
    "gelu": lambda: lambda s, b, h, q, kv: torch.log(torch.nn.functional.gelu(s) + 1.0),
    "no score": lambda: lambda s, b, h, q, kv: (q - kv).float() / 8,
    "stopped": lambda: lambda s, b, h, q, kv: s.detach() * s,
    "constants": lambda: lambda s, b, h, q, kv: s * torch.sqrt(torch.tensor(2.0)) + torch.tensor(0.1).half().float(),
    "heads": lambda c: lambda s, b, h, q, kv: s * c[h],
    "bias": lambda c: lambda s, b, h, q, kv: s + c[b, h, q, kv],
    "relative": lambda c: lambda s, b, h, q, kv: s + c[h, q - kv + KEYS - 1],
    "buckets": lambda c: lambda s, b, h, q, kv: _buckets(s, h, q, kv, c),
    "graph": lambda c: lambda s, b, h, q, kv: s + c[h, DISTANCES[b, q, kv]],
    "two tables": lambda c, d: lambda s, b, h, q, kv: s * torch.sigmoid(c[h]) + d[q] * c[h] - d[kv],
}
TENSORS: dict[str, list[tuple[int, ...]]] = {
    "heads": [(HEADS,)], "bias": [(2, HEADS, ROWS, KEYS)], "relative": [(HEADS, ROWS + KEYS)], "buckets": [(HEADS, 16)],
    "graph": [(HEADS, 7)], "two tables": [(HEADS,), (KEYS,)],
}  # fmt: skip


def captured(name: str) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in TENSORS.get(name, [])]


class Expression:
    """A random score function as Python source, and the tensors that it reads.

    Comparisons are of whole numbers alone: in float64 a comparison of scores can turn out otherwise."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.sizes = {"b": 2, "h": HEADS, "q": ROWS, "kv": KEYS}
        self.tensors: Tensors = []
        self.axes: list[tuple[str, ...]] = []
        self.kinds: list[str] = []
        left = 6  # axes: a call's tensors have 8
        for kind in self.draw.sample(["float", "float", "int", "bool"], self.draw.randint(1, 4)):
            axes = tuple(self.draw.choice(list(self.sizes)) for _ in range(self.draw.randint(1, 3)))[:left]
            left -= len(axes)
            if not axes:
                break
            shape = [self.sizes[axis] for axis in axes]
            made = torch.randn(shape, generator=generator)
            made = {"float": made, "int": (made * 9).int(), "bool": made > 0}[kind]
            self.tensors.append(made)
            self.axes.append(axes)
            self.kinds.append(kind)
        self.source = f"s + 2 * torch.tanh({self.number(4)}) * {self.number(2)}"

    def filled(self, depth: int, *patterns: str) -> str:
        """Return a pattern, in which a letter in braces stands for an expression: i of integers, t of truths, x of
        numbers, u of numbers up to 1, p of positive numbers, d for a divisor."""
        kinds: dict[str, Callable[[], str]] = {
            "i": lambda: self.whole(depth - 1), "t": lambda: self.truth(depth - 1), "x": lambda: self.number(depth - 1),
            "u": lambda: f"torch.tanh({self.number(depth - 1)})", "p": lambda: f"({self.number(depth - 1)}) ** 2 + 0.5",
            "d": lambda: str(self.draw.choice([-7, -2, 2, 3, 8])),
        }  # fmt: skip
        parts = self.draw.choice(patterns).replace("}", "{").split("{")
        return "".join(kinds[part]() if place % 2 else part for place, part in enumerate(parts))

    def load(self, kind: str, depth: int, otherwise: str) -> str:
        places = [place for place, own in enumerate(self.kinds) if own == kind]
        if not places:
            return otherwise
        place, at = self.draw.choice(places), []
        for axis in self.axes[place]:
            size = self.sizes[axis]
            wide = self.filled(depth, f"({{i}}) % {size}", f"({{i}}).clamp(-{size}, {size - 1})") if depth > 0 else axis
            at.append(self.draw.choice([axis, axis, wide]))
        # torch's gradient of a tensor that is indexed axis by axis fails.
        chained = kind != "float" and self.draw.random() < 0.5
        return f"c[{place}]" + ("".join(f"[{each}]" for each in at) if chained else f"[{', '.join(at)}]")

    def whole(self, depth: int) -> str:
        """Return an expression of integers."""
        one = self.draw.choice(["b", "h", "q", "kv"])
        if depth <= 0:
            return one
        return self.filled(
            depth, one, f"{one} * {self.draw.randint(-3, 5)}", "({i} + {i})", "({i} - {i})", "({i} // {d})",
            "({i} % {d})", "abs({i})", "torch.minimum({i}, {i})", "torch.where({t}, {i}, {i})", "({i} & 7)",
            "({i} | 3)", "({i} ^ {i})", "(-({i}))", "torch.div({i}, {d}, rounding_mode='trunc')",
            self.load("int", depth - 1, one),
        )  # fmt: skip

    def truth(self, depth: int) -> str:
        compared = f"({self.whole(depth)} {self.draw.choice(['<', '<=', '==', '!=', '>', '>='])} {self.whole(0)})"
        loaded = self.load("bool", depth - 1, compared)
        if depth <= 0:
            return self.draw.choice([compared, compared, loaded])
        return self.filled(
            depth, compared, loaded, "({t} & {t})", "({t} | {t})", "(~{t})", "torch.logical_xor({t}, {t})"
        )

    def number(self, depth: int) -> str:
        """Return an expression of floating-point numbers."""
        loaded = self.load("float", depth, "s")
        if depth <= 0:
            return self.draw.choice(["s", f"{self.draw.uniform(-2, 2):.3f} * s", loaded, loaded])
        return self.filled(
            depth, loaded, "({x} + {x})", "({x} - {x})", "({u} * {x})", "({x} / ({p}))", "torch.exp({u})",
            "torch.exp2({u})", "torch.log({p})", "torch.log2({p})", "torch.sqrt({p})", "torch.sin({u})",
            "torch.cos({u})", "torch.sigmoid({x})", "torch.erf({u})", "abs({x})", "torch.where({t}, {x}, {x})",
            "torch.maximum({x}, {x})", "torch.minimum({x}, {x})", "({x}).clamp(-1.5, 1.5)", "({i}) / 16",
            "torch.nn.functional.silu({x})", "torch.rsqrt({p})", "(-({x}))", "torch.nn.functional.gelu({u})",
            "({u}) ** 3", "torch.lerp({u}, {x}, 0.25)", "torch.addcmul({u}, {u}, {x})", "({p}) ** -1.5",
            "torch.expm1({u})", "({x}).detach() * {u}",
        )  # fmt: skip

    def function(self, tensors: Sequence[torch.Tensor]) -> Mod:
        made: Mod = eval(f"lambda s, b, h, q, kv: {self.source}", {"torch": torch, "c": tensors})
        return made
