"""Measure how readable the tree is, and fail where a measure is worse than its limit in scripts/budgets.toml.

    python scripts/budgets.py             print the table; exit with 1 where a limit is exceeded
    python scripts/budgets.py --write     lower each limit to today's number; a limit never rises
    python scripts/budgets.py --show NAME print the places that a measure counts, one a line

A limit is a ratchet: a change that makes a number smaller lowers the limit in the same commit. In a git repository the
script also fails if a limit is higher than it was in an earlier commit. `make lint` runs the script in the installed
layout, from which grimp reads the imports.
"""

import argparse
import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("portattn", "backends", "quirks")
MACHINERY = ("portattn/tools", "portattn/cli", "scripts")
LONG_FILE = 500  # lines
MANY_PARAMETERS = 20
# Phrases in which a pronoun stands for a thing that has a name, or a participle for a verb.
PHRASES = re.compile(
    r"\b(of what|of those that|those of|that is none|nobody has|none of which|as it is asked|what is kept"
    r"|what (?:it|they|is|was|are|were|lies) \w+ (?:of|by|for|in)|where (?:it|there) is none|one that is none"
    r"|lies nowhere|of a wrapper|carrying out|carried out|carries out|of the one that)\b",
    re.IGNORECASE,
)
# Nouns that end in "ed", terms of the field, and public classes of the library.
NOT_PARTICIPLES = frozenset({
    "seed", "need", "feed", "speed", "embed", "red", "Red", "paged", "packed", "ragged", "interleaved", "Quantized",
    "Prepared",
})  # fmt: skip
IRREGULAR = frozenset({
    "begun", "born", "bound", "brought", "built", "caught", "chosen", "done", "drawn", "driven", "felt", "found",
    "given", "gone", "held", "hidden", "kept", "known", "laid", "left", "lent", "lost", "made", "meant", "met", "paid",
    "said", "seen", "sent", "shown", "spelt", "spent", "stood", "struck", "sunk", "taken", "thrown", "told", "torn",
    "understood", "woken", "worn", "written",
})  # fmt: skip


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        bodies = [node.body for node in ast.walk(self.tree) if isinstance(node, owners) and node.body]
        first = [body[0].value for body in bodies if isinstance(body[0], ast.Expr)]
        return [value for value in first if isinstance(value, ast.Constant) and isinstance(value.value, str)]

    @cached_property
    def prose(self) -> list[tuple[int, str]]:
        """Return docstrings and comments with their first lines; comments on adjacent lines are one text."""
        found = [(node.lineno, node.value) for node in self.docstrings if isinstance(node.value, str)]
        last = -1
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type != tokenize.COMMENT:
                continue
            line, text = token.start[0], token.string.lstrip("# ")
            if line == last + 1:
                begin, before = found.pop()
                found.append((begin, f"{before} {text}"))
            else:
                found.append((line, text))
            last = line
        return found


class Tree:
    """The files of a checkout that the measures read, from `root` on."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def sources(self, *folders: str) -> list[Source]:
        paths = (path for folder in folders for path in sorted((self.root / folder).rglob("*.py")))
        return [Source(path.relative_to(self.root).as_posix(), path.read_text("utf-8")) for path in paths]

    @cached_property
    def library(self) -> list[Source]:
        return self.sources(*LIBRARY)

    @cached_property
    def pages(self) -> list[tuple[str, str]]:
        paths = [self.root / "README.md", *sorted((self.root / "docs").rglob("*.md"))]
        return [(path.relative_to(self.root).as_posix(), path.read_text("utf-8")) for path in paths if path.exists()]

    @cached_property
    def jit_functions(self) -> list[tuple[str, str, int]]:
        """Return (name, path:line, number of parameters) of each Triton or Gluon function."""
        found = []
        for source in self.library:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                    found.append((node.name, f"{source.path}:{node.lineno}", len(node.args.args)))
        return found

    @cached_property
    def called_inside(self) -> set[str]:
        """Return names that the library's functions call: a jit function among them is no entry point of a launch."""
        calls = (n for s in self.library for n in ast.walk(s.tree) if isinstance(n, ast.Call))
        return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def _definitions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return (node for node in source.tree.body if isinstance(node, kinds))


def modules(tree: Tree) -> list[str]:
    return [source.path for source in tree.library]


def single_importers(tree: Tree) -> list[str]:
    """Return modules that exactly one other module imports; packages and entry points do not count."""
    import grimp

    graph = grimp.build_graph("portattn", cache_dir=None)
    found = []
    for module in sorted(graph.modules):
        importers = graph.find_modules_that_directly_import(module)
        if len(importers) == 1 and not graph.find_children(module):
            found.append(f"{module} <- {next(iter(importers))}")
    return found


def repeated_classes(tree: Tree) -> list[str]:
    places = collections.defaultdict(list)
    for source in tree.library:
        for node in _definitions(source):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def participles(tree: Tree) -> list[str]:
    def bare(name: str) -> bool:
        word = name.lower()
        return name not in NOT_PARTICIPLES and (word in IRREGULAR or (word.endswith("ed") and "_" not in word))

    return [
        f"{source.path}:{node.lineno} {node.name}"
        for source in tree.library
        for node in _definitions(source)
        if not node.name.startswith("_") and bare(node.name)
    ]


def inner_jit_parameters(tree: Tree) -> int:
    return max((count for name, _, count in tree.jit_functions if name in tree.called_inside), default=0)


