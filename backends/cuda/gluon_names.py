"""One spelling of Triton's Gluon across releases, chosen at import: all that the Hopper kernels need.

Read in the sources of 3.6.0, 3.7.1, 3.8.0 and 3.9.0, and compiled with each of them:

                3.6.0, 3.7.1                 3.8.0                          3.9.0
load            async_copy_global_to_shared  async_load, and the old name   async_load; the old name raises
gather          async_copy_global_to_shared  async_load, and the old name   async_load; the old name raises
store           async_copy_shared_to_global  async_store, and the old name  async_store; the old name raises
reduce_add      a method of the builder      async_atomic_add               async_atomic_add
reinterpreted   descriptor._reinterpret      descriptor._reinterpret        descriptor.reinterpret
aggregate       triton.language.core._aggregate in all, and gluon.aggregate from 3.8 on, with frozen fields

The same in all, as far as these kernels call it:

mbarrier        init, expect, wait, arrive. `expect` names its bytes `bytes` in 3.6 and `bytes_per_cta` later: by place.
                One block is no cluster, so 3.9's from_cta keeps its default. A block's barriers end without invalidate
store_wait      store_wait(pendings) until shared memory has been read: later releases' default, read_only=True
fences          fence_async_shared(), between threads' writes to shared memory and reads by TMA or a product
warp_specialize ([(function, arguments), …], warps of the workers, their registers); optional from 3.7 on
hardware barriers  only sync and arrive (gluon_names.py) name one. Compilers take 0 to 2 of the 16 in these kernels
                (3.6: up to 4), checked by a test for each release
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

if hasattr(tma, "async_load"):
    load, store = tma.async_load, tma.async_store
else:
    load, store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

# gather(place, pointers, mask): cp.async; where the mask is False zeros are written
gather = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

if hasattr(tma, "async_atomic_add"):
    reduce_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def reduce_add(tensor_desc, coord, src, _semantic=None):
        """Add a block of shared memory to global memory, elementwise, unordered with others."""
        place = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, place, src.handle)


# reinterpreted(place, dtype, shape, layout): the same shared memory, seen as another array
if hasattr(gl.shared_memory_descriptor, "reinterpret"):
    reinterpreted = gl.shared_memory_descriptor.reinterpret
else:
    reinterpreted = gl.shared_memory_descriptor._reinterpret

# A tile's 32 addresses, at fixed distances of each other, which move with a loop's number: 3.6.0 to 3.8.0 (LLVM 22 and
# 23) carry one pointer over the loop for all of them, 3.9.0 (LLVM 24) 29 of two registers each, be they used only in a
# branch that is hardly ever taken. low_precision_products.hide_from_llvm keeps the number from it. No name tells the
# releases apart here: their number does.
CARRIES_ADDRESSES: gl.constexpr = gl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))

aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate

__all__ = [
    "CARRIES_ADDRESSES", "aggregate", "argument_or", "arrive", "gather", "hide", "load", "reduce_add", "reinterpreted",
    "store", "sync",
]  # fmt: skip


# The hardware's named barriers. A call names a barrier, and how many threads meet there. There are 16 in a block.
# Triton's warp specialisation takes 0 to 4 (3.6): a kernel's own begin at 5.
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


@gluon.jit
def hide(n):
    """Return an int32 as unknown to the compiler, which computes anew what follows from it: a loop's steps else have
    such values in common, and keep them in registers or spill them."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def argument_or(x, other):
    """Return an argument, or the other one, which is not read, for None."""
    if x is None:
        x = other
    return x
