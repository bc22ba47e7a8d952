"""jit: Triton functions whose arguments may be records, NamedTuples of values that belong together.

    class Rows(NamedTuple):
        base: Any
        stride: Any
        WIDTH: tl.constexpr

    @records.jit
    def load_rows(rows: Rows, start):
        return tl.load(rows.base + start * rows.stride + tl.arange(0, rows.WIDTH))

A kernel makes a record by calling its class: `keys = Rows(k, k_stride, WIDTH)`, or `load_rows(Rows(…), start)`.

Triton before 3.3 and triton-ascend 3.2.0 know no tuples of run-time values. So the text of a function is rewritten
before Triton sees it: a record becomes one argument for each of its fields, and a field a plain name, `rows·base` for
`rows.base` (the dot is a letter to Python). Entry points take no records, so that a launch has the arguments that it
had. A field that is given as a plain name or a constant is that name or constant wherever it is used: compilers see
what a call without records would have said. Any other expression is computed where the record is made. No line changes
its number, and Triton keeps the function's own text to quote: errors show, and profiles name, the lines of the file.
"""

from __future__ import annotations

import ast
import bisect
import functools
import hashlib
import inspect
import itertools
import linecache
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, get_type_hints, overload

import triton
import triton.language as tl

DOT = "·"
Kind = type  # a record's class


@overload
def jit(function: FunctionType) -> Any: ...
@overload
def jit(**options: Any) -> Callable[[FunctionType], Any]: ...
def jit(function: FunctionType | None = None, **options: Any) -> Any:
    """Return triton.jit(function), in which records are their fields.

    Raises TypeError, which names file and line, on a record that is used in another way than to name its fields or to
    be an argument of a function that declares the same record in that place.
    """
    if function is None:
        return functools.partial(jit, **options)
    file, lines, first = function.__code__.co_filename, *inspect.findsource(function)
    block = inspect.getblock(lines[first:])
    rewriting = _Rewriting(function, block, first)
    text = rewriting.text()
    scope: dict[str, Any] = {}
    exec(compile("\n" * first + text, file, "exec"), function.__globals__, scope)
    flat = scope[function.__name__]
    flat.portattn_records = rewriting.signature
    # Triton reads a function's text by its file and first line, through linecache.
    kept = linecache.cache.get(file)
    shown = [*lines[:first], *text.splitlines(keepends=True), *lines[first + len(block) :]]
    linecache.cache[file] = (sum(map(len, shown)), None, shown, file)
    try:
        made = triton.jit(flat, **options)
        if hasattr(made, "rewrite"):  # the interpreter, which reads the text at the first call
            made.rewrite()
        else:
            _quote_own_text(made, rewriting, text)
    finally:
        linecache.cache.pop(file, None)
        if kept is not None:
            linecache.cache[file] = kept
    return made


def _quote_own_text(made: Any, rewriting: _Rewriting, text: str) -> None:
    """Let a JITFunction compile `text`, and quote in its errors the text of its file."""
    text = text.lstrip("\n")
    # Triton's cache key is a hash of `src`, so that the rewritten text must be in it.
    own = rewriting.own_text() + f"# {hashlib.sha256(text.encode()).hexdigest()}\n"
    if hasattr(made, "_unsafe_update_src"):  # Triton 3.3 and newer
        made._unsafe_update_src(own)
    else:
        made.src = own
    made.parse = lambda: rewriting.tree(text)


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@functools.lru_cache
def _hints(kind: Kind) -> dict[str, Any]:
    return get_type_hints(kind)


