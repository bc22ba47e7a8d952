"""No general module names a chip: what differs between chips is a fact in backends/*/arches, or a method of a Backend.
The names are those of the arches' own files: arches (and whatever begins as they do: `gfx9*`), families, and chips of
their titles. So a new arch is covered as soon as its file is there. A module may name a chip where nothing is decided
by it: in comments and docstrings (examples), in the texts of a command's help (`help=`, `metavar=`), and in what says
where a thing was seen (`source=`). It may not name one in any other string, nor in a name; nor ask whether a backend is
a certain one (`target.backend == "rocm"`), nor keep a table by backends' names."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from portattn.planning import target_names
from portattn.planning.registry import Registry, own_backends

ROOM = Path(__file__).parents[1] / "portattn"
MODULES = sorted(ROOM.rglob("*.py"))
KNOWN = Registry.load()
BACKENDS = {name for name, backend in own_backends().items() if backend.core_path == "triton"}
# What others have named after a chip: a program that Triton brings, and the variable that stands for it.
ALLOWED_WORDS = ("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH")
ALLOWED_KEYWORDS = ("help", "metavar", "source")
_PREFIX = re.compile(r"^[a-z_]+(?=\d)")


def chip_names() -> dict[str, str]:
    """Pattern of each name -> what it is, for the message of a failure."""
    found: dict[str, str] = {}
    for backend in BACKENDS:
        for arch in KNOWN.arches[backend].values():
            prefix = _PREFIX.match(arch.name)
            assert prefix is not None, f"{arch.name} is letters, then a number"
            # `sm_` and `sm` before a number; `ascend` too, as in Ascend910.
            found[rf"{prefix.group().rstrip('_')}_?\d"] = f"an arch of {backend}"
            for family in arch.families:
                whole = "" if family[-1].isdigit() else r"(?![A-Za-z])"  # ada, and not adapter
                found[re.escape(family).replace("_", "_?") + whole] = f"a family of {backend}"
            for chip in target_names.chips(arch.title):
                for word in re.findall(r"[A-Za-z0-9_]+", chip):
                    # What has no letter or no digit is a word or a number of its own: PRO, 4090, Orin.
                    if len(word) >= 4 and re.search(r"\d", word) and re.search(r"[A-Za-z]", word):
                        found[re.escape(word)] = f"a chip of {backend}:{arch.name}"
    return found


CHIP = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(sorted(chip_names(), key=len, reverse=True))})", re.IGNORECASE)


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of nodes that are docstrings, or strings that stand alone."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def allowed(tree: ast.AST) -> set[int]:
    """Identities of nodes below keywords, and rows of `options`, in which a chip may be named."""
    keywords = [k for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg in ALLOWED_KEYWORDS]
    rows = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and ast.unparse(c.func).endswith("options")]
    return {id(node) for above in (*keywords, *rows) for node in ast.walk(above)}


def identifiers(node: ast.AST) -> list[str]:
    fields = ("id", "attr", "arg", "name", "asname", "module")
    return [value for field in fields if isinstance(value := getattr(node, field, None), str)]


def faults(text: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    skipped = docstrings(tree) | allowed(tree)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        named = identifiers(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = [node.value]
        for name in named:
            if found := CHIP.search(functools.reduce(lambda text, word: text.replace(word, ""), ALLOWED_WORDS, name)):
                yield getattr(node, "lineno", 0), f"names {found.group()!r} in {name!r}"
        if isinstance(node, ast.Compare):
            yield from branches(node)
        if isinstance(node, ast.Dict):
            keys = {key.value if isinstance(key, ast.Constant) else None for key in node.keys}
            if len(keys) > 1 and keys <= set(KNOWN.backends):
                yield node.lineno, f"keeps a table by backends: {', '.join(sorted(keys & BACKENDS))}"
        if isinstance(node, ast.match_case):
            for value in ast.walk(node.pattern):
                if isinstance(value, ast.Constant) and value.value in BACKENDS:
                    yield value.lineno, f"asks for the backend {value.value!r}"


def branches(node: ast.Compare) -> Iterator[tuple[int, str]]:
    """A comparison of what is called a backend or a target with a backend's name."""
    sides = [node.left, *node.comparators]
    asked = " ".join(ast.unparse(side) for side in sides if not isinstance(side, ast.Constant))
    constants = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
    for backend in sorted(BACKENDS & {c for c in constants if isinstance(c, str)}):
        if re.search(r"backend|target", asked, re.IGNORECASE):
            yield node.lineno, f"asks for the backend {backend!r}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOM)))
def test_a_general_module_names_no_chip(path: Path) -> None:
    found = [f"{path}:{line}: {what}" for line, what in faults(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_there_are_modules_and_names() -> None:
    assert len(MODULES) > 200
    assert {"cuda", "rocm", "ascend"} <= BACKENDS
    for backend in BACKENDS:
        for name, arch in KNOWN.arches[backend].items():
            for text in (name, name.upper(), *arch.families):
                assert CHIP.search(text), text


PLANTED = [
    ("if arch.name == 'sm_90': pass", "names 'sm_9'"), ("TARGETS = ('rocm:gfx11*',)", "names 'gfx1'"),
    ("RDNA3 = 1", "names 'RDNA"), ("import portattn.hopper_things", "names 'hopper'"),
    ("x = f'on {y} an H100'", "names 'H100'"), ("def tiles_of_hopper(): pass", "names 'hopper'"),
    ("chip = 'Ascend910B2'", "names 'Ascend9"), ("if target.backend == 'rocm': pass", "asks for the backend 'rocm'"),
    ("if 'ascend' in (backend, other): pass", "asks for the backend 'ascend'"),
    ("match backend:\n  case 'cuda': pass", "asks for the backend 'cuda'"),
    ("T = {'cuda': 1, 'ascend': 2}", "keeps a table by backends: ascend, cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), PLANTED)
def test_a_planted_name_is_found(text: str, said: str) -> None:
    found = [what for _, what in faults(text)]
    assert any(what.startswith(said) for what in found), found


@pytest.mark.parametrize(
    "text",
    [
        '"""As on sm_90."""', "x = 1  # gfx942 has 304", "option(help='such as rocm:gfx942', metavar='sm_90')",
        "Row(source='reproduced for gfx950')", "device = torch.device('cuda', 0)", "if device.type == 'cuda': pass",
        "name = f'{backend}:{arch}'",
    ],
)  # fmt: skip
def test_what_decides_nothing_may_name_a_chip(text: str) -> None:
    assert list(faults(text)) == []
