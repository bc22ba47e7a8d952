"""Score and mask functions as torch operations: programs of kernels/score_program.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from portattn.kernels.score_program import literal, parse
from portattn.schema.call import Call
from portattn.schema.ops import CAPTURED

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "abs": torch.abs,
    "minimum": torch.minimum, "maximum": torch.maximum, "mod": torch.remainder, "float_mod": torch.remainder,
    "positive_mod": torch.remainder, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2,
    "sqrt": torch.sqrt, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil, "where": torch.where, "eq": torch.eq, "ne": torch.ne,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "not": torch.logical_not, "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift, "detach": torch.detach, "half": torch.Tensor.half,
    "bfloat16": torch.Tensor.bfloat16,
    **dict.fromkeys(
        ("floordiv", "positive_floordiv", "float_floordiv"), lambda a, b: torch.div(a, b, rounding_mode="floor")
    ),
}  # fmt: skip


def divide_to_zero(a: Any, b: Any) -> torch.Tensor:
    """Return a divided by b, rounded to 0."""
    whole = torch.div(abs(a), abs(b), rounding_mode="floor")
    return torch.where((a < 0) != (b < 0), -whole, whole)


def power(base: Any, exponent: Any) -> torch.Tensor | None:
    """Return a power of a tensor and a number; None of two tensors, or of a base that is not above 0."""
    number = None if isinstance(exponent, torch.Tensor) else exponent
    if number == 0:
        return torch.ones_like(base)
    if number is not None and 2 * number == int(2 * number) and abs(number) <= 8:
        factors = [base] * int(abs(number)) + [torch.sqrt(base)] * (number != int(number))
        made = functools.reduce(torch.mul, factors)
        return torch.reciprocal(made) if number < 0 else made * 1
    if number is not None and number == number // 1 and abs(number) <= 1024:  # by squares, of any sign
        square, made, left = base, None, int(abs(number))
        while left:
            if left & 1:
                made = square if made is None else made * square
            left >>= 1
            square = square * square if left else square
        return torch.reciprocal(made) if number < 0 else made * 1
    if number is not None:
        return torch.exp2(torch.log2(base) * number)
    if isinstance(base, torch.Tensor) or base <= 0:
        return None
    shares = exponent * math.log2(base)  # aˣ = 2^(x·log₂ a)
    if type(base) is not int or exponent.is_floating_point() or exponent.dtype is torch.bool:
        return torch.exp2(shares)
    whole = torch.floor(torch.exp2(shares) + 0.5).to(exponent.dtype)
    return torch.where(exponent < 0, int(base == 1), whole)


def _clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    """Return x within limits, numbers or tensors; the names are aten's."""
    for limit, nearest in ((min, torch.maximum), (max, torch.minimum)):
        if limit is not None:
            if not isinstance(limit, torch.Tensor):
                limit = torch.full_like(x, limit, dtype=x.dtype if isinstance(limit, int) else torch.float32)
            x = nearest(x, limit)
    return x


# Operations that are made of others, by their names in aten.
MADE_OF: dict[str, Callable[..., torch.Tensor]] = {
    "tan": lambda x: torch.sin(x) / torch.cos(x), "sinh": lambda x: (torch.exp(x) - torch.exp(-x)) * 0.5,
    "cosh": lambda x: (torch.exp(x) + torch.exp(-x)) * 0.5, "log10": lambda x: torch.log2(x) * math.log10(2.0),
    "erfc": lambda x: 1.0 - torch.erf(x), "silu": lambda x: x * torch.sigmoid(x), "real": lambda x: x * 1,
    "rsqrt": lambda x: torch.reciprocal(torch.sqrt(x)), "log1p": lambda x: torch.log(x + 1.0),
    "expm1": lambda x: torch.exp(x) - 1.0,
    **dict.fromkeys(("sign", "sgn"), lambda x: (x > 0).to(x.dtype) - (x < 0).to(x.dtype)),
    "isneginf": lambda x: x == -math.inf, "isnan": lambda x: x != x, "isinf": lambda x: abs(x) == math.inf,
    "trunc": lambda x: torch.where(x < 0, torch.ceil(x), torch.floor(x)),
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": lambda x, high: _clamp(x, None, high),
    "square": lambda x: x * x, "relu": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "hardtanh": lambda x, low=-1.0, high=1.0: x.clamp(low, high),
    "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
    # Of a large x the exponential, which is not chosen, would be infinite, and its derivative NaN.
    "elu": lambda x, alpha=1.0, scale=1.0, inside=1.0: torch.where(
        x > 0, x * scale, torch.expm1(x.clamp(max=0.0) * inside) * (alpha * scale)
    ),
    "gelu": lambda x, approximate="none": 0.5 * x * (1.0 + (
        torch.erf(x * math.sqrt(0.5)) if approximate == "none"
        else torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))
    )),
    "fmod": lambda a, b: a - divide_to_zero(a, b) * b,
    "fmax": lambda a, b: torch.where(torch.isnan(a), b, torch.where(torch.isnan(b), a, torch.maximum(a, b))),
    "fmin": lambda a, b: torch.where(torch.isnan(a), b, torch.where(torch.isnan(b), a, torch.minimum(a, b))),
}  # fmt: skip


