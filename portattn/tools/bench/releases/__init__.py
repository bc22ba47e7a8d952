"""Several releases of Triton timed in one run: a process each, which take turns on one device.

named.py finds the releases, child.py is what runs in a release's process, process.py asks it, measure.py measures cells
with it, and compared.py puts the releases beside each other: releases.json, which reading.py reads back, and of which
tables.py and plots.py are made.
"""
