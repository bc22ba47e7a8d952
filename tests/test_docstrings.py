"""Docstrings of the public names: what each must say, and examples that run. A new name without an example is red."""

import doctest
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import portattn
from portattn.schema.problem_limits import OPS

TRANSFORMERS = "integrations.transformers.register"
# Nothing on every machine gives them.
NO_EXAMPLE = ("CompileWarning", "FallbackWarning", "PluginWarning", "TracingWarning")
SHARED = ("attention", "varlen_attention", "shard", "unshard", "positions", "documents")
DECODING = ("decode_attention", "paged_attention", "mla_attention", "append_kv")
METHODS = {"PageTable": ("from_csr", "check", "seqlens"), "Prepared": ("run",)}
NAMES = [name for name in portattn.__all__ if not name.startswith("__")]
SHAPE = re.compile(r"\((?:[A-Z]\w*|\.\.\.)(?: \+ 1)?,[^)]*\)")  # (B, Hq, Sq, D), (Tq, Hq, D), (B + 1,), (..., Sq)


def found(name: str) -> Any:
    if name == TRANSFORMERS:
        from portattn.integrations import transformers

        return transformers.register
    if name.startswith("integrations."):
        module, _, own = name.rpartition(".")
        return getattr(importlib.import_module(f"portattn.{module}"), own)
    value: Any = portattn
    for part in name.split("."):
        value = getattr(value, part)
    return value


FUNCTIONS = [name for name in NAMES if inspect.isfunction(found(name))]
FUNCTIONS += [f"{name}.{method}" for name, methods in METHODS.items() for method in methods]
FUNCTIONS += [f"integrations.sdpa.{name}" for name in ("scaled_dot_product_attention", "route", "explain")]
FUNCTIONS += [f"integrations.sdpa.{n}" for n in ("last_route", "replacement", "register_flash_impl", "flash_impl")]
FUNCTIONS += [f"integrations.flex_attention.{name}" for name in ("flex_attention", "create_block_mask")]
FUNCTIONS += ["distributed.decode_parallel", "distributed.context_parallel"]
FUNCTIONS += [f"distributed.ContextParallel.{name}" for name in SHARED]
CLASSES = [name for name in NAMES if inspect.isclass(found(name)) and name not in NO_EXAMPLE]
FUNCTIONS += [f"distributed.{name}" for name in ("context_parallel_cost", "decode_parallel_cost")]
FUNCTIONS += [f"distributed.DecodeParallel.{name}" for name in DECODING]
FUNCTIONS += [f"distributed.CacheShard.{name}" for name in ("lengths", "positions", "slots")]
CLASSES += [f"distributed.{name}" for name in ("ContextParallel", "DecodeParallel", "CacheShard", "Rates", "Cost")]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
WITH_TRANSFORMERS = [pytest.param(TRANSFORMERS, marks=[pytest.mark.transformers, needs_transformers])]


def examples(value: Any) -> doctest.DocTest:
    text = inspect.getdoc(value) or ""
    return doctest.DocTestParser().get_doctest(text, {}, getattr(value, "__name__", "example"), None, 0)


def lacks_example(value: Any) -> list[str]:
    found = examples(value).examples
    if not found:
        return ["an example"]
    return [
        *(["an example that imports what it uses"] if "import " not in found[0].source else []),
        *(["an example that shows a result"] if not any(one.want for one in found) else []),
    ]


def lacks(function: Callable[..., Any], memory: bool = False) -> list[str]:
    """What a public function's docstring does not say. memory: whether it must speak of memory."""
    text = inspect.getdoc(function) or ""
    summary, *paragraphs = re.split(r"\n\s*\n", text)
    prose = "\n".join(paragraphs)
    missing = []
    if "\n" in summary or not summary.endswith("."):
        missing.append("a summary of one line")
    for section in ("Returns:", *(["Memory"] if memory else [])):
        if not any(paragraph.startswith(section) for paragraph in paragraphs):
            missing.append(f"a paragraph that begins with {section}")
    arguments = next((paragraph for paragraph in paragraphs if paragraph.startswith("Args:")), "")
    lists = re.findall(r"^    (\**\w+(?:, \**\w+)*): ", arguments, re.MULTILINE)
    rows = [name.lstrip("*") for names in lists for name in names.split(", ")]
    signature = inspect.signature(function)
    own = [name for name in signature.parameters if name not in ("self", "cls")]
    missing += [f"a row about {name}" for name in own if name not in rows]
    missing += [f"a parameter {name}, but describes it" for name in rows if name not in own]
    tensors = any("Tensor" in str(one.annotation) for one in signature.parameters.values())
    if tensors and not SHAPE.search(prose):
        missing.append("shapes")
    return missing + lacks_example(function)


@pytest.mark.parametrize("name", [*FUNCTIONS, *WITH_TRANSFORMERS])
def test_a_public_function_says_what_a_caller_must_know(name: str) -> None:
    assert lacks(found(name), memory=name in (*OPS, "merge_states", "prepare")) == []


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_has_a_docstring_with_an_example(name: str) -> None:
    value = found(name)
    assert value.__doc__
    assert value.__doc__ != value.__base__.__doc__
    assert lacks_example(value) == []


def test_every_public_name_is_looked_at() -> None:
    """A name that is added is a function, a class, or one of the few without examples."""
    assert set(FUNCTIONS) | set(CLASSES) | set(NO_EXAMPLE) >= set(NAMES)
    assert {"attention", "merge_states", "target", "settings"} <= set(FUNCTIONS)
    assert all(issubclass(found(name), Warning) and found(name).__doc__ for name in NO_EXAMPLE)
    assert all(hasattr(found(name), method) for name, methods in METHODS.items() for method in methods)


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES, *WITH_TRANSFORMERS])
def test_the_examples_are_right(name: str) -> None:
    test, said = examples(found(name)), list[str]()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", portattn.FallbackWarning)
        torch.manual_seed(0)
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert said == [], "".join(said)


def complete(q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return twice the queries.

    Args:
        q: (B, Hq, Sq, D)
        out: receives them, (B, Hq, Sq, D)

    Returns:
        out.

    Examples:
        >>> import torch
        >>> torch.ones(1) * 2
        tensor([2.])"""
    raise NotImplementedError


@pytest.mark.parametrize(
    ("removed", "missing"),
    [
        ("Return twice the queries.\n", "a summary of one line"),
        ("    Returns:\n", "a paragraph that begins with Returns:"),
        ("    out: receives them, (B, Hq, Sq, D)\n", "a row about out"),
        (", (B, Hq, Sq, D)\n", "shapes"),
        ("        >>> import torch\n", "an example that imports what it uses"),
        ("\n        tensor([2.])", "an example that shows a result"),
    ],
)
def test_a_docstring_that_lacks_something_is_red(removed: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacks(complete) == []
    assert lacks(complete, memory=True) == ["a paragraph that begins with Memory"]
    text = complete.__doc__ or ""
    assert removed in text
    text = text.replace("    q: (B, Hq, Sq, D)\n", "    q: queries\n") if missing == "shapes" else text
    monkeypatch.setattr(complete, "__doc__", text.replace(removed, "\n" if missing == "shapes" else ""))
    assert missing in lacks(complete)
    monkeypatch.setattr(complete, "__doc__", text.partition(">>>")[0])
    assert "an example" in lacks(complete)
    monkeypatch.setattr(complete, "__doc__", text.replace("2.]", "3.]"))
    said = list[str]()
    doctest.DocTestRunner(verbose=False).run(examples(complete), out=said.append)
    assert any("tensor([3.])" in one for one in said)
