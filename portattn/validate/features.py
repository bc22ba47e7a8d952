"""The features that most ops take: windows, chunks, caps, slopes, sinks, biases and masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from portattn.errors import ArgumentError
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import MAX_TREE, UNLIMITED, chunk_or_none
from portattn.schema.tensors import INT32_MAX
from portattn.validate.checks import as_tensor, check_done, check_number, check_place, is_array


def ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)


FLOAT32_TINY = torch.finfo(torch.float32).tiny  # scores are divided by the cap
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGERS_OF = "tuple(int(x) for x in window)"  # also of a float tensor's, and of pairs of tensors
NO_HINTS: Mapping[torch.dtype, str] = {}


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores that features are checked against.

    causal  the alignment of the causal mask, or "none"
    reach   more than any distance between a query and a key
    packed  whether queries are packed, so that (rows, keys) has no place for a score of each
    total   rows of packed queries
    """

    batch: int
    heads: int
    rows: int
    keys: int
    causal: str = "none"
    reach: int = 0
    packed: bool = False
    total: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.rows, self.keys


class Features:
    """What a call asks for beyond its shapes, checked: a method for each argument, of its name.

    problem, call  what goes into either
    floating       tensors that gradients could be asked for
    copied         one of the tensors is a copy of the caller's
    """

    def __init__(self, op: str, device: torch.device, dtype: torch.dtype) -> None:
        self.op, self.device, self.dtype = op, device, dtype
        self.problem: dict[str, Any] = {}
        self.call: dict[str, Any] = {}
        self.floating: list[torch.Tensor] = []
        self.copied = False

    def check(self, given: Mapping[str, Any], scores: Scores) -> None:
        """Check each argument that is a feature. Raises TypeError for one that the operation has not."""
        row = ROWS[self.op]
        for name in given:
            if name not in _FEATURES or (name not in row.tensors and name not in row.values):
                raise TypeError(f"{self.op} has no argument {name!r}")
        if "window" in row.values:  # first: it decides the causal mask, which is a window too
            given = {"window": None, **given}
        for name, value in given.items():
            getattr(self, name)(value, scores)

    def window(self, window: Any, scores: Scores) -> None:
        """window (left, right) and the causal mask, in one form: what hides nothing is unlimited, and a right side of 0
        is causal."""
        causal, reach = scores.causal, scores.reach
        left = right = UNLIMITED
        if window is not None:
            # A list could not be part of the key by which a call is found again (portattn/launch/cache.py).
            if not isinstance(window, tuple) or len(window) != 2:
                limit = "must be a tuple (left, right), keys before and after the query's own"
                sequence = isinstance(window, (list, torch.Tensor)) or is_array(window)
                if sequence and getattr(window, "ndim", 1) == 1 and len(window) == 2:
                    plain = isinstance(window, list) and all(side is None or type(side) is int for side in window)
                    limit += f" (hint: {'tuple(window)' if plain else _INTEGERS_OF})"
                else:
                    limit += "; the last W keys, with the own one, are (W - 1, 0)"
                raise ArgumentError(self.op, "window", window, limit)
            left, right = (self._side(name, window, side) for name, side in zip(("left", "right"), window, strict=True))
        left, right = (UNLIMITED if side >= reach else side for side in (left, right))
        if causal == "none" and right == 0:
            causal = "bottom_right"
        if causal != "none":
            right = UNLIMITED
        self.problem |= {"causal": causal, "window_left": left, "window_right": right}

    def chunk(self, chunk: Any, scores: Scores) -> None:
        """Keys of a chunk, 0 where chunks hide nothing. Called after `window`, which decides the causal mask."""
        if chunk is None:
            return
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            limit = "must be an integer ≥ 1, the keys of a chunk, or None for no chunks"
            raise ArgumentError(self.op, "chunk", chunk, limit)
        self.problem["chunk"] = chunk_or_none(chunk, self.problem["causal"], scores.rows, scores.keys)

    def _side(self, name: str, window: tuple[Any, Any], side: Any) -> int:
        if side is None:
            return UNLIMITED
        if isinstance(side, bool) or not isinstance(side, int) or side < UNLIMITED:
            limit = "must be an integer ≥ 0, or None or -1 for no limit"
            if getattr(side, "ndim", None) == 0 and isinstance(side.item(), int):  # a tensor's or NumPy's integer
                limit += f" (hint: {f'int(window[{window.index(side)}])' if None in window else _INTEGERS_OF})"
            raise ArgumentError(self.op, f"window's {name}", side, limit)
        return side

    def softcap(self, softcap: Any, scores: Scores) -> None:
        if softcap is None:
            return
        value = check_number(self.op, "softcap", softcap)
        if value < FLOAT32_TINY and value != 0.0:
            limit = f"must be at least {FLOAT32_TINY:.4g}, float32's smallest normal number, or None or 0 for none"
            raise ArgumentError(self.op, "softcap", softcap, limit)
        self.problem["softcap"], self.call["softcap"] = value > 0.0, value

    def alibi_slopes(self, slopes: Any, scores: Scores) -> None:
        if slopes is None:
            return
        batch, heads_q = scores.batch, scores.heads
        self._tensor("alibi_slopes", slopes, (torch.float32,))
        if tuple(slopes.shape) not in ((heads_q,), (batch, heads_q)):
            limit = f"must be (heads_q,) or (batch, heads_q), ({heads_q},) or ({batch}, {heads_q})"
            raise ArgumentError(self.op, "alibi_slopes.shape", tuple(slopes.shape), limit)
        check_place(self.op, "alibi_slopes", slopes, self.device, contiguous=False)
        self._add("alibi_slopes", slopes.expand(batch, heads_q))

    def sinks(self, sinks: Any, scores: Scores) -> None:
        if sinks is None:
            return
        heads_q = scores.heads
        self._tensor("sinks", sinks, (torch.float32, self.dtype))
        if tuple(sinks.shape) != (heads_q,):
            raise ArgumentError(self.op, "sinks.shape", tuple(sinks.shape), f"must be (heads_q,), ({heads_q},)")
        check_place(self.op, "sinks", sinks, self.device, contiguous=True)
        self._add("sinks", sinks)

    def bias(self, bias: Any, scores: Scores) -> None:
        if bias is not None:
            added = "bias.float(), if it is added to the scores; mask=bias.bool(), where not 0 = attend"
            hint = {torch.bool: "mask=, where True = attend"} | dict.fromkeys(INTEGERS, added)
            self._by_score("bias", bias, (torch.float32, self.dtype), scores, hint)

    def mask(self, mask: Any, scores: Scores) -> None:
        if mask is not None:
            added = "bias=, if it is added to the scores; mask.bool(), if it holds 1 and 0"
            hint = dict.fromkeys(FLOATS, added) | dict.fromkeys(INTEGERS, "mask.bool(), where not 0 = attend")
            self._by_score("mask", mask, (torch.bool,), scores, hint)

    def tree_mask(self, mask: Any, scores: Scores) -> None:
        if mask is None:
            return
        batch, rows = scores.batch, scores.rows
        self._tensor("tree_mask", mask, (torch.int64,))
        shape = tuple(mask.shape)
        if scores.packed and shape != (scores.total,):
            limit = f"must be (rows of packed queries,), ({scores.total},)"
            raise ArgumentError(self.op, "tree_mask.shape", shape, limit)
        if not scores.packed and shape not in ((rows,), (batch, rows)):
            limit = f"must be (seq_q,) or (batch, seq_q), ({rows},) or ({batch}, {rows})"
            raise ArgumentError(self.op, "tree_mask.shape", shape, limit)
        if rows > MAX_TREE:
            of = "max_seqlen_q" if scores.packed else "seq_q"
            limit = f"must be at most {MAX_TREE} with a tree mask, which has a bit for each new token; mask takes more"
            if scores.packed:
                limit = f"must be given, and at most {MAX_TREE}, with a tree mask, which has a bit for each new token"
            raise ArgumentError(self.op, of, rows, limit)
        check_place(self.op, "tree_mask", mask, self.device, contiguous=False)
        self._add("tree_mask", mask.expand(1 if scores.packed else batch, shape[-1]))

    def block_mask(self, blocks: Any, scores: Scores) -> None:
        if blocks is not None:  # api/block_mask.py has made it; `block_size` looks at its shape
            self._tensor("block_mask", blocks, (torch.bool,))
            self._add("block_mask", blocks)

    def block_size(self, size: Any, scores: Scores) -> None:
        blocks = self.call.get("block_mask")
        if blocks is None and size is None:
            return
        whole = isinstance(size, (tuple, list)) and len(size) == 2 and all(n > 0 for n in size)
        if blocks is None or not whole:
            raise ArgumentError(self.op, "block_size", size, "must be two integers above 0, and goes with block_mask")
        self.problem["block_q"], self.problem["block_k"] = size
        down, across = ceil_div(scores.rows, size[0]), ceil_div(scores.keys, size[1])
        given = tuple(blocks.shape)
        if len(given) != 4 or given[2:] != (down, across):
            limit = f"must be (B, Hq, {down}, {across}), of blocks of {tuple(size)}"
            raise ArgumentError(self.op, "block_mask.shape", given, limit)
        for axis, most in enumerate((scores.batch, scores.heads)):
            if given[axis] not in (1, most):
                whose = ("B", "Hq")[axis]
                raise ArgumentError(self.op, f"block_mask's {whose}", given[axis], f"must be 1 or {most}")
        if across > 1 and blocks.stride(3) != 1:  # as a compiler may have laid it out: kernels step by 1
            blocks = blocks.contiguous()
        self.call["block_mask"] = blocks.expand(scores.batch, scores.heads, down, across)

    def _tensor(
        self, name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], hints: Mapping[torch.dtype, str] = NO_HINTS
    ) -> None:
        """Check dtype and device. hints: the cure to name beside each wrong dtype."""
        if not isinstance(tensor, torch.Tensor):
            hint = as_tensor(name, tensor)
            if callable(tensor):
                hint = " (hint: block_mask=create_block_mask(...) takes a function)"
            raise ArgumentError(self.op, name, type(tensor).__name__, "must be a torch.Tensor" + hint)
        if tensor.dtype not in dtypes:
            limit = f"must be {' or '.join(str(dtype) for dtype in dict.fromkeys(dtypes))}"
            hint = f" (hint: {hints[tensor.dtype]})" if tensor.dtype in hints else ""
            raise ArgumentError(self.op, f"{name}.dtype", tensor.dtype, limit + hint)
        check_done(self.op, name, tensor)
        if tensor.device != self.device:
            raise ArgumentError(self.op, f"{name}.device", str(tensor.device), f"must be q's, {self.device}")

    def _broadcast(self, name: str, tensor: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
        """The tensor as a (B, Hq, Sq, Sk) view, with strides of 0 where it is broadcast."""
        given = tuple(tensor.shape)
        fits = len(given) <= 4 and all(
            size in (1, limit) for size, limit in zip(reversed(given), reversed(shape), strict=False)
        )
        if not fits:
            limit = f"must broadcast to (batch, heads_q, seq_q, seq_k), {shape}"
            for inserted in ("[:, None, None]", "[:, None]"):  # a (batch, seq_k) or a (batch, seq_q, seq_k) one
                by_sequence = (shape[0], shape[3]) if len(given) == 2 else (shape[0], *shape[2:])
                if given == by_sequence and len(given) + inserted.count("None") == len(shape):
                    limit += f" (hint: {name}{inserted})"
            raise ArgumentError(self.op, f"{name}.shape", given, limit)
        view = tensor.expand(shape)
        if view.stride(3) * shape[3] > INT32_MAX:  # kernels reach keys by 32-bit multiples of their stride
            self.copied = True
            return tensor.contiguous().expand(shape)
        return view

    def _by_score(
        self,
        name: str,
        tensor: Any,
        dtypes: tuple[torch.dtype, ...],
        scores: Scores,
        hints: Mapping[torch.dtype, str],
    ) -> None:
        if scores.packed:
            given = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ArgumentError(self.op, name, given, "packed queries take none: pad them")
        self._tensor(name, tensor, dtypes, hints)
        view = self._broadcast(name, tensor, scores.shape)
        self._add(name, view)
        by_key = f"{name}_by_key"
        if by_key in Problem.__struct_fields__:
            self.problem[by_key] = all(view.stride(axis) == 0 or view.shape[axis] == 1 for axis in (1, 2))

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.problem[name], self.call[name] = True, tensor
        if tensor.dtype.is_floating_point:  # a tensor that is only a shape has a dtype too
            self.floating.append(tensor)


# Arguments that are features: the methods of Features, but for `check`.
_FEATURES = frozenset(name for name in vars(Features) if not name.startswith("_")) - {"check"}
