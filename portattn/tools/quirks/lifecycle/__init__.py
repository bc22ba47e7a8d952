"""The life of a quirk: from a log or an incident to a draft, reduced, bisected, carried to a new compiler, retired.

A log is read in steps, a file each: normalise.py removes the prefixes of launchers and terminals, split.py finds the
failures, recognise.py describes one by a row of the table (formats/), environment_from_log.py reads its environment,
and known_failures.py compares it with the entries. new.py makes the draft, its reproducer and the text of the report.
reduce.py, bisect.py, upgrade.py and retire.py are one command each.
"""
