"""More arguments by position than an operation takes: how many it takes, their names, and which one was meant.

Python refuses them before a function runs, and names neither. So the operations take any number (`*excess`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from portattn.api.unknown_arguments import keywords_of, positional_of, unknown_argument

# Values that only these arguments have.
_WORDS = {"bhsd": "layout", "bshd": "layout", "phd": "page_layout", "hpd": "page_layout"}
_WORDS |= {"bottom_right": "causal", "top_left": "causal"}


def wrong_arguments(op: str, excess: Sequence[Any], unknown: Mapping[str, Any]) -> TypeError:
    """The error about arguments that an operation does not have: keywords, or values beyond those by position."""
    return unknown_argument(op, unknown) if unknown else _too_many(op, excess)


def _too_many(op: str, excess: Sequence[Any]) -> TypeError:
    names = positional_of(op)
    text = (
        f"{op}() takes {len(names)} arguments by position ({', '.join(names)}), "
        f"but {len(names) + len(excess)} were given"
    )
    keywords = keywords_of(op)
    if keywords:
        meant = next((f"{name}={_shown(value)}" for value in excess if (name := _meant(value, keywords))), "")
        text += "; all others are given by name" + (f": did you mean {meant}?" if meant else f", from {keywords[0]} on")
    return TypeError(text)


def _meant(value: Any, keywords: Sequence[str]) -> str:
    """The first argument by keyword that takes such a value. Empty where none does, and for None, False and 0.

    Those say nothing: in other libraries they stand where a mask or dropout is not wanted.
    """
    return next((name for name in _takers(value) if name in keywords), "")


def _takers(value: Any) -> tuple[str, ...]:
    if isinstance(value, torch.Tensor):
        if value.dtype is torch.bool:
            return ("mask",)
        if value.is_floating_point():
            return ("bias", "log_weights", "alibi_slopes") if value.ndim > 1 else ("alibi_slopes",)
        return ("page_table", "seqlens_k", "cu_seqlens_q") if value.ndim > 1 else ("seqlens_k", "cu_seqlens_q")
    if value is None or value is False or value == 0:
        return ()
    if isinstance(value, bool):
        return ("causal", "return_lse")
    if isinstance(value, (int, float)):
        return ("scale",)
    if isinstance(value, str):
        return (_WORDS.get(value, "backend"),)
    return ("window",) if isinstance(value, (tuple, list)) else ()


def _shown(value: Any) -> str:
    return "..." if isinstance(value, torch.Tensor) else repr(value)
