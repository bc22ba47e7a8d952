"""One spelling for what Triton's Gluon calls differently from release to release: all that the Hopper kernels need.

Chosen as the kernels are imported, by what the release has, and used by every variant. Read in the sources of 3.6.0,
3.7.1, 3.8.0 and 3.9.0, and compiled with each of them:

                3.6.0, 3.7.1                 3.8.0                          3.9.0
load            async_copy_global_to_shared  async_load, and the old name   async_load; the old name raises as it is
                                                                            compiled
store           async_copy_shared_to_global  async_store, and the old name  async_store; the old name raises
reduce_add      none: the builder has it     async_atomic_add               async_atomic_add
reinterpreted   descriptor._reinterpret      descriptor._reinterpret        descriptor.reinterpret
aggregate       triton.language.core._aggregate in all, and gluon.aggregate from 3.8 on. From 3.8 on the fields of one
                that is made cannot be set again

The same in all, as far as these kernels call it:

mbarrier        init(barrier, count), expect(barrier, bytes), wait(barrier, phase, pred=…), arrive(barrier, count=…).
                `expect` calls its bytes `bytes` in 3.6 and `bytes_per_cta` later: by place. One block is no cluster, so
                that what 3.9 adds (from_cta) stays as it is. `invalidate` is not called: a block's barriers end with it
store_wait      store_wait(pendings) until shared memory has been read. Later releases say read_only=True, the default
fences          fence_async_shared(), between what threads write to shared memory and what TMA or a product reads
warp_specialize ([(function, arguments), …], warps of the workers, their registers); optional from 3.7 on
hardware barriers  none of Gluon's functions names one: named_barriers.py does. The compilers take 0 to 2 of the 16 for
                their own synchronisation in these kernels (0 to 4 is what 3.6 may), a test looks with each release
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

if hasattr(tma, "async_load"):
    load, store = tma.async_load, tma.async_store
else:
    load, store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

if hasattr(tma, "async_atomic_add"):
    reduce_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def reduce_add(tensor_desc, coord, src, _semantic=None):
        """Add a block of shared memory to global memory, elementwise, in any order with others."""
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
# branch that is hardly ever taken. whole.hidden keeps the number from it. No name of a release tells: its number does.
CARRIES_ADDRESSES: gl.constexpr = gl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))

aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate

__all__ = ["aggregate", "load", "reduce_add", "reinterpreted", "store"]
