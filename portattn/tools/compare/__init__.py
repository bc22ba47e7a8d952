"""Comparisons of compilers and of runs: losses of B against A, each with its cause."""
