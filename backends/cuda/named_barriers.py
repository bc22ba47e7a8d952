"""The hardware's named barriers, for Gluon kernels. A call names a barrier, and how many threads meet there.

There are 16 in a block. Triton's warp specialisation takes 0 to 4 (3.6): a kernel's own begin at 5.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def sync(barrier, threads):
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, 0;", "=r,r,r", [barrier, threads], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive(barrier, threads):
    # Waits for nobody, where mbarrier.arrive would first bring the whole warp group together.
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, 0;", "=r,r,r", [barrier, threads], dtype=gl.int32, is_pure=False, pack=1
    )
