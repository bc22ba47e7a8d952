"""portattn as an attention backend of vLLM: `AttentionConfig(backend="PORTATTN")`, or `--attention-backend PORTATTN`.

vLLM loads `register` as a general plug-in (the entry point of portattn's distribution). It adds names and selects
nothing: PORTATTN, and PORTATTN_MLA for latent attention. What the backends cannot do they refuse when vLLM asks,
as it builds the model's layers.

capabilities.py  what both backends say of themselves: chips, sizes, the versions that they were tested with
backend.py       the backend of full heads: dtypes, caches, features
shards.py        keys that several ranks share (decode context parallelism)
caches.py        numbers and scales inside vLLM's cache tensors, and how new tokens are written
mla.py           latent attention
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

NAME = "PORTATTN"
MLA_NAME = "PORTATTN_MLA"
_CLASSES = {
    NAME: "portattn.integrations.vllm.backend.PortattnBackend",
    MLA_NAME: "portattn.integrations.vllm.mla.PortattnMLABackend",
}
_REGISTRY = "vllm.v1.attention.backends.registry"

log = logging.getLogger(__name__)


def register() -> None:
    """Make the backends' names known to vLLM in this process. A second call changes nothing.

    vLLM calls it as a plug-in in each of its processes. A release that takes no new names, or has no registry of
    backends, keeps those that it has, and a warning says so.

    Returns nothing.

    Raises ModuleNotFoundError where vLLM is not installed.
    """
    try:
        registry = import_module(_REGISTRY)
        names = registry.AttentionBackendEnum
        for name, path in _CLASSES.items():
            if name not in names.__members__:
                # 0.31 registers members alone, and has no way to add one; given a name it does nothing.
                new = name if hasattr(names, "register") else _member(names, name, path)
                registry.register_backend(new, path)
            # A member pickles as its value, which an enum without it does not know; and vLLM's engine process reads its
            # configuration before it loads plug-ins. So ours pickle as a call that adds them first.
            member: Any = names.__members__[name]
            member.__reduce_ex__ = lambda protocol, name=name: (_restored, (name,))
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            raise
        log.warning("this vLLM takes no new attention backend, so %s is not there: %s", NAME, error)


def _restored(name: str) -> Any:
    """A member by its name, in a process that may not have loaded plug-ins yet. Pickles hold calls of it.

    Raises KeyError where this vLLM takes no new names.
    """
    register()
    return import_module(_REGISTRY).AttentionBackendEnum[name]


def _member(names: Any, name: str, value: str) -> Any:
    """A member more of an enum that is closed, as later releases of vLLM add theirs."""
    member = object.__new__(names)
    member._name_, member._value_ = name, value
    type.__setattr__(names, name, member)
    names._member_map_[name] = names._value2member_map_[value] = member
    names._member_names_.append(name)
    return member
