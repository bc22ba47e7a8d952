"""Benchmarks: problem sets, peers found at run time, a correctness gate before any speed. Never part of the tests.

cases.py       Case, one timed problem as data: sizes, its FLOPs, the bytes it has to read
sets*.py       the named sets of cases; order.py in which order they are measured
tensors.py     a case's inputs, random, and one sequence and head of them
contenders.py  portattn's own calls, as a user writes them; backward.py the gradients of these and of peers' calls
peers/         other libraries, if this machine has them; a file each
gate.py        who is right, and so is timed; gradgate.py whose gradients are
clock.py       device time, host time, ceilings; timing.py takes turns with it
firstcall.py   what a process's first call costs
run.py         a case, a set; results.py what becomes of the figures, store.py where they are kept
provenance.py  chip, toolchain, driver, commit, clocks
goals.py       the goals as data, and verdicts; summary.py sets in one line each
tables.py, plots.py, compare.py   from the files alone
"""