_REDUCED: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add, "mean": torch.add, "prod": torch.mul, "amax": torch.maximum, "max": torch.maximum,
    "amin": torch.minimum, "min": torch.minimum, "any": torch.logical_or, "all": torch.logical_and,
}  # fmt: skip


def on_rows(
    name: str, func: Any, args: Any, kwargs: Mapping[str, Any], rows: Mapping[int, list[torch.Tensor]]
) -> torch.Tensor | list[torch.Tensor] | None:
    """Return an operation's result on rows: a row's numbers, or the number that it reduces a row to; else None.

    Args:
        name, func: the operation, by its name in aten
        rows: the numbers of the arguments that are rows, of one length, by the argument's id."""
    own: list[torch.Tensor] = rows.get(id(args[0]), [])
    if torch.Tag.pointwise in func.tags or name == "_to_copy":
        count = min(map(len, rows.values()))
        return [func(*(rows[id(a)][i] if id(a) in rows else a for a in args), **kwargs) for i in range(count)]
    if name == "select" or name in ("clone", "alias", "detach"):
        return own[args[2]] if name == "select" else own
    if name == "dot":
        return (args[0] * args[1]).sum()
    if name == "linalg_vector_norm" and args[1:2] in ((), (2,)):
        return (args[0] * args[0]).sum(*args[2:]).sqrt()
    axes = [each for given in args[1:] for each in (given if isinstance(given, (list, tuple)) else [given])]
    if (
        name not in _REDUCED
        or len(func._schema.returns) > 1
        or kwargs
        or any(each not in (0, -1, None) for each in axes)
    ):
        return None
    whole = name in ("sum", "prod") and not own[0].is_floating_point()  # int64 in torch
    numbers = [each.long() for each in own] if whole else own
    found = functools.reduce(_REDUCED[name], numbers)
    return found / len(own) if name == "mean" else found


