"""Compile the scheduled latent kernel for sm_90 with the installed Triton; prints {case: facts} as JSON.

A program of its own: the tests' process has TRITON_INTERPRET=1, and there nothing is compiled.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from portattn.backends.cuda.hopper_latent import kernel as latent_kernel
from portattn.backends.cuda.hopper_latent import variant
from portattn.worker.resources import ptxas_report

KERNEL = latent_kernel.latent_decode


def descriptor(*block: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)
    return f"tensordesc<bf16{list(block)},{layout!r}>"


def compiled(heads: int, queries: int, causal: bool, split: bool) -> dict[str, Any]:
    chunk = variant.RANK // latent_kernel.CHUNKS
    types = {
        "q_desc": descriptor(1, heads, queries, chunk), "q_tail_desc": descriptor(1, heads, queries, variant.ROPE),
        "k_desc": descriptor(variant.KEYS, chunk), "k_tail_desc": descriptor(variant.KEYS, variant.ROPE),
        "out_desc": descriptor(1, heads, queries, variant.RANK // 2), "partial": "*fp32", "lse": "*fp32",
        "page_table": "*i32", "seqlens_k": "*i32", "scale": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "HEADS": heads, "QUERIES": queries, "CAUSAL": causal, "SPLIT": split,
        "CONSUMER": variant.CONSUMER_REGISTERS, "PRODUCER": variant.PRODUCER_REGISTERS,
    }  # fmt: skip
    if not split:
        constants |= {"partial": None}
    names = KERNEL.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    pointers = {
        (names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")
    }
    source = GluonASTSource(KERNEL, signature, {(names.index(n),): value for n, value in constants.items()}, pointers)
    options = {"num_warps": 4, "maxnreg": variant.REGISTERS}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return ptxas_report(kernel.asm["ptx"], 90) | {"shared": kernel.metadata.shared}


if __name__ == "__main__":
    cases = {"split": (64, 1, False, True), "whole": (64, 1, False, False), "causal": (32, 2, True, True)}
    print(json.dumps({name: compiled(*case) for name, case in cases.items()}))
