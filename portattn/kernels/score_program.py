"""Score and mask functions as programs: text in a Problem, a Triton function where a kernel is compiled.

A program is in static single assignment form, one statement a line:

    c0 f 2 0            captured tensor 0 holds floats and has two axes, whose sizes are numbers 0 and 1 of a call's
    t0 i load c0 h q_idx
    t1 f mul score 0.5
    out t1

Operands are earlier values, the inputs score, b, h, q_idx and kv_idx (of a derivative also grad), or literals. Kinds
are f (float32; of a float64 call float64), i (int32), l (int64) and b (bool). Captured tensors are contiguous, and a
call's score and mask function share their numbers. Indices outside a captured tensor count as torch's
negative ones, then as the nearest element: no program reads outside its tensors.

Standard library alone: Triton is imported where a function is made.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

INPUTS = ("score", "b", "h", "q_idx", "kv_idx")
KINDS = ("f", "i", "l", "b")
KINDS_OF_NUMBERS: Mapping[type, str] = {float: "f", int: "i", bool: "b"}
CAPTURES = 4  # captured tensors of a call
SIZES = 8  # axes of all of them
# Constants of kernels that hold a program's text, and are Triton functions when a kernel is compiled.
FUNCTIONS = ("SCORE_MOD", "MASK_MOD", "SCORE_GRADIENT", "CAPTURED_GRADIENT")

# Operations: Triton's expression for the operands {0}, {1}, …
EXPRESSIONS: Mapping[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "abs": "tl.abs({0})", "minimum": "tl.minimum({0}, {1})", "maximum": "tl.maximum({0}, {1})",
    "floordiv": "floor_divide({0}, {1})", "mod": "modulo({0}, {1})",
    "positive_floordiv": "{0} // {1}", "positive_mod": "{0} % {1}",
    "float_floordiv": "tl.floor({0} / {1})", "float_mod": "{0} - tl.floor({0} / {1}) * {1}",
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})", "sin": "tl.sin({0})", "cos": "tl.cos({0})", "tanh": "tanh({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))", "erf": "tl.erf({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
    "where": "tl.where({0}, {1}, {2})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "({0} == 0)",
    "lshift": "{0} << {1}", "rshift": "{0} >> {1}",
    "detach": "{0}", "half": "({0}).to(tl.float16).to(tl.float32)", "bfloat16": "({0}).to(tl.bfloat16).to(tl.float32)",
    "to_f": "({0}).to(tl.float32)", "to_i": "({0}).to(tl.int32)", "to_l": "({0}).to(tl.int64)", "to_b": "{0} != 0",
}  # fmt: skip

_HELPERS = """\
@triton.jit
def floor_divide(a, b):
    quotient = a // b
    return tl.where((quotient * b != a) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def modulo(a, b):
    return a - floor_divide(a, b) * b


@triton.jit
def inside(index, size):
    index = tl.where(index < 0, index + size, index)
    return tl.minimum(tl.maximum(index, 0), size - 1)


"""


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    kind: str
    op: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.name, self.kind, self.op, *self.operands))


@dataclass(frozen=True, slots=True)
class ScoreProgram:
    # Of each captured tensor, by its number: kind, rank, and the number of its first size among a call's.
    captures: Mapping[int, tuple[str, int, int]]
    nodes: tuple[Node, ...]
    result: str

    def __str__(self) -> str:
        heads = [f"c{number} {kind} {rank} {first}" for number, (kind, rank, first) in sorted(self.captures.items())]
        return "\n".join([*heads, *map(str, self.nodes), f"out {self.result}"])

    @property
    def kind(self) -> str:
        """Return the kind of the result."""
        kinds = {node.name: node.kind for node in self.nodes} | dict.fromkeys(INPUTS, "i") | {"score": "f", "grad": "f"}
        number = literal(self.result)
        return kinds[self.result] if number is None else KINDS_OF_NUMBERS[type(number)]

    def uses(self, name: str) -> bool:
        """Return whether the result depends on an input."""
        wanted = {self.result}
        for node in reversed(self.nodes):
            if node.name in wanted:
                wanted.update(node.operands)
        return name in wanted


_VALUE = re.compile(r"t\d+", re.ASCII)
_CAPTURED = re.compile(rf"c[0-{CAPTURES - 1}]")
_NUMBER = re.compile(r"-?((0|[1-9]\d*)(\.\d*)?(e[+-]?\d+)?|inf)|nan|True|False", re.ASCII)
_OPERANDS = {op: len(set(re.findall(r"{\d}", made))) for op, made in EXPRESSIONS.items()}


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> ScoreProgram:
    """Return the program of a text. Raise ValueError for any other text, which must not become Triton source."""
    captures: dict[int, tuple[str, int, int]] = {}
    nodes: list[Node] = []
    known, tensors, result = {*INPUTS, "grad"}, set[str](), ""
    for line in text.splitlines():
        name, *words = line.split()
        if name in known:
            raise ValueError(f"line {line!r} names a value again")
        if name == "out" and len(words) == 1 and not result:
            result = words[0]
        elif _CAPTURED.fullmatch(name) and len(words) == 3 and words[0] in KINDS and not nodes:
            rank, first = int(words[1]), int(words[2])
            if min(rank, first) < 0 or rank + first > SIZES:
                raise ValueError(f"line {line!r} has sizes that are not among {SIZES}")
            captures[int(name[1:])] = (words[0], rank, first)
            tensors.add(name)
        elif _VALUE.fullmatch(name) and len(words) > 2 and words[0] in KINDS and words[1] in (*EXPRESSIONS, "load"):
            operands, count = words[2:], _OPERANDS.get(words[1])
            if words[1] == "load":
                if words[2] not in tensors:
                    raise ValueError(f"line {line!r} loads from {words[2]!r}, which is no captured tensor")
                operands, count = words[3:], captures[int(words[2][1:])][1]
            if bad := [word for word in operands if word not in known and not _NUMBER.fullmatch(word)]:
                raise ValueError(f"line {line!r} has the operand {bad[0]!r}, which is no earlier value")
            if len(operands) != count:
                raise ValueError(f"line {line!r} has {len(operands)} operands, and {words[1]} takes {count}")
            nodes.append(Node(name, words[0], words[1], tuple(words[2:])))
            known.add(name)
        else:
            raise ValueError(f"line {line!r} is no statement of a program")
    if result not in known and not _NUMBER.fullmatch(result):
        raise ValueError("it has no result")
    return ScoreProgram(captures, tuple(nodes), result)


def fits(ranks: Sequence[int]) -> bool:
    """Return whether a call's functions may read captured tensors of so many axes each."""
    return len(ranks) <= CAPTURES and sum(ranks) <= SIZES


def literal(word: str) -> bool | int | float | None:
    """Return the number that an operand names; None for a value or an input."""
    if not _NUMBER.fullmatch(word):
        return None
    if word in ("True", "False"):
        return word == "True"
    return int(word) if word.lstrip("-").isdigit() else float(word)


@functools.lru_cache(maxsize=1024)
def may_hide(text: str) -> bool:
    """Return whether a program of scores may give -inf: by a constant, a captured tensor, a logarithm, a division, or a
    number that is too large for float16."""
    program = parse(text)
    words = {program.result, *(word for node in program.nodes for word in node.operands)}
    return not words.isdisjoint(("inf", "-inf")) or any(
        node.op in ("log", "log2", "half")
        or (node.op == "load" and node.kind == "f")
        or (node.op == "div" and literal(node.operands[1]) in (None, 0))
        for node in program.nodes
    )


class _Differentiation:
    """Reverse-mode differentiation of a program: adjoints are added up from the result to `by`, the score or loads."""

    def __init__(self, program: ScoreProgram, by: Iterable[str]) -> None:
        self.nodes, self.kinds = list(program.nodes), {node.name: node.kind for node in program.nodes}
        self.adjoints: dict[str, str] = {program.result: "grad"}
        self.free = 1 + max((int(node.name[1:]) for node in program.nodes), default=-1)
        depends = {*by}
        for node in program.nodes:
            if node.kind == "f" and depends & {*node.operands}:
                depends.add(node.name)
        for node in reversed(program.nodes):
            if node.name in self.adjoints and node.name in depends:
                self.differentiate(node)

    def make(self, op: str, *operands: str, kind: str = "f") -> str:
        name, self.free = f"t{self.free}", self.free + 1
        self.nodes.append(Node(name, kind, op, operands))
        return name

    def add(self, operand: str, amount: str) -> None:
        """Add an amount to the adjoint of an operand, a float."""
        if operand != "score" and self.kinds.get(operand) != "f":
            return
        before = self.adjoints.get(operand)
        self.adjoints[operand] = amount if before is None else self.make("add", before, amount)

    def differentiate(self, node: Node) -> None:
        g, out, make = self.adjoints[node.name], node.name, self.make
        x = node.operands[0]
        y = node.operands[1] if len(node.operands) > 1 else ""
        match node.op:
            case "add":
                self.add(x, g)
                self.add(y, g)
            case "sub":
                self.add(x, g)
                self.add(y, make("neg", g))
            case "mul":
                self.add(x, make("mul", g, y))
                self.add(y, make("mul", g, x))
            case "div":
                self.add(x, make("div", g, y))
                self.add(y, make("neg", make("div", make("mul", g, out), y)))
            case "neg":
                self.add(x, make("neg", g))
            case "abs":
                signed = make("where", make("lt", x, "0.0", kind="b"), make("neg", g), g)
                self.add(x, make("where", make("eq", x, "0.0", kind="b"), "0.0", signed))
            case "minimum" | "maximum":
                half = make("where", make("eq", x, y, kind="b"), make("mul", g, "0.5"), "0.0")
                first = make("lt" if node.op == "minimum" else "gt", x, y, kind="b")
                last = make("gt" if node.op == "minimum" else "lt", x, y, kind="b")
                self.add(x, make("where", first, g, half))
                self.add(y, make("where", last, g, half))
            case "where":
                self.add(node.operands[1], make("where", x, g, "0.0"))
                self.add(node.operands[2], make("where", x, "0.0", g))
            case "exp":
                self.add(x, make("mul", g, out))
            case "exp2":
                self.add(x, make("mul", make("mul", g, out), "0.6931471805599453"))
            case "log":
                self.add(x, make("div", g, x))
            case "log2":
                self.add(x, make("div", make("mul", g, "1.4426950408889634"), x))
            case "sqrt":
                self.add(x, make("div", make("mul", g, "0.5"), out))
            case "sin":
                self.add(x, make("mul", g, make("cos", x)))
            case "cos":
                self.add(x, make("neg", make("mul", g, make("sin", x))))
            case "tanh":
                self.add(x, make("mul", g, make("sub", "1.0", make("mul", out, out))))
            case "sigmoid":
                self.add(x, make("mul", g, make("mul", out, make("sub", "1.0", out))))
            case "erf":  # 2/√π · exp(−x²)
                slope = make("mul", make("exp", make("neg", make("mul", x, x))), "1.1283791670955126")
                self.add(x, make("mul", g, slope))
            case "float_mod":
                self.add(x, g)
                self.add(y, make("neg", make("mul", g, make("float_floordiv", x, y))))
            case "half" | "bfloat16":
                self.add(x, g)
            # Rounding to whole numbers and `detach` have a derivative of 0; so have comparisons, which are no floats.


@functools.lru_cache(maxsize=1024)
def gradient(text: str) -> str:
    """Return the program of `grad` times the derivative of a score function by its score."""
    program = parse(text)
    work = _Differentiation(program, ["score"])
    return str(_pruned(ScoreProgram(program.captures, tuple(work.nodes), work.adjoints.get("score", "0.0"))))


def _pruned(program: ScoreProgram, *others: str) -> ScoreProgram:
    """Return the program without nodes that neither its result nor other values depend on."""
    wanted, kept = {program.result, *others}, []
    for node in reversed(program.nodes):
        if node.name in wanted:
            wanted.update(node.operands)
            kept.append(node)
    captures = {number: shape for number, shape in program.captures.items() if f"c{number}" in wanted}
    return ScoreProgram(captures, tuple(reversed(kept)), program.result)


def _operand(word: str, wanted: str = "", along: Mapping[str, str] = MappingProxyType({}), axes: str = "") -> str:
    """Return an operand's expression, of a vector beside values along the wanted axes a row or column of the tile."""
    if wanted == "qk" and along.get(word) in ("q", "k"):
        return f"tl.expand_dims({word}, {1 - axes.index(along[word])})"
    number = literal(word)
    return f'float("{word}")' if isinstance(number, float) and word.lstrip("-") in ("inf", "nan") else word


def _pointer(
    node: Node, program: ScoreProgram, tensor: str, text: Callable[[str], str] = str, long: Iterable[int] = ()
) -> str:
    """Return the expression of the pointer to a load's element, of a tensor that is laid out as the captured one."""
    at, (_, rank, first) = [], program.captures[int(node.operands[0][1:])]
    sizes = [f"n{first + axis}" for axis in range(rank)]
    for word, size in zip(node.operands[1:], sizes, strict=True):
        number = literal(word)
        if word in ("q_idx", "kv_idx") and int(size[1:]) in long:
            at.append(text(word))
        elif word in INPUTS or (number is not None and number >= 0):
            at.append(f"tl.minimum({text(word)}, {size} - 1)")
        else:
            at.append(f"inside({text(word)}, {size})")
    step = ""
    for axis in range(len(at) - 1, 0, -1):
        step = f"{step} * {sizes[axis]}" if step else f"{sizes[axis]}"
        at[axis - 1] = f"({at[axis - 1]}).to(tl.int64) * ({step})"
    return " + ".join([tensor, *at])


def _load(node: Node, program: ScoreProgram, text: Callable[[str], str], long: Iterable[int]) -> str:
    loaded = f"tl.load({_pointer(node, program, node.operands[0], text, long)})"
    kind = program.captures[int(node.operands[0][1:])][0]
    return {"f": f"{loaded}.to(tl.float32)", "i": f"{loaded}.to(tl.int32)", "l": f"{loaded}.to(tl.int64)",
            "b": f"({loaded}.to(tl.int32) != 0)"}[kind]  # fmt: skip


def _as_floats(word: str, nodes: Mapping[str, Node], text: Callable[[str], str], depth: int = 4) -> str | None:
    """Return the expression of a whole number, as a float: of rows and keys, which a tile converts once each.

    None unless it is a sum of few indices, or its size, and exact for indices up to FLOAT_INDICES."""
    number, node = literal(word), nodes.get(word)
    if type(number) is int and abs(number) <= FLOAT_INDICES:
        return f"{number}.0"
    if word in INPUTS[1:]:
        return f"({text(word)}).to(tl.float32)"
    if node is None or node.op not in ("add", "sub", "neg", "abs") or not depth:
        return None
    parts = [_as_floats(operand, nodes, text, depth - 1) for operand in node.operands]
    return None if None in parts else f"({EXPRESSIONS[node.op].format(*parts)})"


FLOAT_INDICES = 2**20  # a sum of sixteen such numbers is a float32


def triton_source(program: ScoreProgram, name: str, derivative: bool, floats: bool, axes: str, long: Any) -> str:
    """Return the Triton function of a program. floats: distances that become floats are computed as floats.

    It takes score (a tile), b, h, q_idx and kv_idx (int32, which broadcast with the tile), the captured tensors'
    pointers, their sizes, and of a derivative `grad`. A score function's result has the tile's shape.

    axes: "qk" if q_idx and kv_idx are vectors along the tile's first and second axis, "kq" if along the second and the
    first. A compiler loads each element of a vector once, of a matrix of one row or column once a score. long: numbers
    of sizes above each q_idx and kv_idx, which need no limit there."""
    along = _along(program, axes)
    lines = [f"def {name}({', '.join([*_PARAMETERS, *(['grad'] if derivative else [])])}):"]
    lines += _lines(program, floats, axes, long)
    text = functools.partial(_operand, wanted="qk", along=along, axes=axes)
    result = text(program.result)
    if result in ("True", "False"):
        result = f"({text('kv_idx')} == {text('kv_idx')}) & {result}"
    elif program.kind == "f" and not (program.uses("score") or program.uses("grad")):
        result = f"tl.where(score == score, {result}, {result})"
    return "\n".join(["@triton.jit", *lines, f"    return {result}", ""])


_PARAMETERS = (*INPUTS, *(f"c{n}" for n in range(CAPTURES)), *(f"n{n}" for n in range(SIZES)))


def _along(program: ScoreProgram, axes: str) -> dict[str, str]:
    """Return the axes, "q" and "k", along which values of a program of vectors vary; none without axes."""
    along = {"score": "qk", "grad": "qk", "q_idx": "q", "kv_idx": "k"} if axes else {}
    for node in program.nodes:
        along[node.name] = "".join(axis for axis in "qk" if any(axis in along.get(word, "") for word in node.operands))
    return along


def _lines(program: ScoreProgram, floats: bool = False, axes: str = "", long: Iterable[int] = ()) -> list[str]:
    """Return a line of Triton for each node."""
    nodes, lines, along = {node.name: node for node in program.nodes}, [], _along(program, axes)
    for node in program.nodes:
        text = functools.partial(_operand, wanted=along[node.name], along=along, axes=axes)
        if node.op == "load":
            made = _load(node, program, text, long)
        elif node.op == "where" and node.kind == "l" and all(literal(word) is not None for word in node.operands[1:]):
            shown, first, other = map(text, node.operands)
            made = f"tl.where({shown}, ({shown}).to(tl.int64) * 0 + {first}, {other})"  # Triton's numbers are int32
        elif floats and node.op == "to_f" and (sums := _as_floats(node.operands[0], nodes, text)):
            made = sums
        else:
            made = EXPRESSIONS[node.op].format(*map(text, node.operands))
        lines.append(f"    {node.name} = {made}")
    return lines


def captured_source(text: str, name: str = "f") -> str:
    """Return the Triton function that adds `grad` times the derivatives by captured tensors to g0, g1, …, or None.

    They are float32 tensors, laid out as the captured ones. q_idx is [rows, 1] and kv_idx [1, keys]: what an element
    gets of a tile's rows or keys that its index does not tell apart is summed up before. Additions are in any order."""
    program = parse(text)
    loads = [node for node in program.nodes if node.op == "load" and node.kind == "f"]
    work = _Differentiation(program, [node.name for node in loads])
    found = [(node, work.adjoints[node.name]) for node in loads if node.name in work.adjoints]
    needed = [word for node, adjoint in found for word in (adjoint, *node.operands)]
    program = _pruned(ScoreProgram(program.captures, tuple(work.nodes), "0.0"), *needed)
    reads: dict[str, set[str]] = {word: {word} for word in INPUTS} | {"score": {"q_idx", "kv_idx"}}
    for node in program.nodes:
        reads[node.name] = set().union(*(reads.get(word, ()) for word in node.operands))
    lines = _lines(program)
    for node, adjoint in found:
        sums, axes = f"g{node.operands[0][1:]}", set().union(*(reads.get(word, ()) for word in node.operands[1:]))
        added = f"tl.where(grad != 0.0, {adjoint}, 0.0)"  # so that no infinite derivative of a hidden score is added
        if not {"q_idx", "kv_idx"} & axes:
            added = f"tl.sum(tl.sum({added}, 1), 0)"
        elif "kv_idx" not in axes:
            added = f"tl.sum({added}, 1)[:, None]"
        elif "q_idx" not in axes:
            added = f"tl.sum({added}, 0)[None, :]"
        else:
            added = f"{added}, mask=grad != 0.0"
        lines.append(f"    if {sums} is not None:")
        lines.append(f'        tl.atomic_add({_pointer(node, program, sums)}, {added}, sem="relaxed")')
    parameters = [*_PARAMETERS, "grad", *(f"g{n}" for n in range(CAPTURES))]
    return "\n".join(["@triton.jit", f"def {name}({', '.join(parameters)}):", *lines, "    return", ""])


@functools.lru_cache(maxsize=1024)
def python_source(text: str, derivative: bool = False, floats: bool = False, axes: str = "", long: Any = ()) -> str:
    """Return the source that `load_function` takes: of Triton, or of Gluon, which has the same words.

    floats, axes, long: as of `triton_source`; floats for sequences of at most FLOAT_INDICES."""
    # Triton's cache keys have the name of a function that is a constant, and not its text.
    program = parse(gradient(text) if derivative else text)
    made = functools.partial(triton_source, program, derivative=derivative, floats=floats, axes=axes, long=long)
    return _HELPERS + made(f"f_{hashlib.sha256(made('f').encode()).hexdigest()[:20]}")


@functools.lru_cache(maxsize=1024)
def load_function(source: str, jit: Any, language: Any, tanh: Any) -> Any:
    """Return the function of a source. jit: triton, or the package gluon; tanh: a function of either."""
    name = source[source.rindex("def ") + 4 :].partition("(")[0]
    file = f"<portattn score program {name}, {jit.__name__}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"triton": jit, "tl": language, "tanh": tanh, "__name__": __name__}
    exec(compile(source, file, "exec", dont_inherit=True), scope)
    return scope[name]


def _function(constant: str, text: str) -> Any:
    import triton
    import triton.language as tl

    from portattn.kernels.softmax import tanh

    if constant == "CAPTURED_GRADIENT":
        name = f"f_{hashlib.sha256(captured_source(text).encode()).hexdigest()[:20]}"
        return load_function(_HELPERS + captured_source(text, name), triton, tl, tanh)
    return load_function(python_source(text, constant == "SCORE_GRADIENT"), triton, tl, tanh)


def with_functions(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kernel's constants with Triton functions in the place of programs' texts."""
    found = dict(constants)
    for name in FUNCTIONS:
        if found.get(name):
            found[name] = _function(name, found[name])
    return found
