"""portattn as an attention backend of vLLM: `AttentionConfig(backend="PORTATTN")`, or `--attention-backend PORTATTN`.

vLLM loads `register` as a general plug-in (the entry point of portattn's distribution). It adds names and selects
nothing: PORTATTN, and PORTATTN_MLA for latent attention. What the backends cannot do they refuse when vLLM asks,
as it builds the model's layers.

backend.py   what the backend says of itself: dtypes, caches, features, the versions that it was tested with
metadata.py  what a batch looks like, built once a step
impl.py      a layer's forward
caches.py    numbers and scales inside vLLM's cache tensors, and how new tokens are written
mla.py       latent attention
"""

from __future__ import annotations

import logging
from importlib import import_module

NAME = "PORTATTN"
MLA_NAME = "PORTATTN_MLA"
_CLASSES = {
    NAME: "portattn.integrations.vllm.backend.PortattnBackend",
    MLA_NAME: "portattn.integrations.vllm.mla.PortattnMLABackend",
}

log = logging.getLogger(__name__)


def register() -> None:
    """Make the backends' names known to vLLM in this process. A second call changes nothing.

    vLLM calls it as a plug-in in each of its processes. Releases before `register_backend` took new names (0.30 and
    earlier were not tested) keep their backends, and a warning says so.

    Returns nothing.

    Raises ModuleNotFoundError where vLLM is not installed.
    """
    registry = import_module("vllm.v1.attention.backends.registry")
    names = registry.AttentionBackendEnum
    try:
        for name, path in _CLASSES.items():
            if name not in names.__members__:
                registry.register_backend(name, path)
    except (AttributeError, TypeError, ValueError) as error:
        log.warning("this vLLM takes no new attention backend, so %s is not there: %s", NAME, error)
