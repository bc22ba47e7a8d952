"""What both backends answer vLLM's questions with: what they cannot do is refused here, by name."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm
from packaging.version import InvalidVersion, Version
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from portattn.errors import ArgumentError
from portattn.integrations.vllm import caches
from portattn.planning.registry import parse_target
from portattn.planning.requested_backend import wrong_settings
from portattn.schema.problem_limits import MAX_HEAD_DIM, NV_BLOCK

# The first and the last release that tests/engines/vllm ran with; every patch release of them counts.
OLDEST, NEWEST = (0, 31), (0, 33)


def unsupported_version(version: str = vllm.__version__) -> str:
    """Why this vLLM is not one of those; empty where it is.

    >>> unsupported_version("0.33.0+cu130"), unsupported_version("0.34.0")  # doctest: +SKIP
    ('', 'vLLM 0.34.0 is not supported: portattn was tested with 0.31 to 0.33')
    """
    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        release = ()
    if OLDEST <= release <= NEWEST:
        return ""
    tested = " to ".join(".".join(map(str, one)) for one in (OLDEST, NEWEST))
    return f"vLLM {version} is not supported: portattn was tested with {tested}"


BLOCK = 16  # tokens: kernels read pages of any size, but none smaller was tried with vLLM


class Capabilities(AttentionBackend):
    """The answers. A backend names it before vLLM's own class of the kind, so that these come first."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % BLOCK == 0

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: vLLM asks it for adaptive verification, whose graphs hold requests of different numbers of rows."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether kernels run on the chip, by its file. Other vendors' numbers are no CUDA capabilities."""
        if capability is None or not current_platform.is_cuda():
            return True
        try:
            target = parse_target(f"cuda:sm_{capability.major}{capability.minor}")
        except ArgumentError:  # a chip that portattn has no file of
            return False
        return not target.arch.refused

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **more: Any
    ) -> str | None:
        """Why these do not go together; None where they do."""
        cache = kv_cache_dtype or "auto"
        if cache in ("float16", "bfloat16") and getattr(torch, cache) != dtype:
            return f"a {cache} cache needs queries of {cache}, and they are {dtype}"
        if cache not in caches.PLAIN and dtype == torch.float32:
            return f"a {cache} cache needs queries of float16 or bfloat16, and they are {dtype}"
        if cache in caches.TOKEN_SCALES and head_size % caches.SCALE_BYTES:
            return f"a {cache} cache needs a head size that is a multiple of {caches.SCALE_BYTES}, not {head_size}"
        if cache in caches.BLOCK_SCALES and head_size % NV_BLOCK:
            return f"a {cache} cache needs a head size that is a multiple of {NV_BLOCK}, not {head_size}"
        asked = caches.layout_asked_for()
        needed = caches.wrong_layout(cache, asked)
        if needed is not None:
            return f"a {cache} cache needs {needed}, not {asked}"
        return None

    @classmethod
    def validate_configuration(cls, *arguments: Any, **named: Any) -> list[str]:
        """vLLM's own list of reasons; before it, its version where that was not tested, and a wrong setting."""
        first = (unsupported_version(), wrong_settings("portattn.integrations.vllm"))
        return [*filter(None, first), *super().validate_configuration(*arguments, **named)]
