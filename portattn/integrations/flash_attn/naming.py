"""Errors of portattn's operations in the names of flash_attn: its function, and its arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from portattn.errors import ArgumentError
from portattn.validate.layouts import without_layout

Function = TypeVar("Function", bound=Callable[..., object])
_WORD = re.compile(r"[A-Za-z_]\w*")
# By operation's name -> flash_attn's. Functions that call an argument otherwise say so (`named`).
NAMES = {
    "scale": "softmax_scale", "window": "window_size", "num_splits": "num_splits", "seqlens_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad", "cos": "rotary_cos", "sin": "rotary_sin", "q_scale": "q_descale",
    "k_scale": "k_descale", "v_scale": "v_descale",
}  # fmt: skip


def named(**others: str) -> Callable[[Function], Function]:
    """A decorator: an ArgumentError of the function names it, and the argument as its caller knows it.

    others  the names of arguments in portattn -> in the function, beside NAMES
    """
    names = NAMES | others

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if torch.compiler.is_dynamo_compiling():  # errors come out of the compiler then, in its own words
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except ArgumentError as error:
                raise in_their_names(error, function.__name__, names) from None

        return cast("Function", call)

    return decorate


def in_their_names(error: ArgumentError, function: str, names: dict[str, str]) -> ArgumentError:
    """The same error, of a function of flash_attn's."""
    if error.op == function:
        return error
    limit = without_layout(error.limit, ("q", "k", "v"))
    if "kvpacked" in function:
        limit = limit.replace("k.transpose(1, 2), v.transpose(1, 2)", "kv.transpose(1, 3)")

    def other(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    return ArgumentError(function, _WORD.sub(other, error.argument), error.value, _WORD.sub(other, limit))
