"""Two methods of transformers that stand in our way, wrapped while a name is registered.

A model asks at loading whether its attention implementation exists, not whether its layers ever call it. And continuous
batching takes transformers' own implementations by name. There is no way to say either but in these methods.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import continuous_batching

from portattn.integrations.transformers_mask import refuse

Method = Callable[..., Any]


# A layer of attention that is written here, rather than derived from one of transformers'.
_OWN_LAYER = re.compile(r"^class \w*(?:Attention|Attn)\w*\((?:\w+\.)*Module\):", re.MULTILINE)


def goes_through_interface(model: type[Any]) -> bool:
    """Whether the layers of a class of models call what AttentionInterface holds: its author says so, or the call is
    found in its source, where set_attn_implementation() looks for it. Models of models have no layers of their own,
    and each of their parts is asked."""
    if getattr(model, "_supports_attention_backend", False):
        return True
    if not model._can_set_attn_implementation():
        return False
    # transformers finds layers by one spelling alone, and takes everything else.
    source = inspect.getsource(sys.modules[model.__module__])
    return "ALL_ATTENTION_FUNCTIONS" in source or "AttentionInterface" in source or not _OWN_LAYER.search(source)


def refuse_others(model: type[Any], name: str) -> None:
    """Raise ArgumentError for a class of models whose layers would not call us: they compute attention themselves."""
    if goes_through_interface(model):
        return
    limit = (
        f"{model.__name__} computes attention itself: {model.__module__} does not call transformers' "
        "AttentionInterface. Use attn_implementation='eager' for it, be it a model or a part of one"
    )
    raise refuse("attn_implementation", name, limit)


def _checking(original: Method, names: Collection[str]) -> Method:
    @functools.wraps(original)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> Any:
        if requested_attention is not None and requested_attention in names:
            refuse_others(type(self), requested_attention)
        return original(self, requested_attention, *args, **kwargs)

    return get_correct_attn_implementation


def _admitting(original: Method, names: Collection[str]) -> Method:
    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        # Ours takes the cache as it is. The method would raise ValueError, or switch to FlashAttention.
        if model.config._attn_implementation in names:
            return None
        return original(self, model, *args, **kwargs)

    return switch_to_cb_friendly_attn


_WRAPPED: tuple[tuple[type[Any], str, Callable[[Method, Collection[str]], Method]], ...] = (
    (PreTrainedModel, "get_correct_attn_implementation", _checking),
    (continuous_batching.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _admitting),
)
_installed: list[tuple[type[Any], str, Method, Method]] = []  # class, name, theirs, ours


def install(names: Collection[str]) -> None:
    """Wrap the methods, if they are not. names: those that are registered, at any time."""
    if _installed:
        return
    for owner, name, wrap in _WRAPPED:
        theirs = owner.__dict__.get(name)
        if theirs is None:  # a version of transformers that does it otherwise
            continue
        ours = wrap(theirs, names)
        setattr(owner, name, ours)
        _installed.append((owner, name, theirs, ours))


def remove() -> None:
    """Put transformers' methods back. What somebody else has put there since stays, and goes on to ours."""
    for owner, name, theirs, ours in _installed:
        if owner.__dict__.get(name) is ours:
            setattr(owner, name, theirs)
    _installed.clear()
