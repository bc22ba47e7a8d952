"""`gluon_mla`: latent attention for Hopper, explicitly scheduled."""

# Imports nothing: the kernel also compiles without the rest of portattn.
RANK, ROPE = 512, 64  # columns of a row: V, which is the first part of K, and the rest of K
ROWS, KEYS = 64, 64  # query rows of a block, keys of its tiles
CHUNKS = 4  # a tile's scores begin when the first of so many parts of its 512 columns is there (2, 4 or 8)
FREE = 9  # the first of the named barriers at which parts of the buffers of rows become free
