"""Names of stages that both sides of a worker know. Standard library only."""

RUNS = "run"  # of the task `interpret`: imports are done, and kernels are compiled and run
