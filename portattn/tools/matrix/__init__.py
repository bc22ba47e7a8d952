"""The matrix: ops × targets, each cell with what was seen of it. Planned, compiled in child processes, and reported.

Making cells:
problems.py     the named sets of problems
select.py       which cells a run has; asked.py: what it was asked for, also of an earlier run
cells.py        what one cell holds; the schema of results.jsonl
results.py      reading and writing results.jsonl, whole lines only; what of it is stale
run.py          making the cells; planned.py, variants.py: what they keep of plans and variants
identity.py     what cells depend on; digests.py, provenance.py: what that is here and now
words.py        what a cell says; evidence.py: what was seen of it; empty.py: why it is empty, and what fills it
table.py        the table as data; report.py: the static page

Runs over time:
snapshot.py     what of a run is compared; reading.py: read from a folder, a file or a baseline
diff.py         what was lost and won between two runs; causes.py: why
baseline.py     a run as text to keep
merge.py        runs of several machines made one
expected.py     which cells fail, for which reason, until when
verdict.py      whether a run is all right; junit.py: the same as XML
history.py      one cell over several runs
"""
