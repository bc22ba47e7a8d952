"""portattn as an attention backend of SGLang: `--attention-backend portattn` (docs/sglang.md).

The plug-in adds it to SGLang's registry of attention backends and to its command line's choices."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from portattn.integrations import SGLANG, check_release

NAME = "portattn"


def activate() -> None:
    """Register the backend with SGLang; `create` refuses versions, since an error here would only be a log line."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(create)
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices([NAME])


def create(runner: Any) -> Any:
    """Return the AttentionBackend of one of SGLang's model runners, or raise for an unsupported version or feature."""
    check_release(SGLANG, metadata.version("sglang"))
    from portattn.integrations.sglang.capabilities import check, compile_layers

    check(runner)
    from portattn.integrations.sglang.backend import LatentBackend, PagedBackend

    made = LatentBackend(runner) if runner.use_mla_backend else PagedBackend(runner)
    compile_layers(made, runner)
    return made
