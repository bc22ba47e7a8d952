"""Triton-ascend's linalg on a CPU: executed through MLIR 19, compared with the oracle, and linted."""
