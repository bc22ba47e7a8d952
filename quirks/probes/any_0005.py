"""Triton before 3.4 refuses to add bfloat16 numbers atomically, which gradients of several programs need.

    ValueError: atomic_add does not support bf16

Expected: it compiles, like float16 and float32. `control` and `on` add float32.

fp8_constant: Triton has no constant of an fp8 type: before 3.7 its builder makes none, and later releases lower the
truncation of a float32 constant to an instruction that LLVM rejects. Expected: a compiled kernel. `control` and `on`
cast a loaded number.

fp8_of_double: no back end lowers a cast from float64 to fp8. Expected: a compiled kernel. `control` and `on` cast to
float32 first.

infinite_e5m2: a cast from float16 to e5m2 saturates, though the type has an infinity: `cvt.rn.satfinite` makes 57344 of
it. Expected: no such instruction. `control` and `on` cast to bfloat16.
"""

import triton
import triton.language as tl
from harness import Bench, BugFound, main


@triton.jit
def add(x, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.atomic_add(out + offsets, tl.load(x + offsets))


def probe(arm: str, bench: Bench) -> None:
    kind = "*bf16" if arm == "off" else "*fp32"
    bench.compile(add, {"x": kind, "out": kind}, {"N": 64})


@triton.jit
def fill(x, out, N: tl.constexpr, CONSTANT: tl.constexpr):
    offsets = tl.arange(0, N)
    if CONSTANT:  # noqa: SIM108 - a jit function is read as it is written
        value = tl.full((N,), 1.1, tl.float8e5)
    else:
        value = tl.load(x + offsets).to(tl.float8e5)
    tl.store(out + offsets, value)


def fp8_constant(arm: str, bench: Bench) -> None:
    bench.compile(fill, {"x": "*fp32", "out": "*fp8e5"}, {"N": 1024, "CONSTANT": arm == "off"})


@triton.jit
def cast(x, out, N: tl.constexpr, FIRST: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.load(x + offsets).to(FIRST).to(out.dtype.element_ty))


def fp8_of_double(arm: str, bench: Bench) -> None:
    first = tl.float64 if arm == "off" else tl.float32
    bench.compile(cast, {"x": "*fp64", "out": "*fp8e5"}, {"N": 1024, "FIRST": first})


def infinite_e5m2(arm: str, bench: Bench) -> None:
    narrow = "*fp8e5" if arm == "off" else "*bf16"
    code = bench.compile(cast, {"x": "*fp16", "out": narrow}, {"N": 1024, "FIRST": tl.float16})
    if "cvt.rn.satfinite.e5m2x2.f16x2" in code.texts["ptx"]:
        raise BugFound("infinity becomes 57344: cvt.rn.satfinite.e5m2x2.f16x2")


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
