"""The operations as torch operators, `torch.ops.portattn.attention` and so on: one graph node for each compiled,
exported, traced or transformed call. Plain eager calls launch kernels directly. portattn's hooks import this module
with torch, to load exported programs: it imports the table of operations alone, and the implementations later."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portattn.schema.ops import DIFFERENTIABLE, PUBLIC, ROWS, WRITERS, OpRow

NAMESPACE = "portattn"
# Types of an operator's arguments by the parameter's name. A size is symbolic where shapes are dynamic.
_TYPES = {
    "scale": "float?", "causal": "str", "window": "int[]?", "chunk": "int?", "softcap": "float?", "dropout_p": "float",
    "out_dtype": "ScalarType?",
    "return_lse": "bool", "layout": "str", "page_layout": "str", "num_splits": "int?", "magicpig": "int[]?",
    "max_seqlen_q": "SymInt?", "max_seqlen_k": "SymInt?", "backend": "str?", "validate": "bool?",
    "score_mod": "str?", "mask_mod": "str?", "rotary": "str", "block_size": "int[]?", "k": "SymInt", "sorted": "bool",
}  # fmt: skip
# Parameters that every call of an operation that has them gives.
_GIVEN = frozenset({
    "q", "q_nope", "q_rope", "k", "v", "k_cache", "v_cache", "k_pages", "v_pages", "kv_pages", "indices", "counts",
    "cu_seqlens_q", "cu_seqlens_k", "slot_mapping", "logits", "weights", "out", "block_indices",
})  # fmt: skip
# Of an operation over pages or latent rows, packed queries are an option.
_OPTIONAL = {"paged_attention": {"cu_seqlens_q"}, "mla_attention": {"cu_seqlens_q", "q_rope", "indices"}}
# Tensors that an operation which fills a cache may write to; others write `out`.
_WRITTEN = ("k_cache", "v_cache", "k_pages", "v_pages", "k_scale", "v_scale", "k_block_scale", "v_block_scale")
_NO_LIMIT = -1


def _causal(value: Any) -> Any:
    """Return the alignment, or "" for no mask, which no caller can give."""
    return value if isinstance(value, str) else "bottom_right" if value else ""


def _window(value: Any) -> Any:
    if value is None or not isinstance(value, (tuple, list)):
        return value
    return [_NO_LIMIT if side is None else side for side in value]


def _numbers(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else [value] if isinstance(value, int) else value


# Converters of an argument to the operator schema's form, and back.
_WRITE: dict[str, Callable[[Any], Any]] = {
    "causal": _causal,
    "window": _window,
    "magicpig": _numbers,
    "block_size": _numbers,
}
_READ: dict[str, Callable[[Any], Any]] = {
    "causal": lambda value: value or False,
    "window": lambda value: None if value is None else tuple(value),
    "magicpig": lambda value: None if value is None else tuple(value),
    "block_size": lambda value: None if value is None else tuple(value) if len(value) > 1 else value[0],
}


class OperatorSignature:
    __slots__ = ("gradients", "kept", "op", "read", "row", "shared", "tensors", "values", "write")

    def __init__(self, row: OpRow) -> None:
        self.op, self.row = row.name, row
        self.tensors = tuple(dict.fromkeys(row.parameters))  # names of tensor arguments, each parameter once
        # Of each tensor argument its place in a Request, and of each tensor of a Request the place of its argument.
        self.kept = tuple(row.parameters.index(parameter) for parameter in self.tensors)
        self.shared = tuple(self.tensors.index(parameter) for parameter in row.parameters)
        # Places of differentiable tensors, in the order of the backward operator's results.
        differentiable = {row.tensors.get(name) for name in DIFFERENTIABLE}
        self.gradients = tuple(place for place, name in enumerate(self.tensors) if name in differentiable)
        self.values = (*row.fixed, "backend", "validate", *row.lengths)  # names of all other arguments
        count = len(self.tensors)
        # (place, function) that converts an argument to the schema's form, and back to a Request's.
        self.write = tuple((count + i, _WRITE[name]) for i, name in enumerate(self.values) if name in _WRITE)
        self.read = tuple((count + i, _READ[name]) for i, name in enumerate(self.values) if name in _READ)

    @property
    def schema(self) -> str:
        optional = _OPTIONAL.get(self.op, set())
        tensors = [f"{self._tensor(n)}{'' if n in _GIVEN - optional else '?'} {n}" for n in self.tensors]
        return ", ".join([*tensors, *(f"{_TYPES[name]} {name}" for name in self.values)])

    @property
    def written(self) -> tuple[str, ...]:
        if self.row.allocates:
            return ("out",)
        return tuple(name for name in self.tensors if self.row.writes and name in _WRITTEN)

    def _tensor(self, name: str) -> str:
        """Return a tensor's type in the schema: a written tensor has an alias letter of its own."""
        if name not in self.written:
            return "Tensor"
        return f"Tensor({'abcdefgh'[self.written.index(name)]}!)"

    def split(self, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Split an operator's arguments into a Request's tensors, fixed values and sizes."""
        found = list(arguments)
        for place, read in self.read:
            found[place] = read(found[place])
        end = len(found) - len(self.row.lengths)
        tensors = tuple([found[place] for place in self.shared])
        return tensors, tuple(found[len(self.tensors) : end]), tuple(found[end:])

    def value(self, arguments: Sequence[Any], name: str) -> Any:
        return arguments[len(self.tensors) + self.values.index(name)]


# Operations with a result, and operations that fill a cache in place.
SIGNATURES = {op: OperatorSignature(ROWS[op]) for op in PUBLIC if op not in WRITERS}
WRITING = {op: OperatorSignature(ROWS[op]) for op in WRITERS}
# The place of `return_lse` among a Request's fixed values.
RETURNS_LSE = {op: ROWS[op].fixed.index("return_lse") for op in SIGNATURES}


def arguments_of(
    op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any],
    signatures: Mapping[str, OperatorSignature] = SIGNATURES,
) -> list[Any]:  # fmt: skip
    """Return an operator's arguments from a Request's parts. Traced by dynamo: plain Python alone."""
    signature = signatures[op]
    found = [tensors[place] for place in signature.kept]
    found += values
    found += lengths
    for place, write in signature.write:
        found[place] = write(found[place])
    return found


def define() -> None:
    """Register the operators, once a process: a second call changes nothing."""
    if hasattr(torch.ops.portattn, next(iter(SIGNATURES))):
        return
    for signature in SIGNATURES.values():
        _define(signature)
    for signature in WRITING.values():
        _define_writing(signature)


def _define(signature: OperatorSignature) -> None:
    op, schema = signature.op, signature.schema
    forward, backward = f"{NAMESPACE}::{op}", f"{NAMESPACE}::{op}_backward"
    tags = (torch.Tag.pt2_compliant_tag,)
    torch.library.define(forward, f"({schema}) -> (Tensor, Tensor)", tags=tags)
    # Kernels take the forward's results; other paths recompute them from the arguments.
    # Returns a gradient for each differentiable tensor; an unwanted one is a tensor without elements.
    returned = ", ".join(["Tensor"] * len(signature.gradients))
    torch.library.define(
        backward,
        f"(Tensor? grad_out, Tensor? grad_lse, Tensor? out, Tensor? lse, bool[] wanted, {schema}) -> ({returned})",
        tags=tags,
    )
    for name, what in ((forward, "forward"), (backward, "backward")):
        torch.library.impl(name, "default", _later("torch_ops_impl", what, op))
        torch.library.register_fake(name, _later("torch_ops_impl", f"{what}_shapes", op))
        torch.library.register_vmap(name, _later("torch_ops_impl", f"{what}_vmapped", op))
        _library().impl(name.partition("::")[2], _later("torch_ops_impl", f"autograd_{what}", op), "Autograd")


def _define_writing(signature: OperatorSignature) -> None:
    """Register an operator that fills a cache: its schema names the written tensors; no result, no gradient."""
    op = signature.op
    name = f"{NAMESPACE}::{op}"
    torch.library.define(name, f"({signature.schema}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", _later("torch_ops_impl", "write", op, WRITING))
    torch.library.register_fake(name, _later("torch_ops_impl", "check_write", op, WRITING))
    _library().impl(op, _later("torch_ops_impl", "without_gradient", op, WRITING), "Autograd")


@functools.lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "IMPL")  # cached: its registrations end with it


def _later(
    module: str, what: str, op: str, signatures: Mapping[str, OperatorSignature] = SIGNATURES
) -> Callable[..., Any]:
    """Return a function of a module beside this one, imported at its first call."""

    found: Any = None
    signature = signatures[op]

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(f"portattn.api.{module}"), what)
        return found(signature, *arguments, **named)

    return call