def _leaves(kind: Kind) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield path and whether it is a tl.constexpr, of each value in a record and in its nested records."""
    for name, hint in _hints(kind).items():
        if _is_record(hint):
            yield from (((name, *path), constant) for path, constant in _leaves(hint))
        else:
            yield (name,), hint is tl.constexpr


class _Piece:
    """Text in the place of a value: an expression of the function from a line to a line, or a constant (line 0)."""

    def __init__(self, text: str, first: int = 0, last: int = 0, plain: bool = True) -> None:
        self.text, self.first, self.last, self.plain = text, first, last, plain


class _Rewriting(ast.NodeVisitor):
    """The text of one function without its decorators, with records' fields in place of records."""

    def __init__(self, function: FunctionType, block: list[str], offset: int) -> None:
        self.names, self.file, self.offset = function.__globals__, function.__code__.co_filename, offset
        self.lines = [line.encode() for line in block]
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.bytes = b"".join(self.lines)
        definition = ast.parse(self.bytes).body[0]
        assert isinstance(definition, ast.FunctionDef)
        self.definition = definition
        self.edits: list[tuple[int, int, str]] = []
        self.kinds: dict[str, Kind] = {}  # records by name
        self.texts: dict[tuple[str, ...], str] = {}  # what stands for a field, by its path from the record's name on
        self.stores = [n for n in ast.walk(definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.signature = {one.arg: self._kind_of(one.annotation) for one in self._parameters()}

    def text(self) -> str:
        for one in self._parameters():
            kind = self.signature[one.arg]
            if kind is not None:
                self.kinds[one.arg] = kind
                named = []
                for path, constant in _leaves(kind):
                    self.texts[(one.arg, *path)] = DOT.join((one.arg, *path))
                    named.append(self.texts[(one.arg, *path)] + (": tl.constexpr" if constant else ""))
                self._replace(one, ", ".join(named))
        for statement in self.definition.body:
            self.visit(statement)
        begin = self.starts[self.definition.lineno - 1]
        return "\n" * (self.definition.lineno - 1) + self._applied(begin, len(self.bytes), self.edits)

    def own_text(self) -> str:
        return b"".join(self.lines[self.definition.lineno - 1 :]).decode()

    def tree(self, text: str) -> ast.Module:
        """Parse text(), and give each expression the column that it has in own_text()."""
        own = self.own_text().encode().splitlines(keepends=True)
        begin = self.starts[self.definition.lineno - 1]
        starts = [0, *itertools.accumulate(len(line) for line in text.encode().splitlines(keepends=True))]
        own_starts = [0, *itertools.accumulate(map(len, own))]
        edits = sorted(self.edits)
        ends, shifts, shift = [0], [0], 0  # from the byte ends[i] of the text on, the file's byte is shifts[i] further
        for first, last, replacement in edits:
            ends.append(first - begin - shift + len(replacement.encode()))
            shift += (last - first) - len(replacement.encode())
            shifts.append(shift)
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if not hasattr(node, "col_offset"):
                continue
            place = starts[node.lineno - 1] + node.col_offset
            edit = bisect.bisect_right(ends, place) - 1
            line, place = own[node.lineno - 1], place + shifts[edit] - own_starts[node.lineno - 1]
            # An expression in a record's place is at the record's first byte, or at its line's.
            bound = edits[edit][0] - begin - own_starts[node.lineno - 1] if edit < len(edits) else place
            column = min(place, bound)
            node.col_offset = column if 0 <= column < len(line) else len(line) - len(line.lstrip())
        return tree

    # What is rewritten.

    def visit_Assign(self, node: ast.Assign) -> None:
        kind = self._made(node.value)
        if kind is None:
            self.generic_visit(node)
            return
        target = node.targets[0]
        if len(node.targets) > 1 or not isinstance(target, ast.Name):
            raise self._error(node, f"a {kind.__name__} is given one name")
        name, found, line = target.id, [], node.lineno
        if sum(store.id == name for store in self.stores) > 1 or name in self.signature:
            raise self._error(node, f"{name} is a record, and has another value elsewhere")
        pieces = self._pieces(node.value, kind)
        self.kinds[name] = kind
        for (path, constant), piece in zip(_leaves(kind), pieces, strict=True):
            own = DOT.join((name, *path))
            self.texts[(name, *path)] = piece.text if piece.plain else own
            if piece.plain:
                self._check_stays(piece.text, node)
                continue
            annotation = ": tl.constexpr" if constant else ""
            found.append(f"{own}{annotation} = (" + "\n" * (piece.first - line) + f"{piece.text})")
            line = piece.last
        last = node.end_lineno or line
        self._replace(node, "; ".join(found or ["pass"]) + "\n" * (last - line))

    def visit_Call(self, node: ast.Call) -> None:
        kind = self._made(node)
        if kind is not None:
            raise self._error(node, f"a {kind.__name__} is given a name, or to a function")
        self.visit(node.func)
        called = self._find(node.func)
        wanted = getattr(getattr(called, "fn", None), "portattn_records", {})
        keywords = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
        places = zip([*wanted, *[""] * len(node.args)], node.args, strict=False)
        for name, value in [*places, *keywords]:
            kind = self._made(value) or self._named(value)
            if kind is not wanted.get(name):
                given, declared = (one.__name__ if one else "no record" for one in (kind, wanted.get(name)))
                raise self._error(value, f"{ast.unparse(node.func)} is given {given}, but declares {declared}")
            if kind is None:
                self.visit(value)
            elif (name, value) in keywords:
                raise self._error(value, "a record is no keyword argument")
            else:
                self._replace(value, self._joined(self._pieces(value, kind), value))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is None or path[0] not in self.kinds:
            self.generic_visit(node)
        elif path in self.texts:
            if not isinstance(node.ctx, ast.Load):
                raise self._error(node, f"a field of {path[0]} is not assigned to")
            self._replace(node, self.texts[path])
        elif any(path[:length] in self.texts for length in range(len(path))):
            self.visit(node.value)
        else:
            kind = self.kinds[path[0]].__name__
            known = any(leaf[: len(path)] == path for leaf in self.texts)
            text = "is a record and no value" if known else f"is no field of a {kind}"
            raise self._error(node, f"{'.'.join(path)} {text}")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.kinds:
            kind = self.kinds[node.id].__name__
            raise self._error(node, f"{node.id} is a {kind}: its fields have values, and functions take it")

    # What stands for a record.

    def _pieces(self, node: ast.expr, kind: Kind) -> list[_Piece]:
        """Return the texts of the values of a record that is made here or has a name."""
        if self._made(node) is None:
            path = self._path(node) or ()
            return [_Piece(self.texts[path + leaf]) for leaf, _ in _leaves(kind)]
        assert isinstance(node, ast.Call)
        fields = kind._fields  # type: ignore[attr-defined]
        given = dict(zip(fields, node.args, strict=False)) | {str(k.arg): k.value for k in node.keywords}
        if len(node.args) > len(fields) or not given.keys() <= set(fields):
            raise self._error(node, f"a {kind.__name__} has the fields {', '.join(fields)}")
        found = []
        changed = self._changed(node)
        for name in fields:
            hint = _hints(kind)[name]
            if name not in given and changed is not None:
                before = (*(self._path(changed) or ()), name)
                found += [_Piece(text) for path, text in self.texts.items() if path[: len(before)] == before]
                continue
            if name not in given:
                if name not in kind._field_defaults:  # type: ignore[attr-defined]
                    raise self._error(node, f"a {kind.__name__} needs {name}")
                found += _constants(kind._field_defaults[name])  # type: ignore[attr-defined]
                continue
            value = given[name]
            own = self._made(value) or self._named(value)
            if own is not (hint if _is_record(hint) else None):
                raise self._error(value, f"{name} of a {kind.__name__} must be {getattr(hint, '__name__', hint)}")
            found += self._pieces(value, hint) if own else [self._piece(value)]
        return found

    def _piece(self, node: ast.expr) -> _Piece:
        kept, self.edits = self.edits, []
        self.visit(node)
        text = self._applied(*self._span(node), self.edits)
        self.edits = kept
        plain = isinstance(node, ast.Constant) or text.isidentifier() or text in ("None", "True", "False")
        plain = plain or (self._path(node) in self.texts)
        return _Piece(text, node.lineno, node.end_lineno or node.lineno, plain)

    def _joined(self, pieces: list[_Piece], node: ast.expr) -> str:
        text, line = "", node.lineno
        for place, piece in enumerate(pieces):
            text += ", " if place else ""
            if piece.first:
                text += "\n" * (piece.first - line)
                line = piece.last
            text += piece.text
        return text + "\n" * ((node.end_lineno or line) - line)

    # What a node is.

    def _parameters(self) -> list[ast.arg]:
        arguments = self.definition.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]

    def _kind_of(self, annotation: ast.expr | None) -> Kind | None:
        found = self._find(annotation)
        return found if _is_record(found) else None

    def _find(self, node: ast.expr | None) -> Any:
        """Return the object outside the function that a name, or a name in a module, stands for; None without one."""
        if isinstance(node, ast.Attribute):
            return getattr(self._find(node.value), node.attr, None)
        return self.names.get(node.id) if isinstance(node, ast.Name) else None

    def _made(self, node: ast.expr) -> Kind | None:
        """Return the class of a record that an expression makes: Rows(…), or rows._replace(…)."""
        if not isinstance(node, ast.Call):
            return None
        changed = self._changed(node)
        return self._kind_of(node.func) if changed is None else self._named(changed)

    def _changed(self, node: ast.Call) -> ast.expr | None:
        return node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "_replace" else None

    def _named(self, node: ast.expr) -> Kind | None:
        """Return the class of a record by its name, or by a field that is a record."""
        path = self._path(node)
        if path is None or path[0] not in self.kinds:
            return None
        kind: Any = self.kinds[path[0]]
        for name in path[1:]:
            kind = _hints(kind).get(name) if _is_record(kind) else None
        return kind if _is_record(kind) else None

    def _path(self, node: ast.expr) -> tuple[str, ...] | None:
        if isinstance(node, ast.Attribute):
            before = self._path(node.value)
            return None if before is None else (*before, node.attr)
        return (node.id,) if isinstance(node, ast.Name) else None

    def _check_stays(self, text: str, made: ast.Assign) -> None:
        for store in self.stores:
            if store.id == text and (store.lineno, store.col_offset) > (made.lineno, made.col_offset):
                raise self._error(store, f"{text} is a field of a record made in line {made.lineno + self.offset}")

    # Places in the text.

    def _span(self, node: Any) -> tuple[int, int]:
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _replace(self, node: Any, text: str) -> None:
        self.edits.append((*self._span(node), text))

    def _applied(self, begin: int, end: int, edits: list[tuple[int, int, str]]) -> str:
        found, place = b"", begin
        for first, last, text in sorted(edits):
            found += self.bytes[place:first] + text.encode()
            place = last
        return (found + self.bytes[place:end]).decode()

    def _error(self, node: Any, text: str) -> TypeError:
        return TypeError(f"{self.file}:{node.lineno + self.offset}: {text}")


def _constants(value: Any) -> list[_Piece]:
    """Return the texts of a field's default; a record gives each of its values."""
    if _is_record(type(value)):
        return [piece for part in value for piece in _constants(part)]
    return [_Piece(repr(value))]
