"""Tools that no call needs: benchmarks, tuning, the matrix, the toolchain lab, quirks' life cycle."""
