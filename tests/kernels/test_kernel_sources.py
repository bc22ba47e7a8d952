"""What every compiler has to parse: kernels' sources."""

import ast
import importlib
import inspect
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kernel_cases import check

import portattn
from portattn.tools.bench.cases import SETS
from portattn.tools.bench.contenders import own
from portattn.tools.bench.gate import admit, as_call
from portattn.tools.bench.tensors import Tensors
from portattn.worker.client import Worker

KERNELS = sorted((Path(portattn.__file__).parent / "kernels").glob("*.py"))


def jitted(tree):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
            yield node


def long_conditions(source):
    """`a and b and c` in a kernel: Triton 3.2, and so triton-ascend 3.2.0, takes two values at a time."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}" for kernel in jitted(ast.parse(source)) for node in ast.walk(kernel)
        if isinstance(node, ast.BoolOp) and len(node.values) > 2
    ]  # fmt: skip


def test_what_is_found():
    kernel = "@triton.jit\ndef kernel(A: tl.constexpr):\n    if {}:\n        pass\n"
    assert long_conditions(kernel.format("A == 1 or A == 2 or A == 3")) == ["line 3: A == 1 or A == 2 or A == 3"]
    assert long_conditions(kernel.format("A == 1 or (A == 2 or A == 3)")) == []


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_conditions_have_two_values(path):
    assert long_conditions(path.read_text(encoding="utf-8")) == []


SECONDS = 300.0
SOURCE = Path(__file__).parent.parent / "record_kernels.py"
KERNELS_RECORDS = Path(portattn.__file__).parent / "kernels"
MODULES = [
    path.stem for path in sorted(KERNELS_RECORDS.glob("*.py")) if "@records.jit" in path.read_text(encoding="utf-8")
]


def kernels():
    return importlib.import_module("record_kernels")


def test_records_are_their_fields(device):
    x, y = (torch.randn(5, 16, device=device.name) for _ in range(2))
    out = torch.empty_like(x)
    kernels().add_rows[(1,)](x, y, out, x.stride(0), 5, 16)
    torch.testing.assert_close(out, x + (y * 2 + 1 + 1))


def test_arguments_of_an_entry_point_stay(device):
    assert kernels().add_rows.arg_names == ["x", "y", "out", "stride", "count", "WIDTH"]
    names = ["rows·base", "rows·stride", "rows·WIDTH", "rows·scale·factor", "rows·scale·ABOVE", "row", "more"]
    assert kernels().load.arg_names == names


def calls(tree):
    found = [(node.lineno, ast.unparse(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted((line, name.replace("·", ".")) for line, name in found if not re.match(r"[A-Z]|.*_replace$", name))


@pytest.mark.parametrize("module", ["record_kernels", *(f"portattn.kernels.{name}" for name in MODULES)])
def test_each_line_keeps_its_number(device, module):
    """Of every function: the same calls in the same lines, and the code's own file and first line."""
    from portattn.kernels import records

    loaded = importlib.import_module(module)
    lines = inspect.getsource(loaded).splitlines(keepends=True)
    functions = [value for value in vars(loaded).values() if hasattr(getattr(value, "fn", None), "portattn_records")]
    for function in (value.fn for value in functions if value.__module__ == module):
        defined = function.__code__.co_firstlineno
        assert lines[defined - 1].startswith(f"def {function.__name__}(")
        assert function.__code__.co_filename == loaded.__file__
        block = inspect.getblock(lines[defined - 1 :])
        text = records._Rewriting(function, block, defined - 1).text()
        assert text.count("\n") == len(block)
        assert calls(ast.parse(text)) == calls(ast.parse("".join(block)))


def compiled(source, function, types):
    """The worker's reply to a request to compile a function of `source` with WIDTH 16 for sm_90."""
    signature = {
        "module": source.stem, "function": function, "file": str(source), "absent": [], "types": types,
        "constants": {"WIDTH": 16}, "divisible": [], "small": [], "options": {"num_warps": 1},
    }  # fmt: skip
    with Worker() as worker:
        reply = worker.request("compile", SECONDS, signature=signature, target=["cuda", 90, 32], env={}, facts="text")
    if reply.outcome == "error" and reply.kind in ("ImportError", "ModuleNotFoundError"):
        pytest.skip(reply.message)
    return reply


@pytest.mark.compiles
def test_debug_lines_of_compiled_code():
    """The text that Triton compiles has the lines of the file."""
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "stride": "i32", "count": "i32"}
    reply = compiled(SOURCE, "add_rows", types)
    assert reply.outcome == "ok", reply
    text = str(reply.facts["ptx"])
    files = dict(re.findall(r'\.file\s+(\d+) "(?:[^"]*/)?([^"/]+)"', text))
    located = re.findall(r"\.loc\s+(\d+) (\d+)", text)
    places = {(files[number], int(line)) for number, line in located if number in files}
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    seen = {line for file, line in places if file == "record_kernels.py"}
    at = {name: next(n for n, line in enumerate(lines, 1) if name in line) for name in ("tl.load(", "tl.store(")}
    assert at["tl.store("] in seen
    assert seen & set(range(at["tl.load("], at["tl.load("] + 5))  # the call's lines
    assert all(lines[line - 1].strip() for line in seen)


