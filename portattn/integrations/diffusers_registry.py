"""A name more in diffusers' registry of attention backends, and out of it again.

The registry's keys are members of an enum, AttentionBackendName, which has no way to add one. A member is made here and
put where the enum looks members up by name, by value and as an attribute.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from diffusers.utils import constants

_DISPATCH = "diffusers.models.attention_dispatch"
# A name that the environment chooses is hidden from diffusers until it is registered: its beginning shows whose it is.
PREFIX = "portattn"


def load() -> ModuleType:
    """diffusers' module of attention backends, imported.

    As it is first imported it looks up what DIFFUSERS_ATTN_BACKEND names among its own backends. A name of portattn's
    is hidden for that moment; register() makes the backend of that name the active one.
    """
    chosen = constants.DIFFUSERS_ATTN_BACKEND
    if _DISPATCH in sys.modules or not chosen.startswith(PREFIX):
        return importlib.import_module(_DISPATCH)
    constants.DIFFUSERS_ATTN_BACKEND = "native"
    try:
        return importlib.import_module(_DISPATCH)
    finally:
        constants.DIFFUSERS_ATTN_BACKEND = chosen


def is_taken(dispatch: Any, name: str) -> bool:
    """Whether a backend has that value, or a member the name that it would get."""
    names = dispatch.AttentionBackendName
    return name in names._value2member_map_ or name.upper() in names._member_map_


def add(dispatch: Any, name: str, function: Callable[..., Any]) -> Any:
    """Register a function under a name that is not taken, context parallelism included. Returns the new member.

    Where the environment asks for that name it becomes the active backend.
    """
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    member._sort_order_ = len(names._member_names_)
    member.__objclass__ = names
    before = registry._active_backend
    try:
        names._member_map_[member._name_] = member
        names._value2member_map_[name] = member
        names._member_names_.append(member._name_)
        if hasattr(names, "_hashable_values_"):  # later Pythons ask this list whether a value is a member's
            names._hashable_values_.append(name)
        # Past the enum's own __setattr__, which forbids it.
        type.__setattr__(names, member._name_, member)
        registry.register(member, constraints=[], supports_context_parallel=True)(function)
        if name == constants.DIFFUSERS_ATTN_BACKEND:
            registry.set_active_backend(member)
    except BaseException:
        take_out(dispatch, member, before)
        raise
    return member


def take_out(dispatch: Any, member: Any, before: Any) -> None:
    """Undo `add`, also one that was interrupted. Where the member is the active backend, `before` becomes that; or
    diffusers' own default, if that is gone."""
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    for entries in (registry._backends, registry._constraints, registry._supported_arg_names):
        entries.pop(member, None)
    registry._supports_context_parallel.discard(member.value)
    if registry._active_backend is member:
        registry.set_active_backend(before if before in registry._backends else names.NATIVE)
    names._member_map_.pop(member.name, None)
    names._value2member_map_.pop(member.value, None)
    for entries, entry in (
        (names._member_names_, member.name),
        (getattr(names, "_hashable_values_", []), member.value),
    ):
        if entry in entries:
            entries.remove(entry)
    if member.name in vars(names):
        type.__delattr__(names, member.name)
