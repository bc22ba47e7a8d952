"""Write the type stubs whose overloads tie an operation's result to its `return_lse`, or the flag of that kind.

A stub takes the place of a package's __init__.py, which only imports, or of a module, which mypy checks if it is given
its path (`make lint`).
Signatures and results are read from these modules, so a parameter is written once; tests/test_typing.py compares.
"""

import ast
import builtins
import functools
import itertools
import operator
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "portattn/api/ops", "portattn/distributed", "portattn/integrations/flash_attn/flash_attn_interface",
    "portattn/integrations/flash_attn_interface",
)  # fmt: skip
FLAGS = ("return_lse", "return_attn_probs", "return_softmax_lse")
HEADER = "# Written by scripts/typing_stubs.py from the signatures of the modules. Do not edit.\n# fmt: off\n"
_GLUE = "\0"


def stub_of(package: str) -> str:
    """Return the text of a package's stub: overloads of functions and methods with a flag, other names as they are.

    package: its folder, or a module without its ending, from the root of the tree"""
    imports: set[tuple[str, str]] = set()
    parts: list[str] = []
    bases: list[str] = []
    tree, own = _tree(str(path_of(package, ".py").relative_to(ROOT))), package.replace("/", ".")
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    pairs = [(str(node.module), alias.name) for node in found for alias in node.names]
    assigned = {ast.unparse(node.targets[0]): node for node in tree.body if isinstance(node, ast.Assign)}
    names = sorted(pair for pair in pairs if pair[0].startswith("portattn."))
    if not (ROOT / package).is_dir():
        defined = [
            node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        ]
        public = ast.literal_eval(assigned["__all__"].value) if "__all__" in assigned else defined
        names = sorted({pair for pair in names if pair[1] in public} | {(own, name) for name in defined})
    classes = {name for module, name in names if any(_methods(_definition(module, name), _module(module), set()))}
    for module, name in names:
        node, source = _definition(module, name), _module(module)
        overloads: list[str] = []
        if name in classes:  # a subclass by name, so that the class itself stays checked
            bases.append(f"from {module} import {name} as _{name}")
            overloads = [f"class {name}(_{name}):"]
            overloads += [textwrap.indent(one, "    ") for one in _methods(node, source, imports)]
        elif isinstance(node, ast.FunctionDef):
            overloads = list(_overloads(node, source, imports))
            if not overloads and isinstance(node.returns, ast.Name) and node.returns.id in classes:
                overloads = [_signature(name, _parameters(node, source, imports), node.returns.id)]
            elif not overloads and module == own:
                assert node.returns is not None
                overloads = [_signature(name, _parameters(node, source, imports), ast.unparse(node.returns))]
        parts += overloads
        if not overloads:
            imports.add((module, name))
    aliases = [name for name, node in assigned.items() if isinstance(node.value, ast.Name)]
    parts += [ast.unparse(assigned[name]) for name in aliases]
    parts.append(f"__all__ = {sorted([*aliases, *(name for _, name in names)])}")
    known = {f"from {module} import {name} as {name}" for module, name in imports if module.startswith("portattn.")}
    plain = {("typing", "Literal"), ("typing", "overload")}
    plain |= {(module, name) for module, name in imports if not module.startswith("portattn.")}
    groups = itertools.groupby(sorted(plain), operator.itemgetter(0))
    standard = [f"from {module} import {', '.join(name for _, name in group)}" for module, group in groups]
    head = [*standard, "", "import torch\n", *sorted({*known, *bases}), ""]
    return HEADER + "\n" + "\n".join([*head, *map(_wrap, parts)]) + "\n"


def path_of(package: str, ending: str = ".pyi") -> Path:
    """Return the path of a package's or a module's stub, or with the ending .py of its code."""
    folder = ROOT / package
    return folder / f"__init__{ending}" if folder.is_dir() else folder.with_suffix(ending)


def _methods(node: ast.stmt | None, source: "Module", imports: set[tuple[str, str]]) -> Iterator[str]:
    for member in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            yield from _overloads(member, source, imports)


