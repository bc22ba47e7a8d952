"""Compile adapters: what compiles kernels for targets that Triton's own GPU back ends do not serve. Child only.

An adapter is a function of a module, or of a file, so that a package which is not installed in the child's Python can
bring one. It needs the standard library and its compiler alone (Python 3.9 or newer):

    compile_kernel(function, signature, target, enter, passes) -> (facts, texts)

    function   the kernel: a triton.jit function
    signature  plain data (portattn.launch.Signature): `types` and `constants` by argument, `divisible`, `small`,
               `options` of the launch, num_warps and num_stages among them, and enable_fp_fusion where the backend
               names that among its options
    target     (backend, arch, lanes of a warp), as the backend's triton_target gives it
    enter      called with the name of each stage before it begins, so that a crash has a stage
    passes     another list of passes, where a probe asks for one; else empty
    facts      name -> number or text. `scratchpad_bytes`, `registers` and `spills` are held to the chip's limits;
               `num_warps` is the launch's
    texts      stage -> what was made there

Whatever it raises is the compiler's failure.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

Adapter = Callable[..., "tuple[dict[str, Any], dict[str, str]]"]


def load(name: str) -> Adapter:
    """The adapter of `package.module:function` or `/path/FILE.py:function`. Raises what importing it raises."""
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        found: Adapter = pkgutil.resolve_name(name)
        return found
    # One module for a path: Triton caches functions by their modules.
    module_name = "portattn_adapter_" + hashlib.sha256(os.path.abspath(place).encode()).hexdigest()[:16]
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    found = getattr(module, function)
    return found
