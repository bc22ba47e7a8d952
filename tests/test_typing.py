"""Type checkers know an operation's result from its flag, and pass the examples: mypy always, pyright if installed."""

import importlib
import inspect
import json
import operator
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
from places import ROOT

FLASH = (
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
)  # fmt: skip
FUNCTIONS = {
    "portattn": ("attention", "varlen_attention", "decode_attention", "paged_attention", "sparse_attention",
                 "block_sparse_attention", "mla_attention"),
    "portattn.integrations.flash_attn": FLASH, "portattn.integrations.flash_attn.flash_attn_interface": FLASH,
    "portattn.integrations.flash_attn_interface": ("flash_attn_func", "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    "portattn.distributed": ("ContextParallel.attention", "ContextParallel.varlen_attention",
                             "DecodeParallel.decode_attention", "DecodeParallel.paged_attention",
                             "DecodeParallel.mla_attention"),
}  # fmt: skip
FLAGS = {"return_lse": 2, "return_softmax_lse": 2, "return_attn_probs": 3}  # results with the flag
FLAGS_3 = {"return_softmax_lse": 4, "return_attn_probs": 2}  # of FlashAttention-3
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "typing_stubs.py"))
# transformers' configurations take it by **kwargs, which pyright does not see behind their dataclass decorator.
OF_TRANSFORMERS = 'No parameter named "attn_implementation"'


def _flag_of(function: object) -> str:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    return next((name for name in parameters if name in FLAGS), "return_lse")  # DecodeParallel has it as an option


def _function(module: str, name: str) -> object:
    return operator.attrgetter(name)(importlib.import_module(module))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed layout, by links: checkers do not read the mapping of backends/ to portattn.backends."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "portattn").mkdir()
    for source in [*(ROOT / "portattn").iterdir(), ROOT / "backends", ROOT / "quirks"]:
        (folder / "portattn" / source.name).symlink_to(source)
    shutil.copytree(ROOT / "examples", folder / "examples")  # pyright takes no file outside its project
    return folder


@pytest.fixture(scope="module")
def calls(tree: Path) -> tuple[Path, set[int]]:
    lines = ["from typing import assert_type", "import numpy", "from torch import Tensor", "import portattn"]
    lines += [
        "import portattn.distributed, portattn.integrations.flash_attn.flash_attn_interface",
        "import portattn.integrations.flash_attn_interface",
        "def run(q: Tensor, wanted: bool) -> None:",
    ]
    refused = set()
    for module, names in FUNCTIONS.items():
        for name in names:
            function = _function(module, name)
            flag, parameters = _flag_of(function), inspect.signature(function).parameters  # type: ignore[arg-type]
            needed = [p for p in parameters.values() if p.default is p.empty and p.name not in ("self", "options")]
            given = ", ".join(f"{p.name}={'q' if 'Tensor' in p.annotation else '1'}" for p in needed)
            count = (FLAGS_3 if module == "portattn.integrations.flash_attn_interface" else FLAGS)[flag]
            several = f"tuple[{', '.join(['Tensor'] * count)}]"
            call = f"{module}.{name}".replace("ContextParallel", "context_parallel()")
            call = call.replace("DecodeParallel", "decode_parallel()")
            lines += [
                f"    assert_type({call}({given}), Tensor)",
                f"    assert_type({call}({given}, {flag}=False), Tensor)",
                f"    assert_type({call}({given}, {flag}=True), {several})",
                f"    assert_type({call}({given}, {flag}=wanted), Tensor | {several})",
            ]
            unknown = [] if "options" in parameters else [f"{given}, no_such=1)"]
            for wrong in (f"{given}, {flag}=True).shape", *unknown, ")"):
                lines.append(f"    {call}({wrong}")
                refused.add(len(lines))
    by_position = "q, q, q, 0.0, None, False, (-1, -1), 0.0, None, False, True"
    call = f"portattn.integrations.flash_attn.flash_attn_func({by_position})"
    lines.append(f"    assert_type({call}, tuple[Tensor, Tensor, Tensor])")
    flash = "portattn.integrations.flash_attn.flash_attn_func(q, q, q"
    for window in ("[1, 1]", "(numpy.int32(1), q)", "(None, None)", "q", "numpy.array([1, 1])"):
        lines.append(f"    {flash}, window_size={window})")
    for name in ("flash_attn", "flash_attn_interface"):
        lines.append(f"    portattn.integrations.{name}.flash_attn_varlen_func(q, q, q, q, q, q.max(), q.max())")
    for number in ("q", "1", "numpy.float32(0.1)", "numpy.array(0.1)"):
        lines.append(f"    {flash}, {number}, softmax_scale={number}, softcap={number})")
        lines.append(f"    portattn.attention(q, q, q, scale={number}, softcap={number}, dropout_p={number})")
    for wrong in (f"{flash}, window_size=1)", f"{flash}, softmax_scale='1')", "portattn.attention(q, q, q, scale='1')"):
        lines.append(f"    {wrong}")
        refused.add(len(lines))
    lines.append('    out: Tensor = portattn.prepare("attention", q, q, q).run(q, q, q)')
    path = tree / "calls.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path, refused


