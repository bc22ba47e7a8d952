"""Triton-ascend's front half: Triton → TTIR → linalg ("ttadapter"), which needs neither an NPU nor CANN.

Child process only, under a Python that has triton-ascend.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any


def lower(source: Any, target: Any, options: dict[str, Any], enter: Callable[[str], None]) -> dict[str, int | str]:
    """Lower to linalg; facts about the text. Raises RuntimeError with the adapter's own diagnostics when it refuses."""
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    metadata = {"hash": "0" * 64, "target": target, **parsed.__dict__}
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    enter("ttir")
    module = source.make_ir(parsed, backend.get_codegen_implementation(), backend.get_module_map(), context)
    module = compiler.make_ttir(module, metadata, parsed)
    enter("ttadapter")
    try:
        linalg = compiler.ttir_to_linalg(module, metadata, parsed, named_ops=True)
    except subprocess.CalledProcessError as error:
        log = (error.stderr or b"").decode(errors="replace")
        died = f"died of signal {-error.returncode}" if error.returncode < 0 else f"exit status {error.returncode}"
        raise RuntimeError(f"triton-adapter-opt {died}\n{log}") from error
    mode = re.search(r'mix_mode\s*=\s*"([^"]+)"', linalg)
    return {
        "linalg_lines": linalg.count("\n"),
        "matmul": len(re.findall(r"linalg\.(?:batch_)?matmul", linalg)),
        "leftover_tt": len(re.findall(r"(?:^|=)\s*\"?tt\.\w+", linalg, re.MULTILINE)),
        "mix_mode": mode.group(1) if mode else "",
    }
