"""portattn as a kernel of the Hugging Face Hub: flash_attn's functions, for transformers' attn_implementation.

Written into build/<variant>/ by scripts/hub_kernel.py of https://github.com/portattn/portattn. The library lies beside
this file, in library/, and is imported from there, under its own name: a process has one portattn.
"""

import importlib.util
import sys
from pathlib import Path

VERSION = "0"  # the library's, set when this file is written
NEEDED = ("filelock", "msgspec", "numpy", "packaging", "platformdirs")  # what the library imports beside torch


def _find() -> None:
    """Have the library beside this file found, here and by the processes that it starts. Raises ImportError."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        names = " ".join(missing)
        raise ImportError(f"the portattn kernel needs {', '.join(missing)}, not installed here: pip install {names}")
    loaded = sys.modules.get("portattn")
    if loaded is None:
        folder = str(Path(__file__).resolve().parent / "library")
        if folder not in sys.path:
            sys.path.insert(0, folder)
    elif loaded.__version__ != VERSION:
        raise ImportError(
            f"the portattn kernel holds portattn {VERSION}, and portattn {loaded.__version__} is imported already "
            f"({loaded.__file__}): a process has one. Write the kernel with that one (make hub), or load this first"
        )


_find()

from portattn.integrations.flash_attn.hub import (  # noqa: E402  # found by now
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
