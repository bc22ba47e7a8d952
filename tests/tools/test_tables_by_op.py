"""Tables by operation in the tools have every operation of schema/ops.py: an op that is left out is never looked at."""

from portattn.schema.ops import ROWS
from portattn.schema.problem_limits import OPS
from portattn.tools.matrix import problems
from portattn.tools.quirks import audit, examples
from portattn.tools.tune import classes


def test_every_table_of_the_tools_has_every_op() -> None:
    assert tuple(ROWS) == OPS
    assert set(examples.problems().usual) == set(ROWS)
    assert {problem.op for problem in audit._problems()} == set(ROWS)
    assert set(classes.groups()[1]) == set(ROWS) - set(classes.UNTUNED)
    assert {named.problem.op for named in problems.quick()} == set(ROWS)
