"""What a call never needs: benchmarks, tuning, the matrix, the toolchain lab, quirks' life cycle."""
