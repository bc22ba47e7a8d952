"""The examples of docs/operations.md, in one namespace and in order, print what the page says they print."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_examples_of_the_operations_page() -> None:
    text = (DOCS / "operations.md").read_text()
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    namespace: dict[str, object] = {}
    printed = ""
    shown = 0
    for kind, body in blocks:
        if kind == "text":
            assert printed == body
            printed, shown = "", shown + 1
            continue
        assert not printed, f"the page does not show what is printed: {printed}"
        with contextlib.redirect_stdout(io.StringIO()) as output, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a CPU the reference path runs, and says so
            exec(compile(body, "docs/operations.md", "exec"), namespace)
        printed = output.getvalue()
    assert not printed
    assert shown >= 8
