"""Compiling a plan's kernels where a crash or a hang does no harm, and what is remembered of it."""
