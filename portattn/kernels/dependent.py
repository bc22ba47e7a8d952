"""Waiting for the kernel before, for a launch that may begin while that one still runs (NVIDIA, sm_90 and later).

Triton before 3.4 and other vendors' compilers have no such launch: the construct sits in a helper of its own, chosen at
import.
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_wait
except ImportError:
    gdc_wait = None

if gdc_wait is not None:

    @triton.jit
    def wait_for_kernel_before():
        """What the kernel before has written is visible after this."""
        gdc_wait()

else:

    @triton.jit
    def wait_for_kernel_before():
        """Stands in where the toolchain has no dependent launches."""
        tl.static_assert(False, "this Triton has no programmatic dependent launch: launch_pdl must not be set")
