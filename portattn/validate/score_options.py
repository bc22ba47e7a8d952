"""Score and mask functions that equal built-in options: a window of a mask program, a cap of a score program."""

from __future__ import annotations

import functools

from portattn.kernels.score_program import Node, ScoreProgram, literal, parse

_FAR = 2**31  # more than any distance between a query and a key
_NEAR = 2**29  # constants up to it, and sizes (problem_limits.MAX_LENGTH): no sum of two indices and one wraps
_Linear = tuple[int, int, int]  # (a, b, c): a·q_idx + b·kv_idx + c, with a and b of -1, 0 and 1
_Range = tuple[int, int]  # least and most of q_idx - kv_idx


def _at_most_0(line: _Linear) -> _Range | None:
    a, b, c = line
    if (a, b) == (0, 0):
        return (-_FAR, _FAR) if c <= 0 else None
    return (-_FAR, -c) if (a, b) == (1, -1) else (c, _FAR) if (a, b) == (-1, 1) else None


def _intersection(*ranges: _Range | None) -> _Range | None:
    found = [each for each in ranges if each is not None]
    if len(found) < len(ranges):
        return None
    return max(least for least, _ in found), min(most for _, most in found)


class _Window:
    """Linear indices of a mask program, their absolute values, and the distances that its bools allow."""

    def __init__(self, program: ScoreProgram) -> None:
        self.lines: dict[str, _Linear] = {"q_idx": (1, 0, 0), "kv_idx": (0, 1, 0)}
        self.absolutes: dict[str, _Linear] = {}
        self.ranges: dict[str, _Range | None] = {"True": (-_FAR, _FAR)}
        for node in program.nodes:
            if node.kind in ("i", "l"):
                self.add_number(node)
            elif node.kind == "b":
                self.ranges[node.name] = self.distances(node)

    def line(self, word: str) -> _Linear | None:
        number = literal(word)
        if type(number) is int:
            return (0, 0, number) if abs(number) <= _NEAR else None
        return self.lines.get(word)

    def add_number(self, node: Node) -> None:
        x, *rest = (self.line(word) for word in node.operands)
        if x is None or None in rest:
            return
        match node.op:
            case "add" | "sub":
                sign, y = (1 if node.op == "add" else -1), rest[0] or (0, 0, 0)
                found = (x[0] + sign * y[0], x[1] + sign * y[1], x[2] + sign * y[2])
            case "neg":
                found = (-x[0], -x[1], -x[2])
            case "to_i" | "to_l":
                found = x
            case "abs":
                self.absolutes[node.name] = x
                return
            case _:
                return
        if max(abs(found[0]), abs(found[1])) <= 1 and abs(found[2]) <= _NEAR:
            self.lines[node.name] = found

    def distances(self, node: Node) -> _Range | None:
        operands, op = node.operands, node.op
        if op == "and":
            return _intersection(*(self.ranges.get(word) for word in operands))
        if op == "not":
            least, most = self.ranges.get(operands[0]) or (0, 0)
            if (least == -_FAR) == (most == _FAR):
                return None
            return (most + 1, _FAR) if least == -_FAR else (-_FAR, least - 1)
        if op in ("gt", "ge"):
            operands, op = operands[::-1], {"gt": "lt", "ge": "le"}[op]
        if op not in ("lt", "le", "eq"):
            return None
        x, y, short = self.line(operands[0]), self.line(operands[1]), op == "lt"
        if op != "eq" and operands[0] in self.absolutes and y is not None and y[:2] == (0, 0):
            a, b, c = self.absolutes[operands[0]]
            return _intersection(_at_most_0((a, b, c - y[2] + short)), _at_most_0((-a, -b, -c - y[2] + short)))
        if x is None or y is None:
            return None
        a, b, c = (one - other for one, other in zip(x, y, strict=True))
        if op == "eq":
            return _intersection(_at_most_0((a, b, c)), _at_most_0((-a, -b, -c)))
        return _at_most_0((a, b, c + short))


@functools.lru_cache(maxsize=1024)
def as_window(text: str) -> tuple[int, int] | None:
    """Return the window (left, right) that a mask program equals; None if it is anything else.

    They are the most keys before and after the key of the query's own number; -1 is no limit, and (-1, 0) is a causal
    mask."""
    program = parse(text)
    found = _Window(program).ranges.get(program.result)
    if found is None or found[0] > 0 or found[1] < 0:
        return None
    least, most = found
    return -1 if most == _FAR else most, -1 if least == -_FAR else -least


@functools.lru_cache(maxsize=1024)
def as_softcap(text: str) -> float | None:
    """Return the cap of a score program that equals cap·tanh(score / cap); None if it is anything else."""
    program = parse(text)
    match [(node.op, node.operands) for node in program.nodes]:
        case [("div", ("score", cap)), ("tanh", (ratio,)), ("mul", (one, other))]:
            divided, capped, multiplied = (node.name for node in program.nodes)
            number = literal(cap)
            same = ratio == divided and {one, other} == {capped, cap} and program.result == multiplied
            return number if same and isinstance(number, float) and number > 0.0 else None
    return None