def wide_functions(tree: Tree) -> list[str]:
    """Return Triton functions of more than MANY_PARAMETERS parameters that other functions call."""
    return [
        f"{place} {name}: {count}"
        for name, place, count in sorted(tree.jit_functions)
        if count > MANY_PARAMETERS and name in tree.called_inside
    ]


def hidden_imports(tree: Tree) -> list[str]:
    """Return calls of import_module on a literal name of portattn's own, which import contracts do not see."""
    found = []
    for source in tree.library:
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args):
                continue
            name = node.args[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith("portattn"):
                found.append(f"{source.path}:{node.lineno}")
    return found


def machinery_lines(tree: Tree) -> int:
    return sum(source.lines for source in tree.sources(*MACHINERY))


def test_lines(tree: Tree) -> int:
    return sum(source.lines for source in tree.sources("tests"))


def words(tree: Tree) -> int:
    return sum(len(text.split()) for _, text in tree.pages)


def docstring_share(tree: Tree) -> float:
    """Return the percentage of the library's lines that are docstrings."""
    lines = sum(source.lines for source in tree.library)
    own = sum((node.end_lineno or node.lineno) - node.lineno + 1 for s in tree.library for node in s.docstrings)
    return round(100 * own / max(lines, 1), 1)


def phrases(tree: Tree) -> list[str]:
    found = []
    for source in tree.library:
        for line, text in source.prose:
            found += [f"{source.path}:{line} {match[0]}" for match in PHRASES.finditer(" ".join(text.split()))]
    for path, text in tree.pages:
        found += [f"{path} {match[0]}" for match in PHRASES.finditer(" ".join(text.split()))]
    return found


def long_files(tree: Tree) -> list[str]:
    sources = tree.sources(*LIBRARY, "scripts", "tests")
    return [f"{source.path}: {source.lines}" for source in sources if source.lines > LONG_FILE]


# Name in budgets.toml -> the measure: a number, or the places of which there are so many.
MEASURES: dict[str, Callable[[Tree], Any]] = {
    of.__name__: of
    for of in (
        modules, single_importers, repeated_classes, participles, phrases, inner_jit_parameters, wide_functions,
        hidden_imports, docstring_share, machinery_lines, test_lines, words, long_files,
    )
}  # fmt: skip


def measure(name: str, tree: Tree) -> float:
    found = MEASURES[name](tree)
    return len(found) if isinstance(found, list) else found


def check(tree: Tree, budgets: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each budget: name, title, now, limit, goal, start. Raise SystemExit if the names differ."""
    if budgets.keys() != MEASURES.keys():
        raise SystemExit(f"budgets.toml and the measures differ in {sorted(budgets.keys() ^ MEASURES.keys())}")
    return [{"name": name, "now": measure(name, tree), **budgets[name]} for name in MEASURES]


def _git(root: Path, *words: str) -> str:
    """Return the text that a git command prints; empty if it fails, or without git."""
    try:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def earlier_limits(root: Path) -> dict[str, float]:
    """Return each budget's lowest limit in HEAD, its first parent, the merge base and the last tag; {} if absent."""
    upstream = next((name for name in ("@{upstream}", "origin/HEAD") if _git(root, "rev-parse", "--verify", name)), "")
    base = _git(root, "merge-base", "HEAD", upstream) if upstream else ""
    commits = ["HEAD", "HEAD^", base, _git(root, "describe", "--tags", "--abbrev=0")]
    lowest: dict[str, float] = {}
    for commit in filter(None, commits):
        document = tomlkit.parse(_git(root, "show", f"{commit}:./scripts/budgets.toml")).unwrap()
        for name, row in document.items():
            lowest[name] = min(row["limit"], lowest.get(name, row["limit"]))
    return lowest


def write(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Lower the limits in the file to today's numbers. Return the names over their limits, which stay as they are."""
    document = tomlkit.parse(path.read_text("utf-8"))
    for row in rows:
        if row["now"] < row["limit"]:
            document[row["name"]]["limit"] = row["now"]  # type: ignore[index]
    path.write_text(tomlkit.dumps(document), "utf-8")
    return [row["name"] for row in rows if row["now"] > row["limit"]]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower each limit to today's number")
    parser.add_argument("--show", choices=MEASURES, help="print the places that a measure counts")
    given = parser.parse_args(arguments)
    tree, path = Tree(root), root / "scripts" / "budgets.toml"
    if given.show:
        found = MEASURES[given.show](tree)
        print("\n".join(found) if isinstance(found, list) else found)
        return 0
    rows, earlier = check(tree, tomlkit.parse(path.read_text("utf-8")).unwrap()), earlier_limits(root)
    raised = [row for row in rows if row["limit"] > earlier.get(row["name"], row["limit"])]
    over = [row["name"] for row in rows if row["now"] > row["limit"]]
    if given.write:
        over = write(path, rows)
    print(f"{'budget':<58} {'start':>8} {'limit':>8} {'now':>8} {'goal':>8}")
    for row in rows:
        mark = "  OVER" if row["name"] in over else ""
        print(f"{row['title']:<58} {row['start']:>8} {row['limit']:>8} {row['now']:>8} {row['goal']:>8}{mark}")
    for name in over:
        print(
            f"budgets: {name} is over its limit; `python scripts/budgets.py --show {name}` names the places",
            file=sys.stderr,
        )
    for row in raised:
        was = earlier[row["name"]]
        print(f"budgets: the limit of {row['name']} was raised from {was} to {row['limit']}", file=sys.stderr)
    if not earlier:
        print("budgets: no earlier budgets.toml in git, so no limit was compared with one", file=sys.stderr)
    return 1 if over or raised else 0


if __name__ == "__main__":
    sys.exit(main())