def evaluate(
    text: str, inputs: Mapping[str, torch.Tensor], captured: Mapping[str, torch.Tensor | None]
) -> torch.Tensor:
    """Return a program's result for inputs that broadcast with each other, in the dtype of the scores.

    Args:
        inputs: score, b, h, q_idx and kv_idx; without a score, of a mask function, floats are float32.
        captured: the call's tensors by name."""
    program = parse(text)
    some = inputs["q_idx"]
    floats = inputs["score"].dtype if "score" in inputs else torch.float32
    dtypes = {"f": floats, "i": torch.int32, "l": torch.int64, "b": torch.bool}
    values: dict[str, torch.Tensor] = dict(inputs)

    def value(word: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        number = literal(word)
        if number is None:
            return values[word]
        return torch.tensor(number, dtype=dtype if isinstance(number, float) else None, device=some.device)

    for node in program.nodes:
        if node.op == "load":
            tensor = captured[CAPTURED[int(node.operands[0][1:])]]
            assert tensor is not None
            at = [_inside(value(word), size) for word, size in zip(node.operands[1:], tensor.shape, strict=True)]
            values[node.name] = (tensor[tuple(at)] if at else tensor).to(dtypes[node.kind])
        elif node.op.startswith("to_"):
            values[node.name] = value(node.operands[0]).to(dtypes[node.kind])
        else:
            given = [value(word, floats) for word in node.operands]
            values[node.name] = _FUNCTIONS[node.op](*given).to(dtypes[node.kind])
    return value(program.result, floats)


def _inside(index: torch.Tensor, size: int) -> torch.Tensor:
    index = index.long()
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def call_mod(
    call: Call, text: str, position: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a call's score or mask function for a tile of scores (B, Hq, rows, keys).

    Args:
        position, keys: numbers of the queries (B or 1, rows) and of the keys (B or 1, keys) in their sequences."""
    p, device = call.problem, position.device
    inputs = {
        "b": torch.arange(p.batch, dtype=torch.int32, device=device)[:, None, None, None],
        "h": torch.arange(p.heads_q, dtype=torch.int32, device=device)[None, :, None, None],
        "q_idx": position.int()[:, None, :, None],
        "kv_idx": keys.int()[:, None, None, :],
    }
    if scores is not None:
        inputs["score"] = scores
    found = evaluate(text, inputs, {name: getattr(call, name) for name in CAPTURED})
    if scores is None or found.shape == scores.shape:
        return found
    return found.expand_as(scores).clone()  # of a function that reads no score; the caller writes to the result


# Marks of blocks: 0 hidden, 1 attended in part, as a mask function says, 2 attended whole, whatever it says.
PART, WHOLE = 1, 2
MARK_ELEMENTS = 2**24  # scores whose mask is computed at a time


def block_marks(
    text: str, captured: Mapping[str, torch.Tensor | None], sizes: tuple[int, int, int, int], block: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Return the marks of blocks of a mask function, int8 (B or 1, Hq or 1, blocks of queries, blocks of keys).

    Args:
        sizes: (B, Hq, Sq, Sk); block: queries and keys of a block."""
    program, (batch, heads, rows, keys) = parse(text), sizes
    batch, heads = batch if program.uses("b") else 1, heads if program.uses("h") else 1
    down, across = (-(-rows // block[0]), -(-keys // block[1]))
    marks = [torch.zeros(batch, heads, 0, across, dtype=torch.int8, device=device)]
    whole = across * block[1]
    step = max(MARK_ELEMENTS // max(batch * heads * whole, 1) // block[0], 1)

    def numbers(count: int, *shape: int, first: int = 0) -> torch.Tensor:
        return torch.arange(first, first + count, dtype=torch.int32, device=device).view(shape)

    kv_idx = numbers(whole, 1, 1, 1, -1)
    for start in range(0, down, step):
        count = min(step, down - start)
        q_idx = numbers(count * block[0], 1, 1, -1, 1, first=start * block[0])
        inputs = {
            "b": numbers(batch, -1, 1, 1, 1), "h": numbers(heads, 1, -1, 1, 1),
            "q_idx": q_idx.clamp(max=rows - 1), "kv_idx": kv_idx.clamp(max=keys - 1),
        }  # fmt: skip
        # A row or key behind the last is the last once more, which changes no mark.
        shown = evaluate(text, inputs, captured).expand(batch, heads, count * block[0], whole)
        shown = shown.unflatten(3, (across, block[1])).unflatten(2, (count, block[0]))
        any_shown, all_shown = (of(of(shown, 5), 3) for of in (torch.any, torch.all))
        marks.append(any_shown.to(torch.int8) + all_shown.to(torch.int8))
    return torch.cat(marks, dim=2)


def block_lists(
    marks: torch.Tensor, lengths: tuple[int, int] = (0, 0), block: tuple[int, int] = (1, 1)
) -> torch.Tensor:  # fmt: skip
    """Return a Call's block_mask of marks (B, H, R, C): int32 (B, H, R, C + 2).

    Kernels read whole blocks without masks, so a block that reaches behind the last query or key is marked as a part.

    Args:
        lengths, block: queries and keys, of the call and of a block; by default all blocks end inside."""
    for axis in (2, 3):
        if lengths[axis - 2] % block[axis - 2]:
            marks.narrow(axis, marks.shape[axis] - 1, 1).clamp_(max=PART)
    counts = [(marks == mark).sum(-1, keepdim=True) for mark in (WHOLE, PART)]
    return torch.cat([*counts, marks.argsort(dim=-1, descending=True, stable=True)], dim=-1).int()


def listed_marks(lists: torch.Tensor, across: int) -> torch.Tensor:
    """Return the marks of `across` blocks, int8 (B, H, R, across), of lists (B, H, R, places + 2).

    A number of no block marks none."""
    whole, others, ids = lists[..., :1], lists[..., 1:2], lists[..., 2:]
    place = torch.arange(ids.shape[-1], device=lists.device)
    counts = (place < whole + others) & (ids >= 0) & (ids < across)
    marks = torch.zeros(*lists.shape[:-1], across + 1, dtype=torch.int8, device=lists.device)
    found = torch.where(place < whole, WHOLE, PART).to(torch.int8)
    return marks.scatter(-1, torch.where(counts, ids, across).long(), found)[..., :across]


def lists_by_key(lists: torch.Tensor) -> torch.Tensor:
    """Return the lists of blocks of queries for each block of keys, (B, H, C, R + 2), of lists (B, H, R, C + 2)."""
    return block_lists(listed_marks(lists, lists.shape[-1] - 2).transpose(-1, -2).contiguous())
