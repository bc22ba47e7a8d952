"""`gluon_forward`: the forward for Hopper, explicitly scheduled."""

# Imports nothing: the kernel also compiles without the rest of portattn.
GROUP_ROWS = 64  # query rows of a warp group
