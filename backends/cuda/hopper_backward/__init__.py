"""`gluon_backward`: the backward pass for Hopper, explicitly scheduled."""

# Imports nothing: the kernels also compile without the rest of portattn.
STATISTICS_ROWS = 64  # query rows of a tile of statistics, and of dQ's sums in float32
