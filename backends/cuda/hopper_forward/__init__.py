"""`gluon_forward`: the forward for Hopper, explicitly scheduled."""
