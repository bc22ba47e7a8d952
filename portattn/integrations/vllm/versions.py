"""The releases of vLLM that the adapter was tested with."""

from __future__ import annotations

import vllm
from packaging.version import InvalidVersion, Version

# The first and the last release that tests/engines/vllm ran with; every patch release of them counts.
OLDEST, NEWEST = (0, 31), (0, 33)


def untested(version: str = vllm.__version__) -> str:
    """Why this vLLM is not one of those; empty where it is.

    >>> untested("0.33.0+cu130"), untested("0.34.0")  # doctest: +SKIP
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
