"""What every compiler has to parse: kernels' sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import portattn

KERNELS = sorted((Path(portattn.__file__).parent / "kernels").glob("*.py"))


def jitted(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
            yield node


def long_conditions(source: str) -> list[str]:
    """`a and b and c` in a kernel: Triton 3.2, and so triton-ascend 3.2.0, takes two values at a time."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for kernel in jitted(ast.parse(source))
        for node in ast.walk(kernel)
        if isinstance(node, ast.BoolOp) and len(node.values) > 2
    ]


def test_what_is_found() -> None:
    kernel = "@triton.jit\ndef kernel(A: tl.constexpr):\n    if {}:\n        pass\n"
    assert long_conditions(kernel.format("A == 1 or A == 2 or A == 3")) == ["line 3: A == 1 or A == 2 or A == 3"]
    assert long_conditions(kernel.format("A == 1 or (A == 2 or A == 3)")) == []


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_conditions_have_two_values(path: Path) -> None:
    assert long_conditions(path.read_text(encoding="utf-8")) == []