@pytest.mark.parametrize("package", SCRIPT["PACKAGES"])
def test_stubs_are_up_to_date(package: str) -> None:
    assert SCRIPT["path_of"](package).read_text(encoding="utf-8") == SCRIPT["stub_of"](package)


def test_overloads_have_the_parameters_of_the_signatures() -> None:
    for package in SCRIPT["PACKAGES"]:
        namespace: dict[str, object] = {}
        found: list[FunctionType] = []
        text = SCRIPT["path_of"](package).read_text(encoding="utf-8").replace("@overload", "@_keep")
        namespace["_keep"] = found.append
        exec(compile(f"from __future__ import annotations\n{text}", package, "exec"), namespace)
        module = package.replace("/", ".")
        known = FUNCTIONS["portattn" if package == "portattn/api/ops" else module]
        assert {one.__qualname__ for one in found} == set(known)
        for one in found:
            overload = inspect.signature(one).parameters
            signature = inspect.signature(_function(module, one.__qualname__)).parameters  # type: ignore[arg-type]
            assert [name for name in overload if name not in FLAGS] == [name for name in signature if name not in FLAGS]
            for name, parameter in signature.items():
                if name not in FLAGS and name != "self":
                    assert overload[name].annotation == parameter.annotation
                    assert overload[name].default in (parameter.default, parameter.empty)


def test_the_api_reference_reads_the_modules_and_not_the_stubs() -> None:
    griffe = pytest.importorskip("griffe", reason="griffe is of the extra `docs`")
    extensions = griffe.load_extensions(str(ROOT / "scripts" / "griffe_stubs.py"))
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)], extensions=extensions)
    loader.load("portattn")
    loader.resolve_aliases(implicit=True)
    for name in ("attention", "distributed.ContextParallel.attention", "distributed.context_parallel"):
        assert loader.modules_collection[f"portattn.{name}"].docstring, name


def _errors(lines: list[tuple[str, int, str]], calls: tuple[Path, set[int]]) -> tuple[list[str], set[int]]:
    """Return the errors that must not be, and the lines of calls.py that are refused."""
    path, refused = calls
    there = {line for file, line, _ in lines if Path(file).name == path.name}
    return [f"{f}:{n}: {text}" for f, n, text in lines if Path(f).name != path.name or n not in refused], there


def test_mypy_passes_the_examples_and_knows_the_results(tree: Path, calls: tuple[Path, set[int]]) -> None:
    pytest.importorskip("mypy", reason="mypy is of the extra `lint`")
    examples = sorted(map(str, (tree / "examples").glob("*.py")))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(calls[0]), *examples],
        cwd=tree, env=os.environ | {"MYPYPATH": str(tree)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    errors, refused = _errors([(file, int(line), text) for file, line, text in found], calls)
    assert (errors, refused) == ([], calls[1])


def test_pyright_passes_the_examples_and_knows_the_results(tree: Path, calls: tuple[Path, set[int]]) -> None:
    pytest.importorskip("pyright", reason="pyright is of the extra `lint`")
    config = tree / "pyrightconfig.json"
    settings = {
        "include": ["calls.py", "examples/*.py"], "extraPaths": [str(tree)], "pythonVersion": "3.11",
        "reportMissingImports": "none",  # transformers
        "reportPrivateImportUsage": "none",  # torch's own names
    }  # fmt: skip
    config.write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(config), "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1 + len(list((ROOT / "examples").glob("*.py"))), done.stderr
    found = [
        (one["file"], one["range"]["start"]["line"] + 1, one["message"])
        for one in report["generalDiagnostics"]
        if one["severity"] == "error" and not one["message"].startswith(OF_TRANSFORMERS)
    ]
    errors, refused = _errors(found, calls)
    assert (errors, refused) == ([], calls[1])
