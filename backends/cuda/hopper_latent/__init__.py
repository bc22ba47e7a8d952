"""`gluon_mla`: latent attention for Hopper, explicitly scheduled."""
