"""Triton-ascend's front half: Triton → TTIR → linalg ("ttadapter"), without NPU or CANN. Child only."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

# Passes of triton-adapter-opt by name. `old` is the list of the releases with a backends/huawei layout, which the
# adapter still takes: the crashes that those releases had can be seen with it.
PASS_LISTS: dict[str, tuple[str, ...]] = {"old": ("--triton-to-linalg=global-kernel=false named-ops=True",)}


def compile_kernel(
    function: Any,
    signature: dict[str, Any],
    target: tuple[str, Any, int],
    enter: Callable[[str], None],
    passes: str = "",
) -> tuple[dict[str, int | str], dict[str, str]]:
    """The compile adapter of NPUs (worker/compilers.py): facts of a jit function lowered to linalg, and the linalg."""
    from triton.backends.compiler import GPUTarget

    from portattn.worker import compilers

    built = compilers.source(function, signature, target[0])
    facts = lower(built, GPUTarget(*target), signature["options"], enter, passes, text=True)
    return facts, {"linalg": str(facts.pop("linalg"))}


def lower(
    source: Any,
    target: Any,
    options: dict[str, Any],
    enter: Callable[[str], None],
    passes: str | Sequence[str] = "",
    text: bool = False,
) -> dict[str, int | str]:
    """Lower to linalg; return facts about the text, and with `text` the text itself under "linalg".

    Args:
        passes: replaces the adapter's own list of passes: a name of PASS_LISTS, or command line options

    Raises:
        RuntimeError: the adapter refuses or dies, with its diagnostics.
        ValueError: an unknown name.
    """
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler
    from triton.compiler.compiler import make_backend

    chosen = _pass_list(passes)
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
        if chosen:
            linalg = _adapt(str(module), chosen)
        else:
            linalg = compiler.ttir_to_linalg(module, metadata, parsed, named_ops=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(_diagnostics(error)) from error
    mode = re.search(r'mix_mode\s*=\s*"([^"]+)"', linalg)
    facts: dict[str, int | str] = {
        "linalg_lines": linalg.count("\n"),
        "matmul": len(re.findall(r"linalg\.(?:batch_)?matmul", linalg)),
        "leftover_tt": len(re.findall(r"(?:^|=)\s*\"?tt\.\w+", linalg, re.MULTILINE)),
        "mix_mode": mode.group(1) if mode else "",
    }
    return facts | ({"linalg": linalg} if text else {})


def _pass_list(passes: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(passes, str):
        return tuple(passes)
    if passes and passes not in PASS_LISTS:
        raise ValueError(f"passes is {passes!r}, but must be a list of options or one of {', '.join(PASS_LISTS)}")
    return PASS_LISTS.get(passes, ())


def _adapt(ttir: str, passes: tuple[str, ...]) -> str:
    from triton.backends.ascend.utils import _get_triton_adapter_opt_path

    with tempfile.TemporaryDirectory() as folder:
        before, after = os.path.join(folder, "kernel.ttir.mlir"), os.path.join(folder, "kernel.ttadapter.mlir")
        with open(before, "w") as file:
            file.write(ttir)
        subprocess.run([_get_triton_adapter_opt_path(), before, *passes, "-o", after], capture_output=True, check=True)
        with open(after) as file:
            return file.read()


def _diagnostics(error: subprocess.CalledProcessError) -> str:
    log = (error.stderr or b"").decode(errors="replace")
    died = f"died of signal {-error.returncode}" if error.returncode < 0 else f"exit status {error.returncode}"
    return f"triton-adapter-opt {died}\n{log}"
