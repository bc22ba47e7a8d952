"""Code that Triton makes for an older NVIDIA GPU, run on a newer one that is here: "sm_80 code on sm_90".

A cubin of sm_80 does not load on sm_90, but the PTX that it was assembled from does: PTX of a chip runs on every later
one (PTX ISA, "PTX Module Directives: .target"), and the driver assembles it for the chip that is there. What runs is
thus what Triton made of a kernel for sm_80 (its layouts, its mma instruction, its asynchronous copies, the tiles that
were chosen for that chip); what does not is sm_80's own assembler and the chip.

    execute.py   a plan's launches, compared with the oracle (child process): directives of a PTX text, the CUDA
                 driver's loader and launch, a KernelCall's arguments for an entry's parameters
    executor.py  PtxExecutor: the parent's side, for the matrix and `portattn verify`
"""
