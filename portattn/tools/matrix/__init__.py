"""The matrix: ops × targets, each cell with its evidence. Planned, compiled in child processes, and reported.

Making cells:
problems.py     the named sets of problems
select.py       the cells of a run; request.py: the request, also of an earlier run
cells.py        a cell's fields; the schema of results.jsonl
results.py      reading and writing results.jsonl, whole lines only; its stale cells
run.py          making the cells, with the record of a plan; variants.py: a cell's record of variants
identity.py     the dependences of cells; provenance.py: their values here and now
labels.py       a cell's words; evidence.py: its evidence; not_run.py: the reason of an empty cell, and the remedy
table.py        the table as data; report.py: the static page

Runs over time:
snapshot.py     the compared parts of a run; reading.py: read from a folder, a file or a baseline
diff.py         losses and gains between two runs; attribution.py: their causes
baseline.py     a run as text to keep
merge.py        runs of several machines made one
expected.py     expected failures, each with reason and date
verdict.py      the judgement of a run; junit.py: the same as XML
history.py      one cell over several runs
"""
