"""The life of a quirk: from a log or an incident to a draft, reduced, bisected, carried to a new compiler, retired.

recognise.py and patterns.py read what compilers print; surroundings.py reads on what it was printed. new.py makes the
draft, its reproducer and the text of the report. reduce.py, bisect.py, upgrade.py and retire.py are one command each.
"""
