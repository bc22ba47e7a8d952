"""`portattn ci`: what a change of compiler breaks, as a verdict with causes.

asked.py    what is compared: compilers, targets, problems, the baseline, quirks of the user's own
cells.py    the cells of both sides, planned or compiled
report.py   what was found, and what of it is red
losses.py   the red findings by their causes, with what to do
summary.py  the summary in Markdown
github.py   the job summary and the annotations of GitHub's runners
"""
