"""portattn as an attention backend of SGLang: `--attention-backend portattn` (docs/sglang.md).

The plug-in adds it to SGLang's registry of attention backends and to its command line's choices."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

from portattn.errors import ArgumentError

NAME = "portattn"
# Versions that tests/engines/sglang/ ran with: the first and the last of them.
OLDEST, NEWEST = "0.5.20", "0.5.23"


def activate() -> None:
    """Register the backend with SGLang; `create` refuses versions, since an error here would only be a log line."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(create)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def create(runner: Any) -> Any:
    """Return the AttentionBackend of one of SGLang's model runners, or raise for an unsupported version or feature."""
    version = metadata.version("sglang")
    if not _tested(version):
        raise ArgumentError(
            "portattn.integrations.sglang", "sglang's version", version, f"must be {OLDEST} to {NEWEST}"
        )
    from portattn.integrations.sglang.capabilities import check, compile_layers

    check(runner)
    from portattn.integrations.sglang.backend import LatentBackend, PagedBackend

    made = LatentBackend(runner) if runner.use_mla_backend else PagedBackend(runner)
    compile_layers(made, runner)
    return made


def _tested(version: str) -> bool:
    try:
        public = Version(version).public  # a build's own label ("+cu130") sorts behind its release, and is no other
    except InvalidVersion:
        return False
    return Version(OLDEST) <= Version(public) <= Version(NEWEST)
