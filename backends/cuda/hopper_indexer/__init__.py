"""`gluon_indexer`: an indexer's logits for Hopper, explicitly scheduled."""

# Imports nothing: the kernel also compiles without the rest of portattn.
DIM = 128  # columns of a head
KEYS, CONSUMERS = 128, 3  # keys of a warp group, and warp groups of a block
ROW_STAGES, KEY_STAGES = 8, 3  # buffers of rows and of tiles' keys
