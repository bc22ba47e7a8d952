"""`portattn tune`: searching launch and lowering choices, and writing them down as data. Never part of a call.

choice.py      Choice, one candidate as data
space.py       which values are tried: a table of axes per kernel, and what is left out without compiling
tunable.py     Tunable and BuiltCandidate, what a kernel must say to be tuned
core.py        the core kernels as tunables
workloads.py   problems to tune for, from benchmark cases or a line of text
classes.py     which problems share one entry of the tuning file
facts.py       compiling candidates in child processes, and what registers, spills and shared memory rule out
check.py       a candidate's numbers against float64, before it is timed
race.py        clocks, early abandonment, and when an incumbent is replaced
search.py      one class: from its space to its choice
run.py         a whole run: budget, log, resumption
origin.py      where figures come from
records.py, log.py   what is written down of a candidate, and where
entries.py     the entry that comes of it, merged into a tuning file
"""
