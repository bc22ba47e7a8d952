"""`gluon_backward`: the backward pass for Hopper, explicitly scheduled."""
