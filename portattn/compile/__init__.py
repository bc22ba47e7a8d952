"""Compiles of a plan's kernels where a crash or a hang does no harm, and their records."""
