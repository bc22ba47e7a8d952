"""References: a float64 oracle that tests compare with, and a blockwise torch path that plans can fall back to."""