def _overloads(function: ast.FunctionDef, source: "Module", imports: set[tuple[str, str]]) -> Iterator[str]:
    """Yield one overload for each kind of flag; nothing for a function without one."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    options = arguments.kwarg is not None and ast.unparse(function.returns or arguments.kwarg) == "Result"
    flag = next((name for name in names if name in FLAGS), FLAGS[0])
    if flag not in names and (not options or ast.unparse(_annotation(arguments.kwarg)) == "NoReturn"):
        return
    plain, more = _results(source, function)
    positional = len(arguments.args)

    def signature(kind: str, result: str, **given: int) -> str:
        words = _parameters(function, source, imports, {flag: kind}, **given)
        return "@overload\n" + _signature(function.name, words, result)

    at = names.index(flag) if flag in names else positional
    yield signature("Literal[False] = False", plain)
    yield signature("Literal[True]", more, first_keyword=min(at, positional))
    if at < positional:  # by position: all parameters before the flag are given
        yield signature("Literal[True]", more, required=at)
    yield signature("bool = False", f"{plain} | {more}")


def _parameters(
    function: ast.FunctionDef, source: "Module", imports: set[tuple[str, str]],
    flag: Mapping[str, str] = MappingProxyType({}), first_keyword: int | None = None, required: int = 0,
) -> list[str]:  # fmt: skip
    """Return the parameters as a stub has them, without the ones that only refuse (`**unknown: NoReturn`).

    Args:
        flag: the flag's name with its type, and its default
        first_keyword: place of the first keyword-only parameter; None for the function's own
        required: how many of the first parameters lose their defaults
    """
    arguments = function.args
    known = [*arguments.args, *arguments.kwonlyargs]
    defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    defaults += [*arguments.defaults, *arguments.kw_defaults]
    words = []
    for place, (parameter, default) in enumerate(zip(known, defaults, strict=True)):
        if place == (len(arguments.args) if first_keyword is None else first_keyword):
            words.append("*")
        if parameter.arg in flag:
            words.append(f"{parameter.arg}: {flag[parameter.arg]}")
        elif parameter.annotation is None:
            words.append(parameter.arg)
        else:
            shown = "" if default is None or place < required else f" = {ast.unparse(default)}"
            words.append(_annotated(parameter, source, imports) + shown)
    if arguments.kwarg is not None and ast.unparse(_annotation(arguments.kwarg)) != "NoReturn":
        if not arguments.kwonlyargs:
            words.append("*")
        words += [f"{name}: {kind}" for name, kind in flag.items()]  # one of the options
        words.append(f"**{_annotated(arguments.kwarg, source, imports)}")
    return words


def _signature(name: str, words: list[str], result: str) -> str:
    """Return a function's line, which _wrap breaks between parameters only."""
    shown, end = ", ".join(word.replace(" ", _GLUE) for word in words), f" -> {result}: ...".replace(" ", _GLUE)
    between = " " if len(words[-1]) + len(end) > 112 else ""  # together they are too long for a line
    return f"def {name}({shown}{between}){end}"


def _annotated(parameter: ast.arg, source: "Module", imports: set[tuple[str, str]]) -> str:
    """Return a parameter with its type, whose names are added to the imports."""
    for part in ast.walk(_annotation(parameter)):
        if isinstance(part, ast.Name) and part.id not in ("torch", *dir(builtins)):
            imports.add((source.origin(part.id) or source.name, part.id))
    return f"{parameter.arg}: {ast.unparse(_annotation(parameter))}"


def _annotation(parameter: ast.arg | None) -> ast.expr:
    if parameter is None or parameter.annotation is None:
        raise ValueError("a parameter of a public function has no type")
    return parameter.annotation


def _results(source: "Module", function: ast.FunctionDef) -> tuple[str, str]:
    """Return the types of the result without and with the flag, which are the sides of the annotation's union."""
    union = function.returns
    if isinstance(union, ast.Name):  # an alias
        alias, where = union.id, source.origin(union.id)
        body = (source if where is None else _module(where)).tree.body
        union = next(n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == alias)
    if not isinstance(union, ast.BinOp):
        raise ValueError(f"{function.name}: the result must be a union, `plain | with the flag`, in the annotation")
    return ast.unparse(union.left), ast.unparse(union.right)


class Module(NamedTuple):
    """A module of portattn, parsed."""

    name: str
    tree: ast.Module

    def origin(self, name: str) -> str | None:
        """Return the module that a name is imported from; None if this module defines it."""
        found = [node for node in self.tree.body if isinstance(node, ast.ImportFrom)]
        return next((node.module for node in found if name in {alias.name for alias in node.names}), None)


def _module(name: str) -> Module:
    return Module(name, _tree(f"{name.replace('.', '/')}.py"))


def _definition(module: str, name: str) -> ast.stmt | None:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return next((node for node in _module(module).tree.body if isinstance(node, kinds) and node.name == name), None)


@functools.cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _wrap(text: str) -> str:
    lines = []
    for line in text.splitlines():
        deeper = line[: len(line) - len(line.lstrip())] + "    "
        lines += textwrap.wrap(line, 120, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_GLUE, " ")


if __name__ == "__main__":
    for package in PACKAGES:
        path_of(package).write_text(stub_of(package), encoding="utf-8")
