"""Features of a call: one loop checks their tensors for every operation. `build` makes the checked Call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from portattn.errors import ArgumentError
from portattn.kernels import score_program
from portattn.schema.call import Call
from portattn.schema.ops import BACKWARD, CAPTURED, FEATURES, ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import MAX_TREE, UNLIMITED, chunk_or_none
from portattn.schema.symbolic_int import is_size
from portattn.schema.tensors import INT32_MAX, TRITON_DTYPE
from portattn.validate import score_options
from portattn.validate.checks import (
    DTYPES,
    as_tensor,
    check_causal,
    check_done,
    check_flag,
    check_number,
    check_place,
    check_scale,
    check_seed,
    check_share,
    check_splits,
    in_line,
    is_array,
    is_large,
    reachable,
    rows_aligned,
    wants_gradients,
    words_aligned,
)
from portattn.validate.quantized import BLOCKS


def ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)


def as_window(text: str, op: str, rows: Any, keys: Any, whole: bool) -> tuple[str, tuple[int, int]] | None:
    """Return the values of causal and window that mask as a mask function does; None if no values do.

    The call has neither option. A function numbers queries from their sequence's first, over caches as their own keys:
    like causal="top_left" and "bottom_right". A window that is not causal is bottom-right.

    Args:
        text: the function's program
        rows, keys: sizes of dense tensors; an unknown torch.SymInt is not compared
        whole: no sequence of dense tensors has a length of its own, and results may depend on sizes
    """
    found = score_options.as_window(text)
    if found is None or found == (UNLIMITED, UNLIMITED):
        return found and ("none", found)
    cached = op not in BACKWARD
    aligned = whole and (cached or (is_size(rows) and is_size(keys) and rows == keys))
    if found[1] == 0:
        return "bottom_right" if cached or aligned else "top_left", found
    return ("none", found) if aligned else None  # so under invariant=True: dense rows have no such window


FLOAT32_TINY = torch.finfo(torch.float32).tiny  # scores are divided by the cap
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGERS_OF = "tuple(int(x) for x in window)"  # also of a float tensor's, and of pairs of tensors
_BIAS = "bias.float(), if it is added to the scores; mask=bias.bool(), where not 0 = attend"
_MASK = "bias=, if it is added to the scores; mask.bool(), if it holds 1 and 0"
_AXES = {"b": "batch", "h": "heads_q", "k": "seq_k"}  # of tensors that are checked by their shape
# Hints about a tensor of another dtype.
_HINTS: Mapping[str, Mapping[torch.dtype, str]] = {
    "bias": {torch.bool: "mask=, where True = attend"} | dict.fromkeys(INTEGERS, _BIAS),
    "mask": dict.fromkeys(FLOATS, _MASK) | dict.fromkeys(INTEGERS, "mask.bool(), where not 0 = attend"),
}
# Values with which an argument asks for nothing; None for all others. None itself is no value of these.
_DEFAULTS: Mapping[str, Any] = {"causal": False, "dropout_p": 0.0, "return_lse": False}
# Visited in every call: they decide something without being given, or belong to another argument.
_ALWAYS = frozenset({"scale", "window", "block_size"})


@dataclass(frozen=True, slots=True)
class Scores:
    """The shape of the scores that features are checked against."""

    batch: int
    heads: int
    rows: int
    keys: int
    reach: int = 0  # more than any distance between a query and a key
    packed: bool = False  # packed queries: (rows, keys) has no place for each score
    total: int = 0  # rows of packed queries
    whole: bool = False  # no sequence of dense tensors has a length of its own, and not invariant
    invariant: bool = False  # sizes must not decide the options, which decide a row's bits

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.rows, self.keys


class Features:
    """Checks of a call's arguments: a method each, or `_feature`. An argument that asks for nothing is not visited.

    Args:
        asked: the arguments by name; TypeError for one that the operation does not have.
        width: of the heads, for the default scale width**-0.5; None if the call must name a scale.
    """

    def __init__(
        self, op: str, device: torch.device, dtype: torch.dtype, asked: Mapping[str, Any], width: int | None = None
    ) -> None:
        row = ROWS[op]
        for name in asked:
            if name not in row.numbers and name not in row.scored:
                raise TypeError(f"{op} has no argument {name!r}")
        self.op, self.device, self.dtype, self.asked, self.width = op, device, dtype, asked, width
        self.problem: dict[str, Any] = {}
        self.call: dict[str, Any] = {}
        self.floating: list[torch.Tensor] = []  # may require gradients
        self.copied = False  # whether a tensor is a copy of the caller's

    def check_numbers(self) -> None:
        """Check the arguments that need no sizes."""
        self._check(ROWS[self.op].numbers, None)

    def check_scored(self, scores: Scores) -> None:
        """Check the features of these scores, after `check_numbers`."""
        self._check(ROWS[self.op].scored, scores)

    def _check(self, names: Sequence[str], scores: Scores | None) -> None:
        for name in names:
            default = _DEFAULTS.get(name)
            value = self.asked.get(name, default)
            if name in _ALWAYS or type(value) is not type(default) or value != default:
                check = getattr(self, name, None)
                check(value, scores) if check else self._feature(name, value, cast("Scores", scores))

    def causal(self, causal: Any, scores: None) -> None:
        self.problem["causal"] = check_causal(self.op, causal)

    def scale(self, scale: Any, scores: None) -> None:
        self.factor = check_scale(self.op, self.width**-0.5 if scale is None and self.width is not None else scale)

    def dropout_p(self, dropout_p: Any, scores: None) -> None:
        share = check_share(self.op, dropout_p)
        self.problem["dropout"], self.call["dropout_p"] = share > 0.0, share

    def dropout_seed(self, seed: Any, scores: None) -> None:
        check_seed(self.op, seed, self.device)
        if self.problem.get("dropout"):
            self.call["dropout_seed"] = seed

    def return_lse(self, return_lse: Any, scores: None) -> None:
        check_flag(self.op, "return_lse", return_lse)
        self.problem["return_lse"] = return_lse

    def num_splits(self, num_splits: Any, scores: None) -> None:
        self.problem["num_splits"] = check_splits(self.op, num_splits)

    def window(self, window: Any, scores: Scores) -> None:
        """Normalize window and causal mask: a side that hides nothing is unlimited, and a right side of 0 is causal."""
        causal, reach = self.problem.get("causal", "none"), scores.reach
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
        """Set the chunk, 0 if it hides nothing. Called after `window`, which decides the causal mask."""
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            limit = "must be an integer ≥ 1, the keys of a chunk, or None for no chunks"
            raise ArgumentError(self.op, "chunk", chunk, limit)
        sizes = (None, None) if scores.invariant else (scores.rows, scores.keys)
        self.problem["chunk"] = chunk_or_none(chunk, self.problem["causal"], *sizes)

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
        value = check_number(self.op, "softcap", softcap)
        if value < FLOAT32_TINY and value != 0.0:
            limit = f"must be at least {FLOAT32_TINY:.4g}, float32's smallest normal number, or None or 0 for none"
            raise ArgumentError(self.op, "softcap", softcap, limit)
        self.problem["softcap"], self.call["softcap"] = value > 0.0, value

    def _feature(self, name: str, tensor: Any, scores: Scores) -> None:
        """Check and add a feature's tensor. A tensor of each score broadcasts; others may lack the batch axis alone."""
        axes, dtype = FEATURES[name].axes, FEATURES[name].dtype
        if scores.packed and "k" in axes:
            given = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ArgumentError(self.op, name, given, "packed queries take none: pad them")
        own = getattr(torch, dtype) if dtype else self.dtype
        self._tensor(name, tensor, (torch.float32, self.dtype) if FEATURES[name].narrow else (own,))
        if axes == "bhqk":
            tensor = self._broadcast(name, tensor, scores.shape)
            by_key = f"{name}_by_key"
            if by_key in Problem.__struct_fields__:
                self.problem[by_key] = all(tensor.stride(axis) == 0 or tensor.shape[axis] == 1 for axis in (1, 2))
        else:
            forms = dict.fromkeys((axes.removeprefix("b"), axes))
            sizes = {"b": scores.batch, "h": scores.heads, "k": scores.keys}
            shapes = [tuple(sizes[axis] for axis in form) for form in forms]
            if tuple(tensor.shape) not in shapes:
                words = (", ".join(_AXES[axis] for axis in form) + "," * (len(form) == 1) for form in forms)
                limit = f"must be {' or '.join(f'({word})' for word in words)}, {' or '.join(map(str, shapes))}"
                raise ArgumentError(self.op, f"{name}.shape", tuple(tensor.shape), limit)
            check_place(self.op, name, tensor, self.device, contiguous="b" not in axes)
            tensor = tensor.expand(shapes[-1])
        self._add(name, tensor)

    def tree_mask(self, mask: Any, scores: Scores) -> None:
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
        self._tensor("block_mask", blocks, (torch.int32,))  # api/masks.py has made it
        self._add("block_mask", blocks)  # `block_size` looks at its shape

    def block_size(self, size: Any, scores: Scores) -> None:
        blocks = self.call.get("block_mask")
        if blocks is None and size is None:
            return
        whole = isinstance(size, (tuple, list)) and len(size) == 2 and all(n > 0 for n in size)
        if blocks is None or not whole:
            raise ArgumentError(self.op, "block_size", size, "must be two integers above 0, and goes with block_mask")
        self.problem["block_q"], self.problem["block_k"] = size
        down, across = ceil_div(scores.rows, size[0]), ceil_div(scores.keys, size[1]) + 2
        given = tuple(blocks.shape)
        if len(given) != 4 or given[2:] != (down, across):
            limit = f"must be (B, Hq, {down}, {across}), lists of blocks of {tuple(size)} after two counts"
            raise ArgumentError(self.op, "block_mask.shape", given, limit)
        for axis, most in enumerate((scores.batch, scores.heads)):
            if given[axis] not in (1, most):
                whose = ("B", "Hq")[axis]
                raise ArgumentError(self.op, f"block_mask's {whose}", given[axis], f"must be 1 or {most}")
        if blocks.stride(3) != 1:  # as a compiler may have laid it out: kernels step by 1
            blocks = blocks.contiguous()
        self.call["block_mask"] = blocks.expand(scores.batch, scores.heads, down, across)

    def score_mod(self, text: Any, scores: Scores) -> None:
        self._program("score_mod", text, "f")
        cap = score_options.as_softcap(text)
        if cap is not None and not self.problem.get("softcap") and FLOAT32_TINY <= cap <= FLOAT32_MAX:
            self.softcap(cap, scores)
            self._replaced("score_mod", f"softcap={cap}")

    def mask_mod(self, text: Any, scores: Scores) -> None:
        self._program("mask_mod", text, "b")
        sides = self.problem["window_left"], self.problem["window_right"]
        # Such options have an alignment of their own, and whole blocks of lists no mask.
        given = any(self.problem.get(name) for name in ("chunk", "alibi_slopes", "block_mask"))
        given = given or self.problem["causal"] != "none" or sides != (UNLIMITED, UNLIMITED)
        given = given or (scores.invariant and not {None, UNLIMITED}.issuperset(self.asked.get("window") or ()))
        found = None if given else as_window(text, self.op, scores.rows, scores.keys, scores.whole)
        if found is None:
            return
        causal, (left, right) = found
        self.problem["causal"] = causal
        self.window((left, right), scores)
        words = [f"causal={causal!r}"] if causal != "none" else []
        words += [f"window=({left}, {right})"] if left != UNLIMITED or right > 0 else []
        self._replaced("mask_mod", " and ".join(words) or "no mask")

    def _replaced(self, name: str, options: str) -> None:
        """Take a function out of the Problem, for which built-in options stand now."""
        del self.problem[name]
        before = self.problem.get("function_note", "")
        self.problem["function_note"] = f"{before}; {name} is {options}".removeprefix("; ")

    def _program(self, name: str, text: Any, kind: str) -> None:
        """Check a program and the tensors that it reads, of api/score_functions.py or of an exported graph."""
        try:
            program = score_program.parse(text)
        except (ValueError, TypeError) as error:
            limit = f"must be a function, or a program of one: {error}"
            raise ArgumentError(self.op, name, type(text).__name__, limit) from error
        if program.kind != kind:
            limit = "must return a floating-point score" if kind == "f" else "must return a bool"
            raise ArgumentError(self.op, name, program.kind, limit)
        missing = "grad" if kind == "f" else "score"
        if any({"grad", missing} & {*node.operands} for node in program.nodes) or program.result in ("grad", missing):
            raise ArgumentError(self.op, name, "a program", f"must not read {missing}")
        place = 0
        for number, tensor in enumerate(self.asked.get(given) for given in CAPTURED):
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise ArgumentError(self.op, CAPTURED[number], type(tensor).__name__, "must be a torch.Tensor")
            own = program.captures.get(number)
            if own is not None and (tensor is None or (tensor.ndim, place) != own[1:]):
                shape = None if tensor is None else tuple(tensor.shape)
                limit = f"must have the {own[1]} axes that {name}'s program reads"
                raise ArgumentError(self.op, CAPTURED[number], shape, limit)
            place += 0 if tensor is None else tensor.ndim
        self.problem[name] = text

    def _captured(self, name: str, tensor: Any, scores: Scores) -> None:
        self._tensor(name, tensor, (*TRITON_DTYPE, torch.float64))
        if not tensor.numel():
            raise ArgumentError(self.op, f"{name}.shape", tuple(tensor.shape), "must have elements")
        self.call[name] = tensor.contiguous()
        if tensor.is_floating_point():
            self.floating.append(tensor)
            if wants_gradients(tensor):
                self.problem["grad_captured"] = self.problem.get("grad_captured", 0) | 1 << CAPTURED.index(name)

    captured_0 = functools.partialmethod(_captured, "captured_0")
    captured_1 = functools.partialmethod(_captured, "captured_1")
    captured_2 = functools.partialmethod(_captured, "captured_2")
    captured_3 = functools.partialmethod(_captured, "captured_3")

    def _tensor(self, name: str, tensor: Any, dtypes: tuple[torch.dtype, ...]) -> None:
        if not isinstance(tensor, torch.Tensor):
            hint = as_tensor(name, tensor)
            if callable(tensor):
                hint = " (hint: block_mask=create_block_mask(...) takes a function)"
            raise ArgumentError(self.op, name, type(tensor).__name__, "must be a torch.Tensor" + hint)
        if tensor.dtype not in dtypes:
            limit = f"must be {' or '.join(str(dtype) for dtype in dict.fromkeys(dtypes))}"
            told = _HINTS.get(name, {}).get(tensor.dtype)
            hint = f" (hint: {told})" if told else ""
            raise ArgumentError(self.op, f"{name}.dtype", tensor.dtype, limit + hint)
        check_done(self.op, name, tensor)
        if tensor.device != self.device:
            raise ArgumentError(self.op, f"{name}.device", str(tensor.device), f"must be q's, {self.device}")

    def _broadcast(self, name: str, tensor: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
        """Return the tensor as a (B, Hq, Sq, Sk) view, with stride 0 on broadcast axes."""
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

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.problem[name], self.call[name] = True, tensor
        if tensor.dtype.is_floating_point:  # a tensor that is only a shape has a dtype too
            self.floating.append(tensor)


def build(
    op: str,
    tensors: Mapping[str, torch.Tensor],
    features: Features,
    *,
    problem: Mapping[str, Any],
    call: Mapping[str, Any],
    differentiable: tuple[torch.Tensor | None, ...],
    dtype: torch.dtype | None = None,
) -> Call:
    """Build the Call of checked arguments. Without v in `tensors`, v is k's first head_dim_v columns.

    Args:
        problem, call: the operation's own fields of either.
        differentiable: tensors, beside the features', that may require gradients.
        dtype: of the results; None for q's.
    """
    views: dict[str, Any] = {name: reachable(tensor.resolve_neg()) for name, tensor in tensors.items()}
    copied = features.copied or any(views[name] is not tensor for name, tensor in tensors.items())
    columns = [*views.values()]
    if "v" not in views:
        views["v"] = views["k"][..., : problem["head_dim_v"]]
    paged = bool(problem.get("page_size")) and op != "sparse_attention"  # whose tokens lie anywhere
    stored = problem.get("kv_format", "as_q") != "as_q"
    made = Problem(
        op=op,  # type: ignore[arg-type]
        dtype=DTYPES[dtype or views["q"].dtype],  # type: ignore[arg-type]
        pages_in_line=paged and in_line(views["k"]) and in_line(views["v"]),
        aligned=all(rows_aligned(tensor) for tensor in columns),
        word_aligned=not stored or words_aligned((views["k"], views["v"]), (call.get(name) for name in BLOCKS)),
        large=is_large(*columns),
        needs_grad=wants_gradients(*differentiable, *features.floating),
        negative_scale=features.factor < 0.0,
        **problem,
        **features.problem,
    )
    if made.needs_grad and made.kv_format != "as_q":
        whose = "a cache" if made.q_format == "as_q" else "queries and keys"
        limit = f"{op} has no gradient with {whose} of {made.kv_format}: call it under torch.no_grad()"
        raise ArgumentError(op, "requires_grad", True, limit)
    return Call(problem=made, scale=features.factor, copied=copied, **views, **call, **features.call)
