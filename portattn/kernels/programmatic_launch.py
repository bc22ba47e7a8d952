"""Launches that may begin while the kernel before still runs (NVIDIA, sm_90 and later): waiting for that kernel's end,
and letting the next one begin.

Triton before 3.4 and other vendors' compilers have no such launch: the construct sits in a helper of its own, chosen at
import.
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

if gdc_wait is not None:

    @triton.jit
    def wait_for_kernel_before():
        """What the kernel before has written is visible after this."""
        gdc_wait()

    @triton.jit
    def let_next_kernel_begin():
        """Let the next kernel, if its launch is dependent, begin when all programs have come here. It still waits for
        this kernel's end (wait_for_kernel_before)."""
        gdc_launch_dependents()

else:

    @triton.jit
    def wait_for_kernel_before():
        """Stands in where the toolchain has no dependent launches."""
        tl.static_assert(False, "this Triton has no programmatic dependent launch: launch_pdl must not be set")

    @triton.jit
    def let_next_kernel_begin():
        """Stands in likewise."""
        tl.static_assert(False, "this Triton has no programmatic dependent launch: launch_pdl must not be set")
