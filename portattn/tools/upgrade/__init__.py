"""What a change of compiler keeps and what it does not: asked of the registry and the planner, nothing is compiled.

compilers.py  the two compilers, as they are given
sides.py      a target under each of the two, and its plans
entries.py    quirks that fall away, stay or newly apply
plans.py      plans that are not the same
variants.py   variants that carry over, are tried by their canaries, or refuse
schedules.py  launches and schedules, by the compiler that they were timed with
figures.py    published figures, by the compiler that they were measured with
compare.py    all of it

`portattn quirks upgrade` and `portattn ci` show it.
"""
