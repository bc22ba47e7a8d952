"""Benchmarks: problem sets, peers found at run time, a correctness gate before any speed. Never part of the tests.

cases.py       Case, one timed problem as data: sizes, its FLOPs, the bytes it has to read
sets.py        the named sets of cases
tensors.py     a case's inputs, random, and one sequence and head of them
contenders.py  portattn's own calls, as a user writes them
peers.py       other libraries, if this machine has them; peer_*.py is one each
gate.py        who is right, and so is timed
measure.py     clocks and ceilings
run.py, results.py   a case, a set; what becomes of the figures
"""
