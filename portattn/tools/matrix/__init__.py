"""The matrix: ops × targets, each cell with what was seen of it. Planned, compiled in child processes, and reported.

problems.py   the named sets of problems
cells.py      what one cell holds; the schema of results.jsonl
results.py    reading and writing results.jsonl, whole lines only
gates.py      compiled code against the arch: registers, spills, local memory, matrix instructions
numerics.py   running a plan's kernels on a small problem in a child, under the interpreter or on this machine's device
run.py        making the cells
report.py     the static page
"""
