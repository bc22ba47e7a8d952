"""portattn as an attention backend of vLLM: `AttentionConfig(backend="PORTATTN")`, `--attention-backend PORTATTN`."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from portattn.integrations import VLLM, VLLM_SPARSE, check_release

NAME = "PORTATTN"
MLA_NAME = "PORTATTN_MLA"
SPARSE_NAME = "PORTATTN_MLA_SPARSE"
# Names in this module, under which vLLM asks for the classes: their modules import members of vLLM by name.
_CLASSES = {
    NAME: ("backend", "PortattnBackend"),
    MLA_NAME: ("mla", "PortattnMLABackend"),
    SPARSE_NAME: ("mla_sparse", "PortattnSparseMLABackend"),
}
# Names in this module of vLLM's own classes of models whose indexer is portattn's, for `model_class_overrides`.
_MODELS = {
    "DeepseekV32ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "GlmMoeDsaForCausalLM": ("deepseek_v2", "GlmMoeDsaForCausalLM"),
    "DeepseekV32MTP": ("deepseek_mtp", "DeepSeekMTP"),
}
_REGISTRY = "vllm.v1.attention.backends.registry"

log = logging.getLogger(__name__)


def register() -> None:
    """Register the backends' names with vLLM, as a plug-in in each of its processes; a second call changes nothing."""
    try:
        registry = import_module(_REGISTRY)
        names = registry.AttentionBackendEnum
        for name, path in ((name, f"{__name__}.{backend}") for name, (_, backend) in _CLASSES.items()):
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


def __getattr__(name: str) -> Any:
    """Return a backend's or model's class. Raises PortattnError for a release of vLLM that it cannot serve."""
    modules = {backend: module for module, backend in _CLASSES.values()} | dict.fromkeys(_MODELS, "mla_sparse")
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for interface in (VLLM, VLLM_SPARSE)[: 1 + (modules[name] == "mla_sparse")]:
        check_release(interface, import_module("vllm").__version__)
    made = import_module(f"{__name__}.{modules[name]}")
    if name not in _MODELS:
        return getattr(made, name)
    made.register_indexer()
    module, model = _MODELS[name]
    return getattr(import_module(f"vllm.model_executor.models.{module}"), model)


def _restored(name: str) -> Any:
    """Return a member by its name, also before plug-ins are loaded: pickles hold calls of it."""
    register()
    return import_module(_REGISTRY).AttentionBackendEnum[name]


def _member(names: Any, name: str, value: str) -> Any:
    member = object.__new__(names)
    member._name_, member._value_ = name, value
    type.__setattr__(names, name, member)
    names._member_map_[name] = names._value2member_map_[value] = member
    names._member_names_.append(name)
    return member
