"""Differences that a change of compiler makes, by the registry and the planner, without a compile.

compilers.py          the two compilers, as the user gives them
toolchain_pair.py     a target under each of the two, and its plans
entries.py            quirks that fall away, stay or newly apply
plans.py              changed plans
variants.py           variants that carry over, are tried by their canaries, or refuse
schedules.py          launches and schedules, by the compiler that they were timed with
published_results.py  published figures, by the compiler that they were measured with
compare.py            all of them

`portattn quirks upgrade` and `portattn ci` show the differences.
"""
