"""Write the type stubs whose overloads tie an operation's result to its `return_lse`, or the flag of that kind.

A stub takes the place of a package's __init__.py, which only imports: the modules with the code stay checked.
Signatures and results are read from these modules, so a parameter is written once. `--check` writes nothing and exits
with 1 if a stub is out of date.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("portattn/api/ops", "portattn/integrations/flash_attn")
FLAGS = ("return_lse", "return_attn_probs", "return_softmax_lse")
HEADER = "# Written by scripts/typing_stubs.py from the signatures of the modules. Do not edit.\n# fmt: off\n"
_GLUE = "\0"


def stub_of(package: str) -> str:
    """Return the text of a package's stub: overloads of each function with a flag, and the other names as they are.

    package  its folder, from the root of the tree
    """
    imports: set[tuple[str, str]] = set()
    parts: list[str] = []
    for node in _tree(f"{package}/__init__.py").body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                overloads = list(_overloads(str(node.module), alias.name, imports))
                parts += overloads
                if not overloads:
                    imports.add((str(node.module), alias.name))
        elif isinstance(node, ast.Assign):
            value = "..." if ast.unparse(node.targets[0]) != "__all__" else ast.unparse(node.value)
            parts.append(f"{ast.unparse(node.targets[0])}{': str' if value == '...' else ''} = {value}")
    known = [f"from {module} import {name} as {name}" for module, name in sorted(imports)]
    head = ["from typing import Literal, overload\n", "import torch\n", *known, ""]
    return HEADER + "\n" + "\n".join([*head, *map(_wrap, parts)]) + "\n"


def _overloads(module: str, name: str, imports: set[tuple[str, str]]) -> Iterator[str]:
    tree = _tree(f"{module.replace('.', '/')}.py")
    function = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if function is None:
        return
    arguments = function.args
    names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    flag = next((name for name in names if name in FLAGS), None)
    if flag is None:
        return
    defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    defaults += arguments.defaults
    optional = dict(zip(names, [*defaults, *arguments.kw_defaults], strict=True))
    types = {a.arg: a.annotation for a in (*arguments.args, *arguments.kwonlyargs) if a.annotation is not None}
    for expression in types.values():
        for part in ast.walk(expression):
            if isinstance(part, ast.Name) and part.id not in ("torch", *dir(builtins)):
                imports.add((_source(tree, part.id) or module, part.id))
    plain, more = _results(tree, function)
    positional = len(arguments.args)
    at = names.index(flag)

    def signature(kind: str, result: str, first_keyword: int, given: bool, required: int = 0) -> str:
        words = []
        for place, parameter in enumerate(names):
            if place == first_keyword:
                words.append("*")
            default = optional[parameter]
            bare = default is None or place < required or (parameter == flag and given)
            annotation = kind if parameter == flag else ast.unparse(types[parameter])
            words.append(f"{parameter}: {annotation}" + ("" if bare else f" = {ast.unparse(default)}"))
        shown = ", ".join(word.replace(" ", _GLUE) for word in words)  # lines break between parameters only
        return f"@overload\ndef {name}({shown}){f' -> {result}: ...'.replace(' ', _GLUE)}"

    yield signature("Literal[False]", plain, positional, False)
    yield signature("Literal[True]", more, min(at, positional), True)
    if at < positional:  # by position: all parameters before the flag are given
        yield signature("Literal[True]", more, positional, True, at)
    yield signature("bool", f"{plain} | {more}", positional, False)


def _results(tree: ast.Module, function: ast.FunctionDef) -> tuple[str, str]:
    """Return the types of the result without and with the flag, which are the sides of the annotation's union."""
    union = function.returns
    if isinstance(union, ast.Name):  # an alias, in the module that it is imported from
        source = _tree(f"{str(_source(tree, union.id)).replace('.', '/')}.py")
        alias = union.id
        union = next(n.value for n in source.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == alias)
    if not isinstance(union, ast.BinOp):
        raise ValueError(f"{function.name}: its result must be `plain | with the flag`, not {ast.unparse(union)}")
    return ast.unparse(union.left), ast.unparse(union.right)


def _source(tree: ast.Module, name: str) -> str | None:
    """Return the module that a name is imported from; None if the module itself defines it."""
    found = [n.module for n in tree.body if isinstance(n, ast.ImportFrom) and name in {a.name for a in n.names}]
    return found[0] if found else None


def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _wrap(text: str) -> str:
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_GLUE, " ")


def main() -> int:
    """Write the stubs, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a stub is out of date")
    check = parser.parse_args().check
    stale = []
    for package in PACKAGES:
        path, text = ROOT / package / "__init__.pyi", stub_of(package)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text, encoding="utf-8")
    print("\n".join(f"{'out of date' if check else 'written'}: {path}" for path in stale) or "up to date")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
