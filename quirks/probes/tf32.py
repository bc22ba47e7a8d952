"""A product of fp32 operands with tf32 precision is refused by chips, or compilers, that have no tf32.

    ValueError: input_precision must be one of ('ieee',…). Got tf32                     (AMD)
    input_precision == tf32 or tf32x3 is invalid, please use input_precision='hf32'     (Ascend)

tf32 is NVIDIA's; of AMD's chips gfx942 has it, from Triton 3.3 on. tf32x3, three such products for one of fp32, is
refused there as well, up to Triton 3.9. The work-around is the full precision, `ieee`.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def product(a, b, out, N: tl.constexpr, PRECISION: tl.constexpr):
    rows = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + rows, tl.dot(tl.load(a + rows), tl.load(b + rows), input_precision=PRECISION))


def probe(arm: str, bench: Bench, precision: str = "tf32") -> None:
    # The control is a product of 16-bit operands, whose precision is their own.
    kind = "*fp16" if arm == "control" else "*fp32"
    constants = {"N": 32, "PRECISION": precision if arm == "off" else "ieee"}
    bench.compile(product, {"a": kind, "b": kind, "out": "*fp32"}, constants)


def tf32x3(arm: str, bench: Bench) -> None:
    probe(arm, bench, "tf32x3")


if __name__ == "__main__":
    main(probe, "rocm:gfx90a", __doc__)
