"""triton-ascend's adapter dies of a gather whose offsets were reshaped.

    %206 = "tt.reshape"(%203) {MixUse} : (tensor<16xi32>) -> tensor<1x16xi32>      (SIGSEGV, backends/huawei layout)

3.2.0 with those releases' passes (`--passes old`) aborts in BlockPtrAnalysis.cpp: `AddPtrOp produced by unsupported
operation`; with its own it compiles the kernel.

Expected: linalg.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def gather(k, tokens, out, N: tl.constexpr, D: tl.constexpr, RESHAPED: tl.constexpr):
    token, d = tl.load(tokens + tl.arange(0, N)), tl.arange(0, D)
    if RESHAPED:  # noqa: SIM108 - a jit function is read as it is written
        row = tl.reshape(token, [1, N])
    else:
        row = token[None, :]
    tile = tl.load(k + row * D + d[:, None])
    tl.store(out + d[:, None] * N + tl.arange(0, N)[None, :], tile)


@triton.jit
def contiguous(k, tokens, out, N: tl.constexpr, D: tl.constexpr, RESHAPED: tl.constexpr):
    places = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + places, tl.load(k + places))


def probe(arm: str, bench: Bench) -> None:
    if arm == "on":
        return  # the work-around is another path: no kernel is compiled
    kernel = contiguous if arm == "control" else gather
    types = {"k": "*fp16", "tokens": "*i32", "out": "*fp16"}
    bench.compile(kernel, types, {"N": 16, "D": 64, "RESHAPED": True})


if __name__ == "__main__":
    main(probe, "ascend:ascend910b2", __doc__)
