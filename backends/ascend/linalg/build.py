"""From a lowered kernel's text to a shared library of this machine's code."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from portattn.backends.ascend.linalg import text as texts
from portattn.backends.ascend.linalg.tools import LinalgError

RUNTIME = Path(__file__).with_name("runtime.c")
# Tensors become buffers, structured operations loops, and everything LLVM. What differs from triton-ascend's own list
# for CPUs: bf16 is expanded in integers, mathematics goes to libm, and memory comes from runtime.c.
PASSES = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--memref-expand",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--finalize-memref-to-llvm=use-generic-functions=true",
    "--convert-arith-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-func-to-llvm",
    "--lower-affine",  # lowering memrefs made more of both
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)


def runtime(programs: dict[str, str], folder: Path) -> Path:
    """The compiled runtime.c."""
    made = folder / "runtime.so"
    _run("cc", [programs["cc"], "-O2", "-fPIC", "-shared", str(RUNTIME), "-o", str(made), "-lm"])
    return made


def library(text: str, programs: dict[str, str], folder: Path) -> Path:
    """The shared library of a lowered kernel.

    Raises LinalgError with what a program said that refused.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]

    def at(suffix: str) -> str:
        return str(folder / f"{digest}{suffix}")

    Path(at(".mlir")).write_text(texts.upstream(text))
    _run("mlir-opt", [programs["mlir-opt"], at(".mlir"), *PASSES, "-o", at(".llvm.mlir")])
    _run("mlir-translate", [programs["mlir-translate"], "--mlir-to-llvmir", at(".llvm.mlir"), "-o", at(".ll")])
    # The code runs where it is made. Nothing is contracted or reordered: llc does neither unless it is asked to.
    native = ("-O2", "-mcpu=native", "-relocation-model=pic", "-filetype=obj")
    _run("llc", [programs["llc"], *native, at(".ll"), "-o", at(".o")])
    _run("cc", [programs["cc"], "-shared", at(".o"), "-o", at(".so"), "-lm"])
    return Path(at(".so"))


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        died = f"died of signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        raise LinalgError(f"{name}: {died}\n{done.stderr.strip()[-4000:]}")
