"""Queries of this machine that several backends share: a device's properties, a version in a text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version


def torch_device_properties(runtime: Literal["cuda", "hip"], index: int | None) -> Any | None:
    """Return torch's properties of device `index` (None: the current one), or None; `torch.cuda` has both vendors."""
    import torch

    if getattr(torch.version, runtime, None) is None:
        return None
    try:
        # is_available() counts devices through the driver, and creates no context.
        if not torch.cuda.is_available():
            return None
        return torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    except (RuntimeError, AssertionError):
        # RuntimeError: the driver is too old, a device is in exclusive use, or the context cannot be made.
        # AssertionError: torch was built without the runtime, or there is no device of that number.
        return None


def version_in(text: str | None) -> str | None:
    """Return the PEP 440 version that `text` is or starts with, without a vendor's build id; None without one."""
    text = (text or "").strip()
    try:
        Version(text)
    except InvalidVersion:
        found = re.match(r"\d+(\.\d+)*(\.?RC\d+)?", text, re.IGNORECASE)
        return found.group() if found else None
    return text


def first_line_matching(path: Path, pattern: str) -> str | None:
    """Return group 1 of `pattern` in a file's first matching line; None without such a file or line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        # No such file is the normal case on a machine without that driver.
        return None
    return next((found.group(1) for line in lines if (found := re.search(pattern, line))), None)
