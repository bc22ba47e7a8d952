"""triton-ascend refuses hf32, the cube unit's short fp32, for 16-bit operands.

    input_precision = 'hf32' must be used with f32 …

Expected: it is ignored, like tf32 by community Triton. The work-around is `ieee`.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def product(a, b, out, N: tl.constexpr, PRECISION: tl.constexpr):
    rows = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + rows, tl.dot(tl.load(a + rows), tl.load(b + rows), input_precision=PRECISION))


def probe(arm: str, bench: Bench) -> None:
    kind = "*fp32" if arm == "control" else "*fp16"
    precision = "ieee" if arm == "on" else "hf32"
    bench.compile(product, {"a": kind, "b": kind, "out": "*fp32"}, {"N": 64, "PRECISION": precision})


if __name__ == "__main__":
    main(probe, "ascend:ascend910b2", __doc__)
