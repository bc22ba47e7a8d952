"""Names of stages that both sides of a worker know. Standard library only."""

START = "start"  # the parent's: nothing was heard of the child yet
IMPORT = "import"  # the child's: it imports what the task needs
PROTOCOL = "protocol"  # the child's: it could not read the request
BEFORE_THE_TASK = (START, IMPORT, PROTOCOL)  # a failure here says nothing about the task
RUNS = "run"  # of a task that runs a plan: imports are done, and kernels are compiled and run