@pytest.mark.compiles
def test_errors_quote_the_text_of_the_file(tmp_path):
    """The mark is below the call that failed, though records stand before it in its line."""
    quoted = "    y = load(Rows(x, 1, WIDTH), 0, 0.0) + load(Rows(x, 1, WIDTH), 0, tl.no_such_function(x))"
    source = tmp_path / "failing_kernels.py"
    text = SOURCE.read_text(encoding="utf-8")
    source.write_text(f"{text}\n@records.jit\ndef failing(x, WIDTH: tl.constexpr):\n{quoted}\n", encoding="utf-8")
    reply = compiled(source, "failing", {"x": "*fp32"})
    assert reply.kind == "CompilationError", reply
    assert f"{quoted}\n{' ' * quoted.index('tl.no_such_function')}^" in reply.message


HEAD = """
    from typing import Any, NamedTuple
    import triton
    import triton.language as tl
    from portattn.kernels import records
    class Rows(NamedTuple):
        base: Any
        stride: Any = 0
    class Other(NamedTuple):
        base: Any
    @records.jit
    def takes(rows: Rows, x):
        return rows.base + x
    @triton.jit
    def plain(x):
        return x
    @records.jit
    def wrong(rows: Rows, x):
"""
WRONG = {
    "y = rows": "rows is a Rows: its fields have values, and functions take it",
    "y = rows.bas": "rows.bas is no field of a Rows", "rows.base = x": "a field of rows is not assigned to",
    "y = takes(x, rows)": "takes is given no record, but declares Rows",
    "y = takes(Other(x), x)": "takes is given Other, but declares Rows",
    "y = plain(rows)": "plain is given Rows, but declares no record",
    "y = takes(Rows(x, 1, 2), x)": "a Rows has the fields base, stride",
    "y = takes(Rows(stride=x), x)": "a Rows needs base", "y = takes(Rows(base=rows), x)": "base of a Rows must be Any",
    "y, z = Rows(x), x\n        w = Rows(x) + 1": "a Rows is given a name, or to a function",
    "rows = Rows(x)": "rows is a record, and has another value elsewhere",
    "y = Rows(x)\n        x = x + 1": "x is a field of a record made in line",
}  # fmt: skip


@pytest.mark.parametrize("statement", WRONG)
def test_what_is_refused(device, tmp_path, statement):
    path = tmp_path / "wrong_records.py"
    path.write_text(textwrap.dedent(HEAD + "        " + statement + "\n        return x\n"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("wrong_records", path)
    with pytest.raises(TypeError, match=re.escape(WRONG[statement])) as raised:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    line = path.read_text(encoding="utf-8").splitlines().index("    " + statement.partition("\n")[0]) + 1
    assert re.match(rf"{re.escape(str(path))}:({line}|{line + 1}): ", str(raised.value))


CASES = {case.name: case for case in SETS["seed"]}
# What is smaller: batches, heads and lengths. Groups of heads, their widths, pages and the share of tokens stay.
SMALLER: dict[str, dict[str, Any]] = {
    "seed prefill causal": {"batch": 1, "heads_q": 8, "heads_k": 2, "seq_q": 48, "seq_k": 48},
    "seed prefill padded": {
        "batch": 4, "heads_q": 4, "heads_k": 1, "seq_q": 32, "seq_k": 32, "lengths_q": (4, 12, 20, 32),
        "lengths_k": (4, 12, 20, 32),
    },
    "seed decode": {"batch": 2, "heads_q": 8, "heads_k": 2, "seq_k": 100},
    "seed paged decode": {"seq_k": 64, "lengths_k": (62, 58, 63)},
    "seed sparse": {"heads_q": 8, "heads_k": 2, "seq_k": 1000, "tokens": 20},
    "seed sparse magicpig": {"heads_q": 8, "heads_k": 2, "seq_k": 1000, "tokens": 20},
    "seed sparse paged": {"heads_q": 4, "heads_k": 4, "seq_k": 800, "tokens": 16},
}  # fmt: skip


@pytest.mark.parametrize(("name", "parts"), [(n, 1) for n in CASES] + [(n, 3) for n in CASES if CASES[n].reads_cache])
def test_a_seed_kernels_case_scaled_down(device, name, parts):
    case = msgspec.structs.replace(CASES[name], **SMALLER[name])
    assert case.group == CASES[name].group
    call = as_call(case, Tensors.random(case, torch.device(device.name)))
    check(device, replace(call, problem=msgspec.structs.replace(call.problem, return_lse=True)), parts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_seed_kernels_case(name):
    """As a user calls it, compared on a sample of sequences, heads and rows: one pair of them at a time in float64."""
    case = CASES[name]
    tensors = Tensors.random(case, torch.device("cuda"))
    admitted = admit(case, tensors, own(case, tensors, backend="triton"))
    assert admitted.refused == {}
    assert max(admitted.errors.values()) <= admitted.budget
