"""The matrix: problems × targets, each cell with its evidence; planned, compiled in child processes, and reported."""
