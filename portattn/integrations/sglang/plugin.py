"""SGLang's plug-in: the name in its registry of attention backends and in its command line's choices."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

from portattn.errors import ArgumentError
from portattn.integrations.sglang.names import NAME, NEWEST, OLDEST, WHO


def activate() -> None:
    """Register the attention backend "portattn" with SGLang, and name it among the choices of its options.

    SGLang calls this by the entry point `sglang.srt.plugins`, in every process that it starts. Nothing of SGLang's
    attention layers is imported before a backend is made. Twice is once.

    Returns nothing.

    Raises ImportError where SGLang is not installed, or has no registry of attention backends where it is looked for.
    A version outside of OLDEST to NEWEST is registered too, and refused by name when a server asks for the backend: an
    error here would only be a line in its log.

    >>> from portattn.integrations.sglang import NAME
    >>> f"--attention-backend {NAME}"
    '--attention-backend portattn'
    """
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(create)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def create(runner: Any) -> Any:
    """Return the attention backend of one of SGLang's model runners, which asks for it by name.

    runner  sglang.srt.model_executor.model_runner.ModelRunner, its pools and its model made

    Returns an sglang AttentionBackend.

    Raises ArgumentError naming an unsupported version, chip, pool, setting or feature of a layer; SettingError for a
    wrong setting of portattn's own.
    """
    version = metadata.version("sglang")
    if not _tested(version):
        raise ArgumentError(WHO, "sglang's version", version, f"must be {OLDEST} to {NEWEST}")
    from portattn.integrations.sglang.capabilities import check

    check(runner)
    if runner.use_mla_backend:
        from portattn.integrations.sglang.mla import LatentBackend

        return LatentBackend(runner)
    from portattn.integrations.sglang.backend import PagedBackend

    return PagedBackend(runner)


def _tested(version: str) -> bool:
    """Whether it is within the tested range; a text that is no version is not."""
    try:
        public = Version(version).public  # a build's own label ("+cu130") sorts behind its release, and is no other
    except InvalidVersion:
        return False
    return Version(OLDEST) <= Version(public) <= Version(NEWEST)
