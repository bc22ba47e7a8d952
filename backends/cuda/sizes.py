"""Sizes that a variant's kernel and its launcher share.

It imports nothing: kernels are also compiled where there is no portattn, by another toolchain's Python.
"""

GROUP_ROWS = 64  # of the dense forward: query rows of a warp group

# Of the latent kernel: columns of a row (V, which is the first part of K; and the rest of K), query rows of a block,
# keys of its tiles.
RANK, ROPE = 512, 64
ROWS, KEYS = 64, 64

# Of the backward: query rows of a tile of statistics, and of dQ's sums in float32.
STATISTICS_ROWS = 64
