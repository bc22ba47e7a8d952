"""`gluon_forward`: the forward for Hopper, explicitly scheduled."""

# Imports nothing: the kernel also compiles without the rest of portattn.
GROUP_ROWS = 64  # query rows of a warp group
FLAGS = 4  # numbers before a tile's keys (block_lists.py), 16 bytes

# `gluon_wide`, for heads of more than 256 columns: keys of a tile, columns of the output that a tile has, and columns
# of queries and keys that are loaded at a time.
WIDE_KEYS, WIDE_PART, WIDE_CHUNK = 64, 256, 128
