"""`portattn ci`: the breakages of a change of compiler, as a verdict with causes.

request.py      the request: compilers, targets, problems, the baseline, the user's own quirks
cells.py        the cells of both sides, planned or compiled
report.py       the findings, and which of them are red
regressions.py  the red findings by their causes, with remedies
summary.py      the summary in Markdown
github.py       the job summary and the annotations of GitHub's runners
"""
